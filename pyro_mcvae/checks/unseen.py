"""
What programs do beside their sites, which particles in one run would share.

Noise that is drawn apart from sites (``nn.Dropout``, ``torch.randn``) is each particle's own in a
loop, and so is a decision by a latent's value (``if rate.max() > 9``). Densities do not show that:
of one draw for all particles each weight is right, but they are not independent, and a decision for
all of them is mostly the right one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs.batch_norm import batch_size
from pyro_mcvae.programs.source_lines import in_assertion, is_core, program_line
from pyro_mcvae.programs.types import Message, TorchFunction
from pyro_mcvae.structure.tracking import READS, marks_of, unmarked

__all__ = ["Batch", "Read", "UnseenDraw", "Watch", "shared_draws"]

_FINITE: set[object] = {
    getattr(m, n) for m in (torch, Tensor) for n in ("isfinite", "isinf", "isnan")
}


class UnseenDraw(NamedTuple):
    """
    Random numbers that a program draws apart from its sites.

    :ivar size: how many.
    :ivar line: where.
    """

    size: int
    line: str


class Read(NamedTuple):
    """
    A tensor of which the user's code makes a Python number.

    :ivar line: where.
    :ivar sites: whose draws it was computed from, where these are tracked.
    """

    line: str
    sites: frozenset[str]


class Batch(NamedTuple):
    """
    What is normalised by its own statistics.

    :ivar size: of how many numbers.
    :ivar line: where.
    """

    size: int
    line: str


class Watch(Messenger):
    """
    Watches programs that are run inside of :meth:`watching`.

    :ivar draws: what was drawn apart from sites.
    :ivar reads: the values that its Python code has looked at.
    :ivar batches: what batch normalisation has taken for a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[UnseenDraw] = []
        self.reads: list[Read] = []
        self.batches: list[Batch] = []
        self._at_site = False

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        with self.reading(), _Draws(self):
            yield self

    @contextmanager
    def reading(self) -> Iterator[Watch]:
        """Reads alone: torch 2.5 makes no tracked tensors while draws are watched."""
        with self, _Reads(self):
            yield self

    def drew(self, values: object) -> None:
        """Note random numbers, unless they are the draw of a site, or a parameter's beginning."""
        if self._at_site:
            return
        size = sum(v.numel() for v in tree_leaves(values) if isinstance(v, Tensor))
        self.draws.append(UnseenDraw(size, program_line(sys._getframe(2))))

    # This handler is the outermost one: between the two there is only what Pyro does by itself.
    def _process_message(self, msg: Message) -> None:
        self._at_site = True

    def _postprocess_message(self, msg: Message) -> None:
        self._at_site = False


class _Draws(TorchDispatchMode):
    """Sees random numbers below ``vmap``: with the dims of all particles."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._watch.drew(found)
        return found


class _Reads(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func in _FINITE:
            # Whether all particles are finite is whether each is, and a program stops otherwise.
            args = unmarked(args)
        frame = sys._getframe(1)
        if func in READS and not (is_core(frame.f_code) or in_assertion(frame)):
            self._watch.reads.append(Read(program_line(frame), marks_of(args)))
        if func is batch_norm and (size := batch_size(args, kwargs or {})):
            self._watch.batches.append(Batch(size, program_line(frame)))
        return func(*args, **(kwargs or {}))


def shared_draws(
    together: Sequence[UnseenDraw], run_alone: Callable[[], Sequence[UnseenDraw]]
) -> list[UnseenDraw]:
    """
    What several particles draw together that one of them draws as well.

    :param together: drawn in one run of several particles.
    :param run_alone: runs one particle, if that is needed.
    """
    if not together:
        return []
    alone = run_alone()
    if len(alone) != len(together):
        return [*together]  # which of them are whose is not known
    return [t for t, a in zip(together, alone, strict=True) if t.size == a.size]
