"""
Random programs: trees of plates with sites, of which subclasses know the distributions.

A program is drawn from a seed: nested and neighbouring plates in any dims, masks and scales; its
plates may be turned into loops.
`tests.random_gaussian_programs` and `tests.random_discrete_programs` know their evidence and their
posterior.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from typing_extensions import Self


class Plate(NamedTuple):
    name: str
    size: int
    dim: int


@dataclass(kw_only=True)
class Site:
    """
    A draw, or data, given earlier draws.

    :ivar value: of data, as what `state` makes of it.
    :ivar element: which elements it is of, of plates that are loops.
    """

    name: str
    plates: tuple[Plate, ...]
    value: Tensor | None = None
    mask: Tensor | None = None
    masks_itself: bool = False
    scale: float = 1.0
    element: str = ""

    @property
    def batch(self) -> tuple[int, ...]:
        sizes = {p.dim: p.size for p in self.plates}
        return tuple(sizes.get(d, 1) for d in range(min(sizes, default=0), 0))

    @property
    def size(self) -> int:
        """How many numbers each of the batch's draws has."""
        raise NotImplementedError

    def distribution(self, draws: dict[str, Tensor]) -> dist.Distribution:
        raise NotImplementedError

    def state(self, value: Tensor) -> Tensor:
        """What others depend on."""
        raise NotImplementedError

    def value_of(self, state: Tensor) -> Tensor:
        """The inverse of `state`."""
        raise NotImplementedError

    def run(self, draws: dict[str, Tensor]) -> None:
        result, mask = self.distribution(draws), self.mask
        if self.masks_itself:
            result, mask = result.mask(mask), None
        value = None if self.value is None else self.value_of(self.value)
        with poutine.scale(scale=self.scale), poutine.mask(mask=True if mask is None else mask):
            draws[self.name] = self.state(pyro.sample(self.name + self.element, result, obs=value))

    def at(self, plate: Plate, i: int) -> "Site":
        """The site of one element of a plate around it."""
        plates = tuple(p for p in self.plates if p != plate)
        site = replace(self, plates=plates, element=f"{self.element}_{i}")
        depth = len(site.batch)

        def cut(tensor: Tensor, event_dim: int) -> Tensor:
            axis = tensor.dim() - event_dim + plate.dim
            if axis < 0:  # the same for all
                return tensor
            result = tensor.narrow(axis, i if tensor.shape[axis] > 1 else 0, 1)
            return result.reshape(result.shape[max(0, result.dim() - event_dim - depth) :])

        return site.cut(cut)

    def cut(self, cut: Callable[[Tensor, int], Tensor]) -> "Site":
        """With a part of each tensor, of which the function takes the event dims as well."""
        return replace(self, mask=None if self.mask is None else cut(self.mask, 0))


@dataclass
class Node:
    """The sites of a plate, or of none, and the nodes inside it, some of each turn of a loop."""

    plates: tuple[Plate, ...]
    sites: list[Site] = field(default_factory=list)
    nodes: list["Node"] = field(default_factory=list)
    loops: list[tuple[Plate, list["Node"]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Site]:
        yield from self.sites
        for node in self.nodes:
            yield from node

    def changed(self, change: Callable[[Site], Site | None]) -> "Node":
        """With other sites, or without."""
        sites = [new for s in self.sites if (new := change(s)) is not None]
        return Node(self.plates, sites, [n.changed(change) for n in self.nodes])

    def run(self, draws: dict[str, Tensor], plates: dict[str, pyro.plate]) -> None:
        for site in self.sites:
            site.run(draws)
        # Pyro wants a plate that is entered in each turn of a loop to be made once.
        for node in self.nodes:
            name, size, dim = node.plates[-1]
            if name not in plates:
                plates[name] = pyro.plate(name, size, dim=dim)
            with plates[name]:
                node.run(dict(draws), plates)
        for (name, size, _), turns in self.loops:
            if name not in plates:
                plates[name] = pyro.plate(name, size)
            for i in plates[name]:
                turns[int(i)].run(dict(draws), plates)

    def looped(self, names: Collection[str]) -> "Node":
        """With these plates as loops."""
        result = Node(self.plates, self.sites)
        for node in self.nodes:
            inner, plate = node.looped(names), node.plates[-1]
            if plate.name in names:
                result.loops.append((plate, [inner.at(plate, i) for i in range(plate.size)]))
            else:
                result.nodes.append(inner)
        return result

    def at(self, plate: Plate, i: int) -> "Node":
        """What is of one element of a plate around it."""
        return Node(
            tuple(p for p in self.plates if p != plate),
            [s.at(plate, i) for s in self.sites],
            [n.at(plate, i) for n in self.nodes],
            [(p, [n.at(plate, i) for n in turns]) for p, turns in self.loops],
        )

    def plate_names(self) -> list[str]:
        inner = [name for n in self.nodes for name in n.plate_names()]
        return [*(n.plates[-1].name for n in self.nodes), *inner]


class Program:
    """
    What runs the sites of a tree.

    :ivar fraction: which part of their elements the outermost plates have: a minibatch, below one.
    """

    def __init__(self, root: Node, fraction: float = 1.0) -> None:
        self.root, self.fraction = root, fraction

    def __call__(self) -> None:
        self.root.run({}, dict(self._minibatches()) if self.fraction < 1.0 else {})

    def _minibatches(self) -> Iterator[tuple[str, pyro.plate]]:
        plates = [(n.plates[-1], n.plates[-1].dim) for n in self.root.nodes]
        for plate, dim in [*plates, *((p, None) for p, _ in self.root.loops)]:
            full, chosen = round(plate.size / self.fraction), torch.arange(plate.size)
            yield plate.name, pyro.plate(plate.name, full, subsample=chosen, dim=dim)

    def looped(self, seed: int) -> Self:
        """The same, with some plates as loops: to be run, and not to be solved."""
        names, choose = self.root.plate_names(), random.Random(seed)
        chosen = choose.sample(names, choose.randint(1, len(names)))
        return type(self)(self.root.looped(chosen), self.fraction)

    @property
    def latents(self) -> list[Site]:
        return [s for s in self.root if s.value is None]

    def index(self) -> dict[str, Tensor]:
        """Where each latent's numbers stand in one vector: ``[*batch, size]``."""
        result, start = {}, 0
        for s in self.latents:
            shape = (*s.batch, s.size)
            result[s.name] = start + torch.arange(math.prod(shape)).reshape(shape)
            start += math.prod(shape)
        return result


class Draws:
    """A seed's choices, numbers, and trees of sites that a subclass makes."""

    def __init__(self, seed: int) -> None:
        self._choose, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._names = 0

    def tree(self) -> Node:
        return self._node((), [], self._choose.choice([1, 1, 2, 2, 3]))

    def forest(self) -> Node:
        """With nothing outside plates."""
        depth, number = self._choose.choice([1, 2, 3]), self._choose.choice([1, 1, 2])
        return Node((), [], [self._node((self._plate(()),), [], depth) for _ in range(number)])

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _node(self, plates: tuple[Plate, ...], parents: list[Site], depth: int) -> Node:
        node, parents, choice = Node(plates), list(parents), self._choose.choice
        for _ in range(choice([0, 1, 1, 2]) if plates else choice([1, 1, 2])):
            node.sites.append(self._latent(plates, parents))
            parents.append(node.sites[-1])
        deeper = len(plates) < depth
        for _ in range(choice([0, 1]) if deeper else choice([1, 2])):
            node.sites.append(self._weighted(self._observed(plates, parents)))
        for _ in range(choice([1, 1, 2]) if deeper else 0):
            node.nodes.append(self._node((*plates, self._plate(plates)), parents, depth))
        return node

    def _plate(self, around: tuple[Plate, ...]) -> Plate:
        free = [d for d in (-1, -2, -3, -4) if d not in [p.dim for p in around]]
        choice = self._choose.choice
        return Plate(self._name("plate"), choice([1, 2, 3, 4]), choice(free[:2]))

    def _latent(self, plates: tuple[Plate, ...], parents: list[Site]) -> Site:
        raise NotImplementedError

    def _observed(self, plates: tuple[Plate, ...], parents: list[Site]) -> Site:
        raise NotImplementedError

    def _some(self, parents: list[Site]) -> list[Site]:
        return self._choose.sample(parents, min(len(parents), self._choose.choice([1, 2])))

    def _weighted(self, site: Site) -> Site:
        """Data with a mask and a scale, or without."""
        masked = self._choose.random() < 0.4
        keep = torch.rand(site.batch, generator=self._generator) < 0.7
        return replace(
            site,
            mask=keep if masked else None,
            masks_itself=masked and self._choose.random() < 0.5,
            scale=self._choose.choice([1.0, 1.0, 1.0, 0.5, 2.0]),
        )
