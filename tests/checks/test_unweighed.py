"""Draws that a mask takes out of the guide's density, and that the model reads."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import (
    CompiledELBO,
    MonteCarloELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    local_estimate,
    log_evidence,
    refine,
)
from tests.cases import every
from tests.params import in_turn

X = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
KEPT = torch.tensor([True, False, True])
WEIGH = {
    "iwae": lambda: TraceIWAE_ELBO(3),
    "joint": lambda: TraceIWAE_ELBO(3, joint=True),
    "renyi": lambda: TraceRenyi_ELBO(0.5, 3),
    "sis": lambda: TraceSIS_ELBO(2),
    "ais": lambda: TraceAIS_ELBO(2),
    "multi_sample": lambda: TraceSIS_ELBO(2, num_particles=2, multi_sample=True),
    "compiled": lambda: CompiledELBO(TraceIWAE_ELBO(3), backend="eager"),
}
AVERAGE = {
    "sgvb": TraceSGVB_ELBO,
    "iwae of one": lambda: TraceIWAE_ELBO(1),
    "rao-blackwell": TraceRaoBlackwell_ELBO,
}


def around(mask):
    return lambda fn: (fn, poutine.mask(mask=mask))


def inside(mask):
    return lambda fn: (fn.mask(mask), poutine.mask(mask=True))


def draw(way, fn):
    fn, handler = way(fn)
    with handler:
        return pyro.sample("z", fn)


def programs(way, read=lambda z: z, of_model=None):
    def model():
        with pyro.plate("data", 3):
            z = draw(of_model or way, dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(read(z), 1.0), obs=X)

    def guide():
        with pyro.plate("data", 3):
            draw(way, dist.Normal(X / 2, 0.5**0.5))

    return model, guide


READ = r"of site 'z' from the guide's density, and site '(x|z)' of the model depends on them"


def refused(pair, makes=WEIGH, match=READ):
    for make in makes.values():
        with pytest.raises(ValueError, match=match):
            make().loss(*pair)
    for options in ({}, {"schedule": 3}):
        with pytest.raises(ValueError, match=f"{match}|removes from the guide and not from"):
            log_evidence(*pair, num_particles=5, **options)


@pytest.mark.parametrize(
    "way",
    every(2, [around(KEPT), inside(KEPT), inside(False), around(torch.zeros(3, dtype=torch.bool))]),
    ids=["around", "inside", "False", "all"],
)
def test_masked_draws_that_data_read_have_no_weight(way):
    pair = programs(way)
    refused(pair)
    for make in AVERAGE.values():
        assert math.isfinite(make().loss(*pair))


def test_the_elbo_of_masked_draws_is_that_given_them():
    pair, fn = programs(inside(False)), dist.Normal(X / 2, 1.0)
    pyro.set_rng_seed(0)
    result = torch.tensor([-TraceSGVB_ELBO(1000).loss(*pair) for _ in range(10)]).mean()
    exact = (fn.log_prob(X) - 0.25).sum()
    assert abs(result - exact) < 0.05  # about five standard errors


@pytest.mark.parametrize("reads_masked", [False, True])
def test_padding_that_no_data_read_keeps_the_exact_bound(reads_masked):
    """The bound of the exact posterior has no variance, and the padded datum its prior's."""
    pair = programs(around(KEPT), lambda z: torch.where(KEPT ^ reads_masked, z, 0.0))
    if reads_masked:
        return refused(pair)
    prior = torch.where(KEPT, 2**0.5, 1.0)
    exact = dist.Normal(0.0, prior).log_prob(X)
    for make in ("iwae", "renyi", "joint"):
        bounds = WEIGH[make]().bounds(*pair)
        assert torch.allclose(bounds.total, exact.sum())
    result = log_evidence(*pair, num_particles=5)
    assert torch.allclose(result.log_evidence.sum(), exact.sum())
    return None


def test_a_product_with_a_zero_reads_nothing():
    """As of padded sequences, which models often multiply by their mask."""
    pair = programs(around(KEPT), lambda z: z * KEPT)
    exact = dist.Normal(0.0, torch.where(KEPT, 2**0.5, 1.0)).log_prob(X).sum()
    assert torch.allclose(TraceIWAE_ELBO(3).bounds(*pair).total, exact)


@pytest.mark.slow
def test_a_mask_of_the_guide_alone_leaves_a_prior_without_a_draw():
    refused(programs(around(KEPT), lambda z: z * KEPT, of_model=around(True)))


@pytest.mark.slow
def test_padded_series_are_right_until_the_data_read_them():
    lengths = torch.tensor([3, 2, 1])

    def pair(leak):
        def program(is_model):
            with pyro.plate("data", 3):
                z = torch.zeros(3)
                for t in range(3):
                    with poutine.mask(mask=t < lengths):
                        fn = dist.Normal(0.5 * z, 1.0) if is_model else dist.Normal(0.1 * z, 0.9)
                        z = pyro.sample(f"z_{t}", fn)
                        if is_model:
                            pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=X)
                if is_model and leak:
                    pyro.sample("last", dist.Normal(z, 1.0), obs=X)

        return lambda: program(True), lambda: program(False)

    for make in ("iwae", "sis", "ais"):
        assert math.isfinite(WEIGH[make]().loss(*pair(False)))
        with pytest.raises(ValueError, match=r"site 'z_[12]' .* and site 'last' of"):
            WEIGH[make]().loss(*pair(True))


DISCRETE = {
    "Bernoulli": dist.Bernoulli(torch.full((3,), 1e-6)),
    "Categorical": dist.Categorical(torch.tensor([1.0, 1e-9, 1e-9]).expand(3, 3)),
    "OneHotCategorical": dist.OneHotCategorical(torch.tensor([1.0, 1e-9]).expand(3, 2)),
    "Poisson": dist.Poisson(torch.full((3,), 1e-6)),
    "Beta": dist.Beta(torch.full((3,), 2.0), 2.0),
    "Gamma of rows": dist.Gamma(torch.full((3, 2), 2.0), 2.0).to_event(1),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_values_that_are_hardly_ever_drawn_are_tried_too(name):
    fn = DISCRETE[name].mask(False)

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", fn).float()
            z = z[..., 0] if fn.event_dim else z
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", fn)

    with pytest.raises(ValueError, match=READ):
        TraceIWAE_ELBO(2).loss(model, guide)


def test_noise_of_the_models_own_reads_nothing():
    def noisy(z):
        return torch.nn.functional.dropout(torch.where(KEPT, z, 0.0), 0.5) + torch.randn(3)

    for make in ("iwae", "sis"):
        assert math.isfinite(WEIGH[make]().loss(*programs(around(KEPT), noisy)))


def test_slots_of_masked_values_are_averaged():
    def program(is_model):
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Bernoulli(0.3 if is_model else 0.4).mask(False))
            z = pyro.sample("z", dist.Normal(0.0, 1.0 if is_model else 0.9))
            if is_model:
                pyro.sample("x", dist.Normal(y + z, 1.0), obs=X)

    pair = (lambda: program(True)), (lambda: program(False))
    assert math.isfinite(TraceSIS_ELBO(2).loss(*pair))
    with pytest.raises(ValueError, match="entries of site 'y' from the guide"):
        TraceIWAE_ELBO(2).loss(*pair)


def test_custom_objectives_and_draws_are_guarded_too():
    class Best(MonteCarloELBO):
        def estimate(self, programs):
            sample = self.sampler.sample(programs)
            best = sample.log_weight.max(0).values
            return local_estimate(sample, best.detach(), best)

    pair = programs(inside(False))
    with pytest.raises(ValueError, match=READ):
        Best(3).loss(*pair)
    with pytest.raises(ValueError, match=READ):
        TraceIWAE_ELBO(3).bounds(*pair)
    with pytest.raises(ValueError, match=READ):
        refine(*pair, num_samples=2)


def masked_by(mask, of_guide=True, read=lambda z: z, observed=lambda m: True):
    """A program whose masks are the first entry of ``mask``; ``observed`` masks the data."""

    def model():
        with pyro.plate("data", 3):
            with poutine.mask(mask=mask[0]):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with poutine.mask(mask=observed(mask[0])):
                pyro.sample("x", dist.Normal(read(z), 1.0), obs=X)

    def guide():
        with pyro.plate("data", 3), poutine.mask(mask=mask[0] if of_guide else True):
            pyro.sample("z", dist.Normal(X / 2, 0.5**0.5))

    return model, guide


ALL = torch.ones(3, dtype=torch.bool)


@in_turn((1, 3, 6), make=[*WEIGH, "compiled"], steps=[1, 2, 3, 5])
def test_masks_that_change_are_found_at_once(make, steps):
    mask, elbo = [ALL], WEIGH[make]()
    pair = masked_by(mask)
    for _ in range(steps):
        assert math.isfinite(elbo.loss(*pair))
    for mask[0] in (KEPT, ~KEPT, KEPT):
        with pytest.raises(ValueError, match=READ):
            elbo.loss(*pair)
    mask[0] = ALL
    assert math.isfinite(elbo.loss(*pair))


@in_turn(make=["iwae", "joint", "renyi", "compiled"], of_guide=[True, False], first=[ALL, KEPT])
def test_masks_of_padding_may_change_at_each_step(make, of_guide, first):
    """A bound of the exact posterior: masks of the guide or none, whose prior the model counts."""
    mask, elbo = [first], WEIGH[make]()
    pair = masked_by(mask, of_guide, observed=lambda m: m)
    fn = dist.Normal(0.0, 2**0.5)
    for i in range(6):
        mask[0] = ALL.clone() if i % 3 == 0 else torch.arange(3) != i % 3
        exact = torch.where(mask[0], fn.log_prob(X), 0.0).sum()
        if of_guide:
            assert abs(-elbo.loss(*pair) - exact) < 1e-9


@pytest.mark.parametrize("make", ["iwae", "sis", "compiled"])
def test_products_with_masks_that_change_read_nothing(make):
    mask, elbo = [ALL], WEIGH[make]()
    pair = masked_by(mask, read=lambda z: z * mask[0])
    for mask[0] in (ALL, KEPT, ~KEPT, ALL, KEPT, KEPT, KEPT, ALL, ~KEPT):
        assert math.isfinite(elbo.loss(*pair))


@in_turn(make=["iwae", "compiled"], first=[KEPT, ALL])
def test_a_latent_without_a_prior_stays_without_one(first, make):
    """Data that read entries that only the model masks: their prior is flat, at every step."""
    mask, elbo = [first], WEIGH[make]()
    pair = masked_by(mask, of_guide=False)
    for mask[0] in (first, KEPT, ALL, KEPT, KEPT, KEPT):
        result = elbo.loss(*pair)
        fresh = TraceIWAE_ELBO(3)
        pyro.set_rng_seed(3)
        result = elbo.loss(*pair)
        pyro.set_rng_seed(3)
        assert result == pytest.approx(fresh.loss(*pair), abs=1e-9)


def test_nothing_is_trained_by_a_step_that_is_refused():
    def guide():
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(loc, 1.0).mask(False))

    model = programs(inside(False))[0]
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 1.0}), TraceIWAE_ELBO(3))
    with pytest.raises(ValueError, match=READ):
        svi.step()
    assert bool((pyro.param("loc") == 0).all())


@pytest.mark.slow
def test_marginals_over_inducing_values_as_of_gpytorch():
    """p(u) / q(u) p(x | f) with f from the marginal q(f): the ELBO is right, and no weight is."""

    def model():
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            f = pyro.sample("f", dist.Normal(u, 0.5).mask(False))
            pyro.sample("x", dist.Normal(f, 0.5), obs=X)

    def guide():
        pyro.sample("u", dist.Normal(0.8, 0.4))
        with pyro.plate("data", 3):
            pyro.sample("f", dist.Normal(0.8, 0.41**0.5).mask(False))

    refused((model, guide), match="site 'f' from the guide's density, and site 'x'")
    result = torch.tensor([-TraceSGVB_ELBO(1000).loss(model, guide) for _ in range(10)]).mean()
    divergence = torch.distributions.kl_divergence(dist.Normal(0.8, 0.4), dist.Normal(0.0, 1.0))
    exact = (dist.Normal(0.8, 0.5).log_prob(X) - 0.41 / 0.5).sum() - divergence
    assert abs(result - exact) < 0.3  # the standard error is about 0.05


def gated(read, guide_extra=None):
    """Programs whose datum 1 is masked, and whose data read ``read(z)``."""

    def program(is_model):
        with pyro.plate("data", 3), poutine.mask(mask=KEPT):
            scale = 1.0 if is_model else 0.9
            z = pyro.sample("z", dist.Normal(torch.zeros(3), scale))
        if is_model:
            pyro.sample("x", dist.Normal(read(z), 1.0).to_event(1), obs=X)

    return lambda: program(True), lambda: program(False)


ZERO = torch.zeros(3, requires_grad=True)
PAIRS = torch.eye(3, dtype=torch.float64) * KEPT
READS = {
    "far threshold": lambda z: torch.where(z > 9.0, z, 0.0),
    "weight of zero": lambda z: z * ZERO,
    "dropped unit": lambda z: torch.nn.functional.dropout(z, 0.9),
    "tiny step": lambda z: (z * 1e-9).round(),
    "product with a zero factor": lambda z: torch.cat([z, torch.zeros(1)]).prod() * KEPT,
}
IGNORES = {
    "where": lambda z: torch.where(KEPT, z, 0.0),
    "masked_fill": lambda z: z.masked_fill(~KEPT, 0.0),
    "in place": lambda z: z.clone().masked_fill_(~KEPT, 0.0).mul_(2.0),
    "product in place": lambda z: z.clone().mul_(KEPT).cumsum(0),
    "number": lambda z: z * KEPT.float(),
    "selection": lambda z: z[[0, 2]].sum().expand(3),
    "matrix": lambda z: PAIRS @ z,
    "linear": lambda z: torch.nn.functional.linear(z, PAIRS),
    "attention": lambda z: (
        torch.nn.functional.scaled_dot_product_attention(
            *[z.reshape(1, 1, 3, 1)] * 3, attn_mask=KEPT.expand(1, 1, 3, 3)
        ).reshape(3)
        * KEPT
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_masked_draws_that_data_may_read_are_found_by_every_seed(read):
    """Whatever the draw: another one would seldom pass a threshold, or a dropped unit."""
    for seed in range(3):
        pyro.set_rng_seed(seed)
        with pytest.raises(ValueError, match=READ):
            TraceIWAE_ELBO(3).loss(*gated(read))


@pytest.mark.parametrize("read", IGNORES.values(), ids=IGNORES)
def test_masked_draws_that_operators_leave_out_are_not_read(read):
    assert math.isfinite(TraceIWAE_ELBO(3).loss(*gated(read)))
