"""Which discrete sites a model has, and in which data plates their states are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.ops.provenance import detach_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.plates import PlateKey, is_subsampled, plate_frames, plate_key
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import bare, is_random, known_support, layers
from pyro_mcvae.programs.terms import Term, observed_terms
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.structure.blocks import Structure
from pyro_mcvae.truncated.layout import DataIndex, StateLayout, StatesError, site_spec


class SearchMessenger(Messenger):
    """
    A guide that draws the other latents as ``guide`` does, and the discrete ones from the model.

    It stands for the truncated posterior where only its sites and plates matter.
    """

    def __init__(self, model: Program, guide: Program | None) -> None:
        super().__init__()
        self.model, self.guide = model, guide
        self._traces = Trace(), Trace()
        self._searched: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchMessenger) and (self.model, self.guide) == (
            other.model,
            other.guide,
        )

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: object, **kwargs: object) -> None:
        guide_trace = run_guide(self.guide, args, kwargs)
        self._searched = set()
        with poutine.trace() as tracer, self, poutine.replay(trace=guide_trace):
            self.model(*args, **kwargs)
        self._traces = tracer.trace, guide_trace

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or msg["value"] is not None or not is_random(msg):
            return
        if not known_support(msg["fn"]).is_discrete:
            name, fn = msg["name"], type(bare(msg["fn"])).__name__
            raise StatesError(
                f"site '{name}' ({fn}) is continuous, or does not say its support, and a truncated "
                f"posterior has states of discrete sites only: pass guide=, a guide that draws the "
                f"continuous latents (a function, or an AutoGuide of poutine.block(model, "
                f"expose=['{name}']))"
            )
        check_unmasked(msg)
        self._searched.add(msg["name"])
        with torch.no_grad():
            msg["value"] = detach_provenance(msg["fn"].sample()).detach()
        msg["done"] = True

    def get_traces(self) -> tuple[Trace, Trace]:
        """The model's and the guide's trace of the last call."""
        model_trace, guide_trace = self._traces
        return model_trace, with_searched(guide_trace, model_trace, self._searched)


def check_unmasked(site: Site) -> None:
    """
    Check that a site to be searched has its density in all of its entries.

    :raises StatesError: for a site under a mask, whose masked entries could have any value.
    """
    masks = [site["mask"]]
    masks += [layer._mask for layer in layers(site["fn"]) if isinstance(layer, MaskedDistribution)]
    if any(mask is not None and mask is not True for mask in masks):
        raise StatesError(
            f"site '{site['name']}' is masked, so that states which differ in masked entries alone "
            f"would be counted as several: put poutine.mask around the observations only. Make "
            f"entries that do not exist sure instead, as by Bernoulli(probs * exists), and values "
            f"that are known (obs_mask) by pyro.factor(name, torch.where(known & (z != obs), "
            f"-torch.inf, 0.0))"
        )


def run_guide(guide: Program | None, args: tuple[object, ...], kwargs: dict[str, object]) -> Trace:
    """The trace of a guide; an empty one where there is none."""
    with poutine.trace() as tracer:
        if guide is not None:
            guide(*args, **kwargs)
    for term in observed_terms(tracer.trace):
        name = f"site '{term.key.name}' of guide="
        raise StatesError(f"{name} is observed, which is no part of a posterior: leave it out")
    return tracer.trace


@dataclass(frozen=True)
class GuideDraws:
    """Values of ``guide``'s random sites, and the indices of the plates that it has made."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    subsamples: Mapping[str, Tensor] = field(default_factory=dict)


def shared_by_data(term: Term, plates: frozenset[PlateKey]) -> Term:
    """
    A draw of ``guide`` in none of the plates of the searched sites, as one that all data share.

    Such a draw, of the components of a mixture in ``plate("c", K)`` say, is made once for all
    states, so that it keeps no data from being independent: to the structure it is a point mass.

    :param plates: those of all searched sites.
    """
    site = term.site
    if not is_random(site) or plates & {plate_key(f) for f in plate_frames(site)}:
        return term
    point = dist.Delta(site["value"], event_dim=site["fn"].event_dim)
    return replace(term, site={**site, "fn": point})


def with_searched(guide_trace: Trace, model_trace: Trace, names: Collection[str]) -> Trace:
    """The guide's trace with the searched sites, which have no density of their own."""
    both = guide_trace.copy()
    for name, site in model_trace.nodes.items():
        if name in names:
            if name in both:
                raise StatesError(f"site '{name}' is drawn by guide= and searched: do one of both")
            fn = site["fn"].mask(False)
            both.add_node(name, **{**site, "fn": fn, "mask": None, "scale": 1.0, "infer": {}})
    return both


@dataclass
class Layouts:
    """
    What a pair of programs was found to be.

    :ivar nesting: how many batch dims belong to plates.
    :ivar structure: with one block, that of the discrete sites.
    :ivar layout: the entries of the discrete sites.
    :ivar plates: the plates around any of the discrete sites.
    :ivar given: the observed sites whose values are neither drawn nor computed from parameters.
    :ivar bank: draws of the states from the model, shape ``[states, D]``.
    """

    nesting: int
    structure: Structure
    layout: StateLayout
    plates: frozenset[PlateKey]
    given: frozenset[str]
    bank: Tensor


def find_layouts(
    sampler: ParticleSampler,
    model: Program,
    guide: Program | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    bank: int = 256,
) -> Layouts:
    """
    Find the discrete sites of a model, their data plate and their entries.

    :raises StatesError: naming what cannot have states of its own.
    """
    model = with_impossible_data(model)
    search = SearchMessenger(model, guide)
    programs = Programs(model, search, args, kwargs)
    with isolated(programs.owners), torch.no_grad():
        run = sampler.run_once(programs)
        given = _given_data(programs, run)
        names = sorted(search._searched, key=list(run.model_trace.nodes).index)
        draws = [run.model_trace]
        batch = max([math.prod(run.model_trace.nodes[n]["fn"].batch_shape) for n in names] or [1])
        for _ in range(min(bank, -(-bank // batch)) - 1):
            draws.append(run_pair(programs, Substitutes(Minibatch(run.subsamples)))[1])
    if not names:
        raise StatesError(
            "the model has no discrete site to search: every latent is continuous or drawn by "
            "guide=. Use TraceSGVB_ELBO or TraceIWAE_ELBO with a guide of their own"
        )
    sites = [run.model_trace.nodes[n] for n in names]
    plates = frozenset(plate_key(f) for s in sites for f in plate_frames(s))
    shared = (shared_by_data(t, plates) if t.in_guide else t for t in run.terms)
    run = replace(run, terms=tuple(shared))
    structure = sampler.structures.of(programs, run)
    for site in sites:
        _check_home(site, structure, run)
    if len(structure.blocks) > 1:
        homes = ", ".join(repr(block.plates[-1].name) for block in structure.blocks)
        raise StatesError(
            f"sites {', '.join(map(repr, names))} lie in data plates side by side ({homes}), and a "
            f"truncated posterior keeps states for the data of one: draw the sites of the others "
            f"in guide=, or give each plate a model, a TruncatedPosterior and a loss of its own"
        )
    (block,) = structure.blocks
    frames = {plate_key(f): f for t in run.terms for f in plate_frames(t.site)}
    full = tuple(frames[k].full_size or frames[k].size for k in block.plates)
    layout = StateLayout(block.plates, full, [site_spec(s, run.nesting) for s in sites])
    data = DataIndex(tuple(frames[k].size for k in block.plates), torch.zeros(0))
    drawn = [layout.states({n: t.nodes[n]["value"] for n in names}, data) for t in draws]
    states = torch.cat(drawn).flatten(0, 1)[: max(bank, 1)]
    return Layouts(run.nesting, structure, layout, plates, given, states)


def _given_data(programs: Programs, run: Run) -> frozenset[str]:
    """The observed sites that show the same values in another run, and pass no gradient."""
    with torch.enable_grad():
        again = run_pair(programs, Substitutes(Minibatch(run.subsamples)))[1]
    nodes = run.model_trace.nodes
    observed = [t.key.name for t in run.terms if not t.in_guide and t.site["is_observed"]]
    return frozenset(
        name
        for name in observed
        if name in again
        and nodes[name]["value"].numel()  # pyro.factor observes nothing
        and not again.nodes[name]["value"].requires_grad
        and _equal(nodes[name]["value"], again.nodes[name]["value"])
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _check_home(site: Site, structure: Structure, run: Run) -> None:
    name, frames = site["name"], plate_frames(site)
    b = structure.block_of[FactorKey("guide", name)]
    if not frames or (b is not None and not structure.blocks[b].plates):
        raise StatesError(
            f"site '{name}' has no data plate that separates it from the rest: states are kept per "
            f"datum. Put the data (the site and all that depends on it) in pyro.plate('data', N, "
            f"subsample=...), or draw the site in guide="
        )
    if b is None:
        inner = {f for t in run.terms for f in plate_frames(t.site) if is_subsampled(f)} - frames
        plates = sorted(f"'{f.name}' ({f.size} of {f.full_size})" for f in inner)
        raise StatesError(
            f"site '{name}' has no states of its own, because what depends on it lies in the "
            f"subsampled plate {', '.join(plates)}, which does not enclose the site: pass the full "
            f"data of that plate, or draw the site in guide="
        )
    if any(p.dim is None for p in structure.blocks[b].plates):
        names = ", ".join(repr(p.name) for p in structure.blocks[b].plates if p.dim is None)
        raise StatesError(
            f"site '{name}' lies in the sequential plate {names}: states are kept for vectorised "
            f"plates. Write `with pyro.plate(...) as index:` instead of the loop"
        )
