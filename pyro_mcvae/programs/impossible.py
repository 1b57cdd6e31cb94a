"""Data that some states of the latents make impossible, as counts of more than there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.sites import bare, known_support, layers
from pyro_mcvae.programs.types import Constraint, Distribution, Message, Program

# Their lower end is a value that they hold.
_BOUNDED = (
    type(constraints.integer_interval(0, 1)),
    type(constraints.interval(0, 1)),
    type(constraints.half_open_interval(0, 1)),
)


@lru_cache(maxsize=8)  # one object for one model, by which analyses know it
def with_impossible_data(model: Program) -> Program:
    """The model, of which some latents may make data impossible: density zero, and no error."""
    return cast("Program", _Impossible()(model))


class _Impossible(Messenger):
    def _pyro_sample(self, msg: Message) -> None:
        if msg["is_observed"]:
            msg["fn"] = zero_outside(msg["fn"])


def zero_outside(fn: Distribution) -> Distribution:
    """
    A distribution of data for which latents may set the ends of the support: of density zero beyond
    them, where it would refuse to compute one. All others are returned as they are.

    Example::

        >>> fn = zero_outside(dist.Binomial(torch.tensor([1.0, 3.0]), 0.5))
        >>> fn.log_prob(torch.tensor(2.0)).exp()
        tensor([0.0000, 0.3750])
    """
    support = known_support(bare(fn))
    if not isinstance(support, _BOUNDED) or not isinstance(support.upper_bound, Tensor):
        return fn
    return ZeroOutside(fn, (support.lower_bound, support.upper_bound))


class ZeroOutside(dist.TorchDistribution):
    """
    A distribution with density zero beyond the ends of its support.

    What is wrong in any other way, as NaN or half of a count, is refused as ever.

    :param base_dist: the distribution.
    :param bounds: the ends of the support of its innermost part.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}

    def __init__(self, base_dist: Distribution, bounds: tuple[Any, Any]) -> None:
        self.base_dist, self._bounds = base_dist, bounds
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def users(self) -> Distribution:
        """What the program calls it by."""
        return self.base_dist

    @property
    def support(self) -> Constraint:
        return self.base_dist.support

    @property
    def has_rsample(self) -> bool:
        return bool(self.base_dist.has_rsample)

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> ZeroOutside:
        return ZeroOutside(self.base_dist.expand(torch.Size(batch_shape)), self._bounds)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.base_dist.sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        low, high = self._bounds
        beyond = (value < low) | (value > high)
        # Another value in its place: the gradient of a density that does not exist may be NaN.
        log_prob = self.base_dist.log_prob(torch.where(beyond, low, value))
        for layer in layers(self.base_dist):
            if isinstance(layer, MaskedDistribution) and isinstance(layer._mask, Tensor):
                beyond = beyond & layer._mask.reshape(layer._mask.shape + (1,) * layer.event_dim)
        for _ in range(self.event_dim):
            beyond = beyond.any(-1)
        return log_prob.masked_fill(beyond, -torch.inf)
