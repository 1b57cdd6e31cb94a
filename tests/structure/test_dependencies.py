"""Which site depends on which draw, found in real programs, and that looking changes nothing."""

import contextlib
import random
from queue import SimpleQueue

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import autoguide
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.programs.contract import checked_run
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure.marked import MarkedRunError, marked_run


def normal(loc=0.0):
    return dist.Normal(loc, 1.0)


def dependencies(model, guide, *tracked):
    return marked_run(Programs(model, guide, (), {}), {}).dependencies(frozenset(tracked))


def factors(model, guide, *tracked):
    """The parents of each factor as ``{"model z": {...}}``."""
    result = dependencies(model, guide, *tracked).factors
    return {f"{key.program} {key.name}": set(parents) for key, parents in result.items()}


def test_chain_depends_on_neighbours_only():
    def model():
        z = torch.tensor(0.0)
        for t in range(3):
            z = pyro.sample(f"z{t}", normal(0.9 * z))
            pyro.sample(f"x{t}", normal(z), obs=torch.tensor(1.0))

    def guide():
        z = torch.tensor(0.0)
        for t in range(3):
            z = pyro.sample(f"z{t}", normal(z + 1.0))

    assert factors(model, guide, "z0", "z1", "z2") == {
        **{f"model x{t}": {f"z{t}"} for t in range(3)},
        **{
            f"{program} z{t}": {f"z{t}", f"z{max(t - 1, 0)}"}
            for t in range(3)
            for program in ("model", "guide")
        },
    }


def test_what_is_broadcast_together_depends_on_its_own_draws():
    """As the parameters of all distributions are; what gives a shape gives nothing else."""

    def model():
        a, b = pyro.sample("a", normal()), pyro.sample("b", normal())
        one, two, three = torch.broadcast_tensors(a, b.expand(3), torch.tensor(2.0))
        pyro.sample("one", dist.Normal(one, 1.0).to_event(1), obs=torch.ones(3))
        pyro.sample("two", dist.Normal(two, 1.0).to_event(1), obs=torch.ones(3))
        pyro.sample("three", dist.Gamma(three, 2.0).to_event(1), obs=torch.ones(3))
        pyro.sample("student", dist.StudentT(3.0, a, b.exp()), obs=torch.tensor(1.0))
        pyro.sample("df", normal(dist.StudentT(3.0, a, b.exp()).df), obs=torch.tensor(1.0))
        pyro.sample("shape", normal(torch.tensor(3.0).expand_as(b)), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("a", normal())
        pyro.sample("b", normal())

    result = dependencies(model, guide, "a", "b").factors
    assert {k.name: parents for k, parents in result.items() if k.program == "model"} == {
        "a": {"a"},
        "b": {"b"},
        "one": {"a"},
        "two": {"b"},
        "three": set(),
        "student": {"a", "b"},
        "df": set(),
        "shape": set(),
    }


def test_only_tracked_sites_are_reported():
    def model():
        a = pyro.sample("a", normal())
        b = pyro.sample("b", normal(a))
        pyro.sample("x", normal(a * b), obs=torch.tensor(0.3))

    def guide():
        a = pyro.sample("a", normal())
        pyro.sample("b", normal(a))

    result = factors(model, guide, "b")
    assert result["model x"] == {"b"}
    assert result["model a"] == set()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2.0 * x

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


def written(choice, number):
    """A vector of zeros, with a number written into it."""
    loc = torch.zeros(3)
    loc[choice] = number
    return (loc * torch.arange(3)).sum()


MEANS = torch.tensor([-1.0, 0.5, 2.0])
CATEGORY = dist.Categorical(torch.ones(3))
BITS = dist.Bernoulli(0.5 * torch.ones(3)).to_event(1)
ROUTES = {
    "times zero": (normal(), lambda z: z * 0.0),
    "flat": (normal(), lambda z: torch.relu(-z.abs() - 1)),
    "written": (normal(), lambda z: written(1, z)),
    "function of the user": (normal(), Doubled.apply),
    "index": (CATEGORY, lambda c: MEANS[c]),
    "index by name": (CATEGORY, lambda c: torch.index_select(input=MEANS, dim=0, index=c).sum()),
    "comparison": (CATEGORY, lambda c: torch.where(c > 0, 1.0, -1.0)),
    "one hot": (CATEGORY, lambda c: torch.nn.functional.one_hot(c, 3).to(MEANS.dtype) @ MEANS),
    "stacked": (CATEGORY, lambda c: torch.stack(tensors=[c + 0.5, c + 1.0], dim=0).sum(0)),
    "written at": (CATEGORY, lambda c: written(c, 1.0)),
    "scattered": (CATEGORY, lambda c: torch.zeros(3).scatter_(-1, c.unsqueeze(-1), 1.0)[0]),
    "int": (CATEGORY, lambda c: MEANS[int(c)]),
    "if": (CATEGORY, lambda c: MEANS[1] if c == 1 else MEANS[0]),
    "item": (CATEGORY, lambda c: torch.tensor(2.0 * c.item())),
    "new_tensor": (BITS, lambda c: c.new_tensor([c.long()[0], c.long()[1]]).sum()),
    "where": (BITS, lambda c: torch.where(c > 0)[0].numel() + torch.zeros(())),
    "repeated": (BITS, lambda c: torch.repeat_interleave(torch.ones(3), c.long()).sum()),
    "unique": (BITS, lambda c: torch.unique_consecutive(c).numel() + torch.zeros(())),
}


@pytest.mark.parametrize("name", ROUTES)
def test_a_site_depends_on_a_draw_by_any_route(name):
    fn, route = ROUTES[name]

    def model():
        z, y = pyro.sample("z", fn), pyro.sample("y", normal())
        pyro.sample("x", normal(route(z)), obs=torch.tensor(0.3))
        pyro.sample("other", normal(y), obs=torch.tensor(0.3))

    def guide():
        pyro.sample("z", fn)
        pyro.sample("y", normal())

    result = factors(model, guide, "y", "z")
    escapes = name in ("int", "if", "item", "new_tensor", "where", "repeated", "unique")
    # What leaves the tensors is known to reach x, and may reach all sites.
    assert result["model x"] == {"z"}
    assert result["model other"] == ({"y", "z"} if escapes else {"y"})


@pytest.mark.parametrize(
    "autoguide_class",
    [autoguide.AutoNormal, autoguide.AutoMultivariateNormal, autoguide.AutoIAFNormal],
)
def test_auto_guides_make_everything_depend_on_their_auxiliary_sites(autoguide_class):
    def model():
        a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 3):
            z = pyro.sample("z", normal(a))
            pyro.sample("x", normal(z), obs=torch.zeros(3))

    guide = autoguide_class(model)
    guide()
    trace = poutine.trace(guide).get_trace()
    auxiliary = {n for n, s in trace.nodes.items() if s.get("infer", {}).get("is_auxiliary")}
    result = factors(model, guide, *auxiliary)
    if autoguide_class is autoguide.AutoNormal:
        assert auxiliary == {"a_unconstrained", "z_unconstrained"}
        assert result["guide z"] == result["model x"] == {"z_unconstrained"}
        assert result["guide a"] == result["model a"] == {"a_unconstrained"}
        assert result["model z"] == auxiliary
        assert result["guide z_unconstrained"] == {"z_unconstrained"}
    else:
        assert len(auxiliary) == 1
        assert all(parents == auxiliary for parents in result.values())
        assert {"guide a", "guide z", "model a", "model z", "model x"} < set(result)


def test_looking_works_under_a_dispatch_mode_of_the_callers():
    def model():
        z = pyro.sample("z", normal())
        largest, _ = torch.stack([2.0 * z, z]).max(0)
        pyro.sample("x", normal(largest), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("z", normal(torch.zeros(()) + 1.0))

    expected = {"model z": {"z"}, "model x": {"z"}, "guide z": {"z"}}
    with FlopCounterMode(display=False):
        assert factors(model, guide, "z") == expected


@pytest.mark.parametrize(
    "flow",
    [
        lambda: dist.transforms.affine_coupling(2, [4]),
        lambda: dist.transforms.affine_autoregressive(2, [4]),
        lambda: dist.transforms.planar(2),  # has no inverse
        dist.transforms.StickBreakingTransform,
    ],
    ids=["coupling", "autoregressive", "planar", "stick-breaking"],
)
def test_flows_and_transformations_pass_dependencies_on(flow):
    flow = flow()

    def model():
        a = pyro.sample("a", normal())
        z = pyro.sample("z", normal(torch.zeros(flow(torch.zeros(2)).shape)).to_event(1))
        pyro.sample("x", normal(a + z.sum(-1)), obs=torch.tensor(0.0))

    def guide():
        a = pyro.sample("a", normal())
        base = normal(a * torch.ones(2)).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, [flow]))

    result = factors(model, guide, "a", "z")
    assert result["guide z"] == {"a", "z"}
    assert result["model z"] == {"z"}
    assert result["model x"] == {"a", "z"}
    assert result["guide a"] == {"a"}


@pytest.mark.parametrize(
    "make",
    [
        lambda a: dist.Gamma(a.exp(), 1.0),
        lambda a: dist.Beta(a.exp(), 1.0),
        lambda a: dist.Dirichlet(torch.stack([a.exp(), torch.tensor(1.0)])),
        lambda a: dist.Poisson(a.exp()),
        lambda a: dist.RelaxedBernoulli(torch.tensor(0.5), logits=a),
        lambda a: dist.LKJCholesky(2, a.exp()),
        lambda a: dist.Normal(a, 1.0).mask(torch.tensor(True)),
        lambda a: dist.Normal(a, 1.0).expand([3]).to_event(1),
    ],
    ids=["Gamma", "Beta", "Dirichlet", "Poisson", "RelaxedBernoulli", "LKJ", "masked", "expanded"],
)
def test_draws_that_are_not_reparameterized_explicitly_depend_on_what_is_upstream(make):
    def model():
        pyro.sample("a", normal())
        pyro.sample("z", make(torch.tensor(0.0)))

    def guide():
        a = pyro.sample("a", normal())
        pyro.sample("z", make(a))

    result = factors(model, guide, "a", "z")
    assert result["guide z"] == {"a", "z"}
    assert result["guide a"] == {"a"}
    assert result["model z"] == {"z"}


def test_a_site_fixed_to_an_upstream_draw_depends_on_it():
    def model():
        a = pyro.sample("a", normal())
        b = pyro.sample("b", normal())
        pyro.sample("x", normal(b), obs=torch.tensor(0.0))
        pyro.factor("penalty", -(a**2))

    def guide():
        a = pyro.sample("a", normal())
        pyro.sample("b", dist.Delta(2 * a))

    result = factors(model, guide, "a")
    assert result["guide b"] == result["model b"] == result["model x"] == {"a"}
    assert result["model penalty"] == {"a"}


class Opaque(torch.autograd.Function):
    """Rejects tensor subclasses, as extensions in C do."""

    @staticmethod
    def forward(ctx, x):
        if type(x) not in (torch.Tensor, nn.Parameter):
            raise TypeError("no subclasses of Tensor")
        return x.clone()


def test_programs_see_plain_tensors():
    def model():
        z = pyro.sample("z", normal())
        assert type(z) is torch.Tensor
        pyro.sample("x", normal(Opaque.apply(z)), obs=torch.tensor(0.0))

    def guide():
        pyro.sample("z", normal())

    assert factors(model, guide, "z")["model x"] == {"z"}


@pytest.mark.parametrize("error", [IndexError, KeyError, TypeError, RuntimeError])
def test_programs_that_fail_when_they_run_again_depend_on_everything(error, caplog):
    runs = SimpleQueue()  # unlike a list, an extra run does not put it back

    def model():
        runs.put(None)
        if runs.qsize() == 2:
            raise error("not again")
        with pyro.plate("data", 2):
            z = pyro.sample("z", normal())
            pyro.sample("x", normal(z), obs=torch.zeros(2))

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", normal())

    with caplog.at_level("WARNING"):
        elbo = TraceIWAE_ELBO(2, vectorize_particles=False)
        assert elbo.bounds(model, guide).plates == ()
    assert "fail when they run again at the same draws" in caplog.text
    assert not poutine.runtime._PYRO_STACK


def look_nesting(programs):
    checked_run(programs, True)


def look_dependencies(programs):
    marked_run(programs, {})


looks = pytest.mark.parametrize("look", [look_nesting, look_dependencies])


def noisy_programs():
    def model():
        theta = pyro.sample("theta", normal())
        with pyro.plate("data", 20, subsample_size=4):
            z = pyro.sample("z", normal(theta + random.random()))
            pyro.sample("x", normal(z + np.random.rand()), obs=torch.zeros(4))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.5))
        pyro.sample("theta", normal(loc))
        with pyro.plate("data", 20, subsample_size=4):
            pyro.sample("z", normal(loc * torch.rand(())))

    return Programs(model, guide, (), {})


@looks
def test_looking_leaves_every_random_number_generator_alone(look):
    programs = noisy_programs()
    pyro.set_rng_seed(7)
    expected = torch.rand(3), np.random.rand(3), random.random()
    pyro.set_rng_seed(7)
    look(programs)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert random.random() == expected[2]


@looks
def test_looking_leaves_random_number_generators_alone_when_the_program_fails(look):
    def model():
        random.random()
        np.random.rand()
        torch.rand(())
        raise RuntimeError("broken")

    programs = Programs(model, lambda: pyro.sample("z", normal()), (), {})
    pyro.set_rng_seed(7)
    expected = torch.rand(3), np.random.rand(3), random.random()
    pyro.set_rng_seed(7)
    error = RuntimeError if look is look_nesting else MarkedRunError
    with pytest.raises(error, match="broken"):
        look(programs)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert random.random() == expected[2]
    assert not poutine.runtime._PYRO_STACK


@looks
def test_looking_shows_no_sites_and_no_parameters_to_outer_handlers(look):
    with poutine.trace() as outer:
        look(noisy_programs())
    assert set(outer.trace.nodes) == set()


@looks
def test_looking_works_without_gradients_and_leaves_gradient_mode_alone(look):
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            look(noisy_programs())
            assert torch.is_grad_enabled() == enabled
    assert pyro.param("loc").grad is None
    assert pyro.param("loc").requires_grad


@pytest.mark.parametrize("enabled", [False, True])
def test_looking_leaves_validation_alone(enabled):
    pyro.enable_validation(enabled)
    for look in (look_nesting, look_dependencies):
        look(noisy_programs())
        assert pyro.settings.get("validate_poutine") == enabled
        assert torch.distributions.Distribution._validate_args == enabled
        assert pyro.settings.get("validate_infer") == enabled


def nesting(model, guide=lambda: None):
    return checked_run(Programs(model, guide, (), {}), True).nesting


def test_nesting_is_the_depth_of_the_deepest_plate():
    def observe(*dims):
        plates = [pyro.plate(f"plate{d}", 2, dim=d) for d in dims]

        def model():
            shape = [1] * -min(dims, default=0)
            for d in dims:
                shape[d] = 2
            with inside(plates):
                pyro.sample("x", normal(), obs=torch.zeros(shape))

        return model

    assert nesting(observe()) == 0
    assert nesting(observe(-1)) == 1
    assert nesting(observe(-2, -1)) == 2
    assert nesting(observe(-3)) == 3


def inside(plates):
    stack = contextlib.ExitStack()
    for plate in plates:
        stack.enter_context(plate)
    return stack


def test_nesting_counts_plates_of_either_program():
    def plated(depth):
        def program():
            with inside([pyro.plate(f"p{d}", 3, dim=-d) for d in range(1, depth + 1)]):
                pyro.sample("z", normal())

        return program

    def model():
        with pyro.plate("p1", 3, dim=-1), pyro.plate("p2", 3, dim=-2):
            pyro.sample("z", normal())
            with pyro.plate("p3", 3, dim=-3):
                pyro.sample("x", normal(), obs=torch.zeros(3, 3, 3))

    assert nesting(model, plated(2)) == 3
    assert nesting(plated(2), plated(2)) == 2


def test_nesting_of_sequential_plates_is_none():
    def model():
        for i in pyro.plate("data", 3):
            pyro.sample(f"x{i}", normal(), obs=torch.tensor(0.0))

    assert nesting(model) == 0


def test_nesting_counts_plates_that_hold_deterministic_sites_only():
    # The particles' dim would collide with such a plate.
    def model():
        with pyro.plate("data", 3, dim=-1):
            z = pyro.sample("z", normal())
            pyro.sample("x", normal(z), obs=torch.zeros(3))
            with pyro.plate("copies", 2, dim=-2):
                pyro.deterministic("copied", z.expand(2, 3))

    def guide():
        with pyro.plate("data", 3, dim=-1):
            pyro.sample("z", normal())

    assert nesting(model, guide) == 2
