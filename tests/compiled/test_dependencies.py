"""What programs see besides their arguments is watched, wherever they keep it."""

import importlib
import operator
import sys
import threading
from array import array
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Callable
from configparser import ConfigParser
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import Value
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_mcvae import CompiledELBO, TraceIWAE_ELBO, TraceSGVB_ELBO
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode
from tests.cases import every
from tests.compiled.programs import reasons, uses

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


class Bare:
    part: Any


class Shared:
    width = 1.0

    @property
    def doubled(self) -> float:
        return 2 * Global.width

    @classmethod
    def tripled(cls) -> float:
        return 3 * Global.width


class Global:
    width = 1.0


class Slots:
    __slots__ = ("width",)


@dataclass
class Data:
    width: float = 1.0


class Net(nn.Module):
    width = 1.0


class Private(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._width = 1.0

    @property
    def width(self) -> float:
        return self._width

    @width.setter
    def width(self, value: float) -> None:
        self._width = value


outer, inner = ModuleType("outer"), ModuleType("outer.inner")
outer.__file__ = inner.__file__ = __file__
outer.inner, inner.width = inner, 1.0  # type: ignore[attr-defined]


OUTER = outer


def _of(held: Any) -> tuple[Callable[[], float], Callable[[float], None]]:
    return lambda: held.width, lambda value: setattr(held, "width", value)


def _bare(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        held = make()
        held.width = 1.0
        return _of(held)

    return made


def _of_a_mapping() -> Any:
    held = OrderedDict(width=1.0)
    return lambda: held["width"], lambda value: held.update(width=value)


def _replaced(make: Callable[[float], Any], read: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        held = Bare()
        held.part = make(1.0)
        return lambda: read(held.part), lambda value: setattr(held, "part", make(value))

    return made


def _of_another_class(name: str) -> Any:
    held = Shared()
    result = {"property": lambda: held.doubled, "classmethod": lambda: Shared.tripled()}[name]
    return result, lambda value: setattr(Global, "width", value)


def _of_an_inner_module() -> Any:
    return lambda: outer.inner.width, lambda value: setattr(inner, "width", value)


def _of_a_module_at(reach: Callable[[ModuleType], Callable[[], Any]]) -> Callable[[], Any]:
    """A value in a Python module, which may be anywhere."""

    def made() -> Any:
        module = ModuleType("settings")
        module.width = 1.0  # type: ignore[attr-defined]
        return reach(module), lambda value: setattr(module, "width", value)

    return made


def _held_by_an_object(module: ModuleType) -> Callable[[], Any]:
    held = Bare()
    held.part = module
    return lambda: held.part.width


def _in_a_list(module: ModuleType) -> Callable[[], Any]:
    held = [module]
    return lambda: held[0].width  # type: ignore[attr-defined]


def _as_a_default(module: ModuleType) -> Callable[[], Any]:
    def get(settings: Any = module) -> float:
        return float(settings.width)

    return get


def _within_a_folder(module: ModuleType) -> Callable[[], Any]:
    """A package without ``__init__.py`` has no file."""
    package: Any = ModuleType("package")
    package.__path__, package.settings = ["/home/me/package"], module
    return lambda: package.settings.width


def _of_a_global_module() -> Any:
    other = ModuleType("other")
    other.inner = SimpleNamespace(width=2.0)  # type: ignore[attr-defined]
    return lambda: outer.inner.width, lambda value: globals().update(
        outer=other if value == 2 else OUTER
    )


def _of_an_imported_module(get: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (get, lambda value: setattr(inner, "width", value))


class Meta(type):
    @property
    def width(cls) -> float:
        return float(vars(cls)["_width"])


class Settings(metaclass=Meta):
    _width = 1.0


def _of_a_module_that_is_imported_within() -> Any:
    def get() -> float:
        import outer.inner as result  # type: ignore[import-not-found]

        return float(result.width)

    return get, lambda value: setattr(inner, "width", value)


def _of_a_module_that_an_object_holds() -> Any:
    held = Bare()
    held.part = nn.Dropout()
    return lambda: 2.0 - held.part.training, lambda value: held.part.train(value == 1)


def _of_a_keyword() -> Any:
    def get(*, width: float = 1.0) -> float:
        return width

    return get, lambda value: get.__kwdefaults__.update(width=value)


def _of_a_function() -> Any:
    def get() -> float:
        return float(get.width)  # type: ignore[attr-defined]

    get.width = 1.0  # type: ignore[attr-defined]
    return get, lambda value: setattr(get, "width", value)


def _read_by(read: Callable[[Tensor], Any]) -> Callable[[], Any]:
    def made() -> Any:
        held = torch.tensor(1)
        return lambda: read(held), held.fill_

    return made


def _at(held: Any, key: Any, path: Callable[[Any], Any] = lambda held: held) -> Callable[[], Any]:
    """An item of a container, or of one within it."""

    def made() -> Any:
        return lambda: float(path(held)[key]), lambda value: path(held).__setitem__(key, value)

    return made


def _of_an_array(read: Callable[[Any], Any], dtype: Any = np.float64) -> Callable[[], Any]:
    def made() -> Any:
        held = np.ones(3, dtype)
        return lambda: read(held), held.fill

    return made


def _of_a_computed_name() -> Any:
    held = Data()
    return lambda: getattr(held, "width "[:5]), lambda value: setattr(held, "width", value)


def _of_a_module_that_grows() -> Any:
    held = nn.ModuleList([nn.Identity()])
    return lambda: float(len(held)), lambda value: value == 2 and held.append(nn.Identity())


def _of_a_method(of_the_class: bool) -> Callable[[], Any]:
    def made() -> Any:
        class Replaced(nn.Module):
            def forward(self) -> float:
                return 1.0

        held = Replaced()

        def put(value: float) -> None:
            other: Any = lambda *_: value  # noqa: E731
            (Replaced if of_the_class else held).forward = other

        return held, put

    return made


VARIABLE, OF_THREAD, OF_PROCESSES = ContextVar("width", default=1.0), threading.local(), Value("d")
OF_THREAD.width = OF_PROCESSES.value = 1.0
PARSED, LAYERS, OWN = ConfigParser(), ChainMap({}, {"width": 1.0}), UserDict(width=1.0)
PARSED.read_dict({"model": {"width": "1.0"}})


WIDTH = 1.0


def _of_a_global() -> Any:
    def put(value: float) -> None:
        global WIDTH
        WIDTH = value

    return lambda: WIDTH, put


def _of_a_helper() -> Any:
    def helper() -> float:
        return WIDTH

    return lambda: helper(), _of_a_global()[1]


def _of_parsed() -> Any:
    def put(value: float) -> None:
        PARSED["model"]["width"] = str(value)

    return lambda: PARSED.getfloat("model", "width"), put


def _of_a_default() -> Any:
    def held(width: float = 1.0) -> float:
        return width

    return lambda: held(), lambda value: setattr(held, "__defaults__", (value,))


def _of_a_cached_function() -> Any:
    box = [1.0]

    @lru_cache
    def held() -> float:
        return box[0]

    def put(value: float) -> None:
        box[0] = value
        held.cache_clear()

    held()
    return lambda: held(), put


def _of_a_partial() -> Any:
    held: Any = partial(lambda width: width, width=1.0)
    return lambda: held(), lambda value: held.keywords.update(width=value)


PLACES: dict[str, Callable[[], Any]] = {
    "global": _of_a_global,
    "global of a helper": _of_a_helper,
    "context variable": lambda: (lambda: VARIABLE.get(), VARIABLE.set),
    "getter of a context variable": lambda: (VARIABLE.get, VARIABLE.set),
    "variable of a thread": lambda: (
        lambda: OF_THREAD.width,
        lambda value: setattr(OF_THREAD, "width", value),
    ),
    "value of processes": lambda: (
        lambda: OF_PROCESSES.value,
        lambda value: setattr(OF_PROCESSES, "value", value),
    ),
    "parsed configuration": _of_parsed,
    "layers of dicts": lambda: (
        lambda: LAYERS["width"],
        lambda value: LAYERS.maps[1].update(width=value),
    ),
    "dict of one's own": lambda: (
        lambda: OWN["width"],
        lambda value: OWN.update(width=value),
    ),
    "getattr of a module": lambda: (
        lambda: getattr(inner, "width"),  # noqa: B009
        lambda value: setattr(inner, "width", value),
    ),
    "vars of a module": lambda: (
        lambda: vars(inner)["width"],
        lambda value: setattr(inner, "width", value),
    ),
    "default": _of_a_default,
    "function with a cache": _of_a_cached_function,
    "keyword of a partial": _of_a_partial,
    "dict of 70": _at(dict.fromkeys(range(70), 1.0), 3),
    "list of 500": _at([1.0] * 500, 400),
    "deque of 100": _at(deque([1.0] * 100), 50),
    "list in a dict in a list": _at([{"a": [1.0] * 100}], 99, lambda held: held[0]["a"]),
    "array of Python": _at(array("d", [1.0]), 0),
    "array in place": _of_an_array(lambda held: float(held[0])),
    "array as a tensor": _of_an_array(lambda held: torch.as_tensor(held).mean()),
    "array from NumPy": _of_an_array(lambda held: torch.from_numpy(held).mean(), np.float32),
    "array of objects": _of_an_array(lambda held: float(held[0]), object),
    "name that is computed": _of_a_computed_name,
    "module that grows": _of_a_module_that_grows,
    "method of a class": _of_a_method(of_the_class=True),
    "method of an object": _of_a_method(of_the_class=False),
    "object without methods": _bare(Bare),
    "slot": _bare(Slots),
    "dataclass": lambda: _of(Data()),
    "class": lambda: _of(Global),
    "of its class, then its own": lambda: _of(Shared()),
    "of a module's class, then its own": lambda: _of(Net()),
    "ordered dict": _of_a_mapping,
    "distribution": _replaced(lambda value: dist.Normal(0.0, value), lambda prior: prior.scale),
    "array": _replaced(lambda value: np.full(1, value), lambda array: float(array[0])),
    "number of numpy": _replaced(np.float32, float),
    "class of distributions": _replaced(
        lambda value: dist.Normal if value == 1 else dist.Laplace, lambda kind: kind(0, 1).variance
    ),
    "builtin function": _replaced(
        lambda value: torch.abs if value == 1 else torch.exp, lambda f: f(torch.ones(()))
    ),
    "private, of a module": lambda: _of(Private()),
    "inner module": _of_an_inner_module,
    "module that is imported within": _of_a_module_that_is_imported_within,
    "module that is closed over": _of_a_module_at(lambda m: lambda: m.width),  # type: ignore[attr-defined]
    "module that an object has": _of_a_module_at(_held_by_an_object),
    "module in a list": _of_a_module_at(_in_a_list),
    "module that is a default": _of_a_module_at(_as_a_default),
    "module in a folder": _of_a_module_at(_within_a_folder),
    "module of a partial": _of_a_module_at(lambda m: partial(getattr, m, "width")),
    "module of a getter": _of_a_module_at(lambda m: partial(operator.attrgetter("width"), m)),
    "module by its name": _of_an_imported_module(lambda: sys.modules["outer.inner"].width),
    "module that is imported by its name": _of_an_imported_module(
        lambda: importlib.import_module("outer.inner").width
    ),
    "global module that is replaced": _of_a_global_module,
    "property of a class": lambda: (
        lambda: Settings.width,
        lambda value: setattr(Settings, "_width", value),
    ),
    "mode of a module that an object holds": _of_a_module_that_an_object_holds,
    "keyword-only default": _of_a_keyword,
    "attribute of a function": _of_a_function,
    "through a property": lambda: _of_another_class("property"),
    "through a classmethod": lambda: _of_another_class("classmethod"),
}


def guide(x: Tensor, *_: Any) -> None:
    slope = pyro.param("slope", torch.tensor(0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(slope * x, 0.7))


def seeded(loss: Any, model: Any, *args: Any, seed: int) -> float:
    torch.manual_seed(seed)
    result: float = loss.loss_and_grads(model, guide, x, *args)
    return result


def reading(get: Callable[[], Any]) -> Callable[..., None]:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, get()), obs=x)

    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_changes_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (outer, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    get, put = PLACES[place]()
    model = reading(get)
    with ExecutedCode() as executed:
        model(x)
    result = Dependencies.of(model, executed=executed)
    try:
        assert result.changed() is None
        assert not result.unsupported
        put(2.0)
        assert result.changed() is not None
    finally:
        put(1.0)


STEPS = {
    "a tensor that fills": _read_by(lambda held: torch.full((3,), held).double()),
    "a tensor that picks": _read_by(lambda held: torch.arange(1.0, 4.0)[held]),
    "a tensor that cuts": _read_by(lambda held: torch.arange(1.0, 4.0)[:held].sum()),
    "a value in a container": PLACES["dict of 70"],
}


@pytest.mark.parametrize("place", STEPS)
def test_a_step_after_the_change_has_the_numbers_of_the_plain_one(place: str) -> None:
    get, put = STEPS[place]()
    model, loss, plain = reading(get), CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
    try:
        for step in range(11):
            if step == 5:  # before the recording's third use, which nothing compares
                put(2.0)
            assert seeded(loss, model, seed=step) == seeded(plain, model, seed=step)
    finally:
        put(1.0)
    assert uses(loss) >= 2
    assert not reasons(loss)


class DrawnScale(PyroModule):
    @PyroSample
    def scale(self) -> Any:
        return dist.LogNormal(0.0, 0.5)

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(0.0, self.scale), obs=x)


def test_an_attribute_that_is_drawn_is_no_value_that_changes() -> None:
    """Reading it would draw it, and move the random state."""
    model = DrawnScale()
    guide = AutoNormal(model)
    recorded, plain = CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
    plain.loss(model, guide, x)
    values: list[list[float]] = []
    for loss in (plain, recorded):
        torch.manual_seed(0)
        values.append([loss.loss_and_grads(model, guide, x) for _ in range(6)])
    assert values[0] == values[1]
    assert uses(recorded) >= 2
    assert not reasons(recorded)


@pytest.mark.parametrize("plain", every(3, [TraceIWAE_ELBO(2), Trace_ELBO(), RenyiELBO(0.5, 2)]))
def test_attributes_of_a_loss_are_seen_at_the_next_step(plain: Any) -> None:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    name = "alpha" if isinstance(plain, RenyiELBO) else "num_particles"
    loss, before = CompiledELBO(plain, "eager"), getattr(plain, name)
    for step in range(14):
        if step == 5:
            setattr(plain, name, before / 2 if name == "alpha" else 4)
        assert seeded(loss, model, seed=step) == seeded(plain, model, seed=step)
    assert uses(loss) >= 3


def test_asserts_do_not_lead_into_pytest():
    """Which rewrites them: thousands of values of its own would be compared."""

    def program(z):
        assert z > 0, "a message, which pytest extends"

    entries = Dependencies.of(program, executed=ExecutedCode(unknown=True)).entries
    assert entries
    assert not [e.name for e in entries if "pytest" in e.name]


@pytest.mark.parametrize("key", ["}", "{k}", "{}", ("a", b"}")])
def test_keys_of_a_dict_may_have_braces(key):
    """GPyTorch's caches have such keys, and distributions or modules as values."""

    class Program:
        def __init__(self):
            self.priors = {key: dist.Normal(0.0, 1.0)}
            self.module = torch.nn.Linear(1, 1)

        def model(self, x):
            z = pyro.sample("z", self.priors[key])
            pyro.sample("x", dist.Normal(z, 1.0).expand([3]).to_event(1), obs=x)

        def guide(self, x):
            pyro.sample("z", dist.Normal(pyro.param("m", torch.tensor(0.0)), 0.5))

    program, losses = Program(), []
    for elbo in (TraceSGVB_ELBO(), CompiledELBO(TraceSGVB_ELBO(), backend="eager")):
        pyro.clear_param_store()
        program.priors = {key: dist.Normal(0.0, 1.0)}
        values = []
        for i in range(6):
            if i == 4:
                program.priors[key] = dist.Normal(1.0, 2.0)
            pyro.set_rng_seed(i)
            values.append(elbo.loss_and_grads(program.model, program.guide, torch.ones(3)))
        losses.append(values)
    assert losses[0] == losses[1]
