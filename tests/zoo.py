"""Pairs of programs of every shape, and which of their sites belong to which block.

Guides draw their global latents and their minibatch before their local latents, so that vectorised
and looped particles of one seed share them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.easyguide import easy_guide
from pyro.infer import autoguide

from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from tests.tally import Tally


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def param(name, *shape, seed=1):
    return pyro.param(name, lambda: 0.5 * data(*shape, seed=seed))


@dataclass
class Example:
    """
    Two programs.

    :ivar blocks: for each block the names of its plates and the pattern of its sites' names.
    :ivar nesting: how many batch dims the plates occupy.
    :ivar mean_field: whether the guide's draws do not depend on each other.
    :ivar smooth: whether log w has derivatives in the coordinates and in the parameters.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    blocks: list[tuple[tuple[str, ...], str]]
    nesting: int = 1
    mean_field: bool = False
    smooth: bool = True
    args: tuple[Any, ...] = ()
    runs: Tally = field(default_factory=Tally)

    @property
    def programs(self):
        return Programs(self.model, self.guide, self.args, {})

    def calls(self):
        """The runs of model and guide since the last call of this."""
        return self.runs.take()

    @property
    def counted(self):
        """The programs, counting their calls."""

        def count(name, program):
            def counted(*args):
                self.runs.add(name)
                return program(*args)

            return counted

        return Programs(count("model", self.model), count("guide", self.guide), self.args, {})

    def block_of(self, name):
        for i, (_, pattern) in enumerate(self.blocks):
            if re.fullmatch(pattern, name):
                return i
        return None

    def sampler(self, num_particles=3, vectorize=True, **options):
        options.setdefault("find_roots", True)
        return ParticleSampler(num_particles, vectorize, self.nesting, **options)

    def log_weight(
        self, num_particles=3, vectorize=True, coordinates="noise", seed=0, sampler=None, **options
    ):
        """With a sampler of a user, what it has found out of the programs is kept."""
        if sampler is None:
            sampler = self.sampler(num_particles, vectorize, **options)
        pyro.set_rng_seed(seed)
        return LogWeight(sampler, self.programs, coordinates)

    def parameters(self):
        """Every learnable tensor of both programs."""
        result = [p for _, p in pyro.get_param_store().named_parameters()]
        for program in (self.model, self.guide):
            if isinstance(program, torch.nn.Module):
                result += list(program.parameters())
        return list({id(p): p for p in result}.values())


DATA = [(("data",), r"[a-z].*")]
JOINT = [((), r".*")]


def plain():
    x = data(4)

    def model():
        slope = param("slope")
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(slope * z, 0.7), obs=x)

    def guide():
        a, s = param("a"), param("s", seed=2).exp()
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(a * x, s))

    return Example(model, guide, DATA, mean_field=True)


def vae():
    x = data(4, 3)

    def model():
        weight = param("weight", 2, 3)
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample(
                "x", dist.Bernoulli(logits=torch.tanh(z) @ weight).to_event(1), obs=x.gt(0) * 1.0
            )

    def guide():
        weight, lower = param("w", 3, 2, seed=3), param("l", 2, 2, seed=4)
        with pyro.plate("data", 4):
            scale_tril = lower.tril(-1) + lower.diagonal().exp().diag()
            pyro.sample("z", dist.MultivariateNormal(x @ weight, scale_tril=scale_tril))

    return Example(model, guide, DATA, mean_field=True)


def two_independent():
    x = data(4)

    def model():
        with pyro.plate("data", 4):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("b", dist.Normal(a.unsqueeze(-1) * torch.ones(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(a + b.prod(-1), 1.0), obs=x)

    def guide():
        m, s = param("m", 2), param("s", seed=2).exp()
        with pyro.plate("data", 4):
            pyro.sample("a", dist.Laplace(x, s))
            pyro.sample("b", dist.Normal(m * x.unsqueeze(-1), s).to_event(1))

    return Example(model, guide, DATA, mean_field=True, smooth=False)


def structured():
    x = data(4)

    def model():
        slope = param("slope", 2)
        with pyro.plate("data", 4):
            z1 = pyro.sample("z1", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            z2 = pyro.sample("z2", dist.Normal((z1 * slope).sum(-1), 1.0))
            pyro.sample("x", dist.Normal(z2, 0.8), obs=x)

    def guide():
        m, s = param("m", 2), param("s", seed=2).exp()
        with pyro.plate("data", 4):
            z1 = pyro.sample("z1", dist.Normal(m * x.unsqueeze(-1), s).to_event(1))
            pyro.sample("z2", dist.Normal(torch.tanh(z1.sum(-1)) + m[0] * x, s))

    return Example(model, guide, DATA)


def hierarchical():
    x = data(4)

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=torch.tensor(0.3))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(theta, param("t").exp()))
            pyro.sample("x", dist.Normal(z + theta, 0.7), obs=x)

    def guide():
        m, s = param("m", 2), param("s", 2, seed=2).exp()
        theta = pyro.sample("theta", dist.Normal(m[0], s[0]))
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(m[1] * x + theta.sin(), s[1]))

    return Example(model, guide, [(("data",), r"[zx]")])


def hierarchical_mean_field():
    example = hierarchical()
    x = data(4)

    def guide():
        m, s = param("m", 2), param("s", 2, seed=2).exp()
        pyro.sample("theta", dist.Normal(m[0], s[0]))
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(m[1] * x, s[1]))

    return Example(example.model, guide, example.blocks, mean_field=True)


def nested(subsample=None):
    x = data(3, 4)

    def plates():
        return pyro.plate("groups", 4, dim=-1), pyro.plate("rows", 3, subsample, dim=-2)

    def model():
        groups, rows = plates()
        with groups:
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with rows as i:
                b = pyro.sample("b", dist.Normal(a * param("slope"), 1.0))
                pyro.sample("x", dist.Normal(b, 0.7), obs=x[i])

    def guide():
        m, s = param("m", 3), param("s", 2, seed=2).exp()
        groups, rows = plates()
        with groups:
            a = pyro.sample("a", dist.Normal(m[0] * x.sum(0), s[0]))
            with rows as i:
                pyro.sample("b", dist.Normal(m[1] * a + m[2] * x[i], s[1]))

    if subsample is None:
        return Example(model, guide, [(("groups",), r"[abx]")], nesting=2)
    return Example(model, guide, [(("rows", "groups"), r"[bx]")], nesting=2)


def crossed():
    x = data(3, 4)

    def model():
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
        with columns:
            v = pyro.sample("v", dist.Normal(0.0, 1.0))
        with rows, columns:
            pyro.sample("x", dist.Normal(u * v, param("t").exp()), obs=x)

    def guide():
        m, s = param("m", 2), param("s", 2, seed=2).exp()
        with pyro.plate("rows", 3, dim=-2):
            pyro.sample("u", dist.Normal(m[0] * x.mean(1, keepdim=True), s[0]))
        with pyro.plate("columns", 4, dim=-1):
            pyro.sample("v", dist.Normal(m[1] * x.mean(0), s[1]))

    return Example(model, guide, JOINT, nesting=2, mean_field=True)


def two_plates():
    x, y = data(3), data(4, 2, seed=5)

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("A", 3):
            a = pyro.sample("a", dist.Normal(theta, 1.0))
            pyro.sample("x", dist.Normal(a, 0.7), obs=x)
        with pyro.plate("B", 4):
            b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(b + theta.unsqueeze(-1), 0.7).to_event(1), obs=y)

    def guide():
        m, s = param("m", 3), param("s", 2, seed=2).exp()
        pyro.sample("theta", dist.Normal(m[0], s[0]))
        with pyro.plate("A", 3):
            pyro.sample("a", dist.Normal(m[1] * x, s[1]))
        with pyro.plate("B", 4):
            pyro.sample("b", dist.Normal(m[2] * y, s[1]).to_event(1))

    blocks = [(("A",), r"[ax]"), (("B",), r"[by]")]
    return Example(model, guide, blocks, mean_field=True)


def sequential(full=None):
    size = full or 3
    x = data(size)

    def model():
        for i in pyro.plate("data", size, 3):
            z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{i}", dist.Normal(z * param("slope"), 0.7), obs=x[i])

    def guide():
        a, s = param("a"), param("s", seed=2).exp()
        for i in pyro.plate("data", size, 3):
            pyro.sample(f"z_{i}", dist.Normal(a * x[i], s))

    blocks = [((), rf"[zx]_{i}") for i in range(size)]
    return Example(model, guide, blocks, nesting=0, mean_field=True)


def ragged():
    x = [data(2), data(3, seed=4)]

    def model():
        for i in pyro.plate("groups", 2):
            a = pyro.sample(f"a_{i}", dist.Normal(0.0, 1.0))
            with pyro.plate(f"data_{i}", len(x[i])):
                z = pyro.sample(f"z_{i}", dist.Normal(a, 1.0))
                pyro.sample(f"x_{i}", dist.Normal(z * param("slope"), 0.7), obs=x[i])

    def guide():
        m, s = param("m", 2), param("s", seed=2).exp()
        for i in pyro.plate("groups", 2):
            a = pyro.sample(f"a_{i}", dist.Normal(m[0], s))
            with pyro.plate(f"data_{i}", len(x[i])):
                pyro.sample(f"z_{i}", dist.Normal(m[1] * x[i] + a, s))

    return Example(model, guide, [((), rf"[azx]_{i}") for i in range(2)])


def ragged_inner():
    x = [data(2), data(3, seed=4)]

    def model():
        for i in pyro.plate("groups", 2):
            with pyro.plate(f"data_{i}", len(x[i])):
                z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
                pyro.sample(f"x_{i}", dist.Normal(z * param("slope"), 0.7), obs=x[i])

    def guide():
        m, s = param("m"), param("s", seed=2).exp()
        for i in pyro.plate("groups", 2):
            with pyro.plate(f"data_{i}", len(x[i])):
                pyro.sample(f"z_{i}", dist.Normal(m * x[i], s))

    blocks = [((f"data_{i}",), rf"[zx]_{i}") for i in range(2)]
    return Example(model, guide, blocks, mean_field=True)


def chain():
    x = data(3, 4)

    def model():
        with pyro.plate("data", 4):
            z = torch.zeros(4)
            for t in pyro.markov(range(3)):
                z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{t}", dist.Normal(z * param("slope"), 0.7), obs=x[t])

    def guide():
        m, s = param("m", 2), param("s", seed=2).exp()
        with pyro.plate("data", 4):
            z = torch.zeros(4)
            for t in pyro.markov(range(3)):
                z = pyro.sample(f"z_{t}", dist.Normal(m[0] * z + m[1] * x[t], s))

    return Example(model, guide, DATA)


def auto_model():
    x = data(4)

    def model():
        theta = pyro.sample("theta", dist.LogNormal(0.0, 0.5))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, theta))
            w = pyro.sample("w", dist.Beta(2.0, 3.0))
            pyro.sample("x", dist.Normal(z + w, 0.7), obs=x)

    return model


def auto(name, **options):
    model = auto_model()
    pyro.set_rng_seed(1)
    guide = getattr(autoguide, name)(model, **options)
    guide()  # makes its parameters
    for i, p in enumerate(guide.parameters()):
        p.data.add_(0.1 * data(*p.shape, seed=i))
    local = [(("data",), r"[zwx](_unconstrained)?")]
    return Example(model, guide, JOINT if name[4:] != "Normal" else local)


def messenger():
    example = auto("AutoNormal")
    guide = autoguide.AutoNormalMessenger(example.model, init_scale=0.6)
    guide()
    return Example(example.model, guide, [(("data",), r"[zwx](_.*)?")])


def flow(kind="affine_coupling"):
    x = data(4, 2)
    pyro.set_rng_seed(2)
    transform = (
        getattr(dist.transforms, kind)(2, [4]) if kind != "planar" else dist.transforms.planar(2)
    )

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z * param("slope"), 0.7).to_event(1), obs=x)

    def guide():
        pyro.module("flow", transform)
        with pyro.plate("data", 4):
            base = dist.Normal(param("m") * x, param("s", seed=2).exp()).to_event(1)
            pyro.sample("z", dist.TransformedDistribution(base, [transform]))

    guide.transform = transform
    return Example(model, guide, DATA, mean_field=True)


def implicit():
    x = torch.tensor([0.0, 2.0, 1.0, 5.0])

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Gamma(2.0, 1.0))
            w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
            rate = z * (w * param("rates", 3).exp()).sum(-1)
            pyro.sample("x", dist.Poisson(rate), obs=x)

    def guide():
        c = param("c", 3).exp()
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Gamma(c[0] + x, c[1]))
            pyro.sample("w", dist.Dirichlet(1.0 + z.unsqueeze(-1) * c))

    return Example(model, guide, DATA)


def mixture():
    x = data(4)

    def model():
        with pyro.plate("data", 4):
            c = pyro.sample("c", dist.Categorical(torch.tensor([0.3, 0.5, 0.2])))
            d = pyro.sample("d", dist.Bernoulli(0.4))
            z = pyro.sample("z", dist.Normal(param("means", 3)[c] + d, 1.0))
            pyro.sample("x", dist.Normal(z, 0.7), obs=x)

    def guide():
        m, s = param("m", 3), param("s", seed=2).exp()
        with pyro.plate("data", 4):
            c = pyro.sample("c", dist.Categorical(logits=m * x.unsqueeze(-1)))
            pyro.sample("d", dist.Bernoulli(logits=x))
            pyro.sample("z", dist.Normal(m[c] * x, s))

    return Example(model, guide, DATA, smooth=False)


def scaled_and_masked():
    x = data(4)
    keep, weights = torch.tensor([True, False, True, True]), torch.tensor([1.0, 0.5, 2.0, 0.1])

    def model():
        with pyro.plate("data", 4), pyro.poutine.scale(scale=0.3), pyro.poutine.mask(mask=keep):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 0.7), obs=x)
            with pyro.poutine.scale(scale=weights):
                pyro.sample("y", dist.Normal(z * param("slope"), 0.7), obs=x)

    def guide():
        with pyro.plate("data", 4), pyro.poutine.scale(scale=0.3), pyro.poutine.mask(mask=keep):
            pyro.sample("z", dist.Normal(param("a") * x, param("s", seed=2).exp()))

    return Example(model, guide, DATA, mean_field=True)


def subsampled(indices=None):
    x = data(20)

    def plate():
        return pyro.plate("data", 20, None if indices is not None else 4, indices)

    def model(*args):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with plate() as i, pyro.poutine.scale(scale=0.5):
            z = pyro.sample("z", dist.Normal(theta, 1.0))
            w = pyro.sample("w", dist.Normal(z, 1.0))
            pyro.sample("x", dist.Normal(w * param("slope"), 0.7), obs=x[i])

    def guide(*args):
        m, s = param("m", 3), param("s", 3, seed=2).exp()
        theta = pyro.sample("theta", dist.Normal(m[0], s[0]))
        with plate() as i, pyro.poutine.scale(scale=0.5):
            z = pyro.sample("z", dist.Normal(m[1] * x[i] + theta, s[1]))
            pyro.sample("w", dist.Normal(m[2] * z, s[2]))

    return Example(model, guide, [(("data",), r"[zwx]")])


def subsampled_without_latents():
    """An observed inner plate is subsampled, in which no latent lies."""
    x, y = data(4), data(10, 4, seed=3)

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 4, dim=-1):
            z = pyro.sample("z", dist.Normal(theta, 1.0))
            pyro.sample("x", dist.Normal(z * param("slope"), 0.7), obs=x)
            with pyro.plate("inner", 10, 3, dim=-2) as i:
                pyro.sample("y", dist.Normal(theta, 0.7), obs=y[i])

    def guide():
        m, s = param("m", 2), param("s", 2, seed=2).exp()
        pyro.sample("theta", dist.Normal(m[0], s[0]))
        with pyro.plate("data", 4, dim=-1):
            pyro.sample("z", dist.Normal(m[1] * x, s[1]))

    return Example(model, guide, [(("data",), r"[zx]")], nesting=2, mean_field=True)


def conditioned():
    x = data(4)

    def joint():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z * param("slope"), 0.7))

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(param("a") * x, param("s", seed=2).exp()))

    return Example(pyro.condition(joint, data={"x": x}), guide, DATA, mean_field=True)


EXAMPLES = {
    "plain": plain,
    "vae": vae,
    "two-independent": two_independent,
    "structured": structured,
    "hierarchical": hierarchical,
    "hierarchical-mean-field": hierarchical_mean_field,
    "nested": nested,
    "nested-subsampled": lambda: nested(2),
    "crossed": crossed,
    "two-plates": two_plates,
    "sequential": sequential,
    "sequential-subsampled": lambda: sequential(7),
    "ragged": ragged,
    "ragged-inner": ragged_inner,
    "chain": chain,
    "auto-normal": lambda: auto("AutoNormal", init_scale=0.6),
    "auto-multivariate": lambda: auto("AutoMultivariateNormal", init_scale=0.5),
    "auto-low-rank": lambda: auto("AutoLowRankMultivariateNormal", init_scale=0.5, rank=2),
    "auto-iaf": lambda: auto("AutoIAFNormal"),
    "messenger": messenger,
    "coupling": flow,
    "autoregressive": lambda: flow("affine_autoregressive"),
    "implicit": implicit,
    "mixture": mixture,
    "scaled-and-masked": scaled_and_masked,
    "subsampled": subsampled,
    "minibatch": lambda: subsampled(torch.tensor([3, 1, 17])),
    "subsampled-without-latents": subsampled_without_latents,
    "conditioned": conditioned,
}


# Other guides, and models of sites that no block has to be told of.


def auto_list():
    model = auto_model()
    guide = autoguide.AutoGuideList(model)
    guide.append(autoguide.AutoDelta(pyro.poutine.block(model, expose=["theta"])))
    guide.append(autoguide.AutoNormal(pyro.poutine.block(model, hide=["theta"])))
    guide()
    return Example(model, guide, [])


def easy():
    model = auto_model()

    @easy_guide(model)
    def guide(self):
        group = self.group(match="theta")
        size = torch.eye(group.event_shape[0])
        group.sample("joint", dist.MultivariateNormal(param("loc", 1), scale_tril=0.5 * size))
        with self.plate("data", 4):
            pyro.sample("z", dist.Normal(param("slope") * data(4), 0.5))
            pyro.sample("w", dist.Beta(2.5, 2.0))

    guide()
    return Example(model, guide, [])


def auto_minibatches():
    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, 4) as i:
            z = pyro.sample("z", dist.Normal(theta, 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=data(12)[i])

    guide = autoguide.AutoNormal(model, create_plates=lambda: pyro.plate("data", 12, 4))
    guide()
    return Example(model, guide, [])


def with_auto_normal(model):
    guide = autoguide.AutoNormal(model, init_scale=0.5)
    guide()
    return Example(model, guide, [])


def correlated():
    def model():
        cholesky = pyro.sample("cholesky", dist.LKJCholesky(2, torch.tensor(1.0)))
        with pyro.plate("data", 6):
            fn = dist.MultivariateNormal(torch.ones(2), scale_tril=cholesky)
            pyro.sample("x", fn, obs=data(6, 2))

    return with_auto_normal(model)


def missing():
    """Beside a deterministic site and a factor."""

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            fn = dist.Normal(z, 0.5)
            x = pyro.sample("x", fn, obs=data(4), obs_mask=torch.arange(4) % 3 > 0)
            pyro.deterministic("twice", 2 * x)
            pyro.factor("prefer", -0.1 * z**2)

    return with_auto_normal(model)


def outside():
    """A factor of all elements of a plate."""

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        total = z.sum(-1, keepdim=True)
        pyro.sample("sum", dist.Normal(total, 0.5), obs=torch.tensor(3.0))

    return with_auto_normal(model)


GUIDES = {
    "auto-delta": lambda: auto("AutoDelta"),
    "auto-structured": lambda: auto("AutoStructured"),
    "auto-normal-subsampled": auto_minibatches,
    "auto-list": auto_list,
    "easy-guide": easy,
    "correlated": correlated,
    "missing": missing,
    "outside": outside,
}
