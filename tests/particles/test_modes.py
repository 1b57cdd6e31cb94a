"""Particles at once have the densities and gradients of particles one by one, in every way."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.infer.reparam import StudentTReparam
from torch import nn

from pyro_mcvae import (
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    log_evidence,
)
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.vmap import Mode
from tests.cases import every
from tests.params import in_turn
from tests.particles.modes import check_way, only
from tests.zoo import EXAMPLES, data, param

# A GuideMessenger runs both programs at once, in leading dims only.
NAMES = [name for name in EXAMPLES if name != "messenger"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, mode, marks=pytest.mark.slow if i // 2 % 4 else ())
        for i, n in enumerate(NAMES)
        for mode in ((Mode.MAPPED, Mode.BOTH_MAPPED)[i % 2],)
    ],
)
def test_programs_that_broadcast_have_the_same_numbers_under_vmap(name, mode, monkeypatch):
    only(monkeypatch, mode)
    pair = EXAMPLES[name]()
    check_way(pair.model, pair.guide, pair.args, mode)


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers)


class Scan(nn.Module):
    """A GRU over the latent as a sequence of two steps."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRUCell(1, 3)

    def forward(self, z):
        return self.gru(z[:, 1:], self.gru(z[:, :1]))


# Of four data's two latents, three numbers; each takes a leading dim for another one.
DECODERS = {
    "softmax": lambda: lambda z: z.repeat(1, 2)[:, :3].softmax(1),
    "mean": lambda: lambda z: (z - z.mean(1, keepdim=True)).repeat(1, 2)[:, :3],
    "view": lambda: lambda z: z.reshape(8).view(4, 2).cumsum(1).repeat(1, 2)[:, :3],
    "first": lambda: lambda z: z[:, 0].unsqueeze(1).expand(4, 3),
    "stack": lambda: lambda z: torch.stack([z[i] for i in range(4)]).repeat(1, 2)[:, :3],
    "convolution": lambda: net(
        nn.Unflatten(1, (1, 2)), nn.ConvTranspose1d(1, 2, 2), nn.Conv1d(2, 1, 1), nn.Flatten()
    ),
    "group norm": lambda: net(nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)),
    "gru": Scan,
    "matrix": lambda: lambda z: (z.t().matmul(torch.eye(4)).t()).repeat(1, 2)[:, :3],
}


# Of operations that torch.vmap takes one particle at a time, as a GRU's cell.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_that_do_not_broadcast_are_mapped(name):
    x, decoder = data(4, 3), DECODERS[name]()

    def model():
        if isinstance(decoder, nn.Module):
            pyro.module("decoder", decoder)
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(param("slope") * decoder(z), 0.7).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(x[:, :2] / 2, param("s").exp()).to_event(1))

    check_way(model, guide, mode=Mode.MAPPED)


def regression(local):
    """``X @ w``, with the weights in no plate or in one."""
    rows, y = data(5, 3), data(5, seed=4)

    def weights(loc):
        if local:
            with pyro.plate("features", 3):
                return pyro.sample("w", dist.Normal(loc, 1.0))
        return pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))

    def model():
        w = weights(torch.zeros(3))
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(rows @ w, scale), obs=y)

    def guide():
        weights(param("loc", 3))
        pyro.sample("scale", dist.Gamma(3.0, 2.0))

    return model, guide


@pytest.mark.parametrize("local", [True, False])
def test_regressions_are_mapped(local):
    check_way(*regression(local), mode=Mode.MAPPED)


def hidden_markov():
    y = data(5, seed=7)

    def model():
        rate = pyro.sample("rate", dist.Dirichlet(torch.ones(2)))
        one = torch.eye(1)
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        move = dist.Normal(torch.zeros(1), rate[:1]).to_event(1)
        pyro.sample("y", dist.GaussianHMM(start, one, move, one, start), obs=y.unsqueeze(-1))

    def guide():
        pyro.sample("rate", dist.Dirichlet(param("alpha", 2).exp()))

    return model, guide


def test_a_hidden_markov_model_is_looped(caplog):
    """Its distribution is made of more than its parameters."""
    programs = Programs(*hidden_markov(), (), {})
    assert len(ParticleSampler(3, None, float("inf")).sample(programs).runs) == 3
    assert "GaussianHMM" in caplog.text


def test_a_guide_that_does_not_broadcast_is_mapped_too():
    x = data(4)

    def model():
        with pyro.plate("data", 4):
            a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            b = pyro.sample("b", dist.Normal(a.softmax(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(b[:, 0], 1.0), obs=x)

    def guide():
        with pyro.plate("data", 4):
            a = pyro.sample("a", dist.Normal(param("loc", 2), 0.8).to_event(1))
            pyro.sample("b", dist.Normal(a.softmax(1), 0.9).to_event(1))

    check_way(model, guide, mode=Mode.BOTH_MAPPED)


@pytest.mark.slow
def test_a_program_that_reads_a_latent_is_looped_and_says_so(caplog):
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z if z > 0 else -z, 1.0), obs=torch.tensor(0.3))

    def guide():
        pyro.sample("z", dist.Normal(0.2, 1.0))

    with caplog.at_level(logging.WARNING):
        losses = [
            TraceIWAE_ELBO(300, vectorize_particles=v).loss(model, guide) for v in (None, False)
        ]
    (line,) = [r.getMessage() for r in caplog.records if "run one by one" in r.message]
    assert line.index("in a leading dim: ") < line.index("under vmap: ")
    assert len(line.replace("\n", "x" * 400)) < 400  # one short line
    assert math.isclose(*losses, abs_tol=0.1)
    with pytest.raises(RuntimeError, match="vectorize_particles=False"):
        TraceIWAE_ELBO(3, vectorize_particles=True).loss(model, guide)


@pytest.mark.parametrize(
    "decide",
    [
        lambda z: z.sum() > 0,
        lambda z: z.max().item() > 0,
        lambda z: float(z.mean()) > 0,
        lambda z: not torch.equal(z, z.abs().neg()),
    ],
)
def test_a_program_that_decides_for_all_data_is_looped(decide, caplog):
    """All particles run so together, and mostly take the way of each."""
    x = data(4)

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z if decide(z) else 3 * z, 1.0), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(1.5, 0.5))

    with caplog.at_level(logging.WARNING):
        TraceIWAE_ELBO(3).loss(model, guide)
    assert "site 'z', at" in caplog.text


class Noisy:
    """Programs that draw apart from their sites, which in a loop each particle does by itself."""

    def __init__(self, where):
        self.where = where

    def noise(self, program):
        return torch.randn(4) if program == self.where else 0.0

    def model(self):
        noise = self.noise("model")
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 3.0).to_event(1))
            pyro.sample("x", dist.Normal(z.squeeze(-1) + noise, 1.0), obs=torch.zeros(4))

    def guide(self):
        noise = self.noise("guide")
        with pyro.plate("data", 4):
            loc = (pyro.param("loc", torch.randn(())) * 0 + noise) * torch.ones(4)
            pyro.sample("z", dist.Normal(loc.unsqueeze(-1), 1e-3).to_event(1))


@pytest.mark.parametrize("where", ["model", "guide"])
def test_noise_apart_from_sites_is_each_particles_own(where):
    programs = Noisy(where)
    sampler = ParticleSampler(2000, None, float("inf"))
    pair = Programs(programs.model, programs.guide, (), {})
    sample = sampler.sample(pair)
    assert sampler.runner.mode(pair) in (Mode.MAPPED, Mode.BOTH_MAPPED)
    likelihood = next(t.log_prob for t in sample.runs[0].terms if t.key.name == "x")
    # Of log N(0 | noise, 1) with standard normal noise.
    result = likelihood.reshape(2000, 4).std(0)
    assert torch.allclose(result, torch.full((4,), 0.5).sqrt(), rtol=0.15)


def test_parameters_that_begin_with_noise_are_those_of_one_particle(monkeypatch):
    only(monkeypatch, Mode.BOTH_MAPPED)
    calls = []

    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        calls.append(0)
        late = pyro.param("late", torch.randn(3)) if len(calls) > 20 else torch.zeros(3)
        pyro.sample("z", dist.Normal(late.sum(), 1.0))

    elbo = TraceIWAE_ELBO(4)
    while "late" not in pyro.get_param_store():
        elbo.loss_and_grads(model, guide)
    elbo.loss_and_grads(model, guide)
    param = pyro.get_param_store()._params["late"]
    assert param.shape == param.grad.shape == (3,)


def test_a_batch_norm_is_updated_by_each_particle():
    """Which vmap cannot do: the model is looped over."""
    decoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    def model():
        pyro.module("decoder", decoder)
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=data(4, 3))

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    elbo = TraceIWAE_ELBO(5)
    for batches in (5, 10):
        elbo.loss_and_grads(model, guide)
        assert decoder[1].num_batches_tracked == batches


@pytest.mark.parametrize("trained_before", [True, False])
def test_flattened_particles_have_the_statistics_of_their_own_batches(trained_before):
    norm, x = nn.BatchNorm1d(1, affine=False), torch.tensor([-1.0, 1.0])

    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = norm(z.reshape(-1, 1)).reshape(z.shape)
            pyro.sample("x", dist.Normal(loc, 0.3), obs=x)

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(x, 1.0))

    elbo, loop = TraceIWAE_ELBO(20), TraceIWAE_ELBO(20, vectorize_particles=False)
    norm.train(trained_before)
    elbo.loss(model, guide)
    norm.train()
    result = []
    for one in (elbo, loop):
        one.loss(model, guide)  # finds the way out
        pyro.set_rng_seed(0)
        result.append(torch.tensor([one.loss(model, guide) for _ in range(5)]))
    # All particles in one batch have 3.0, each in its own 0.04.
    assert torch.equal(*result)


def test_each_training_mode_of_a_module_that_is_held_has_its_way():
    drop, loc = nn.Dropout(0.5), torch.ones(4)

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 0.3), obs=loc)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(drop(loc), 0.3))

    loss = TraceIWAE_ELBO(5)
    drop.eval()
    loss.loss(model, guide)
    drop.train()
    result = []
    for elbo in (loss, TraceIWAE_ELBO(5)):
        pyro.set_rng_seed(3)
        result.append(elbo.loss(model, guide))
    assert result[0] == result[1]


@pytest.mark.parametrize(
    "make", [lambda: TraceSGVB_ELBO(num_particles=3), lambda: TraceIWAE_ELBO(4), TraceAIS_ELBO]
)
def test_finding_a_way_does_not_change_what_a_seed_gives(make):
    decoder, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), data(9, 3)

    def model():
        with pyro.plate("data", 9):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 9):
            pyro.sample("z", dist.Normal(x[:, :2], 1.0).to_event(1))

    loss, result = make(), []
    for _ in range(3):
        pyro.set_rng_seed(7)
        result.append(loss.loss(model, guide))
    assert result[0] == result[1] == result[2]


@pytest.mark.parametrize(
    "make", [TraceSGVB_ELBO, lambda: TraceIWAE_ELBO(5), lambda: TraceSIS_ELBO(3), TraceAIS_ELBO]
)
def test_looks_are_no_batches_of_a_batch_norm(make):
    norm = nn.BatchNorm1d(3, momentum=None)  # by which each batch has one weight
    batches = [data(4, 3, seed=seed) for seed in range(6)]

    def model(x):
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def guide(x):
        loc = norm(x)
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))

    loss = make()
    for x in batches:
        loss.loss_and_grads(model, guide, x)
    assert norm.num_batches_tracked == 6
    torch.testing.assert_close(norm.running_mean, torch.stack(batches).mean((0, 1)))


def test_nor_of_an_instance_norm():
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    x = data(4, 3, 5)

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x[..., 0])

    def guide():
        loc = norm(x)[..., 0]
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))

    loss = TraceIWAE_ELBO(5)
    for _ in range(3):
        loss.loss_and_grads(model, guide)
    torch.testing.assert_close(norm.running_mean, (1 - 0.9**3) * x.mean((0, 2)))


def counts(x):
    def model():
        with pyro.plate("data", 4):
            p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
            pyro.sample("x", dist.Multinomial(6, (0.2 * p.log()).softmax(1)), obs=x)
            pyro.sample("y", dist.OneHotCategorical(p.softmax(1)), obs=torch.eye(3)[[0, 1, 2, 2]])

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("p", dist.Dirichlet(param("alpha", 3).exp()))

    return model, guide


def test_counts_are_mapped():
    check_way(*counts(torch.tensor([[2.0, 3.0, 1.0]]).expand(4, 3)), mode=Mode.MAPPED)


@pytest.mark.parametrize("options", [{}, {"max_plate_nesting": 1}])
def test_a_mode_is_kept_where_loops_are_rejected(options, caplog):
    """As in Pyro's tests: ``vectorize_particles=True, max_plate_nesting=1``."""
    x, runs = data(4), []

    def model():
        runs.append(0)
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.softmax(1)[:, 0], 1.0), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(param("loc", 2), 0.8).to_event(1))

    caplog.set_level(logging.INFO, "pyro_mcvae")
    loss, counts = TraceIWAE_ELBO(3, vectorize_particles=True, **options), []
    for _ in range(10):
        before = len(runs)
        loss.loss_and_grads(model, guide)
        counts.append(len(runs) - before)
    assert caplog.text.count("the model under vmap") == 1
    assert [counts[i] for i in (2, 4, 5, 6, 8, 9)] == [1] * 6


DERIVED = {
    "Beta": (lambda w: dist.Beta(w, 2.0), 0.4),
    "BetaBinomial": (lambda w: dist.BetaBinomial(w, torch.ones(4), 5), 2.0),
    "GammaPoisson": (lambda w: dist.GammaPoisson(w, 1.5), 2.0),
    "Chi2": (lambda w: dist.Chi2(w), 0.7),
    "ZeroInflatedPoisson": (lambda w: dist.ZeroInflatedPoisson(w, gate=w.new_tensor(0.3)), 2.0),
}


@pytest.mark.parametrize("name", DERIVED)
def test_distributions_whose_parameters_are_properties_are_mapped(name):
    """The concentrations of a Beta, say, are properties: it holds a Dirichlet."""
    make, x = DERIVED[name]

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample(
                "x", make(1.0 + z.softmax(1)[:, 0] * param("s").exp()), obs=torch.full((4,), x)
            )

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(param("loc", 2), 0.8).to_event(1))

    check_way(model, guide, mode=Mode.MAPPED)


def bits(dim):
    x = data(5, 3, seed=9)

    def model():
        with pyro.plate("data", 5):
            y = pyro.sample("y", dist.Bernoulli(0.4 * torch.ones(3)).to_event(1))
            pyro.sample("x", dist.Normal((2 * y).softmax(dim), 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Bernoulli(0.3 * torch.ones(3)).to_event(1))

    return model, guide


def test_states_of_a_model_that_does_not_broadcast_are_mapped():
    model, _ = bits(1)
    losses = []
    for vectorize in (None, True, False):
        pyro.set_rng_seed(0)
        elbo = TraceTruncated_ELBO(vectorize_particles=vectorize)
        losses.append(elbo.loss(model, TruncatedPosterior(model, 8)))
    right, _ = bits(-1)
    losses.append(TraceTruncated_ELBO().loss(right, TruncatedPosterior(right, 8)))
    assert all(math.isclose(result, losses[-1], rel_tol=1e-9) for result in losses)


def test_slots_of_particles_are_mapped():
    # With all eight values summed the loss has no noise.
    losses = [TraceRaoBlackwell_ELBO(8, num_particles=3).loss(*bits(dim)) for dim in (1, -1)]
    assert math.isclose(*losses, rel_tol=1e-9)


def test_a_mapped_step_is_recorded():
    model, guide = regression(True)
    plain, recorded = (TraceSIS_ELBO(2, ULA(0.05), num_particles=3) for _ in range(2))
    recorded = CompiledELBO(recorded, backend="eager")
    for seed in range(3):
        result = []
        for elbo in (plain, recorded):
            pyro.set_rng_seed(seed)
            result.append(elbo.loss_and_grads(model, guide))
        assert math.isclose(*result, rel_tol=1e-9)


@pytest.mark.parametrize("make", every(2, [TraceRaoBlackwell_ELBO, TraceSGVB_ELBO, TraceIWAE_ELBO]))
def test_programs_may_rely_on_the_particles_that_they_were_promised(make):
    """As Pyro's test_vectorized_num_particles does: all in every run, in a declared dim."""
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])

    def model(declared):
        with pyro.plate("components", 2):
            p = pyro.sample("p", dist.Beta(1.1, 1.1))
            assert not declared or p.shape == (10, 1, 2)
            with pyro.plate("data", 3):
                pyro.sample("x", dist.Bernoulli(p), obs=x)

    def guide(declared):
        with pyro.plate("components", 2):
            p = pyro.sample("p", dist.Beta(pyro.param("a", torch.tensor(2.0)), 1.1))
            assert not declared or p.shape == (10, 1, 2)

    loss = make(num_particles=10, vectorize_particles=True, max_plate_nesting=2)
    result = []
    for declared in (True, False):
        pyro.set_rng_seed(0)
        value = loss.loss_and_grads(model, guide, declared)
        grad = pyro.param("a").grad
        result.append((value, grad.item()))
        grad.zero_()
    assert result[0] == result[1]
    with pytest.raises(AssertionError):
        make(num_particles=10, max_plate_nesting=2).loss_and_grads(model, guide, True)


def robust(x, y):
    """Under vmap the degrees of freedom have no particles, which they do not depend on."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(3.0, x @ w, 0.5), obs=y)


def unsure(x, y):
    """The same for all that can be known from outside: the rate comes from a list with draws."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    rate = torch.atleast_1d(torch.tensor(1.5), w[0])[0]
    with pyro.plate("data", len(x)):
        s = pyro.sample("s", dist.Gamma(1.5, rate))
        pyro.sample("y", dist.Normal(x @ w, 0.5 * s.rsqrt()), obs=y)


@pytest.mark.parametrize("program", [robust, unsure])
def test_judges_run_what_losses_run(program, caplog):
    """Both integrals are over w of Student's densities; by a grid."""
    x = data(5, 2)
    y = x @ torch.tensor([1.0, -1.0])
    model = poutine.reparam(program, {"y": StudentTReparam()}) if program is robust else program
    start = init_to_value(values={"w": torch.tensor([1.0, -1.0]), "s": torch.ones(5)})
    guide = AutoNormal(model, init_loc_fn=start, init_scale=0.6)
    guide(x, y)
    axis = torch.linspace(-5.0, 5.0, 401)
    w = torch.cartesian_prod(axis, axis)
    log_p = dist.StudentT(3.0, w @ x.T, 0.5).log_prob(y).sum(-1)
    log_p = log_p + dist.Normal(0.0, 1.0).log_prob(w).sum(-1)
    exact = log_p.logsumexp(0) + 2 * (axis[1] - axis[0]).log()
    with caplog.at_level(logging.INFO):
        result = log_evidence(model, guide, x, y, num_particles=20_000, seed=0)
    assert abs(result.total - exact) < 5 * result.total_standard_error
    assert "one by one" not in caplog.text


@in_turn(
    make=[
        lambda: TraceSGVB_ELBO(8, analytic_kl=False),
        lambda: TraceIWAE_ELBO(8),
        lambda: TraceSIS_ELBO(2, num_particles=8),
        lambda: TraceIWAE_ELBO(8),
    ],
    counts_dims=[False, True],
    wrap=[lambda loss: loss, lambda loss: CompiledELBO(loss, "eager")],
)
def test_a_draw_outside_the_support_is_an_error_at_every_step(make, counts_dims, wrap):
    """The density of an exponential goes on below zero, where it would count."""

    def model():
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Exponential(1.0))
            if counts_dims and z.dim() != 1:
                raise RuntimeError("runs under vmap")
            pyro.sample("x", dist.Normal(z, 0.5), obs=torch.ones(5))

    def guide():
        with pyro.plate("data", 5):
            pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(5.0)), 0.3))

    loss = wrap(make())
    for _ in range(3):
        loss.loss(model, guide)  # all draws are positive; later one in four is not
    pyro.param("loc").data.fill_(0.2)
    for _ in range(3):  # with an analysis in the first one, as at each power of two
        with pytest.raises(ValueError, match=r"(?s)site 'z' of the model.*within the support"):
            loss.loss(model, guide)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TraceSGVB_ELBO(8),
        lambda: TraceIWAE_ELBO(8),
        lambda: TraceSIS_ELBO(2, num_particles=8),
    ],
    ids=["sgvb", "iwae", "sis"],
)
def test_an_error_for_some_values_is_raised_and_changes_no_vectorization(make, caplog):
    def model():
        with pyro.plate("data", 3):
            r = pyro.sample("r", dist.Normal(0.0, 1.0))
            one = torch.ones_like(r)
            matrix = torch.stack([one, r, r, one], -1).unflatten(-1, (2, 2))
            scale = torch.linalg.cholesky(matrix)  # an error if r > 1
            x = dist.MultivariateNormal(torch.zeros(2), scale_tril=scale)
            pyro.sample("x", x, obs=torch.ones(3, 2))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("r", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 0.05))

    loss = make()
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            loss.loss_and_grads(model, guide)
        pyro.param("loc").data.fill_(1.0)  # each second draw is an error
        for _ in range(2):  # before the analysis at use 8
            with pytest.raises(torch.linalg.LinAlgError):
                loss.loss(model, guide)
        pyro.param("loc").data.fill_(0.0)
        loss.loss(model, guide)
    assert "one by one" not in caplog.text
    assert "vmap" not in caplog.text


@pytest.mark.parametrize("elbo", [TraceSGVB_ELBO, TraceIWAE_ELBO, TraceRaoBlackwell_ELBO])
def test_what_validation_refuses_runs_in_no_mode(elbo):
    """Under vmap, Pyro does not check shapes."""

    def model():
        with pyro.plate("data", 10):
            pyro.sample("x", dist.Bernoulli(0.5))

    def guide():
        with pyro.plate("data", 10):
            pyro.param("unused", torch.ones(6), event_dim=0)
            pyro.sample("x", dist.Bernoulli(pyro.param("p", torch.full((10,), 0.7), event_dim=0)))

    with pytest.raises(ValueError, match=r"invalid shape of pyro.param\(unused"):
        elbo().loss_and_grads(model, guide)
    with pyro.validation_enabled(False):
        elbo().loss_and_grads(model, guide)
