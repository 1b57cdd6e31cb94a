"""
Programs with discrete latents of every shape, whose exact loss and gradients are sums over values.

Each function is the model for ``p=True`` and the guide for ``p=False``.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from pyro.poutine.util import site_is_subsample
from torch import nn

ALL = math.inf


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


def categorical(name, logits, **options):
    return pyro.sample(name, dist.Categorical(logits=logits), **options)


def bernoulli(name, logits):
    return pyro.sample(name, dist.Bernoulli(logits=logits))


# Solutions: the loss of a program, and its gradients by parameter.


def take_gradients():
    """The loss's gradients by parameter; clears them."""
    result = {}
    for name, p in pyro.get_param_store().named_parameters():
        result[name] = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
    return result


def by_enumeration(program):
    """Pyro's variable elimination."""
    elbo = TraceEnum_ELBO(max_plate_nesting=program.nesting)
    loss = elbo.loss_and_grads(program.model, config_enumerate(program.guide))
    return loss, take_gradients()


def by_bound(bound):
    """A function of the parameters, which the programs have made."""

    def solve(program):
        program.guide()
        poutine.trace(poutine.replay(program.model, poutine.trace(program.guide).get_trace()))()
        loss = -bound()
        loss.backward()
        return loss.item(), take_gradients()

    return solve


def assignments(site):
    """All values of a site as one tensor each; every element of its batch takes every value."""
    fn, shape = site["fn"], site["fn"].shape()
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    values = fn.enumerate_support(expand=False)
    values = values.reshape(len(values), *fn.event_shape)
    for chosen in itertools.product(values, repeat=fn.batch_shape.numel()):
        yield torch.stack(chosen).reshape(shape)


def by_assignments(program):
    """A run of both programs for each assignment, so that they may be anything."""
    shown = poutine.trace(program.guide).get_trace()
    discrete = {
        name: site
        for name, site in shown.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
    }
    elbo = torch.zeros(())
    for values in itertools.product(*map(assignments, discrete.values())):
        data = dict(zip(discrete, values, strict=True))
        q = poutine.trace(poutine.condition(program.guide, data=data)).get_trace()
        p = poutine.trace(poutine.condition(program.model, data=data)).get_trace()
        # A mask or a scale changes the density of a draw, and not how often it is drawn.
        log_q = sum(q.nodes[name]["fn"].log_prob(data[name]).sum() for name in discrete)
        elbo = elbo + log_q.exp() * (p.log_prob_sum() - q.log_prob_sum())
    (-elbo).backward()
    return -elbo.item(), take_gradients()


@dataclass
class Discrete:
    """
    A model and a guide.

    :ivar solve: returns the exact loss and its gradients.
    :ivar nesting: how many batch dims the plates take.
    """

    model: Callable[[], Any]
    guide: Callable[[], Any]
    solve: Callable[["Discrete"], Any] = by_enumeration
    nesting: int = 1

    @staticmethod
    def of(run, *options, **more):
        return Discrete(partial(run, True), partial(run, False), *options, **more)

    def exact(self):
        return self.solve(self)


# One site.


def single(p):
    with pyro.plate("data", 4):
        y = categorical("y", param("prior", 3) if p else param("q", 4, 3))
        if p:
            normal("x", param("mu", 3)[y], x(4))


def one_hot(p):
    with pyro.plate("data", 4):
        logits = param("prior", 3) if p else param("q", 4, 3)
        y = pyro.sample("y", dist.OneHotCategorical(logits=logits))
        if p:
            normal("x", y @ param("mu", 3), x(4))


def unplated(p):
    y = categorical("y", param("prior" if p else "q", 3))
    if p:
        normal("x", param("mu", 3)[y], x(1)[0])


def vectors(p):
    with pyro.plate("data", 2):
        logits = param("p", 3) if p else param("q", 2, 3)
        b = pyro.sample("b", dist.Bernoulli(logits=logits).to_event(1))
        if p:
            normal("x", (b @ param("w", 3)) ** 2, x(2))


def masked(p):
    with pyro.plate("data", 4):
        with poutine.mask(mask=torch.tensor([True, True, False, True])):
            y = categorical("y", param("prior", 3) if p else param("q", 4, 3))
        if p:
            with poutine.mask(mask=torch.tensor([True, False, True, True])):
                normal("x", param("mu", 3)[y], x(4))


def scaled(p):
    with poutine.scale(scale=0.3):
        single(p)


def inner_scaled(p):
    with pyro.plate("data", 4):
        with poutine.scale(scale=0.3):
            y = categorical("y", param("prior", 3) if p else param("q", 4, 3))
        if p:
            normal("x", param("mu", 3)[y], x(4))


def scaled_by_datum(p):
    with pyro.plate("data", 2), poutine.scale(scale=torch.tensor([0.4, 2.0])):
        y = categorical("y", param("p", 2) if p else param("q", 2, 2))
        if p:
            normal("x", Vindex(param("mu", 2))[y], x(2))


def factors(p):
    with pyro.plate("data", 2):
        y = bernoulli("y", param("p") if p else param("q", 2))
        if p:
            pyro.factor("f", param("w") * y * torch.tensor([1.0, 2.0]))


def sequential(p):
    for i in pyro.plate("data", 3):
        y = categorical(f"y{i}", param("prior", 3) if p else param("q", 3, 3)[i])
        if p:
            normal(f"x{i}", param("mu", 3)[y], x(3)[i])


def branches(p):
    """Python looks at the value of a site in each element of a sequential plate."""
    for i in pyro.plate("data", 2):
        y = categorical(f"y{i}", param("prior", 2) if p else param("q", 2, 2)[i])
        if p:
            normal(f"x{i}", param("mu") if y == 1 else -0.5 * param("mu"), torch.tensor(i - 0.3))


def binomial(p):
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Binomial(3, logits=param("p") if p else param("q", 3)))
        if p:
            normal("x", param("w") * y, x(3))


def reshaped(p):
    """A model that does not broadcast."""
    with pyro.plate("data", 3):
        y = bernoulli("y", param("p") if p else param("q", 3))
        if p:
            normal("x", y.reshape(3), x(3))


def semi_supervised(p):
    """The first two data have labels; one set of programs for both."""
    for name, part, labels in (("a", x(4)[:2], torch.tensor([2, 0])), ("b", x(4)[2:], None)):
        if not p and labels is not None:
            continue
        with pyro.plate(name, 2):
            y = categorical(f"y_{name}", param("prior", 3) if p else param("q", 2, 3), obs=labels)
            if p:
                normal(f"x_{name}", param("mu", 3)[y], part)


def obs_mask(p):
    labelled, labels = torch.tensor([True, False, False, True]), torch.tensor([2, 0, 0, 1])
    with pyro.plate("data", 4):
        if p:
            y = categorical("y", param("prior", 3), obs=labels, obs_mask=labelled)
            normal("x", param("mu", 3)[y], x(4))
        else:
            with poutine.mask(mask=~labelled):
                categorical("y_unobserved", param("q", 4, 3))


def model_states(p):
    """A site of the guide beside one that the model enumerates."""
    with pyro.plate("data", 3):
        y = categorical("y", param("prior", 3) if p else param("q", 3, 3))
        if p:
            logits = Vindex(param("ps", 3, 2))[y, :]
            s = categorical("s", logits, infer={"enumerate": "parallel"})
            normal("x", Vindex(param("m", 2))[s] + param("mu", 3)[y], x(3))
            normal("u", param("mu", 3)[y], x(3).flip(0))


# Several sites.


def dependent_model():
    with pyro.plate("data", 4):
        a = categorical("a", param("pa", 3))
        b = bernoulli("b", param("pb", 3)[a])
        normal("x", param("mu", 3)[a] + b * param("w"), x(4))
        normal("u", param("nu", 3)[a], x(4).flip(0))


def dependent_guide():
    with pyro.plate("data", 4):
        a = categorical("a", param("qa", 4, 3))
        bernoulli("b", param("qb", 3)[a])


def independent_guide():
    with pyro.plate("data", 4):
        bernoulli("b", param("qbb", 4))
        categorical("a", param("qa", 4, 3))


def reversed_guide():
    """The model draws a first: at each slot of b, a has slots of its own."""
    with pyro.plate("data", 4):
        b = bernoulli("b", param("qbb", 4))
        categorical("a", Vindex(param("qab", 2, 3))[b.long(), :])


def masked_by_value(p):
    """A level that counts where a switch is on."""
    with pyro.plate("data", 2):
        y = bernoulli("y", param("p") if p else param("q", 2))
        with poutine.mask(mask=y.bool()):
            k = categorical("k", param("pk" if p else "qk", 2))
        if p:
            normal("x", y * Vindex(param("mu", 2))[k], x(2))


def subsampled(p):
    c = categorical("c", param("pc" if p else "qc", 3))
    # Always the same minibatch, so that the exact gradient has no noise of its own.
    with pyro.plate("data", 6, subsample=torch.tensor([1, 4])) as i:
        y = categorical("y", Vindex(param("py", 3, 3))[c, :] if p else param("qy", 6, 3)[i])
        if p:
            normal("x", Vindex(param("mu", 3))[y] + 0.3 * c, x(6)[i])


def nested(p):
    with pyro.plate("groups", 2, dim=-1):
        a = categorical("a", param("pa", 3) if p else param("qa", 2, 3))
        if p:
            normal("v", param("nu", 3)[a], x(2))
        with pyro.plate("members", 3, dim=-2):
            b = categorical("b", Vindex(param("pb" if p else "qb", 3, 3))[a, :])
            if p:
                normal("x", param("mu", 3)[b] + param("nu", 3)[a], x(3, 2))


def nested_from_the_left(p):
    with pyro.plate("a", 2, dim=-2):
        u = categorical("u", param("pu", 2) if p else param("qu", 2, 1, 2))
        with pyro.plate("b", 2, dim=-1):
            v = bernoulli("v", Vindex(param("pv" if p else "qv", 2))[u])
            if p:
                normal("x", v * param("w") + u, x(2, 2))


def crossed(p):
    rows, columns = pyro.plate("rows", 2, dim=-1), pyro.plate("columns", 3, dim=-2)
    with rows:
        u = categorical("u", param("pu", 3) if p else param("qu", 2, 3))
    with columns:
        v = categorical("v", param("pv", 3) if p else param("qv", 3, 1, 3))
    if p:
        with rows, columns:
            normal("x", param("mu", 3)[u] * param("nu", 3)[v], x(3, 2))


def rows_and_columns(p):
    """Plates that meet in others of the same sizes, so that no plate has a datum of its own."""
    with pyro.plate("rows", 2, dim=-1):
        y = bernoulli("y", param("p") if p else param("q", 2))
    with pyro.plate("columns", 2, dim=-2):
        z = bernoulli("z", param("pz") if p else param("qz", 2, 1))
    if p:
        with pyro.plate("r", 2, dim=-1), pyro.plate("c", 2, dim=-2):
            normal("x", param("mu") * y + z * y, x(2, 2))


def members_of_turns(p):
    """A plate inside each element of a sequential one."""
    for i in pyro.plate("groups", 2):
        a = bernoulli(f"a{i}", param("pa") if p else param("qa", 2)[i])
        with pyro.plate(f"members{i}", 2):
            b = bernoulli(f"b{i}", param("pb") + a if p else param("qb", 2, 2)[i])
            if p:
                normal(f"x{i}", param("mu") * a * b + b, x(2, 2)[i])


def markov(p):
    with pyro.plate("data", 2):
        y = None
        for t in pyro.markov(range(4)):
            name = "p" if p else "q"
            logits = param(name + "0", 3) if y is None else Vindex(param(name, 3, 3))[y, :]
            y = categorical(f"y{t}", logits)
            if p:
                normal(f"x{t}", param("mu", 3)[y], x(4, 2)[t])


def meeting(p):
    """All elements of a plate in the mean of one factor, and of each of a plate's."""
    with pyro.plate("data", 3):
        y = bernoulli("y", param("p" if p else "q", 3))
        if p:
            normal("x", param("w") * y.mean(), torch.zeros(3))


def outside(p):
    with pyro.plate("data", 3):
        y = bernoulli("y", param("p" if p else "q", 3))
    if p:
        normal("x", param("w") * y.sum(-1, keepdim=True), torch.tensor(2.0))


# Networks, some of which do not broadcast: under vmap, or each slot by itself, the same sums.


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose2d(3, 1, 2)

    def forward(self, h):
        return self.layer(h.reshape(-1, 3, 1, 1)).tanh().flatten(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, h):
        return self.layer(h.unsqueeze(1).expand(-1, 2, -1))[0].sum(1)


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, h):
        return self.layer(h).softmax(1)


class Design(nn.Module):
    """A matrix for each datum times its vector, one datum after the other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 3))

    def forward(self, h):
        return torch.stack([self.weight[i] @ h[i] for i in range(2)])


def network(cls, *args):
    """A network whose parameters are the same each time."""
    result = cls(*args).double()
    for i, p in enumerate(result.parameters()):
        p.data.copy_(randn(*p.shape, seed=i))
    return result


def pictures(cls, two=False):
    """Labels behind which a network draws, and with ``two`` a switch that depends on the label."""
    net, data = network(cls), 1.5 * randn(2, 4, seed=7).double()

    def run(p):
        with pyro.plate("data", 2):
            y = categorical("y", param("prior", 3) if p else param("q", 2, 3))
            b = bernoulli("b", param("pb" if p else "qb", 3)[y]) if two else torch.zeros(())
            if p:
                pyro.module("net", net)
                h = nn.functional.one_hot(y, 3).to(data) * (1 + b.unsqueeze(-1))
                pyro.sample("x", dist.Normal(net(h), 0.8).to_event(1), obs=data)

    return Discrete.of(run, by_assignments)


def belief_net():
    """Two layers of Bernoullis; the guide draws them from the data upwards."""
    data = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).double()
    nets = {
        k: network(nn.Linear, *s) for k, s in {"down": (1, 2), "up": (2, 1), "q": (3, 2)}.items()
    }
    nets["x"] = network(nn.Linear, 2, 3)

    def bits(name, logits, **options):
        return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1), **options)

    def run(p):
        layer = {k: pyro.module(k, nets[k]) for k in (("down", "x") if p else ("q", "up"))}
        with pyro.plate("data", 2):
            if p:
                top = bits("top", torch.tensor([0.4]).double())
                bits("x", layer["x"](bits("h", layer["down"](top)).tanh()), obs=data)
            else:
                bits("top", layer["up"](bits("h", layer["q"](data))))

    return Discrete.of(run, by_assignments)


# Sites of countably many values, of a support that depends on others, and beside continuous ones.


def countable(make):
    def run(p):
        with pyro.plate("data", 3):
            y = pyro.sample("y", make(torch.tensor(0.4) if p else 0.5 * param("q", 3)))
            if p:
                normal("x", param("w") * (y + 0.1).log(), x(3))

    def bound():
        y = torch.arange(400.0)[:, None]
        log_q = make(0.5 * param("q", 3)).log_prob(y)
        cost = make(torch.tensor(0.4)).log_prob(y) - log_q
        cost = cost + dist.Normal(param("w") * (y + 0.1).log(), 0.8).log_prob(x(3))
        return (log_q.exp() * cost).sum()

    return Discrete.of(run, by_bound(bound))


def counts(p):
    """As many trials as the site before says."""
    with pyro.plate("data", 2):
        n = categorical("n", param("p" if p else "q", 2))
        logits = param("pk" if p else "qk")
        k = pyro.sample("k", dist.Binomial(n.to(logits) + 1, logits=logits))
        if p:
            normal("x", param("w") * k + n, x(2))


def counts_bound():
    total = 0.0
    for n in (0, 1):
        for k in range(n + 2):
            log_p, log_q = (
                param(name, 2).log_softmax(-1)[n]
                + dist.Binomial(n + 1, logits=param(name + "k")).log_prob(torch.tensor(float(k)))
                for name in ("p", "q")
            )
            log_p = log_p + dist.Normal(param("w") * k + n, 0.8).log_prob(x(2))
            total = total + (log_q.exp() * (log_p - log_q)).sum()
    return total


def behind(p):
    """A reparameterized site behind a discrete one."""
    with pyro.plate("data", 3):
        y = categorical("y", param("prior", 3) if p else param("q", 3, 3))
        loc, scale = param("mu" if p else "loc", 3)[y], param("scale", 3).exp()[y]
        z = pyro.sample("z", dist.Normal(loc, torch.ones(3) if p else scale))
        if p:
            pyro.sample("x", dist.Normal(z, 0.5), obs=x(3))


def behind_bound():
    """E log N(x; z, 0.5), E log N(z; mu, 1) and the entropies, of each category."""
    log_q, loc, scale = param("q", 3, 3).log_softmax(-1), param("loc", 3), param("scale", 3)
    inner = -((x(3)[:, None] - loc) ** 2 + (2 * scale).exp()) / 0.5 - math.log(0.5)
    inner = inner - ((loc - param("mu", 3)) ** 2 + (2 * scale).exp()) / 2 + scale + 0.5
    inner = inner - 0.5 * math.log(2 * math.pi) + param("prior", 3).log_softmax(-1) - log_q
    return (log_q.exp() * inner).sum()


# Those of which Pyro's enumeration knows the sum, and those of which it does not.
PROGRAMS = {
    "single": Discrete.of(single),
    "one-hot": Discrete.of(one_hot),
    "unplated": Discrete.of(unplated, nesting=0),
    "dependent": Discrete(dependent_model, dependent_guide),
    "independent": Discrete(dependent_model, independent_guide),
    "reversed": Discrete(dependent_model, reversed_guide),
    "subsampled": Discrete.of(subsampled),
    "nested": Discrete.of(nested, nesting=2),
    "crossed": Discrete.of(crossed, nesting=2),
    "masked": Discrete.of(masked),
    "scaled": Discrete.of(scaled),
    "inner-scaled": Discrete.of(inner_scaled),
    "markov": Discrete.of(markov),
    "sequential": Discrete.of(sequential, nesting=0),
    "semi-supervised": Discrete.of(semi_supervised),
    "obs-mask": Discrete.of(obs_mask),
    "model-states": Discrete.of(model_states),
    "binomial": Discrete.of(binomial),
    **{
        f.__name__.replace("_", "-"): Discrete.of(f, by_assignments)
        for f in (
            *(vectors, nested_from_the_left, masked_by_value, scaled_by_datum, members_of_turns),
            *(factors, rows_and_columns, meeting, outside, reshaped, branches),
        )
    },
    "convolution": pictures(Convolution),
    "softmax": pictures(Softmax, two=True),
    "design": pictures(Design),
    "gru": pictures(Recurrent),
    "belief-net": belief_net(),
    "counts": Discrete.of(counts, by_bound(counts_bound)),
}
COUNTABLE = {
    "poisson": countable(lambda raw: dist.Poisson(raw.exp())),
    "geometric": countable(lambda raw: dist.Geometric(logits=raw)),
    "negative-binomial": countable(lambda raw: dist.NegativeBinomial(2.5, logits=raw)),
}
BEHIND = Discrete.of(behind, by_bound(behind_bound))
