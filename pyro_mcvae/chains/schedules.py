"""Annealing schedules: inverse temperatures from 0, the guide, to 1, the posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.parameters import no_value
from pyro_mcvae.ops.checks import FixedOptions, check_count


class Schedule(FixedOptions, nn.Module, ABC):
    r"""
    Base class: a module that returns :math:`\beta`, shape ``[num_steps + 1]``.

    A custom schedule implements :meth:`forward` and calls ``super().__init__(num_steps)``. Its
    parameters are trained with the bound. The first value is always exactly 0 and the last exactly
    1, because otherwise the weights would not estimate the evidence. The values between may be any
    numbers.

    :param int num_steps: K, the number of annealing steps.
    :raises ValueError: if ``num_steps`` is not an int of at least 1.

    Example::

        >>> import torch
        >>> from pyro_mcvae import Schedule
        >>> class GeometricSchedule(Schedule):
        ...     def forward(self):
        ...         return torch.cat([torch.zeros(1), 2.0 ** -torch.arange(self.num_steps).flip(0)])
        >>> GeometricSchedule(3)()
        tensor([0.0000, 0.2500, 0.5000, 1.0000])
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        num_steps = check_count("num_steps", num_steps)
        self.num_steps = num_steps

    @abstractmethod
    def forward(self) -> Tensor:
        """Return inverse temperatures that increase from 0 to 1; both ends are ignored."""

    def __call__(self) -> Tensor:
        """
        Return the inverse temperatures, with ends of exactly 0 and 1.

        :raises ValueError: if the result is not a tensor of shape ``[num_steps + 1]``.
        """
        betas = super().__call__()
        if not isinstance(betas, Tensor) or tuple(betas.shape) != (self.num_steps + 1,):
            raise no_value(self, betas, f"of shape [num_steps + 1] = [{self.num_steps + 1}]")
        inner = betas[1:-1]
        return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])


class LinearSchedule(Schedule):
    r"""
    :math:`\beta_k = k / K`.

    :param int num_steps: the number of steps, K.
    :raises ValueError: if ``num_steps`` is not an int of at least 1.

    Example::

        >>> from pyro_mcvae import LinearSchedule
        >>> LinearSchedule(4)()
        tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """

    betas: Tensor

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self.register_buffer("betas", torch.linspace(0.0, 1.0, num_steps + 1), persistent=False)

    def forward(self) -> Tensor:
        return self.betas


class FixedSchedule(Schedule):
    """
    A schedule of given inverse temperatures.

    :param ~torch.Tensor betas: increasing from 0 to 1, shape ``[K + 1]``.
    :raises ValueError: if they do not increase from 0 to 1.

    Example::

        >>> FixedSchedule(torch.tensor([0.0, 0.1, 0.4, 1.0])).num_steps
        3
    """

    betas: Tensor

    def __init__(self, betas: Tensor) -> None:
        betas = torch.as_tensor(betas)
        check_betas(betas)
        super().__init__(len(betas) - 1)
        self.register_buffer("betas", betas.detach().clone())

    def forward(self) -> Tensor:
        return self.betas


class SigmoidSchedule(Schedule):
    r"""
    A schedule that is denser at both ends, where the densities change fastest [1]:

    .. math::
        \beta_k = \frac{s_k - s_0}{s_K - s_0}, \qquad
        s_k = \text{sigmoid}\big(\delta (2 k / K - 1)\big),

    with a slope :math:`\delta > 0` that is learned with the bound.

    :param int num_steps: the number of steps, K.
    :param float slope: the initial :math:`\delta`; towards 0 the schedule becomes linear.
    :param bool learn: False keeps the slope.
    :raises ValueError: if ``slope`` is not positive.

    [1] Grosse, Ghahramani, Adams (2015), *Sandwiching the Marginal Likelihood Using Bidirectional
    Monte Carlo*.

    Example::

        >>> from pyro_mcvae import SigmoidSchedule
        >>> SigmoidSchedule(4, slope=4.0)()
        tensor([0.0000, 0.1050, 0.5000, 0.8950, 1.0000], grad_fn=<CatBackward0>)
    """

    def __init__(self, num_steps: int, *, slope: float = 1.0, learn: bool = True) -> None:
        super().__init__(num_steps)
        if not slope > 0:
            raise ValueError(f"slope must be positive, got {slope!r}")
        log_slope = torch.as_tensor(float(slope)).log()
        self.learn = learn
        # The logarithm keeps the slope positive under any optimizer.
        self.log_slope = nn.Parameter(log_slope, requires_grad=learn)

    @property
    def slope(self) -> Tensor:
        """Return the present slope, a scalar."""
        return self.log_slope.exp()

    def forward(self) -> Tensor:
        at = torch.linspace(-1.0, 1.0, self.num_steps + 1).to(self.log_slope)
        s = torch.sigmoid(self.slope * at)
        return (s - s[0]) / (s[-1] - s[0])


class LearnedSchedule(Schedule):
    r"""
    K free increments on the simplex, started at the linear schedule and learned with the bound.

    .. math:: \beta_k = \sum_{j \le k} \text{softmax}(a)_j .

    :param int num_steps: the number of steps, K.
    :raises ValueError: if ``num_steps`` is not an int of at least 1.

    Example::

        >>> from pyro_mcvae import LearnedSchedule
        >>> LearnedSchedule(2)()
        tensor([0.0000, 0.5000, 1.0000], grad_fn=<CatBackward0>)
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self.logits = nn.Parameter(torch.zeros(num_steps))

    def forward(self) -> Tensor:
        return nn.functional.pad(self.logits.softmax(0).cumsum(0), (1, 0))


def check_betas(betas: Tensor) -> None:
    """Raise a ValueError unless the values increase from 0 to 1."""
    values = [float(b) for b in betas.detach().flatten()]
    increasing = all(a < b for a, b in pairwise(values))
    # A sum of increments ends at 1 only up to rounding.
    ends = betas.dim() == 1 and len(values) > 1 and values[0] == 0 and abs(values[-1] - 1) < 1e-5
    if not (ends and increasing):
        raise ValueError(
            f"a schedule must increase from 0 to 1, in a tensor of shape [num_steps + 1], got "
            f"{betas.detach().tolist()}"
        )


def as_schedule(
    schedule: Schedule | Tensor | int | None,
    num_steps: int | None = None,
    default: Callable[[int], Schedule] = LinearSchedule,
) -> Schedule:
    """
    Convert a tensor of inverse temperatures, or a number of linear steps, to a schedule. None
    becomes the default schedule of ``num_steps`` steps (5 if that is None too).

    :raises ValueError: unless it increases from 0 to 1, in ``num_steps`` steps if that is given.
    """
    if schedule is None:
        return default(5 if num_steps is None else num_steps)
    if isinstance(schedule, int):
        schedule = LinearSchedule(schedule)
    if not isinstance(schedule, Schedule):
        numbers = isinstance(schedule, list | tuple) and all(
            isinstance(b, int | float) for b in schedule
        )
        if not numbers and not isinstance(schedule, Tensor):
            raise ValueError(
                f"schedule must be a Schedule such as LinearSchedule(10), a number of steps, or a "
                f"tensor that increases from 0 to 1, got {schedule!r}"
            )
        schedule = FixedSchedule(torch.as_tensor(schedule))
    schedule()  # raises for another shape
    check_betas(schedule.forward())
    if num_steps is not None and num_steps != schedule.num_steps:
        raise ValueError(
            f"num_steps={num_steps}, but the schedule has {schedule.num_steps} steps: leave "
            f"num_steps out"
        )
    return schedule
