"""Monte Carlo EM: Fisher's identity, chains that go on, draws that serve several updates."""

import copy
import itertools
import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import SVI

from pyro_mcvae import (
    HMC,
    MALA,
    LearnedStepSize,
    MonteCarloEM,
    load_checkpoint,
    save_checkpoint,
)
from tests.estimates import assert_gradient, assert_mean, gradients
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    GammaPoisson,
    HierarchicalGaussian,
    NestedGaussian,
    ProbabilisticPCA,
    SequentialPlate,
)

QUICK = {"vectorize_particles": True, "max_plate_nesting": 1}


def fisher(exact):
    """The gradient of log p(x) for the model's parameters, of the ELBO for the guide's."""
    evidence, elbo = exact.grad(exact.log_evidence), exact.grad(exact.elbo)
    return {n: evidence[n] if n.startswith("theta") else elbo[n] for n in exact.values}


@pytest.mark.parametrize(
    ("size", "options"),
    [(None, {"num_particles": 3, **QUICK}), (50, {})],
    ids=["vectorized", "minibatches"],
)
def test_gradient_is_exact_where_chains_begin_at_the_posterior(size, options):
    # Many data in one step are as many independent chains.
    exact = ProbabilisticPCA(p=3, N=100, sigma=0.5, family="full", subsample_size=size)
    exact.x = exact.x + 1.0  # far from what the model says: gradients that stand out
    exact.set_guide("exact")
    # A large step size: that moves are rejected leaves the posterior as it is.
    elbo = MonteCarloEM(1, MALA(1.0), **options)
    assert_gradient(elbo, exact, fisher(exact), 16)


@pytest.mark.parametrize("coordinates", ["noise", pytest.param("latent", marks=pytest.mark.slow)])
def test_gradient_is_exact_after_long_chains(coordinates):
    exact = ProbabilisticPCA(p=3, N=100, sigma=0.5, family="mean_field")
    step = 0.3 if coordinates == "noise" else 0.12
    elbo = MonteCarloEM(
        8, HMC(step, num_leapfrog=5), num_particles=3, coordinates=coordinates, **QUICK
    )
    assert_gradient(elbo, exact, fisher(exact), 24)


@pytest.mark.slow
def test_constrained_latents():
    class Learned(GammaPoisson):
        """z ~ Gamma(a, b) with a parameter b."""

        def model(self, subsample=None):
            b = pyro.param("theta_b", lambda: self.b.clone())
            with self.plate(subsample) as idx:
                z = pyro.sample("z", dist.Gamma(self.a, b))
                pyro.sample("x", dist.Poisson(z), obs=self.x[idx])

    exact = Learned(N=4)
    a, b, x = exact.a, exact.b.clone().requires_grad_(), exact.x
    (wanted,) = torch.autograd.grad((a * b.log() - (a + x) * torch.log1p(b)).sum(), b)
    exact.values = {"theta_b": exact.b, **exact.values}
    # Trajectories about as long as the log latents are broad, which do not return to the start.
    elbo = MonteCarloEM(10, HMC(0.16, num_leapfrog=4), num_particles=100, **QUICK)
    assert_mean(gradients(elbo, exact, 8)["theta_b"], wanted)


def test_the_value_is_the_plain_elbo_by_every_way():
    exact = ConjugateGaussian(N=60, subsample_size=30)
    elbo = MonteCarloEM(2, HMC(0.3, num_leapfrog=2), num_particles=2)
    result = []
    for name in ("loss", "differentiable_loss", "loss_and_grads", "bounds"):
        pyro.set_rng_seed(0)
        value = getattr(elbo, name)(exact.model, exact.guide)
        value = -value.total if name == "bounds" else value
        result.append(float(torch.as_tensor(value).detach()))
    assert all(math.isclose(result[0], other, rel_tol=1e-9) for other in result)
    with pyro.validation_enabled(False):
        values = torch.tensor([elbo.loss(exact.model, exact.guide) for _ in range(50)])
    assert_mean(-values, exact.elbo())


def test_step_size_adapts_to_its_target():
    exact = ProbabilisticPCA(p=3, N=20, sigma=0.3, family="mean_field", learn=False)
    elbo = MonteCarloEM()
    assert elbo.kernel.num_leapfrog == 10
    assert elbo.kernel.step_size.target_acceptance == 0.9
    elbo.kernel.num_leapfrog = 3
    acceptance = []
    with pyro.validation_enabled(False):
        for _ in range(70):
            elbo.loss_and_grads(exact.model, exact.guide)
            acceptance.append(elbo.last_step.acceptance)
    assert abs(torch.stack(acceptance[40:]).mean() - 0.9) < 0.04
    elbo.eval()
    before = elbo.kernel.step_size().clone()
    elbo.loss_and_grads(exact.model, exact.guide)
    assert elbo.kernel.step_size() == before


# --- Persistent chains ----------------------------------------------------------------------------


class Line:
    """z ~ N(0, 1), x ~ N(w z + b, 0.7), and the prior as the guide, which has no parameters."""

    def __init__(self, n=8, size=None):
        self.x = 1.5 * torch.randn(n, generator=torch.Generator().manual_seed(0)) + 2.0
        self.size = size
        self.values = {"w": torch.tensor(1.0), "b": torch.tensor(0.0)}

    def model(self, rows=None):
        w, b = (pyro.param(n, lambda n=n: self.values[n].clone()) for n in self.values)
        with pyro.plate("data", len(self.x), self.size, subsample=rows) as i:
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(w * z + b, 0.7), obs=self.x[i])

    def guide(self, rows=None):
        with pyro.plate("data", len(self.x), self.size, subsample=rows):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    def gradient(self):
        w, b = (v.clone().requires_grad_() for v in self.values.values())
        evidence = dist.Normal(b, (w**2 + 0.49).sqrt()).log_prob(self.x).sum()
        return dict(zip(self.values, torch.autograd.grad(evidence, (w, b)), strict=True))


@pytest.mark.slow
def test_persistent_chains_forget_a_poor_guide():
    def bias(exact, count, block, **options):
        """In standard errors, of the mean of blocks: chains are correlated in time."""
        pyro.clear_param_store()
        elbo = MonteCarloEM(1, HMC(0.4, num_leapfrog=2), num_particles=100, **options, **QUICK)
        result, wanted = gradients(elbo, exact, count), exact.gradient()
        blocks = {n: v[20:].reshape(-1, block).mean(1) for n, v in result.items()}
        return {n: (v.mean() - wanted[n]) / (v.std() / len(v) ** 0.5) for n, v in blocks.items()}

    assert all(abs(b) < 4.5 for b in bias(Line(size=4), 120, 10, persistent=True).values())
    assert any(abs(b) > 8 for b in bias(Line(), 40, 1).values())


def test_persistent_chains_are_found_by_the_indices_of_their_plates():
    exact = Line()
    elbo = MonteCarloEM(1, HMC(0.3, num_leapfrog=2), persistent=True)
    elbo.loss_and_grads(exact.model, exact.guide, torch.tensor([5, 2]))
    first = elbo.states.positions.clone()
    assert elbo.states.visited.nonzero().flatten().tolist() == [2, 5]
    assert (first[0].flatten() != 0).nonzero().flatten().tolist() == [2, 5]
    elbo.loss_and_grads(exact.model, exact.guide, torch.tensor([1, 6]))
    second = elbo.states.positions
    assert (second[0, [2, 5]] == first[0, [2, 5]]).all()
    assert elbo.states.visited.nonzero().flatten().tolist() == [1, 2, 5, 6]
    # A rejected move leaves a chain where it stood, not at a new draw of the guide.
    elbo.kernel.step_size.value.fill_(1e4)
    elbo.loss_and_grads(exact.model, exact.guide, torch.tensor([6, 2]))
    assert (elbo.states.positions == second).all()


def test_persistent_chains_of_two_plates_and_of_none():
    x, rows, columns = torch.randn(4, 3), torch.tensor([3, 0]), torch.tensor([2, 1])

    def crossed(observe):
        inner = pyro.plate("rows", 4, subsample=rows, dim=-2)
        with pyro.plate("columns", 3, subsample=columns, dim=-1), inner:
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            if observe:
                pyro.sample("x", dist.Normal(z, 1.0), obs=x[rows[:, None], columns])

    elbo = MonteCarloEM(1, HMC(0.3, num_leapfrog=2), persistent=True)
    elbo.loss_and_grads(lambda: crossed(True), lambda: crossed(False))
    assert elbo.states.positions.shape == (1, 4, 3, 1)
    assert elbo.states.visited.nonzero().tolist() == [[0, 1], [0, 2], [3, 1], [3, 2]]

    exact = HierarchicalGaussian(N=4)
    elbo = MonteCarloEM(1, HMC(0.1, num_leapfrog=2), persistent=True, joint=True)
    elbo.loss_and_grads(exact.model, exact.guide)
    assert elbo.states.visited.shape == ()
    elbo.loss_and_grads(exact.model, exact.guide)


def test_chains_and_step_size_are_saved_and_loaded():
    exact = Line(size=4)
    elbo, other = (MonteCarloEM(2, persistent=True) for _ in range(2))
    for _ in range(5):
        elbo.loss_and_grads(exact.model, exact.guide)
    saved = {name: value.clone() for name, value in elbo.state_dict().items()}
    assert {"states.positions", "states.visited", "kernel.step_size.value"} <= set(saved)
    other.load_state_dict(saved)

    def step(loss):
        pyro.set_rng_seed(0)
        loss.loss_and_grads(exact.model, exact.guide)
        return loss.states.positions

    assert (step(elbo) == step(other)).all()
    assert elbo.kernel.step_size() == other.kernel.step_size()


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    exact = Line(size=4)

    def fresh():
        elbo = MonteCarloEM(1, HMC(num_leapfrog=2), updates_per_draw=2, persistent=True)
        return SVI(exact.model, exact.guide, pyro.optim.Adam({"lr": 0.05}), loss=elbo), elbo

    svi, _ = fresh()
    for _ in range(4):
        svi.step()
    save_checkpoint(tmp_path / "run.pt", {"svi": svi})
    then = [svi.step() for _ in range(3)]
    load_checkpoint(tmp_path / "run.pt", {"svi": svi})
    assert [svi.step() for _ in range(3)] == then  # the draw of the third step is not used again
    pyro.clear_param_store()
    svi, elbo = fresh()
    svi.step()
    load_checkpoint(tmp_path / "run.pt", {"svi": svi})
    assert [svi.step() for _ in range(3)] == then
    assert elbo.states.visited.any()


# --- Several updates per draw ---------------------------------------------------------------------


def test_updates_between_draws_use_the_same_latents():
    exact = ProbabilisticPCA(p=3, N=6, sigma=0.5, subsample_size=3)
    elbo = MonteCarloEM(2, HMC(0.2, num_leapfrog=3), updates_per_draw=3, num_particles=2)
    svi = SVI(exact.model, exact.guide, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
    seen, losses = [], []

    def draw():
        trace = elbo._draw.sample.runs[-1].model_trace
        return trace.nodes["z"]["value"].clone(), trace.nodes["data"]["value"].clone()

    for _ in range(7):
        losses.append(svi.step())
        seen.append(draw())
    same = [
        all((a == b).all() for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen)
    ]
    assert same == [True, True, False, True, True, False]
    assert len(set(losses)) == 7


def test_gradient_of_a_later_update():
    exact = ProbabilisticPCA(p=3, N=4, sigma=0.5)
    elbo = MonteCarloEM(1, HMC(0.2, num_leapfrog=3), updates_per_draw=2, num_particles=3, **QUICK)
    elbo.loss_and_grads(exact.model, exact.guide)
    sample = elbo._draw.sample
    z = sample.runs[0].model_trace.nodes["z"]["value"].reshape(3, 4, 2).clone()
    for value in dict(pyro.get_param_store().named_parameters()).values():
        value.grad = None
    elbo.loss_and_grads(exact.model, exact.guide)
    theta = {n: exact.values[n].clone().requires_grad_() for n in ("theta0", "theta1")}
    loc = theta["theta0"] + z @ theta["theta1"].T
    wanted = dist.Normal(loc, exact.sigma).log_prob(exact.x).sum() / 3
    result = dict(pyro.get_param_store().named_parameters())
    for name, grad in zip(theta, torch.autograd.grad(wanted, list(theta.values())), strict=True):
        assert torch.allclose(-result[name].grad, grad)
    assert all(result[n].grad is None for n in ("W", "c", "log_s"))


def test_a_later_update_with_global_latents_and_a_structured_guide():
    x = torch.randn(5) + 1

    def model(x):
        w = pyro.param("w", torch.tensor(1.0))
        loc = pyro.sample("loc", dist.Normal(w, 2.0))
        with pyro.plate("data", len(x)):
            a = pyro.sample("a", dist.Normal(loc, 1.0))
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("x", dist.Normal(w * b, 1.0), obs=x)

    def guide(x):
        slope = pyro.param("slope", torch.tensor(0.3))
        pyro.sample("loc", dist.Normal(pyro.param("m", torch.tensor(0.5)), 0.5))
        with pyro.plate("data", len(x)):
            a = pyro.sample("a", dist.Normal(slope * x, 0.7))
            pyro.sample("b", dist.Normal(slope * a, 0.7))

    for vectorize in (False, True):
        pyro.clear_param_store()
        elbo = MonteCarloEM(
            1,
            HMC(0.2, num_leapfrog=2),
            updates_per_draw=2,
            num_particles=2,
            vectorize_particles=vectorize,
        )
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=elbo)
        svi.step(x)
        nodes = [run.model_trace.nodes for run in elbo._draw.sample.runs]
        draws = {n: [node[n]["value"].detach().clone() for node in nodes] for n in ("loc", "b")}
        w = pyro.param("w").detach().clone().requires_grad_()
        loc, b = draws["loc"][0], torch.stack(draws["b"]).reshape(2, 5)
        wanted = dist.Normal(w, 2.0).log_prob(loc).sum()
        wanted = wanted + dist.Normal(w * b, 1.0).log_prob(x).sum() / 2
        pyro.param("w").grad = None
        elbo.loss_and_grads(model, guide, x)
        assert torch.allclose(-pyro.param("w").grad, torch.autograd.grad(wanted, w)[0])


def test_other_arguments_are_drawn_for_anew():
    def model(x, scale):
        w = pyro.param("w", torch.tensor(1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(w * z, scale), obs=x)

    def guide(x, scale):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    elbo = MonteCarloEM(1, HMC(0.2, num_leapfrog=2), updates_per_draw=100)
    x = torch.zeros(3)
    left = []

    def step(*args):
        elbo.loss_and_grads(model, guide, *args)
        left.append(elbo._draw.num_left)

    step(x, 1.0)
    step(x, 1.0)
    step(x, 2.0)  # another number
    step(x, 2.0)
    step(x.clone(), 2.0)  # another tensor
    x.add_(1.0)
    step(x, 2.0)
    step(x, 2.0)
    x.add_(1.0)  # the same tensor with other data
    step(x, 2.0)
    assert left == [99, 98, 99, 98, 99, 99, 98, 99]


class _Holder:
    """Data beside the arguments."""

    def __init__(self, data):
        self.data, self.losses = data, []


def _refilled(make):
    """Data in an object that a batch is written to."""
    held = make()
    return (held,), lambda value: held.__setitem__(slice(None), value), lambda args: args[0]


def _closed_over(make):
    held = make()
    return (), lambda value: held.__setitem__(slice(None), value), lambda args: held


def _held(make):
    held = _Holder(make())
    return (), lambda value: setattr(held, "data", make() + value), lambda args: held.data


def _listed(make):
    held = [make()]
    return (), lambda value: held.__setitem__(0, make() + value), lambda args: held[0]


ARRAYS = {"NumPy": lambda: np.zeros(20), "tensor": lambda: torch.zeros(20)}


@pytest.mark.parametrize(
    ("place", "kind"),
    [*zip([_refilled, _closed_over, _held, _listed], [*ARRAYS, *ARRAYS], strict=True)],
)
def test_data_that_have_changed_are_drawn_for_anew(place, kind):
    args, put, get = place(ARRAYS[kind])
    unread = _Holder(None)

    def model(*args):
        loc, x = pyro.param("loc", torch.tensor(0.0)), torch.as_tensor(get(args))
        unread.data = x
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(loc, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(*args):
        with pyro.plate("data", 20):
            pyro.sample("z", dist.Normal(torch.zeros(20), 1.0))

    elbo = MonteCarloEM(10, HMC(0.5, num_leapfrog=3), updates_per_draw=5)
    gradients, left = [], []
    for step in range(4):
        if step == 2:
            put(20.0)
        unread.losses.append(elbo.loss_and_grads(model, guide, *args))
        parameter = pyro.get_param_store()._params["loc"]
        gradients.append(-parameter.grad.item() / 20)
        left.append(elbo._draw.num_left)
        parameter.grad = None
    assert left == [4, 3, 4, 3]
    # E[z - loc | x] is half of x, with a standard error of 0.7 / sqrt(20).
    assert abs(gradients[1]) < 1
    assert abs(gradients[2] - 10) < 1


def test_copies_make_their_own_draws():
    exact = Line()
    elbo = MonteCarloEM(1, HMC(0.2, num_leapfrog=2), updates_per_draw=3, persistent=True)
    elbo.loss_and_grads(exact.model, exact.guide)
    for other in (copy.deepcopy(elbo), pickle.loads(pickle.dumps(elbo))):
        assert other._draw is None
        assert (other.states.positions == elbo.states.positions).all()
        other.loss_and_grads(exact.model, exact.guide)
    assert elbo._draw.num_left == 2


# --- What is refused ------------------------------------------------------------------------------


def test_learned_step_sizes_are_refused():
    with pytest.raises(ValueError, match=r"kernel.step_size.log_value would get no gradient"):
        MonteCarloEM(kernel=HMC(LearnedStepSize(0.1)))


def refused(make, match, **options):
    exact = make()
    with pytest.raises(ValueError, match=match):
        MonteCarloEM(1, HMC(0.1, num_leapfrog=1), **options).loss_and_grads(
            exact.model, exact.guide
        )


def test_what_is_refused_at_a_step():
    refused(lambda: DiscreteMixture(N=3), "MonteCarloEM moves latents along gradients.* 'z' is")
    refused(SequentialPlate, "one vectorized plate.*or persistent=False", persistent=True)


def test_chains_of_other_data_are_refused():
    elbo = MonteCarloEM(1, HMC(0.1, num_leapfrog=1), persistent=True)
    for exact in (ConjugateGaussian(N=3), NestedGaussian(G=2, M=2)):
        if isinstance(exact, ConjugateGaussian):
            elbo.loss_and_grads(exact.model, exact.guide)
        else:
            with pytest.raises(ValueError, match=r"of an earlier step have shape \(1, 3, 1\)"):
                elbo.loss_and_grads(exact.model, exact.guide)


def minibatches(elbo, data, index=None, model_draws=False):
    """Steps on batches in a plate, and the positions after each."""

    def model(x):
        with pyro.plate("data", 6 if index else len(x), subsample=index and torch.tensor(index)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            x = x.bernoulli() if model_draws else x
            pyro.sample("x", dist.Normal(z, 0.1), obs=x)

    def guide(x):
        with pyro.plate("data", 6 if index else len(x), subsample=index and torch.tensor(index)):
            pyro.sample("z", dist.Normal(pyro.param("m", torch.zeros(())), 0.1))

    for x in data:
        elbo.loss_and_grads(model, guide, x)


def test_persistent_chains_of_another_datum_are_refused():
    """A loader's minibatches in plate("data", len(x)) have the same indices."""
    batches = [torch.full((3,), -5.0), torch.full((3,), 5.0)]
    options = {"persistent": True}
    elbo = MonteCarloEM(1, HMC(0.02, num_leapfrog=1), **options)
    minibatches(elbo, batches[:1] * 3)
    before = elbo.states.positions.clone()
    with pytest.raises(ValueError, match=r"datum 0 of plate 'data'.*'x'.*subsample=index.*fixed_"):
        minibatches(elbo, batches[1:])
    assert torch.equal(elbo.states.positions, before)
    elbo = MonteCarloEM(1, HMC(0.02, num_leapfrog=1), **options)
    minibatches(elbo, [torch.tensor([-5.0, -4.0])], index=[2, 4])
    minibatches(elbo, [torch.tensor([-4.0, -5.0])], index=[4, 2])
    with pytest.raises(ValueError, match="datum 4"):
        minibatches(elbo, [torch.tensor([-5.0, -3.0])], index=[2, 4])
    for case in ({"fixed_data": False}, {}):
        elbo = MonteCarloEM(1, HMC(0.02, num_leapfrog=1), **options, **case)
        gray = [torch.full((3,), 0.5)] * 4
        minibatches(elbo, gray if not case else batches, model_draws=not case)
