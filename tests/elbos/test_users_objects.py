"""Programs read objects whose methods and attributes raise errors, or that claim another class."""

import functools
import gc
import numbers
import weakref
from unittest.mock import MagicMock

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_mcvae import (
    CompiledELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.params import in_turn

X = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3)
LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(3),
    "sis": lambda: TraceSIS_ELBO(2),
    "rb": TraceRaoBlackwell_ELBO,
    "compiled": lambda: CompiledELBO(TraceSGVB_ELBO(), backend="eager"),
}


def raises(*_, **__):
    raise RuntimeError("not allowed")


class Proxy:
    """Forwards everything to an object, like the proxies of wrapt."""

    def __init__(self, wrapped):
        object.__setattr__(self, "_wrapped", wrapped)

    @property
    def __class__(self):
        return type(self._wrapped)

    @property
    def __module__(self):
        return self._wrapped.__module__

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "_wrapped"), name)

    def __hash__(self):
        return hash(self._wrapped)


class WithoutAttributes:
    """Only some names can be read."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            raise KeyError(name)
        return object.__getattribute__(self, name)


class Meta(type):
    """Classes without a hash."""

    __hash__ = None

    def __eq__(cls, other):
        return raises()


class Unhashable(metaclass=Meta):
    pass


class Unequal:
    """A number that cannot be compared."""

    __eq__, __hash__ = raises, None


numbers.Number.register(Unequal)


def of(base, *args, **methods):
    """An object of a subclass with these methods."""
    return lambda: type("Own", (base,), {"__module__": __name__, **methods})(*args)


def dead():
    held = Proxy({})
    proxy = weakref.proxy(held)
    del held
    gc.collect()
    return proxy


OBJECTS = {
    "mock of a tensor": lambda: MagicMock(spec=torch.Tensor),
    "mock of a module": lambda: MagicMock(spec=torch.nn.Linear(1, 1)),
    "proxy of a dict": lambda: Proxy({"a": 1}),
    "proxy of a tensor": lambda: Proxy(torch.ones(3)),
    "proxy of a module": lambda: Proxy(torch.nn.Linear(1, 1)),
    "proxy of a function": lambda: Proxy(raises),
    "proxy of what is gone": dead,
    "class that raises": of(object, __class__=property(raises)),
    "attributes that raise": WithoutAttributes,
    "attributes that are tensors": of(object, __getattr__=lambda self, name: torch.ones(3)),
    "array that raises": of(object, __array__=raises),
    "number without comparison": Unequal,
    "class without a hash": Unhashable,
    "comparison with a tensor": of(object, __eq__=lambda *_: torch.zeros(3)),
    "dict without copies": of(dict, {"a": 1}, copy=raises),
    "dict of another signature": of(dict, {"a": 1}, get=lambda self, key: self[key]),
    "dict without items": of(dict, {"a": 1}, items=raises, values=raises, __iter__=raises),
    "list without items": of(list, [1, 2], __getitem__=raises, __len__=raises),
    "tuple without items": of(tuple, (1, 2), __iter__=raises),
    "object with those": lambda: of(object, held=OBJECTS["mock of a tensor"]())(),
}
PLACES = ["closure", "attribute", "argument"]
NOT_AS_ARGUMENTS = ("class without a hash",)  # nor by PyTorch's trees


def losses(name, held, place):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    decoder = torch.nn.Linear(2, 3, dtype=X.dtype)
    decoder.__dict__["held"] = held if place == "attribute" else None

    def model(x, *held_too):
        pyro.module("decoder", decoder)
        inside = [held if place == "closure" else None, decoder.held, held_too]
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            loc = decoder(z) * len(inside)
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)

    def guide(x, *_):
        loc = pyro.param("loc", torch.zeros(4, 2, dtype=X.dtype))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), LOSSES[name]())
    args = (held,) if place == "argument" else ()
    return [svi.step(X, *args) for _ in range(5)]


@functools.cache
def losses_without(name, place):
    return losses(name, None, place)


@in_turn(kind=OBJECTS, place=PLACES, name=LOSSES)
def test_losses_are_those_without_the_object(kind, place, name):
    place = "closure" if kind in NOT_AS_ARGUMENTS and place == "argument" else place
    assert losses(name, OBJECTS[kind](), place) == losses_without(name, place)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_argument_is_not_recorded(caplog):
    """A recording guards the strides of its arguments, which some layouts do not have."""
    sparse = torch.eye(3, dtype=X.dtype).to_sparse_csr()
    assert losses("compiled", sparse, "argument") == losses("sgvb", None, "argument")
    assert "argument 1 is a tensor of layout torch.sparse_csr" in caplog.text
