"""Models with discrete latents that no guide draws, and the sums over these by brute force."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.ops.indexing import Vindex
from torch.distributions import constraints

PARALLEL = {"enumerate": "parallel"}


def param(name, *shape):
    size = math.prod(shape)
    return pyro.param(name, lambda: torch.linspace(-0.8, 1.0, size).reshape(shape).clone())


def positive(name, *shape):
    init = torch.linspace(0.4, 0.8, math.prod(shape)).reshape(shape)
    return pyro.param(name, lambda: init.clone(), constraint=constraints.positive)


def data(*shape):
    return torch.linspace(-1.3, 1.7, math.prod(shape)).reshape(shape)


def categorical(name, logits):
    return pyro.sample(name, dist.Categorical(logits=logits), infer=PARALLEL)


def local_normal(name, *shape):
    loc = param(f"{name}_loc", *shape)
    return pyro.sample(name, dist.Normal(loc, positive(f"{name}_scale", *shape)))


def mixture_model():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.3, 1.1))
        y = categorical("y", param("prior", 2))
        pyro.sample("x", dist.Normal(param("mu", 2)[y] + z, 0.7), obs=data(3))


def mixture_guide():
    with pyro.plate("data", 3):
        local_normal("z", 3)


def clusters_model():
    with pyro.plate("components", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("data", 5):
        y = categorical("y", param("prior", 2))
        pyro.sample("x", dist.Normal(Vindex(mu.unsqueeze(-2))[..., y], 0.7), obs=data(5))


def clusters_guide():
    with pyro.plate("components", 2):
        local_normal("mu", 2)


@config_enumerate
def chain_model():
    """A hidden Markov model whose emissions have a random level."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    y = 0
    for t in pyro.markov(range(4)):
        y = pyro.sample(f"y_{t}", dist.Categorical(logits=Vindex(param("transit", 2, 2))[y, :]))
        pyro.sample(f"x_{t}", dist.Normal(param("mu", 2)[y] + level, 0.6), obs=data(4)[t])


def chain_guide():
    local_normal("level")


def effects_model():
    """A mixed hidden Markov model: each individual has a level and a chain of states."""
    observed = data(2, 3)
    with pyro.plate("people", 2):
        level = pyro.sample("level", dist.Normal(0.0, param("spread").exp()))
        y = 0
        for t in pyro.markov(range(3)):
            y = categorical(f"y_{t}", Vindex(param("transit", 2, 2))[y, :])
            pyro.sample(f"x_{t}", dist.Normal(param("mu", 2)[y] + level, 0.6), obs=observed[:, t])


def effects_guide():
    with pyro.plate("people", 2):
        local_normal("level", 2)


def nested_model():
    """A state of each datum, and one of each of its replicates that depends on it."""
    with pyro.plate("data", 2, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        y = categorical("y", param("prior", 2))
        with pyro.plate("replicates", 2, dim=-2):
            s = categorical("s", Vindex(param("given", 2, 2))[y, :])
            pyro.sample("x", dist.Normal(param("mu", 2)[s] + z, 0.7), obs=data(2, 2))
        pyro.sample("u", dist.Normal(z - y, 0.5), obs=data(2))


def nested_guide():
    with pyro.plate("data", 2, dim=-1):
        local_normal("z", 2)


def latent_between_model():
    """The continuous latent depends on one state, and another state on it."""
    with pyro.plate("data", 2):
        y = categorical("y", param("prior", 2))
        z = pyro.sample("z", dist.Normal(param("mu", 2)[y], 0.8))
        s = pyro.sample("s", dist.Bernoulli(logits=1.5 * z), infer=PARALLEL)
        pyro.sample("x", dist.Normal(z + s, 0.7), obs=data(2))


def global_state_model():
    """One state for all data, which joins them."""
    y = categorical("y", param("prior", 2))
    with pyro.plate("data", 2):
        z = pyro.sample("z", dist.Normal(param("mu", 2)[y], 0.8))
        pyro.sample("x", dist.Normal(z, 0.7), obs=data(2))


def masked_model():
    with pyro.plate("data", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        z = pyro.sample("z", dist.Normal(0.3, 1.1))
        y = categorical("y", param("prior", 2))
        pyro.sample("x", dist.Normal(param("mu", 2)[y] + z, 0.7), obs=data(3))


def masked_guide():
    with pyro.plate("data", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        local_normal("z", 3)


def belief_model():
    """A sigmoid belief network of two layers, with a continuous level of each datum."""
    with pyro.plate("data", 2):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        a = pyro.sample("a", dist.Bernoulli(logits=param("top")), infer=PARALLEL)
        w, c = param("w", 2), param("c", 2)
        b = [
            pyro.sample(
                f"b_{i}",
                dist.Bernoulli(logits=w[i] * a + c[i]),
                infer=PARALLEL,
            )
            for i in range(2)
        ]
        logits = z + param("v", 2)[0] * b[0] + param("v", 2)[1] * b[1]
        pyro.sample("x", dist.Bernoulli(logits=logits), obs=torch.tensor([0.0, 1.0]))


def topics_model():
    """Latent Dirichlet allocation: a topic of each word, given the document's proportions."""
    words = torch.tensor([[0, 1], [2, 3], [3, 3]])
    with pyro.plate("documents", 2, dim=-1):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("words", 3, dim=-2):
            topic = pyro.sample("topic", dist.Categorical(theta), infer=PARALLEL)
            logits = Vindex(param("topics", 2, 4))[topic, :]
            pyro.sample("word", dist.Categorical(logits=logits), obs=words)


def topics_guide():
    with pyro.plate("documents", 2, dim=-1):
        pyro.sample("theta", dist.Dirichlet(positive("counts", 2, 2) * 4))


def recapture_model():
    """Cormack-Jolly-Seber, as in Pyro's example: who is alive is seen when caught alone."""
    caught = torch.tensor([[1.0, 1, 0], [1, 0, 1], [1, 0, 0]])
    survive = pyro.sample("survive", dist.Normal(0.5, 1.0))
    with pyro.plate("animals", 3, dim=-1):
        z, first = torch.ones(3), caught[:, 0]
        for t in pyro.markov(range(1, 3)):
            with poutine.mask(mask=first.bool()):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(survive.sigmoid() * z), infer=PARALLEL)
                rate = param("rate").sigmoid()
                pyro.sample(f"x_{t}", dist.Bernoulli(rate * z), obs=caught[:, t])


def recapture_guide():
    local_normal("survive")


def labels_model():
    """M2 of Kingma et al. (2014): digits of which some have labels, the others are summed."""
    images, labels = data(4, 2), torch.tensor([0, 2])
    weights = param("weights", 3, 2)
    for name, index in (("labelled", slice(0, 2)), ("unlabelled", slice(2, 4))):
        with pyro.plate(name, 2):
            z = pyro.sample(f"z_{name}", dist.Normal(0.0, 1.0))
            obs = labels if name == "labelled" else None
            infer = None if name == "labelled" else PARALLEL
            prior = dist.Categorical(logits=torch.zeros(3))
            y = pyro.sample(f"y_{name}", prior, obs=obs, infer=infer)
            loc = Vindex(weights)[y, :] + z.unsqueeze(-1)
            pyro.sample(f"x_{name}", dist.Normal(loc, 0.8).to_event(1), obs=images[index])


def labels_guide():
    for name in ("labelled", "unlabelled"):
        with pyro.plate(name, 2):
            local_normal(f"z_{name}", 2)


@dataclass
class Enumerated:
    """
    A pair of programs.

    :ivar nesting: how many batch dims the plates take.
    :ivar per_datum: the shape of the weights.
    """

    model: Callable[[], Any]
    guide: Callable[[], Any]
    nesting: int
    per_datum: tuple[int, ...]


def states_guide():
    with pyro.plate("data", 2):
        local_normal("z", 2)


PROGRAMS = {
    "mixture": Enumerated(mixture_model, mixture_guide, 1, (3,)),
    "clusters": Enumerated(clusters_model, clusters_guide, 1, ()),
    "hmm": Enumerated(chain_model, chain_guide, 0, ()),
    "mixed hmm": Enumerated(effects_model, effects_guide, 1, (2,)),
    "nested": Enumerated(nested_model, nested_guide, 2, (2,)),
    "between": Enumerated(latent_between_model, states_guide, 1, (2,)),
    "global": Enumerated(global_state_model, states_guide, 1, ()),
    "masked": Enumerated(masked_model, masked_guide, 1, (3,)),
    "belief": Enumerated(belief_model, states_guide, 1, (2,)),
    "topics": Enumerated(topics_model, topics_guide, 2, (2,)),
    "recapture": Enumerated(recapture_model, recapture_guide, 1, ()),
    "labels": Enumerated(labels_model, labels_guide, 1, (4,)),
}


def brute_force(model, latents):
    """log sum_y p(x, y, z) over every combination of all states of all data."""
    with poutine.condition(data=latents):
        trace = poutine.trace(model).get_trace()
    states = {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and site["infer"].get("enumerate") == "parallel"
    }
    choices = [
        [v.reshape(site["fn"].batch_shape) for v in _assignments(site)] for site in states.values()
    ]
    result = []
    for values in itertools.product(*choices):
        given = {**latents, **dict(zip(states, values, strict=True))}
        with poutine.condition(data=given):
            trace = poutine.trace(model).get_trace()
        total = 0.0
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or type(site["fn"]).__name__ == "_Subsample":
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site["mask"] is not None and name not in states:
                log_prob = log_prob * site["mask"]
            total = total + log_prob.sum()
        result.append(total)
    return torch.stack(result).logsumexp(0)


def _assignments(site):
    support = list(site["fn"].enumerate_support(expand=False).reshape(-1))
    size = math.prod(site["fn"].batch_shape)
    for chosen in itertools.product(support, repeat=size):
        yield torch.stack(chosen)
