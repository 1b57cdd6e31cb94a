"""Run a program on one particle's values under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_mcvae.ops.lanes import Lanes
from pyro_mcvae.programs.messengers import Leading, ParticlePlate
from pyro_mcvae.programs.sites import changed_draw, site_in_full_precision
from pyro_mcvae.programs.types import Distribution, LeadingDimsError, Message

# Distributions that a program made of one particle's values, as those of all particles.

# These choose entries by values, which cannot be asked inside the lanes; of Categorical's form.
_BY_LOGITS = dist.Multinomial, dist.OneHotCategorical
# How deep tensors are looked for in what a distribution is made of.
_DEPTH = 6


def lifted(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    """
    The distribution of all particles.

    :param fn: made inside the lanes.
    :param depth: how many batch dims stand to the right of the lanes.
    :returns: ``fn`` itself where nothing of it is in a lane.
    :raises LeadingDimsError: for a distribution that is not made of its parameters alone.
    """
    if not any(lanes.holds(t) for t in _tensors(fn, _DEPTH)):
        return fn
    if type(fn) in _BY_LOGITS:
        count = {"total_count": fn.total_count} if type(fn) is dist.Multinomial else {}
        return type(fn)(**count, logits=lanes.lift(fn.logits, depth + 1), validate_args=False)
    if isinstance(fn, torch.distributions.Independent):
        events = fn.reinterpreted_batch_ndims
        return dist.Independent(lifted(fn.base_dist, lanes, depth + events), events)
    if isinstance(fn, ExpandedDistribution):
        base = lifted(fn.base_dist, lanes, depth)
        lead = base.batch_shape[: len(base.batch_shape) - depth]
        pad = (1,) * (depth - len(fn.batch_shape))
        return base.expand((*lead, *pad, *fn.batch_shape))
    if isinstance(fn, MaskedDistribution):
        return lifted(fn.base_dist, lanes, depth).mask(_lift(fn._mask, lanes, depth))
    if type(fn) is dist.Delta:
        value = lanes.lift(fn.v, depth + fn.event_dim)
        return dist.Delta(value, _lift(fn.log_density, lanes, depth), fn.event_dim)
    if type(fn) is dist.Unit:
        return dist.Unit(lanes.lift(fn.log_factor, depth), has_rsample=fn.has_rsample)
    if isinstance(fn, torch.distributions.MixtureSameFamily):
        weights = lifted(fn.mixture_distribution, lanes, depth)
        return type(fn)(weights, lifted(fn.component_distribution, lanes, depth + 1))
    if isinstance(fn, torch.distributions.TransformedDistribution) and not any(
        lanes.holds(t) for t in _tensors(fn.transforms, _DEPTH)
    ):
        events = len(fn.event_shape) - len(fn.base_dist.event_shape)
        base = lifted(fn.base_dist, lanes, depth + events)
        return dist.TransformedDistribution(base, fn.transforms)
    return _by_parameters(fn, lanes, depth)


def _by_parameters(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    """Of parameters that have the shape of the batch, and the event that their constraint says."""
    own = vars(fn)
    found = {
        name: _lift(own[name], lanes, depth + constraint.event_dim)
        for name, constraint in fn.arg_constraints.items()
        if name in own and not (name == "probs" and "logits" in own)
    }
    try:
        return type(fn)(**found, validate_args=False)
    except TypeError as error:
        raise LeadingDimsError(
            f"the parameters of a {type(fn).__name__} are not all that it is made of, so that "
            f"those of all particles are not known: {error}",
            reason=f"{type(fn).__name__} is not made under vmap",
        ) from error


def _lift(value: bool | float | Tensor, lanes: Lanes, depth: int) -> bool | float | Tensor:
    return lanes.lift(value, depth) if isinstance(value, Tensor) else value


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """The tensors that a distribution is made of, its networks' parameters left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth)
    elif isinstance(value, functools.partial):
        yield from _tensors([*value.args, *value.keywords.values()], depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for part in vars(value).values():
            yield from _tensors(part, depth - 1)


# Programs that are run once for all particles, and each see one: under ``vmap``.


class Way(Enum):
    """How several particles are run; the value says it in words."""

    BATCHED = "at once, in a leading dim"
    MAPPED = "at once, the model under vmap"
    BOTH_MAPPED = "at once, both programs under vmap"
    LOOPED = "one by one"


def particle_plates(
    way: Way,
    count: int,
    dim: int,
    shared: tuple[frozenset[str], frozenset[str]],
    state_dim: int | None = None,
) -> Leading:
    """
    New plates of the particles, for the guide and for the model.

    :param shared: the sites of each that all particles share.
    :param state_dim: as of :class:`~pyro_mcvae.programs.messengers.Leading`.
    """
    guide = MappedPlate if way is Way.BOTH_MAPPED else ParticlePlate
    model = ParticlePlate if way is Way.BATCHED else MappedPlate
    return Leading(guide(count, dim, shared[0]), model(count, dim, shared[1]), state_dim)


class MappedPlate(ParticlePlate):
    """
    The particles' plate around a program that is not to see it.

    Handlers around it see what they would see around a program that broadcasts: sites with the
    leading dims. The program is given its values under ``vmap``, so that it may count dims from
    the left, multiply from the right, or convolve. Draws and densities are made outside that.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(size, dim, skip)
        self._lanes = Lanes()
        self._stack = ExitStack()
        self._hidden: dict[int, Message] = {}

    def __enter__(self) -> MappedPlate:
        self._stack.enter_context(self._lanes.opened(self.size))
        # What it reads is not there.
        self._stack.enter_context(pyro.validation_enabled(False))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not site_is_subsample(msg) and msg["name"] not in self.skip:
            self._show(msg)
        elif msg["type"] == "param":
            # Its beginning may be noise, of which each lane has its own.
            msg["args"] = tuple(map(self._first, msg["args"]))
        # Handlers, draws and new parameters know nothing of lanes.
        self._lanes.suspend()

    def _show(self, msg: Message) -> None:
        site_in_full_precision(msg)
        self._hidden[id(msg)] = Message(**{name: msg.get(name) for name in _FIELDS})  # type: ignore[typeddict-item]
        depth, fn = -self.depth - 1, msg["fn"]
        msg["fn"] = lifted(fn, self._lanes, depth)
        msg["mask"] = self._lift(msg["mask"], depth)
        msg["scale"] = self._lift(msg["scale"], depth)
        msg["value"] = self._lift(msg["value"], depth + fn.event_dim)
        super()._process_message(msg)

    def _postprocess_message(self, msg: Message) -> None:
        self._lanes.resume()
        hidden = self._hidden.pop(id(msg), None)
        if hidden is None:
            return
        value, fn = msg["value"], hidden["fn"]
        if hidden["value"] is None:
            depth = -self.depth - 1 + fn.event_dim
            shape = _shape_of(value, fn.shape(), depth)
            hidden["value"] = changed_draw(lambda v: self._lanes.lower(v, shape, depth), value)
        msg.update(hidden)

    def _first(self, value: Any) -> Any:
        is_mapped = isinstance(value, Tensor) and self._lanes.holds(value)
        return self._lanes.lift(value, value.dim())[0] if is_mapped else value

    def _lift(self, value: Any, depth: int) -> Any:
        return self._lanes.lift(value, depth) if isinstance(value, Tensor) else value


_FIELDS = "fn", "value", "mask", "scale", "cond_indep_stack"


def _shape_of(value: Tensor, shape: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The shape of one particle's value, of which there may be more than the program asks for."""
    own = tuple(value.shape[max(0, value.dim() - depth) :])
    while len(own) > len(shape) and own[0] == 1:
        own = own[1:]
    return own
