"""Evaluation leaves no trace: modes, parameters, buffers and random streams stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_mcvae.evaluation.own_parameters import leave_out_others, warn_of_shared
from pyro_mcvae.programs.modules import evaluation_modules, find_modules
from pyro_mcvae.programs.types import Program
from pyro_mcvae.training.generators import rng_state, set_rng_state

__all__ = ["evaluation_mode"]

# What Pyro's parameter store consists of.
_TABLES = "_params", "_param_to_name", "_constraints"


@contextmanager
def evaluation_mode(*programs: Program, seed: int | None = None) -> Iterator[None]:
    """
    Evaluate programs without changing them.

    Modules that the programs are, hold or refer to are in evaluation mode inside: dropout and batch
    statistics would make another density of each run. They have their own parameters, where the
    parameter store has those of another module by the same name. Parameters that were not in the
    store before are removed from it.

    :param seed: seeds the generators inside and sets them back afterwards; None uses the present
        random stream.
    :raises ValueError: for modules with lazy parameters that have no shape yet.
    """
    _check_seed(seed)
    roots = find_modules(*programs)
    _refuse_lazy(roots)
    warn_of_shared(*programs)
    store = pyro.get_param_store()
    # Not by deleting names afterwards: two of them may be of one parameter, which the store forgets
    # at the first.
    tables = [getattr(store, name) for name in _TABLES]
    before = [dict(table) for table in tables]
    generators = rng_state() if seed is not None else None
    try:
        leave_out_others(*programs)
        with evaluation_modules(roots):
            if seed is not None:
                pyro.set_rng_seed(seed)
            yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        if generators is not None:
            set_rng_state(generators)


def _check_seed(seed: int | None) -> None:
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool | torch.Tensor)
    # NumPy's generator, which Pyro seeds too, takes no other.
    if seed is not None and not (whole and 0 <= seed < 1 << 32):
        raise ValueError(f"seed must be an int from 0 to 2**32 - 1, or None, got {seed!r}")


def _refuse_lazy(roots: list[nn.Module]) -> None:
    for root in roots:
        for name, parameter in root.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter '{name}' of {type(root).__name__} has no shape yet: the module "
                    f"never ran. Run it once on data (as training does) before it is evaluated"
                )
