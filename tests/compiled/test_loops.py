"""Recorded losses in the loops of others: two processes, and modules with a backward of theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae import ULA, CompiledELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from tests.compiled.programs import batches, make, reasons, uses

ROOT = Path(__file__).parents[2]
STEPS = 7


class Scaled(PyroModule):
    """A model whose parameters are its own: a module's, and one under a constraint."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = PyroModule[nn.Linear](2, 3)
        self.scale = PyroParam(torch.tensor(1.0), constraints.positive)

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), self.scale).to_event(1), obs=x)


class Encoder(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.loc = PyroModule[nn.Linear](3, 2)

    def forward(self, x: Tensor) -> None:
        loc = self.loc(x)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))


@pytest.mark.parametrize("local", [False, True])
def test_parameters_of_modules_that_share_no_names(local: bool) -> None:
    """Also where they are changed by hand, replaced, and frozen between recorded steps."""
    result = []
    for wrap in (lambda loss: loss, lambda loss: CompiledELBO(loss, "eager")):
        pyro.clear_param_store()
        torch.manual_seed(0)
        loss, x = wrap(TraceSGVB_ELBO()), torch.randn(5, 3)
        with pyro.settings.context(module_local_params=local):
            model = Scaled()
            elbo = loss(model, Encoder())
            values = [elbo(x)]  # which makes the parameters
            for step in range(12):
                if step == 5:
                    model.scale = torch.tensor(2.0)
                if step == 8:
                    model.decoder.bias.requires_grad_(False)
                optim = torch.optim.SGD(elbo.parameters(), 0.01)
                optim.zero_grad()
                values.append(elbo(x))
                values[-1].backward()
                optim.step()
        result.append([float(v.detach()) for v in values] + model.decoder.bias.tolist())
    assert result[0] == pytest.approx(result[1], rel=1e-10)
    assert uses(loss) >= 3


def on_a_rank(out: Path) -> None:
    """What a rank does: its own data, through DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.set_default_dtype(torch.float64)
    result = []
    for wrap in (lambda loss: loss, lambda loss: CompiledELBO(loss, "eager")):
        net = make()
        loss = wrap(TraceSIS_ELBO(2, ULA(0.1), max_plate_nesting=1))
        module = loss(net.model, net.guide)
        module.net = net  # whose parameters are to be joined
        joined = DistributedDataParallel(module)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for batch in batches(2 * STEPS)[rank::2]:
            optimizer.zero_grad()
            joined(batch).backward()
            optimizer.step()
        result.append([p.detach() for p in net.parameters()])
    torch.save((result, uses(loss), reasons(loss)), out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_without_recordings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.compiled.test_loops", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for (plain, recorded), replayed, refused in result:
        assert (replayed, refused) == (STEPS - 3, [])
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    for a, b in zip(result[0][0][1], result[1][0][1], strict=True):
        assert torch.equal(a, b)


if __name__ == "__main__":
    on_a_rank(Path(sys.argv[1]))
