"""The notebooks: every cell runs with few steps, and all were run before they were committed."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(path):
    """
    The notebook as a script; line numbers restart at the comments that number its cells.

    Cells have smaller numbers for the tests in their metadata, as replacements of their text.
    """
    code = [c for c in cells(path) if c["cell_type"] == "code"]
    texts = []
    for i, cell in enumerate(code):
        text = "".join(cell["source"])
        for old, new in cell["metadata"].get("few", {}).items():
            assert old in text, f"cell {i} has no {old!r}"
            text = text.replace(old, new)
        texts.append(f"# cell {i}\n{text}")
    return "\n\n".join(texts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stands_alone(path):
    """A notebook imports nothing of its folder, and its text has no settings of the tests."""
    scripts = {p.stem for p in FOLDER.iterdir() if p.suffix in ("", ".py")}
    modules = re.findall(r"^ *(?:import|from) (\w+)", source(path), re.M)
    assert not scripts & set(modules)
    text = "".join("".join(c["source"]) for c in cells(path))
    assert "smoke" not in text.lower()
    assert "MCVAE_" not in text


def test_each_leads_to_the_next():
    for path, after in itertools.zip_longest(NOTEBOOKS, NOTEBOOKS[1:]):
        first, *_, last = (
            "".join(c["source"]) for c in cells(path) if c["cell_type"] == "markdown"
        )
        assert re.search(r"takes (about )?\S+ (minutes?|seconds) on two\s+cores", first), path.stem
        assert after is None or re.search(rf"\*\*Next:\*\* \[[^]]+\]\({after.name}\)", last)


def test_the_readme_has_every_notebook():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\w+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_was_run_from_top_to_bottom(path):
    code = [c for c in cells(path) if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [output for c in code for output in c["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert path.stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path, tmp_path):
    for extra in ("sklearn", "skimage", "matplotlib"):
        pytest.importorskip(extra, reason="the tutorials' extra is not installed")
    script = tmp_path / f"{path.stem}.py"
    script.write_text(source(path))
    shutil.copy(FOLDER / "several_processes.py", tmp_path)  # the last cells of 8 run it
    environment = {
        **os.environ,
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": str(tmp_path),
        "PYTHONPATH": str(FOLDER.parent),
    }
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
