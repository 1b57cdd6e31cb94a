"""The examples of several devices run, and train."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorials" / "distributed"


@pytest.mark.slow
def test_a_run_under_torchrun_goes_on_on_fewer_processes(tmp_path):
    script, losses = str(FOLDER / "torchrun_vae.py"), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for count, epochs in ((2, 1), (1, 2)):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        flags = ["--epochs", str(epochs), "--checkpoint", str(tmp_path / "run.pt")]
        done = subprocess.run(
            [*run, f"--nproc_per_node={count}", script, *flags],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        lines = done.stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == [f"epoch {epochs}"]
        losses.append(float(lines[0].split("loss ")[1].split()[0]))
    assert losses[1] < losses[0] - 3


@pytest.mark.clients
@pytest.mark.filterwarnings("default")
def test_the_lightning_module_trains():
    pytest.importorskip("lightning")
    train = runpy.run_path(str(FOLDER / "lightning_vae.py"))["train"]
    first, last = (
        float(train(1, "cpu", epochs, num_data=400).callback_metrics["loss"]) for epochs in (1, 12)
    )
    assert last < first - 3
