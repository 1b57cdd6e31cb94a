"""Draws by their logarithms, where these reach further than the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import gamma

from pyro_mcvae.programs.known_logs import Logs, with_logs
from pyro_mcvae.programs.transforms import is_elementary
from pyro_mcvae.programs.types import Distribution

_TRANSFORMED = torch.distributions.TransformedDistribution


def logarithmic_draw(fn: Distribution) -> Tensor:
    """
    Return a reparameterized draw, with its logarithms known where it lies near a boundary.

    A draw of ``Gamma(0.05, 1)`` is below the least number of single precision once in 80, and one
    of ``Beta(0.05, 0.05)`` is rounded to 1 once in 5: PyTorch moves them there, where their density
    is another. Draws of Gamma in double precision have logarithms of usual size. Beta, Dirichlet
    and their transforms follow. Call it within
    :class:`~pyro_mcvae.programs.known_logs.KnownLogs`.
    """
    found = _draw(fn)
    return fn() if found is None else found  # called, as by Pyro: Zuko's have no other draw


def _draw(fn: Any) -> Tensor | None:
    if isinstance(fn, torch.distributions.Independent):
        return _draw(fn.base_dist)
    draw = _DRAWS.get(type(fn).__name__)
    if draw is not None and type(fn).__module__.startswith(("torch.", "pyro.")):
        return draw(fn)
    own = getattr(type(fn), "rsample", None) is _TRANSFORMED.rsample
    if not (own and all(map(is_elementary, fn.transforms))):
        return None
    value = _draw(fn.base_dist)
    if value is None:
        return None
    for transform in fn.transforms:
        value = transform(value)
    return value


def _log_gamma(concentration: Tensor) -> Tensor:
    """The logarithm of a draw of Gamma(concentration, 1)."""
    # In double precision less than one in 1e12 is below the least number down to 0.04.
    return gamma._standard_gamma(concentration.double()).log().to(concentration.dtype)


def _gamma(fn: Any) -> Tensor:
    return (_log_gamma(fn.concentration) - fn.rate.log()).exp()


def _exponential(fn: Any) -> Tensor:
    value = fn.rsample().clamp_min(torch.finfo(fn.rate.dtype).tiny)
    return with_logs(value, Logs(value.log))


def _relaxed(fn: Any) -> Tensor:
    value: Tensor = fn.rsample()
    return value


_DRAWS: dict[str, Callable[[Any], Tensor]] = {
    "Gamma": _gamma,
    "Chi2": _gamma,
    "Beta": lambda fn: (_log_gamma(fn.concentration1) - _log_gamma(fn.concentration0)).sigmoid(),
    "Dirichlet": lambda fn: _log_gamma(fn.concentration).softmax(-1),
    "Exponential": _exponential,
    "ExpRelaxedCategorical": _relaxed,
    "LogitRelaxedBernoulli": _relaxed,
}
