"""The log weight of a pair of programs as a function of its local latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.tracing.coordinates import (
    Coordinate,
    Coordinates,
    NoCoordinateError,
    ValueCoordinate,
    coordinate_of,
)
from pyro_mcvae.tracing.packing import Packing, SiteShape
from pyro_mcvae.tracing.runs import Programs, Term
from pyro_mcvae.tracing.sample import Sample
from pyro_mcvae.tracing.structure import FactorKey
from pyro_mcvae.tracing.tracer import Draw, Tracer

__all__ = ["Evaluation", "LogWeight"]

# For each random guide site of a run: its coordinate and where it stands.
Record = dict[str, tuple[Coordinate, Tensor]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    r"""
    The log weight at given coordinates of the local latents.

    :ivar log_weight: :math:`\log p(x, z) - \log q(z \mid x)`, shape ``[*leading, *plates]``.
    :ivar log_base: the coordinates' density under the guide, of the same shape.
    :ivar sample: the execution behind them.
    """

    log_weight: Tensor
    log_base: Tensor
    sample: Sample


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

    :param tracer: runs the programs.
    :param programs: model, guide and their arguments.
    :param coordinates: ``"noise"``, ``"latent"`` or ``"value"``; see
        :func:`~pyro_mcvae.tracing.coordinates.coordinate_of`.

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
        >>> log_weight = LogWeight(
        ...     Tracer(4, True, max_plate_nesting=1), Programs(model, guide, (torch.zeros(3),), {})
        ... )
        >>> log_weight.coordinates.shape
        torch.Size([4, 3, 1])
        >>> log_weight(torch.zeros(8, 3, 1)).log_weight.shape
        torch.Size([8, 3])
    """

    def __init__(
        self, tracer: Tracer, programs: Programs, coordinates: Coordinates = "noise"
    ) -> None:
        self._tracer, self._programs, self._kind = tracer, programs, coordinates
        records: list[Record] = []

        def begin() -> Draw:
            record: Record = {}
            records.append(record)
            return lambda msg: self._draw(msg, record)

        sample = tracer.sample(programs, draw=begin)
        # A step whose structure was new may have begun more than once.
        self._records = records[-len(sample.runs) :]
        if not sample.blocks:
            raise ValueError(
                "no latent of the guide can be weighed by itself, because a subsampled plate does "
                "not enclose them: pass the full data, or use TraceSGVB_ELBO"
            )
        self._packing = _packing(sample, self._records[0])
        if not self._packing.sites:
            raise ValueError(
                "the guide draws no random latent: a guide of point masses has no coordinates"
            )
        drawn = [
            self._packing.pack({name: at for name, (_, at) in record.items()})
            for record in self._records
        ]
        self.coordinates = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
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
        flat = coordinates.reshape(-1, *inner)
        together = self._tracer.vectorizes(len(flat))
        groups = [flat] if together else list(flat.unsqueeze(1))
        values = [self._packing.unpack(g) for g in groups]
        sample, records = self._run(values, len(flat))
        found = self._evaluate(sample, records)
        shape = lead + found.log_weight.shape[1:]
        return Evaluation(found.log_weight.reshape(shape), found.log_base.reshape(shape), sample)

    def _run(self, values: list[dict[str, Tensor]], count: int) -> tuple[Sample, list[Record]]:
        first = self.first.sample
        if first.structure.mean_field and count == first.num_particles:
            records = [
                {name: (old[name][0], v.reshape(old[name][1].shape)) for name, v in value.items()}
                for value, old in zip(values, self._records, strict=True)
            ]
            # One run at a time: a flow finds the density of the last value only that it made.
            latents = ({n: c.value(at) for n, (c, at) in record.items()} for record in records)
            return self._tracer.replay(self._programs, first, latents), records
        records = [{} for _ in values]
        draws = [self._supply(v, r) for v, r in zip(values, records, strict=True)]
        return self._tracer.resample(self._programs, first, draws, count), records

    def _draw(self, msg: Any, record: Record) -> Tensor:
        coordinate = self._coordinate(msg)
        at = coordinate.draw()
        record[msg["name"]] = coordinate, at
        return coordinate.value(at)

    def _supply(self, values: dict[str, Tensor], record: Record) -> Draw:
        def draw(msg: Any) -> Tensor | None:
            if msg["name"] not in values:
                return None
            coordinate = self._coordinate(msg)
            at = values[msg["name"]].reshape(msg["fn"].batch_shape + coordinate.event_shape)
            record[msg["name"]] = coordinate, at
            return coordinate.value(at)

        return draw

    def _coordinate(self, msg: Any) -> Coordinate:
        try:
            return coordinate_of(msg["fn"], self._kind)
        except NotImplementedError as error:
            raise NoCoordinateError(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has neither explicit "
                f"noise nor an unconstrained form ({error}): use another distribution, or say how "
                f"it is made from noise with register_noise"
            ) from error

    def _evaluate(self, sample: Sample, records: list[Record]) -> Evaluation:
        def log_base(term: Term, i: int) -> Any:
            if not term.in_guide or term.key.name not in self._packing.sites:
                return 0
            coordinate, at = records[i][term.key.name]
            return coordinate.log_base(at, term.site["value"])

        return Evaluation(sample.log_weight, sample.local_sum(log_base), sample)


def _packing(sample: Sample, record: Record) -> Packing:
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
