"""Programs with discrete latents of every shape, whose exact gradient Pyro's enumeration gives."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def param(name, *shape):
    return pyro.param(name, lambda: randn(*shape, seed=sum(map(ord, name))))


def x(*shape):
    return 1.5 * randn(*shape, seed=7)


def normal(name, loc, obs):
    pyro.sample(name, dist.Normal(loc, 0.8), obs=obs)


def single_model():
    with pyro.plate("data", 4):
        y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
        normal("x", param("mu", 3)[y], x(4))


def single_guide():
    with pyro.plate("data", 4):
        pyro.sample("y", dist.Categorical(logits=param("q", 4, 3)))


def one_hot_model():
    with pyro.plate("data", 4):
        y = pyro.sample("y", dist.OneHotCategorical(logits=param("prior", 3)))
        normal("x", y @ param("mu", 3), x(4))


def one_hot_guide():
    with pyro.plate("data", 4):
        pyro.sample("y", dist.OneHotCategorical(logits=param("q", 4, 3)))


def unplated_model():
    y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
    normal("x", param("mu", 3)[y], x(1)[0])


def unplated_guide():
    pyro.sample("y", dist.Categorical(logits=param("q", 3)))


def dependent_model():
    with pyro.plate("data", 4):
        a = pyro.sample("a", dist.Categorical(logits=param("pa", 3)))
        b = pyro.sample("b", dist.Bernoulli(logits=param("pb", 3)[a]))
        normal("x", param("mu", 3)[a] + b * param("w"), x(4))
        normal("u", param("nu", 3)[a], x(4).flip(0))


def dependent_guide():
    with pyro.plate("data", 4):
        a = pyro.sample("a", dist.Categorical(logits=param("qa", 4, 3)))
        pyro.sample("b", dist.Bernoulli(logits=param("qb", 3)[a]))


def independent_guide():
    with pyro.plate("data", 4):
        pyro.sample("b", dist.Bernoulli(logits=param("qbb", 4)))
        pyro.sample("a", dist.Categorical(logits=param("qa", 4, 3)))


def reversed_guide():
    # The model draws a first: at each slot of b, a has slots of its own.
    with pyro.plate("data", 4):
        b = pyro.sample("b", dist.Bernoulli(logits=param("qbb", 4)))
        pyro.sample("a", dist.Categorical(logits=Vindex(param("qab", 2, 3))[b.long(), :]))


def subsampled_model():
    c = pyro.sample("c", dist.Categorical(logits=param("pc", 3)))
    # Always the same minibatch, so that the exact gradient has no noise of its own.
    with pyro.plate("data", 6, subsample=torch.tensor([1, 4])) as i:
        y = pyro.sample("y", dist.Categorical(logits=Vindex(param("py", 3, 3))[c, :]))
        normal("x", Vindex(param("mu", 3))[y] + 0.3 * c, x(6)[i])


def subsampled_guide():
    pyro.sample("c", dist.Categorical(logits=param("qc", 3)))
    with pyro.plate("data", 6, subsample=torch.tensor([1, 4])) as i:
        pyro.sample("y", dist.Categorical(logits=param("qy", 6, 3)[i]))


def nested_model():
    with pyro.plate("groups", 2, dim=-1):
        a = pyro.sample("a", dist.Categorical(logits=param("pa", 3)))
        normal("v", param("nu", 3)[a], x(2))
        with pyro.plate("members", 3, dim=-2):
            b = pyro.sample("b", dist.Categorical(logits=Vindex(param("pb", 3, 3))[a, :]))
            normal("x", param("mu", 3)[b] + param("nu", 3)[a], x(3, 2))


def nested_guide():
    with pyro.plate("groups", 2, dim=-1):
        a = pyro.sample("a", dist.Categorical(logits=param("qa", 2, 3)))
        with pyro.plate("members", 3, dim=-2):
            pyro.sample("b", dist.Categorical(logits=Vindex(param("qb", 3, 3))[a, :]))


def crossed_model():
    rows, columns = pyro.plate("rows", 2, dim=-1), pyro.plate("columns", 3, dim=-2)
    with rows:
        u = pyro.sample("u", dist.Categorical(logits=param("pu", 3)))
    with columns:
        v = pyro.sample("v", dist.Categorical(logits=param("pv", 3)))
    with rows, columns:
        normal("x", param("mu", 3)[u] * param("nu", 3)[v], x(3, 2))


def crossed_guide():
    rows, columns = pyro.plate("rows", 2, dim=-1), pyro.plate("columns", 3, dim=-2)
    with rows:
        pyro.sample("u", dist.Categorical(logits=param("qu", 2, 3)))
    with columns:
        pyro.sample("v", dist.Categorical(logits=param("qv", 3, 1, 3)))


def masked_model():
    with pyro.plate("data", 4):
        with poutine.mask(mask=torch.tensor([True, True, False, True])):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
        with poutine.mask(mask=torch.tensor([True, False, True, True])):
            normal("x", param("mu", 3)[y], x(4))


def masked_guide():
    with pyro.plate("data", 4), poutine.mask(mask=torch.tensor([True, True, False, True])):
        pyro.sample("y", dist.Categorical(logits=param("q", 4, 3)))


def scaled(program):
    def run():
        with poutine.scale(scale=0.3):
            program()

    return run


def inner_scaled_model():
    with pyro.plate("data", 4):
        with poutine.scale(scale=0.3):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
        normal("x", param("mu", 3)[y], x(4))


def inner_scaled_guide():
    with pyro.plate("data", 4), poutine.scale(scale=0.3):
        pyro.sample("y", dist.Categorical(logits=param("q", 4, 3)))


def chain(observe):
    names = ("p0", "p") if observe else ("q0", "q")
    with pyro.plate("data", 2):
        y = None
        for t in pyro.markov(range(4)):
            logits = param(names[0], 3) if y is None else Vindex(param(names[1], 3, 3))[y, :]
            y = pyro.sample(f"y{t}", dist.Categorical(logits=logits))
            if observe:
                normal(f"x{t}", param("mu", 3)[y], x(4, 2)[t])


def sequential(observe):
    for i in pyro.plate("data", 3):
        logits = param("prior", 3) if observe else param("q", 3, 3)[i]
        y = pyro.sample(f"y{i}", dist.Categorical(logits=logits))
        if observe:
            normal(f"x{i}", param("mu", 3)[y], x(3)[i])


def semi_model():
    # The first two data have labels; one set of programs for both.
    for name, part, labels in (("a", x(4)[:2], torch.tensor([2, 0])), ("b", x(4)[2:], None)):
        with pyro.plate(name, 2):
            y = pyro.sample(f"y_{name}", dist.Categorical(logits=param("prior", 3)), obs=labels)
            normal(f"x_{name}", param("mu", 3)[y], part)


def semi_guide():
    with pyro.plate("b", 2):
        pyro.sample("y_b", dist.Categorical(logits=param("q", 2, 3)))


LABELLED = torch.tensor([True, False, False, True])


def obs_mask_model():
    with pyro.plate("data", 4):
        y = pyro.sample(
            "y",
            dist.Categorical(logits=param("prior", 3)),
            obs=torch.tensor([2, 0, 0, 1]),
            obs_mask=LABELLED,
        )
        normal("x", param("mu", 3)[y], x(4))


def obs_mask_guide():
    with pyro.plate("data", 4), poutine.mask(mask=~LABELLED):
        pyro.sample("y_unobserved", dist.Categorical(logits=param("q", 4, 3)))


def model_states_model():
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
        logits = Vindex(param("ps", 3, 2))[y, :]
        s = pyro.sample("s", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})
        normal("x", Vindex(param("m", 2))[s] + param("mu", 3)[y], x(3))
        normal("u", param("mu", 3)[y], x(3).flip(0))


def model_states_guide():
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Categorical(logits=param("q", 3, 3)))


def counts_model():
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Binomial(3, logits=param("p")))
        normal("x", param("w") * y, x(3))


def counts_guide():
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Binomial(3, logits=param("q", 3)))


@dataclass
class Discrete:
    """
    Two programs, and what differs from them for Pyro's exhaustive enumeration.

    :ivar nesting: how many batch dims the plates take.
    """

    model: Callable[[], Any]
    guide: Callable[[], Any]
    nesting: int = 1

    def exact(self):
        """The loss and its gradients, summed over all values."""
        elbo = TraceEnum_ELBO(max_plate_nesting=self.nesting)
        loss = elbo.loss_and_grads(self.model, config_enumerate(self.guide))
        return loss, self.take_gradients()

    @staticmethod
    def take_gradients():
        """The loss's gradients by parameter; clears them."""
        result = {}
        for name, p in pyro.get_param_store().named_parameters():
            result[name] = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
        return result


PROGRAMS = {
    "single": Discrete(single_model, single_guide),
    "one-hot": Discrete(one_hot_model, one_hot_guide),
    "unplated": Discrete(unplated_model, unplated_guide, 0),
    "dependent": Discrete(dependent_model, dependent_guide),
    "independent": Discrete(dependent_model, independent_guide),
    "reversed": Discrete(dependent_model, reversed_guide),
    "subsampled": Discrete(subsampled_model, subsampled_guide),
    "nested": Discrete(nested_model, nested_guide, 2),
    "crossed": Discrete(crossed_model, crossed_guide, 2),
    "masked": Discrete(masked_model, masked_guide),
    "scaled": Discrete(scaled(single_model), scaled(single_guide)),
    "inner-scaled": Discrete(inner_scaled_model, inner_scaled_guide),
    "markov": Discrete(lambda: chain(True), lambda: chain(False)),
    "sequential": Discrete(lambda: sequential(True), lambda: sequential(False), 0),
    "semi-supervised": Discrete(semi_model, semi_guide),
    "obs-mask": Discrete(obs_mask_model, obs_mask_guide),
    "model-states": Discrete(model_states_model, model_states_guide),
    "binomial": Discrete(counts_model, counts_guide),
}
ALL = math.inf
