"""The numbers of a report, and what they say of the guide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.evaluation.escalation import is_sure, settled
from pyro_mcvae.evaluation.evidence import LogEvidence, has_light_tail
from pyro_mcvae.evaluation.trained_loss import TrainedLoss
from pyro_mcvae.ops.checks import check_count

__all__ = ["Findings"]


@dataclass(frozen=True)
class Findings:
    """What a :class:`Report` says in words and figures; the fields are described there."""

    evidence: LogEvidence
    guide: LogEvidence
    discrete: tuple[str, ...]
    prior: LogEvidence | str = "nobody asked"
    chains: tuple[LogEvidence, ...] = ()
    no_chains: str = ""
    trained: TrainedLoss | None = None
    states: int | None = None

    @property
    def bound(self) -> Tensor:
        """The ELBO."""
        return self.guide.bound

    @property
    def gap(self) -> Tensor:
        """Log evidence minus ELBO, in nats: an estimate of KL(guide || posterior)."""
        return self.evidence.log_evidence - self.bound

    @property
    def missed(self) -> Tensor:
        r"""
        Where chains find more of the posterior than the guide's weights, beyond their errors,
        though :math:`\hat k` is good: the guide misses a part of it. False without chains.
        """
        missed = self._more(self.evidence)[2]
        if self._looked is not None and self._looked.log_evidence.shape == missed.shape:
            missed = missed | (self._more(self._looked)[2] & ~self._looked.unreliable)
        return missed

    @property
    def misses(self) -> bool:
        """Whether the guide misses a part of the posterior, of some datum or of all together."""
        if bool(self.missed.any()):
            return True
        if self._looked is None:
            return False
        looked, guide = self._looked, self.guide
        if looked.log_evidence.shape == guide.log_evidence.shape:
            more, error, _ = self._more(looked)
            told = ~looked.unreliable & self._good
            more, error = (more * told).sum(), (error * told).square().sum().sqrt()
        else:
            more = looked.total - guide.total
            error = torch.hypot(looked.total_standard_error, guide.total_standard_error)
            more = more * (~looked.unreliable.any() & self._good.all())
        return bool((more > 0.1) & (more > 3 * error))

    def _more(self, found: LogEvidence) -> tuple[Tensor, Tensor, Tensor]:
        """How much more was found than by the guide, the error, and where that is telling."""
        more = found.log_evidence - self.guide.log_evidence
        error = torch.hypot(found.standard_error, self.guide.standard_error)
        return more, error, (more > 0.1) & (more > 4 * error) & self._good

    @property
    def _good(self) -> Tensor:
        """
        Where the guide's weights would show what its draws reach: heavier tails find less, and
        where many are heavy, the guide is too narrow, and some k-hats are good by chance.
        """
        few = self.guide.unreliable.double().mean() <= 0.5
        return has_light_tail(self.guide, 0.7) & few

    @property
    def _looked(self) -> LogEvidence | None:
        """What chains from the prior found, if most weights can be relied on."""
        found = self.prior
        if isinstance(found, str) or float(found.unreliable.double().mean()) > 0.5:
            return None
        return found

    def worst(self, count: int = 5) -> list[tuple[tuple[int, ...], float]]:
        """The data with the largest gaps: their indices in the plates, and the gaps in nats."""
        count = check_count("count", count)
        flat = self.gap.flatten()
        found = flat.topk(min(count, len(flat)))
        indices = [
            tuple(int(i) for i in torch.unravel_index(at, self.gap.shape)) for at in found.indices
        ]
        return list(zip(indices, found.values.tolist(), strict=True))

    @property
    def trusted(self) -> bool:
        r"""
        Whether the evidence is known within about its errors: for all but a twentieth of the
        weights, :math:`\hat k` plus two of its errors is at most 0.5, as ``LogEvidence.doubtful``
        says; or chains four times as long find no more.
        """
        if self.misses:
            return False
        if is_sure(self.evidence):
            return True
        return len(self.chains) > 1 and settled(*self.chains[-2:])

    @property
    def looked(self) -> bool:
        """Whether chains from the prior could tell of modes that the guide does not draw."""
        return self._looked is not None
