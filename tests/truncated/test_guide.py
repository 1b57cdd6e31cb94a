"""The states of a truncated posterior: distinct, kept per datum, and what one asks of them."""

import contextlib
import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro import poutine
from pyro.infer import Predictive

from pyro_mcvae import (
    EvolutionaryUpdate,
    InformedFlips,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from pyro_mcvae.truncated import guide as guide_module
from pyro_mcvae.truncated.search import Parents
from pyro_mcvae.truncated.states import StateSpace, duplicates

N, H = 8, 4
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(H, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model(subsample=None, size=None, x=X):
    with pyro.plate("data", len(x), subsample=subsample, subsample_size=size) as i:
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
        pyro.sample("x", dist.Normal(z @ WEIGHT, 0.7).to_event(1), obs=x[i])


def mixed():
    """Every kind of site, and entries that do not exist."""
    with pyro.plate("data", N):
        b = pyro.sample("b", dist.Bernoulli(0.3 * torch.ones(2)).to_event(1))
        c = pyro.sample("c", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        h = pyro.sample("h", dist.OneHotCategorical(torch.ones(3)))
        n = pyro.sample("n", dist.Poisson(1.5))
        there = torch.arange(N) % 2 == 0
        m = pyro.sample("m", dist.Binomial(4, 0.3 * there))
        loc = b.sum(-1) + c * 0.5 + h[..., 0] - n + m
        pyro.sample("x", dist.Normal(loc, 1.0), obs=X[:, 0])


def assert_distinct(guide):
    for states in guide.buffers():
        rows = [{bytes(s.tolist()) for s in datum} for datum in states]
        assert all(len(row) == guide.num_states for row in rows)


mutations = UniformFlips(), InformedFlips(), InformedFlips(uniform=0.0)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.sampled_from(mutations),
    st.integers(1, 2**H),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([model, mixed]),
)
def test_e_steps_keep_states_distinct_and_never_lower_f(mutation, states, p, c, g, program):
    evolution = EvolutionaryUpdate(p, c, g, mutation=mutation)
    guide = TruncatedPosterior(program, states, evolution=evolution)
    before = guide.posterior().free_energy
    assert_distinct(guide)
    for _ in range(2):
        after = guide.fit()
        assert_distinct(guide)
        # An impossible first state has F of minus infinity.
        assert (after >= before - 1e-9).all()
        before = after


@pytest.mark.parametrize(
    "states", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 15, 16))]
)
def test_search_finds_the_best_states(states):
    """Enough steps find exactly the S most probable of all states, for every start."""
    evolution = EvolutionaryUpdate(4, 4, 2, mutation=UniformFlips())
    guide = TruncatedPosterior(model, states, evolution=evolution)
    result = guide.fit(num_steps=60)
    everything = TruncatedPosterior(model, 2**H).posterior().log_joint
    assert torch.allclose(result, everything.topk(states, dim=0).values.logsumexp(0))


def test_minibatches_change_their_own_data_only():
    guide = TruncatedPosterior(model, 5)
    guide.posterior()
    before = guide.states_data.clone()
    guide.fit(torch.tensor([6, 1]), num_steps=5)
    changed = (guide.states_data != before).flatten(1).any(1)
    assert changed[[6, 1]].any()
    assert not changed[[0, 2, 3, 4, 5, 7]].any()


def test_a_datum_may_stand_twice_in_a_minibatch():
    guide = TruncatedPosterior(model, 5)
    for _ in range(5):
        guide.fit(torch.tensor([3, 1, 3, 3]))
        assert_distinct(guide)


@pytest.mark.slow
def test_held_out_data_by_e_steps_with_frozen_parameters():
    test = X.flip(0)[:5] + 0.1
    held_out = TruncatedPosterior(lambda: model(x=test), 8)
    everything = TruncatedPosterior(lambda: model(x=test), 2**H).posterior().free_energy
    result = held_out.fit(num_steps=30)
    assert result.shape == (5,)
    assert (result <= everything + 1e-9).all()
    assert torch.allclose(result, everything, atol=0.5)


def test_posterior_queries_equal_the_exact_ones():
    guide = TruncatedPosterior(model, 2**H)
    posterior = guide.posterior()
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * H)
    joint = dist.Bernoulli(0.3).log_prob(states).sum(-1)[:, None]
    joint = joint + dist.Normal((states @ WEIGHT)[:, None], 0.7).log_prob(X).sum(-1)
    q = joint.softmax(0)
    assert torch.allclose(posterior.free_energy, joint.logsumexp(0))
    assert torch.allclose(posterior.marginals()["z"], q.t() @ states)
    assert torch.allclose(posterior.entropy(), -(q * q.log()).sum(0))
    assert torch.equal(posterior.map()["z"], states[joint.argmax(0)])
    means = posterior.expectation(lambda values: values["z"] @ WEIGHT)
    assert torch.allclose(means, q.t() @ states @ WEIGHT)
    drawn = posterior.sample(4000)["z"].mean(0)
    assert torch.allclose(drawn, q.t() @ states, atol=4.5 * 0.5 / 4000**0.5)


def test_the_entropy_of_one_state_is_zero():
    """Up to the sign, for any rounding of weights near 1."""
    for dtype in (torch.float64, torch.float32):
        x = X.to(dtype)
        entropy = TruncatedPosterior(lambda x=x: model(x=x), 1).posterior().entropy()
        assert (entropy == 0).all()
        assert not entropy.signbit().any()
        entropy = TruncatedPosterior(lambda x=x: model(x=50 * x), 2**H).posterior().entropy()
        assert not entropy.signbit().any()


def test_categorical_marginals_are_probabilities():
    marginals = TruncatedPosterior(mixed, 16).posterior().marginals()
    assert marginals["c"].shape == (N, 3)
    assert torch.allclose(marginals["c"].sum(-1), torch.ones(N))
    assert torch.allclose(marginals["h"].sum(-1), torch.ones(N))


@pytest.mark.parametrize("parallel", [False, True])
def test_draws_for_predictive(parallel):
    guide = TruncatedPosterior(model, 2**H)
    drawn = Predictive(model, guide=guide, num_samples=30, parallel=parallel)(size=3)
    assert drawn["z"].shape == (30, 3, H)
    assert drawn["x"].shape == (30, 3, 3)
    count = 600 if parallel else 60
    drawn = Predictive(model, guide=guide, num_samples=count, parallel=parallel)()
    exact = guide.posterior().marginals()["z"]
    assert torch.allclose(drawn["z"].mean(0), exact, atol=4.5 * 0.5 / count**0.5)


def nested():
    with pyro.plate("groups", 3, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(0.4))
        with pyro.plate("members", 2, dim=-2):
            b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a))
            pyro.sample("x", dist.Normal(a - b, 0.5), obs=X[:6, 0].view(2, 3))


@pytest.mark.parametrize("parallel", [False, True])
def test_draws_in_nested_plates_come_from_one_state(parallel):
    guide = TruncatedPosterior(nested, 8)
    posterior = guide.posterior()
    count = 1000 if parallel else 60
    drawn = Predictive(nested, guide=guide, num_samples=count, parallel=parallel)()
    a, b = drawn["a"].reshape(count, 1, 3), drawn["b"]
    product = posterior.expectation(lambda v: v["a"] * v["b"][:, :1])[0]
    assert torch.allclose((a * b)[:, 0].mean(0), product, atol=4.5 * 0.5 / count**0.5)
    assert posterior.map()["b"].shape == (2, 3)
    assert posterior.map()["a"].shape[-1] == 3


def test_states_are_saved_loaded_copied_and_pickled():
    guide = TruncatedPosterior(model, 5)
    wanted = guide.fit(num_steps=3)
    other = TruncatedPosterior(model, 5)
    other.load_state_dict(guide.state_dict())
    assert torch.equal(other.posterior().free_energy, wanted)
    assert torch.equal(copy.deepcopy(guide).posterior().free_energy, wanted)
    assert torch.equal(pickle.loads(pickle.dumps(guide)).posterior().free_energy, wanted)
    assert guide.states_data.dtype is torch.uint8
    assert guide.double().states_data.shape == (N, 5, 1)
    wrong = TruncatedPosterior(model, 4)
    wrong.load_state_dict(guide.state_dict())
    with pytest.raises(ValueError, match=r"shape \(8, 5, 1\).*needs \(8, 4, 1\)"):
        wrong.posterior()


def test_a_thousand_entries_are_packed():
    def wide():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.001 * torch.ones(1000)).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=X[:3, 0])

    guide = TruncatedPosterior(wide, 64, evolution=EvolutionaryUpdate(5, 4, 2))
    before = guide.posterior().free_energy
    assert guide.states_data.shape == (3, 64, 125)
    assert (guide.fit(num_steps=5) >= before).all()
    assert_distinct(guide)


def test_an_operator_of_ones_own():
    class FlipAll:
        def __call__(self, parents, count):
            return (1 - parents.states).unsqueeze(2).expand(-1, -1, count, -1)

    evolution = EvolutionaryUpdate(2, 2, 1, mutation=FlipAll())
    guide = TruncatedPosterior(model, 4, evolution=evolution)
    before = guide.posterior().free_energy
    assert (guide.fit(num_steps=3) >= before).all()
    assert_distinct(guide)


class AlwaysTheFirst(UniformFlips):
    """Nearly always: these propensities need Gumbel noise."""

    def scores(self, parents):
        return 50.0 * (torch.arange(parents.space.num_moves) == 0)


def test_uniform_moves_and_those_of_a_subclass_have_their_propensities():
    space = StateSpace([2] * 6)
    states = torch.zeros(20_000, 1, 6, dtype=torch.uint8)
    keys = space.keys(space.pack(states))
    parents = Parents(space, states, space.pack(states), torch.zeros(20_000, 1), keys)
    # Two of six moves without replacement.
    fraction = UniformFlips()(parents, 2).flatten(1, 2).double().mean((0, 1))
    assert ((fraction - 1 / 6).abs() < 4.5 * (5 / 36 / 40_000) ** 0.5).all()
    assert AlwaysTheFirst()(parents, 1)[..., 0].all()


def no_site():
    with pyro.plate("data", N):
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=X[:, 0])


def continuous():
    with pyro.plate("data", N):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z + w, 1.0), obs=X[:, 0])


def no_plate():
    z = pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("x", dist.Normal(z, 1.0), obs=X[0, 0])


def global_site():
    a = pyro.sample("a", dist.Bernoulli(0.5))
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z + a, 1.0), obs=X[:, 0])


def sequential():
    for i in pyro.plate("data", 3):
        z = pyro.sample(f"z_{i}", dist.Bernoulli(0.5))
        pyro.sample(f"x_{i}", dist.Normal(z, 1.0), obs=X[i, 0])


def unsearchable():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Multinomial(2, torch.ones(3)))
        pyro.sample("x", dist.Normal(z[..., 0], 1.0), obs=X[:, 0])


def masked():
    with pyro.plate("data", N), poutine.mask(mask=X[:, 0] > 0):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])


def masked_inside():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(3)).mask(X > 0).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=X)


def labelled():
    with pyro.plate("data", N):
        seen = X[:, 0] > 0
        z = pyro.sample("z", dist.Bernoulli(0.5), obs=torch.ones(N), obs_mask=seen)
        pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])


def side_by_side():
    for name, part in (("left", X[:4, 0]), ("right", X[4:, 0])):
        with pyro.plate(name, 4):
            z = pyro.sample(f"z_{name}", dist.Bernoulli(0.5))
            pyro.sample(f"x_{name}", dist.Normal(z, 1.0), obs=part)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (masked, "site 'z' is masked.*around the observations only"),
        (masked_inside, "site 'z' is masked.*around the observations only"),
        (labelled, "site 'z_unobserved' is masked.*pyro.factor"),
        (side_by_side, "sites 'z_left', 'z_right' lie in several data plates"),
        (no_site, "no discrete site"),
        (continuous, "site 'w' .Normal. is continuous.*pass guide="),
        (no_plate, "site 'z' has no data plate"),
        (global_site, "site 'a' has no data plate"),
        (sequential, "site 'z_0' .*plate"),
        (unsearchable, "site 'z' .* has support"),
    ],
)
def test_what_has_no_states_is_refused_by_name(program, message):
    guide = TruncatedPosterior(program, 2)
    with pytest.raises(ValueError, match=message):
        TraceTruncated_ELBO().loss(program, guide)
    assert not list(guide.buffers())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_states": 1.5}, "num_states must be an int of at least 1, got 1.5"),
        ({"evolution": UniformFlips()}, "evolution must be an EvolutionaryUpdate"),
        ({"guide": "auto"}, "guide must be a function of .*, or None, got 'auto'"),
        ({"prior_draws": -1}, "prior_draws must be an int of at least 0, got -1"),
        ({"vectorize": "yes"}, "vectorize must be True, False or None, got 'yes'"),
        ({"fixed_data": "no"}, "fixed_data must be True or False, got 'no'"),
        ({"exchange": "no"}, "exchange must be True or False, got 'no'"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        TruncatedPosterior(model, **{"num_states": 2, **given})
    with pytest.raises(ValueError, match=r"mutation must be .*, got 'uniform'"):
        EvolutionaryUpdate(mutation="uniform")
    with pytest.raises(ValueError, match="num_steps must be an int of at least 0, got -1"):
        TruncatedPosterior(model, 2).fit(num_steps=-1)


def test_more_states_than_there_are_is_refused():
    guide = TruncatedPosterior(model, 17)
    with pytest.raises(ValueError, match=r"num_states=17.*'z'.*pass num_states=16, which is exact"):
        guide.posterior()


def test_changed_data_and_indices_out_of_range_are_refused():
    guide = TruncatedPosterior(model, 4)
    guide.posterior()
    before = guide.states_data.clone()
    with pytest.raises(ValueError, match="plate 'data' has 5 data, but states are stored for 8"):
        TraceTruncated_ELBO().loss_and_grads(lambda: model(x=X[:5]), guide)
    for index, shown in ((8, 8), (-1, -1)):
        with pytest.raises((ValueError, IndexError), match=f"index {shown}|out of bounds"):
            guide.fit(torch.tensor([0, index]))
    assert torch.equal(guide.states_data, before)


def test_a_site_that_becomes_observed_is_refused():
    def semi(y=None):
        with pyro.plate("data", N):
            pyro.sample("y", dist.Bernoulli(0.5), obs=y)
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])

    guide = TruncatedPosterior(semi, 2)
    guide.posterior()
    with pytest.raises(ValueError, match="the model does not draw site 'y', or observes it"):
        guide.posterior(torch.ones(N))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("site", "the model draws site 'y', unlike at the first call: make another Truncated"),
        ("plate", "site 'z' is outside plate 'data', unlike at the first call"),
        ("dims", "the model has plates in 2 batch dims, not 1, unlike at the first call"),
        ("blocks", "the data have the plates .*, unlike at the first call"),
    ],
)
def test_another_structure_than_at_the_first_call_is_refused(change, message):
    def program(change=None):
        probs = torch.full((N,), 0.5)
        with contextlib.nullcontext() if change == "plate" else pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(probs))
            if change == "site":
                pyro.sample("y", dist.Bernoulli(probs))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])
        if change == "blocks":
            pyro.sample("total", dist.Normal(z.sum(), 1.0), obs=torch.tensor(0.0))
        if change == "dims":
            with pyro.plate("rows", 2, dim=-2):
                pyro.sample("row", dist.Normal(0.0, 1.0), obs=torch.zeros(2, 1))

    guide = TruncatedPosterior(program, 2, vectorize=False)
    guide.posterior()
    with pytest.raises(ValueError, match=message):
        guide.posterior(change)


def test_no_e_steps_and_no_states_in_evaluation_mode():
    guide = TruncatedPosterior(model, 4)
    guide.posterior()
    guide.eval()
    before = guide.states_data.clone()
    elbo = TraceTruncated_ELBO()
    first = elbo.loss_and_grads(model, guide)
    assert first == elbo.loss(model, guide)
    assert torch.equal(before, guide.states_data)
    assert elbo.num_runs == 1


def test_duplicates_by_key_are_those_by_value():
    space = StateSpace([2, 3, 5, 300])
    states = torch.stack([torch.randint(n, (6, 40)) for n in space.sizes], dim=-1)
    assert torch.equal(space.unpack(space.pack(states)).long(), states)
    result = duplicates(space.keys(space.pack(states)))
    for row, flags in zip(states.tolist(), result.tolist(), strict=True):
        assert flags == [state in row[:i] for i, state in enumerate(row)]


@pytest.mark.parametrize(("program", "vectorize"), [(model, False), (mixed, True)])
def test_draws_from_the_prior_may_seed_the_search(program, vectorize):
    nothing = EvolutionaryUpdate(num_generations=0)
    guide = TruncatedPosterior(program, 5, evolution=nothing, prior_draws=6, vectorize=vectorize)
    before = guide.posterior().free_energy
    after = guide.fit(num_steps=5)
    assert (after >= before).all()
    assert (after > before).any()
    assert_distinct(guide)


def test_other_data_in_a_plate_without_indices_are_told_of():
    guide = TruncatedPosterior(lambda x: model(x=x), 4)
    guide.fit(X)
    guide.fit(X)
    with pytest.raises(ValueError, match=r"has other values than before.*subsample=index"):
        guide.fit(X.flip(0))


@pytest.mark.slow
def test_states_that_were_made_in_inference_mode_train():
    """Their gradient is that of a guide which never was in it."""
    result = []
    for mode in (True, False):
        weight = WEIGHT.clone().requires_grad_()

        def program(weight=weight):
            with pyro.plate("data", N):
                z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
                pyro.sample("x", dist.Normal(z @ weight, 0.7).to_event(1), obs=X)

        guide, elbo = TruncatedPosterior(program, 5), TraceTruncated_ELBO()
        pyro.set_rng_seed(0)
        with torch.inference_mode(mode), torch.no_grad():
            guide.posterior()
            guide.load_state_dict({n: b.clone() for n, b in guide.named_buffers()})
            elbo.loss(program, guide)
        pyro.set_rng_seed(1)
        result.append((elbo.loss_and_grads(program, guide), weight.grad, guide.states_data))
    assert result[0][0] == result[1][0]
    assert torch.equal(result[0][1], result[1][1])
    assert torch.equal(result[0][2], result[1][2])


@pytest.mark.slow
def test_a_zero_inflated_count_has_its_exact_evidence():
    """Whose batch shape is a plain tuple in Pyro."""
    x = torch.tensor([0.5, 7.2, 3.3])
    prior = dist.ZeroInflatedPoisson(torch.full((3,), 3.0), gate=torch.full((3,), 0.4))

    def program():
        with pyro.plate("data", 3):
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Normal(z, 0.8), obs=x)

    guide = TruncatedPosterior(program, 24, evolution=EvolutionaryUpdate(8, 2, 4))
    counts = torch.arange(40.0)[:, None]
    joint = prior.log_prob(counts) + dist.Normal(counts, 0.8).log_prob(x)
    torch.testing.assert_close(guide.fit(num_steps=20), joint.logsumexp(0), rtol=0, atol=1e-6)


def test_impossible_states_have_no_weight_and_finite_gradients():
    logits = torch.zeros(3, requires_grad=True)

    def program():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))
            c = pyro.sample("c", dist.Categorical(torch.tensor([0.5, 0.5, 0.0])))
            hard = torch.where(z[..., 0] > 0, -torch.inf, 0.0)
            pyro.factor("never", hard + 0.0 * logits.sum())
            pyro.sample("x", dist.Normal(z[..., 2] + c, 1.0), obs=X[:2, 0])

    guide = TruncatedPosterior(program, 24)
    value = TraceTruncated_ELBO().loss_and_grads(program, guide)
    parts = [
        dist.Normal(z + c, 1.0).log_prob(X[:2, 0]) + 3 * torch.tensor(0.5).log()
        for z in (0.0, 1.0)
        for c in (0.0, 1.0)
    ]
    assert abs(value + torch.stack(parts).logsumexp(0).sum().item()) < 1e-6
    assert torch.isfinite(logits.grad).all()


def test_marks_for_enumeration_do_not_matter():
    def program():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])

    exact = pyro.infer.TraceEnum_ELBO(max_plate_nesting=1).loss(program, lambda: None)
    result = TraceTruncated_ELBO().loss(program, TruncatedPosterior(program, 2))
    assert abs(result - exact) < 1e-9


def test_a_mask_that_comes_later_is_refused():
    def program(there=None):
        with pyro.plate("data", N), poutine.mask(mask=True if there is None else there):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])

    guide = TruncatedPosterior(program, 2)
    guide.posterior()
    with pytest.raises(ValueError, match="site 'z' is masked"):
        guide.posterior(X[:, 0] > 0)


@pytest.mark.parametrize("exchange", [True, False])
def test_ranks_with_data_of_their_own_exchange_nothing(exchange, monkeypatch):
    met = []
    monkeypatch.setattr(guide_module.ranks, "concat_over_ranks", lambda t: met.append(t) or t)
    monkeypatch.setattr(guide_module.ranks, "from_first_rank", met.append)
    guide = TruncatedPosterior(model, 4, exchange=exchange)
    TraceTruncated_ELBO().loss_and_grads(model, guide)
    assert len(met) == (3 if exchange else 0)
