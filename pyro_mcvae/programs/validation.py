"""Which values have passed Pyro's validation before, and need not pass it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyro_mcvae.programs.sites import known_support
from pyro_mcvae.programs.types import Constraint, Distribution, Site

__all__ = ["unvalidated", "was_checked"]


def was_checked(old: Site, site: Site) -> bool:
    """
    Whether a value has passed Pyro's validation before: the same tensor, as an observation is, with
    the same support. Parameters are validated as always, when a distribution is made.
    """
    same = site["value"] is old["value"]
    return same and _same_support(known_support(old["fn"]), known_support(site["fn"]))


@contextmanager
def unvalidated(fn: Distribution) -> Iterator[None]:
    """Within, a distribution takes values as they are."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    own = vars(fn).get("_validate_args")
    fn._validate_args = False
    try:
        yield
    finally:
        if own is None:
            del fn._validate_args
        else:
            fn._validate_args = own


def _same_support(a: Constraint, b: Constraint) -> bool:
    while isinstance(a, _INDEPENDENT) and isinstance(b, _INDEPENDENT):
        if a.reinterpreted_batch_ndims != b.reinterpreted_batch_ndims:
            return False
        a, b = a.base_constraint, b.base_constraint
    # Constraints with parameters (an interval) are new objects each time: to be checked again.
    return a is b


_INDEPENDENT = type(
    torch.distributions.constraints.independent(torch.distributions.constraints.real, 1)
)
