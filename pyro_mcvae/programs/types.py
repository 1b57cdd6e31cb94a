"""The types of what Pyro and its programs exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict

import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

# A model or a guide: a function, or an object that is called with the data.
Program: TypeAlias = Callable[..., object]
Distribution: TypeAlias = dist.TorchDistribution


class Site(TypedDict, total=False):
    """What Pyro's message, and the node of a trace, say of a sample statement."""

    type: str
    name: str
    fn: Distribution
    value: Tensor
    is_observed: bool
    args: tuple[object, ...]
    kwargs: dict[str, object]
    infer: dict[str, Any]
    scale: float | Tensor
    mask: bool | Tensor | None
    cond_indep_stack: tuple[CondIndepStackFrame, ...]
    done: bool
    stop: bool
    continuation: Callable[[Site], None] | None
    log_prob: Tensor
    unscaled_log_prob: Tensor


# Which fields of which sites of a trace change, by name.
SiteChanges: TypeAlias = Mapping[str, Mapping[str, object]]
Transform: TypeAlias = torch.distributions.Transform
Constraint: TypeAlias = torch.distributions.constraints.Constraint
# What __torch_function__ is given: any function of torch.
TorchFunction: TypeAlias = Callable[..., Any]
# The same keys, while the statement is run: ``value`` is None before the draw.
Message: TypeAlias = Site
