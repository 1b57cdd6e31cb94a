"""Changes between steps are noticed; what cannot be recorded runs uncompiled, with one line."""

import ctypes
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

from pyro_mcvae import CompiledELBO, TraceIWAE_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from pyro_mcvae.programs import outside_values
from tests.cases import every
from tests.compiled.programs import batches, make, reasons, uses

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
shift = 0.0


def guide(x: Tensor, *_: Any, **__: Any) -> None:
    slope = pyro.param("slope", torch.tensor(0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(slope * x, 0.7))


def normal_model(x: Tensor, loc: Any = 0.0, scale: Any = 1.0) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z + loc, scale), obs=x)


def seeded(loss: Any, model: Any, *args: Any, seed: int = 7, guide: Any = guide) -> float:
    torch.manual_seed(seed)
    result: float = loss.loss_and_grads(model, guide, *args)
    return result


def check(model: Any, loss: Any = None, guide: Any = guide, args: Any = (x,)) -> CompiledELBO:
    """Record a program; its numbers are the plain ones at every step on the way."""
    plain = TraceSGVB_ELBO() if loss is None else loss
    compiled = CompiledELBO(plain, "eager")
    for step in range(7):
        result = seeded(compiled, model, *args, seed=step, guide=guide)
        assert result == seeded(plain, model, *args, seed=step, guide=guide)
    return compiled


@pytest.mark.slow
def test_shapes_and_dtypes_have_recordings_of_their_own() -> None:
    loss = check(normal_model)
    other = [torch.randn(5), torch.randn(3, dtype=torch.float32)]
    for data in other:
        for step in range(5):
            assert seeded(loss, normal_model, data, seed=step) == seeded(
                TraceSGVB_ELBO(), normal_model, data, seed=step
            )
    assert len(loss._specializations) == 3
    assert uses(loss) == 4 + 2 + 2


@pytest.mark.slow
def test_training_modes() -> None:
    net = make(dropout=0.5)
    loss = CompiledELBO(TraceSGVB_ELBO(), "eager")
    data = batches(1)[0]
    for step in range(16):
        net.train(step // 4 % 2 == 0)
        torch.manual_seed(step)
        result = loss.loss_and_grads(net.model, net.guide, data)
        assert result == seeded(TraceSGVB_ELBO(), net.model, data, seed=step, guide=net.guide)
    assert uses(loss) >= 8


def test_floats_are_inputs_and_other_arguments_are_not() -> None:
    loss, plain = CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
    for step in range(10):
        args = (x, 0.1 * step, 1.0 + step)
        result = seeded(loss, normal_model, *args, seed=step)
        assert result == pytest.approx(seeded(plain, normal_model, *args, seed=step), rel=1e-12)
    assert uses(loss) == 7
    for scale in (1, 2, 1, 2):
        args = (x, 0.0, scale)
        assert seeded(loss, normal_model, *args) == seeded(plain, normal_model, *args)
    assert len(loss._specializations) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_floats_take_the_type_of_what_they_meet(dtype: torch.dtype, default: torch.dtype) -> None:
    """Bit for bit: at full precision beside double precision, whatever the default type is."""

    def model(x: Tensor, beta: float, shift: float) -> None:
        with pyro.plate("data", len(x)):
            with pyro.poutine.scale(scale=1 - 0.9 * beta):
                z = pyro.sample("z", dist.Normal(beta / 3, 1.0 + shift))
            pyro.sample("x", dist.Normal(z * beta + shift, beta), obs=x)

    def guide(x: Tensor, *_: float) -> None:
        slope = pyro.param("slope", torch.tensor(0.1, dtype=dtype))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope * x, 0.7))

    torch.set_default_dtype(default)
    try:
        data = x.to(dtype)
        loss, plain = CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
        for step in range(6):
            args = (model, data, 0.1 + 0.01 * step, 1 / (3.0 + step))
            result = seeded(loss, *args, seed=step, guide=guide)
            assert result == seeded(plain, *args, seed=step, guide=guide)
    finally:
        torch.set_default_dtype(torch.float64)
    assert uses(loss) == 3


@pytest.mark.slow
def test_arguments_in_containers_are_told_apart_by_their_structure() -> None:
    def model(batch: dict[str, Any], *normal: float) -> None:
        normal_model(batch["x"], *normal, *batch.get("normal", ()))

    def guide_of(batch: dict[str, Any], *_: float) -> None:
        guide(batch["x"])

    loss = check(model, guide=guide_of, args=({"x": x},))
    for args in (({"x": x, "normal": [0.3, 2.0]},), ({"x": x, "normal": [0.3]}, 2.0)):
        for step in range(5):
            result = seeded(loss, model, *args, seed=step, guide=guide_of)
            plain = seeded(TraceSGVB_ELBO(), model, *args, seed=step, guide=guide_of)
            assert result == pytest.approx(plain, rel=1e-12)
    assert len(loss._specializations) == 3
    assert uses(loss) == 4 + 2 + 2


def test_a_float_that_python_needs_runs_uncompiled() -> None:
    def model(x: Tensor, power: float) -> None:
        normal_model(x, loc=x.new_zeros(()).expand(int(power))[0])

    loss = check(model, args=(x, 3.0))
    assert re.search(r"reads a tensor's value at .*int\(power\)", reasons(loss)[0])


READS: dict[str, Callable[[Tensor], float]] = {
    "tolist": lambda times: sum(t**2 for t in times.tolist()),
    "numpy": lambda times: float(times.numpy().sum()),
    "iterated": lambda times: sum(float(t) ** 2 for t in times),
    "largest": lambda times: float(times.max()),
}


@pytest.mark.parametrize("read", READS)
def test_values_of_a_stored_tensor_may_be_read_until_they_change(read: str) -> None:
    times = torch.tensor([0.3, 0.5])

    def model(x: Tensor) -> None:
        normal_model(x, loc=READS[read](times))

    loss, plain = check(model), TraceSGVB_ELBO()
    assert not reasons(loss)
    times.add_(1.0)
    for step in range(3):
        assert seeded(loss, model, x, seed=step) == pytest.approx(
            seeded(plain, model, x, seed=step), rel=1e-12
        )


def test_values_that_a_step_computes_are_not_read_from_memory() -> None:
    def model(x: Tensor) -> None:
        normal_model(x, loc=sum((2 * x).tolist()))

    assert re.search(r"reads a tensor's value \(.tolist\) at", reasons(check(model))[0])


@pytest.mark.slow
def test_a_parameter_that_is_replaced_or_made_later() -> None:
    loss, plain = check(normal_model), TraceSGVB_ELBO()
    pyro.clear_param_store()
    pyro.param("slope", torch.tensor(0.4))
    assert seeded(loss, normal_model, x) == seeded(plain, normal_model, x)
    net = make()
    module = CompiledELBO(TraceSGVB_ELBO(), "eager")
    data = batches(1)[0]
    for step in range(5):
        seeded(module, net.model, data, guide=net.guide, seed=step)
    net.decoder = nn.Sequential(nn.Linear(2, 4))
    pyro.clear_param_store()
    args = (net.model, data)
    assert seeded(module, *args, guide=net.guide) == seeded(plain, *args, guide=net.guide)


def counter() -> Callable[..., None]:
    count = 0

    def model(x: Tensor) -> None:
        nonlocal count
        count += 1
        normal_model(x, loc=0.1 * count)

    return model


def average(kind: str) -> Callable[..., None]:
    """It keeps an average where a replay does not write it."""
    torch.manual_seed(0)
    held: Any = {"dict": {"mean": x.mean()}, "list": [x.mean()], "parameter": nn.Linear(1, 1)}[kind]
    history: list[Tensor] = []

    def model(x: Tensor) -> None:
        drawn = x.mean() + torch.randn(())
        if isinstance(held, nn.Linear):
            held.weight = nn.Parameter(0.9 * held.weight.detach() + drawn, requires_grad=False)
            loc = held.weight[0, 0]
        else:
            key: Any = next(iter(held)) if isinstance(held, dict) else 0
            loc = held[key] = 0.9 * held[key] + drawn
        history.append(loc)
        normal_model(x, loc=sum(history))

    return model


def by_value(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        loc = z if z.sum() > 0 else -z
        pyro.sample("x", dist.Normal(loc, 1.0), obs=x)


def item(x: Tensor) -> None:
    normal_model(x, loc=x.sum().item())


def python_random(x: Tensor) -> None:
    normal_model(x, loc=random.random())


def numpy_random(x: Tensor) -> None:
    normal_model(x, loc=np.random.randn())


drawn = random.Random(1)


def numpy_generator() -> Callable[..., None]:
    generator = np.random.default_rng(0)

    def model(x: Tensor) -> None:
        normal_model(x, loc=generator.normal())

    return model


def iterator() -> Callable[..., None]:
    batches = (0.1 * i for i in range(100))

    def model(x: Tensor) -> None:
        normal_model(x, loc=next(batches))

    return model


def large_array() -> Callable[..., None]:
    table = np.zeros(200_000)

    def model(x: Tensor) -> None:
        normal_model(x, loc=float(table[5]))

    return model


def masked(x: Tensor) -> None:
    normal_model(x, loc=x[x > 0].sum())


def one_hot(x: Tensor) -> None:
    normal_model(x, loc=torch.nn.functional.one_hot((x > 0).long())[:, 0])


def own_generator() -> Callable[..., None]:
    generator = torch.Generator().manual_seed(0)

    def model(x: Tensor) -> None:
        normal_model(x, loc=torch.randn((), generator=generator))

    return model


def many() -> Callable[..., None]:
    layers = [nn.Identity() for _ in range(5)]
    for layer in layers:
        for i in range(100):
            setattr(layer, f"value_{i}", i)

    def model(x: Tensor) -> None:
        result = sum(getattr(layer, f"value_{i}") for layer in layers for i in range(100))
        normal_model(x, loc=float(result))

    return model


REFUSED = {
    "counter": (counter, "each step changes 'count', which model closes over"),
    "item of a dict": (lambda: average("dict"), r"each step changes .*held"),
    "parameter": (lambda: average("parameter"), r"each step changes .*'weight'"),
    "branch": (lambda: by_value, r"test_changes.py:\d+, loc = z if z.sum\(\) > 0 else -z"),
    "item": (lambda: item, r"reads a tensor's value at .*test_changes.py:\d+, normal_model"),
    "Python": (lambda: python_random, "draws random numbers from Python's generator"),
    "NumPy": (lambda: numpy_random, "draws random numbers from NumPy's generator"),
    "generator of NumPy": (numpy_generator, "random numbers from 'generator', which model clos"),
    "iterator": (iterator, "reads an iterator, 'batches', which model closes over: pass its items"),
    "large array": (
        large_array,
        "reads an array, 'table', which .* of 1600000 bytes: .*make it a tensor",
    ),
    "generator": (own_generator, r"draws from a generator of its own.* at .*test_changes.py"),
    "too many": (many, "reads more than 400 values"),
    "index": (lambda: masked, r"\(index\) at .*test_changes.py"),
    "one_hot": (lambda: one_hot, r"\(one_hot without num_classes\) at .*test_changes.py"),
}


@pytest.mark.parametrize("kind", every(2, REFUSED))
def test_what_cannot_be_recorded_runs_as_ever(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, message = REFUSED[kind]
    if kind == "too many":
        monkeypatch.setattr(outside_values, "_MAX_ENTRIES", 400)
    runs = []
    for compiled in (False, True):
        model = made()
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        plain = TraceSGVB_ELBO()
        loss = CompiledELBO(plain, "eager") if compiled else plain
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss)
        with caplog.at_level(logging.WARNING):
            runs.append([svi.step(x) for _ in range(5)])
    assert runs[0] == runs[1]
    assert uses(loss) == 0
    lines = [r.getMessage() for r in caplog.records if "cannot be recorded" in r.getMessage()]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines


def test_a_handler_around_the_loss_is_refused() -> None:
    loss = check(normal_model)
    with pyro.poutine.scale(scale=2.0):
        result = seeded(loss, normal_model, x)
        assert result == seeded(TraceSGVB_ELBO(), normal_model, x)


def test_what_is_not_seen_is_found_by_a_comparison(caplog: pytest.LogCaptureFixture) -> None:
    held = ctypes.c_double(0.0)

    def model(x: Tensor) -> None:
        normal_model(x, loc=held.value)

    loss, plain = CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
    for step in range(5):
        seeded(loss, model, x, seed=step)
    held.value = 1.0  # nothing of Python's has changed
    stale = 0
    for step in range(5, 20):
        result = seeded(loss, model, x, seed=step)
        stale += result != seeded(plain, model, x, seed=step)
    assert stale <= 4
    assert result == seeded(plain, model, x, seed=19)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_site_and_changes_nothing(value: float) -> None:
    loss = CompiledELBO(TraceSIS_ELBO(1, max_plate_nesting=1), "eager")
    svi = SVI(normal_model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
    for _ in range(6):
        svi.step(x)
    slope, size = pyro.param("slope").item(), loss.kernel.step_size().clone()
    torch.manual_seed(2)
    pyro.enable_validation(False)
    with pytest.raises(ValueError, match="'x'"):
        svi.step(torch.tensor([0.5, value, 1.0]))
    assert pyro.param("slope").item() == slope
    assert torch.equal(loss.kernel.step_size(), size)
    assert np.isfinite(svi.step(x))


@pytest.mark.slow
def test_new_kinds_of_calls_run_as_ever_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    loss, plain = CompiledELBO(TraceSGVB_ELBO(), "eager"), TraceSGVB_ELBO()
    for size in range(1, 19):
        data = torch.zeros(size)
        assert seeded(loss, normal_model, data) == seeded(plain, normal_model, data)
    assert "more than 16 ways" in caplog.text


@pytest.mark.parametrize("kind", [TraceSGVB_ELBO, TraceIWAE_ELBO])
def test_attributes_that_programs_do_not_read_may_change(
    kind: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What a training loop keeps in the same object, data too large to compare included."""
    net: Any = make()
    net.losses, net.table, net.steps = [], np.zeros((1000, 1000)), 0
    loss, plain = CompiledELBO(kind(), "eager"), kind()
    data = batches(1)[0]
    for step in range(24):
        net.steps += 1
        net.losses.append(seeded(loss, net.model, data, seed=step, guide=net.guide))
    assert net.losses[-1] == seeded(plain, net.model, data, seed=step, guide=net.guide)
    assert uses(loss) == 21
    assert not caplog.records


class Several(Trace_ELBO):
    """A loss that returns more than a number."""

    def loss_and_grads(self, *args: Any) -> Any:
        result = super().loss_and_grads(*args)
        return result, {"half": result / 2, "count": 3}

    def differentiable_loss(self, *args: Any) -> Any:
        result = super().differentiable_loss(*args)
        return result, 2 * result.detach()


@pytest.mark.parametrize("function", ["loss_and_grads", "differentiable_loss"])
def test_a_loss_that_returns_more_than_a_number_runs_uncompiled(function: str) -> None:
    plain = Several()
    compiled = CompiledELBO(plain, "eager")
    result = []
    for loss in (plain, compiled):
        for step in range(5):
            torch.manual_seed(step)
            result.append(getattr(loss, function)(normal_model, guide, x))
    assert result[:5] == result[5:]
    assert f"its {function} returns a tuple" in reasons(compiled)[0]


def test_a_closed_form_that_compares_constants_is_recorded() -> None:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            s = pyro.sample("s", dist.InverseGamma(3.0, 2.0))
            pyro.sample("x", dist.Normal(0.0, s.sqrt()), obs=x)

    def guide(x: Tensor) -> None:
        a = pyro.param("a", torch.full((3,), 3.0), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            pyro.sample("s", dist.InverseGamma(a, 2.0))

    assert uses(check(model, guide=guide)) == 4


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a loss such as Trace_ELBO"):
        CompiledELBO("ELBO")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a loss such as Trace_ELBO"):
        CompiledELBO(Trace_ELBO)  # type: ignore[arg-type]
