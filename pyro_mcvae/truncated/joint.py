"""The joint density of a model at the states of its discrete sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.util import check_site_shape
from torch import Tensor

from pyro_mcvae.checks.vectorization import STATES
from pyro_mcvae.particles.runner import Execution, Layout, not_executed
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.contract import check_batch_dims, check_sites, nesting_of
from pyro_mcvae.programs.distributions import with_impossible_data
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import Minibatch, Recorder, SampleFn, Substitutes
from pyro_mcvae.programs.run import Programs, Run, run_model, run_pair, with_changes
from pyro_mcvae.programs.sites import bare, is_latent, is_random, known_support, layers
from pyro_mcvae.programs.terms import Term, guide_term, observed_terms, scored
from pyro_mcvae.programs.types import (
    FactorKey,
    PlateKey,
    Program,
    Site,
    is_subsampled,
    note,
    noted,
    plate_frames,
    plate_key,
)
from pyro_mcvae.structure.blocks import Structure
from pyro_mcvae.truncated.broadcast_log_prob import broadcast_term
from pyro_mcvae.truncated.layout import (
    DataIndex,
    SiteSpec,
    StateLayout,
    StatesError,
    find_data_index,
    site_spec,
)

# Which discrete sites a model has, and in which data plates their states are kept.


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


# The joint density of a model as a function of its discrete states, everything else fixed.

# The values of a site in each run, as leaves of the graph.
Leaves = dict[tuple[str, int], Tensor]


def _draw_nothing(*args: object, **kwargs: object) -> None:
    """The guide of a model all of whose latents are searched."""


class JointRuns:
    r"""
    :math:`\log p(x, z, w) - \log q(w)` of one step at any states z of its discrete sites.

    The minibatch and the other latents w, which ``guide`` draws, are the same in every run.

    :param sampler: knows how to vectorise, and keeps what was learned of the programs.
    :param layouts: from :func:`find_layouts`.
    :param given: draws of ``guide`` that are made already, by site, and their minibatch.
    :ivar finite: whether all densities were finite, of those that have a graph.
    :ivar num_runs: how many passes through the model were made.
    :ivar num_states: at how many states of a datum in all.
    """

    def __init__(
        self,
        sampler: ParticleSampler,
        layouts: Layouts,
        model: Program,
        guide: Program | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        given: GuideDraws | None = None,
    ) -> None:
        self._sampler, self.layouts = sampler, layouts
        model = with_impossible_data(model)
        self._programs = Programs(model, SearchMessenger(model, guide), args, kwargs)
        # In which the model draws the discrete sites itself, in whatever dims it runs.
        self._plain = Programs(model, guide or _draw_nothing, args, kwargs)
        self.args, self.kwargs = args, kwargs
        given = GuideDraws() if given is None else given
        self.subsamples = Minibatch(given.subsamples)
        with Recorder(Substitutes(self.subsamples, given.values), records=False):
            self.guide_trace = run_guide(guide, args, kwargs)
        self._guide_terms = [
            shared_by_data(guide_term(s), layouts.plates) for s in scored(self.guide_trace)
        ]
        self._data: DataIndex | None = None
        # What is known of runs that show the same sites and plates.
        self._known: WeightedParticles | None = None
        self._known_by: object = None
        self.finite = True
        self.num_runs, self.num_states = 0, 0

    @property
    def data(self) -> DataIndex:
        """The data of the minibatch; known after the first run."""
        assert self._data is not None
        return self._data

    def run(
        self,
        states: Tensor | Callable[[], Tensor] | None,
        count: int,
        leaves: Leaves | None = None,
    ) -> WeightedParticles:
        """
        Run the model.

        :param states: shape ``[E, C, D]``, or a function that gives them once the data of the
            minibatch are known; None to draw them from the model.
        :param count: how many, C.
        :param leaves: filled with the sites' values, as leaves of the graph.
        """
        self.num_runs, self.num_states = self.num_runs + 1, self.num_states + count
        values: dict[str, Tensor] = {}

        def draw(at: int | None) -> SampleFn:
            def supply(msg: Site) -> Tensor | None:
                name = msg["name"]
                spec = self.layouts.layout.sites.get(name)
                if spec is None:
                    raise StatesError(
                        f"site '{name}' was not in the model at its first call: make another "
                        f"TruncatedPosterior for a program of another structure"
                    )
                check_unmasked(msg)
                if self._data is None:
                    self._find_data(msg)
                if states is None:
                    return None
                if not values:
                    found = states() if callable(states) else states
                    values.update(self.layouts.layout.values(found, self.data))
                value = values[name] if at is None else values[name][at]
                value = value.reshape(msg["fn"].batch_shape + msg["fn"].event_shape)
                value = _inside_support(value, msg, spec)
                if leaves is not None and value.is_floating_point():
                    value = value.detach().requires_grad_()
                    leaves[name, at or 0] = value
                return value

            return supply

        execution = replace(self._execution, execute=partial(self._once, draw(None)))
        run = self._sampler.runner.run_together(execution, count)
        if run is not None:
            found = [run]
            shown = found[0].signature, found[0].sizes
            if self._known is not None and shown == self._known_by:
                return self._known.with_runs(found)
        else:
            found = [self._once(draw(i), Layout(None, None)) for i in range(count)]
        structures = [self._sampler.structures.of(self._programs, run) for run in found]
        if structures[0].blocks != self.layouts.structure.blocks:
            raise StatesError(
                f"the program shows other plates or sites than at its first call (then "
                f"{self.layouts.structure.blocks}, now {structures[0].blocks}): make another "
                f"TruncatedPosterior for a program of another structure"
            )
        sample = WeightedParticles(found, [s.block_of for s in structures], structures[0])
        if run is not None and not structures[0].coupled:
            # Without the run itself, whose tensors would stay alive.
            self._known, self._known_by = sample.with_runs([]), shown
        return sample

    def log_joint(self, sample: WeightedParticles) -> Tensor:
        """
        The log joint of the states, shape ``[C, *plates]``.

        Minus infinity where a state lies outside the support.
        """
        unsure = {n for n, spec in self.layouts.layout.sites.items() if not spec.bounded}
        if not unsure:
            return sample.log_weight

        def count(term: Term, i: int) -> Tensor | int:
            outside = noted(term.site, "outside")
            if term.in_guide or term.key.name not in unsure or outside is None:
                return 0
            events = outside.dim() - len(term.site["fn"].batch_shape)
            return outside.sum(tuple(range(-events, 0))) if events else outside.long()

        return sample.log_weight.masked_fill(sample.local_sum(count) > 0, -torch.inf)

    def log_joint_rows(self, sample: WeightedParticles) -> Tensor:
        """The same, shape ``[E, C]``."""
        total = self.log_joint(sample)
        if total.requires_grad:
            self.finite = self.finite and bool(total.isfinite().all())
        return total.flatten(1).t()

    def _find_data(self, msg: Site) -> None:
        # Where the states are: a copy from the host would have to be waited for.
        device = self.layouts.bank.device
        self._data = find_data_index(self.layouts.layout, msg, self.subsamples, device)

    @cached_property
    def _execution(self) -> Execution:
        return Execution(
            self._programs,
            not_executed,
            self.subsamples,
            self.layouts.structure.global_sites,
            name=STATES,
            nesting=self.layouts.nesting,
            compared=self._plain,
        )

    def _once(self, draw: SampleFn, layout: Layout) -> Run:
        nesting, structure = self.layouts.nesting, self.layouts.structure
        count, leading, guide_trace = layout.count, layout.leading(), self.guide_trace
        if count is not None:
            skip = structure.global_sites.guide
            local = [t.site for t in self._guide_terms if t.key.name not in skip]
            if local:
                guide_trace = with_changes(
                    guide_trace, {s["name"]: {"value": _expanded(s, count, nesting)} for s in local}
                )
        substitutes = Substitutes(self.subsamples, sample_fn=draw)
        model_trace = run_model(self._programs, guide_trace, substitutes, leading)
        names = self.layouts.layout.sites.keys()
        gone = [n for n in names if n not in model_trace or not is_latent(model_trace.nodes[n])]
        if gone:
            raise StatesError(
                f"site '{gone[0]}' is not drawn by the model, or observed, though it was a latent "
                f"at the first call: make another TruncatedPosterior for the other program"
            )
        both = with_searched(guide_trace, model_trace, names)
        terms = [broadcast_term(s) for s in scored(model_trace)]
        # In the order of the first call, in which the blocks are numbered.
        searched = [_no_density(s) for n, s in both.nodes.items() if n in names]
        all_terms = (*terms, *self._guide_terms, *searched)
        shown = nesting, count, self.subsamples
        run = Run(both, model_trace, all_terms, *shown)
        run = self._sampler.runner.without_auxiliary(self._programs, run)
        if is_validation_enabled():
            check_sites(both, model_trace, self._sampler.runner.strict_enumeration)
            if nesting_of(model_trace) > nesting:
                raise StatesError(
                    f"the program has plates in {nesting_of(model_trace)} batch dims, "
                    f"and had {nesting} at its first call: make another TruncatedPosterior for it"
                )
            for term in terms:
                depth = nesting + 1 if count is not None else nesting
                check_site_shape({**term.site, "log_prob": term.log_prob}, depth)
        if count is not None:
            check_batch_dims(terms, nesting)
        return run


def _inside_support(value: Tensor, msg: Site, spec: SiteSpec) -> Tensor:
    """Values that the support allows; notes at the site where others had been asked for."""
    if spec.bounded:
        return value
    support = msg["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    fine = support.check(value)
    note(msg, outside=~fine)
    return torch.where(fine, value, torch.full_like(value, spec.low))


def _no_density(site: Site) -> Term:
    """The guide's term of a searched site: zero, and of no dtype that others would take."""
    zero = torch.zeros((), dtype=torch.int8, device=site["value"].device)
    return Term(FactorKey("guide", site["name"]), site, zero)


def _expanded(site: Site, count: int, nesting: int) -> Tensor:
    """A local draw of the guide, the same for all states."""
    value, events = site["value"], site["fn"].event_dim
    batch = value.shape[: value.dim() - events]
    padded = value.reshape((1,) * (nesting - len(batch)) + value.shape)
    return padded.unsqueeze(0).expand(count, *padded.shape)
