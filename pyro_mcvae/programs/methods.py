"""Whether a distribution has the methods of the class that a closed form was written for."""

from __future__ import annotations

from functools import lru_cache

from pyro_mcvae.programs.types import Distribution

_LIBRARIES = "torch.distributions.", "pyro.distributions.", "pyro_mcvae."
# Members that may be overridden: they change neither draws nor densities.
_FREE = {"expand", "support", "arg_constraints", "infer_shapes", "has_rsample", "_abc_impl"}


def has_methods_of(fn: Distribution, *classes: type) -> bool:
    """
    Return whether a distribution is of one of some classes, with the methods of that class.

    A closed form (a divergence, an entropy, the weights of all values, a map from noise) was
    derived for one class. It is wrong for a subclass with another ``log_prob`` or ``sample``.
    Methods that PyTorch's and Pyro's own subclasses override count as those of the class.

    Example::

        >>> class Floor(dist.Categorical):
        ...     __module__ = "my_program"
        ...     def log_prob(self, value):
        ...         return super().log_prob(value).clamp_min(-3.0)
        >>> has_methods_of(dist.Categorical(logits=torch.zeros(3)), dist.Categorical)
        True
        >>> has_methods_of(Floor(logits=torch.zeros(3)), dist.Categorical)
        False
    """
    kind: type = type(fn)
    return any(
        isinstance(fn, c) and inherits_methods(kind, c) and not vars(fn).keys() & _methods(c)
        for c in classes
    )


@lru_cache(maxsize=1024)
def inherits_methods(kind: type, parent: type) -> bool:
    """Return whether no class between a class and its parent overrides a method."""
    between = [c for c in kind.__mro__ if c not in parent.__mro__ and not _is_core(c)]
    for name in {n for c in between for n in vars(c) if _matters(n)}:
        definers = [c for c in kind.__mro__ if name in vars(c)]
        if definers[0] in between and any(c not in between for c in definers):
            return False
    return True


def library_class(fn: Distribution) -> type:
    """Return the nearest class of PyTorch or Pyro that a distribution inherits from."""
    return next(c for c in type(fn).__mro__ if _is_core(c))


@lru_cache(maxsize=1024)
def _methods(kind: type) -> frozenset[str]:
    """Return the names that are overridden if an object has them as attributes."""
    return frozenset(n for n in dir(kind) if _matters(n) and callable(getattr(kind, n, None)))


def _matters(name: str) -> bool:
    return name == "__call__" or not (name.startswith("__") or name in _FREE)


def _is_core(kind: type) -> bool:
    return kind.__module__.startswith(_LIBRARIES)
