"""The log weight as a function of the guide's noise, and its gradient."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from pyro.distributions import is_validation_enabled, validation_enabled
from torch import Tensor

from pyro_mcvae.coordinates.coordinate import Beginning, Coordinates, UnconstrainedCoordinate
from pyro_mcvae.coordinates.noise import sum_event
from pyro_mcvae.coordinates.packing import (
    Packing,
    Placed,
    Plan,
    Record,
    check_names,
    coordinate_at,
    coordinates_that_count,
    latents_at,
    placing_at,
    plan_key,
    plan_of,
    value_at,
)
from pyro_mcvae.ops.smoothing import (
    KinkFinder,
    Widths,
    math_attention,
    smoothed,
    smoothed_gradients,
)
from pyro_mcvae.ops.tensors import as_shape, costs_nothing_to_read, fail_if_recording, is_recording
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.distributions import unvalidated
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.outside_state import Changes, StateOfOneRun, buffers_of
from pyro_mcvae.programs.run import Programs, entered
from pyro_mcvae.programs.sites import masked_entries, without_autocast
from pyro_mcvae.programs.terms import Term, scored
from pyro_mcvae.programs.types import Distribution, Message

# The gradients of a log weight that are needed, and the graphs that are kept for them.


class GradientMode(enum.Flag):
    """
    The gradients of a log weight that are needed; combine them by ``|``.

    * ``NONE``: none; graphs are kept if gradients are enabled in the caller.
    * ``COORDINATES``: at each evaluation, with respect to the coordinates, for kernels.
    * ``FIRST``: the first draw keeps its graph, and later evaluations keep none. Latents are
      detached from the guide, so that guide and model get separate gradients.
    * ``CHAIN``: every evaluation keeps its graph, back to the first draw.
    """

    NONE = 0
    COORDINATES = 1
    FIRST = 2
    CHAIN = 4

    @property
    def keeps_graph(self) -> bool:
        """Return whether some evaluation keeps its graph, for the gradient of a bound."""
        return bool(self & (GradientMode.FIRST | GradientMode.CHAIN))


# The log weight at given coordinates.


@dataclass(frozen=True, slots=True)
class Evaluation:
    r"""
    The log weight at given coordinates of the local latents.

    :ivar log_weight: :math:`\log p(x, z) - \log q(z \mid x)`, shape ``[*leading, *plates]``.
    :ivar log_base: the coordinates' density under the guide, of the same shape, without masked
        coordinates, unless their density depends on others.
    :ivar sample: the execution at these coordinates.
    :ivar records: the coordinates of each run's sites.
    """

    log_weight: Tensor
    log_base: Tensor
    sample: WeightedParticles
    records: list[Record]

    def with_lead(self, lead: torch.Size) -> Evaluation:
        """Reshape the leading dims."""
        shape = lead + self.log_weight.shape[1:]
        log_weight, log_base = self.log_weight.reshape(shape), self.log_base.reshape(shape)
        return replace(self, log_weight=log_weight, log_base=log_base)


def evaluate(sample: WeightedParticles, records: list[Record]) -> Evaluation:
    """Return the log weight of a sample, and the density of its coordinates, also fixed ones."""

    def log_base(term: Term, i: int) -> Tensor | int:
        placed = records[i].get(term.key.name) if term.in_guide else None
        if placed is None:  # a point mass, or a site of the model
            return 0
        density = placed.coordinate.log_base(placed.at, term.site["value"])
        mask = masked_entries(term.site)
        if mask is None:
            return density
        counted = ~density.isnan() if placed.coordinate.follows else mask
        return torch.where(counted, density, 0.0)

    return Evaluation(sample.log_weight, sample.local_sum(log_base), sample, records)


# Gradients of a log weight: with respect to its coordinates, and separately for guide and model.


def base_gradient(plan: Plan, at: Evaluation, create_graph: bool) -> Tensor:
    """Return the gradient of the coordinates' base density: ``[*leading, *plates, D]``."""
    packing = plan.packing
    if not plan.normal:
        return coordinate_gradient(packing, at.records, at.log_base, create_graph, True)
    base = packing.pack_runs([{n: -record[n].at for n in packing.sites} for record in at.records])
    return as_shape(base, at.log_base.shape + base.shape[-1:])


def coordinate_gradient(
    packing: Packing, records: list[Record], value: Tensor, create_graph: bool, reused: bool
) -> Tensor:
    """
    Return the gradient of a value per datum in the coordinates: ``[*leading, *plates, D]``.

    This gradient moves chains. At the kinks of programs that ran with widths it is smoothed.

    :param value: shape ``[*leading, *plates]``.
    :param bool create_graph: whether it can be differentiated again.
    :param bool reused: whether the graph is still needed for other gradients.
    """
    names = list(packing.sites)
    inputs = [record[n].at for record in records for n in names]
    moving = [i for i in inputs if i.requires_grad]  # discrete values have no gradient
    raw: Sequence[Tensor | None] = ()
    if value.requires_grad:
        # The backward pass of an operator has the precision of its forward pass.
        with without_autocast(), smoothed_gradients():
            ones, retain = torch.ones_like(value), reused or create_graph
            raw = torch.autograd.grad(value, moving, ones, retain, create_graph, allow_unused=True)
    grads = {id(i): g for i, g in zip(moving, raw, strict=False) if g is not None}
    full = (grads[id(i)] if id(i) in grads else torch.zeros_like(i) for i in inputs)
    packed = packing.pack_runs([{n: next(full) for n in names} for _ in records])
    return as_shape(packed, value.shape + packed.shape[-1:])


def gradients_at_latents(sample: WeightedParticles) -> list[dict[str, Tensor]]:
    """Return each run's gradient of log p at the local draws, which are leaves of the graph."""
    leaves = []
    for run, block_of in zip(sample.runs, sample.block_of, strict=True):
        names = [t.key.name for t in run.terms if t.in_guide and block_of[t.key] is not None]
        nodes = run.model_trace.nodes
        leaves.append({n: nodes[n]["value"] for n in names if n in nodes})
    inputs = [v for values in leaves for v in values.values() if v.requires_grad]
    log_prob = sample.model_log_prob
    values = torch.autograd.grad(log_prob.sum(), inputs, allow_unused=True) if inputs else ()
    grads = iter(values)
    return [
        {n: g for n, v in values.items() if v.requires_grad and (g := next(grads)) is not None}
        for values in leaves
    ]


def guide_elbo(sample: WeightedParticles, at_latents: list[dict[str, Tensor]]) -> Tensor:
    r"""
    Return :math:`z \cdot \nabla_z \log p(x, z) - \log q(z \mid x)`, shape ``[K, *plates]``.

    :param at_latents: from :func:`gradients_at_latents`.
    """

    def pick(term: Term, i: int) -> Tensor | int:
        if not term.in_guide:
            return 0
        gradient, site = at_latents[i].get(term.key.name), term.site
        if gradient is None:
            return -term.log_prob
        # A constant if the guide has no parameters.
        return sum_event(gradient * site["value"], site["fn"].event_dim) - term.log_prob

    return sample.local_sum(pick)


# The log weight of a model and guide as a function of their local latents.

_CHECKED = ("checked",)
# What a run of the programs changes outside them.
CHANGES = ("changes",)


class LogWeight:
    r"""
    :math:`\log w` of one step, as a function of the local latents' coordinates.

    It is created once per step. It draws the minibatch and the global latents, which are then
    fixed, and a first set of coordinates. A call evaluates model and guide at other coordinates,
    with any leading dimensions. This is one vectorized run, or a loop if they cannot be vectorized.
    In ``"noise"`` coordinates

    .. math:: \log \gamma_\beta(\epsilon) = \log \text{base}(\epsilon) + \beta \log w(\epsilon)

    is a path from the guide to the posterior, and parameter gradients go through the guide's map
    from noise to latents. A mean-field guide runs only once: its distributions are reused.

    :param sampler: runs the programs.
    :param programs: model, guide and their arguments.
    :param coordinates: ``"noise"``, ``"latent"`` or ``"fixed"``; see
        :func:`~pyro_mcvae.coordinates.coordinate.coordinate_of`.
    :param GradientMode gradient: the gradients that are needed. With any of them, :meth:`gradients`
        exist at the first coordinates. The coordinates have a gradient to the guide's parameters if
        they depend on them. With ``FIRST`` the first local draws are detached in the model, so that
        guide and model get separate gradients: :meth:`guide_elbo`, :meth:`detached`.
    :param WeightedParticles within: a step whose minibatch and global latents are reused.
    :param Beginning begin: the initial values of local sites, and their number of rows; by default
        draws of the guide. Its fixed discrete sites are not part of the vectors, but their density
        given the coordinates is part of the base density. So the path goes from the guide's joint
        density to the model's, at these values.

    :param widths: the widths of the programs' kinks, at which :meth:`gradients` are smoothed for
        second derivatives; see :mod:`pyro_mcvae.ops.smoothing`. None for no smoothing.
    :param finder: a ``KinkFinder``, which sees the kinks of all evaluations; by default none.

    :ivar coordinates: the first draw, shape ``[K, *plates, D]`` (or ``[K, elements, D]`` for
        several blocks), where D is the number of coordinates of one datum's latents.
    :ivar first: the :class:`Evaluation` of the first draw.
    :ivar kind: the kind of the coordinates.
    :ivar records: the coordinates of the first draw's sites, for each run.
    :raises ValueError: if no latent has its own weight, or a guide site has no coordinate.

    Example::

        >>> from pyro_mcvae.coordinates.log_weight import LogWeight
        >>> from pyro_mcvae.particles.sampler import ParticleSampler
        >>> from pyro_mcvae.programs.run import Programs
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> sampler = ParticleSampler(4, True, max_plate_nesting=1)
        >>> log_weight = LogWeight(sampler, Programs(model, guide, (torch.zeros(3),), {}))
        >>> log_weight.coordinates.shape
        torch.Size([4, 3, 1])
        >>> log_weight(torch.zeros(8, 3, 1)).log_weight.shape
        torch.Size([8, 3])
    """

    def __init__(
        self,
        sampler: ParticleSampler,
        programs: Programs,
        coordinates: Coordinates = "noise",
        gradient: GradientMode = GradientMode.NONE,
        within: WeightedParticles | None = None,
        begin: Beginning | None = None,
        widths: Widths | None = None,
        finder: KinkFinder | None = None,
    ) -> None:
        self.programs, self._sampler, self.kind = programs, sampler, coordinates
        self.gradient, self._beginning = gradient, begin or Beginning()
        self._widths, self.finder = widths, finder
        changes: Changes | None = sampler.analyses.of(programs).get(CHANGES)
        state = None if changes is Changes.NONE else self._state_before(changes)
        sample, self.records = self._first_draw(within)
        if state is not None:
            self._use_state(state)
        made = sample, self.records, self._beginning.fixed_sites
        key = "plan", id(sample.structure), *plan_key(*made)
        find = sampler.analyses.of(programs).cached
        # The structure stays with its plan, so that no other one gets its id.
        self.plan, _ = find(key, lambda: (plan_of(*made), sample.structure))
        self.packing = self.plan.packing
        with self._running():
            self.first = evaluate(sample, self.records)
        if finder is not None:
            self._collect(self.first, finder)
        start = [{n: placed.at for n, placed in record.items()} for record in self.records]
        self.coordinates = self.packing.pack_runs(start) if self.packing.sites else self._empty()

    def _state_before(self, changes: Changes | None) -> StateOfOneRun | None:
        """Return the values outside the programs, before their first run."""
        if changes is Changes.VALUES:
            fail_if_recording("each evaluation changes values outside the programs")
        if is_recording():
            return None
        read = self._sampler.analyses.read(self.programs)
        return StateOfOneRun(buffers_of(read) if changes is Changes.BUFFERS else read)

    def _use_state(self, state: StateOfOneRun) -> None:
        """Evaluate in the outside state of the first run, if programs change that state."""
        changes, run = state.after_first(), self._run
        self._sampler.analyses.of(self.programs).cached(CHANGES, lambda: changes)

        def run_in_state(
            flat: Tensor, detach: bool = False
        ) -> tuple[WeightedParticles, list[Record]]:
            with state.again():
                return run(flat, detach)

        if changes is not Changes.NONE:
            self._run = run_in_state  # type: ignore[method-assign]

    def _running(self, at: Tensor | None = None) -> ExitStack:
        """
        Prepare runs of model and guide, so that gradients can be differentiated again.

        :param at: coordinates other than the first. Distributions check their arguments and values
            there if reading is free, and otherwise once for each analysis.
        """
        twice: tuple[AbstractContextManager[object], ...] = ()
        if self._widths is not None:
            twice = math_attention(), self.finder or nullcontext(), smoothed(self._widths)
        if at is None or costs_nothing_to_read(at) or not is_validation_enabled():
            return entered(*twice)
        return entered(*twice, *self._checks())

    def _collect(self, at: Evaluation, finder: KinkFinder) -> None:
        """Keep the kinks of an evaluation."""
        ats = [placed.at for record in at.records for placed in record.values()]
        finder.collect(at.log_weight, ats)

    def _checks(self) -> list[AbstractContextManager[object]]:
        """
        Return contexts that skip the checks of distributions after the first run of an analysis.
        """
        analysis = self._sampler.analyses.of(self.programs)
        if analysis.get(_CHECKED) is None:
            analysis.put(_CHECKED, True)
            return []
        traces = [run.guide_trace for run in self.first.sample.runs]
        drawn = [site["fn"] for trace in traces for site in scored(trace)]
        return [validation_enabled(False), unvalidated(drawn)]

    def found_once(self, key: tuple[Hashable, ...], find: Callable[[], object]) -> object:
        """Return a finding about programs of this structure, made once for each analysis."""
        key = *key, self.first.sample.runs[0].signature
        return self._sampler.analyses.of(self.programs).cached(key, find)

    def _empty(self) -> Tensor:
        return self.first.log_weight.unsqueeze(-1)[..., :0]

    def _first_draw(
        self, within: WeightedParticles | None
    ) -> tuple[WeightedParticles, list[Record]]:
        sampler, records = self._sampler, list[Record]()

        def make_sample_fn(rows: range, shared: frozenset[str]) -> SampleFn:
            records.append({})
            return partial(self._draw, records[-1], rows)

        detach = GradientMode.FIRST in self.gradient
        with self._running():
            if within is None:
                options = make_sample_fn, detach, self._beginning.count
                sample = sampler.sample(self.programs, *options, keep_noise=True)
            else:
                rerun = within, sampler.num_particles, make_sample_fn, detach
                sample = sampler.resample(self.programs, *rerun)
        # A step with a new structure may have made several attempts.
        return sample, records[-len(sample.runs) :]

    @property
    def unreparameterized(self) -> tuple[str, ...]:
        """Return the continuous local sites whose first draw has no gradient to the parameters."""
        record = self.records[0]
        return tuple(n for n in self.packing.sites if not record[n][0].reparameterized)

    @property
    def unconstrained(self) -> dict[str, Distribution]:
        """Return the distributions of the local sites that move as unconstrained values."""
        pairs = ((n, self.records[0][n][0]) for n in self.packing.sites)
        return {n: c.fn for n, c in pairs if isinstance(c, UnconstrainedCoordinate)}

    @cached_property
    def movable(self) -> Tensor | None:
        """
        Return 1 for coordinates that chains move: those of :attr:`valid` except discrete sites.

        :returns: shape ``[K, *plates, D]``, or None if all move.
        """
        return coordinates_that_count(
            self.first.sample, self.records, self.plan, self.plan.discrete
        )

    @cached_property
    def valid(self) -> Tensor:
        """
        Return 1 for coordinates that are part of the weight; 0 for masked ones and for padding.

        :returns: shape ``[K, *plates, D]``.
        """
        mask = coordinates_that_count(self.first.sample, self.records, self.plan)
        return torch.ones_like(self.coordinates) if mask is None else mask

    def gradients(self, at: Evaluation, create_graph: bool = True) -> tuple[Tensor, Tensor]:
        """
        Return the gradients of ``log_base`` and ``log_weight`` with respect to the coordinates.

        :param Evaluation at: an evaluation with gradients enabled.
        :param bool create_graph: whether they can be differentiated again.
        :returns: two tensors of shape ``[*leading, *plates, D]``.
        """
        # With FIRST the latents between model and coordinates are detached.
        separate = at is self.first and GradientMode.FIRST in self.gradient
        value = self.guide_elbo() if separate else at.log_weight
        base = base_gradient(self.plan, at, create_graph)
        return base, coordinate_gradient(self.packing, at.records, value, create_graph, separate)

    def guide_elbo(self) -> Tensor:
        r"""
        Return a surrogate of the plain ELBO of the first draw, for the guide's parameters only.

        It is :math:`z \cdot \nabla_z \log p(x, z) - \log q(z \mid x)`, shape ``[K, *plates]``.
        Needs ``GradientMode.FIRST`` and gradients enabled.
        """
        return guide_elbo(self.first.sample, self._at_latents)

    @cached_property
    def _at_latents(self) -> list[dict[str, Tensor]]:
        return gradients_at_latents(self.first.sample)

    def detached(self, coordinates: Tensor) -> WeightedParticles:
        """
        Run both programs at latents that are detached from the guide.

        :param coordinates: shape ``[K, *plates, D]``.
        """
        return self._run(coordinates.detach(), detach=True)[0]

    def __call__(self, coordinates: Tensor) -> Evaluation:
        """
        Evaluate both programs.

        :param coordinates: shape ``[*leading, *plates, D]``.
        """
        inner = self.coordinates.shape[1:]
        depth = coordinates.dim() - len(inner)
        if coordinates.shape[depth:] != inner:
            raise _shape_error(coordinates, inner)
        flat = coordinates if depth == 1 else coordinates.reshape(-1, *inner)
        with self._running(flat):
            weights = evaluate(*self._run(flat))
        if self.finder is not None:
            self._collect(weights, self.finder)
        return weights if depth == 1 else weights.with_lead(coordinates.shape[:depth])

    def _run(self, flat: Tensor, detach: bool = False) -> tuple[WeightedParticles, list[Record]]:
        first = self.first.sample
        if not (first.structure.mean_field and len(flat) == first.num_particles):
            return self._run_both(flat, detach)
        parts = [flat] if len(first.runs) == 1 else flat.split(1)
        moved = [
            {n: Placed(old[n].coordinate, as_shape(v, old[n].at.shape)) for n, v in at.items()}
            for at, old in zip(map(self.packing.unpack, parts), self.records, strict=True)
        ]
        # One run at a time, because a flow caches only the density of its last value.
        latents = (latents_at(record, detach) for record in moved)
        records = [old | new for old, new in zip(self.records, moved, strict=True)]
        return self._sampler.replay(self.programs, first, latents), records

    def _run_both(self, flat: Tensor, detach: bool) -> tuple[WeightedParticles, list[Record]]:
        first, records = self.first.sample, list[Record]()

        def make_sample_fn(rows: range, shared: frozenset[str]) -> SampleFn:
            records.append({})
            values = self.packing.unpack(flat[rows.start : rows.stop])
            fixed = partial(self._beginning.fixed_coordinate, rows=rows)
            return placing_at(values, records[-1], self.kind, fixed)

        sample = self._sampler.resample(self.programs, first, len(flat), make_sample_fn, detach)
        fixed_sites = first.structure.global_sites.guide | self._beginning.fixed_sites
        check_names(records, self.packing, fixed_sites)
        return sample, records

    def _draw(self, record: Record, rows: range, msg: Message) -> Tensor:
        """Return the first value of a site, and record its coordinate."""
        name, coordinate = msg["name"], coordinate_at(msg, self.kind)
        needs_gradient = bool(self.gradient) and name not in self._beginning.fixed_sites
        moves = needs_gradient and torch.is_grad_enabled()
        with torch.set_grad_enabled(moves):
            at = self._beginning.begin(msg, rows, coordinate)
        if moves and at.is_floating_point() and not at.requires_grad:
            at.requires_grad_()
        record[name] = Placed(coordinate, at)
        return value_at(msg, record[name])


def _shape_error(coordinates: Tensor, inner: torch.Size) -> ValueError:
    return ValueError(
        f"coordinates must have shape [*leading, {', '.join(map(str, inner))}], got "
        f"{tuple(coordinates.shape)}"
    )
