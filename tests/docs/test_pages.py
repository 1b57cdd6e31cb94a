"""The pages of the documentation: every Python example runs, and every name exists."""

import re
from pathlib import Path

import pytest
import torch

import pyro_mcvae

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
NAME = re.compile(r"\{(?:class|func|meth)\}`~?pyro_mcvae\.(\w+)`")


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("page", ["extend.md", "migration.md"])
def test_examples_run(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    examples = EXAMPLE.findall(text)
    assert examples
    # One program from top to bottom, as a reader pastes it; line numbers are the page's.
    source = re.sub(r"[^\n]", "", text)
    lines = source.split("\n")
    for match in EXAMPLE.finditer(text):
        start = text[: match.start(1)].count("\n")
        for i, line in enumerate(match.group(1).splitlines()):
            lines[start + i] = line
    exec(compile("\n".join(lines), str(DOCS / page), "exec"), {"__name__": page})


def test_names_exist():
    for page in DOCS.glob("*.md"):
        for name in NAME.findall(page.read_text(encoding="utf-8")):
            assert hasattr(pyro_mcvae, name), f"{page.name}: {name}"
