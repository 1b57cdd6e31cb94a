"""Laws of the free energy of truncated posteriors, on programs of every shape."""

import math

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate

from pyro_mcvae import (
    EvolutionaryUpdate,
    TraceIWAE_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from tests.elbos import discrete_programs

N = 6
X = torch.tensor([1.9, 0.3, -1.1, 2.5, -0.4, 1.4])


def data():
    return X.to(torch.get_default_dtype())


def param(name, *shape):
    made = torch.Generator().manual_seed(len(name) + 7 * sum(shape))
    return pyro.param(name, lambda: torch.randn(shape, generator=made, dtype=torch.float64))


def several(subsample=None, size=None):
    with pyro.plate("data", N, subsample=subsample, subsample_size=size) as i:
        c = pyro.sample("c", dist.Categorical(logits=param("c_logits", 3)))
        b = pyro.sample("b", dist.Bernoulli(logits=param("b_logits", 3)[c]))
        h = pyro.sample("h", dist.OneHotCategorical(logits=param("h_logits", 3)))
        loc = param("locs", 3)[c] + b * (h * param("h_locs", 3)).sum(-1)
        pyro.sample("x", dist.Normal(loc, 0.7), obs=data()[i])


def chain():
    transitions, starts = param("transitions", 3, 3), param("starts", 3)
    with pyro.plate("data", 2):
        logits = starts
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
            logits = transitions[z]
            pyro.sample(f"x_{t}", dist.Normal(param("locs", 3)[z], 0.7), obs=data().view(3, 2)[t])


def ragged():
    """Sequences of several lengths: what does not exist is surely zero, and has no data."""
    lengths, transitions = torch.tensor([3, 1]), param("transitions", 2)
    with pyro.plate("data", 2):
        logit = param("starts", 1)
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(logit.sigmoid() * (t < lengths)))
            logit = transitions[z.long()]
            with poutine.mask(mask=t < lengths):
                x = data().view(3, 2)[t]
                pyro.sample(f"x_{t}", dist.Normal(param("locs", 2)[z.long()], 0.7), obs=x)


def semi_supervised():
    labelled = torch.tensor([True, False, True, False, False, True])
    labels = torch.tensor([0, 0, 2, 0, 0, 1])
    with pyro.plate("data", N):
        y = pyro.sample("y", dist.Categorical(logits=param("y_logits", 3)))
        pyro.factor("labels", torch.where(labelled & (y != labels), -torch.inf, 0.0))
        b = pyro.sample("b", dist.Bernoulli(logits=param("b_logits", 3)[y]))
        pyro.sample("x", dist.Normal(param("locs", 3)[y] + b, 0.7), obs=data())


def nested():
    with pyro.plate("groups", 3, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(logits=param("a_logits", 1)))
        with pyro.plate("members", 2, dim=-2):
            b = pyro.sample("b", dist.Bernoulli(logits=param("b_logits", 1) + a))
            pyro.sample("x", dist.Normal(a - b * param("locs", 1), 0.5), obs=data().view(2, 3))


def inner_only():
    with pyro.plate("groups", 3, dim=-1), pyro.plate("members", 2, dim=-2):
        b = pyro.sample("b", dist.Bernoulli(logits=param("b_logits", 1)))
        pyro.sample("x", dist.Normal(b * param("locs", 1), 0.5), obs=data().view(2, 3))


def counts():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Binomial(3, logits=param("logits", 1)))
        pyro.sample("x", dist.Normal(param("locs", 1) * z, 0.5), obs=data())


def masked_data():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Categorical(logits=param("logits", 3)))
        with poutine.mask(mask=data() > 0):
            pyro.sample("x", dist.Normal(param("locs", 3)[z], 0.5), obs=data())


def tempered():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Bernoulli(logits=param("logits", 1)))
        with poutine.scale(scale=0.5):
            pyro.sample("x", dist.Normal(z * param("locs", 1), 0.5), obs=data())


def with_globals():
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", N, subsample=torch.tensor([4, 1, 2])) as i:
        z = pyro.sample("z", dist.Categorical(logits=param("logits", 3)))
        pyro.sample("x", dist.Normal(weight[..., z], 0.5), obs=data()[i])


def with_locals():
    with pyro.plate("data", N):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Categorical(logits=param("logits", 3)))
        pyro.sample("x", dist.Normal(w + param("locs", 3)[z], 0.5), obs=data())


def global_guide():
    pyro.sample("weight", dist.Delta(param("weight_q", 3), event_dim=1))


def local_guide():
    with pyro.plate("data", N):
        pyro.sample("w", dist.Delta(param("w_q", 1) * data()))


# Model, guide of the other latents, number of states, how many batch dims belong to plates.
PROGRAMS = {
    **{
        n: (discrete_programs.PROGRAMS[n].model, None, k, discrete_programs.PROGRAMS[n].nesting)
        for n, k in {
            "one-hot": 3,
            "dependent": 6,
            "nested": 81,
            "markov": 81,
            "binomial": 4,
            "semi-supervised": 3,
            "model-states": 6,
            "factors": 2,
        }.items()
    },
    "subsampled": (lambda: several(torch.tensor([4, 1])), None, 18, 1),
    "ragged": (ragged, None, 8, 1),
    "semi-supervised by a factor": (semi_supervised, None, 6, 1),
    "inner-only": (inner_only, None, 2, 2),
    "masked-data": (masked_data, None, 3, 1),
    "globals": (with_globals, global_guide, 3, 1),
    "locals": (with_locals, local_guide, 3, 1),
}
QUICK = "dependent", "semi-supervised by a factor", "nested", "subsampled", "globals"
LOOPED = "nested", "globals"  # the others one by one in the long runs


def exact(name):
    """The loss with every discrete latent summed out, by Pyro's variable elimination."""
    model, guide, _, nesting = PROGRAMS[name]
    elbo = TraceEnum_ELBO(max_plate_nesting=nesting)
    return elbo.differentiable_loss(config_enumerate(model), guide or (lambda: None))


def gradients():
    store = pyro.get_param_store()
    result = {n: p.grad.clone() for n, p in store.named_parameters() if p.grad is not None}
    for _, p in store.named_parameters():
        p.grad = None
    return result


@pytest.mark.parametrize(
    ("name", "vectorize"),
    [
        pytest.param(n, v, marks=() if n in (QUICK if v else LOOPED) else pytest.mark.slow)
        for n in PROGRAMS
        for v in (False, True)
    ],
)
def test_with_all_states_value_and_gradient_are_exact(name, vectorize):
    model, other, count, _ = PROGRAMS[name]
    guide = TruncatedPosterior(model, count, guide=other)
    elbo = TraceTruncated_ELBO(vectorize_particles=vectorize)
    expected = exact(name)
    if vectorize:
        value = elbo.loss_and_grads(model, guide)
    else:
        loss = elbo.differentiable_loss(model, guide)
        value = loss.item()
        loss.backward()
    result = gradients()
    assert math.isclose(value, expected.item(), rel_tol=1e-9)
    expected.backward()
    wanted = gradients()
    assert wanted
    assert set(result) == set(wanted)
    for parameter, gradient in wanted.items():
        assert torch.allclose(result[parameter], gradient, atol=1e-8), parameter
    if vectorize:
        bounds = elbo.bounds(model, guide)
        assert math.isclose(-bounds.total.item(), expected.item(), rel_tol=1e-9)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if i % 4 != 2 else ()) for i, n in enumerate(PROGRAMS)],
)
def test_free_energy_is_a_bound_that_no_e_step_lowers(name):
    model, other, count, _ = PROGRAMS[name]
    count = max(1, count // 2)
    guide = TruncatedPosterior(model, count, evolution=EvolutionaryUpdate(2, 2, 2), guide=other)
    elbo = TraceTruncated_ELBO()
    expected, before = -exact(name).item(), -math.inf
    for _ in range(3):
        guide.fit()
        guide.eval()
        now = -elbo.loss(model, guide)
        guide.train()
        assert before - 1e-9 <= now <= expected + 1e-9
        before = now
    assert before > expected - 5.0


def test_scales_temper_the_states_densities():
    guide = TruncatedPosterior(tempered, 2)
    per_datum = TraceTruncated_ELBO().bounds(tempered, guide).per_datum
    logits, loc = (pyro.param(n).detach() for n in ("logits", "locs"))
    parts = [
        dist.Bernoulli(logits=logits).log_prob(torch.tensor(z))
        + 0.5 * dist.Normal(z * loc, 0.5).log_prob(data())
        for z in (0.0, 1.0)
    ]
    assert torch.allclose(per_datum, torch.stack(parts).logsumexp(0))


def vector(subsample=None, size=None):
    """Five Bernoulli latents in one event, a non-linear decoder."""
    with pyro.plate("data", N, subsample=subsample, subsample_size=size) as i:
        z = pyro.sample("z", dist.Bernoulli(logits=param("z_logits", 5)).to_event(1))
        loc = torch.tanh(z @ param("decoder", 5, 4))
        pyro.sample("x", dist.Normal(loc, 0.5).to_event(1), obs=patterns()[i])


def patterns():
    made = torch.Generator().manual_seed(3)
    drawn = torch.randn(N, 4, generator=made, dtype=torch.float64)
    return drawn.to(torch.get_default_dtype())


def test_the_three_losses_agree_under_one_seed_and_only_training_keeps_states():
    guide = TruncatedPosterior(vector, 6)
    elbo = TraceTruncated_ELBO()
    elbo.loss(vector, guide)
    before = guide.states_data.clone()

    def seeded(function):
        guide.states_data.copy_(before)
        pyro.set_rng_seed(0)
        return float(torch.as_tensor(function(vector, guide)).detach())

    loss = seeded(elbo.loss)
    assert torch.equal(guide.states_data, before)
    assert math.isclose(loss, -float(seeded(lambda *p: elbo.bounds(*p).total)), rel_tol=1e-12)
    assert torch.equal(guide.states_data, before)
    assert math.isclose(loss, seeded(elbo.differentiable_loss), rel_tol=1e-12)
    assert not torch.equal(guide.states_data, before)
    assert math.isclose(loss, seeded(elbo.loss_and_grads), rel_tol=1e-12)
    gradients()


def test_gradient_is_the_exact_one_over_the_set():
    guide = TruncatedPosterior(vector, 7)
    elbo = TraceTruncated_ELBO()
    guide.fit(num_steps=2)
    guide.eval()
    elbo.loss_and_grads(vector, guide)
    result = gradients()
    states = guide.posterior().values["z"]
    joint = dist.Bernoulli(logits=pyro.param("z_logits")).to_event(1).log_prob(states)
    loc = torch.tanh(states @ pyro.param("decoder"))
    joint = joint + dist.Normal(loc, 0.5).to_event(1).log_prob(patterns())
    (-joint.logsumexp(0).sum()).backward()
    for name, gradient in gradients().items():
        assert torch.allclose(result[name], gradient)


def test_states_without_a_gradient_are_passed_over():
    """The rate of no latents is zero, whose logarithm has no gradient."""
    x = torch.tensor([[2.0, 0.0, 1.0], [1.0, 3.0, 1.0]])

    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(3)).to_event(1))
            rate = z @ param("weight", 3, 3).exp()
            pyro.sample("x", dist.Poisson(rate).to_event(1), obs=x)

    guide = TruncatedPosterior(
        model, 7, evolution=EvolutionaryUpdate(1, 2, 1, mutation=UniformFlips())
    )
    guide.fit()
    guide.states_data.copy_(torch.arange(7).reshape(1, 7, 1))  # a bit for each entry
    elbo = TraceTruncated_ELBO()
    with pyro.validation_enabled(False):
        elbo.loss_and_grads(model, guide)
    assert elbo.num_runs == 3
    result = gradients()["weight"]
    states = ((guide.states_data >> torch.arange(3)) & 1).double()
    rate = states @ pyro.param("weight").exp()
    joint = dist.Bernoulli(0.4 * torch.ones(3)).log_prob(states).sum(-1)
    likelihood = dist.Poisson(rate.clamp_min(1e-9)).log_prob(x.unsqueeze(1)).sum(-1)
    joint = (joint + likelihood).masked_fill(rate.sum(-1) == 0, -torch.inf)
    (-joint.logsumexp(1).sum()).backward()
    torch.testing.assert_close(result, gradients()["weight"])


@pytest.mark.parametrize("top", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_gradient_through_top_states_and_a_sampled_rest_is_unbiased(top):
    guide = TruncatedPosterior(vector, 12)
    guide.fit(num_steps=3)
    guide.eval()
    TraceTruncated_ELBO().loss_and_grads(vector, guide)
    exact_gradient = gradients()["decoder"]
    elbo = TraceTruncated_ELBO(num_gradient_states=top, num_sampled_states=2)
    drawn = []
    for i in range(36):
        with pyro.validation_enabled(i == 0):
            elbo.loss_and_grads(vector, guide)
        drawn.append(gradients()["decoder"])
    assert elbo.num_evaluations == 12 + top + 2
    samples = torch.stack(drawn)
    error = samples.std(0) / 6
    assert error.max() > 0
    assert ((samples.mean(0) - exact_gradient).abs() <= 4.5 * error + 1e-9).all()


def test_a_linear_decoder_is_binary_sparse_coding():
    """Its free energy and gradients in closed form: those of a Gaussian mixture with 2^H means."""
    weight, logit, scale = torch.randn(3, 4), torch.tensor(-1.0), 0.6
    weight.requires_grad_()
    x = patterns()

    def model():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(logits=logit.expand(3)).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, scale).to_event(1), obs=x)

    guide = TruncatedPosterior(model, 8)
    TraceTruncated_ELBO().loss_and_grads(model, guide)
    result, weight.grad = weight.grad, None
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    prior = dist.Categorical(logits=dist.Bernoulli(logits=logit).log_prob(states).sum(-1))
    parts = dist.Normal(states @ weight, scale).to_event(1)
    mixture = dist.MixtureSameFamily(prior, parts)
    (-mixture.log_prob(x).sum()).backward()
    assert torch.allclose(result, weight.grad)
    # The M-step of binary sparse coding: W = (sum_n <s s^T>)^-1 sum_n <s> x_n^T is where it ends.
    posterior = guide.posterior()
    first = posterior.marginals()["z"]
    second = posterior.expectation(lambda v: v["z"].unsqueeze(-1) * v["z"].unsqueeze(-2))
    assert torch.allclose(result, (second.sum(0) @ weight - first.t() @ x) / scale**2)


@pytest.mark.slow
def test_local_latents_of_the_guide_may_have_no_reparameterization():
    """E_q(w) of the free energy and its gradient, by enumerating w as well."""
    logits = torch.tensor([0.3, -0.2], requires_grad=True)
    copies = 20  # the same two data many times: as many draws in one step
    x = data()[:2].repeat(copies)

    def model():
        with pyro.plate("data", len(x)):
            w = pyro.sample("w", dist.Bernoulli(0.4))
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(w + 2 * z, 0.8), obs=x)

    def other():
        with pyro.plate("data", len(x)):
            pyro.sample("w", dist.Bernoulli(logits=logits.repeat(copies)))

    def free_energy(w):
        joint = [
            dist.Bernoulli(0.3).log_prob(torch.tensor(z))
            + dist.Normal(w + 2 * z, 0.8).log_prob(data()[:2])
            for z in (0.0, 1.0)
        ]
        q = dist.Bernoulli(logits=logits)
        ratio = dist.Bernoulli(0.4).log_prob(w) - q.log_prob(w)
        return q.log_prob(w).exp() * (torch.stack(joint).logsumexp(0) + ratio)

    total = copies * sum(free_energy(torch.tensor(w)) for w in (0.0, 1.0)).sum()
    (wanted,) = torch.autograd.grad(total, logits)
    guide = TruncatedPosterior(model, 2, guide=other)
    elbo = TraceTruncated_ELBO()
    values, grads = [], []
    for i in range(40):
        with pyro.validation_enabled(i == 0):
            values.append(-elbo.loss_and_grads(model, guide))
        grads.append(-logits.grad)
        logits.grad = None
    for drawn, exact_value in ((torch.tensor(values), total), (torch.stack(grads), wanted)):
        error = drawn.std(0) / len(drawn) ** 0.5
        assert ((drawn.mean(0) - exact_value).abs() <= 4.5 * error).all()


@pytest.mark.slow
def test_pyros_elbo_and_ours_agree_on_the_guide():
    """log p - log q of the truncated posterior is constant: its free energy."""
    guide = TruncatedPosterior(vector, 9)
    guide.fit(num_steps=3)
    free_energy = guide.posterior().free_energy.sum().item()
    for elbo in (
        Trace_ELBO(),
        Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
        TraceIWAE_ELBO(3),
        TraceIWAE_ELBO(3, vectorize_particles=True),
    ):
        assert math.isclose(-elbo.loss(vector, guide), free_energy, rel_tol=1e-9)


def test_other_guides_are_refused():
    with pytest.raises(ValueError, match="TruncatedPosterior as its guide, got function"):
        TraceTruncated_ELBO().loss(vector, lambda: None)
