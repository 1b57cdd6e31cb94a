"""Python code of programs that reads the values of tensors, or normalises by a batch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

from pyro_mcvae.programs.batch_norm import batch_size
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.probing import probing
from pyro_mcvae.programs.source_lines import in_assertion, is_core, program_line
from pyro_mcvae.programs.types import TorchFunction
from pyro_mcvae.structure.tracking import READS, TrackDraws, marks_of, unmarked

_FINITE: set[object] = {
    getattr(m, n) for m in (torch, Tensor) for n in ("isfinite", "isinf", "isnan")
}


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


class Reads(TorchFunctionMode):
    """
    Records what programs read and normalise.

    :ivar reads: the values that Python code has read.
    :ivar batches: what batch normalisation has taken for a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.batches: list[Batch] = []

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
            self.reads.append(Read(program_line(frame), marks_of(args)))
        if func is batch_norm and (size := batch_size(args, kwargs or {})):
            self.batches.append(Batch(size, program_line(frame)))
        return func(*args, **(kwargs or {}))


def reads_of_latents(
    programs: Programs, subsamples: Minibatch, latents: frozenset[str], reads: list[Read]
) -> list[Read]:
    """
    Find the reads of values that depend on latents, in one more run with draws tracked.

    Where tensors cannot be tracked, every read may depend on all latents.

    :param latents: the random sites.
    :param reads: what a run without tracking has read.
    """
    if not reads:
        return []
    try:
        with probing(programs), Reads() as found, TrackDraws(latents):
            run_pair(programs, Substitutes(Minibatch(subsamples)))
    except Exception:  # tensors that cannot be tracked
        return [Read(reads[0].line, latents)]
    return [r for r in found.reads if r.sites]
