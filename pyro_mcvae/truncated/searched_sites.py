"""Which discrete sites a model has, and in which data plates their states are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.ops.provenance import detach_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.plates import PlateKey, is_subsampled, plate_frames, plate_key
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import bare, is_random, known_support
from pyro_mcvae.programs.terms import Term, observed_terms
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.structure.blocks import Structure
from pyro_mcvae.truncated.layout import DataIndex, StateLayout, existing_entries, site_spec
from pyro_mcvae.truncated.masked_entries import reader_of_masked

__all__ = [
    "GuideDraws",
    "Layouts",
    "SearchMessenger",
    "StatesError",
    "find_layouts",
    "run_guide",
    "shared_by_data",
    "with_searched",
]


class StatesError(SiteError):
    """The program and the states kept for its data do not fit together."""


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
        self._searched.add(msg["name"])
        with torch.no_grad():
            msg["value"] = detach_provenance(msg["fn"].sample()).detach()
        msg["done"] = True

    def get_traces(self) -> tuple[Trace, Trace]:
        """The model's and the guide's trace of the last call."""
        model_trace, guide_trace = self._traces
        return model_trace, with_searched(guide_trace, model_trace, self._searched)


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
    :ivar blocks: for each block of the structure its layout, None where it has no discrete site.
    :ivar around: the plates of each discrete site.
    :ivar given: the observed sites whose values are neither drawn nor computed from parameters.
    :ivar masked: whether some discrete site is masked.
    :ivar bank: draws of each block's states from the model, shape ``[states, D]``.
    """

    nesting: int
    structure: Structure
    blocks: list[StateLayout | None]
    around: Mapping[str, frozenset[PlateKey]]
    given: frozenset[str]
    masked: bool
    bank: list[Tensor | None]

    @cached_property
    def searched(self) -> list[tuple[int, StateLayout]]:
        return [(b, layout) for b, layout in enumerate(self.blocks) if layout is not None]

    @cached_property
    def given_names(self) -> str:
        """The same for a message."""
        names = ", ".join(map(repr, sorted(self.given)))
        return f"site {names} is" if len(self.given) == 1 else f"sites {names} are"

    @cached_property
    def plates(self) -> frozenset[PlateKey]:
        """Those around any of the discrete sites."""
        return frozenset(plate for plates in self.around.values() for plate in plates)

    @cached_property
    def names(self) -> frozenset[str]:
        """The discrete sites that have states."""
        return frozenset(name for _, layout in self.searched for name in layout.sites)


def find_layouts(
    sampler: ParticleSampler,
    model: Program,
    guide: Program | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    bank: int = 256,
) -> Layouts:
    """
    Find the discrete sites of a model, their data plates and their entries.

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
    with torch.no_grad():
        astray = reader_of_masked(programs, run, names)
    if astray is not None:
        raise StatesError(astray)
    sites = [run.model_trace.nodes[n] for n in names]
    around = {s["name"]: frozenset(map(plate_key, plate_frames(s))) for s in sites}
    plates = frozenset(plate for found in around.values() for plate in found)
    shared = (shared_by_data(t, plates) if t.in_guide else t for t in run.terms)
    run = replace(run, terms=tuple(shared))
    structure = sampler.structures.of(programs, run)
    for site in sites:
        _check_home(site, structure, run)
    frames = {plate_key(f): f for t in run.terms for f in plate_frames(t.site)}
    blocks: list[StateLayout | None] = []
    banks: list[Tensor | None] = []
    for b, block in enumerate(structure.blocks):
        own = [s for s in sites if structure.block_of[FactorKey("model", s["name"])] == b]
        if not own:
            blocks.append(None)
            banks.append(None)
            continue
        full = tuple(frames[k].full_size or frames[k].size for k in block.plates)
        layout = StateLayout(block.plates, full, [site_spec(s, run.nesting) for s in own])
        sizes = tuple(frames[k].size for k in block.plates)
        data_index = DataIndex(sizes, torch.zeros(0))
        drawn = [
            layout.states({n: trace.nodes[n]["value"] for n in layout.sites}, data_index)
            for trace in draws
        ]
        blocks.append(layout)
        banks.append(torch.cat(drawn).flatten(0, 1)[: max(bank, 1)])
    masked = any(existing_entries(s) is not None for s in sites)
    return Layouts(run.nesting, structure, blocks, around, given, masked, banks)


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
