"""The joint density of a model as a function of its discrete states, everything else fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import torch
from pyro.infer.util import is_validation_enabled
from pyro.util import check_site_shape
from torch import Tensor

from pyro_mcvae.checks.leading_dims import STATES
from pyro_mcvae.particles.layout import Execution, Layout, never
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.annotations import note, noted
from pyro_mcvae.programs.contract import check_batch_dims, check_sites
from pyro_mcvae.programs.execution import Programs, run_model, with_changes
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.messengers import Recorder, SampleFn, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent
from pyro_mcvae.programs.terms import Term, guide_term, scored
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.truncated.broadcast_log_prob import broadcast_term
from pyro_mcvae.truncated.layout import DataIndex, SiteSpec, StatesError, find_data_index
from pyro_mcvae.truncated.searched_sites import (
    GuideDraws,
    Layouts,
    SearchMessenger,
    check_unmasked,
    run_guide,
    shared_by_data,
    with_searched,
)

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

        Minus infinity where a state lies outside of the support.
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
            never,
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
