"""Step sizes of Markov kernels: fixed, adapting to an acceptance rate, or learned."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

__all__ = ["AdaptiveStepSize", "FixedStepSize", "LearnedStepSize", "StepSize", "as_step_size"]


class StepSize(nn.Module, ABC):
    """
    Base class: a module whose call returns the present step size.

    One value serves every coordinate, or there is one per coordinate, shape ``[D]``.
    """

    @abstractmethod
    def forward(self) -> Tensor:
        """The present step size, a scalar or of shape ``[D]``."""

    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        r"""
        Learn from one training step; does nothing unless a subclass says so.

        :param ~torch.Tensor acceptance: the mean acceptance probability, a scalar.
        :param ~torch.Tensor gradient: :math:`\nabla \log p(x, z)` at the chains' positions, shape
            ``[*batch, D]``, where it is at hand.
        """


class FixedStepSize(StepSize):
    """
    A step size that stays as it is.

    :param value: positive, a number or a tensor of shape ``[D]``.
    :raises ValueError: if it is not positive and finite.

    Example::

        >>> FixedStepSize(0.1)()
        tensor(0.1000)
    """

    value: Tensor

    def __init__(self, value: float | Tensor) -> None:
        super().__init__()
        self.register_buffer("value", _positive("step_size", value))

    def forward(self) -> Tensor:
        return self.value


class LearnedStepSize(StepSize):
    """
    A step size that is trained with the bound, by its gradient.

    In the package's benchmark (``tests/benchmarks/chain_step_size.py``) it reaches, without a
    target to choose, about the tightest bound of all target acceptances. It needs the full
    gradient.

    :param initial: positive, a number or a tensor of shape ``[D]``. Begin small: long steps under a
        guide that fits nothing yet can ruin a model for good.
    :raises ValueError: if it is not positive and finite.

    Example::

        >>> LearnedStepSize(0.1)()
        tensor(0.1000, grad_fn=<ExpBackward0>)
    """

    def __init__(self, initial: float | Tensor) -> None:
        super().__init__()
        # The logarithm keeps it positive under any optimizer.
        self.log_value = nn.Parameter(_positive("initial", initial).log())

    def forward(self) -> Tensor:
        return self.log_value.exp()


class AdaptiveStepSize(StepSize):
    r"""
    A step size that rises above a target acceptance and falls below it.

    After each training step, with a the mean acceptance probability and :math:`a^*` the target,

    .. math::
        \log \eta \mathrel{+}= \text{rate} \cdot
            \text{clip}\Big(\frac{a - a^*}{1 - a^*}, -2, 1\Big).

    For unadjusted kernels a is the acceptance that the moves would have had, in the geometric mean:
    each move costs the bound about :math:`-\log` of it, so a few lost chains weigh as much there as
    they do in the bound. With ``per_coordinate`` the rule drives a base value :math:`\eta_0`, and
    each coordinate follows the spread of its gradient (Thin et al. [1], eq. 27):

    .. math::
        \eta_i \leftarrow 0.9\, \eta_i
            + 0.1\, \eta_0 \,/\, \text{std}[\partial \log p(x, z) / \partial z_i].

    In a distributed run (:mod:`torch.distributed`) objectives adapt it by the acceptance and the
    gradients of all ranks, so that every rank keeps the same step size.

    One update changes a step size by a bounded factor, values stay within ``bounds``, a step whose
    acceptance is not finite changes nothing, and a gradient that is not finite leaves its
    coordinate. ``eval()`` freezes it, by itself or as a part of the objective; the present value is
    part of ``state_dict()``.

    :param float initial: where it starts; better too small than too large. None: the kernel's own.
    :param float target_acceptance: between 0 and 1. None: the kernel's own.
    :param bool per_coordinate: one step size per coordinate. None: only for chains in ``"latent"``
        coordinates, which the guide has not whitened.
    :param float rate: the largest relative increase per update.
    :param bounds: the least and the largest value.
    :raises ValueError: for values outside of these ranges.

    [1] Thin et al. (2021), *Monte Carlo Variational Auto-Encoders*.

    Example::

        >>> step_size = AdaptiveStepSize(0.1, target_acceptance=0.8)
        >>> step_size.update(torch.tensor(1.0))
        >>> step_size()
        tensor(0.1105)
    """

    value: Tensor
    base: Tensor

    def __init__(
        self,
        initial: float | None = None,
        target_acceptance: float | None = None,
        per_coordinate: bool | None = None,
        rate: float = 0.1,
        bounds: tuple[float, float] = (1e-6, 1e3),
    ) -> None:
        super().__init__()
        if target_acceptance is not None and not 0 < target_acceptance < 1:
            raise ValueError(
                f"target_acceptance must lie between 0 and 1, got {target_acceptance!r}"
            )
        if not 0 < rate < 1:
            raise ValueError(f"rate must lie between 0 and 1, got {rate!r}")
        if not 0 < bounds[0] < bounds[1] < math.inf:
            raise ValueError(f"bounds must be two increasing positive numbers, got {bounds!r}")
        self.target_acceptance = target_acceptance
        self.per_coordinate = per_coordinate
        self.rate = rate
        self.bounds = bounds
        start = torch.tensor(math.nan) if initial is None else _positive("initial", initial)
        self.register_buffer("value", start)
        self.register_buffer("base", start.clone())

    def complete(self, initial: float, target_acceptance: float) -> None:
        """Fill in what was left to the kernel."""
        if self.target_acceptance is None:
            self.target_acceptance = target_acceptance
        if bool(self.base.isnan()):
            self.value.fill_(initial)
            self.base.fill_(initial)

    def forward(self) -> Tensor:
        return self.value

    @torch.no_grad()
    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        if not self.training:
            return
        target = 0.8 if self.target_acceptance is None else self.target_acceptance
        # An objective that was not moved along adapts where the model is.
        self.base, self.value = self.base.to(acceptance.device), self.value.to(acceptance.device)
        usable = acceptance.isfinite()
        change = ((acceptance - target) / (1 - target)).clamp(-2.0, 1.0)
        change = torch.where(usable, change, 0.0)
        base = (self.base * (self.rate * change).exp()).clamp(*self.bounds).to(self.base.dtype)
        if not self.per_coordinate or gradient is None:
            self.base, self.value = base, base.clone()
            return
        flat = gradient.reshape(-1, gradient.shape[-1])
        spread = flat.std(0, correction=0)
        value = self.value.expand_as(spread)
        # Beyond the bounds of one step lies no information: a constant gradient has spread zero.
        aim = (base / spread.clamp_min(torch.finfo(spread.dtype).tiny)).clamp(*self.bounds)
        aim = torch.minimum(torch.maximum(aim, value / 2), value * 2)
        usable = usable & spread.isfinite()
        mixed = torch.where(usable, 0.9 * value + 0.1 * aim, value)
        self.base, self.value = base, mixed.clamp(*self.bounds).to(base.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        # A saved step size may have one entry per coordinate where this one has not begun to.
        saved = state_dict.get(prefix + "value")
        if saved is not None and saved.shape != self.value.shape and saved.dim() <= 1:
            self.value = self.value.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def as_step_size(value: float | Tensor | StepSize | None) -> StepSize:
    """A number or tensor as a fixed step size, None as an adaptive one."""
    if value is None:
        return AdaptiveStepSize()
    return value if isinstance(value, StepSize) else FixedStepSize(value)


def _positive(name: str, value: float | Tensor) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise ValueError(f"{name} must be a positive number or a StepSize, got {value!r}")
    tensor = torch.as_tensor(
        value, dtype=None if isinstance(value, Tensor) else torch.get_default_dtype()
    )
    if tensor.dim() > 1 or not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise ValueError(
            f"{name} must be positive and finite, one number or one per coordinate, got {value!r}"
        )
    return tensor.detach().clone()
