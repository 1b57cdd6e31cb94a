"""Attributes that a step writes: step sizes that adapt, a record of the last step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_mcvae.compiled.refusal import NotRecordable
from pyro_mcvae.programs.outside_values import Dependencies, is_plain, is_written, put_back

__all__ = ["Slot", "Spaces", "check_detached"]

Rebuild = Callable[[list[Tensor]], object]


@dataclass
class Slot:
    """
    One attribute that a step wrote.

    :ivar owner: the class of the object that has it.
    :ivar tensors: those of its new value, which are outputs of the recording.
    :ivar rebuild: makes another such value of other tensors.
    """

    owner: type
    space: dict[str, object]
    key: str
    before: object
    tensors: list[Tensor]
    rebuild: Rebuild

    def write(self, tensors: list[Tensor]) -> None:
        """What the step would have written."""
        self.space[self.key] = self.rebuild(tensors)


class Spaces:
    """The attributes and buffers of programs and a loss as they are when this is made."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._before: list[tuple[type, dict[str, object], dict[str, object]]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._entries = list(dependencies.entries)
        for value in dependencies.objects:
            spaces = [vars(value)] if hasattr(value, "__dict__") else []
            if isinstance(value, nn.Module):
                # A scripted module's are no dict, and are written in place only.
                if isinstance(value._buffers, dict):
                    spaces.append(value._buffers)
                held = [b for b in value._buffers.values() if b is not None]
                self._buffers += [(b, b.detach().clone()) for b in held]
            self._before += [(type(value), space, dict(space)) for space in spaces]

    def put_back(self) -> None:
        """Undo what a step did that failed."""
        for _, space, before in self._before:
            if any(space.get(k, space) is not v for k, v in before.items()):
                space.update(before)
            for key in space.keys() - before.keys():
                del space[key]
        for buffer, copy in self._buffers:
            buffer.detach().copy_(copy)
        for entry in self._entries:
            if not entry.unchanged:
                put_back(entry)

    def written(self, is_recorded: Callable[[Tensor], bool]) -> list[Slot]:
        """
        What a step wrote since then.

        :param is_recorded: tells the tensors that the step computed.
        :raises NotRecordable: naming an attribute with another plain value: a counter, say.
        """
        slots = []
        for owner, key, space, old in self._changes():
            new = space[key]
            if is_plain(new) and not _equal(new, old):
                raise NotRecordable(
                    f"each step changes attribute '{key}' of {owner.__name__} "
                    f"(from {old!r} to {new!r}): make it a tensor, or a buffer, that is updated in "
                    f"place"
                )
            leaves, rebuild = _flatten(new)
            tensors = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor)}
            wanted = {i: t for i, t in tensors.items() if is_recorded(t)}
            if wanted:
                fill = _partial(rebuild, leaves, list(wanted))
                slots.append(Slot(owner, space, key, old, list(wanted.values()), fill))
        return slots

    def _changes(self) -> Iterator[tuple[type, str, dict[str, object], object]]:
        for owner, space, before in self._before:
            for key, value in list(space.items()):
                if before.get(key, before) is not value:
                    yield owner, key, space, before.get(key)


def check_detached(slots: list[Slot]) -> None:
    """
    :raises NotRecordable: if the user's programs keep what a further term of a loss may be made of,
        a penalty say: what a replay writes has no gradient.
    """
    for slot in slots:
        if is_written(slot.owner) and any(t.requires_grad for t in slot.tensors):
            raise NotRecordable(
                f"attribute '{slot.key}' of {slot.owner.__name__} has a gradient, which that of a "
                f"recorded step would not: detach it, or make it a pyro.factor"
            )


def _equal(new: object, old: object) -> bool:
    return is_plain(old) and bool(new == old)


def _flatten(value: object) -> tuple[list[object], Callable[[list[object]], object]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        held = [getattr(value, name) for name in names]
        return held, lambda new: dataclasses.replace(value, **dict(zip(names, new, strict=True)))
    leaves, spec = tree_flatten(value)
    return leaves, lambda new: tree_unflatten(new, spec)


def _partial(
    rebuild: Callable[[list[object]], object], leaves: list[object], wanted: list[int]
) -> Rebuild:
    rest = [None if i in wanted else leaf for i, leaf in enumerate(leaves)]

    def filled(tensors: list[Tensor]) -> object:
        new = list(rest)
        for i, tensor in zip(wanted, tensors, strict=True):
            new[i] = tensor
        return rebuild(new)

    return filled
