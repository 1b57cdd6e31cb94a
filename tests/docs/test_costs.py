"""The cost table of docs/costs.md, counted."""

import ast
import gc
import math
import operator
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_mcvae as mc
from tests.cases import some_slow

PAGE = Path(__file__).parents[2] / "docs" / "costs.md"
SIZES = {"K": 5, "P": 3, "L": 2, "k": 2, "n": 2, "S": 6, "C": 8, "c": 2}
DATA, DIM = 4, 6


class Sum:
    """A sum of what programs add. Runs do not put back what a queue of C holds."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[float] = SimpleQueue()

    def add(self, number: float) -> None:
        self._queue.put(number)

    def take(self) -> float:
        return sum(self._queue.get() for _ in range(self._queue.qsize()))


class Count:
    """Counts the data's copies that pass through the decoder, forwards and backwards."""

    def __init__(self) -> None:
        self.forward, self.backward, self.encoded = Sum(), Sum(), Sum()
        self._kept: SimpleQueue[tuple[weakref.ref[Tensor], float]] = SimpleQueue()
        count = self

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.copies = math.prod(x.shape[:-1]) / DATA
                count.forward.add(ctx.copies)
                saved = torch.zeros(1)
                ctx.save_for_backward(saved)
                count._kept.put((weakref.ref(saved), ctx.copies))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                count.backward.add(ctx.copies)
                _ = ctx.saved_tensors  # As a real operator, for which a checkpoint runs again.
                return gradient.clone()

        self.node = Node.apply

    def alive(self) -> float:
        gc.collect()
        kept = [self._kept.get() for _ in range(self._kept.qsize())]
        return sum(copies for saved, copies in kept if saved() is not None)


class Programs(nn.Module):
    def __init__(self, discrete: bool) -> None:
        super().__init__()
        self.discrete = discrete
        self.decoder, self.encoder = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.count = Count()

    def model(self, x: Tensor) -> None:
        with pyro.plate("data", DATA):
            if self.discrete:
                z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(DIM)).to_event(1))
            else:
                z = pyro.sample("z", dist.Normal(torch.zeros(DIM), 1.0).to_event(1))
            # The weights carry the gradient where z does not.
            hidden = self.count.node(self.decoder(z.expand(*z.shape[:-2], DATA, DIM)))
            pyro.sample("x", dist.Normal(hidden, 1.0).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        self.count.encoded.add(1)
        loc, scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", DATA):
            if self.discrete:
                pyro.sample("z", dist.Bernoulli(logits=loc).to_event(1))
            else:
                pyro.sample("z", dist.Normal(loc, scale.exp()).to_event(1))


K, P, L, k, n, S, C, c = SIZES.values()
MANY = {"vectorize_particles": True, "max_plate_nesting": 1}
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "SGVB": lambda: mc.TraceSGVB_ELBO(P, **MANY),
    "IWAE": lambda: mc.TraceIWAE_ELBO(K, **MANY),
    "SIS": lambda: mc.TraceSIS_ELBO(K, num_particles=P, **MANY),
    "SIS, reweighted": lambda: mc.TraceSIS_ELBO(
        K, num_particles=P, gradient_estimator="reweighted", **MANY
    ),
    "AIS": lambda: mc.TraceAIS_ELBO(K, num_particles=P, **MANY),
    "AIS, MALA": lambda: mc.TraceAIS_ELBO(K, mc.MALA(), num_particles=P, **MANY),
    "AIS, HMC": lambda: mc.TraceAIS_ELBO(K, mc.HMC(num_leapfrog=L), num_particles=P, **MANY),
    "AIS, random walk": lambda: mc.TraceAIS_ELBO(K, mc.RandomWalk(), num_particles=P, **MANY),
    "Rao-Blackwell": lambda: mc.TraceRaoBlackwell_ELBO(k, n, max_plate_nesting=1),
    "Rao-Blackwell, REINFORCE+": lambda: mc.TraceRaoBlackwell_ELBO(
        k, n, baseline=mc.IndependentDraw(), max_plate_nesting=1
    ),
    "Truncated": lambda: mc.TraceTruncated_ELBO(max_plate_nesting=1),
    "Truncated, few children": lambda: mc.TraceTruncated_ELBO(max_plate_nesting=1),
}
DISCRETE = ("Rao-Blackwell", "Truncated")


def rows() -> dict[str, list[str]]:
    """The table: objective, passes, gradients, kept."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| objective | passes") :].split("\n\n")[0].splitlines()[2:]
    cells = [[c.strip().strip("`") for c in line.strip("|").split("|")] for line in table]
    return {row[0]: row[1:4] for row in cells}


def value(formula: str) -> float:
    """A sum of products of the table's letters."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def evaluate(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left, op, right):
                return operators[type(op)](evaluate(left), evaluate(right))
            case ast.Name(name):
                return SIZES[name]
            case ast.Constant(number):
                return number
        raise AssertionError(f"{formula!r} is no sum of products")

    return evaluate(ast.parse(formula.replace("·", "*"), mode="eval").body)


def counted(name: str) -> tuple[float, float, float]:
    programs = Programs(name.startswith(DISCRETE))
    guide: Any = programs.guide
    if name.startswith("Truncated"):
        children = c if "few" in name else C
        evolution = mc.EvolutionaryUpdate(2, children // 2, 1, mutation=mc.UniformFlips())
        guide = mc.TruncatedPosterior(programs.model, S, evolution=evolution, max_plate_nesting=1)
    loss = OBJECTIVES[name]()(programs.model, guide)
    x = torch.randn(DATA, DIM)
    for _ in range(4):  # The first, second and fourth find out about the programs.
        loss(x).backward()
    count = programs.count
    for part in (count.forward, count.backward):
        part.take()
    count.alive()
    surrogate = loss(x)
    kept, inside = count.alive(), count.backward.take()
    surrogate.backward()
    return count.forward.take(), inside, kept


def test_the_table_has_every_objective() -> None:
    assert list(rows()) == list(OBJECTIVES)


# Each kind of objective and of chain; the others differ in a kernel or an estimator.
SLOW = (
    *("AIS", "AIS, MALA", "AIS, random walk", "IWAE", "Rao-Blackwell, REINFORCE+"),
    *("SIS, reweighted", "Truncated", "Truncated, few children"),
)


@pytest.mark.parametrize("name", some_slow(OBJECTIVES, *SLOW))
def test_costs(name: str) -> None:
    result, written = counted(name), tuple(value(cell) for cell in rows()[name])
    assert result == written
