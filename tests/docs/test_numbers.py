"""Every number in prose comes from a cell or from the page of results, which has its command."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results.md"
PAGES = [ROOT / "README.md", ROOT / "tutorials" / "README.md", *(ROOT / "docs").glob("*.md")]
PAGES = sorted(page for page in PAGES if page != RESULTS)
NOTEBOOKS = sorted((ROOT / "tutorials").glob("[0-9]*.ipynb"))
# What is measured has a decimal point or three digits; counts of words and years are read as such.
NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*\.\d+(?:\.\d+)*|\d[\d,]{2,})(?![\w])")
YEAR = re.compile(r"(?:19|20)\d\d")


def numbers(text: str) -> set[str]:
    found = (number.replace(",", "") for number in NUMBER.findall(text))
    return {number for number in found if not YEAR.fullmatch(number)}


def prose(text: str) -> str:
    """Without code and links' targets; formulas stay."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


def shown(path: Path) -> Iterator[str]:
    """What the cells of a notebook print, and their code, whose constants prose may repeat."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])
            for output in cell["outputs"]:
                yield "".join(output.get("text", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: "-".join(page.parts[-2:]))
def test_numbers_of_pages(page: Path) -> None:
    sources = [RESULTS, ROOT / "pyproject.toml"]  # which has versions and the license
    known = numbers("\n".join(path.read_text(encoding="utf-8") for path in sources))
    for path in NOTEBOOKS:
        known |= numbers("\n".join(shown(path)))
    assert numbers(prose(page.read_text(encoding="utf-8"))) <= known


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_numbers_of_notebooks(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert numbers(prose(text)) <= numbers("\n".join(shown(path)))


def test_the_readme_and_migration_repeat_the_results() -> None:
    """Tables that are in two pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    migration = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    page = RESULTS.read_text(encoding="utf-8")
    block = re.search(r"^```\nloss .*?^```$", readme, re.M | re.S)
    assert block
    estimates = re.findall(r"-?\d+\.\d+ ± \d+\.\d+", block.group())
    assert len(estimates) == 7
    assert all(estimate in page for estimate in estimates)
    table = migration[migration.index("| what happens") :].split("\n\n")[0]
    cells = [cell.strip() for cell in table.split("|") if re.search(r"\d[.,)]", cell)]
    assert len(cells) == 8
    assert all(cell in page for cell in cells if not cell.startswith(("A ", "Mini")))


def script(command: str) -> Path | None:
    """The file that ``python tutorials/x.py ...``, ``python -m tests.x`` or a path names."""
    found = re.match(r"(?:PYTHONPATH=\. )?python (-m )?(\S+)|([\w/]+\.py)\b", command)
    if not found:
        return None
    name = found[2] or found[3]
    names = [name]
    if found[1]:
        names = [name.replace(".", "/") + end for end in (".py", "/__main__.py")]
    folders = ("", "tutorials", "tests/benchmarks")
    places = [ROOT / folder / name for folder in folders for name in names]
    assert any(path.exists() for path in places), command
    return next(path for path in places if path.exists())


def test_commands_of_the_results_exist() -> None:
    """A section's flags are those of a script that it names."""
    for section in re.split(r"^## ", RESULTS.read_text(encoding="utf-8"), flags=re.M):
        code = re.findall(r"`([^`]*)`", section.replace("\n", " "))
        scripts = {path for path in map(script, code) if path}
        source = "".join(path.read_text(encoding="utf-8") for path in scripts)
        flags = {flag for c in code for flag in re.findall(r"--[a-z][\w-]*", c)}
        assert all(f'"{flag}"' in source for flag in flags) or not scripts, section[:40]
