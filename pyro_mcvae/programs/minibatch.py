"""The minibatch of a step, which all of its runs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.programs.types import Message


class Minibatch(dict[str, Tensor]):
    """
    The indices of each plate of a step, by the plate's name.

    :ivar sizes: the plates' full sizes. A plate may be of another size in another run, as one over
        objects whose number is drawn: it then takes indices of its own, unless they are a choice.
    :ivar of_guide: the plates that the guide has, in which it draws latents.
    """

    def __init__(self, of: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(of or {})
        self.sizes: dict[str, int] = dict(getattr(of, "sizes", {}))
        self.of_guide: frozenset[str] = getattr(of, "of_guide", frozenset())

    def fill(self, msg: Message, drawn: bool = False) -> None:
        """
        Give a plate's message the indices that are known.

        :param bool drawn: whether the guide's latents have been drawn, for its own plates.
        :raises ValueError: if the model is given others of one of these then.
        """
        name, now = msg["name"], msg["fn"].size
        if name not in self:
            return
        # A value that is not done is the user's own choice, perhaps another one in each run.
        chosen = msg["value"] is not None and not msg["done"]
        if not chosen and now != self.sizes.get(name, now):
            self._check_whole(name, now)
            return
        if chosen and drawn and name in self.of_guide:
            _check_choice(name, msg["value"], self[name])
        msg["value"], msg["done"] = self[name], True

    def _check_whole(self, name: str, now: int) -> None:
        size = self.sizes[name]
        if len(self[name]) != size:
            raise ValueError(
                f"plate '{name}' has size {now}, but its minibatch of {len(self[name])} was "
                f"chosen from {size} in another run of the same step: give it one size in both "
                f"programs, which does not depend on latents"
            )

    def keep(self, msg: Message, drawn: bool = False) -> None:
        """Remember the indices of a plate's message."""
        self.of_guide |= {msg["name"]} if not drawn else set()
        if msg["name"] in self:
            return
        if len(msg["value"]) == 0:
            raise _empty(msg)
        self[msg["name"]] = msg["value"]
        self.sizes[msg["name"]] = msg["fn"].size


def _check_choice(name: str, given: Any, known: Tensor) -> None:
    """Most often both programs are given one object. Floats are no indices: their number counts."""
    if given is known or known.is_floating_point():
        return
    index = torch.as_tensor(given, device=known.device)
    if index.shape == known.shape and bool((index == known).all()):
        return
    raise ValueError(
        f"plate '{name}' of the model is given the minibatch {_some(given)}, and the guide has "
        f"drawn its latents for {_some(known)}, which are not those of these data: give the guide "
        f"the same subsample=, as by the argument create_plates of an AutoGuide, or let Pyro draw "
        f"the minibatch, by subsample_size="
    )


def _some(index: Any) -> str:
    shown = [int(i) for i in index[:4]]
    return f"[{', '.join(map(str, shown))}{', ...' if len(index) > 4 else ''}]"


def _empty(msg: Message) -> ValueError:
    return ValueError(
        f"plate '{msg['name']}' has an empty minibatch (0 of {msg['fn'].size} data); "
        f"pass at least one datum, for example by dropping an empty last batch"
    )
