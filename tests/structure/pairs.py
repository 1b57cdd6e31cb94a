"""A model and guide of one plate, in which the data may depend on all of its latents."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor


def normal() -> dist.Normal:
    return dist.Normal(0.0, 1.0)


def coupled_pair(
    combine: Callable[[Tensor], Tensor],
    size: int = 4,
    draw: Callable[[], dist.TorchDistribution] = normal,
    x: Tensor | float = 0.3,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return data x ~ Normal(combine(z), 0.5) of latents z ~ draw(), and the prior as a guide."""

    def model() -> None:
        with pyro.plate("data", size):
            z = pyro.sample("z", draw())
            data = torch.as_tensor(x).expand(size)
            pyro.sample("x", dist.Normal(combine(z), 0.5), obs=data)

    def guide() -> None:
        with pyro.plate("data", size):
            pyro.sample("z", draw())

    return model, guide
