"""Programs that are run once for all particles, and each see one: under ``vmap``."""

from __future__ import annotations

from contextlib import ExitStack
from enum import Enum
from typing import Any

import pyro
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.ops.lanes import Lanes
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.mapped_distribution import lifted
from pyro_mcvae.programs.messengers import ParticlePlate
from pyro_mcvae.programs.precision import site_in_full_precision
from pyro_mcvae.programs.sites import changed_draw
from pyro_mcvae.programs.types import Message


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
    :param state_dim: as of :class:`~pyro_mcvae.programs.leading.Leading`.
    """
    guide = MappedPlate if way is Way.BOTH_MAPPED else ParticlePlate
    model = ParticlePlate if way is Way.BATCHED else MappedPlate
    return Leading(guide(count, dim, shared[0]), model(count, dim, shared[1]), state_dim)


class MappedPlate(ParticlePlate):
    """
    The particles' plate around a program that is not to see it.

    Handlers around it see what they would see around a program that broadcasts: sites with the
    leading dims. The program is given its values under ``vmap``, so that it may count dims from
    the left, multiply from the right, or convolve. Draws and densities are made outside of that.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(size, dim, skip)
        self._lanes = Lanes()
        self._stack = ExitStack()
        self._hidden: dict[int, Message] = {}

    def __enter__(self) -> MappedPlate:
        self._stack.enter_context(self._lanes.opened(self.size))
        # What it looks at is not there to be looked at.
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
