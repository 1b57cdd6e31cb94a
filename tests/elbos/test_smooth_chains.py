"""Chains through kinks: gradients against finite differences, evidence, warnings."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.kernels import Info
from tests.cases import every

N = 2000


class _Expected:
    """Averages over the accept bit, so that the weight is a function of continuous noise alone."""

    def _decide(self, proposal, state, target):
        change = target.log_change(proposal.state, state) + proposal.log_ratio
        log_accept = change.clamp(max=0.0)
        change = proposal.state.log_weight - state.log_weight
        mixed = state._replace(log_weight=state.log_weight + log_accept.exp() * change)
        zero, bits = torch.zeros_like(change), torch.ones_like(change, dtype=torch.bool)
        return mixed, Info(proposal.log_ratio, log_accept.detach().exp(), bits, zero)


class ExpectedMALA(_Expected, MALA):
    pass


class ExpectedHMC(_Expected, HMC):
    pass


# Two steps of AIS have one move that counts, and so one accept bit.
CHAINS = {
    "underdamped": lambda **k: TraceSIS_ELBO(3, kernel=UnderdampedLangevin(0.3, momentum=0.7), **k),
    "ULA": lambda **k: TraceSIS_ELBO(3, kernel=ULA(0.05), **k),
    "MALA": lambda **k: TraceAIS_ELBO(2, kernel=ExpectedMALA(0.05), **k),
    "HMC": lambda **k: TraceAIS_ELBO(2, kernel=ExpectedHMC(0.2, num_leapfrog=2), **k),
}
_MODULES = """
ReLU LeakyReLU PReLU SELU ELU GELU Softplus Hardtanh ReLU6
"""
ACTIVATIONS = {name: getattr(nn, name) for name in _MODULES.split()} | {
    "ELU, 0.5": lambda: nn.ELU(0.5),
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "abs": lambda: torch.abs,
    "clamp": lambda: lambda h: h.clamp(-0.3, 0.4),
    "maximum": lambda: lambda h: torch.maximum(h, 0.3 * h),
    "relu_": lambda: lambda h: (h + 0.0).relu_(),
    "amax": lambda: lambda h: torch.stack([h, 0.2 - h]).amax(0),
    "max": lambda: lambda h: torch.stack([h, 0.2 - h], -1).max(-1).values,
    "min": lambda: lambda h: torch.min(h, 0.2 - h),
}


def programs(activation, num=N):
    """A kink that model and guide move: each datum has parameters of its own."""
    x = torch.full((num,), 1.5)

    def model(x):
        slope = pyro.param("slope", torch.full((num,), 2.0))
        shift = pyro.param("shift", torch.full((num,), 0.1))
        with pyro.plate("data", num):
            z = pyro.sample("z", dist.Normal(torch.zeros(num), 1.0))
            pyro.sample("x", dist.Normal(slope * activation(2 * z + shift), 0.5), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.full((num,), 0.2))
        with pyro.plate("data", num):
            pyro.sample("z", dist.Normal(loc, 0.6))

    return model, guide, x


def deviations(elbo, activation, step=0.02):
    """For each parameter z-score and mean of gradients minus finite differences, of each datum."""
    model, guide, x = programs(activation)
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(model, guide, x)
    result = {}
    for name in ("loc", "slope", "shift"):
        p = pyro.get_param_store()._params[name]
        at, ends = p.detach().clone(), []
        for sign in (1, -1):
            p.data.copy_(at + sign * step)
            pyro.set_rng_seed(0)
            ends.append(elbo.bounds(model, guide, x).per_datum)
        p.data.copy_(at)
        d = -p.grad - (ends[0] - ends[1]) / (2 * step)
        result[name] = float(d.mean() / (d.std() / N**0.5 + 2e-4)), float(d.mean())
    return result


def in_turn():
    kernels = list(CHAINS)
    for i, name in enumerate(ACTIVATIONS):
        yield name, kernels[i // 4 % 4]


@pytest.mark.parametrize(("activation", "chain"), [*in_turn()][::4])
def test_gradient_is_that_of_the_bound(activation, chain):
    module = ACTIVATIONS[activation]()
    if isinstance(module, nn.Module):
        module.eval()
    result = deviations(CHAINS[chain](), module)
    # Four standard errors, and what a step of 0.02 leaves of the third derivative.
    assert all(abs(z) < 4 or abs(mean) < 0.005 for z, mean in result.values()), result


@pytest.mark.parametrize("chain", every(2, CHAINS))
def test_without_smoothing_it_is_not(chain):
    """Which shows that the law above has the power to see it."""
    result = deviations(CHAINS[chain](gradient_estimator="reparam"), torch.relu)
    assert max(abs(mean) for _, mean in result.values()) > 0.05, result


@pytest.mark.parametrize(
    ("cls", "kernel"),
    [
        (TraceSIS_ELBO, UnderdampedLangevin(0.3, momentum=0.7)),
        (TraceSIS_ELBO, ULA(0.04)),
        (TraceAIS_ELBO, HMC(0.4, num_leapfrog=2)),
    ],
)
def test_evidence_is_exact(cls, kernel):
    """E exp W = p(x) along any drift: four standard errors."""
    model, guide, x = programs(torch.relu, 4000)
    z = torch.linspace(-8, 8, 20001)
    log_joint = dist.Normal(0.0, 1.0).log_prob(z)
    log_joint += dist.Normal(2 * torch.relu(2 * z + 0.1), 0.5).log_prob(x[0])
    exact = log_joint.logsumexp(0) + math.log(z[1] - z[0])
    elbo = cls(4, kernel=kernel)
    elbo.loss(model, guide, x)
    ratio = (elbo.last_step.log_weight - exact).exp().flatten()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5


def network(activation=nn.ReLU, num=20):
    """A decoder and programs of it."""
    decoder = nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 3))
    x = torch.linspace(-2, 2, num).unsqueeze(-1).expand(num, 3)

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.3).to_event(1), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.zeros(2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, 0.8).to_event(1))

    return decoder, model, guide, x


def one_step(elbo, decoder, model, guide, x):
    decoder.zero_grad()
    pyro.set_rng_seed(1)
    loss = elbo.loss_and_grads(model, guide, x)
    return loss, [p.grad.clone() for p in decoder.parameters()]


@pytest.mark.slow
def test_recorded_steps_are_smoothed():
    parts = network()
    plain, compiled = (TraceSIS_ELBO(3, kernel=ULA(0.1)) for _ in range(2))
    compiled = CompiledELBO(compiled.eval(), backend="eager")
    for _ in range(4):
        result, expected = one_step(compiled, *parts), one_step(plain.eval(), *parts)
    assert result[0] == pytest.approx(expected[0], rel=1e-9)
    for a, b in zip(result[1], expected[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def logged(caplog):
    return [r.getMessage() for r in caplog.records if "jumps at" in r.getMessage()]


def test_names_the_module_once(caplog):
    parts = network()
    elbo = TraceSIS_ELBO(3)
    for _ in range(3):
        one_step(elbo, *parts)
    (message,) = logged(caplog)
    assert "nn.ReLU at Sequential.1" in message
    assert message.index("nn.GELU") < message.index("TraceIWAE_ELBO")
    assert "biased" not in message


def test_names_the_line_of_a_function(caplog):
    _, model, guide, x = network(lambda: _Function(lambda h: torch.relu(h)))
    TraceAIS_ELBO(3).loss_and_grads(model, guide, x)
    (message,) = logged(caplog)
    assert f"relu at {__file__}:" in message


def test_a_density_that_is_undefined_elsewhere_is_smoothed(caplog):
    """No other latents than those of the step are tried."""
    limits = [5.2]

    class Table(dist.Normal):
        def log_prob(self, value):
            if self.loc.detach().max() > limits[-1]:
                raise ValueError("outside the table")
            return super().log_prob(value)

    def model(x):
        with pyro.plate("data", 20):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", Table(torch.relu(z), 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", 20):
            pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 0.5))

    losses, x = [], torch.ones(20)
    for limit in (5.2, math.inf):
        limits.append(limit)
        pyro.set_rng_seed(0)
        losses.append(TraceSIS_ELBO(2, ULA(0.005)).loss_and_grads(model, guide, x))
        (message,) = logged(caplog)
        assert f"relu at {__file__}:" in message
        caplog.clear()
    assert losses[0] == losses[1]


def test_an_estimator_that_is_chosen_is_kept(caplog):
    parts = network()
    elbo = TraceSIS_ELBO(3, gradient_estimator="reparam")
    one_step(elbo, *parts)
    (message,) = logged(caplog)
    assert "nn.ReLU at Sequential.1" in message
    assert "gradient of this objective is biased" in message
    assert "gradient_estimator='auto'" in message


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


class _OwnReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


ROUGH = {
    "clamp": _OwnReLU.apply,
    "sort": lambda h: h.sort(-1).values,
    "gt": lambda h: torch.where(h > 0, h, 0.1 * h),
    "max_pool2d_with_indices": lambda h: functional.max_pool1d(h[..., None, :], 3, 1, 1)[..., 0, :],
}


@pytest.mark.parametrize("name", ROUGH)
def test_what_cannot_be_smoothed_is_named(name, caplog):
    torch.set_default_dtype(torch.float32)
    _, model, guide, x = network(lambda: _Function(ROUGH[name]), num=100)
    TraceSIS_ELBO(3).loss_and_grads(model, guide, x)
    (message,) = logged(caplog)
    assert f"{name} at {__file__}:" in message
    assert "gradient of this objective is biased" in message


STIFF = {
    "softplus": lambda z: dist.Normal(functional.softplus(6 * z) / 2, 0.5),
    "student": lambda z: dist.StudentT(2.0, z, 0.05),
    "cauchy": lambda z: dist.Cauchy(z, 0.02),
    "saturated": lambda z: dist.Bernoulli(logits=30 * z),
    # Their densities are sums of kinks that cancel.
    "binomial": lambda z: dist.Binomial(10, logits=3 * z),
    "continuous": lambda z: dist.ContinuousBernoulli(logits=3 * z),
    "precise": lambda z: dist.Normal(z, 1e-3),
    "quartic": lambda z: dist.Normal(z**4, 0.1),
    "two modes": lambda z: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(torch.stack([z, -z], -1), 0.1)
    ),
}


@pytest.mark.parametrize("name", STIFF)
def test_stiff_and_smooth_programs_are_not_warned_of(name, caplog):
    # In single precision PyTorch computes one of them with jumps where it changes formulas.
    torch.set_default_dtype(torch.float64 if name == "continuous" else torch.float32)
    x = torch.rand(50)
    if name in ("saturated", "binomial"):
        x = x.round()

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0))
            pyro.sample("x", STIFF[name](z), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(len(x)), 0.6))

    elbo = TraceAIS_ELBO(2, kernel=MALA(0.3)) if list(STIFF).index(name) % 2 else TraceSIS_ELBO(2)
    elbo.loss(model, guide, x)
    assert not logged(caplog)


def test_a_kink_of_the_likelihood_is_smoothed(caplog):
    """That of a Laplace density, where its location meets the datum."""
    caplog.set_level(logging.WARNING)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0))
            pyro.sample("x", dist.Laplace(z, 0.3), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(len(x)), 0.6))

    TraceSIS_ELBO(2).loss(model, guide, torch.rand(50))
    (message,) = logged(caplog)
    assert "abs at" in message
    assert "laplace.py" in message


class Attention(nn.Module):
    """A decoder of one token for each latent."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Linear(1, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, nn.functional.gelu, batch_first=True)

    def forward(self, z):
        return self.read(self.layer(self.embed(z.unsqueeze(-1)))).flatten(-2)


@pytest.mark.parametrize(
    "cls", [TraceSIS_ELBO, pytest.param(TraceAIS_ELBO, marks=pytest.mark.slow)]
)
def test_attention_is_differentiated_twice(cls):
    """With the numbers of a user who asks for plain operations, and the setting put back."""
    pyro.set_rng_seed(0)
    decoder, x = Attention(), (torch.rand(6, 4) > 0.5).to(torch.get_default_dtype())

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    backends = torch.backends.cuda
    loss, grads = one_step(cls(3), decoder, model, guide, x)
    assert backends.flash_sdp_enabled()
    assert backends.mem_efficient_sdp_enabled()
    with sdpa_kernel(SDPBackend.MATH):
        expected = one_step(cls(3), decoder, model, guide, x)
    assert loss == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))
    result = one_step(CompiledELBO(cls(3), backend="eager"), decoder, model, guide, x)
    assert result[0] == pytest.approx(loss)
