"""The pages of the documentation: every Python example runs, and every name exists."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import pyro_mcvae
from tests.cases import some_slow

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"^```(?:python|\{code-block\} python)\n(.*?)^```$", re.M | re.S)
# Links, and not Sphinx's roles: these pages are read in the repository as well.
NAME = re.compile(r"\[`(\w+)`\]\((api/\w+\.md)\)")


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


# Each is one program from top to bottom.
PROGRAMS = [
    *("chains_and_draws.md", "choose.md", "deploy.md", "diagnose.md", "extend.md", "migration.md"),
    *("programs.md", "recipes.md", "special_cases.md", "upstream.md"),
]
# Each of these takes more than two seconds.
LONG = "chains_and_draws.md", "choose.md", "diagnose.md", "recipes.md"


# Numbers that are smaller here, of pages that print no result of theirs.
FEW = {
    "choose.md": {
        "range(100)": "range(5)",
        "report(model, guide, x, seed=0)": "report(model, guide, x, schedule=4, warmup=2, seed=0)",
    },
    "diagnose.md": {
        "schedule=100": "schedule=10",
        "num_particles=50": "num_particles=50, warmup=2",
    },
    "recipes.md": {
        "range(200)": "range(5)",
        "range(20)": "range(3)",
        "num_steps=20": "num_steps=2",
        "(500, 1000)": "(20, 40)",
        "report(banana, flow, y, seed=0)": "report(banana, flow, y, check_training=False, seed=0)",
    },
}


@pytest.mark.parametrize("page", some_slow(PROGRAMS, *LONG))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    for number, smaller in FEW.get(page, {}).items():
        assert number in text
        text = text.replace(number, smaller)
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


def test_the_first_example_runs_as_printed(capsys):
    """The README and the home page have one program; its output is the printed one, up to noise."""
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("../README.md", "index.md")]
    (program,), (other,) = map(EXAMPLE.findall, pages)
    assert program == other
    program = program.replace("200", "100")  # losses that are averaged
    exec(compile(program, "README.md", "exec"), {"__name__": "README.md"})
    output = capsys.readouterr().out.splitlines()
    printed = re.search(r"^It prints:\n\n```text\n(.*?)^```$", pages[0], re.M | re.S)[
        1
    ].splitlines()
    assert printed == re.search(r"^```text\n(.*?)^```$", pages[1], re.M | re.S)[1].splitlines()
    for lines in (output, printed):
        elbo, iwae = (float(lines[i].rsplit(" ", 1)[1]) for i in (0, -1))
        assert elbo == pytest.approx(-2.83, abs=0.18)
        assert iwae == pytest.approx(-2.02, abs=0.18)
    assert output[2].split() == printed[2].split()  # the header of the report


def test_no_other_example():
    """What no test above runs: a page that begins to have examples belongs to one of them."""
    for page in (*DOCS.glob("*.md"), DOCS.parent / "CONTRIBUTING.md", DOCS.parent / "CHANGELOG.md"):
        if page.name not in (*PROGRAMS, "index.md"):
            assert not EXAMPLE.search(page.read_text(encoding="utf-8")), page.name


def test_notebooks_quote_their_scripts():
    """The one example in a notebook's prose is the code that it says it is."""
    for path in (DOCS.parent / "tutorials").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            for example in EXAMPLE.findall("".join(cell["source"])):
                code = (path.parent / "truncated" / "bars.py").read_text(encoding="utf-8")
                code = re.sub(r" -> None|: Tensor", "", code)
                lines = [line.strip() for line in example.splitlines()]
                assert all(line in code for line in lines), path.name


def test_names_exist():
    """What a page links to is exported, and stands on the page that the link says."""
    result = set()
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"\{(?:class|func|meth)\}", text), page.name
        for name, reference in NAME.findall(text):
            assert hasattr(pyro_mcvae, name), f"{page.name}: {name}"
            assert f":: {name}\n" in (DOCS / reference).read_text(encoding="utf-8"), name
            result.add(name)
    assert "TraceSIS_ELBO" in result


def test_images_are_shown():
    """Each where a page shows it, and readable in one look: below a megabyte."""
    pages = (*DOCS.glob("*.md"), *DOCS.glob("results/*.md"), DOCS.parent / "README.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for path in (DOCS / "images").iterdir():
        assert f"images/{path.name})" in text, path.name
        assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", [p.stem for p in (DOCS / "api").glob("*.md") if p.stem != "names"])
def test_the_reference_is_readable_before_sphinx_has_run(name):
    """A line and the source of each name: ``python docs/api_tables.py`` writes them."""
    spec = importlib.util.spec_from_file_location("api_tables", DOCS / "api_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (DOCS / "api" / f"{name}.md").read_text(encoding="utf-8")
    assert tables.with_tables(text) == text, "behind the docstrings: python docs/api_tables.py"
    plain = tables.without_tables(text)
    names = re.findall(r"auto(?:class|function):: (?:[\w.]+\.)?(\w+)\n", plain)
    assert names
    for one in names:
        assert re.search(rf"^\| \[`{one}`\]\(\S+\.py\) \| \S.+ \|$", text, re.M), one
        assert f"[`{one}`]" not in plain


ROOT = DOCS.parent
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
PAGES += [*DOCS.glob("api/*.md"), *DOCS.glob("results/*.md")]
# Made by Sphinx, which is not asked here.
MADE = ("names.md",)


def links(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n".join("".join(c["source"]) for c in cells)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    result = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t for t in result if not t.startswith(("http", "#", "mailto:", "attachment:"))]


def test_links_lead_somewhere_in_the_repository():
    """Before Sphinx has run, as a reader of the repository follows them."""
    paths = [p for p in PAGES if p.name not in MADE]
    paths += [*(ROOT / "tutorials").glob("*.ipynb"), ROOT / "tutorials" / "README.md"]
    result = [(p, t) for p in paths for t in links(p)]
    assert len(result) > 60
    broken = [
        f"{p.relative_to(ROOT)}: {t}"
        for p, t in result
        if not (p.parent / t.split("#")[0]).exists()
    ]
    assert not broken


def test_links_lead_to_headings(tmp_path, monkeypatch):
    """The offline part of ``docs/check_links.py``, which has to find links that are broken."""
    spec = importlib.util.spec_from_file_location("check_links", DOCS / "check_links.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    if (ROOT / ".git").exists():  # the files are listed by git
        assert check.broken_links() == []
    page = tmp_path / "page.md"
    page.write_text("# One `thing_here`\n\n[a](#one-thing_here) [b](#two) [c](none.md)\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "tracked", lambda: ["page.md"])
    assert check.broken_links() == ["page.md: #two (no such heading)", "page.md: none.md"]


def script(command):
    """The file that ``python tutorials/x.py ...``, ``python -m tests.x`` or a path names."""
    result = re.match(r"(?:PYTHONPATH=\. )?python (-m )?(\S+)|([\w/]+\.py)\b", command)
    if not result:
        return None
    name = result[2] or result[3]
    names = [name]
    if result[1]:
        names = [name.replace(".", "/") + end for end in (".py", "/__main__.py")]
    folders = ("", "tutorials", "tests/benchmarks")
    places = [ROOT / folder / name for folder in folders for name in names]
    assert any(path.exists() for path in places), command
    return next(path for path in places if path.exists())


def test_commands_of_the_results_exist():
    """A section's flags are those of a script that it names."""
    text = "".join(p.read_text(encoding="utf-8") for p in sorted((DOCS / "results").glob("*.md")))
    for section in re.split(r"^## ", text, flags=re.M):
        code = re.findall(r"`([^`]*)`", section.replace("\n", " "))
        scripts = {path for path in map(script, code) if path}
        source = "".join(path.read_text(encoding="utf-8") for path in scripts)
        if "add_data_flags" in source:
            source += (ROOT / "tutorials" / "data.py").read_text(encoding="utf-8")
        flags = {flag for c in code for flag in re.findall(r"--[a-z][\w-]*", c)}
        assert all(f'"{flag}"' in source for flag in flags) or not scripts, section[:40]
