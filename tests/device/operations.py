"""Counts the operations of a step that would be launched on a device."""

from collections import Counter
from functools import partial

from torch.utils._python_dispatch import TorchDispatchMode

# What launches nothing: allocation, views that are not marked so, and reads.
_FREE = {
    *("_unsafe_view", "detach", "detach_", "lift_fresh", "promote_types", "_local_scalar_dense"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}


class Operations(TorchDispatchMode):
    """
    Counts operations by name.

    :ivar found: how often each was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, returns = func.overloadpacket.__name__, func._schema.returns
        views = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
        self.found[name] += not views and name not in _FREE
        return func(*args, **(kwargs or {}))


def operations(step, warm: int = 5) -> Counter[str]:
    """The operations of a warm step: a function that runs forward and backward."""
    for _ in range(warm):
        step()
    with Operations() as counter:
        step()
    return +counter.found


def gradient_step(loss, parameters):
    """A step of a function that returns a loss, without an optimizer, which is everybody's."""

    def step(loss, parameters):
        for parameter in parameters:
            parameter.grad = None
        loss().backward()

    return partial(step, loss, list(parameters))


def count(step) -> int:
    return sum(operations(step).values())
