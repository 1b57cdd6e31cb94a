"""The catalogue of jumps and kinks against finite differences."""

import pytest
import torch

from pyro_mcvae.checks.jumps import jump_warning, kind_of

# Functions of one number, by ATen name.
OPERATORS = {
    "round": torch.round,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "frac": torch.frac,
    "remainder": lambda x: torch.remainder(x, 1.0),
    "gt": lambda x: (x > 0.5).to(x),
    "le": lambda x: (x <= 0.5).to(x),
    "hardshrink": torch.nn.functional.hardshrink,
    "abs": torch.abs,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "hardtanh": torch.nn.functional.hardtanh,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "maximum": lambda x: torch.maximum(x, -x),
    "softshrink": torch.nn.functional.softshrink,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "elu": torch.nn.functional.elu,
    "mish": torch.nn.functional.mish,
    "sin": torch.sin,
}


def kind_by_differences(function):
    x = torch.linspace(-2.03, 2.01, 40001, dtype=torch.float64)
    y, step = function(x), float(x[1] - x[0])
    slopes = y.diff() / step
    if slopes.abs().max() > 100:
        return "jump"
    return "kink" if (slopes.diff().abs() > 0.005).any() else None


@pytest.mark.parametrize("name", OPERATORS)
def test_the_kind_of_an_operator_is_that_of_finite_differences(name):
    kind = kind_by_differences(OPERATORS[name])
    for spelled in (name, f"aten::{name}", f"aten::{name}.default", f"{name}_"):
        assert kind_of(spelled) == kind


def test_the_warning_has_the_site_the_line_and_the_remedies():
    text = jump_warning("x", "round", "model.py:3")
    assert all(word in text for word in ("'x'", "round", "model.py:3", "has_rsample_", "sigmoid"))
