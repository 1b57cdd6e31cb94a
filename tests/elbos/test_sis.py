"""TraceSIS_ELBO: gradients against finite differences, the counts of runs, its own errors."""

import itertools

import pyro
import pytest
import scipy.special
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    GaussianReverse,
    LearnedSchedule,
    LinearSchedule,
    RandomWalk,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.elbos.chain_gradients import assert_slopes, bound, gradients, learning, parameters_of
from tests.models import GammaPoisson
from tests.zoo import EXAMPLES

SMOOTH = [n for n in EXAMPLES if n not in ("two-independent", "mixture", "implicit")]
smooth = pytest.mark.parametrize("name", SMOOTH)
modes = pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])


class Network(torch.nn.Module):
    """A reverse kernel of random weights."""

    def __init__(self, dim):
        super().__init__()
        self.linear = torch.nn.Linear(2 * dim + 1, 2 * dim)

    def forward(self, position, gradient, beta):
        beta = beta.expand(position.shape[:-1] + (1,))
        return self.linear(torch.cat([position, gradient, beta], -1)).chunk(2, -1)


KERNELS = {
    "ULA": lambda: ULA(0.03),
    "learned reverse": lambda: ULA(0.03, GaussianReverse(Network(2))),
    "UnderdampedLangevin": lambda: UnderdampedLangevin(0.2, momentum=0.8),
}


def check(example, kernel, num_steps=3, **options):
    options.setdefault("vectorize_particles", True)
    elbo = learning(
        TraceSIS_ELBO,
        num_steps,
        kernel,
        num_particles=2,
        max_plate_nesting=example.nesting,
        **options,
    )
    outside, own = parameters_of(elbo, example)
    grads = gradients(elbo, example, outside + own)
    grads = [grads[: len(outside)], grads[len(outside) :]]
    assert_slopes([outside, own], grads, lambda: bound(elbo, example))


@pytest.mark.parametrize(
    ("name", "coordinates"), [(n, ("noise", "latent")[i % 2]) for i, n in enumerate(SMOOTH)]
)
def test_gradient_is_that_of_finite_differences(name, coordinates):
    check(EXAMPLES[name](), ULA(0.03), coordinates=coordinates)


@pytest.mark.parametrize(
    ("kernel", "multi_sample", "vectorize", "recompute"),
    # Each kernel with every option, and with every pair of two.
    [
        (name, m, v, r)
        for name in KERNELS
        for m, v, r in itertools.product([False, True], repeat=3)
        if (m + v + r) % 2
    ],
)
def test_gradient_with_every_kernel(kernel, multi_sample, vectorize, recompute):
    options = {"vectorize_particles": vectorize, "recompute": recompute}
    check(EXAMPLES["vae"](), KERNELS[kernel](), multi_sample=multi_sample, **options)


def test_transforms_that_remember_are_recomputed():
    """Known by the tensor that they were given, which must not be that of the first evaluation."""
    check(EXAMPLES["coupling"](), ULA(0.03), coordinates="latent", recompute=True)


@pytest.mark.slow
@smooth
@modes
@pytest.mark.parametrize("multi_sample", [False, True], ids=["mean", "multi-sample"])
@pytest.mark.parametrize("coordinates", ["noise", "latent"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradient_in_every_mode(name, vectorize, multi_sample, coordinates, recompute):
    options = {"vectorize_particles": vectorize, "recompute": recompute}
    kernel = UnderdampedLangevin(0.2, momentum=0.8)
    check(
        EXAMPLES[name](), kernel, 4, multi_sample=multi_sample, coordinates=coordinates, **options
    )


@pytest.mark.parametrize("kernel", [MALA, HMC, RandomWalk])
def test_kernels_that_reject_are_refused(kernel):
    with pytest.raises(ValueError, match=f"which the rejections of {kernel.__name__} do not have"):
        TraceSIS_ELBO(kernel=kernel(0.1))


def test_defaults():
    elbo = TraceSIS_ELBO()
    assert isinstance(elbo.kernel, UnderdampedLangevin)
    assert isinstance(elbo.schedule, LearnedSchedule)
    assert elbo.num_steps == 5
    learned = {name: p.shape for name, p in elbo.named_parameters() if p.requires_grad}
    assert learned == dict.fromkeys(
        ("schedule.logits", "kernel.step_size.log_value", "kernel.momentum.logit"), (5,)
    )
    assert elbo.num_particles == 1
    assert elbo.coordinates == "noise"


@pytest.mark.parametrize("num_steps", [1, 2])
def test_no_parameter_of_the_default_goes_without_a_gradient(num_steps):
    """DistributedDataParallel waits for every gradient."""
    exact = GammaPoisson(N=3)
    elbo = TraceSIS_ELBO(num_steps, max_plate_nesting=1)
    elbo.differentiable_loss(exact.model, exact.guide).backward()
    assert all(p.grad is not None for p in elbo.parameters())


@pytest.mark.parametrize("options", [{"kernel": ULA()}, {"gradient_estimator": "reweighted"}])
def test_where_nothing_trains_the_chain_is_the_papers(options):
    elbo = TraceSIS_ELBO(4, **options)
    assert isinstance(elbo.kernel, ULA)
    assert isinstance(elbo.schedule, LinearSchedule)
    assert not list(elbo.parameters())


@pytest.mark.parametrize("subsample_size", [None, 3])
def test_gradient_of_sites_without_explicit_noise(subsample_size, monkeypatch):
    """
    Gamma draws have no noise to freeze: draw them by their quantiles instead, which the implicit
    gradient is the derivative of.
    """

    def draw(concentration, generator=None):  # torch 2.15 names the generator, 2.14 does not
        return Quantile.apply(concentration)

    monkeypatch.setattr("torch.distributions.gamma._standard_gamma", draw)
    exact = GammaPoisson(N=5, subsample_size=subsample_size)
    elbo = learning(TraceSIS_ELBO, 3, UnderdampedLangevin(0.2, 0.5), max_plate_nesting=1)

    def value():
        pyro.set_rng_seed(0)
        return -elbo.loss(exact.model, exact.guide)

    value()
    groups = [[p for _, p in pyro.get_param_store().named_parameters()]]
    groups = [[p for p in groups[0] if all(p is not q for q in elbo.parameters())]]
    groups.append(list(elbo.parameters()))
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(exact.model, exact.guide)
    grads = [[-p.grad for p in g] for g in groups]
    assert len(groups[0]) == 3
    assert_slopes(groups, grads, value)


class Quantile(torch.autograd.Function):
    """Gamma(c, 1) draws at quantiles from the generator, which do not depend on c."""

    @staticmethod
    def forward(ctx, concentration):
        u = torch.rand(concentration.shape)
        value = torch.as_tensor(
            scipy.special.gammaincinv(concentration.detach().numpy(), u.numpy())
        )
        ctx.save_for_backward(concentration, value)
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad * torch._standard_gamma_grad(*ctx.saved_tensors)
