"""The log weight of a pair of programs as a function of its local latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.coordinates.coordinate import (
    Coordinate,
    Coordinates,
    NoiseCoordinate,
    UnconstrainedCoordinate,
    ValueCoordinate,
    coordinate_of,
)
from pyro_mcvae.coordinates.gradient import GradientMode
from pyro_mcvae.coordinates.packing import Packing, SiteShape
from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.contract import check_plates
from pyro_mcvae.programs.errors import NoCoordinateError
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.precision import without_autocast
from pyro_mcvae.programs.sites import is_random, is_straight_through, masked_entries
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Message
from pyro_mcvae.structure.blocks import Structure

__all__ = ["Evaluation", "LogWeight"]

# For each random guide site of a run: its coordinate and where it stands.
Record = dict[str, tuple[Coordinate, Tensor]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    r"""
    The log weight at given coordinates of the local latents.

    :ivar log_weight: :math:`\log p(x, z) - \log q(z \mid x)`, shape ``[*leading, *plates]``.
    :ivar log_base: the coordinates' density under the guide, of the same shape; coordinates that
        a mask takes out of the guide are left out.
    :ivar sample: the execution behind them.
    :ivar records: for each of its runs, where each site stands.
    """

    log_weight: Tensor
    log_base: Tensor
    sample: WeightedParticles
    records: list[Record]


class LogWeight:
    r"""
    :math:`\log w` of one step, as a function of the local latents' coordinates.

    Made once per step: draws the minibatch and the global latents, which stay fixed, and a first
    set of coordinates. Calling it evaluates both programs at other coordinates, with any leading
    dimensions, in one vectorised run (or in a loop over a model that cannot be vectorised). In
    ``"noise"`` coordinates

    .. math:: \log \gamma_\beta(\epsilon) = \log \text{base}(\epsilon) + \beta \log w(\epsilon)

    is a path from the guide to the posterior, and gradients with respect to the parameters flow
    through the guide's own map from noise to latents. A guide whose draws do not depend on each
    other is not run again: its distributions are those of the first run.

    :param sampler: runs the programs.
    :param programs: model, guide and their arguments.
    :param coordinates: ``"noise"``, ``"latent"`` or ``"value"``; see
        :func:`~pyro_mcvae.coordinates.coordinate.coordinate_of`.
    :param GradientMode gradient: what is differentiated. With any gradient the first coordinates
        are drawn such that :meth:`gradients` exist there, and, where they depend on the guide's
        parameters, with a gradient to these. With ``FIRST`` the first local draws reach the model
        without their gradient to the guide, so that the parameters of the two get gradients of
        their own: :meth:`guide_elbo`, :meth:`model_log_prob`.
    :param WeightedParticles within: a step whose minibatch and global latents are taken instead of
        new ones.
    :param latents: values of the guide's random local sites, in the shape of a run without
        particles, to begin at instead of a draw.

    :ivar coordinates: the first draw, shape ``[K, *plates, D]`` (or ``[K, elements, D]`` for
        several blocks), where D counts the numbers that describe one datum's latents.
    :ivar first: the :class:`Evaluation` of that draw.
    :raises ValueError: if no latent can be weighed by itself, or a guide site has no coordinate.

    Example::

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
        latents: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._sampler, self._programs, self._kind = sampler, programs, coordinates
        self._given = latents or {}
        self.gradient = gradient
        records: list[Record] = []

        def make_sample_fn() -> SampleFn:
            record: Record = {}
            records.append(record)
            return lambda msg: self._draw(msg, record)

        detach = GradientMode.FIRST in gradient
        if within is None:
            sample = sampler.sample(programs, make_sample_fn=make_sample_fn, detach_latents=detach)
        else:
            count = sampler.num_particles
            runs = range(1 if sampler.vectorizes(count) else count)
            sample_fns = [make_sample_fn() for _ in runs]
            sample = sampler.resample(programs, within, sample_fns, count, detach)
        # A step whose structure was new may have begun more than once.
        self._records = records[-len(sample.runs) :]
        if sample.runs[0].leading is None:
            check_plates(sample.runs[0])  # data outside of plates would stand among coordinates
        if not any(is_random(t.site) for t in sample.runs[0].terms if t.in_guide):
            raise ValueError(
                "the guide draws no random latent: an empty guide, or a guide of point masses, has "
                "no coordinates to move: use TraceSGVB_ELBO, which needs none"
            )
        if not sample.blocks:
            raise ValueError(
                "no latent of the guide can be weighed by itself, because a subsampled plate does "
                "not enclose them: pass the full data, or use TraceSGVB_ELBO"
            )
        self._packing = _packing(sample, self._records[0])
        if not self._packing.sites:
            raise ValueError(
                "all random latents of the guide are shared by several data of a minibatch, so "
                "that none can be moved for one datum: pass the full data, or use TraceSGVB_ELBO"
            )
        self._check_names(self._records, sample)
        self.coordinates = self._pack(
            [{name: at for name, (_, at) in record.items()} for record in self._records]
        )
        self.first = self._evaluate(sample, self._records)

    @property
    def discrete(self) -> tuple[str, ...]:
        """The local sites whose coordinate is a discrete value."""
        # Not the dtype: Bernoulli and Poisson draws are floats.
        record = self._records[0]
        return tuple(
            n
            for n in self._packing.sites
            if isinstance(c := record[n][0], ValueCoordinate) and c.fn.support.is_discrete
        )

    @property
    def unreparameterized(self) -> tuple[str, ...]:
        """The continuous local sites whose first draw has no gradient to the guide's parameters."""
        record = self._records[0]
        return tuple(n for n in self._packing.sites if not record[n][0].reparameterized)

    @property
    def entangled(self) -> bool:
        """
        Whether a first coordinate may depend on another one, as a draw whose noise is not explicit
        does on the draws before it: :meth:`gradients` of ``first`` are then no partial derivatives.
        """
        record = self._records[0]
        found = [isinstance(record[n][0], UnconstrainedCoordinate) for n in self._packing.sites]
        return len(found) > 1 and any(found) and not self.first.sample.structure.mean_field

    @property
    def unconstrained(self) -> dict[str, Any]:
        """The distributions of the local sites that move as unconstrained values."""
        found = ((n, self._records[0][n][0]) for n in self._packing.sites)
        return {n: c.fn for n, c in found if isinstance(c, UnconstrainedCoordinate)}

    @cached_property
    def free(self) -> Tensor | None:
        """
        1 for coordinates that are part of the weight, 0 for those that a mask of the guide takes
        out; shape ``[K, *plates, D]``, or None where nothing is masked.

        :raises ValueError: if a mask depends on a latent, so that moves would change it.
        """
        _refuse_moving_masks(self.first.sample.structure)
        masks: list[dict[str, Tensor]] = []
        for record, run in zip(self._records, self.first.sample.runs, strict=True):
            found = {n: masked_entries(run.guide_trace.nodes[n]) for n in self._packing.sites}
            masks.append({n: _as_event(m, record[n]) for n, m in found.items() if m is not None})
        if not any(masks):
            return None
        return self._pack(
            [
                {n: torch.ones_like(record[n][1]) * found.get(n, 1) for n in self._packing.sites}
                for record, found in zip(self._records, masks, strict=True)
            ]
        )

    @cached_property
    def active(self) -> Tensor:
        """
        1 for coordinates that are part of the weight; 0 for masked ones, and for those that fill
        up shorter vectors where the blocks' lengths differ. Shape ``[K, *plates, D]``.
        """
        if self.free is not None:
            return self.free
        parts = [{n: torch.ones_like(r[n][1]) for n in self._packing.sites} for r in self._records]
        return self._pack(parts)

    def gradients(
        self, at: Evaluation, create_graph: bool = True, retain_graph: bool = True
    ) -> tuple[Tensor, Tensor]:
        """
        The gradients of ``log_base`` and ``log_weight`` with respect to the coordinates.

        :param Evaluation at: made where gradients were enabled.
        :param bool create_graph: whether they can be differentiated again.
        :param bool retain_graph: whether the evaluation is still needed for other gradients.
        :returns: two tensors of shape ``[*leading, *plates, D]``.
        """
        retain_graph = retain_graph or create_graph
        if all(isinstance(c, NoiseCoordinate) and c.normal for c, _ in self._local(0)):
            parts = [{n: -record[n][1] for n in self._packing.sites} for record in at.records]
            base = self._pack(parts)
            base = as_shape(base, at.log_base.shape + base.shape[-1:])
        else:
            base = self._gradient(at, at.log_base, create_graph, True)
        return base, self._gradient(at, at.log_weight, create_graph, retain_graph)

    def _local(self, i: int) -> list[tuple[Coordinate, Tensor]]:
        return [self._records[i][n] for n in self._packing.sites]

    def guide_elbo(self) -> Tensor:
        r"""
        A tensor whose gradient is that of the plain ELBO of the first draw, with respect to the
        guide's parameters only: :math:`z \cdot \nabla_z \log p(x, z) - \log q(z \mid x)`, shape
        ``[K, *plates]``. Needs ``GradientMode.FIRST`` and gradients enabled.
        """
        sample = self.first.sample

        def pick(term: Term, i: int) -> Any:
            if not term.in_guide:
                return 0
            found, site = self._at_model[i].get(term.key.name), term.site
            if found is None:
                return -term.log_prob
            # A constant where the guide has no parameters: then nothing is to be learned.
            return _sum_events(found * site["value"], site["fn"].event_dim) - term.log_prob

        return sample.local_sum(pick)

    def model_log_prob(self, coordinates: Tensor) -> Tensor:
        """
        log p(x, z) at latents that stay fixed, with gradients to the model and the global latents.

        :param coordinates: shape ``[K, *plates, D]``.
        :returns: shape ``[K, *plates]``.
        """
        return self.at_rest(coordinates).local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)

    def at_rest(self, coordinates: Tensor) -> WeightedParticles:
        """
        Both programs at latents that stay fixed: these have no gradient to the guide.

        :param coordinates: shape ``[K, *plates, D]``.
        """
        sample, _ = self._run(self._unpack(coordinates.detach()), len(coordinates), detach=True)
        return sample

    @cached_property
    def _at_model(self) -> list[dict[str, Tensor]]:
        """For each run of the first draw, the gradient of log p at the local draws."""
        sample = self.first.sample
        leaves = []
        for run, block_of in zip(sample.runs, sample.block_of, strict=True):
            names = [t.key.name for t in run.terms if t.in_guide and block_of[t.key] is not None]
            nodes = run.model_trace.nodes
            leaves.append({n: nodes[n]["value"] for n in names if n in nodes})
        inputs = [v for found in leaves for v in found.values() if v.requires_grad]
        log_prob = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)
        grads = iter(torch.autograd.grad(log_prob.sum(), inputs, allow_unused=True))
        return [
            {n: g for n, v in found.items() if v.requires_grad and (g := next(grads)) is not None}
            for found in leaves
        ]

    def _gradient(self, at: Evaluation, value: Tensor, create: bool, retain: bool) -> Tensor:
        names = list(self._packing.sites)
        inputs = [record[n][1] for record in at.records for n in names]
        if GradientMode.FIRST in self.gradient and at is self.first:
            # The way from the model to the coordinates leads through the detached latents.
            value_of = at.log_base if value is at.log_base else self.guide_elbo()
            found = _grad(value_of, inputs, create, True)
        else:
            found = _grad(value, inputs, create, retain)
        pairs = zip(inputs, found, strict=True)
        full = iter(torch.zeros_like(i) if g is None else g for i, g in pairs)
        packed = self._pack([{n: next(full) for n in names} for _ in at.records])
        return as_shape(packed, value.shape + packed.shape[-1:])

    def _pack(self, parts: list[dict[str, Tensor]]) -> Tensor:
        packed = [self._packing.pack(part) for part in parts]
        return packed[0] if len(packed) == 1 else torch.cat(packed)

    def __call__(self, coordinates: Tensor) -> Evaluation:
        """
        Evaluate both programs.

        :param coordinates: shape ``[*leading, *plates, D]``.
        """
        inner = self.coordinates.shape[1:]
        if coordinates.shape[coordinates.dim() - len(inner) :] != inner:
            raise ValueError(
                f"coordinates must have shape [*leading, {', '.join(map(str, inner))}], got "
                f"{tuple(coordinates.shape)}"
            )
        lead = coordinates.shape[: coordinates.dim() - len(inner)]
        flat = coordinates if len(lead) == 1 else coordinates.reshape(-1, *inner)
        sample, records = self._run(self._unpack(flat), len(flat))
        found = self._evaluate(sample, records)
        shape = lead + found.log_weight.shape[1:]
        log_weight, log_base = as_shape(found.log_weight, shape), as_shape(found.log_base, shape)
        return Evaluation(log_weight, log_base, sample, records)

    def _unpack(self, flat: Tensor) -> list[dict[str, Tensor]]:
        together = self._sampler.vectorizes(len(flat))
        return [self._packing.unpack(g) for g in ([flat] if together else flat.unsqueeze(1))]

    def _run(
        self, values: list[dict[str, Tensor]], count: int, detach: bool = False
    ) -> tuple[WeightedParticles, list[Record]]:
        first = self.first.sample
        if first.structure.mean_field and count == first.num_particles:
            records = [
                {name: (old[name][0], as_shape(v, old[name][1].shape)) for name, v in value.items()}
                for value, old in zip(values, self._records, strict=True)
            ]
            # One run at a time: a flow finds the density of the last value only that it made.
            latents = (_latents(record, detach) for record in records)
            return self._sampler.replay(self._programs, first, latents), records
        records = [{} for _ in values]
        sample_fns = [self._at(v, r) for v, r in zip(values, records, strict=True)]
        sample = self._sampler.resample(self._programs, first, sample_fns, count, detach)
        self._check_names(records, first)
        return sample, records

    def _check_names(self, records: list[Record], sample: WeightedParticles) -> None:
        """Sites that come and go with the draws have no place in a vector of coordinates."""
        shared = sample.structure.global_sites.guide
        for record in records:
            differing = (record.keys() | shared) ^ (self._packing.sites.keys() | shared)
            if differing:
                raise ValueError(
                    f"guide site '{min(differing)}' is drawn in some executions and not in others, "
                    f"so that the latents make no vector of coordinates: draw it always, and mask "
                    f"it where it does not count, or weigh whole draws with TraceIWAE_ELBO"
                )

    def _draw(self, msg: Any, record: Record) -> Tensor:
        coordinate = self._coordinate(msg)
        differentiable = bool(self.gradient) and torch.is_grad_enabled()
        with torch.set_grad_enabled(differentiable):
            given = self._given.get(msg["name"])
            at = coordinate.draw() if given is None else _at(msg, coordinate, given)
        if differentiable and at.is_floating_point() and not at.requires_grad:
            at.requires_grad_()
        record[msg["name"]] = coordinate, at
        return _place(msg, coordinate, at)

    def _at(self, values: dict[str, Tensor], record: Record) -> SampleFn:
        def sample_fn(msg: Message) -> Tensor | None:
            if msg["name"] not in values:
                # A site of other draws: noted, to be refused once the run is over.
                record[msg["name"]] = self._coordinate(msg), msg["fn"].sample()
                return None
            coordinate = self._coordinate(msg)
            at = as_shape(values[msg["name"]], msg["fn"].batch_shape + coordinate.event_shape)
            record[msg["name"]] = coordinate, at
            return _place(msg, coordinate, at)

        return sample_fn

    def _coordinate(self, msg: Any) -> Coordinate:
        if self._kind != "value" and is_straight_through(msg["fn"]):
            # Their density is that of values that were never rounded: moving those leaves the
            # program, whose model sees 0 and 1 only.
            raise NoCoordinateError(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) rounds its draws, so "
                f"that they cannot be moved: use the relaxed distribution without StraightThrough "
                f"in guide and model, or weigh the draws where they are with TraceIWAE_ELBO"
            )
        try:
            return coordinate_of(msg["fn"], self._kind)
        except NotImplementedError as error:
            raise NoCoordinateError(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has neither explicit "
                f"noise nor an unconstrained form ({error}): use another distribution, or say how "
                f"it is made from noise with register_noise"
            ) from error

    def _evaluate(self, sample: WeightedParticles, records: list[Record]) -> Evaluation:
        def log_base(term: Term, i: int) -> Any:
            if not term.in_guide or term.key.name not in self._packing.sites:
                return 0
            coordinate, at = records[i][term.key.name]
            density = coordinate.log_base(at, term.site["value"])
            mask = masked_entries(term.site)
            return density if mask is None else torch.where(mask, density, 0.0)

        return Evaluation(sample.log_weight, sample.local_sum(log_base), sample, records)


def _at(msg: Any, coordinate: Coordinate, value: Tensor) -> Tensor:
    """The coordinate of a given value, which is the same for all particles."""
    try:
        at = coordinate.at(value.expand(msg["fn"].shape()))
    except NoCoordinateError as error:
        raise NoCoordinateError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) cannot begin at a given "
            f"value in these coordinates ({error}): use coordinates='latent'"
        ) from error
    return at.detach().expand(tuple(msg["fn"].batch_shape) + coordinate.event_shape).clone()


def _place(msg: Any, coordinate: Coordinate, at: Tensor) -> Tensor:
    """The value of a guide site, with its density where the noise knows it."""
    known = coordinate.log_prob(at) if isinstance(coordinate, NoiseCoordinate) else None
    if known is not None:
        own = {**msg["infer"].get("mcvae", {}), "log_prob": known}
        msg["infer"] = {**msg["infer"], "mcvae": own}
    return coordinate.value(at)


def _latents(record: Record, detach: bool) -> dict[str, dict[str, Any]]:
    """What changes at each guide site of a run at other coordinates: value and annotations."""
    found = {}
    for name, (coordinate, at) in record.items():
        msg: dict[str, Any] = {"infer": {}}
        value = _place(msg, coordinate, at)
        found[name] = {**msg, "value": value.detach() if detach else value}
    return found


def _grad(value: Tensor, inputs: list[Tensor], create: bool, retain: bool) -> Any:
    if not value.requires_grad:
        return [None] * len(inputs)
    # The backward pass of an operator computes in the precision that its forward pass had.
    with without_autocast():
        return torch.autograd.grad(
            value.sum(), inputs, create_graph=create, retain_graph=retain, allow_unused=True
        )


def _sum_events(value: Tensor, count: int) -> Tensor:
    return value.sum(tuple(range(-count, 0))) if count else value


def _refuse_moving_masks(structure: Structure) -> None:
    for name, draws in structure.masked_by.items():
        raise ValueError(
            f"the mask of site '{name}' of the guide depends on {', '.join(sorted(draws))}, so "
            f"moves would change how many latents count: let the masks of both programs depend on "
            f"data only (an unmasked latent without an effect does no harm), or use TraceIWAE_ELBO"
        )


def _as_event(mask: Tensor, at: tuple[Coordinate, Tensor]) -> Tensor:
    return mask.reshape(mask.shape + (1,) * len(at[0].event_shape))


def _packing(sample: WeightedParticles, record: Record) -> Packing:
    nesting = max((-d for b in sample.blocks for d in b.dims), default=0)
    nesting = max(nesting, sample.runs[0].nesting)
    shapes = {}
    for name, (coordinate, at) in record.items():
        block = sample.block_of[0].get(FactorKey("guide", name))
        if block is not None:
            events = len(coordinate.event_shape)
            batch = tuple(at.shape[: at.dim() - events])
            batch = batch[max(0, len(batch) - nesting) :]
            batch = (1,) * (nesting - len(batch)) + batch
            shapes[name] = SiteShape(block, batch, tuple(coordinate.event_shape), at.dtype)
    return Packing(shapes, [b.dims for b in sample.blocks])
