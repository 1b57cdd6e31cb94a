"""TraceAIS_ELBO: gradients against the exact sum over accept paths; one step; its own errors."""

import pyro
import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    LearnedSchedule,
    LinearSchedule,
    RandomWalk,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
)
from tests.elbos.chain_gradients import (
    AcceptPaths,
    assert_slopes,
    learning,
    parameters_of,
)
from tests.estimates import take_gradients
from tests.models import ConjugateGaussian
from tests.zoo import EXAMPLES

SMOOTH = [n for n in EXAMPLES if n not in ("two-independent", "mixture", "implicit")]


def check(example, kernel, num_steps, monkeypatch, particles=2, **options):
    elbo = learning(
        TraceAIS_ELBO,
        num_steps,
        kernel,
        num_particles=particles,
        max_plate_nesting=example.nesting,
        **options,
    )
    outside, own = parameters_of(elbo, example)
    paths = AcceptPaths(elbo, example, num_steps - 1, monkeypatch)
    # Along one direction in all of them, which has a part in each.
    assert_slopes([outside + own], [paths.mean_gradients(outside + own)], paths.mean_bound)


QUICK = {
    *((n, "noise") for n in ("vae", "structured", "nested-subsampled", "scaled-and-masked")),
    ("structured", "latent"),
}


@pytest.mark.parametrize(
    ("name", "vectorize", "multi_sample", "coordinates"),
    [
        pytest.param(
            n,
            bool((i + j) % 2) or (n, c) in QUICK,
            bool(i // 2 % 2),
            c,
            marks=() if (n, c) in QUICK else pytest.mark.slow,
        )
        for i, n in enumerate(SMOOTH)
        for j, c in enumerate(["noise", "latent"])
    ],
)
def test_gradient_is_that_of_the_sum_over_all_accept_paths(
    name, vectorize, multi_sample, coordinates, monkeypatch
):
    options = {"coordinates": coordinates, "vectorize_particles": vectorize}
    kernel = MALA(0.2 if coordinates == "noise" else 0.1)
    check(EXAMPLES[name](), kernel, 2, monkeypatch, multi_sample=multi_sample, **options)


KERNELS = {
    "MALA": lambda: MALA(0.3),
    "HMC": lambda: HMC(0.5, num_leapfrog=2),
    "RandomWalk": lambda: RandomWalk(0.8),
}


@pytest.mark.parametrize(
    ("kernel", "vectorize", "multi_sample"),
    # One kernel looped, the others vectorised.
    [pytest.param(kernel, *[name != "MALA"] * 2, id=name) for name, kernel in KERNELS.items()],
)
def test_gradient_with_every_kernel(kernel, multi_sample, vectorize, monkeypatch):
    options = {"multi_sample": multi_sample, "vectorize_particles": vectorize}
    # Three particles, where the others' mean is not another particle, once for each weight.
    particles = 3 if vectorize else 2
    check(EXAMPLES["vae"](), kernel(), 2, monkeypatch, particles, **options)


def test_defaults():
    elbo = TraceAIS_ELBO(3)
    assert isinstance(elbo.kernel, HMC)
    assert elbo.kernel.num_leapfrog == 2
    assert isinstance(elbo.schedule, LearnedSchedule)
    for options in ({"kernel": MALA()}, {"gradient_estimator": "reweighted"}):
        elbo = TraceAIS_ELBO(3, **options)
        assert isinstance(elbo.schedule, LinearSchedule)
        assert not list(elbo.parameters())


@pytest.mark.parametrize("multi_sample", [False, True])
def test_one_particle_is_unbiased_without_a_baseline(multi_sample, monkeypatch):
    check(EXAMPLES["vae"](), MALA(0.2), 2, monkeypatch, 1, multi_sample=multi_sample)


@pytest.mark.parametrize(("multi_sample", "vectorize"), [(False, True), (True, False)])
def test_one_step_is_the_elbo_or_iwae(multi_sample, vectorize):
    """Under one seed, value and gradient, for every kernel."""
    exact = ConjugateGaussian(N=6, subsample_size=3)
    options = {"vectorize_particles": vectorize, "max_plate_nesting": 1}
    ais = TraceAIS_ELBO(1, MALA(0.3), num_particles=3, multi_sample=multi_sample, **options)
    if multi_sample:
        plain = TraceIWAE_ELBO(3, gradient_estimator="reparam", **options)
    else:
        plain = TraceSGVB_ELBO(3, analytic_kl=False, **options)
    result = []
    for elbo in (ais, plain):
        pyro.set_rng_seed(0)
        loss = elbo.loss_and_grads(exact.model, exact.guide)
        result.append((loss, take_gradients(exact)))
    assert result[0][0] == pytest.approx(result[1][0])
    for name in exact.values:
        assert torch.allclose(result[0][1][name], result[1][1][name])
