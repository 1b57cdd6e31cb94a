"""Masks of a model and of its guide: the evidence is that of the observed entries, or refused."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
    init_to_value,
)
from pyro.infer.reparam import NeuTraReparam

from pyro_mcvae import (
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
    refine,
    sandwich,
)
from tests.estimates import called
from tests.params import in_turn

X = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
OBSERVED = torch.tensor([True, False, True])
# The evidence of the observed entries of X, whose latents have variance 1 and noise variance 1.
EXACT = torch.where(OBSERVED, dist.Normal(0.0, math.sqrt(2)).log_prob(X), 0.0)
LENGTHS = torch.tensor([3, 2, 1])
SERIES = torch.tensor([[1.9, 0.3, 1.1], [2.5, -0.4, 1.4], [0.8, 2.2, 1.7]]).double()


def imputing(scale=1.0):
    with pyro.plate("data", 3), poutine.scale(scale=scale):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X, obs_mask=OBSERVED)


def imputing_guide(mask=None, scale=1.0):
    with pyro.plate("data", 3), poutine.scale(scale=scale):
        pyro.sample("z", dist.Normal(X / 2, 0.8))
        fn = dist.Normal(X / 2, 1.5)
        pyro.sample("x_unobserved", fn if mask is None else fn.mask(mask))


def ragged(series=SERIES):
    with pyro.plate("data", 3):
        z = torch.zeros(3)
        for t, x in enumerate(series):
            with poutine.mask(mask=t < LENGTHS):
                z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x)


def ragged_observations():
    with pyro.plate("data", 3):
        z = torch.zeros(3)
        for t, x in enumerate(SERIES):
            z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
            pyro.sample(f"x_{t}", dist.Normal(z, 0.5).mask(t < LENGTHS), obs=x)


def exact_ragged():
    """Each datum is a Gaussian vector of its own length."""
    result = []
    for n, length in enumerate(LENGTHS.tolist()):
        times = torch.arange(length, dtype=torch.float64)
        moves = torch.tril(0.9 ** (times[:, None] - times))
        covariance = moves @ moves.T + 0.25 * torch.eye(length)
        fn = dist.MultivariateNormal(torch.zeros(length), covariance)
        result.append(fn.log_prob(SERIES[:length, n]))
    return torch.stack(result)


def near(value):
    """Where a guide of the series may begin, close enough for importance sampling."""
    values = {f"z_{t}": 0.8 * x for t, x in enumerate(value)}
    return {"init_loc_fn": init_to_value(values=values), "init_scale": 1.2}


def assert_near(result, exact):
    error = result.log_evidence - exact
    assert bool((error.abs() < 4 * result.standard_error + 1e-9).all()), error


@pytest.mark.parametrize(("mask", "vectorize"), [(None, False), (~OBSERVED, True)])
def test_missing_data_have_the_evidence_of_the_observed_ones(mask, vectorize):
    count = 6000 if vectorize else 100
    result = log_evidence(
        imputing,
        lambda: imputing_guide(mask),
        num_particles=count,
        vectorize_particles=vectorize,
    )
    assert_near(result, EXACT)


def test_an_auto_guide_of_missing_data_has_their_evidence():
    guide = called(AutoNormal(imputing, init_scale=1.5))
    result = log_evidence(imputing, guide, num_particles=20_000)
    assert_near(result, EXACT)
    chains = log_evidence(imputing, guide, num_particles=300, schedule=2, warmup=5)
    assert_near(chains, EXACT)


@pytest.mark.parametrize("options", [{"num_particles": 20_000}, {"schedule": 4, "warmup": 5}])
def test_padded_series_have_the_evidence_of_their_own_length(options):
    guide = called(AutoNormal(ragged, **near(SERIES)))
    result = log_evidence(ragged, guide, **{"num_particles": 400, **options})
    assert_near(result, exact_ragged())


def test_padded_series_whose_observations_alone_are_masked():
    """The unused latents follow their prior."""
    guide = called(AutoNormal(ragged_observations, **near(SERIES)))
    assert_near(log_evidence(ragged_observations, guide, num_particles=20_000), exact_ragged())
    bounds = TraceIWAE_ELBO(5000, vectorize_particles=True).bounds(ragged_observations, guide)
    assert bool((bounds.per_datum - exact_ragged()).abs().max() < 0.3)


@pytest.mark.slow
def test_one_vector_of_all_latents_has_the_evidence_of_all_data():
    guide = called(AutoDiagonalNormal(ragged, **near(SERIES)))
    result = log_evidence(ragged, guide, num_particles=600, schedule=4, warmup=4)
    assert_near(result, exact_ragged().sum())


@pytest.mark.slow
def test_draws_of_missing_entries_are_those_of_their_prior():
    """Also where the entry is observed: the draw is one of what might have been."""
    guide = called(AutoNormal(imputing, init_scale=1.5))
    draws = refine(imputing, guide, num_samples=1500, num_transitions=3, schedule=4, warmup=5)
    z, x = draws["z"], draws["x_unobserved"]
    expected = torch.where(OBSERVED, X / 2, 0.0)
    variance = torch.where(OBSERVED, 0.5, 1.0)
    error = (variance / 1500).sqrt()
    assert bool(((z.mean(0) - expected).abs() < 4 * error).all())
    assert bool(((x.mean(0) - expected).abs() < 4 * ((variance + 1) / 1500).sqrt()).all())
    assert bool((((x - z).var(0) - 1).abs() < 4 * math.sqrt(2 / 1500)).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the guide draws the same latents")
def test_padded_series_lie_between_their_bounds():
    result = sandwich(
        ragged,
        called(AutoNormal(ragged, **near(SERIES))),
        SERIES,
        num_particles=8,
        schedule=3,
        warmup=1,
        num_simulations=4,
        to_args=lambda data: torch.stack([data[f"x_{t}"] for t in range(3)]),
    )
    gap = (result.upper - result.lower).sum(-1)
    assert bool(gap.mean() > -4 * gap.std() / math.sqrt(4))
    assert bool(gap.isfinite().all())


def test_what_the_model_alone_counts_is_refused():
    mask = torch.tensor([False, False, True])
    with pytest.raises(ValueError, match=r"'x_unobserved' has .* from the guide and not from"):
        log_evidence(imputing, lambda: imputing_guide(mask))


def test_a_masked_latent_that_the_model_reads_is_refused():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).mask(OBSERVED))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    with pytest.raises(ValueError, match="'z' has entries that a mask removes from the model"):
        log_evidence(model, called(AutoNormal(model)))


@pytest.mark.slow
def test_a_prior_may_stand_in_a_factor():
    """``.mask(False)`` leaves the support alone, as Pyro's compartmental models have it."""

    def model(flat):
        with pyro.plate("data", 3):
            z = pyro.sample("z", flat)
            pyro.factor("prior", dist.Normal(0.0, 1.0).log_prob(z))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    exact = dist.Normal(0.0, math.sqrt(2)).log_prob(X)
    at_half = init_to_value(values={"z": X / 2})
    for flat, scale, how in (
        (dist.Uniform(-9.0, 9.0), 0.2, {"num_particles": 4000}),
        (dist.Normal(0.0, 4.0), 0.8, {"num_particles": 400, "schedule": 5, "warmup": 5}),
    ):
        pyro.clear_param_store()
        flat = flat.mask(False)
        guide = AutoNormal(model, init_loc_fn=at_half, init_scale=scale)
        guide(flat)
        assert_near(log_evidence(model, guide, flat, **how), exact)


def test_a_masked_prior_draws_no_data():
    def model(x):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 3.0).mask(False))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(x, 1.0))

    with pytest.raises(ValueError, match=r"'z' of the model has .mask\(False\)"):
        sandwich(model, guide, X)


def test_a_messenger_guide_has_the_masks_of_its_model():
    guide = called(AutoNormalMessenger(imputing, init_scale=1.5))
    result = log_evidence(imputing, guide, num_particles=20_000)
    assert_near(result, EXACT)


# Ways to write that padding does not count, and the entries of which each value counts.
PADDED = torch.tensor([True, True, False])
PARTS = torch.tensor([[True, False], [True, True], [False, False]])
WAYS = {
    "inside": lambda fn: fn.mask(PADDED[:, None]).to_event(1),
    "around": lambda fn: fn.to_event(1).mask(PADDED),
    "parts": lambda fn: fn.mask(PARTS).to_event(1),
    "none": lambda fn: fn.to_event(1),
}
PAIRS = torch.tensor([[0.3, -1.0], [2.0, 0.4], [7.0, 7.0]], dtype=torch.float64)


def paired(way):
    mask = PARTS if way == "parts" else PADDED[:, None]

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", WAYS[way](dist.Normal(torch.zeros(3, 2), 1.0)))
            pyro.sample("x", dist.Normal(z, 1.0).mask(mask).to_event(1), obs=PAIRS)

    exact = (dist.Normal(0.0, math.sqrt(2)).log_prob(PAIRS) * mask).sum(-1)
    return model, exact


def paired_guide(way):
    with pyro.plate("data", 3):
        pyro.sample("z", WAYS[way](dist.Normal(PAIRS / 2, 0.8)))


@pytest.mark.parametrize(
    ("way", "guide_way"),
    [pytest.param("inside", "none", marks=pytest.mark.slow), ("inside", "around"),
     pytest.param("around", "inside", marks=pytest.mark.slow), ("parts", "around"),
     ("parts", "none"), ("inside", "inside")],
)  # fmt: skip
def test_masks_inside_of_an_event_are_those_around_it(way, guide_way):
    """By draws, or by chains in turn."""
    model, exact = paired(way)
    by_chains = way != guide_way and guide_way in ("none", "inside")
    options = {"num_particles": 100, "schedule": 4} if by_chains else {"num_particles": 4000}
    result = log_evidence(model, lambda: paired_guide(guide_way), **options)
    assert_near(result, exact)


@pytest.mark.slow
def test_an_auto_guide_of_a_model_with_masks_inside_of_an_event():
    model, exact = paired("inside")
    guide = called(AutoNormal(model, init_scale=0.8))
    assert_near(log_evidence(model, guide, num_particles=400, schedule=3, warmup=5), exact)


@pytest.mark.parametrize(("way", "guide_way"), [("none", "inside"), ("inside", "parts")])
def test_a_mask_inside_of_the_guides_event_is_refused(way, guide_way):
    with pytest.raises(ValueError, match=r"'z' has entries that a mask removes from the guide"):
        log_evidence(paired(way)[0], lambda: paired_guide(guide_way))


def test_masks_that_are_drawn_inside_of_an_event():
    """As AIR's: log E_q[w] by quadrature over the drawn a, whose b counts where a > 0."""

    def program(guide):
        def run():
            with pyro.plate("data", 3):
                a = pyro.sample("a", dist.Normal(0.3 if guide else 0.0, 1.0))
                fn = dist.Normal(torch.full((3, 1), 0.4 if guide else 1.0), 0.8 if guide else 1.0)
                b = pyro.sample("b", fn.mask(a[..., None] > 0).to_event(1))
                if not guide:
                    mean = torch.where(a > 0, a + b[..., 0], a)
                    pyro.sample("x", dist.Normal(mean, 1.0), obs=X)

        return run

    a = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    seen = dist.Normal(a + 1, math.sqrt(2)).log_prob(X), dist.Normal(a, 1.0).log_prob(X)
    likelihood = torch.where(a > 0, *seen)
    exact = (dist.Normal(0.0, 1.0).log_prob(a) + likelihood).logsumexp(0) + math.log(16 / 4000)
    assert_near(log_evidence(program(False), program(True), num_particles=20_000), exact)


def test_a_mask_inside_of_a_transform_is_refused():
    def guide():
        with pyro.plate("data", 3):
            fn = dist.Normal(PAIRS / 2, 0.8).mask(PADDED[:, None])
            moved = dist.TransformedDistribution(fn, [dist.transforms.AffineTransform(0.1, 1.0)])
            pyro.sample("z", moved.to_event(1))

    with pytest.raises(ValueError, match="'z' of the guide has a mask inside a"):
        log_evidence(paired("none")[0], guide)


def test_a_masked_auxiliary_draw_is_refused():
    def guide():
        with pyro.plate("data", 3):
            fn = dist.Normal(PAIRS / 2, 0.8).mask(False).to_event(1)
            u = pyro.sample("u", fn, infer={"is_auxiliary": True})
            pyro.sample("z", dist.Delta(u, event_dim=1))

    with pytest.raises(ValueError, match="auxiliary site 'u'"):
        log_evidence(paired("none")[0], guide)


class TestTransportedLatents:
    """NeuTraReparam masks the noise, and counts the latents' density where they are computed."""

    Y = torch.tensor([1.0, -1.0], dtype=torch.float64)

    def model(self):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(torch.stack([a, b], -1), 1.0).to_event(1), obs=self.Y)

    def programs(self):
        first = called(AutoMultivariateNormal(self.model, init_scale=0.5))
        model = NeuTraReparam(first).reparam(self.model)
        return model, called(AutoNormal(model, init_scale=1.6))

    @pytest.mark.slow
    def test_their_evidence_is_that_of_the_model(self):
        covariance = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        exact = dist.MultivariateNormal(torch.zeros(2), covariance).log_prob(self.Y)
        assert_near(log_evidence(*self.programs(), num_particles=1000), exact)

    @pytest.mark.slow
    def test_their_priors_are_no_likelihoods(self):
        draws = refine(*self.programs(), num_samples=4)
        assert list(draws.log_likelihood) == list(draws.observed) == ["y"]

    @pytest.mark.slow
    def test_data_cannot_be_drawn_from_them(self):
        with pytest.raises(
            ValueError, match="'a' of the model is a point mass with another density"
        ):
            sandwich(*self.programs())


def test_a_scaled_guide_is_refused():
    with pytest.raises(ValueError, match=r"'z' of the guide is scaled by .* \(0.5\)"):
        log_evidence(lambda: imputing(0.5), lambda: imputing_guide(~OBSERVED, 0.5))


def test_a_latent_whose_prior_is_a_factor_is_not_taken_for_padding(caplog):
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).mask(False))
            pyro.factor("prior", dist.Normal(0.0, 1.0).log_prob(z))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(X / 2, 0.5**0.5))

    exact = dist.Normal(0.0, 2**0.5).log_prob(X).sum().item()
    assert TraceIWAE_ELBO(2).loss(model, guide) == pytest.approx(-exact)
    assert "not a bound" not in caplog.text


def imputing_all():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x_observed", dist.Normal(z, 1.0).mask(OBSERVED), obs=X)
        pyro.sample("x_unobserved", dist.Normal(z, 1.0))


LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(5),
    "looped": lambda: TraceIWAE_ELBO(5, vectorize_particles=False),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.02)),
    "compiled": lambda: CompiledELBO(TraceIWAE_ELBO(5), backend="eager"),
    "ais": lambda: TraceAIS_ELBO(2, num_particles=3),
}


@in_turn((2, 4, 5), name=LOSSES, kind=["ragged", "imputing"])
def test_masked_latents_that_the_guide_counts_have_their_prior(name, kind):
    """
    As if only the observations were masked; else the entropy of padding would have no limit.

    By Pyro's ELBO the padded series reach 0.6 nats after 400 steps, with an evidence of -9.5.
    """

    model, counting = {
        "ragged": (ragged, ragged_observations),
        "imputing": (imputing, imputing_all),
    }[kind]

    def steps(program):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = called(AutoNormal(model, init_scale=0.5))
        pyro.set_rng_seed(2)
        svi = SVI(program, guide, pyro.optim.Adam({"lr": 0.1}), LOSSES[name]())
        return [svi.step() for _ in range(3)]

    # The first step finds the latents; what it draws for that is drawn again.
    assert steps(model) == pytest.approx(steps(counting), rel=1e-9)


def test_different_masks_of_model_and_guide_are_logged(caplog):
    more = torch.tensor([True, True, False])
    TraceIWAE_ELBO(3).loss(imputing, lambda: imputing_guide(more))
    assert "'x_unobserved' has entries that a mask removes from the model" in caplog.text
    caplog.clear()
    TraceIWAE_ELBO(3).loss(imputing, lambda: imputing_guide(~OBSERVED))
    assert "x_unobserved" not in caplog.text


@pytest.mark.slow
def test_a_mask_that_removes_entries_of_a_later_minibatch_alone():
    """The first series are full, so that the first analysis has nothing to compare."""

    def series(lengths):
        with pyro.plate("data", 3):
            z = torch.zeros(3)
            for t, x in enumerate(SERIES):
                with poutine.mask(mask=t < lengths):
                    z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                    pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x)

    guide = AutoNormal(series, **near(SERIES))
    loss = TraceIWAE_ELBO(4000)
    full = torch.full((3,), 3)
    guide(full)
    for _ in range(3):  # the next use has no fresh analysis
        loss.loss(series, guide, full)
    for lengths in (LENGTHS, full, LENGTHS):
        fresh = TraceIWAE_ELBO(4000).loss(series, guide, lengths)
        assert abs(loss.loss(series, guide, lengths) - fresh) < 0.3
    assert abs(loss.loss(series, guide, LENGTHS) + float(exact_ragged().sum())) < 0.3


def test_a_flat_prior_that_other_factors_have_is_not_counted():
    """With ``.mask(False)`` the prior of z is in a factor, which depends on z."""

    def flat():
        z = pyro.sample("z", dist.Normal(0.0, 10.0).mask(False))
        pyro.factor("prior", dist.Normal(0.0, 1.0).log_prob(z))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))

    guide = called(AutoNormal(flat, init_scale=0.8))
    exact = float(dist.Normal(0.0, math.sqrt(2)).log_prob(torch.tensor(1.0)))
    value = -TraceIWAE_ELBO(4000).loss(flat, guide)
    assert abs(value - exact) < 0.1
