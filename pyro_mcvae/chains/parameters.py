"""Step sizes and momenta of kernels: fixed, adapted or learned, for all transitions or for each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.distributed import mean_over_ranks

# Values that all transitions of a chain share, or separate values for each transition.


def begin_with(start: Tensor, num_transitions: int | None) -> Tensor:
    """Return initial values: the value itself, or one row for each transition."""
    if num_transitions is None:
        return start
    return start.expand(check_count("num_transitions", num_transitions), *start.shape).clone()


def of_transition(
    name: str, values: Tensor, num_transitions: int | None, transition: int
) -> Tensor:
    """
    Return the value of a transition.

    :param int transition: the index, from 0; negative indices count from the last transition.
    :raises ValueError: if the chain has more transitions than there are values.
    """
    if num_transitions is None:
        return values
    if transition >= num_transitions:
        raise _too_few(name, num_transitions, f"transition {transition + 1}")
    return values[transition]


def check_transitions(name: str, num_transitions: int | None, num_steps: int) -> None:
    """
    Check that a step size or momentum has a value for each of ``num_steps`` transitions.

    :raises ValueError: if the numbers differ.
    """
    if num_transitions is not None and num_transitions != num_steps:
        raise _too_few(name, num_transitions, f"num_steps={num_steps}")


def _too_few(name: str, num_transitions: int, required: str) -> ValueError:
    return ValueError(
        f"the {name} has num_transitions={num_transitions} values, one per transition, but the "
        f"chain makes {required}: give it num_transitions=num_steps"
    )


def no_value(part: nn.Module, value: object, wanted: str) -> ValueError:
    """Return the error for a custom module that does not return the required tensor."""
    actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return ValueError(f"{type(part).__name__}.forward must return a tensor {wanted}, got {actual}")


# The base class of step sizes, and a fixed step size.


class StepSize(nn.Module, ABC):
    """
    Base class: a module that returns the current step size of a transition.

    It has one value for all coordinates, or one per coordinate, shape ``[D]``.
    :class:`LearnedStepSize` has an example.

    :ivar num_transitions: the number of transitions with separate values; None for one value for
        all.

    Example::

        >>> import torch
        >>> from pyro_mcvae import StepSize
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
        Return the current step size, a scalar or of shape ``[D]``.

        :param int transition: the index of the transition, from 0. The default is the last one,
            which targets the posterior.
        """

    def __call__(self, *transition: int) -> Tensor:
        """
        Return the current step size of a transition, by default the last one.

        :raises ValueError: if the value is not a scalar tensor or a tensor of shape ``[D]``.
        """
        value = super().__call__(*transition)
        if isinstance(value, Tensor) and value.dim() <= 1:
            return value
        raise no_value(self, value, "without dims or of shape [D]")

    def values(self) -> Tensor:
        """
        Return the current step sizes: a scalar or ``[D]``, or ``[num_transitions, ...]`` if
        transitions have separate values.
        """
        if self.num_transitions is None:
            return self()
        return torch.stack([self(k) for k in range(self.num_transitions)])

    def begin(self, gradient: Tensor, learns: bool = True) -> None:
        r"""
        Adapt to the first draws of the chains. The base class does nothing.

        :param ~torch.Tensor gradient: :math:`\nabla \log q(z)` at the draws, ``[*batch, D]``.
        :param bool learns: whether this is a training step.
        """

    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        r"""
        Adapt after one training step. The base class does nothing.

        :param ~torch.Tensor acceptance: the mean acceptance probability, a scalar.
        :param ~torch.Tensor gradient: :math:`\nabla \log p(x, z)` at the chains' positions, shape
            ``[*batch, D]``, if available.
        """

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Training changes them in place.
        for name in dict(self.named_buffers(recurse=False, remove_duplicate=False)):
            destination[prefix + name] = destination[prefix + name].clone()


class FixedStepSize(StepSize):
    """
    A fixed step size.

    :param value: a positive number, or a tensor of shape ``[D]``.
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
    Copy a positive value to a tensor.

    :raises ValueError: if it is not positive and finite, or has more than one dim.
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


# The learned momentum coefficient.

# At a coefficient of 1, the gradient of sqrt(1 - momentum**2) would be infinite.
_MOST = 0.999


class LearnedMomentum(nn.Module):
    r"""
    The momentum coefficient :math:`\mu` of a chain, which is trained with the bound: one value for
    all transitions, or one for each.

    .. math:: \mu_k = 0.999\, \text{sigmoid}(a_k) .

    It needs the full gradient. The first of several values is not used, because the first momentum
    of a chain is drawn.

    :param initial: a number or a scalar tensor, more than 0 and less than 0.999.
    :param int num_transitions: the ``num_steps`` of the objective, for one value per transition;
        None for one value for all.
    :raises ValueError: for values outside these ranges.

    Example::

        >>> from pyro_mcvae import LearnedMomentum
        >>> LearnedMomentum(0.9)()
        tensor(0.9000, grad_fn=<MulBackward0>)
        >>> LearnedMomentum(0.9, num_transitions=5).logit.shape
        torch.Size([5])
    """

    def __init__(self, initial: float | Tensor = 0.9, num_transitions: int | None = None) -> None:
        super().__init__()
        self.num_transitions = num_transitions
        start = begin_with(_inside(initial), num_transitions)
        self.logit = nn.Parameter((start / _MOST).logit())

    def forward(self, transition: int = -1) -> Tensor:
        """
        Return the momentum coefficient of a transition, a scalar.

        :param int transition: the index of the transition, from 0; the last by default.
        """
        logit = of_transition("momentum", self.logit, self.num_transitions, transition)
        return _MOST * logit.sigmoid()


def _inside(value: float | Tensor) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise ValueError(f"initial must be a number or a tensor, got {value!r}")
    # A number takes the default precision, a tensor keeps its own.
    start = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if start.dim() or not 0 < start < _MOST:
        raise ValueError(f"initial must be more than 0 and less than {_MOST}, got {value!r}")
    return start.detach().clone()


# Step sizes of Markov kernels: fixed, adapting to an acceptance rate, or learned.

_BOUNDS = 1e-6, 1e3


class AdaptiveStepSize(StepSize):
    r"""
    A step size that adapts to a target acceptance rate. It increases while the acceptance rate is
    above the target and decreases while it is below.

    The update after each training step, with the mean acceptance probability a and the target
    :math:`a^*`, is

    .. math::
        \log \eta \mathrel{+}= \text{rate} \cdot
            \text{clip}\Big(\frac{a - a^*}{1 - a^*}, -2, 1\Big).

    For unadjusted kernels a is the geometric mean of the acceptance that a Metropolis correction
    would have. Each move costs about :math:`-\log a` nats of the bound, so diverged chains have the
    same influence as in the bound. With ``per_coordinate`` this rule adapts a base value
    :math:`\eta_0`, and each coordinate adapts to the spread of its gradient (Thin et al. [1],
    eq. 27):

    .. math::
        \eta_i \leftarrow 0.9\, \eta_i
            + 0.1\, \eta_0 \,/\, \text{std}[\partial \log p(x, z) / \partial z_i].

    In a distributed run (:mod:`torch.distributed`) it adapts to the acceptance and the gradients of
    all ranks, so that every rank has the same step size.

    A coordinate without spread, as with a single chain, uses :math:`\eta_0`. The step size of a
    coordinate never increases while the acceptance is below its target. Before the first chain, the
    step sizes of coordinates are divided by the steepness of the guide's log density. This is the
    largest root mean square of the gradient of a coordinate, squared for the :math:`\eta` of
    Langevin moves. If the number of coordinates changes, as with longer sequences, new coordinates
    start from the geometric mean of the last ones.

    One update changes a step size by a bounded factor, and values stay within ``bounds``. Updates
    with a non-finite acceptance are skipped, and so are coordinates with a non-finite gradient.
    ``eval()`` of the step size or of the objective freezes it. The current value is part of
    ``state_dict()``.

    :param float initial: the initial value; a small value is safer than a large one. None uses the
        default of the kernel.
    :param float target_acceptance: between 0 and 1. None uses the default of the kernel.
    :param bool per_coordinate: use one step size per coordinate. None does so only for chains in
        ``"latent"`` coordinates, whose scales differ.
    :param float rate: the largest relative increase per update.
    :param bounds: the smallest and the largest value. None uses 1e-6 and 1e3, but 1e-6 and 2 for
        unadjusted kernels in ``"noise"`` coordinates, because longer leapfrog steps are unstable
        under the base density. (Far from the posterior nearly all moves are accepted, so the
        acceptance does not limit the step size.)
    :raises ValueError: for values outside these ranges.

    [1] Thin et al. (2021), *Monte Carlo Variational Auto-Encoders*.

    Example::

        >>> import torch
        >>> from pyro_mcvae import AdaptiveStepSize
        >>> step_size = AdaptiveStepSize(0.1, target_acceptance=0.8)
        >>> step_size.update(torch.tensor(1.0))
        >>> step_size()
        tensor(0.1105)
    """

    value: Tensor
    base: Tensor
    begun: Tensor

    def __init__(
        self,
        initial: float | None = None,
        *,
        target_acceptance: float | None = None,
        per_coordinate: bool | None = None,
        rate: float = 0.1,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        if target_acceptance is not None and not 0 < target_acceptance < 1:
            raise ValueError(
                f"target_acceptance must be between 0 and 1, got {target_acceptance!r}"
            )
        if not 0 < rate < 1:
            raise ValueError(f"rate must be between 0 and 1, got {rate!r}")
        self._bounded = bounds is not None
        bounds = _BOUNDS if bounds is None else bounds
        if not 0 < bounds[0] < bounds[1] < math.inf:
            raise ValueError(f"bounds must be two increasing positive numbers, got {bounds!r}")
        self.target_acceptance = target_acceptance
        self.per_coordinate = per_coordinate
        self._coordinates: str | None = None
        self.rate = rate
        self.bounds = bounds
        start = torch.tensor(math.nan) if initial is None else positive("initial", initial)
        self.register_buffer("value", start)
        self.register_buffer("base", start.clone())
        self.register_buffer("begun", torch.tensor(False))
        self.power, self.most = 1.0, math.inf
        self._defaults: tuple[float, ...] | None = None
        self._new = True

    def use_coordinates(self, coordinates: str) -> None:
        """
        Set the coordinates of the chains, ``"noise"`` or ``"latent"``.

        :raises ValueError: if ``per_coordinate`` was left out, and another loss has a chain in
            other coordinates.
        """
        if self.per_coordinate is None:
            self._coordinates, self.per_coordinate = coordinates, coordinates == "latent"
        if self._coordinates not in (None, coordinates):
            raise ValueError(
                f"the kernel's step size adapts for a loss with coordinates={self._coordinates!r}, "
                f"and cannot adapt for one with coordinates={coordinates!r}: make a kernel for each"
            )

    def complete(
        self, initial: float, target_acceptance: float, power: float = 1.0, most: float = math.inf
    ) -> None:
        """
        Set the values for which the kernel has defaults.

        :param float power: the power of the width of a density to which the step size is
            proportional.
        :param float most: the largest step size that is stable under a standard normal density.
        :raises ValueError: if a kernel with other defaults has the step size.
        """
        defaults = initial, target_acceptance, power, most
        if self._defaults not in (None, defaults):
            raise ValueError(
                "the step size has the defaults of another kernel, which differ from those of this "
                "kernel: make a step size for each"
            )
        self._defaults = defaults
        self.power = power
        if not self._bounded:
            self.most = most
        if self.target_acceptance is None:
            self.target_acceptance = target_acceptance
        if bool(self.base.isnan()):
            self.value.fill_(initial)
            self.base.fill_(initial)

    def forward(self, transition: int = -1) -> Tensor:
        # A tensor that is updated in place cannot be part of a graph.
        return self.value.clone()

    @torch.no_grad()
    def begin(self, gradient: Tensor, learns: bool = True) -> None:
        if not self.per_coordinate:
            return
        if self.value.dim() and self.value.shape[-1] != gradient.shape[-1]:
            self._assign("value", self.value.log().mean().exp())
        if learns and self.training and self._new:
            self._new = False
            self._fit(gradient)

    def _fit(self, gradient: Tensor) -> None:
        """Divide the step sizes by the steepness of the guide's log density."""
        squares = gradient.reshape(-1, gradient.shape[-1]).square().mean(0)
        # Average over the data of all ranks, which must start with equal values.
        steepness = mean_over_ranks(squares).amax().sqrt()
        steepness = torch.where(steepness.isfinite(), steepness, 1.0).clamp_min(1.0)
        for name in ("base", "value"):
            value = getattr(self, name).to(gradient.device)
            begun = self.begun.to(gradient.device)
            fitted = (value / steepness**self.power).clamp(*self.bounds)
            self._assign(name, torch.where(begun, value, fitted))
        self._assign("begun", torch.ones_like(self.begun))

    @torch.no_grad()
    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        if not self.training:
            return
        target = 0.8 if self.target_acceptance is None else self.target_acceptance
        change = ((acceptance - target) / (1 - target)).clamp(-2.0, 1.0)
        change = torch.where(acceptance.isfinite(), change, 0.0)
        # If the objective was not moved to the device of the model, adapt on that device.
        base = self.base.to(acceptance.device) * (self.rate * change).exp()
        # Coordinates that are not standardized may need steps of any length.
        most = self.bounds[1] if self.per_coordinate else min(self.bounds[1], self.most)
        self._assign("base", base.clamp(self.bounds[0], most))
        value = self._followed(gradient, acceptance, change) if self.per_coordinate else self.base
        self._assign("value", value)

    def _followed(self, gradient: Tensor | None, acceptance: Tensor, change: Tensor) -> Tensor:
        """Return step sizes that follow the spread of a gradient of shape ``[*batch, D]``."""
        if gradient is None:
            return self.base
        gradient = gradient.reshape(-1, gradient.shape[-1])
        spread = gradient.std(0, correction=0)
        value = self.value.to(spread.device).expand_as(spread)
        # A single gradient, or gradients that differ only by rounding, have no spread.
        rounding = 8 * torch.finfo(spread.dtype).eps * gradient.abs().amax(0)
        aim = self.base / torch.where(spread > rounding, spread, 1.0)
        # No step size increases while the acceptance is below the target.
        most = torch.where(change < 0, value, 2 * value)
        aim = torch.minimum(torch.maximum(aim.clamp(*self.bounds), value / 2), most)
        mixed = torch.where(spread.isfinite(), 0.9 * value + 0.1 * aim, value)
        return torch.where(acceptance.isfinite(), mixed.clamp(*self.bounds), self.value)

    def _assign(self, name: str, value: Tensor) -> None:
        """Write in place if shapes allow it, so that a recorded step uses the learned values."""
        old: Tensor = getattr(self, name)
        if old.shape == value.shape and old.device == value.device:
            old.copy_(value)
        else:
            setattr(self, name, value.to(old.dtype, copy=True))

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        # A saved step size may have one entry per coordinate, while this one is still a scalar.
        saved = state_dict.get(prefix + "value")
        if saved is not None and saved.shape != self.value.shape and saved.dim() <= 1:
            self.value = self.value.new_empty(saved.shape)
        self._new = True  # it may have been saved before its first chain
        super()._load_from_state_dict(state_dict, prefix, *args)


class LearnedStepSize(StepSize):
    r"""
    A step size that is trained with the gradient of the bound: one value for all transitions, or
    one for each.

    With one value for each transition, and :class:`LearnedMomentum`, ten transitions on a posterior
    of 200 latents gain 13 nats over the best single step size. It needs the full gradient.

    Long steps with an untrained guide can harm a model. Start with a small step size, or with an
    :class:`AdaptiveStepSize`, which adapts for the first ``warmup`` training steps. Then its value
    is fixed, and factors between 1/10 and 10 are trained,

    .. math:: \eta_k = \eta \exp(a_k), \qquad a_k = 0 \text{ initially}.

    If no optimizer changes the factors, the step size continues to adapt.

    :param initial: positive, a number or a tensor of shape ``[D]``; or an
        :class:`AdaptiveStepSize`.
    :param int num_transitions: one value for each transition, the ``num_steps`` of the
        objective; None for one value for all.
    :param int warmup: training steps for which an :class:`AdaptiveStepSize` adapts.
    :raises ValueError: if a value is not positive and finite, or has another shape.

    Values stay between 1e-6 and 1e3.

    Example::

        >>> from pyro_mcvae import AdaptiveStepSize, LearnedStepSize
        >>> LearnedStepSize(0.1)()
        tensor(0.1000, grad_fn=<ExpBackward0>)
        >>> LearnedStepSize(0.1, num_transitions=3).values()
        tensor([0.1000, 0.1000, 0.1000], grad_fn=<StackBackward0>)
        >>> careful = LearnedStepSize(AdaptiveStepSize(), num_transitions=3)
    """

    left: Tensor

    def __init__(
        self,
        initial: float | Tensor | AdaptiveStepSize,
        num_transitions: int | None = None,
        *,
        warmup: int = 200,
    ) -> None:
        super().__init__()
        warmup = check_count("warmup", warmup)
        self.num_transitions = num_transitions
        self.start = initial if isinstance(initial, AdaptiveStepSize) else None
        value = torch.ones(()) if isinstance(initial, AdaptiveStepSize) else initial
        start = begin_with(positive("initial", value), num_transitions)
        # The logarithm keeps it positive under any optimizer.
        self.log_value = nn.Parameter(start.log())
        if self.start is not None:
            self.register_buffer("left", torch.tensor(warmup))

    @property
    def per_coordinate(self) -> bool:
        """Return whether each coordinate has its own step size, adapted by the gradients."""
        return self.start is not None and bool(self.start.per_coordinate)

    def forward(self, transition: int = -1) -> Tensor:
        log = of_transition("step size", self.log_value, self.num_transitions, transition)
        if self.start is None:
            return _clipped(log, *_BOUNDS).exp()
        factor = _clipped(log, 0.1, 10.0) * (self.left <= 0)
        return self.start(transition) * factor.exp()

    def begin(self, gradient: Tensor, learns: bool = True) -> None:
        if self.start is not None:
            self.start.begin(gradient, learns)

    @torch.no_grad()
    def update(self, acceptance: Tensor, gradient: Tensor | None = None) -> None:
        if self.start is None or not self.training:
            return
        # An acceptance that is not finite changes nothing.
        ended = ((self.left <= 0) & (self.log_value != 0).any()).to(acceptance.device)
        self.start.update(torch.where(ended, math.nan, acceptance), gradient)
        self.left.sub_(1).clamp_(min=0)


def _clipped(log: Tensor, least: float, most: float) -> Tensor:
    """Limit a logarithm to bounds, with a gradient outside them that leads back."""
    return log + (log.clamp(math.log(least), math.log(most)) - log).detach()


def as_step_size(value: float | Tensor | StepSize | None) -> StepSize:
    """Convert to a step size: numbers and tensors are fixed, None is adaptive."""
    if value is None:
        return AdaptiveStepSize()
    return value if isinstance(value, StepSize) else FixedStepSize(value)
