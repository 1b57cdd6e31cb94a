"""Detect exchangeable components, and add the evidence of all of their labellings."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_mcvae.coordinates.chain_density import WhitenedDensity
from pyro_mcvae.evaluation.clock import OutOfTimeError
from pyro_mcvae.evaluation.refine import site_values
from pyro_mcvae.evaluation.weights import ImportanceSampler
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.isolation import restored
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, known_support
from pyro_mcvae.programs.types import FactorKey, Message, Site, first_line, plate_frames, plate_key
from pyro_mcvae.structure.marked import dependencies_of

_logger = logging.getLogger(__name__)

# Draws at which a density must not change, and the rounding units that are allowed.
_DRAWS, _ROUNDING = 3, 32.0
# The largest axis whose entries may be exchangeable, and the largest for which all pairs are
# tested.
_LARGEST, _SMALL = 64, 8
# Draws at which the overlap of labellings is tested, and the limit of guide densities for it.
_FEWEST, _EVALUATIONS = 50, 5000
# The guide's density at the labelling of a draw, relative to the sum with a labelling that
# exchanges two components. Above the first limit the labellings do not overlap; below the second
# limit the guide draws both.
_SEPARATE, _BOTH = 0.99, 0.55

# An axis that may be permuted: dims of sites, from the right. If the dim is None, the values of a
# discrete site, or several sites of the same form.
Axis = tuple[tuple[tuple[str, ...], int | None], ...]
# Entries of an axis that can be permuted without changing any density of the model.
Group = tuple[Axis, tuple[int, ...]]


@dataclass(frozen=True)
class Labellings:
    r"""
    Exchangeable components: permutations of latents that change no density of the model.

    The posterior then has K! equal modes for K components. If the guide draws one of them, its
    weights estimate the evidence of one mode. If the modes do not overlap, the full evidence is
    larger by log K!, which is added.

    :ivar sites: the latents that are permuted, by group.
    :ivar sizes: the number of components of each group.
    :ivar added: the term that was added to the log evidence of the guide's weights. It is
        ``log_count`` if the guide draws one of the labellings and they do not overlap. Otherwise it
        is None, and up to ``log_count`` may be missing.
    """

    sites: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    added: float | None = None

    @property
    def log_count(self) -> float:
        """Return the log number of labellings."""
        return sum(math.lgamma(size + 1) for size in self.sizes)

    @property
    def short(self) -> str:
        """Return the exchangeable sites, and the term that they add to the evidence."""
        names = "; ".join(", ".join(names) for names in self.sites)
        count = f"log {' '.join(f'{size}!' for size in self.sizes)} = {self.log_count:.3f}"
        if self.added is None:
            return f"{names}: up to {count} not added (labellings overlap, or are not known)"
        return f"{names}: {count} added"

    def __str__(self) -> str:
        return f"exchangeable components, all of whose labellings count: {self.short}"


def find_labellings(sampler: ImportanceSampler, num_particles: int) -> Labellings | None:
    """
    Detect exchangeable components, and whether the guide draws one of the labellings.

    Transpositions must leave log p(x, z) unchanged at several draws, up to rounding.

    :param num_particles: the number of weights of the evidence, which limits the work.
    :returns: None if there are no exchangeable components, or if the guide draws all labellings
        equally.
    """
    try:
        with restored(sampler.programs.owners), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Search(sampler, num_particles).labellings()
    except OutOfTimeError:
        raise
    except Exception as error:
        # The model or guide does not run at given latents. The evidence is valid without this
        # analysis.
        _logger.info("whether latents are exchangeable is not known: %s", first_line(error))
        return None


class _Search:
    def __init__(self, sampler: ImportanceSampler, num_particles: int) -> None:
        self.sampler, self.tester, self.budget = sampler, sampler, num_particles
        # Rows at which exchangeability is tested.
        self._evaluations_left = max(100, num_particles) * (1 if sampler.loops else 4)
        self.reference = sampler.reference
        nodes = self.reference.runs[0].model_trace.nodes
        fixed = sampler.fixed_sites | self.reference.structure.global_sites.model
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
            # A flow without an inverse, or latents that are other functions of the draws. The model
            # is tested at draws of its prior, and the densities of the guide are not known.
            _logger.info("the guide has no density at given latents: %s", first_line(error))
            self.tester = self.sampler.of_prior()
        groups = [
            g for size, same_size in axes.items() for g in self._groups(size, same_size, draws)
        ]
        if not groups:
            return None
        sites = tuple(tuple(dict.fromkeys(n for ns, _ in axis for n in ns)) for axis, _ in groups)
        result = Labellings(sites, tuple(len(entries) for _, entries in groups))
        if self.tester is not self.sampler:
            return result
        swaps = [(axis, pair) for axis, e in groups for pair in itertools.combinations(e, 2)]
        count = min(self.budget, max(_FEWEST, _EVALUATIONS // len(swaps)))
        drawn = self.sampler.draw(count)
        relative_density = self._relative_density(self._values(drawn), swaps)
        if bool((relative_density.mean(1) < _BOTH).all()):
            return None
        separate = _are_separate(relative_density, drawn.log_weight)
        if separate and self.sampler.annealing is not None:
            # Chains may reach other labellings, and then their weights include these.
            ends, weights = self._ends()
            separate = _are_separate(self._relative_density(self._values(ends), swaps), weights)
        return replace(result, added=result.log_count if separate else None)

    def _axes(self) -> Iterator[tuple[int, Axis]]:
        """
        Return the axes that may be permuted, by size. Sites in a common plate are permuted
        together.
        """
        data_plates = {key for block in self.reference.blocks for key in block.plates}
        plates: dict[tuple[str, int], list[tuple[tuple[str, ...], int]]] = defaultdict(list)
        forms: dict[object, list[str]] = defaultdict(list)
        for name, site in self.sites.items():
            fn, value = site["fn"], site["value"]
            for dim in range(-fn.event_dim, 0):
                yield value.shape[dim], (((name,), dim),)
            for frame in plate_frames(site):
                if frame.dim is not None and plate_key(frame) not in data_plates:
                    dim = frame.dim - fn.event_dim
                    if -dim <= value.dim():
                        plates[frame.name, value.shape[dim]].append(((name,), dim))
            if fn.event_dim == 0 and (size := _cardinality(site)):
                yield size, (((name,), None),)
            frames = frozenset((f.name, f.dim) for f in site["cond_indep_stack"])
            forms[type(fn), value.shape, str(known_support(fn)), frames].append(name)
        for (_, size), dims in plates.items():
            yield size, tuple(dims)
        for names in forms.values():
            yield len(names), ((tuple(names), None),)

    def _groups(self, size: int, axes: Sequence[Axis], draws: Mapping[str, Tensor]) -> list[Group]:
        """
        Return the exchangeable entries of axes of one size, for single axes or several together.
        """
        groups: list[Group] = []
        pairs = [(i, i + 1) for i in range(size - 1)]
        if size <= _SMALL:
            pairs = list(itertools.combinations(range(size), 2))
        subsets = (itertools.combinations(axes, count) for count in range(1, len(axes) + 1))
        for chosen in itertools.chain.from_iterable(subsets):
            axis = tuple(itertools.chain.from_iterable(chosen))
            if any(set(axis) & set(other) for other, _ in groups):
                continue
            # If there are many pairs, first test a few.
            few = pairs[:: max(1, len(pairs) // _SMALL)]
            if any(self._invariant(draws, axis, few)):
                label = list(range(size))  # groups of entries that can be exchanged with each other
                for i, j in itertools.compress(pairs, self._invariant(draws, axis, pairs)):
                    label = [label[i] if k == label[j] else k for k in label]
                classes = (tuple(i for i in range(size) if label[i] == k) for k in range(size))
                groups += [(axis, entries) for entries in classes if len(entries) > 1]
        return groups

    def _invariant(
        self, draws: Mapping[str, Tensor], axis: Axis, pairs: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """
        Return, for each pair of entries, whether exchanging them leaves the joint density
        unchanged.
        """
        self._evaluations_left -= _DRAWS * (1 + len(pairs))
        if self._evaluations_left < 0:
            return [False] * len(pairs)
        before, _, size = self._densities(draws)
        moved = [_exchanged(draws, axis, pair) for pair in pairs]
        after, _, _ = self._densities({n: torch.cat([m[n] for m in moved]) for n in draws})
        invariant = []
        for latents, joint in zip(moved, after.split(_DRAWS), strict=True):
            moves = [(latents[n] != v).reshape(len(v), -1).any(1) for n, v in draws.items()]
            same = (joint - before).abs() <= _ROUNDING * torch.finfo(size.dtype).eps * size
            invariant.append(bool(same.all() and torch.stack(moves).any(0).all()))
        return invariant

    def _relative_density(
        self, latents: Mapping[str, Tensor], swaps: Sequence[tuple[Axis, tuple[int, int]]]
    ) -> Tensor:
        """
        Return q(z) / (q(z) + q(z')) of the guide for each pair of entries, shape
        ``[pairs, rows, *plates]``. In z' these two entries of z are exchanged.
        """
        _, at, _ = self._densities(latents)
        exchanged = [self._densities(_exchanged(latents, *swap))[1] for swap in swaps]
        return (at - torch.stack(exchanged)).sigmoid()

    def _ends(self) -> tuple[WeightedParticles, Tensor]:
        """Return the final positions of the sampler's chains, and their log weights."""
        chain, density = self.sampler.chain(min(self.budget, _FEWEST))
        position = chain.state.position.detach()
        if isinstance(density, WhitenedDensity):
            position = density.whitening.position(position)
        return density.log_weight(position).sample, chain.log_weight

    def _values(self, sample: WeightedParticles) -> dict[str, Tensor]:
        return {name: site_values(sample, name, site) for name, site in self.sites.items()}

    def _densities(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """
        Return the joint and the guide's log density of each row of latents, ``[rows, *plates]``,
        and the sum of the sizes of the joint's terms.
        """
        values = guide_values(self.tester.programs, self.tester.reference, dict(latents))
        count = len(next(iter(values.values())))
        parts = []
        for rows in torch.arange(count).split(max(2, self.sampler.chunk_size)):
            part = {n: v[rows] for n, v in values.items()}
            sample = self.tester.draw(len(rows), partial(_giving, part))
            joint = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)
            size = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob.abs())
            parts.append((joint, joint - sample.log_weight, size))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _are_separate(relative_density: Tensor, log_weight: Tensor) -> bool:
    """Return whether labellings do not overlap, neither at the weights nor at the draws."""
    return bool(
        (
            torch.minimum(
                (log_weight.softmax(0) * relative_density).sum(1), relative_density.mean(1)
            )
            >= _SEPARATE
        ).all()
    )


def _giving(values: Mapping[str, Tensor], rows: range, shared: frozenset[str]) -> SampleFn:
    """Return a sample function that sets the guide's sites, in runs of one row or of all rows."""

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
    """Return the number of values of a discrete site with values 0, 1, ...; 0 for other sites."""
    fn = site["fn"]
    if not known_support(fn).is_discrete or not getattr(fn, "has_enumerate_support", False):
        return 0
    values = fn.enumerate_support(expand=False).flatten()
    return len(values) if torch.equal(values, torch.arange(len(values)).to(values)) else 0


def _exchanged(
    latents: Mapping[str, Tensor], axis: Axis, pair: tuple[int, int]
) -> dict[str, Tensor]:
    """Return the latents with two entries exchanged."""
    exchanged, (i, j) = dict(latents), pair
    for names, dim in axis:
        value = exchanged[name := names[0]]
        if len(names) > 1:
            exchanged[names[i]], exchanged[names[j]] = latents[names[j]], latents[names[i]]
        elif dim is None:
            exchanged[name] = torch.where(value == i, j, torch.where(value == j, i, value))
        else:
            index = torch.arange(value.shape[dim], device=value.device)
            index[[i, j]] = index[[j, i]]
            exchanged[name] = value.index_select(dim, index)
    return exchanged


def guide_values(
    programs: Programs, reference: WeightedParticles, latents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """
    Return the values of the guide's random sites at which its latents have the given values.

    AutoGuides draw auxiliary sites, and latents are functions of them. An auxiliary site can be
    inverted if it is the concatenation of the unconstrained values of its latents.

    :param reference: an execution of model and guide.
    :raises ValueError: naming an auxiliary site that cannot be inverted.
    """
    run = reference.runs[0]
    sites = {n: s for n, s in run.guide_trace.nodes.items() if is_latent(s)}
    random = [n for n, s in sites.items() if is_random(s)]
    values = {n: latents[n] for n in random if n in latents}
    missing = [n for n in random if n not in latents]
    if not missing:
        return values
    parents = dependencies_of(programs, frozenset(random), reference.runs[0]).factors
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
        values[name] = value
    return values


def _unconstrained(
    run: Run, follow: list[str], values: dict[str, Tensor], shape: torch.Size
) -> Tensor | None:
    """Return the unconstrained values, which may have any leading dims."""
    nodes, parts, lead = run.model_trace.nodes, [], torch.Size()
    for name in follow:
        site, value = nodes[name], values[name]
        lead = value.shape[: value.dim() - site["value"].dim()]
        parts.append(biject_to(known_support(site["fn"])).inv(value).reshape(*lead, -1))
    if sum(p.shape[-1] for p in parts) != shape.numel():
        return None
    return torch.cat(parts, -1).reshape(lead + shape)
