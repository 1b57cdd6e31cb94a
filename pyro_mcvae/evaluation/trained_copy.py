"""What came of one loss of a comparison."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TypeAlias

from pyro_mcvae.evaluation.evidence import LogEvidence

__all__ = ["Curve", "TrainedCopy"]

Curve: TypeAlias = dict[int, tuple[float, LogEvidence]]


@dataclass(frozen=True)
class TrainedCopy:
    """
    What came of one loss, made by :func:`compare`, whose example shows some.

    :ivar bounds: its own bound at every step, in nats per weight.
    :ivar seconds: of training.
    :ivar times: of each step, in seconds.
    :ivar curve: by step, the seconds until then and the :class:`LogEvidence` of that moment, by
        importance sampling with few particles.
    :ivar guide: the :class:`LogEvidence` by importance sampling after training.
    :ivar evidence: that by chains, if they were asked for; else the same.
    :ivar failed: what stopped it, if anything; its evidence is then the last one of the curve.
    """

    bounds: list[float]
    seconds: float
    times: list[float]
    curve: Curve
    guide: LogEvidence
    evidence: LogEvidence
    failed: str = ""

    @property
    def last_bound(self) -> float:
        """The mean of its own bound over the last tenth of the steps."""
        last = self.bounds[-max(1, len(self.bounds) // 10) :]
        return sum(last) / len(last) if last else math.nan

    @property
    def seconds_per_step(self) -> float:
        """The median, so that what the first steps alone pay for does not count."""
        return statistics.median(self.times) if self.times else math.nan
