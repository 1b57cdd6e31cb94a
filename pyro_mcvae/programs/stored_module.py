"""Modules whose parameters SVI's optimizer trains through Pyro's parameter store."""

from __future__ import annotations

import itertools

import pyro
from pyro.params import param_with_module_name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# The parameters that modules have put into the store; loaded values are not among them.
_added = WeakIdKeyDictionary()


class StoredModule(nn.Module):
    """
    A part of an objective that has parameters.

    :ivar str param_name: the prefix of its parameters in the store: the name of the class. A number
        is added if another module has parameters under it. Names follow the order of first use, so
        a program has the same names in every process.
    """

    param_name: str

    def __init__(self) -> None:
        super().__init__()
        self.param_name = type(self).__name__

    def add_to_store(self) -> None:
        """
        Put the parameters into the store, where the optimizer of a step finds them.

        Values that were loaded into the store become those of the module, because the optimizer
        trains only parameters in the store.
        """
        kind = type(self).__name__
        candidates = itertools.chain(
            [self.param_name, kind], map(f"{kind}_{{}}".format, itertools.count(2))
        )
        self.param_name = next(filter(self._is_free, candidates))
        pyro.module(self.param_name, self, update_module_params=True)
        for param in self.parameters():
            _added[param] = None

    def _is_free(self, name: str) -> bool:
        """Return whether the store has no other module's parameters under a name."""
        store = dict(pyro.get_param_store().named_parameters())
        stored = (
            (store.get(param_with_module_name(name, n)), p) for n, p in self.named_parameters()
        )
        return all(there is None or there is p or there not in _added for there, p in stored)
