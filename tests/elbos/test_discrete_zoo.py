"""Discrete guides as users write them, summed by every objective, against every assignment."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
)
from tests.elbos.discrete_programs import Discrete, normal, param, x
from tests.elbos.exhaustive import exhaustive

ALL = math.inf


def categorical(name, logits):
    return pyro.sample(name, dist.Categorical(logits=logits))


def bernoulli(name, logits):
    return pyro.sample(name, dist.Bernoulli(logits=logits))


def nested(p):
    with pyro.plate("a", 2, dim=-2):
        u = categorical("u", param("pu", 2) if p else param("qu", 2, 1, 2))
        with pyro.plate("b", 2, dim=-1):
            v = bernoulli("v", Vindex(param("pv" if p else "qv", 2))[u])
            if p:
                normal("x", v * param("w") + u, x(2, 2))


def vectors(p):
    with pyro.plate("data", 2):
        b = pyro.sample("b", dist.Bernoulli(logits=param("p" if p else "q", 2, 2)).to_event(1))
        if p:
            normal("x", (b @ param("w", 2)) ** 2, x(2))


def masked_by_value(p):
    """A level that counts where a switch is on."""
    with pyro.plate("data", 2):
        y = bernoulli("y", param("p") if p else param("q", 2))
        with poutine.mask(mask=y.bool()):
            k = categorical("k", param("pk" if p else "qk", 2))
        if p:
            normal("x", y * Vindex(param("mu", 2))[k], x(2))


def scaled_by_datum(p):
    with pyro.plate("data", 2), poutine.scale(scale=torch.tensor([0.4, 2.0])):
        y = categorical("y", param("p", 2) if p else param("q", 2, 2))
        if p:
            normal("x", Vindex(param("mu", 2))[y], x(2))


def members_of_turns(p):
    """A plate inside each element of a sequential one."""
    for i in pyro.plate("groups", 2):
        a = bernoulli(f"a{i}", param("pa") if p else param("qa", 2)[i])
        with pyro.plate(f"members{i}", 2):
            b = bernoulli(f"b{i}", param("pb") + a if p else param("qb", 2, 2)[i])
            if p:
                normal(f"x{i}", param("mu") * a * b + b, x(2, 2)[i])


def factors(p):
    with pyro.plate("data", 2):
        y = bernoulli("y", param("p") if p else param("q", 2))
        if p:
            pyro.factor("f", param("w") * y * torch.tensor([1.0, 2.0]))


def rows_and_columns(p):
    """Plates that meet in others of the same sizes, so that no plate has a datum of its own."""
    with pyro.plate("rows", 2, dim=-1):
        y = bernoulli("y", param("p") if p else param("q", 2))
    with pyro.plate("columns", 2, dim=-2):
        z = bernoulli("z", param("pz") if p else param("qz", 2, 1))
    if p:
        with pyro.plate("r", 2, dim=-1), pyro.plate("c", 2, dim=-2):
            normal("x", param("mu") * y + z * y, x(2, 2))


PROGRAMS = {
    f.__name__: Discrete((lambda f=f: f(True)), (lambda f=f: f(False)))
    for f in (
        nested,
        vectors,
        masked_by_value,
        scaled_by_datum,
        members_of_turns,
        factors,
        rows_and_columns,
    )
}
SUMS = {
    "rao-blackwell": lambda: TraceRaoBlackwell_ELBO(ALL),
    "sis": lambda: TraceSIS_ELBO(1, ULA(0.1), num_categories=ALL),
    "ais": lambda: TraceAIS_ELBO(1, MALA(0.1), num_categories=ALL),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sum_over_slots_is_that_over_every_assignment(name):
    """Value and gradient; without continuous latents all bounds are the same."""
    program = PROGRAMS[name]
    TraceRaoBlackwell_ELBO(0).loss(program.model, program.guide)  # which makes the parameters
    loss, grads = exhaustive(program.model, program.guide)
    for make in SUMS.values():
        assert make().loss_and_grads(program.model, program.guide) == pytest.approx(loss)
        result = program.take_gradients()
        for key, value in grads.items():
            torch.testing.assert_close(result[key], value)
