"""Scripted and traced modules, which store their values outside Python, train as other modules."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_mcvae import (
    CompiledELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from tests.cases import every

# DeprecationWarning until PyTorch 2.13, FutureWarning since
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

LOSSES = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "iwae": lambda: TraceIWAE_ELBO(1),
    "compiled": lambda: CompiledELBO(TraceIWAE_ELBO(1), backend="eager"),
}
X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Buffer(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: torch.Tensor):
        self.calls += 1
        return self.linear(z) * self.calls


class Replaced(Buffer):
    """Replaces its buffer."""

    def forward(self, z: torch.Tensor):
        self.calls = self.calls + 1
        return self.linear(z) * self.calls


class Number(nn.Module):
    """Counts its calls in a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.calls = 0

    def forward(self, z: torch.Tensor):
        self.calls += 1
        return self.linear(z) * self.calls


def plain():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh())


DECODERS = {
    "buffer": lambda: torch.jit.script(Buffer()),
    "replaced": lambda: torch.jit.script(Replaced()),
    "number": lambda: torch.jit.script(Number()),
    "inside": lambda: torch.jit.script(nn.Sequential(Number(), nn.Tanh())),
    "traced": lambda: torch.jit.trace(plain(), torch.zeros(4, 2)),
}


def programs(make_decoder):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    decoder = make_decoder()

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.zeros(4, 2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))

    return model, guide


def losses(loss, decoder):
    model, guide = programs(DECODERS[decoder])
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss())
    return [svi.step(X) for _ in range(6)]


@pytest.mark.parametrize(
    ("name", "decoder"), every(3, [(n, d) for d in DECODERS for n in LOSSES], 1)
)
def test_steps_of_scripted_modules_are_those_of_pyro(name, decoder):
    torch.set_default_dtype(torch.float32)
    assert losses(LOSSES[name], decoder) == pytest.approx(losses(Trace_ELBO, decoder), rel=1e-5)


def test_chains_count_as_many_calls_as_with_the_module_itself():
    torch.set_default_dtype(torch.float32)
    calls = []
    for decoder in (Buffer(), torch.jit.script(Buffer())):
        model, guide = programs(lambda decoder=decoder: decoder)
        loss = TraceSIS_ELBO(3)
        for _ in range(3):
            loss.loss(model, guide, X)
        calls.append(decoder.calls.item())
    assert calls == [3, 3]


@pytest.mark.parametrize("options", [{}, {"schedule": 2}], ids=["draws", "chains"])
@pytest.mark.parametrize("kind", ["module", "scripted"])
def test_evaluators_restore_buffers(options, kind):
    """Also those that a module changes in evaluation mode, in place or not."""
    torch.set_default_dtype(torch.float32)
    for module in (Buffer(), Replaced()):
        decoder = module if kind == "module" else torch.jit.script(module)
        model, guide = programs(lambda decoder=decoder: decoder)
        TraceIWAE_ELBO(1).loss(model, guide, X)
        log_evidence(model, guide, X, num_particles=20, seed=0, **options)
        assert decoder.calls == 1
