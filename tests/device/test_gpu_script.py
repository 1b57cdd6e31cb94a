"""The script for a GPU, in small: see ``tests/benchmarks/gpu.py``."""

import pytest
import torch

from tests.benchmarks import gpu


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_in_small(name, device):
    rows = gpu.main(["--device", name, "--small", "--sides", "plain|by hand"])
    assert {row["part"] for row in rows} == {"about", "checks", "speed", "epoch"}
    assert not [row for row in rows if "error" in row or "skipped" in row]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name, _ in gpu.cases("cuda", small=True)])
def test_on_cuda(name):
    case = dict(gpu.cases("cuda", small=True))[name]
    gpu.check(case, gpu.made(case))
