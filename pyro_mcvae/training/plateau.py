"""Detect that a bound has reached a plateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pyro_mcvae.ops.checks import check_count, check_positive

# Batches per quarter, whose means give the error even for correlated noise.
_BATCHES = 10
# The margin in standard errors, and the growth of the run between two tests.
_ERRORS, _GROWTH = 3.0, 1.05


class PlateauDetector:
    r"""
    Detects when a noisy loss has levelled off, for loops that then change the loss, or stop.

    After t steps it compares the mean loss of the last quarter of the steps with that of the
    quarter before,

    .. math::
        d = \bar L_{(t/2, 3t/4]} - \bar L_{(3t/4, t]}, \qquad
        d + 3 \operatorname{se}(d) < \text{tolerance} \cdot \operatorname{sd}(L) ,

    where sd is the spread of single losses in the last quarter, and the error of d is estimated
    from ten batch means of each quarter. Then a third more training, at the present pace, improves
    the loss by less than this fraction of the noise. It needs about
    :math:`70 / \text{tolerance}^2` steps, and, after the curve is flat, about as many steps as
    before. Its tests have measurements on simulated curves.

    :param float tolerance: in standard deviations of one step's loss.
    :param int min_steps: the least number of steps before the first test.
    :ivar improvement: d of the last test, in the units of the loss; NaN before the first.
    :ivar standard_error: of ``improvement``.
    :ivar levelled_off: the last result of :meth:`step`.
    :ivar num_steps: the number of finite losses.
    :raises ValueError: for a tolerance that is not positive.

    ``save_checkpoint`` accepts it as a part. Example, change the loss on a plateau of the ELBO::

        >>> plateau = PlateauDetector()
        >>> for step in range(5000):  # doctest: +SKIP
        ...     if plateau.step(svi.step(x)):
        ...         break
        >>> svi = SVI(model, guide, optim, loss=TraceIWAE_ELBO(10))  # doctest: +SKIP
        >>> falling = PlateauDetector()
        >>> any(falling.step(1000.0 - t + torch.randn(()).item()) for t in range(1000))
        False
    """

    def __init__(self, tolerance: float = 0.3, min_steps: int = 400) -> None:
        self.tolerance = check_positive("tolerance", tolerance)
        self.min_steps = max(check_count("min_steps", min_steps), 8 * _BATCHES)
        self.reset()

    def reset(self) -> None:
        """Reset the state, for another loss."""
        self.levelled_off = False
        self.improvement = self.standard_error = math.nan
        self._losses: list[float] = []
        self._next = self.min_steps

    @property
    def num_steps(self) -> int:
        return len(self._losses)

    def step(self, loss: float) -> bool:
        """
        Add a loss.

        :param loss: the result of ``SVI.step``, or a scalar tensor.
        :returns: whether it has levelled off; remains True until :meth:`reset`.
        """
        value = float(loss)
        if math.isfinite(value):
            self._losses.append(value)
        if not self.levelled_off and self.num_steps >= self._next:
            self._next = math.ceil(self.num_steps * _GROWTH)
            self.levelled_off = self._test()
        return self.levelled_off

    def _test(self) -> bool:
        size = self.num_steps // (4 * _BATCHES)
        recent = torch.tensor(self._losses[-2 * _BATCHES * size :], dtype=torch.float64)
        means = recent.reshape(2, _BATCHES, size).mean(-1)
        before, after = means.mean(-1)
        error = (means.var(-1).sum() / _BATCHES).sqrt()
        spread = recent[_BATCHES * size :].std()
        # For losses without noise, do not count rounding as an improvement.
        spread = torch.maximum(spread, 1e-6 * after.abs())
        self.improvement, self.standard_error = float(before - after), float(error)
        return bool(before - after + _ERRORS * error < self.tolerance * spread)

    def state_dict(self) -> dict[str, object]:
        """Return the state for :func:`save_checkpoint`."""
        return {
            "losses": torch.tensor(self._losses, dtype=torch.float64),
            "next": self._next,
            "levelled_off": self.levelled_off,
            "last": [self.improvement, self.standard_error],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state returned by :meth:`state_dict`."""
        self._losses = state["losses"].tolist()
        self._next, self.levelled_off = state["next"], state["levelled_off"]
        self.improvement, self.standard_error = state["last"]
