"""Evaluate the joint density of a model at the states of its discrete sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast

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
from pyro_mcvae.ops.compat import mask_of
from pyro_mcvae.particles.runner import Execution, Layout
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.contract import check_batch_dims, check_sites, nesting_of
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
from pyro_mcvae.structure.finder import without_auxiliary
from pyro_mcvae.truncated.broadcast_log_prob import broadcast_term
from pyro_mcvae.truncated.states import (
    DataIndex,
    SiteSpec,
    StateLayout,
    StatesError,
    changed_program,
    site_spec,
)

# Find the discrete sites of a model, and the data plate of their states.

# Number of prior draws from which the first states of each datum are selected.
_PRIOR_DRAWS = 256


class SearchMessenger(Messenger):
    """
    A guide that draws the other latents by ``guide``, and the discrete ones from the model.

    It replaces the truncated posterior in analyses of sites and plates.
    """

    def __init__(self, model: Program, guide: Program | None) -> None:
        super().__init__()
        self.model, self.guide = model, guide
        self._traces = Trace(), Trace()
        self.searched: set[str] = set()

    def __eq__(self, other_: object) -> bool:
        return isinstance(other_, SearchMessenger) and (self.model, self.guide) == (
            other_.model,
            other_.guide,
        )

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: object, **kwargs: object) -> None:
        guide_trace = run_guide(self.guide, args, kwargs)
        self.searched = set()
        with poutine.trace() as tracer, self, poutine.replay(trace=guide_trace):
            self.model(*args, **kwargs)
        self._traces = tracer.trace, guide_trace

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or msg["value"] is not None or not is_random(msg):
            return
        if not known_support(msg["fn"]).is_discrete:
            name, fn = msg["name"], type(bare(msg["fn"])).__name__
            raise StatesError(
                f"site '{name}' ({fn}) is continuous, or does not define its support, but a "
                f"truncated posterior has states of discrete sites only: pass guide=, a guide that "
                f"draws the continuous latents (a function, or an AutoGuide of "
                f"poutine.block(model, expose=['{name}']))"
            )
        check_unmasked(msg)
        self.searched.add(msg["name"])
        with torch.no_grad():
            msg["value"] = detach_provenance(msg["fn"].sample()).detach()
        msg["done"] = True

    def get_traces(self) -> tuple[Trace, Trace]:
        """Return the model's and the guide's trace of the last call."""
        model_trace, guide_trace = self._traces
        return model_trace, with_searched(guide_trace, model_trace, self.searched)


def check_unmasked(site: Site) -> None:
    """
    Check that a searched site has no mask.

    :raises StatesError: for a masked site, because masked entries could have any value.
    """
    masks = [site["mask"]]
    masks += [mask_of(m) for m in layers(site["fn"]) if isinstance(m, MaskedDistribution)]
    if any(mask is not None and mask is not True for mask in masks):
        raise StatesError(
            f"site '{site['name']}' is masked, so states that differ only in masked entries would "
            f"be counted several times: put poutine.mask around the observations only. Make "
            f"entries that do not exist deterministic instead, e.g. by Bernoulli(probs * exists), "
            f"and fix known values (obs_mask) by pyro.factor(name, torch.where(known & "
            f"(z != obs), -torch.inf, 0.0))"
        )


def searching(programs: Programs, guide: Program | None) -> Programs:
    """Return programs whose guide draws the discrete latents from the model."""
    return replace(programs, guide=SearchMessenger(programs.model, guide))


def run_guide(
    guide: Program | None, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Trace:
    """Return the trace of a guide; an empty trace for None."""
    with poutine.trace() as tracer:
        if guide is not None:
            guide(*args, **kwargs)
    for term in observed_terms(tracer.trace):
        name = f"site '{term.key.name}' of guide="
        raise StatesError(f"{name} is observed, but a posterior has no observations: remove it")
    return tracer.trace


@dataclass(frozen=True)
class GuideDraws:
    """Values of ``guide``'s random sites, and the indices of its plates."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    subsamples: Mapping[str, Tensor] = field(default_factory=dict)


def shared_by_data(term: Term, plates: frozenset[PlateKey]) -> Term:
    """
    Treat a draw of ``guide`` outside all plates of the searched sites as a point mass.

    All data and states share such a draw (mixture components in ``plate("c", K)``), so data remain
    independent of each other.

    :param plates: the plates of all searched sites.
    """
    site = term.site
    if not is_random(site) or plates & {plate_key(f) for f in plate_frames(site)}:
        return term
    point = dist.Delta(site["value"], event_dim=site["fn"].event_dim)
    return replace(term, site={**site, "fn": point})


def with_searched(guide_trace: Trace, model_trace: Trace, names: Collection[str]) -> Trace:
    """Add the searched sites to the guide's trace, without a density."""
    both = guide_trace.copy()
    for name, site in model_trace.nodes.items():
        if name in names:
            if name in both:
                raise StatesError(f"site '{name}' is drawn by guide= and searched: remove one")
            fn = site["fn"].mask(False)
            both.add_node(name, **{**site, "fn": fn, "mask": None, "scale": 1.0, "infer": {}})
    return both


@dataclass
class ModelLayout:
    """
    The structure of a model and guide.

    :ivar nesting: the number of batch dims of plates.
    :ivar structure: its single block is that of the discrete sites.
    :ivar layout: the entries of the discrete sites.
    :ivar plates: the plates around any of the discrete sites.
    :ivar fixed_data: the observed sites whose values are neither drawn nor computed from
        parameters.
    :ivar prior_draws: prior draws of the states, shape ``[states, D]``.
    """

    nesting: int
    structure: Structure
    layout: StateLayout
    plates: frozenset[PlateKey]
    fixed_data: frozenset[str]
    prior_draws: Tensor


def find_model_layout(sampler: ParticleSampler, programs: Programs) -> ModelLayout:
    """
    Find the discrete sites of a model, their data plate and their entries.

    :param programs: from :func:`searching`.
    :raises StatesError: naming a site that cannot have states per datum.
    """
    search = cast("SearchMessenger", programs.guide)
    with programs.isolated(), torch.no_grad():
        run = sampler.run_once(programs)
        fixed_data = constant_observations(programs, run)
        names = sorted(search.searched, key=list(run.model_trace.nodes).index)
        draws = [run.model_trace]
        batch = max([math.prod(run.model_trace.nodes[n]["fn"].batch_shape) for n in names] or [1])
        for _ in range(-(-_PRIOR_DRAWS // batch) - 1):
            draws.append(run_pair(programs, Substitutes(Minibatch(run.subsamples)))[1])
    if not names:
        raise StatesError(
            "the model has no discrete site to search: every latent is continuous or drawn by "
            "guide=. Use TraceSGVB_ELBO or TraceIWAE_ELBO with a guide for these latents"
        )
    sites = [run.model_trace.nodes[n] for n in names]
    plates = frozenset(plate_key(f) for s in sites for f in plate_frames(s))
    shared = (shared_by_data(t, plates) if t.in_guide else t for t in run.terms)
    run = replace(run, terms=tuple(shared))
    structure = sampler.structures.of(programs, run)
    for site in sites:
        _check_data_plate(site, structure, run)
    if len(structure.blocks) > 1:
        plate_names = ", ".join(repr(block.plates[-1].name) for block in structure.blocks)
        raise StatesError(
            f"sites {', '.join(map(repr, names))} lie in several data plates ({plate_names}), but "
            f"a truncated posterior has states for the data of one: draw the sites of the others "
            f"in guide=, or use a separate model, TruncatedPosterior and loss for each plate"
        )
    (block,) = structure.blocks
    frames = {plate_key(f): f for t in run.terms for f in plate_frames(t.site)}
    full = tuple(frames[k].full_size or frames[k].size for k in block.plates)
    layout = StateLayout(block.plates, full, [site_spec(s, run.nesting) for s in sites])
    data = DataIndex(tuple(frames[k].size for k in block.plates), torch.zeros(0))
    drawn = [layout.states({n: t.nodes[n]["value"] for n in names}, data) for t in draws]
    states = torch.cat(drawn).flatten(0, 1)[:_PRIOR_DRAWS]
    return ModelLayout(run.nesting, structure, layout, plates, fixed_data, states)


def constant_observations(programs: Programs, run: Run) -> frozenset[str]:
    """Return the observed sites with the same values in another run, and without a gradient."""
    with torch.enable_grad():
        second_trace = run_pair(programs, Substitutes(Minibatch(run.subsamples)))[1]
    same = set()
    for term in run.terms:
        if not term.in_guide and term.site["is_observed"] and term.key.name in second_trace:
            a, b = term.site["value"], second_trace.nodes[term.key.name]["value"]
            is_equal = a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
            if a.numel() and is_equal and not b.requires_grad:  # pyro.factor observes nothing
                same.add(term.key.name)
    return frozenset(same)


def _check_data_plate(site: Site, structure: Structure, run: Run) -> None:
    name, frames = site["name"], plate_frames(site)
    b = structure.block_of[FactorKey("guide", name)]
    if not frames or (b is not None and not structure.blocks[b].plates):
        raise StatesError(
            f"site '{name}' has no data plate that separates it from other data: states are stored "
            f"per datum. Put the data (the site and everything that depends on it) in "
            f"pyro.plate('data', N, subsample=...), or draw the site in guide="
        )
    if b is None:
        inner = {f for t in run.terms for f in plate_frames(t.site) if is_subsampled(f)} - frames
        plates = sorted(f"'{f.name}' ({f.size} of {f.full_size})" for f in inner)
        raise StatesError(
            f"site '{name}' has no states per datum, because a site that depends on it lies in the "
            f"subsampled plate {', '.join(plates)}, which does not enclose the site: pass the full "
            f"data of that plate, or draw the site in guide="
        )
    if any(p.dim is None for p in structure.blocks[b].plates):
        names = ", ".join(repr(p.name) for p in structure.blocks[b].plates if p.dim is None)
        raise StatesError(
            f"site '{name}' lies in the sequential plate {names}: states are stored for vectorized "
            f"plates. Write `with pyro.plate(...) as index:` instead of the loop"
        )


# The joint density of a model as a function of its discrete states, with everything else fixed.

# The values of a site in each run, as leaves of the graph.
Leaves = dict[tuple[str, int], Tensor]


def _draw_nothing(*args: object, **kwargs: object) -> None:
    """Draw nothing, in one function for all steps: analyses are kept by program."""


class JointRuns:
    r"""
    :math:`\log p(x, z, w) - \log q(w)` of one step at any states z of its discrete sites.

    The minibatch and the other latents w, which ``guide`` draws, are the same in every run.

    :param sampler: vectorizes the runs, and caches the analyses of the programs.
    :param model_layout: from :func:`find_model_layout`.
    :param programs: from :func:`searching`.
    :param draws: existing draws of ``guide``, by site, and their minibatch.
    :ivar finite: whether all densities with a graph were finite.
    :ivar num_runs: the number of passes through the model.
    :ivar num_states: the number of evaluated states of a datum.
    """

    def __init__(
        self,
        sampler: ParticleSampler,
        model_layout: ModelLayout,
        programs: Programs,
        draws: GuideDraws | None = None,
    ) -> None:
        self._sampler, self.model_layout, self._programs = sampler, model_layout, programs
        guide = cast("SearchMessenger", programs.guide).guide
        # Programs in which the model draws the discrete sites itself, with any dims.
        self._plain = replace(programs, guide=guide or _draw_nothing)
        draws = GuideDraws() if draws is None else draws
        self.subsamples = Minibatch(draws.subsamples)
        with Recorder(Substitutes(self.subsamples, draws.values), records=False):
            self.guide_trace = run_guide(guide, programs.args, programs.kwargs)
        self._guide_terms = [
            shared_by_data(guide_term(s), model_layout.plates) for s in scored(self.guide_trace)
        ]
        self._data: DataIndex | None = None
        # The sample of earlier runs with the same sites and plates.
        self._cached: WeightedParticles | None = None
        self._cached_structure: object = None
        self.finite = True
        self.num_runs, self.num_states = 0, 0

    @property
    def data(self) -> DataIndex:
        """Return the data of the minibatch; available after the first run."""
        assert self._data is not None
        return self._data

    def run(
        self, states: Tensor | Callable[[], Tensor] | None, count: int, leaves: Leaves | None = None
    ) -> WeightedParticles:
        """
        Run the model.

        :param states: shape ``[E, C, D]``, or a function that returns them after the data of the
            minibatch are found; None to draw them from the model.
        :param count: their number C.
        :param leaves: receives the sites' values, as leaves of the graph.
        """
        self.num_runs, self.num_states = self.num_runs + 1, self.num_states + count
        values: dict[str, Tensor] = {}

        def draw(at: int | None) -> SampleFn:
            def supply(msg: Site) -> Tensor | None:
                name = msg["name"]
                spec = self.model_layout.layout.sites.get(name)
                if spec is None:
                    raise changed_program(f"the model draws site '{name}'")
                check_unmasked(msg)
                if self._data is None:
                    # Make it on the states' device, because a copy from the host would synchronize.
                    layout, device = self.model_layout.layout, self.model_layout.prior_draws.device
                    self._data = layout.find_data(msg, self.subsamples, device)
                if states is None:
                    return None
                if not values:
                    runs = states() if callable(states) else states
                    values.update(self.model_layout.layout.values(runs, self.data))
                value = values[name] if at is None else values[name][at]
                value = value.reshape(msg["fn"].batch_shape + msg["fn"].event_shape)
                value = _inside_support(value, msg, spec)
                if leaves is not None and value.is_floating_point():
                    value = value.detach().requires_grad_()
                    leaves[name, at or 0] = value
                return value

            return supply

        execution = replace(self._execution, execute=partial(self._run_once, draw(None)))
        run = self._sampler.runner.run_together(execution, count)
        if run is not None:
            runs = [run]
            structure = runs[0].signature
            if self._cached is not None and structure == self._cached_structure:
                return self._cached.with_runs(runs)
        else:
            runs = [self._run_once(draw(i), Layout(None, None)) for i in range(count)]
        structures = [self._sampler.structures.of(self._programs, run) for run in runs]
        if structures[0].blocks != self.model_layout.structure.blocks:
            raise changed_program(f"the data have the plates {structures[0].blocks}")
        sample = WeightedParticles(runs, [s.block_of for s in structures], structures[0])
        if run is not None and not structures[0].coupled:
            # Keep the sample without its run, to free tensors.
            self._cached, self._cached_structure = sample.with_runs([]), structure
        return sample

    def log_joint(self, sample: WeightedParticles) -> Tensor:
        """
        Return the log joint of the states, shape ``[C, *plates]``.

        It is minus infinity for states outside the support.
        """
        unbounded = {n for n, spec in self.model_layout.layout.sites.items() if not spec.bounded}
        if not unbounded:
            return sample.log_weight

        def count(term: Term, i: int) -> Tensor | int:
            outside = noted(term.site, "outside")
            if term.in_guide or term.key.name not in unbounded or outside is None:
                return 0
            events = outside.dim() - len(term.site["fn"].batch_shape)
            return outside.sum(tuple(range(-events, 0))) if events else outside.long()

        return sample.log_weight.masked_fill(sample.local_sum(count) > 0, -torch.inf)

    def log_joint_rows(self, sample: WeightedParticles) -> Tensor:
        """Return :meth:`log_joint` in shape ``[E, C]``."""
        total = self.log_joint(sample)
        if total.requires_grad:
            self.finite = self.finite and bool(total.isfinite().all())
        return total.flatten(1).t()

    @cached_property
    def _execution(self) -> Execution:
        return Execution(
            self._programs,
            None,
            self.subsamples,
            self.model_layout.structure.global_sites,
            name=STATES,
            nesting=self.model_layout.nesting,
            compared=self._plain,
        )

    def _run_once(self, draw: SampleFn, layout: Layout) -> Run:
        nesting, structure = self.model_layout.nesting, self.model_layout.structure
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
        names = self.model_layout.layout.sites.keys()
        missing = [n for n in names if n not in model_trace or not is_latent(model_trace.nodes[n])]
        if missing:
            raise changed_program(f"the model does not draw site '{missing[0]}', or observes it")
        both = with_searched(guide_trace, model_trace, names)
        terms = [broadcast_term(s) for s in scored(model_trace)]
        # Keep the order of the first call, which numbers the blocks. The dtype promotes to any
        # other.
        searched = [
            Term(
                FactorKey("guide", n),
                s,
                torch.zeros((), dtype=torch.int8, device=s["value"].device),
            )
            for n, s in both.nodes.items()
            if n in names
        ]
        all_terms = (*terms, *self._guide_terms, *searched)
        layout_fields = nesting, count, self.subsamples
        run = Run(both, model_trace, all_terms, *layout_fields)
        run = without_auxiliary(self._programs, run, self._sampler.analyses)
        if is_validation_enabled():
            check_sites(both, model_trace, self._sampler.runner.strict_enumeration)
            if nesting_of(model_trace) > nesting:
                dims = nesting_of(model_trace)
                raise changed_program(f"the model has plates in {dims} batch dims, not {nesting}")
            for term in terms:
                depth = nesting + 1 if count is not None else nesting
                check_site_shape({**term.site, "log_prob": term.log_prob}, depth)
        if count is not None:
            check_batch_dims(terms, nesting)
        return run


def _inside_support(value: Tensor, msg: Site, spec: SiteSpec) -> Tensor:
    """Replace values outside the support, and annotate them at the site."""
    if spec.bounded:
        return value
    support = msg["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    inside = support.check(value)
    note(msg, outside=~inside)
    return torch.where(inside, value, torch.full_like(value, spec.low))


def _expanded(site: Site, count: int, nesting: int) -> Tensor:
    """Expand a local draw of the guide to all states."""
    value, events = site["value"], site["fn"].event_dim
    batch = value.shape[: value.dim() - events]
    padded = value.reshape((1,) * (nesting - len(batch)) + value.shape)
    return padded.unsqueeze(0).expand(count, *padded.shape)
