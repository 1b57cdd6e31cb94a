"""One marked run decides what depends on what, and programs see only what training shows them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_mcvae import (
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure.marked import marked_run
from tests.params import in_turn
from tests.tally import Tally


def pair(decode, size=4, dim=None):
    """A latent for each datum, and data whose mean is computed from all latents."""

    def prior(*batch):
        if dim is None:
            return dist.Normal(torch.zeros(batch), 1.0)
        return dist.Normal(torch.zeros(*batch, dim), 1.0).to_event(1)

    def model():
        with pyro.plate("data", size):
            z = pyro.sample("z", prior())
            pyro.sample("x", dist.Normal(decode(z), 1.0), obs=torch.zeros(size))

    def guide():
        with pyro.plate("data", size):
            pyro.sample("z", prior(size))

    return model, guide


def zeros(module):
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def scanned(z):
    out, h = [], torch.zeros(())
    for i in range(len(z)):
        h = torch.tanh(h + z[i])
        out.append(h)
    return torch.stack(out)


FIRST = torch.tensor([0.0, 1.0, 0.0, 0.0])
# Whether elements meet; no value or weight at hand tells.
PROGRAMS = {
    "own": (lambda z: 2 * z + 1, False),
    "permuted and back": (lambda z: z[[1, 0, 3, 2]][[1, 0, 3, 2]], False),
    "own branch": (lambda z: torch.where(z > 1, z, -z), False),
    "table": (lambda z: torch.arange(4.0)[(z > 9).long()], False),
    "branch not taken": (lambda z: torch.where(z > 9, z.roll(1, -1), z), True),
    "branch of another number": (lambda z: torch.where(FIRST > 9, z.mean(), z), True),
    "rare gate": (lambda z: z + torch.where(z[..., :1] > 5.0, 3.0, 0.0) * FIRST, True),
    "zero coefficient": (lambda z: z + 0.0 * z.sum(), True),
    "zero matrix": (lambda z: torch.zeros(4, 4) @ z, True),
    "scan": (scanned, True),
    "sort": (lambda z: z.sort().values, True),
    "argmax": (lambda z: z + z.argmax(), True),
    "any": (lambda z: z + (z > 8).any(), True),
    "count": (lambda z: z + (z > 8).sum(), True),
    "flat": (lambda z: z + z.clamp(0, 0).sum(), True),
    "integer": (lambda z: z + (z.long() // 100).sum(), True),
    "detached": (lambda z: z + z.detach().flip(0), True),
    "read": (lambda z: z if z.sum() > 1e6 else 2 * z, True),
    "number": (lambda z: z + float(z[0]) * 0, True),
    "random permutation": (lambda z: z + 0.0 * z[torch.randperm(4)], True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_elements_that_meet(name):
    decode, meet = PROGRAMS[name]
    result = marked_run(Programs(*pair(decode), (), {}), {})
    assert {k.name for k in result.coupled} == ({"x"} if meet else set())


@pytest.mark.parametrize("train", [False, True])
def test_batch_statistics_couple_like_anything_else(train):
    layer = nn.BatchNorm1d(3).train(train)
    model, guide = pair(lambda z: layer(z)[..., 0], dim=3)
    assert bool(marked_run(Programs(model, guide, (), {}), {}).coupled) == train


def test_batch_statistics_couple_in_eval_mode_if_none_are_tracked():
    layer = nn.BatchNorm1d(3, track_running_stats=False).eval()
    both = pair(lambda z: layer(z)[..., 0], dim=3)
    assert TraceIWAE_ELBO(2).bounds(*both).plates == ()


def test_masked_entries_and_slices_do_not_couple():
    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z[..., [0, 0, 2, 3]], 1.0).mask(FIRST == 0), obs=FIRST)

    _, guide = pair(lambda z: z)
    assert not marked_run(Programs(model, guide, (), {}), {}).coupled


MAKERS = {
    "sgvb": lambda: TraceSGVB_ELBO(5),
    "iwae": lambda: TraceIWAE_ELBO(5),
    "sis": lambda: TraceSIS_ELBO(3, num_particles=2),
    "ais": lambda: TraceAIS_ELBO(3, num_particles=2),
    "rb": lambda: TraceRaoBlackwell_ELBO(num_particles=2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_analysis_adds_two_runs_at_uses_1_2_4_8_and_none_otherwise(name):
    runs, x = Tally(), torch.arange(5.0)

    def model():
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        runs.add()
        loc = pyro.param("loc", torch.zeros(5))
        with pyro.plate("data", 5):
            pyro.sample("z", dist.Normal(loc, 1.0))

    svi, seen = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), MAKERS[name]()), []
    for _ in range(20):
        runs.take()
        svi.step()
        seen.append(runs.take()["run"])
    plain = seen[2]
    extra = [2 if step in (1, 2, 4, 8, 16) else 0 for step in range(1, 21)]
    assert [n - plain for n in seen] == extra


def test_no_program_sees_a_value_that_training_would_not_show():
    """Every parameter, buffer and latent that is seen in five steps is finite and trained."""
    seen, values = [], []
    decoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def look(z):
        assert bool(z.isfinite().all())
        seen.append([p.detach().clone() for p in decoder.parameters()])
        values.append(decoder[1].running_mean.clone())

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            look(z)
            flat = decoder(z.reshape(-1, 2)).reshape(z.shape[:-1])
            pyro.sample("x", dist.Normal(flat, 1.0), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.zeros(2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))

    decoder[1].eval()
    trained, x = [], torch.randn(6)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceIWAE_ELBO(3))
    for _ in range(5):
        trained.append([p.detach().clone() for p in decoder.parameters()])
        svi.step(x)
    states = {tuple(float(p.sum()) for p in state) for state in trained}
    assert {tuple(float(p.sum()) for p in state) for state in seen} <= states
    assert all(torch.equal(v, values[0]) for v in values)


def test_running_statistics_are_those_of_one_run_a_step():
    torch.manual_seed(0)
    x = torch.randn(8, 4)

    def programs():
        torch.manual_seed(1)
        encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def model(x):
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

        def guide(x):
            pyro.module("encoder", encoder)
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(encoder(x), 1.0).to_event(1))

        return model, guide, encoder

    results = []
    for loss in (Trace_ELBO(), TraceIWAE_ELBO(4)):
        pyro.clear_param_store()
        model, guide, encoder = programs()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), loss)
        for _ in range(20):
            svi.step(x)
        results.append((encoder[1].running_mean.clone(), int(encoder[1].num_batches_tracked)))
    assert results[0][1] == results[1][1] == 20
    assert torch.allclose(results[0][0], results[1][0])


STEPS = {
    "round": lambda z: z.round().clamp(0.2, 0.8),
    "where": lambda z: torch.where(z > 0, 0.8, 0.2),
    "gt": lambda z: 0.2 + 0.6 * (z > 0).float(),
}


@in_turn(
    elbo=[
        TraceSGVB_ELBO(),
        TraceSGVB_ELBO(3),
        TraceIWAE_ELBO(2),
        TraceSIS_ELBO(2),
        TraceAIS_ELBO(2),
    ],
    name=STEPS,
)
def test_steps_of_a_density_are_warned_of_once(name, elbo, caplog):
    """Unless the guide's draws are not reparameterized: their score function has the steps."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Bernoulli(STEPS[name](z)), obs=torch.tensor(0.0))

    def guide(has_rsample=True):
        fn = dist.Normal(pyro.param("loc", torch.tensor(0.3)), 1.0)
        pyro.sample("z", fn if has_rsample else fn.has_rsample_(False))

    for _ in range(4):
        elbo.loss_and_grads(model, guide)
    (text,) = [r.getMessage() for r in caplog.records if "jumps where" in r.getMessage()]
    assert "site 'x' of the model jumps" in text
    assert f"at {__file__}:" in text
    assert "has_rsample_(False)" in text
    if isinstance(elbo, TraceSGVB_ELBO | TraceIWAE_ELBO):  # chains move continuous latents
        caplog.clear()
        elbo.loss_and_grads(model, lambda: guide(False))
        assert "jumps where" not in caplog.text


def test_the_score_function_has_the_gradient_of_a_step():
    """The gradient of the ELBO, by quadrature."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Bernoulli(STEPS["where"](z)), obs=torch.tensor(0.0))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.3))
        pyro.sample("z", dist.Normal(loc, 1.0).has_rsample_(False))

    loc, z = torch.tensor(0.3, requires_grad=True), torch.linspace(-9.0, 9.0, 20_001)
    log_q, log_p = dist.Normal(loc, 1.0).log_prob(z), dist.Normal(0.0, 1.0).log_prob(z)
    elbo = (log_q.exp() * (log_p + (1 - STEPS["where"](z)).log() - log_q)).sum() * (z[1] - z[0])
    exact, values = -torch.autograd.grad(elbo, loc)[0], []
    loss = TraceSGVB_ELBO(1000, vectorize_particles=True)
    for _ in range(20):
        loss.loss_and_grads(model, guide)
        parameter = pyro.get_param_store()._params["loc"]
        values.append(parameter.grad.clone())
        parameter.grad = None
    values = torch.stack(values)
    assert abs(values.mean() - exact) < 4.5 * values.std() / 20**0.5
