"""What every step size answers; and one that stays as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.transitions import no_value


class StepSize(nn.Module, ABC):
    """
    Base class: a module whose call returns the present step size of a transition.

    One value serves every coordinate, or there is one per coordinate, shape ``[D]``.
    :class:`LearnedStepSize` has an example.

    :ivar num_transitions: for how many transitions there is a value each; None for one value that
        serves them all.

    Example::

        >>> class Halving(StepSize):
        ...     num_transitions = 3
        ...
        ...     def forward(self, transition=-1):
        ...         return torch.tensor(0.4) / 2 ** (transition % 3)
        >>> Halving().values()
        tensor([0.4000, 0.2000, 0.1000])
    """

    num_transitions: int | None = None

    @abstractmethod
    def forward(self, transition: int = -1) -> Tensor:
        """
        The present step size, a scalar or of shape ``[D]``.

        :param int transition: of which transition of a chain, from 0; the last by default, which is
            the one that moves with respect to the posterior itself.
        """

    def __call__(self, *transition: int) -> Tensor:
        """
        The present step size of a transition, the last by default.

        :raises ValueError: for what is no tensor without dims, or of shape ``[D]``.
        """
        value = super().__call__(*transition)
        if isinstance(value, Tensor) and value.dim() <= 1:
            return value
        raise no_value(self, value, "without dims or of shape [D]")

    def values(self) -> Tensor:
        """
        The present step sizes: what a call returns, ``[num_transitions, ...]`` where there is one
        for each transition.
        """
        if self.num_transitions is None:
            return self()
        return torch.stack([self(k) for k in range(self.num_transitions)])

    def begin(self, gradient: Tensor, learns: bool = True) -> None:
        r"""
        See the draws that chains begin with; does nothing unless a subclass says so.

        :param ~torch.Tensor gradient: :math:`\nabla \log q(z)` at the draws, ``[*batch, D]``.
        :param bool learns: whether they are of a training step, to learn from.
        """

    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        r"""
        Learn from one training step; does nothing unless a subclass says so.

        :param ~torch.Tensor acceptance: the mean acceptance probability, a scalar.
        :param ~torch.Tensor gradient: :math:`\nabla \log p(x, z)` at the chains' positions, shape
            ``[*batch, D]``, where it is at hand.
        """

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._buffers:  # which training changes in place
            destination[prefix + name] = destination[prefix + name].clone()


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
        self.register_buffer("value", positive("step_size", value))

    def forward(self, transition: int = -1) -> Tensor:
        return self.value


def positive(name: str, value: float | Tensor) -> Tensor:
    """
    A copy, as a tensor.

    :raises ValueError: for what is not positive and finite, or has more dims than one.
    """
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
