"""How much code one leads a reader through: files, classes, functions and lines that a step enters.

    python -m tests.benchmarks.reading_path

A line of code is one that is neither blank, nor a comment, nor of a docstring; of a function that a
warm step enters all lines count, whether they ran or not.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_mcvae
from pyro_mcvae import (
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)

PACKAGE = Path(pyro_mcvae.__file__).parent
DOCSTRING_OWNERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


class VAE(nn.Module):
    """Of four latents; a discrete one, too, if it is asked for."""

    def __init__(self, discrete: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.discrete = nn.Linear(6, 8), nn.Linear(4, 6), discrete

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(4), 1.0).to_event(1))
            if self.discrete:
                z = z + pyro.sample("c", dist.Categorical(torch.ones(3))).unsqueeze(-1)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))
            if self.discrete:
                pyro.sample("c", dist.Categorical(logits=loc[:, :3]))


# --- What a step enters ---------------------------------------------------------------------------


def entered(step: Callable[[], Any]) -> list[CodeType]:
    """
    The functions of the package that are called, in the order of the first time; lambdas and
    comprehensions as their own.
    """
    result: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
            result[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return list(result)


@cache
def lines_of_code(file: str) -> frozenset[int]:
    source = Path(file).read_text()
    lines = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCSTRING_OWNERS) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return frozenset(lines)


@cache
def definitions(file: str) -> dict[tuple[str, int], tuple[range, str | None]]:
    """Of each function, by name and first line: its lines, decorators included, and its class."""
    tree = ast.parse(Path(file).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owners = {member: node.name for node in classes for member in node.body}
    result = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            extent = range(first, (node.end_lineno or first) + 1)
            result[node.name, first] = extent, owners.get(node)
    return result


def counted(step: Callable[[], Any]) -> tuple[int, int, int, int]:
    """Files, classes, functions and lines of code."""
    functions, classes, lines = set(), set(), set()
    for code in entered(step):
        file = code.co_filename
        result = definitions(file).get((code.co_name, code.co_firstlineno))
        if result is None:  # a lambda or comprehension: a part of its function
            continue
        extent, owner = result
        functions.add(code)
        if owner is not None:
            classes.add((file, owner))
        lines |= {(file, line) for line in extent if line in lines_of_code(file)}
    return len({c.co_filename for c in functions}), len(classes), len(functions), len(lines)


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "SGVB": lambda: TraceSGVB_ELBO(),
    "IWAE-10": lambda: TraceIWAE_ELBO(10),
    "SIS-5, ULA": lambda: TraceSIS_ELBO(5, ULA()),
    "SIS-5": lambda: TraceSIS_ELBO(5),
    "AIS-5": lambda: TraceAIS_ELBO(5),
    "Rao-Blackwell": lambda: TraceRaoBlackwell_ELBO(),
}


def measured(name: str) -> tuple[int, int, int, int]:
    """Of a warm step of this objective: files, classes, functions and lines of code."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    vae, x = VAE(name == "Rao-Blackwell"), torch.ones(5, 6)
    svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=OBJECTIVES[name]())
    for _ in range(4):  # the next one is not analysed
        svi.step(x)
    return counted(partial(svi.step, x))


def main() -> None:
    print(
        "| objective | files | classes | functions | lines of code |\n| --- " + "| ---: " * 4 + "|"
    )
    for name in OBJECTIVES:
        print(f"| {name} | " + " | ".join(map(str, measured(name))) + " |")


if __name__ == "__main__":
    main()
