"""Laws of the free energy of truncated posteriors, on programs of every shape."""

import math

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate

from pyro_mcvae import (
    EvolutionaryUpdate,
    TraceIWAE_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)

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
    lengths, transitions = torch.tensor([3, 1]), param("transitions", 2, 2)
    with pyro.plate("data", 2):
        logits = param("starts", 2)
        for t in pyro.markov(range(3)):
            with poutine.mask(mask=t < lengths):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=logits))
                logits = transitions[z]
                x = data().view(3, 2)[t]
                pyro.sample(f"x_{t}", dist.Normal(param("locs", 2)[z], 0.7), obs=x)


def semi_supervised():
    labelled = torch.tensor([True, False, True, False, False, True])
    labels = torch.tensor([0, 0, 2, 0, 0, 1])
    with pyro.plate("data", N):
        dist_y = dist.Categorical(logits=param("y_logits", 3))
        y = pyro.sample("y", dist_y, obs=labels, obs_mask=labelled)
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


def two_plates():
    for name, part in (("left", data()[:4]), ("right", data()[4:])):
        with pyro.plate(name, len(part), dim=-1):
            z = pyro.sample(f"z_{name}", dist.Categorical(logits=param(f"{name}_logits", 3)))
            pyro.sample(f"x_{name}", dist.Normal(param("locs", 3)[z], 0.5), obs=part)


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
    "several": (several, None, 18, 1),
    "subsampled": (lambda: several(torch.tensor([4, 1])), None, 18, 1),
    "chain": (chain, None, 27, 1),
    "ragged": (ragged, None, 8, 1),
    "semi-supervised": (semi_supervised, None, 6, 1),
    "nested": (nested, None, 8, 2),
    "inner-only": (inner_only, None, 2, 2),
    "two-plates": (two_plates, None, 3, 1),
    "counts": (counts, None, 4, 1),
    "masked-data": (masked_data, None, 3, 1),
    "globals": (with_globals, global_guide, 3, 1),
    "locals": (with_locals, local_guide, 3, 1),
}
programs = pytest.mark.parametrize("name", PROGRAMS)
modes = pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])


def exact(name):
    """The loss with every discrete latent summed out, by Pyro's variable elimination."""
    model, guide, _, nesting = PROGRAMS[name]
    elbo = TraceEnum_ELBO(max_plate_nesting=nesting)
    return elbo.differentiable_loss(config_enumerate(model), guide or (lambda: None))


def gradients():
    store = pyro.get_param_store()
    found = {n: p.grad.clone() for n, p in store.named_parameters() if p.grad is not None}
    for _, p in store.named_parameters():
        p.grad = None
    return found


@programs
@modes
def test_with_all_states_value_and_gradient_are_exact(name, vectorize):
    model, other, count, _ = PROGRAMS[name]
    guide = TruncatedPosterior(model, count, guide=other)
    elbo = TraceTruncated_ELBO(vectorize_particles=vectorize)
    expected = exact(name)
    assert math.isclose(elbo.loss(model, guide), expected.item(), rel_tol=1e-9)
    bounds = elbo.bounds(model, guide)
    assert math.isclose(-bounds.total.item(), expected.item(), rel_tol=1e-9)
    gradients()
    expected.backward()
    wanted = gradients()
    assert wanted
    for loss in (elbo.loss_and_grads, lambda *p: elbo.differentiable_loss(*p).backward()):
        loss(model, guide)
        found = gradients()
        assert set(found) == set(wanted)
        for parameter, gradient in wanted.items():
            assert torch.allclose(found[parameter], gradient, atol=1e-8), parameter


@programs
def test_free_energy_is_a_bound_that_no_e_step_lowers(name):
    model, other, count, _ = PROGRAMS[name]
    count = max(1, count // 2)
    guide = TruncatedPosterior(model, count, EvolutionaryUpdate(2, 2, 2), guide=other)
    elbo = TraceTruncated_ELBO()
    expected, before = -exact(name).item(), -math.inf
    for _ in range(8):
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
