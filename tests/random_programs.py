"""
Random programs of which everything is known: trees of plates with linear-Gaussian sites.

A program is drawn from a seed: nested and neighbouring plates in any dims, vectors and scalars,
masks and scales, four families of distributions that are Gaussian in coordinates of their own. Its
log density is quadratic, so that algebra gives the evidence and, site after site, the posterior::

    model, guide, log_evidence = solved(seed=3)
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import transforms


class Plate(NamedTuple):
    name: str
    size: int
    dim: int


@dataclass
class Site:
    """
    A normal draw, given others: loc + sum_q coefficient_q (z_q - center_q), with a factor tril.

    :ivar loc: ``[*batch, event]``, and so are ``center`` and ``tril``'s first dims.
    :ivar vector: whether the event is a vector; else it is the only element of one.
    """

    name: str
    plates: tuple[Plate, ...]
    vector: bool
    family: str
    loc: Tensor
    tril: Tensor
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    centers: dict[str, Tensor] = field(default_factory=dict)
    value: Tensor | None = None
    mask: Tensor | None = None
    masks_itself: bool = False
    scale: float = 1.0

    @property
    def batch(self) -> tuple[int, ...]:
        sizes = {p.dim: p.size for p in self.plates}
        return tuple(sizes.get(d, 1) for d in range(min(sizes, default=0), 0))

    def coordinates(self, value: Tensor) -> Tensor:
        value = value.log() if self.family == "LogNormal" else value
        return value if self.vector else value.unsqueeze(-1)

    def value_of(self, coordinates: Tensor) -> Tensor:
        value = coordinates if self.vector else coordinates.squeeze(-1)
        return value.exp() if self.family == "LogNormal" else value

    def distribution(self, draws: dict[str, Tensor]) -> dist.Distribution:
        loc = self.loc
        for name, coefficient in self.coefficients.items():
            loc = loc + (coefficient @ (draws[name] - self.centers[name]).unsqueeze(-1)).squeeze(-1)
        if self.vector and self.tril.tril(-1).any():
            found = dist.MultivariateNormal(loc, scale_tril=self.tril)
            exp = transforms.ExpTransform()
            return (
                dist.TransformedDistribution(found, [exp]) if self.family == "LogNormal" else found
            )
        scale = self.tril.diagonal(dim1=-2, dim2=-1)
        if not self.vector:
            loc, scale = loc.squeeze(-1), scale.squeeze(-1)
        if self.family == "LogNormal":
            found = dist.LogNormal(loc, scale)
        elif self.family == "flow":
            white = dist.Normal(torch.zeros_like(loc + scale), 1.0)
            found = dist.TransformedDistribution(white, [transforms.AffineTransform(loc, scale)])
        else:
            found = dist.Normal(loc, scale)
        return found.to_event(1) if self.vector else found

    def run(self, draws: dict[str, Tensor]) -> None:
        found, mask = self.distribution(draws), self.mask
        if self.masks_itself:
            found, mask = found.mask(mask), None
        value = None if self.value is None else self.value_of(self.value)
        with poutine.scale(scale=self.scale), poutine.mask(mask=True if mask is None else mask):
            draws[self.name] = self.coordinates(pyro.sample(self.name, found, obs=value))


@dataclass
class Node:
    """The sites of a plate, or of none, and the nodes inside of it."""

    plates: tuple[Plate, ...]
    sites: list[Site] = field(default_factory=list)
    nodes: list["Node"] = field(default_factory=list)

    def __iter__(self) -> Iterator[Site]:
        yield from self.sites
        for node in self.nodes:
            yield from node

    def changed(self, change: Callable[[Site], Site | None]) -> "Node":
        """With other sites, or without."""
        sites = [new for s in self.sites if (new := change(s)) is not None]
        return Node(self.plates, sites, [n.changed(change) for n in self.nodes])

    def run(self, draws: dict[str, Tensor]) -> None:
        for site in self.sites:
            site.run(draws)
        for node in self.nodes:
            plate = node.plates[-1]
            with pyro.plate(plate.name, plate.size, dim=plate.dim):
                node.run(dict(draws))


class Gaussian(NamedTuple):
    """A quadratic log density: its maximum, its curvature and the logarithm of its integral."""

    mean: Tensor
    precision: Tensor
    log_normalizer: Tensor


class Program:
    """What runs the sites of a tree."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def __call__(self) -> None:
        self.root.run({})

    @property
    def latents(self) -> list[Site]:
        return [s for s in self.root if s.value is None]

    def index(self) -> dict[str, Tensor]:
        """Where each latent's coordinates stand in one vector: ``[*batch, event]``."""
        found, start = {}, 0
        for s in self.latents:
            shape = (*s.batch, s.loc.shape[-1])
            found[s.name] = start + torch.arange(math.prod(shape)).reshape(shape)
            start += math.prod(shape)
        return found

    def log_density(self, coordinates: Tensor) -> Tensor:
        """Of all latents' coordinates, by Pyro alone."""
        total, index = coordinates.new_zeros(()), self.index()
        values = {}
        for s in self.latents:
            u = coordinates[index[s.name]]
            values[s.name] = s.value_of(u)
            total = total + (u.sum() if s.family == "LogNormal" else 0.0)
        return total + poutine.trace(poutine.condition(self, values)).get_trace().log_prob_sum()

    def gaussian(self) -> Gaussian:
        zeros = torch.zeros(sum(i.numel() for i in self.index().values()), dtype=torch.float64)
        gradient = torch.autograd.functional.jacobian(self.log_density, zeros)
        precision = -torch.autograd.functional.hessian(self.log_density, zeros)
        mean = torch.linalg.solve(precision, gradient)
        spread = len(zeros) * math.log(2 * math.pi) - torch.linalg.slogdet(precision)[1]
        return Gaussian(mean, precision, self.log_density(mean) + 0.5 * spread)


class RandomProgram(Program):
    """A program drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._choose, self._draws = random.Random(seed), torch.Generator().manual_seed(seed)
        self._names, self._depth = 0, self._choose.choice([1, 1, 2, 2, 3])
        super().__init__(self._node((), []))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draws, dtype=torch.float64)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _node(self, plates: tuple[Plate, ...], parents: list[Site]) -> Node:
        node, parents, choice = Node(plates), list(parents), self._choose.choice
        for _ in range(choice([0, 1, 1, 2]) if plates else choice([1, 1, 2])):
            node.sites.append(self._site("z", plates, parents))
            parents.append(node.sites[-1])
        deeper = len(plates) < self._depth
        for _ in range(choice([0, 1]) if deeper else choice([1, 2])):
            node.sites.append(self._observed(plates, parents))
        for _ in range(choice([1, 1, 2]) if deeper else 0):
            free = [d for d in (-1, -2, -3, -4) if d not in [p.dim for p in plates]]
            plate = Plate(self._name("plate"), choice([1, 2, 3, 4]), choice(free[:2]))
            node.nodes.append(self._node((*plates, plate), parents))
        return node

    def _site(self, kind: str, plates: tuple[Plate, ...], parents: list[Site]) -> Site:
        vector, size = self._choose.choice([(False, 1), (True, 1), (True, 2), (True, 3)])
        family = self._choose.choice(["Normal", "Normal", "flow", "LogNormal"])
        shell = Site(self._name(kind), plates, vector, family, torch.zeros(()), torch.zeros(()))
        around = shell.batch if self._choose.random() < 0.7 else ()
        tril = torch.diag_embed(0.7 * (0.3 * self._normal(*around, size)).exp())
        if family == "Normal" and self._choose.random() < 0.4:
            tril = tril + 0.3 * torch.ones_like(tril).tril(-1)
        chosen = self._choose.sample(parents, min(len(parents), self._choose.choice([1, 2])))
        return replace(
            shell,
            loc=0.5 * self._normal(*around, size),
            tril=tril,
            coefficients={q.name: 0.7 * self._normal(size, q.loc.shape[-1]) for q in chosen},
            centers={q.name: torch.zeros(()) for q in chosen},
        )

    def _observed(self, plates: tuple[Plate, ...], parents: list[Site]) -> Site:
        site = self._site("x", plates, parents)
        masked = self._choose.random() < 0.4
        keep = torch.rand(site.batch, generator=self._draws) < 0.7
        return replace(
            site,
            value=self._normal(*site.batch, site.loc.shape[-1]),
            mask=keep if masked else None,
            masks_itself=masked and self._choose.random() < 0.5,
            scale=self._choose.choice([1.0, 1.0, 1.0, 0.5, 2.0]),
        )


class Solved(NamedTuple):
    """A model, the guide that is its posterior, and its log evidence."""

    model: Program
    guide: Program
    log_evidence: float

    def off(self, seed: int) -> "Solved":
        """With a guide near the posterior: each site is moved and widened a little."""
        draws = torch.Generator().manual_seed(seed)
        size = 0.35 / math.sqrt(len(self.model.gaussian().mean))

        def moved(site: Site) -> Site:
            shift, widening = torch.rand(2, generator=draws).tolist()
            return replace(
                site, loc=site.loc + 0.3 * size * shift, tril=site.tril * (1.0 + size * widening)
            )

        return self._replace(guide=Program(self.guide.root.changed(moved)))

    def elbo(self) -> float:
        """In closed form: the mean of one quadratic under the density of another."""
        model, guide = self.model.gaussian(), self.guide.gaussian()
        covariance = torch.linalg.inv(guide.precision)
        energy = self.model.log_density(guide.mean) - 0.5 * (model.precision @ covariance).trace()
        entropy = 0.5 * len(guide.mean) - self.guide.log_density(guide.mean)
        return float(energy + entropy)


def solved(seed: int) -> Solved:
    """A random program, solved."""
    model = RandomProgram(seed)
    exact, index = model.gaussian(), model.index()
    covariance = torch.linalg.inv(exact.precision)
    before: list[Site] = []
    sites: dict[str, Site] = {}
    for site in model.latents:
        sites[site.name] = _conditional(site, before, index, exact.mean, covariance)
        before.append(site)
    guide = Program(model.root.changed(lambda s: sites.get(s.name)))
    return Solved(model, guide, float(exact.log_normalizer))


def _conditional(
    site: Site, before: list[Site], index: dict[str, Tensor], mean: Tensor, covariance: Tensor
) -> Site:
    """A site's normal distribution given those before it, of which it needs its ancestors alone."""
    own, flat = index[site.name], index[site.name].flatten()
    given = torch.cat([own.new_zeros(0), *(index[s.name].flatten() for s in before)])
    slopes = torch.linalg.solve(covariance[given][:, given], covariance[given][:, flat]).mT
    rest = covariance[flat][:, flat] - slopes @ covariance[given][:, flat]
    size = own.shape[-1]
    elements = own.reshape(-1, size) - int(own.min())
    blocks = torch.stack([rest[e][:, e] for e in elements])
    coefficients, used = {}, torch.zeros_like(slopes)
    position = {int(i): k for k, i in enumerate(given)}
    for name in (s.name for s in before if set(s.plates) <= set(site.plates)):
        columns = index[name].expand(*own.shape[:-1], -1).reshape(len(elements), -1)
        at = torch.tensor([[position[int(i)] for i in row] for row in columns])
        found = torch.stack([slopes[e][:, c] for e, c in zip(elements, at, strict=True)])
        for e, c in zip(elements, at, strict=True):
            used[e.unsqueeze(-1), c] = slopes[e.unsqueeze(-1), c]
        if found.abs().max() > 1e-9:
            coefficients[name] = found.reshape(*own.shape[:-1], size, -1)
    assert torch.allclose(used, slopes, atol=1e-9), "a site depends on one that is no ancestor"
    return Site(
        site.name,
        site.plates,
        site.vector,
        site.family,
        loc=mean[own],
        tril=torch.linalg.cholesky(blocks).reshape(*own.shape, size),
        coefficients=coefficients,
        centers={n: mean[index[n]] for n in coefficients},
    )
