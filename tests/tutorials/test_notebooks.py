"""The notebooks: every cell runs with few steps, and all were run before they were committed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(path):
    """The notebook as a script; line numbers restart at the comments that number its cells."""
    code = [c for c in cells(path) if c["cell_type"] == "code"]
    return "\n\n".join(f"# cell {i}\n" + "".join(c["source"]) for i, c in enumerate(code))


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
    # As in a notebook, modules of the folder can be imported.
    script.write_text(f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n" + source(path))
    environment = {
        **os.environ,
        "MCVAE_SMOKE": "1",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": str(tmp_path),
        "PYTHONPATH": str(FOLDER.parent),
    }
    environment.pop("MCVAE_DATA_ROOT", None)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
