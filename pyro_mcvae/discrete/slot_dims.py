"""
Slots in batch dims: several values of each discrete site in one run.

A *slot* is a value at which a discrete site is evaluated: a summed value, or a draw of the others.
Here each site has a batch dim of its own for them, so each factor has the slots of the sites that
it depends on, and only these weigh it. In the rows of :mod:`~pyro_mcvae.discrete.slot_rows` all
combinations of slots are particles with the whole log weight. Objectives with a logarithm of
weights need these whole weights. A sum of factors does not, and its gradient has less noise without
them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.ops import packed
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.checks.vectorization import SLOTS
from pyro_mcvae.discrete.site_slots import SiteOptions, SiteSlots, check_num_slots, choose
from pyro_mcvae.ops import compat
from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.compat import ENUMERATE_DIM, dims_of
from pyro_mcvae.particles.runner import Execution, Layout
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.enumeration import (
    ModelEnumeration,
    StandIn,
    StateFactor,
    inside_sum,
    pack,
    sum_states,
)
from pyro_mcvae.programs.fingerprint import observer
from pyro_mcvae.programs.messengers import Minibatch, Recorder, Substitutes
from pyro_mcvae.programs.run import Programs, Run, entered
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.supports import Choice
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import (
    FactorKey,
    LeadingDimsError,
    Message,
    PlateKey,
    Site,
    plate_frames,
    plate_key,
)
from pyro_mcvae.programs.vmap import Mode
from pyro_mcvae.structure.marked import MarkedRunError, marked

# Slots for the discrete sites of a guide: several values of a site in one run of the programs.

# The key of a guide site's slots: site["infer"][SLOTS_KEY].
SLOTS_KEY = "_mcvae_slots"


class SlotMessenger(EnumMessenger):
    """
    Gives the guide's discrete sites their slots, each site in a separate batch dim.

    Pyro's enumeration allocates the dims, also for ``pyro.markov``. They contain the slots chosen
    for each batch element, instead of all values of a distribution.

    :param options: the default options of all sites.
    :param int first_available_dim: the first batch dim that belongs to no plate.
    :param warn: called with a message for sites that are sampled although slots were requested.
    :param bool expand: expand values to the plates' sizes even if all elements have the same.
    """

    def __init__(
        self,
        options: SiteOptions,
        first_available_dim: int,
        warn: Callable[[str], object],
        expand: bool = False,
    ) -> None:
        super().__init__(first_available_dim)
        self.expand = expand
        self.options = options
        self.warn = warn

    def _pyro_sample(self, msg: Message) -> None:
        fn = msg["fn"]
        if msg["done"] or msg["is_observed"] or not isinstance(fn, TorchDistributionMixin):
            super()._pyro_sample(msg)
            return
        slots = choose(msg, self.options, self.warn)
        # A copy: users may share these dicts between runs and sites.
        infer = {k: v for k, v in msg["infer"].items() if k not in ("enumerate", "num_samples")}
        msg["infer"] = infer
        if slots is None:
            super()._pyro_sample(msg)
            return
        infer[SLOTS_KEY] = slots.spread(fn)
        if len(slots) == 1:
            # One slot needs no dim: the site is a plain draw.
            msg["value"] = infer[SLOTS_KEY].choice.value[0]
            super()._pyro_sample(msg)
            return
        assert self.first_available_dim is not None
        batch = fn.batch_shape
        upstream = math.prod(batch[: max(0, len(batch) + 1 + self.first_available_dim)])
        if upstream > 1:
            check_num_slots(msg["name"], upstream * len(slots))
        infer["enumerate"] = "parallel"
        # Programs may request it, for operators such as cat that do not broadcast.
        expand = self.expand or infer.get("expand")
        msg["fn"] = StandIn(fn, (infer[SLOTS_KEY] if expand else slots).choice.value)
        super()._pyro_sample(msg)
        msg["fn"] = fn
        del infer["enumerate"]


# The costs and weights of one run with several slots of discrete sites.


@dataclass
class SlotCost:
    """
    A term of the ELBO, with a dimension for every site with slots that it depends on.

    :ivar term: the term of its site; for a sum over states of the model, of one of the sites.
    :ivar value: packed, detached, without the plates' N/B.
    :ivar path: the same with its gradient, packed like ``value``; or 0.
    :ivar scale: N/B.
    :ivar plates: the symbols of the plates around it.
    :ivar keys: the factors that it was computed from.
    """

    term: Term
    value: Tensor
    path: Any
    scale: float | Tensor
    plates: frozenset[str]
    keys: tuple[FactorKey, ...]

    @property
    def dims(self) -> frozenset[str]:
        return frozenset(dims_of(self.value))


@dataclass
class ScoredSite:
    """
    A guide site with a score-function gradient.

    :ivar score: log q of each slot, with its gradient, without scale and mask: ``[..., *batch]``.
    :ivar weight: the weights of the slots, packed like ``score``.
    :ivar symbol: the symbol of the slots' dimension; None for a single slot.
    :ivar plates: the symbols of the plates around it.
    :ivar dim_of: the batch dim of each symbol.
    """

    name: str
    site: Site
    slots: SiteSlots
    score: Tensor
    weight: Tensor
    symbol: str | None
    plates: frozenset[str]
    dim_of: dict[str, int]

    @property
    def dim(self) -> int | None:
        """Return the batch dim of the slots; None for a single slot."""
        return None if self.symbol is None else self.dim_of[self.symbol]

    @property
    def order(self) -> str:
        """Return the symbols of the dims of ``weight``."""
        return dims_of(self.weight)

    @property
    def dims(self) -> frozenset[str]:
        return frozenset(self.order)

    def sampled(self) -> Tensor:
        """Return the mask of slots that are draws, ``[S, *batch]``."""
        sampled = self.slots.choice.sampled
        return sampled if self.dim is None else self.first(_slots_to(sampled, self.dim))

    def values(self) -> Tensor:
        """Return the slots' values, ``[S, *batch, *event]``."""
        value, event_dim = self.site["value"].unsqueeze(0), self.site["fn"].event_dim
        return value if self.dim is None else value.transpose(0, self.dim - event_dim)

    def slots_first(self, value: Tensor) -> Tensor:
        """Unpack a tensor to ``[S, *batch]``."""
        value = packed.unpack(value, self.dim_of)
        depth = self.score.dim()
        value = value.reshape((1,) * (depth - value.dim()) + value.shape)
        return self.first(value)

    def first(self, value: Tensor) -> Tensor:
        """Move the slots of a tensor in the layout of ``score`` to the front: ``[S, *batch]``."""
        value = value.unsqueeze(0)
        return value if self.dim is None else value.transpose(0, self.dim)


@dataclass
class SlotRun:
    """
    The costs and the weights of one execution.

    :ivar run: the execution.
    """

    run: Run
    costs: list[SlotCost]
    scored: dict[str, ScoredSite]


def slot_run_of(run: Run) -> SlotRun:
    """Return the costs and the weights of a run."""
    guide, model = run.guide_trace, run.model_trace
    # The guide comes first, because both traces have the same symbols for the sites' dims.
    guide.symbolize_dims()
    scored, costs = {}, []
    for term in run.summands:
        if term.in_guide:
            plates = _plates(term, guide)
            if isinstance(term.score, Tensor):
                scored[term.key.name] = _scored(term, plates)
            costs.append(_guide_cost(term, plates))
    model.symbolize_dims(guide.plate_to_symbol)
    factors = [
        SlotCost(t, *_cost(t, t.log_prob), t.plate_scale, _plates(t, model), (t.key,))
        for t in run.terms
        if not t.in_guide
    ]
    states = {
        c.term.key
        for c in factors
        if c.term.key.name not in guide and ENUMERATE_DIM in c.term.site["infer"]
    }
    return SlotRun(run, [*_sum_states(factors, states), *costs], scored)


def _plates(term: Term, trace: Trace) -> frozenset[str]:
    frames = term.site["cond_indep_stack"]
    return frozenset(trace.plate_to_symbol[f.name] for f in frames if f.vectorized)


def _guide_cost(term: Term, plates: frozenset[str]) -> SlotCost:
    slots: SiteSlots | None = term.site["infer"].get(SLOTS_KEY)
    entropy = None if slots is None or term.left_out else slots.entropy(term.site["fn"])
    if entropy is not None:
        entropy = sites.masked(term.site, entropy)
        return SlotCost(term, *_cost(term, entropy), term.plate_scale, plates, (term.key,))
    path: Tensor | int
    value, path = _cost(term, -term.log_prob)
    if term.entropy is not None:
        path = _pack(term, -term.entropy) if isinstance(term.entropy, Tensor) else 0
    return SlotCost(term, value, path, term.plate_scale, plates, (term.key,))


def _pack(term: Term, value: Tensor) -> Tensor:
    return pack(term.site, term.key.program, value)


def _cost(term: Term, value: Tensor) -> tuple[Tensor, Tensor]:
    return _detached(_pack(term, value))


def _detached(path: Tensor) -> tuple[Tensor, Tensor]:
    """Return a packed tensor without and with its gradient."""
    return compat.with_dims(path.detach(), dims_of(path)), path


def _scored(term: Term, plates: frozenset[str]) -> ScoredSite:
    site, score = term.site, torch.as_tensor(term.score)
    slots = site["infer"].get(SLOTS_KEY)
    if slots is None:
        one = torch.ones_like(score).unsqueeze(0)
        slots = SiteSlots(SiteOptions(0, 1), None, Choice(site["value"], one, one > 0))
    weight, dim = slots.choice.weight.to(score.dtype), site["infer"].get(ENUMERATE_DIM)
    weight = weight[0] if dim is None else _slots_to(weight, dim)
    symbol = site["infer"].get(compat.ENUMERATE_SYMBOL)
    dim_of = {s: d for d, s in site["infer"][compat.DIM_TO_SYMBOL].items()}
    weight = pack(site, term.key.program, weight.detach(), sums=False)
    return ScoredSite(term.key.name, site, slots, score, weight, symbol, plates, dim_of)


def _slots_to(value: Tensor, dim: int) -> Tensor:
    """Move slots from the front, ``[S, *batch]``, to a batch dim, as Pyro does with values."""
    front = -value.dim()
    if dim < front:
        return value.reshape(value.shape[:1] + (1,) * (front - dim) + value.shape[1:])
    return value.transpose(dim, front)


def _sum_states(model: list[SlotCost], states: set[FactorKey]) -> list[SlotCost]:
    """Sum over the states of the model's enumerated sites, inside the logarithm."""
    dims = {c.term.site["infer"][compat.ENUMERATE_SYMBOL] for c in model if c.term.key in states}
    inside: list[SlotCost] = []
    costs: list[SlotCost] = []
    for c in model:
        group = inside if c.term.key in states or not dims.isdisjoint(c.dims) else costs
        group.append(c)
    parts = []
    for c in inside:
        log_prob = inside_sum(c.term.site, c.term.key in states)
        parts.append(StateFactor(c.term.site, pack(c.term.site, "model", log_prob), c.plates))
    for s in sum_states(parts, dims):
        factors = [inside[i] for i in s.members]
        term = next((c.term for c in factors if c.plates == s.plates), factors[0].term)
        value, path = _detached(s.log_prob)
        costs.append(
            SlotCost(term, value, path, s.scale, s.plates, tuple(c.term.key for c in factors))
        )
    return costs


# The guide sites that each factor of a program depends on, directly or through others.


class CoupledSlotsError(ValueError):
    """A factor depends on several elements of a site, whose combinations would be summed."""


def find_ancestors(programs: Programs, slot_run: SlotRun) -> Mapping[FactorKey, frozenset[str]]:
    """
    Return the random guide sites upstream of each factor: its ancestors, and itself.

    Factors with unknown ancestors are treated as depending on every site.

    :raises CoupledSlotsError: for sites with several elements that a factor depends on, or may.
    """
    run = slot_run.run
    names = frozenset(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    try:
        found = marked(programs, run)
    except MarkedRunError as error:
        raise CoupledSlotsError(f"the programs fail at the same latents: {error}") from error
    traced = found.dependencies(names)
    direct = {t.key: traced.factors.get(t.key, names) for t in run.summands}
    upstream = traced.ancestors(names)
    # A factor of the guide with a score function represents unknown draws: everything may depend
    # on them.
    factors = {t.key.name for t in run.terms if t.in_guide and t.site["is_observed"]}
    hidden = frozenset(factors & slot_run.scored.keys())
    ancestors = {key: hidden.union(*(upstream[p] for p in ps)) for key, ps in direct.items()}
    _check_uncoupled(slot_run, ancestors, found.coupled)
    return ancestors


def _check_uncoupled(
    slot_run: SlotRun,
    ancestors: Mapping[FactorKey, frozenset[str]],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
) -> None:
    """Check that no factor depends on several elements of a site, which must be summed jointly."""
    for cost in slot_run.costs:
        for site in slot_run.scored.values():
            if site.symbol in cost.dims and not site.plates <= cost.plates:
                raise CoupledSlotsError(
                    f"site '{cost.term.key.name}' of the {cost.term.key.program} depends on "
                    f"'{site.name}', but lies outside a plate of '{site.name}'"
                )
    for key, plates in coupled.items():
        for name in sorted(ancestors.get(key, frozenset()) & slot_run.scored.keys()):
            frames = plate_frames(slot_run.scored[name].site)
            shared = sorted(f.name for f in frames if plate_key(f) in plates)
            if shared:
                raise CoupledSlotsError(
                    f"site '{key.name}' of the {key.program} depends, in one element of plate "
                    f"'{shared[0]}', on other elements of guide site '{name}'"
                )


# Run a model and guide with slots, for all particles of a step.

_logger = logging.getLogger(__name__)

# The cache key of whether the slots of the programs share a run.
_IN_ONE_RUN = ("slots together",)

T = TypeVar("T")


class SlotSampler:
    """
    Runs programs with the slots of each site in a separate batch dim, if that is correct.

    Latents are drawn independently in every particle, with slots per draw.

    :param sampler: the sampler of the objective.
    :param options: the default options of all sites.
    """

    def __init__(self, sampler: ParticleSampler, options: SiteOptions) -> None:
        self.sampler, self.options = sampler, options
        self._warn = WarnOnce(_logger)

    def runs_or(self, programs: Programs, by_rows: Callable[[], T]) -> list[SlotRun] | T:
        """
        Return one vectorized run, or one run per particle, all on one minibatch.

        :param by_rows: samples slots in rows instead. Its result is returned for programs whose
            slots cannot share a run, in a leading dim or under vmap.
        """
        analyses = self.sampler.analyses
        asked = analyses.of(programs)
        with analyses.rewindable(programs, asked.get(_IN_ONE_RUN) is None) as rewind:
            if asked.latest(_IN_ONE_RUN) is False:
                result, analysis = by_rows(), analyses.of(programs)
                if analysis is asked or analysis.get(_IN_ONE_RUN) is False:
                    analysis.put(_IN_ONE_RUN, False)
                    return result
                rewind()  # these are other operations, whose slots may share a run
            try:
                runs = [slot_run_of(run) for run in self._runs(programs)]
            except (LeadingDimsError, CoupledSlotsError) as error:
                if isinstance(error, LeadingDimsError) and self.sampler.runner.refuses_loops:
                    raise
                self._warn(
                    f"the slots of all discrete sites of a datum are summed jointly, each with its "
                    f"full weight: {getattr(error, 'reason', error)}"
                )
                analyses.of(programs).compared(_IN_ONE_RUN, lambda: False)
                rewind()
                result = by_rows()
                # Runs with rows have other operations, and may have replaced the analysis.
                analyses.of(programs).put(_IN_ONE_RUN, False)
                return result
        analyses.of(programs).compared(_IN_ONE_RUN, lambda: True)
        return runs

    def ancestors(
        self, programs: Programs, slot_run: SlotRun
    ) -> Mapping[FactorKey, frozenset[str]]:
        """Return the random guide sites upstream of each factor, found once per structure."""
        if not slot_run.scored:
            return {}
        key = "ancestors", slot_run.run.signature
        analysis = self.sampler.analyses.of(programs)
        return analysis.compared(key, lambda: find_ancestors(programs, slot_run))

    def _runs(self, programs: Programs) -> list[Run]:
        subsamples, runner = Minibatch(), self.sampler.runner
        count = self.sampler.num_particles

        def execute(layout: Layout) -> Run:
            return self._execute(programs, Substitutes(subsamples), layout)

        def check(run: Run) -> None:
            self._check(programs, slot_run_of(run))

        execution = Execution(programs, execute, subsamples, name=SLOTS, several=True, check=check)
        if count > 1 or runner.mode(programs) in (Mode.MAPPED, Mode.BOTH_MAPPED):
            run = runner.run_together(execution, count)
            if run is not None:
                return [run]
        try:
            return [runner.run(execution, None) for _ in range(count)]
        except LeadingDimsError:
            # Under vmap the single particle has a vmap dim, too.
            run = runner.run_together(execution, 1) if count == 1 else None
            if run is None:
                raise
            return [run]

    def _check(self, programs: Programs, slot_run: SlotRun) -> None:
        """Check a run of a new structure."""
        self.ancestors(programs, slot_run)
        for name, scored in slot_run.scored.items():
            fn = scored.site["fn"]
            if scored.slots.entropy(fn) is None:
                why = f"the entropy of {type(fn).__name__} has no closed form here"
                scored.slots.warn_entropy(name, why, self._warn)

    def _execute(self, programs: Programs, substitutes: Substitutes, layout: Layout) -> Run:
        """Run the guide with slots, then the model on its values."""
        nesting = layout.nesting
        assert nesting is not None
        leading = layout.leading()
        first_dim = -1 - nesting - (layout.count is not None)
        # Under vmap a program receives the value of one slot like a draw.
        expand = layout.mode is not Mode.BATCHED
        slots = SlotMessenger(self.options, first_dim, self._warn, expand)
        with Recorder(substitutes) as recorder, slots, entered(leading.guide, observer()):
            programs.guide(*programs.args, **programs.kwargs)
        # The model's enumeration continues with the dims after the guide's.
        with (
            Recorder(substitutes) as tracer,
            poutine.replay(trace=recorder.trace),
            ModelEnumeration(recorder.trace),
            entered(leading.model, observer()),
        ):
            programs.model(*programs.args, **programs.kwargs)
        return layout.run_of(recorder.trace, tracer.trace, leading, substitutes)
