"""Which values have passed Pyro's validation before, and need not pass it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pyro_mcvae.programs.sites import bare, known_support
from pyro_mcvae.programs.types import Constraint, Distribution, Site


def was_checked(old: Site, site: Site) -> bool:
    """
    Whether a value has passed Pyro's validation before, at a site of the same shape: the same
    tensor, as an observation is, with the same support. Parameters are validated as always, when a
    distribution is made.
    """
    # Constraints with parameters (an interval) are new objects each time: to be checked again.
    same = site["value"] is old["value"] and site["fn"].shape() == old["fn"].shape()
    return same and _support(site) is _support(old)


def _support(site: Site) -> Constraint:
    return known_support(bare(site["fn"]))


@contextmanager
def unvalidated(fns: Iterable[Distribution]) -> Iterator[None]:
    """Within, distributions take values as they are, and so do those that they are made of."""
    own: dict[Distribution, bool | None] = {}
    inner, seen = list(fns), set()
    while inner:
        fn = inner.pop()
        if fn not in seen:
            seen.add(fn)
            inner += [
                d for d in vars(fn).values() if isinstance(d, torch.distributions.Distribution)
            ]
            # That of Independent is a property, which asks the distribution inside.
            if not isinstance(getattr(type(fn), "_validate_args", None), property):
                own[fn] = vars(fn).get("_validate_args")
    for fn in own:
        fn._validate_args = False
    try:
        yield
    finally:
        for fn, before in own.items():
            del fn._validate_args
            if before is not None:
                fn._validate_args = before
