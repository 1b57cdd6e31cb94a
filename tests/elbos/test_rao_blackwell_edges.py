"""Costs of a step, noise that must not leak, degenerate probabilities, and errors."""

import math

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.infer.autoguide.effect import GuideMessenger
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    NVIL,
    REBAR,
    IndependentDraw,
    LeaveOneOut,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.elbos.discrete_programs import PROGRAMS, Discrete, param, randn, x
from tests.elbos.exhaustive import exhaustive
from tests.estimates import assert_mean


def one_site(logits, evaluated=None, infer=None, vector=False):
    def model():
        with pyro.plate("data", len(logits)):
            y = pyro.sample("y", dist.Categorical(torch.ones(logits.shape[-1])))
            if evaluated is not None:
                evaluated.append(y.shape)
            pyro.sample("x", dist.Normal(y.to(logits.dtype), 1.0), obs=torch.ones(len(logits)))

    def guide():
        logits_q = pyro.param("logits", lambda: logits.clone())
        with pyro.plate("data", len(logits)):
            pyro.sample("y", dist.Categorical(logits=logits_q), infer=infer or {})

    return model, guide


@pytest.mark.usefixtures("leading_dims_only")
def test_a_guide_without_slots_needs_no_leading_dims():
    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        centred = z - z.mean(0)  # of particles too, if there were any
        pyro.sample("x", dist.Normal(centred, 1.0).to_event(1), obs=torch.ones(4))

    def guide():
        pyro.sample("z", dist.Normal(torch.ones(4), 0.7).to_event(1))

    losses = []
    for elbo in (TraceRaoBlackwell_ELBO(), TraceSGVB_ELBO(analytic_kl=False)):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide))
    assert math.isclose(*losses, rel_tol=1e-12)
    with pytest.raises(RuntimeError, match="vectorize_particles=False"):
        TraceRaoBlackwell_ELBO(num_particles=3, vectorize_particles=True).loss(model, guide)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"num_categories": 2, "num_samples": 3}, 5),
        ({"num_categories": 2, "num_samples": 3, "baseline": IndependentDraw()}, 6),
        ({"num_categories": 1, "num_samples": 2, "baseline": LeaveOneOut()}, 3),
        ({"budget": 4}, 4),
        ({"num_categories": 1, "num_samples": 1, "baseline": REBAR(lambda y, x: y[..., 0])}, 2),
        ({"num_categories": 0}, None),
    ],
)
def test_evaluations_are_k_plus_n_and_one_with_an_independent_draw(options, count):
    shapes = []
    model, guide = one_site(torch.zeros(5, 10), shapes)
    elbo = TraceRaoBlackwell_ELBO(**options)
    for _ in range(3):  # the first two also analyse the programs
        elbo.loss_and_grads(model, guide)
    assert shapes[-1] == ((5,) if count is None else (count, 5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_categories": 0},
        {"num_categories": 2},
        {"num_categories": math.inf},
        {"budget": 2},
        {"baseline": IndependentDraw()},
        {"num_samples": 2, "baseline": LeaveOneOut()},
        {"baseline": REBAR(lambda y, x: y[..., 0])},
        {"entropy": "exact"},
    ],
)
def test_degenerate_probabilities_give_numbers(options):
    """Data with a value that cannot be, with ties, and with one value only."""
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf]])
    for given in (logits, logits[:, :1]):
        pyro.clear_param_store()
        model, guide = one_site(given)
        elbo = TraceRaoBlackwell_ELBO(**options)
        assert math.isfinite(elbo.loss_and_grads(model, guide))
        assert pyro.param("logits").grad.isfinite().all()
        assert elbo.differentiable_loss(model, guide).isfinite()
        assert elbo.bounds(model, guide).per_datum.isfinite().all()


def test_costs_that_do_not_depend_on_a_site_add_no_noise():
    def model(offset):
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
            u = pyro.sample("u", dist.Categorical(logits=param("other", 3)))
            pyro.sample("x", dist.Normal(param("mu", 3)[y], 1.0), obs=torch.zeros(3))
            pyro.sample("w", dist.Normal(param("nu", 3)[u] + offset, 1.0), obs=torch.zeros(3))
        pyro.factor("constant", torch.tensor(100.0) * offset)

    def guide(offset):
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Categorical(logits=param("q", 3, 3)))
            pyro.sample("u", dist.Categorical(logits=param("r", 3, 3)))

    for options in ({}, {"num_categories": 0}, {"num_categories": 0, "num_samples": 2}):
        result = []
        for offset in (0.0, 50.0):
            pyro.set_rng_seed(3)
            TraceRaoBlackwell_ELBO(**options).loss_and_grads(model, guide, offset)
            result.append(pyro.param("q").grad.clone())
            pyro.param("q").grad = None
        torch.testing.assert_close(*result)


def test_sites_by_themselves_and_enumerated_ones():
    shapes = []

    def slots_of(model, guide):
        elbo = TraceRaoBlackwell_ELBO(0)
        for _ in range(3):  # the first two also analyse the programs
            elbo.loss_and_grads(model, guide)
        return shapes[-1]

    model, guide = one_site(torch.zeros(5, 10), shapes, {"mcvae": {"num_categories": 3}})
    assert slots_of(model, guide) == (4, 5)
    model, guide = one_site(torch.zeros(5, 10), shapes, {"mcvae": {"budget": 7}})
    assert slots_of(model, guide) == (7, 5)
    model, guide = one_site(torch.zeros(5, 10), shapes)
    assert slots_of(model, config_enumerate(guide)) == (10, 1)


def test_a_one_hot_site_takes_no_square_tensor():
    size, largest = 500, [0]

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    def model():
        with pyro.plate("data", 7):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(size)))
            pyro.sample("x", dist.Normal(y @ torch.arange(float(size)), 1.0), obs=torch.ones(7))

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(7, size))
        with pyro.plate("data", 7):
            pyro.sample("y", dist.OneHotCategorical(logits=logits))

    with Watch():
        TraceRaoBlackwell_ELBO(5).loss_and_grads(model, guide)
    assert largest[0] <= 6 * 7 * size


def continuous(infer):
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        pyro.sample("z", dist.Normal(0.0, 1.0), infer=infer)

    return model, guide


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_categories": -1}, "num_categories must be an int of at least 0 .* got -1"),
        ({"num_categories": 1.5}, r"num_categories must be .* got 1\.5"),
        ({"num_samples": -2}, "num_samples must be an int of at least 0, got -2"),
        ({"num_categories": 0, "num_samples": 0}, "pass num_samples >= 1"),
        ({"budget": 0}, "budget must be an int of at least 1, got 0"),
        ({"baseline": LeaveOneOut()}, "needs num_samples >= 2, got 1"),
        ({"budget": 1, "baseline": LeaveOneOut()}, "needs budget >= 2, got 1"),
        ({"baseline": "nvil"}, "baseline must be a Baseline.* got 'nvil'"),
        ({"entropy": "none"}, "entropy must be 'sampled' or 'exact', got 'none'"),
    ],
)
def test_options_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        TraceRaoBlackwell_ELBO(**options)


@pytest.mark.parametrize("infer", [{}, {"enumerate": "parallel"}, {"mcvae": {"num_categories": 2}}])
@pytest.mark.parametrize(
    "make",
    [
        lambda: TraceRaoBlackwell_ELBO(math.inf),
        TraceRaoBlackwell_ELBO,
        lambda: TraceSIS_ELBO(2),
    ],
)
def test_discrete_values_with_a_gradient_are_not_summed(make, infer):
    """Sampled, and so 50 standard errors from the gradient of the sum that was asked for."""

    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(y @ torch.arange(3.0), 1.0), obs=torch.ones(3))

    def guide():
        with pyro.plate("data", 3):
            probs = pyro.param("probs", torch.ones(3, 3))
            pyro.sample("y", dist.OneHotCategoricalStraightThrough(probs), infer=infer)

    with pytest.raises(ValueError, match=r"'y' .OneHot.*StraightThrough. passes .* OneHotCategor"):
        make().loss_and_grads(model, guide)


def test_sites_that_cannot_have_slots_are_named():
    elbo = TraceRaoBlackwell_ELBO()
    with pytest.raises(ValueError, match=r"guide site 'z' .Normal. is continuous.*num_categories"):
        elbo.loss_and_grads(*continuous({"mcvae": {"num_categories": 2}}))
    with pytest.raises(ValueError, match=r"guide site 'y', infer=.*: num_categories .* -1"):
        elbo.loss_and_grads(*one_site(torch.zeros(2, 3), infer={"mcvae": {"num_categories": -1}}))
    with pytest.raises(ValueError, match=r"'y' has 3 values.*num_samples=0 leaves the others out"):
        TraceRaoBlackwell_ELBO(1, 0).loss_and_grads(*one_site(torch.zeros(2, 3)))


def meeting(is_model):
    """All elements of a plate in the mean of one factor, and of each of a plate's."""
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Bernoulli(logits=param("p" if is_model else "q", 3)))
        if is_model:
            pyro.sample("x", dist.Normal(param("w") * y.mean(), 1.0), obs=torch.zeros(3))


def outside(is_model):
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Bernoulli(logits=param("p" if is_model else "q", 3)))
    if is_model:
        total = y.sum(-1, keepdim=True)
        pyro.sample("x", dist.Normal(param("w") * total, 1.0), obs=torch.tensor(2.0))


@pytest.mark.parametrize(("run", "k"), [(meeting, 2), (outside, 2), (outside, 0)])
def test_elements_that_meet_in_a_factor_are_summed_together(run, k, caplog):
    model, guide = (lambda: run(True)), (lambda: run(False))
    TraceRaoBlackwell_ELBO(0).loss(model, guide)
    loss, grads = exhaustive(model, guide)
    elbo = TraceRaoBlackwell_ELBO(math.inf)
    assert elbo.loss_and_grads(model, guide) == pytest.approx(loss)
    result = Discrete.take_gradients()
    for key, value in grads.items():
        torch.testing.assert_close(result[key], value)
    assert "of the model depends" in caplog.text
    elbo, runs = TraceRaoBlackwell_ELBO(k, num_particles=50), []
    for i in range(20):
        with pyro.validation_enabled(i == 0):
            runs.append([torch.tensor([elbo.loss_and_grads(model, guide)])])
        runs[-1] += [v.flatten() for v in Discrete.take_gradients().values()]
    steps = torch.stack([torch.cat(r) for r in runs])
    truth = torch.cat([torch.tensor([loss]), *(v.flatten() for v in grads.values())])
    assert ((steps.mean(0) - truth).abs() < 5 * steps.std(0) / 20**0.5 + 1e-9).all()


def test_programs_that_do_not_broadcast_are_exact_under_vmap():
    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(y.reshape(3), 1.0), obs=torch.zeros(3))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Bernoulli(logits=param("q", 3)))

    param("q", 3)
    loss, grads = exhaustive(model, guide)
    result = TraceRaoBlackwell_ELBO(vectorize_particles=True).loss_and_grads(model, guide)
    assert result == pytest.approx(loss)
    torch.testing.assert_close(Discrete.take_gradients(), grads)


def test_an_nvil_network_of_the_wrong_shape():
    class Wrong(torch.nn.Module):
        def forward(self, given):
            return torch.zeros(7)

    model, guide = one_site(torch.zeros(5, 3))
    elbo = TraceRaoBlackwell_ELBO(baseline=NVIL(Wrong()))
    with pytest.raises(ValueError, match=r"got none: pass another one by"):
        elbo.loss_and_grads(model, guide)
    site = {"mcvae": {"baseline_input": x(5)}}
    with pytest.raises(ValueError, match=r"must return shape .*5,.*got \(7,\)"):
        elbo.loss_and_grads(*one_site(torch.zeros(5, 3), infer=site))


class Scored(GuideMessenger):
    """Draws that are not reparameterized, discrete ones from their prior."""

    def get_posterior(self, name, prior):
        if prior.support.is_discrete:
            return prior
        loc = pyro.param("loc", torch.full(prior.batch_shape, 0.2))
        return dist.Normal(loc, 1.0).has_rsample_(False)


def test_messenger_guides_have_no_slots():
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def mixed():
        pyro.sample("y", dist.Bernoulli(0.3))
        model()

    assert math.isfinite(TraceRaoBlackwell_ELBO().loss_and_grads(model, AutoNormalMessenger(model)))
    with pytest.raises(ValueError, match=r"site 'y' .* can have no slots"):
        TraceRaoBlackwell_ELBO().loss(mixed, Scored(mixed))


def test_messenger_guides_score_continuous_draws():
    def model():
        with pyro.plate("data", 4000):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

    TraceRaoBlackwell_ELBO().loss_and_grads(model, Scored(model))
    assert_mean(pyro.param("loc").grad, 0.2 + (0.2 - 0.7))


@pytest.mark.parametrize(
    ("name", "vectorize"),
    # In turn: how particles run does not depend on how the program is built.
    [pytest.param(n, bool(i % 2), id=f"{bool(i % 2)}-{n}") for i, n in enumerate([*PROGRAMS][::3])],
)
def test_interfaces_agree_under_one_seed(name, vectorize):
    program = PROGRAMS[name]
    result = []
    for _ in range(2):
        elbo = TraceRaoBlackwell_ELBO(num_particles=3, vectorize_particles=vectorize)
        for method in ("loss", "differentiable_loss", "loss_and_grads"):
            pyro.set_rng_seed(5)
            value = getattr(elbo, method)(program.model, program.guide)
            result.append(value.item() if isinstance(value, torch.Tensor) else value)
        pyro.set_rng_seed(5)
        result.append(-float(elbo.bounds(program.model, program.guide).total))
    assert max(result) - min(result) < 1e-9 * abs(result[0])


def test_subsampled_steps_share_one_minibatch():
    seen = []

    def model():
        with pyro.plate("data", 10, subsample_size=3) as i:
            seen.append(i)
            pyro.sample("y", dist.Bernoulli(0.5 * torch.ones(3)))

    def guide():
        with pyro.plate("data", 10, subsample_size=3) as i:
            seen.append(i)
            pyro.sample("y", dist.Bernoulli(logits=param("q", 10)[i]))

    elbo = TraceRaoBlackwell_ELBO(num_particles=3, vectorize_particles=False)
    for _ in range(2):
        elbo.loss_and_grads(model, guide)
    seen.clear()
    elbo.loss_and_grads(model, guide)
    assert len(seen) == 6
    assert all((i == seen[0]).all() for i in seen)


def test_parameters_of_a_float32_program_keep_their_type():
    q = randn(4, 3).float()

    def model():
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.Categorical(logits=torch.zeros(3, dtype=torch.float32)))
            loc = torch.arange(3, dtype=torch.float32)[y]
            one = torch.ones((), dtype=torch.float32)
            pyro.sample("x", dist.Normal(loc, one), obs=one.expand(4))

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Categorical(logits=pyro.param("q", q)))

    for options in ({}, {"baseline": REBAR(lambda y, x: y[..., 0])}, {"entropy": "exact"}):
        loss = TraceRaoBlackwell_ELBO(**options).differentiable_loss(model, guide)
        assert loss.dtype == torch.float32


def test_sequences_whose_slots_multiply_are_refused_and_the_remedies_work():
    def sequence(observe):
        y = None
        for t in pyro.markov(range(30)):
            logits = torch.zeros(3) if y is None else Vindex(param("a", 3, 3))[y, :]
            y = pyro.sample(f"y{t}", dist.Categorical(logits=logits))
            if observe:
                pyro.sample(f"x{t}", dist.Normal(y.to(logits.dtype), 1.0), obs=torch.tensor(1.0))

    programs = (lambda: sequence(True)), (lambda: sequence(False))
    with pytest.raises(ValueError, match=r"site 'y\d+' would take \d+ slots.*math.inf.*once by"):
        TraceRaoBlackwell_ELBO().loss_and_grads(*programs)
    assert math.isfinite(TraceRaoBlackwell_ELBO(0).loss_and_grads(*programs))
    exact = TraceEnum_ELBO(max_plate_nesting=0).loss(programs[0], config_enumerate(programs[1]))
    assert math.isclose(TraceRaoBlackwell_ELBO(math.inf).loss(*programs), exact)


def test_labels_joined_with_data_have_the_sizes_of_their_plates():
    x = torch.tensor([0.3, -1.0, 0.8])

    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Categorical(torch.tensor([0.3, 0.7])))
            labels = torch.nn.functional.one_hot(y, 2).to(x)
            both = torch.cat([x[:, None].expand(*y.shape, 1), labels], -1)
            pyro.sample("x", dist.Normal(both @ torch.tensor([0.5, 1.0, -1.0]), 1.0), obs=x)

    def guide(**infer):
        with pyro.plate("data", 3):
            logits = torch.tensor([0.2, 0.0]).expand(3, 2)
            pyro.sample("y", dist.Categorical(logits=logits), infer=infer)

    def expanded():
        guide(enumerate="parallel", expand=True)

    exact = TraceEnum_ELBO(max_plate_nesting=1).loss(model, expanded)
    for program in (guide, expanded):
        assert math.isclose(TraceRaoBlackwell_ELBO(math.inf).loss(model, program), exact)


def test_sequential_enumeration_is_the_exact_sum():
    logits = torch.tensor([[0.2, -1.0, 0.4], [1.0, 0.0, 0.3]])
    losses = [
        TraceRaoBlackwell_ELBO(num).loss(*one_site(logits, infer=infer))
        for num, infer in ((math.inf, None), (1, {"enumerate": "sequential"}))
    ]
    model, guide = one_site(logits)
    losses.append(TraceEnum_ELBO().loss(model, config_enumerate(guide, "sequential")))
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-9)


@pytest.mark.parametrize("baseline", [None, LeaveOneOut()])
def test_draws_of_one_site_have_the_mean_of_the_exact_sum(baseline):
    def gradients(elbo, infer, count):
        logits = torch.tensor([0.2, -1.0, 0.4]).expand(count, 3)
        pyro.clear_param_store()
        elbo.loss_and_grads(*one_site(logits, infer=infer))
        return next(p for _, p in pyro.get_param_store().named_parameters()).grad

    exact = gradients(TraceRaoBlackwell_ELBO(math.inf), None, 1)[0]
    drawn = {"enumerate": "parallel", "num_samples": 4}
    elbo = TraceRaoBlackwell_ELBO(num_samples=2, baseline=baseline)
    assert_mean(gradients(elbo, drawn, 4000), exact)


def test_a_baseline_that_needs_more_draws_of_one_site_says_so():
    drawn = {"enumerate": "parallel", "num_samples": 1}
    with pytest.raises(
        ValueError, match=r"site 'y'.*LeaveOneOut compares.*num_samples >= 2, got 1"
    ):
        TraceRaoBlackwell_ELBO(num_samples=2, baseline=LeaveOneOut()).loss(
            *one_site(torch.zeros(2, 3), infer=drawn)
        )


def test_continuous_sites_with_draws_of_their_own_are_drawn_once(caplog):
    losses = []
    for infer in (None, {"enumerate": "parallel", "num_samples": 10}):
        pyro.set_rng_seed(0)
        losses.append(TraceRaoBlackwell_ELBO(num_particles=3).loss(*continuous(infer or {})))
    assert losses[0] == losses[1]
    assert "'z' (Normal) is marked for 10 draws" in caplog.text
