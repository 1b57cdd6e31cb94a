"""Detect exchangeable components, and add the evidence of all of their labellings."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_mcvae.coordinates.chain_density import WhitenedDensity
from pyro_mcvae.evaluation.clock import OutOfTimeError
from pyro_mcvae.evaluation.refine import site_values
from pyro_mcvae.evaluation.weights import ImportanceSampler
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, known_support
from pyro_mcvae.programs.types import FactorKey, Message, first_line, plate_frames, plate_key
from pyro_mcvae.structure.marked import dependencies_of

_logger = logging.getLogger(__name__)

# Draws at which a density must not change, and the rounding units that are allowed.
_DRAWS, _ROUNDING = 2, 32.0
# Draws at which the overlap of labellings is tested, how many pairs of components are exchanged in
# one batch, and the limit of pairs.
_OVERLAP_DRAWS, _PAIRS, _MOST_PAIRS = 30, 10, 1000
# The guide's density at the labelling of a draw, relative to the sum with a labelling that
# exchanges two components. Above this limit the labellings do not overlap.
_SEPARATE = 0.99

# The dims of sites that are permuted together, counted from the right.
Dims = dict[str, int]


@dataclass(frozen=True)
class Labellings:
    r"""
    Exchangeable components: permutations of latents that change no density of the model.

    The posterior then has K! equal modes for K components. The guide draws one of them, and the
    modes do not overlap. Its weights estimate the evidence of one mode, so the full evidence is
    larger by log K!, which is added.

    :ivar sites: the latents that are permuted, by group.
    :ivar sizes: the number of components of each group.
    """

    sites: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]

    @property
    def added(self) -> float:
        """Return the log number of labellings, the term that is added to the log evidence."""
        return sum(math.lgamma(size + 1) for size in self.sizes)

    @property
    def short(self) -> str:
        """Return the exchangeable sites, and the term that they add to the evidence."""
        names = "; ".join(", ".join(names) for names in self.sites)
        count = " ".join(f"{size}!" for size in self.sizes)
        return f"{names}: log {count} = {self.added:.3f} added"

    def __str__(self) -> str:
        return f"exchangeable components, all of whose labellings count: {self.short}"


def find_labellings(sampler: ImportanceSampler) -> Labellings | None:
    """
    Detect exchangeable components of which the guide draws one labelling.

    The entries of a dim are exchangeable if log p(x, z) is the same, up to rounding, after all
    latents that have this dim are permuted along it: those in a plate, or those with plates or
    event dims of the same size. A transposition and a cycle generate all permutations.

    :returns: None if there are no exchangeable components, or if their labellings overlap.
    """
    try:
        with sampler.programs.restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _find(sampler)
    except OutOfTimeError:
        sampler.clock.warn("no search for exchangeable components, whose labellings would add")
        return None
    except Exception as error:
        # The model or guide does not run at given latents, or the guide has no density there.
        # Nothing is added, so that the evidence is that of one labelling.
        is_expected = isinstance(error, ValueError | RuntimeError)
        level = logging.INFO if is_expected else logging.WARNING
        text = "whether latents are exchangeable is not known (%s): no labellings are added"
        _logger.log(level, text, first_line(error))
        return None


def _find(sampler: ImportanceSampler) -> Labellings | None:
    candidates = _candidates(sampler)
    if not candidates:
        return None
    density = _Density(sampler, sorted({name for _, dims in candidates for name in dims}))
    groups = [(n, dims) for n, dims in _exchangeable(density, candidates) if density.separate(dims)]
    if not groups:
        return None
    return Labellings(tuple(tuple(dims) for _, dims in groups), tuple(n for n, _ in groups))


def _candidates(sampler: ImportanceSampler) -> list[tuple[int, Dims]]:
    """
    Return the dims that may be permuted together, with their size: those of a plate, and those of
    one size. If a site has several of one size, the first or the last one.
    """
    reference = sampler.reference
    nodes, drawn = reference.runs[0].model_trace.nodes, reference.runs[0].guide_trace
    fixed = sampler.fixed_sites | reference.structure.global_sites.model
    data_plates = {key for block in reference.blocks for key in block.plates}
    plates: dict[tuple[str, int], Dims] = defaultdict(dict)
    sizes: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, site in nodes.items():
        if not is_latent(site) or name not in drawn or name in fixed:
            continue
        fn, shape = site["fn"], site["value"].shape
        frames = [
            f for f in plate_frames(site) if f.dim is not None and plate_key(f) not in data_plates
        ]
        places = {f.dim - fn.event_dim: f.name for f in frames}
        for dim in [*sorted(places), *range(-fn.event_dim, 0)]:
            if -dim <= len(shape) and shape[dim] > 1:
                sizes[shape[dim]][name].append(dim)
                if dim in places:
                    plates[places[dim], shape[dim]][name] = dim
    found = [(size, dims) for (_, size), dims in plates.items()]
    for size, by_site in sizes.items():
        found += [(size, {n: dims[i] for n, dims in by_site.items()}) for i in (0, -1)]
    return [group for i, group in enumerate(found) if group not in found[:i]]


def _exchangeable(density: _Density, candidates: list[tuple[int, Dims]]) -> list[tuple[int, Dims]]:
    """Return the dims along which a transposition and a cycle leave the joint density unchanged."""
    draws = density.values(density.sampler.draw(_DRAWS))
    moved = [draws]
    for size, dims in candidates:
        order = torch.arange(size)
        swapped = torch.cat([order[:2].flip(0), order[2:]])
        moved += [_permuted(draws, dims, swapped), _permuted(draws, dims, order.roll(1))]
    joint, _, scale = density({n: torch.cat([m[n] for m in moved]) for n in draws})
    change = (joint.reshape(len(moved), _DRAWS, -1) - joint[:_DRAWS].reshape(_DRAWS, -1)).abs()
    allowed = _ROUNDING * torch.finfo(scale.dtype).eps * scale[:_DRAWS].reshape(_DRAWS, -1)
    same = (change <= allowed).flatten(1).all(1).tolist()
    groups: list[tuple[int, Dims]] = []
    for i, (size, dims) in enumerate(candidates):
        taken = {item for _, other in groups for item in other.items()}
        if same[2 * i + 1] and same[2 * i + 2] and not taken & dims.items():
            groups.append((size, dims))
    return groups


class _Density:
    """
    The densities of model and guide at given latents.

    :param names: the sites of the latents.
    """

    def __init__(self, sampler: ImportanceSampler, names: list[str]) -> None:
        self.sampler = sampler
        nodes = sampler.reference.runs[0].model_trace.nodes
        # Auxiliary sites of the guide are functions of all latents.
        drawn = sampler.reference.runs[0].guide_trace
        self._sites = {n: s for n, s in nodes.items() if is_latent(s) and n in drawn}
        assert self._sites.keys() >= set(names)

    def values(self, sample: WeightedParticles) -> dict[str, Tensor]:
        return {name: site_values(sample, name, site) for name, site in self._sites.items()}

    def __call__(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """
        Return the joint and the guide's log density of each row of latents, ``[rows, *plates]``,
        and the sum of the sizes of the joint's terms.
        """
        values = guide_values(self.sampler.programs, self.sampler.reference, dict(latents))
        count = len(next(iter(values.values())))
        parts = []
        for rows in torch.arange(count).split(max(2, self.sampler.chunk_size)):
            part = {n: v[rows] for n, v in values.items()}
            sample = self.sampler.draw(len(rows), partial(_giving, part))
            joint = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)
            size = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob.abs())
            parts.append((joint, joint - sample.log_weight, size))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def separate(self, dims: Dims) -> bool:
        """Return whether the guide draws one labelling, which overlaps with no other."""
        drawn = self.sampler.draw(_OVERLAP_DRAWS)
        if not self._are_separate(drawn, drawn.log_weight, dims):
            return False
        if self.sampler.annealing is None:
            return True
        # Chains may reach other labellings, and then their weights include these.
        self.sampler.start_chains("labellings: chains", self.sampler.annealing.num_steps - 1)
        chain, density = self.sampler.chain(_OVERLAP_DRAWS)
        position = chain.state.position.detach()
        if isinstance(density, WhitenedDensity):
            position = density.whitening.position(position)
        return self._are_separate(density.log_weight(position).sample, chain.log_weight, dims)

    def _are_separate(self, sample: WeightedParticles, log_weight: Tensor, dims: Dims) -> bool:
        latents = self.values(sample)
        size = next(latents[n].shape[d] for n, d in dims.items())
        pairs = list(itertools.combinations(range(size), 2))
        if len(pairs) > _MOST_PAIRS:
            return False
        _, before, _ = self(latents)
        # Usually the first pair shows an overlap.
        for some in (pairs[:1], *(pairs[i : i + _PAIRS] for i in range(1, len(pairs), _PAIRS))):
            moved = [_permuted(latents, dims, _swap(size, *pair)) for pair in some]
            _, after, _ = self({n: torch.cat([m[n] for m in moved]) for n in latents})
            for at in after.split(len(before)):
                relative = (before - at).sigmoid()
                weighted = (log_weight.softmax(0) * relative).sum(0)
                if bool((torch.minimum(weighted, relative.mean(0)) < _SEPARATE).any()):
                    return False
        return True


def _swap(size: int, i: int, j: int) -> Tensor:
    order = torch.arange(size)
    order[[i, j]] = order[[j, i]]
    return order


def _permuted(latents: Mapping[str, Tensor], dims: Dims, order: Tensor) -> dict[str, Tensor]:
    """Return the latents, permuted along a dim of each of some sites."""
    return {
        n: v.index_select(dims[n], order.to(v.device)) if n in dims else v
        for n, v in latents.items()
    }


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
