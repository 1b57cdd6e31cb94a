"""Exchangeable components, and the evidence of all of their labellings."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_mcvae.coordinates.chain_density import WhitenedDensity
from pyro_mcvae.evaluation.draws import site_values
from pyro_mcvae.evaluation.weights import ImportanceSampler, WeightSummary
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, known_support
from pyro_mcvae.programs.types import FactorKey, Message, Site, first_line, plate_frames, plate_key
from pyro_mcvae.structure import dependencies
from pyro_mcvae.training.checkpoint import rng_state, set_rng_state

_logger = logging.getLogger(__name__)

# Draws at which a density must not change, and units of rounding that are no change.
_DRAWS, _ROUNDING = 3, 32.0
# Largest axis whose entries may be exchangeable, and of how many axes all subsets are tried.
_LARGEST, _MOST_AXES = 64, 5
# Labellings that are summed one by one; evaluations of the guide for that, and the fewest draws.
_MOST, _EVALUATIONS, _FEWEST = 120, 5000, 50
# Share of the guide's density at its own labelling from which on others do not overlap; and nats
# that are not worth a word.
_APART, _SMALL = 0.99, 0.01


class Axis(NamedTuple):
    """
    What is permuted: a dim of some sites, the values of a discrete site, or sites of one form.

    :ivar dims: by site, a dim counted from the right; None for the values themselves.
    :ivar sites: the sites, where these are what is permuted.
    """

    dims: tuple[tuple[str, int | None], ...] = ()
    sites: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.sites or tuple(dict.fromkeys(n for n, _ in self.dims))


class Group(NamedTuple):
    """Entries of some axes that can be permuted together."""

    axes: tuple[Axis, ...]
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Labellings:
    r"""
    Exchangeable components: permutations of latents that change no density of the model.

    A posterior then has as many equal modes as there are labellings, K! for K components. A guide
    that draws one of them, at densities q, is a guide of all by
    :math:`\bar q(z) = \frac{1}{|G|} \sum_\pi q(\pi z)`, and

    .. math:: \log p(x) = \log E_q \Big[ w(z) \frac{q(z)}{\bar q(z)} \Big] ,

    which is one mode's evidence plus log K! where the modes do not overlap, and what the guide's
    weights say where it covers them all.

    :ivar sites: the latents that are permuted, by group.
    :ivar sizes: how many components each group has.
    :ivar added: what was added to the log evidence that the guide's own weights have,
        ``[*plates]``; None where it is only known that it is ``log_count`` at most.
    :ivar weights: where labellings overlap, the weights of :math:`\bar q`.
    """

    sites: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    added: Tensor | None = None
    weights: WeightSummary | None = None

    @property
    def log_count(self) -> float:
        """The log number of labellings."""
        return sum(math.lgamma(size + 1) for size in self.sizes)

    @property
    def short(self) -> str:
        """What is exchangeable, and what that adds."""
        names = "; ".join(", ".join(names) for names in self.sites)
        count = f"log {' '.join(f'{size}!' for size in self.sizes)} = {self.log_count:.3f}"
        if self.added is None:
            why = "they overlap, or the guide's density is not known"
            return f"{names}: up to {count} not added ({why})"
        return f"{names}: {float(self.added.mean()):.3f} added ({count})"

    def __str__(self) -> str:
        return f"exchangeable components, all of whose labellings count: {self.short}"


def find_labellings(sampler: ImportanceSampler, num_particles: int) -> Labellings | None:
    """
    Find what is exchangeable, and what all labellings add to the evidence.

    Exchangeability is tested, not assumed: transpositions must leave log p(x, z) as it is at
    several draws, to rounding.

    :param num_particles: how many weights the evidence has, which bounds the work of this.
    :returns: None where nothing is, and where the guide draws all labellings alike.
    """
    generators = rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Search(sampler, num_particles).labellings()
    except Exception as error:
        # The guide has no density at given latents, or a program does not run there; the evidence
        # stands without.
        _logger.info("whether latents are exchangeable is not known: %s", first_line(error))
        return None
    finally:
        set_rng_state(generators)


class _Densities(NamedTuple):
    """Of the latents of each row, ``[rows, *plates]``; ``size`` is the sum of the terms' sizes."""

    joint: Tensor
    guide: Tensor
    size: Tensor


class _Search:
    def __init__(self, sampler: ImportanceSampler, num_particles: int) -> None:
        self.sampler, self.tester, self.budget = sampler, sampler, num_particles
        # Rows at which exchangeability is tested.
        self._left = max(100, num_particles) * (1 if sampler.loops else 4)
        self.reference = sampler.reference
        nodes = self.reference.runs[0].model_trace.nodes
        fixed = sampler.held | self.reference.structure.global_sites.model
        drawn = self.reference.runs[0].guide_trace
        self.sites = {
            n: s for n, s in nodes.items() if is_latent(s) and n in drawn and n not in fixed
        }

    def labellings(self) -> Labellings | None:
        axes = defaultdict[int, list[Axis]](list)
        for size, axis in self._axes():
            if 2 <= size <= _LARGEST:
                axes[size].append(axis)
        if not axes:
            return None
        draws = self._values(self.sampler.draw(_DRAWS))
        try:
            self._densities(draws)
        except Exception as error:
            # A flow without an inverse, or latents that follow from draws in a way of their own:
            # the model is tested by the densities of its prior, and the guide's are not known.
            _logger.info("the guide has no density at given latents: %s", first_line(error))
            self.tester = self.sampler.of_prior()
        groups = [g for size, own in axes.items() for g in self._groups(size, own, draws)]
        if not groups:
            return None
        sites = tuple(
            tuple(dict.fromkeys(n for a in g.axes for n in a.names if n in self.sites))
            for g in groups
        )
        sizes = tuple(len(g.entries) for g in groups)
        found = Labellings(sites, sizes)
        if self.tester is not self.sampler:
            return found
        number = math.prod(map(math.factorial, sizes))
        complete = number <= _MOST
        permutations = _permutations(groups, complete)
        count = min(self.budget, max(_FEWEST, _EVALUATIONS // len(permutations)))
        own, log_weight = self._own_share(self._values(self.sampler.draw(count)), permutations)
        # A guide that draws labellings alike needs nothing added; of many, pairs tell.
        alike = own * number - 1 < _SMALL if complete else own.mean(0) < 0.5
        if bool(alike.all()):
            return None
        share = _least_share(own, log_weight)
        if self.sampler.annealing is not None:
            # Chains that reach other labellings by themselves weigh these, too.
            ends, weights = self._ends()
            own, _ = self._own_share(self._values(ends), permutations)
            share, complete = torch.minimum(share, _least_share(own, weights)), False
        if bool((share >= _APART).all()):
            return replace(found, added=found.log_count + share.log())
        if not complete:
            return found
        summary = WeightSummary(count)
        summary.add(log_weight + own.log() + found.log_count)
        return replace(found, weights=summary)

    def _axes(self) -> Iterator[tuple[int, Axis]]:
        """What may be permuted, and of how many entries."""
        own = {key for block in self.reference.blocks for key in block.plates}
        plates: dict[tuple[str, int], list[tuple[str, int]]] = {}
        forms: dict[object, list[str]] = {}
        for name, site in self.sites.items():
            fn, value = site["fn"], site["value"]
            for dim in range(-fn.event_dim, 0):
                yield value.shape[dim], Axis(((name, dim),))
            for frame in plate_frames(site):
                if frame.dim is not None and plate_key(frame) not in own:
                    dim = frame.dim - fn.event_dim
                    if -dim <= value.dim():
                        plates.setdefault((frame.name, value.shape[dim]), []).append((name, dim))
            if fn.event_dim == 0 and (size := _cardinality(site)):
                yield size, Axis(((name, None),))
            frames = frozenset((f.name, f.dim) for f in site["cond_indep_stack"])
            form = type(fn), value.shape, str(known_support(fn)), frames
            forms.setdefault(form, []).append(name)
        for (_, size), dims in plates.items():
            yield size, Axis(tuple(dims))
        for names in forms.values():
            yield len(names), Axis(sites=tuple(names))

    def _groups(self, size: int, axes: Sequence[Axis], draws: Mapping[str, Tensor]) -> list[Group]:
        """The exchangeable entries of axes of one size, by the smallest sets of axes."""
        found: list[Group] = []
        pairs = list(itertools.combinations(range(size), 2))
        few = [(i, i + 1) for i in range(size - 1)]
        pairs = pairs if size <= 8 else few
        for chosen in _subsets(axes):
            if any(set(chosen) & set(group.axes) for group in found):
                continue
            # A few pairs tell whether any may be exchanged, where there are many.
            first = few[:: max(1, len(few) // 8)]
            if len(pairs) > 8 and not any(self._invariant(draws, chosen, first)):
                continue
            same = self._invariant(draws, chosen, pairs)
            linked = [pair for pair, exchanges in zip(pairs, same, strict=True) if exchanges]
            found += [Group(chosen, entries) for entries in _classes(size, linked)]
        return found

    def _invariant(
        self, draws: Mapping[str, Tensor], axes: Sequence[Axis], pairs: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """Of each pair of entries, whether exchanging them leaves the joint density as it is."""
        self._left -= _DRAWS * (1 + len(pairs))
        if self._left < 0:
            return [False] * len(pairs)
        before = self._densities(draws)
        moved = [_permuted(draws, axes, dict((pair, pair[::-1]))) for pair in pairs]
        after = self._densities({n: torch.cat([m[n] for m in moved]) for n in draws})
        found = []
        for turn, latents in enumerate(moved):
            rows = slice(turn * _DRAWS, (turn + 1) * _DRAWS)
            moves = [(latents[n] != v).reshape(len(v), -1).any(1) for n, v in draws.items()]
            rounding = _ROUNDING * torch.finfo(before.size.dtype).eps * before.size
            same = (after.joint[rows] - before.joint).abs() <= rounding
            found.append(bool(same.all() and torch.stack(moves).any(0).all()))
        return found

    def _own_share(
        self, latents: Mapping[str, Tensor], permutations: Sequence[Sequence[_Move]]
    ) -> tuple[Tensor, Tensor]:
        """The guide's density at latents as a share of all labellings', and their log weights."""
        at = self._densities(latents)
        others = [at.guide]
        for moves in permutations[1:]:
            moved = dict(latents)
            for axes, mapping in moves:
                moved = _permuted(moved, axes, mapping)
            others.append(self._densities(moved).guide)
        return (at.guide - torch.stack(others).logsumexp(0)).exp(), at.joint - at.guide

    def _ends(self) -> tuple[WeightedParticles, Tensor]:
        """Where chains of the sampler's end, and their log weights."""
        chain, density = self.sampler.chain(min(self.budget, _FEWEST))
        position = chain.state.position.detach()
        if isinstance(density, WhitenedDensity):
            position = density.whitening.position(position)
        return density.log_weight(position).sample, chain.log_weight

    def _values(self, sample: WeightedParticles) -> dict[str, Tensor]:
        return {name: site_values(sample, name, site) for name, site in self.sites.items()}

    def _densities(self, latents: Mapping[str, Tensor]) -> _Densities:
        values = guide_values(self.tester.programs, self.tester.reference, dict(latents))
        count = len(next(iter(values.values())))
        parts = []
        for rows in torch.arange(count).split(max(2, self.sampler.chunk_size)):
            part = {n: v[rows] for n, v in values.items()}
            sample = self.tester.draw(len(rows), partial(_giving, part))
            joint = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)
            size = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob.abs())
            parts.append((joint, joint - sample.log_weight, size))
        return _Densities(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _least_share(own: Tensor, log_weight: Tensor) -> Tensor:
    """The guide's own labelling's share, where the weights are or where the draws are."""
    return torch.minimum((log_weight.softmax(0) * own).sum(0), own.mean(0))


# Axes, and the entry that each entry takes the place of.
_Move = tuple[tuple[Axis, ...], Mapping[int, int]]


def _giving(values: Mapping[str, Tensor], rows: range, shared: frozenset[str]) -> SampleFn:
    """Gives the guide's sites their values, in runs of one row or of all."""

    def give(msg: Message) -> Tensor | None:
        value = values.get(msg["name"])
        if value is None:
            return None
        shape = msg["fn"].shape()
        if len(rows) == 1:
            return value[rows.start].expand(shape)
        inner = value.shape[1:]
        between = (1,) * (len(shape) - 1 - len(inner))
        return value.reshape(len(rows), *between, *inner).expand(shape)

    return give


def _cardinality(site: Site) -> int:
    """How many values a discrete site has, from 0 on; 0 where it has other ones."""
    fn = site["fn"]
    if not known_support(fn).is_discrete or not getattr(fn, "has_enumerate_support", False):
        return 0
    values = fn.enumerate_support(expand=False).flatten()
    return len(values) if torch.equal(values, torch.arange(len(values)).to(values)) else 0


def _subsets(axes: Sequence[Axis]) -> Iterator[tuple[Axis, ...]]:
    """Sets of axes that may belong together, small ones first."""
    sizes: Sequence[int] = range(1, len(axes) + 1)
    if len(axes) > _MOST_AXES:
        sizes = [1, len(axes) - 1, len(axes)]
    for size in sizes:
        yield from itertools.combinations(axes, size)


def _permuted(
    latents: Mapping[str, Tensor], axes: Sequence[Axis], mapping: Mapping[int, int]
) -> dict[str, Tensor]:
    """The latents with entry ``mapping[i]`` in place of entry i."""
    found = dict(latents)
    for axis in axes:
        if axis.sites:
            for i, j in mapping.items():
                found[axis.sites[i]] = latents[axis.sites[j]]
        for name, dim in axis.dims:
            value = found[name]
            if dim is None:
                # Entry j stands where entry i stood, so what pointed at j points at i.
                size = max(int(value.max()), *mapping) + 1
                table = torch.arange(size, device=value.device)
                for i, j in mapping.items():
                    table[j] = i
                found[name] = table[value.long()].to(value.dtype)
            else:
                index = torch.arange(value.shape[dim], device=value.device)
                for i, j in mapping.items():
                    index[i] = j
                found[name] = value.index_select(dim, index)
    return found


def _classes(size: int, linked: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The entries that exchange with each other, where there are several."""
    label = list(range(size))
    for i, j in linked:
        label = [label[i] if k == label[j] else k for k in label]
    classes = (tuple(i for i in range(size) if label[i] == k) for k in sorted(set(label)))
    return [entries for entries in classes if len(entries) > 1]


def _permutations(groups: Sequence[Group], complete: bool) -> list[list[_Move]]:
    """All labellings, the identity first; or the identity and those that exchange two entries."""
    if complete:
        each = [
            [
                (g.axes, dict(zip(g.entries, p, strict=True)))
                for p in itertools.permutations(g.entries)
            ]
            for g in groups
        ]
        return [list(moves) for moves in itertools.product(*each)]
    swaps: list[list[_Move]] = [[]]
    for group in groups:
        pairs = itertools.combinations(group.entries, 2)
        swaps += [[(group.axes, {i: j, j: i})] for i, j in pairs]
    return swaps


def guide_values(
    programs: Programs, reference: WeightedParticles, latents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """
    The values of the guide's random sites at which its latents are the given ones.

    AutoGuides draw auxiliary sites, of which the latents are functions: a site is inverted where
    it holds the unconstrained values of the latents that follow from it, side by side.

    :param reference: an execution of both programs.
    :raises ValueError: naming an auxiliary site that holds anything else.
    """
    run = reference.runs[0]
    sites = {n: s for n, s in run.guide_trace.nodes.items() if is_latent(s)}
    random = [n for n, s in sites.items() if is_random(s)]
    found = {n: latents[n] for n in random if n in latents}
    missing = [n for n in random if n not in latents]
    if not missing:
        return found
    parents = dependencies.find_dependencies(
        programs, frozenset(random), reference.subsamples
    ).factors
    for name in missing:
        follow = [
            n
            for n, s in sites.items()
            if is_delta(s["fn"]) and n in latents and name in parents.get(FactorKey("guide", n), ())
        ]
        shape = sites[name]["value"].shape
        now = {n: run.guide_trace.nodes[n]["value"] for n in follow}
        again = _unconstrained(run, follow, now, shape)
        if again is None or not torch.allclose(again, sites[name]["value"], rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"the guide's auxiliary site '{name}' is not the unconstrained form of the latents "
                f"{follow} that follow from it, so no chain can begin at given latents: use a "
                f"guide without auxiliary sites, AutoNormal or AutoMultivariateNormal"
            )
        value = _unconstrained(run, follow, latents, shape)
        assert value is not None
        found[name] = value
    return found


def _unconstrained(
    run: Run, follow: list[str], values: dict[str, Tensor], shape: torch.Size
) -> Tensor | None:
    """What is unconstrained of the values, which may have any leading dims."""
    nodes, parts, lead = run.model_trace.nodes, [], torch.Size()
    for name in follow:
        site, value = nodes[name], values[name]
        lead = value.shape[: value.dim() - site["value"].dim()]
        parts.append(biject_to(known_support(site["fn"])).inv(value).reshape(*lead, -1))
    if sum(p.shape[-1] for p in parts) != shape.numel():
        return None
    return torch.cat(parts, -1).reshape(lead + shape)
