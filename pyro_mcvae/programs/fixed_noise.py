"""Constants instead of the random numbers that programs draw outside sample sites."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs.source_lines import program_line
from pyro_mcvae.programs.types import Message


class Draw(NamedTuple):
    """
    Random numbers that a program draws outside sample sites, as ``nn.Dropout`` does.

    :ivar size: how many.
    :ivar line: where.
    """

    size: int
    line: str


class FixedNoise(Messenger):
    """
    Gives constants to programs that draw random numbers outside sample sites.

    Two runs of other shapes draw other dropout masks, and cannot be compared. With constants they
    can: no unit is dropped, and noise has one value everywhere. Numbers of a generator of the
    program's own stay as they are.

    :param bool fixes: False to record draws alone.
    :ivar draws: what was drawn.
    """

    def __init__(self, fixes: bool = True) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._fixes = fixes
        self._at_site = False

    @contextmanager
    def active(self) -> Iterator[FixedNoise]:
        """Around runs of the programs; outside all handlers of these."""
        with self, _Draws(self):
            yield self

    def drew(self, func: Any, args: tuple[Any, ...], drawn: Any) -> object:
        """Return what is used instead of random numbers."""
        if self._at_site:
            return drawn
        size = sum(v.numel() for v in tree_leaves(drawn) if isinstance(v, Tensor))
        self.draws.append(Draw(size, program_line(sys._getframe(2))))
        name = func._schema.name.split("::")[-1].rstrip("_")
        return _constant(name, args, drawn) if self._fixes else drawn

    # This handler is the outermost one: between the two there is only what Pyro does by itself.
    def _process_message(self, msg: Message) -> None:
        self._at_site = True

    def _postprocess_message(self, msg: Message) -> None:
        self._at_site = False


class _Draws(TorchDispatchMode):
    """Sees random numbers below ``vmap``: with the dims of all particles."""

    def __init__(self, noise: FixedNoise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        own = kwargs is not None and kwargs.get("generator") is not None
        if torch.Tag.nondeterministic_seeded in func.tags and not own:
            return self._noise.drew(func, args, found)
        return found


def _constant(name: str, args: tuple[Any, ...], drawn: Any) -> object:
    """Constants in the shape of what an operation has drawn; unknown operations keep theirs."""
    if name == "native_dropout":
        return args[0] / (1 - args[1]), drawn[1].fill_(True)
    if name == "bernoulli":
        return drawn.fill_(1)
    if name in ("rand", "rand_like", "uniform"):
        low, high = args[1:3] if name == "uniform" and len(args) > 2 else (0.0, 1.0)
        return drawn.fill_(low + 0.3 * (high - low))
    if name in ("randn", "randn_like"):
        return drawn.fill_(0.3)
    if name in ("normal", "normal_functional"):
        # Of a tensor in place, or of means and standard deviations.
        mean, std = args[1:3] if len(args) > 2 else args if len(args) == 2 else (0.0, 1.0)
        return drawn.copy_(torch.as_tensor(mean + 0.3 * std))
    if name == "randperm":
        return drawn.copy_(torch.arange(len(drawn)))
    if name in ("randint", "randint_like", "random"):
        return drawn.fill_(drawn.min())
    if name in ("exponential", "geometric", "log_normal", "cauchy"):
        return drawn.fill_(1)
    return args[0].clone() if name == "_standard_gamma" else drawn
