"""What a step was called with, to tell whether the next one is of the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs.executed_code import ExecutedCode
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.outside_values import Dependencies


@dataclass
class Call:
    """
    The programs of a step, its arguments, and what the programs read besides these.

    :param Programs programs: of the step.
    :param executed: the functions that the step has executed.
    """

    programs: Programs
    executed: ExecutedCode

    def __post_init__(self) -> None:
        self._leaves = _leaves(self.programs)
        roots = (*self.programs.pair, *self._leaves)
        self._read = Dependencies.of(*roots, executed=self.executed, contents=True)

    def is_same(self, programs: Programs) -> bool:
        """Whether another step has the same programs, on data that have not changed."""
        if self._read.refused or programs.pair != self.programs.pair:
            return False
        leaves = _leaves(programs)
        same = len(leaves) == len(self._leaves) and all(map(_same_leaf, leaves, self._leaves))
        return same and self._read.changed() is None


def _leaves(programs: Programs) -> list[object]:
    leaves: list[object] = tree_leaves((programs.args, programs.kwargs))
    return leaves


def _same_leaf(a: object, b: object) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b
