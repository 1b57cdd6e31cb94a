"""Dependencies that no weight, coefficient, noise or read of a program hides."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoNormalMessenger
from torch import nn

from pyro_mcvae import (
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
)
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.vmap import Mode
from pyro_mcvae.structure.marked import codes
from tests.params import in_turn
from tests.structure.pairs import coupled_pair


@pytest.mark.parametrize("size", [2, 3, 4, 5, 16, 100, 257])
def test_no_code_of_an_element_contains_another(size):
    count, code = codes(size)
    missing = code.unsqueeze(1) & ~code.unsqueeze(0)
    assert bool(((missing != 0) | torch.eye(size, dtype=torch.bool)).all())
    assert count <= math.log2(size) + 4


def plates(model, guide, *args):
    return TraceIWAE_ELBO(2).bounds(model, guide, *args).plates


@in_turn(pair=[*itertools.permutations(range(4), 2)], coefficient=[0.0, 1.0])
def test_any_two_elements_that_meet_share_a_weight(pair, coefficient):
    i, j = pair
    matrix = torch.zeros(4, 4)
    matrix[i, j] = coefficient
    couple = [lambda z: z + z @ matrix, lambda z: z + coefficient * z.roll(j - i, -1)]
    assert plates(*coupled_pair(couple[coefficient == 0.0])) == ()


@pytest.mark.parametrize("size", [2, 4, 5, 16, 64])
def test_elements_that_meet_their_mirror_image_share_a_weight(size):
    assert plates(*coupled_pair(lambda z: z + 0.9 * z.flip(-1), size)) == ()
    assert plates(*coupled_pair(lambda z: z.sin(), size)) == ("data",)


@pytest.mark.parametrize("constraint", [dist.constraints.real, dist.constraints.positive])
@pytest.mark.parametrize(
    "copy", [torch.Tensor.detach, lambda h: h.detach().reshape(-1), torch.clone]
)
def test_a_parameter_that_shares_the_memory_of_a_draw_leaves_its_marks(copy, constraint):
    def model(x):
        with pyro.plate("data", len(x)):
            h = pyro.sample("z", dist.LogNormal(0.0, 1.0)) * 1.0
            pyro.param("begin", lambda: copy(h).detach(), constraint=constraint)
            pyro.sample("x", dist.Normal(h.flip(-1), 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.LogNormal(pyro.param("loc", torch.zeros(5)), 1.0))

    # The elements of the plate meet, so that all data share one weight from the first step on.
    assert TraceIWAE_ELBO(3).bounds(model, guide, torch.ones(5)).per_datum.shape == ()


@pytest.mark.parametrize("name", ["centered", "AutoNormalMessenger"])
def test_parameters_that_begin_at_a_draw_of_the_first_run_depend_on_nothing(name, caplog):
    def model(x):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(scale, 1.0))
            if name == "centered":
                z = z - pyro.param("center", lambda: z.detach().mean())
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def centered(x):
        pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(5)), 1.0))

    guide = centered if name == "centered" else AutoNormalMessenger(model)
    loss, x = TraceIWAE_ELBO(2), torch.randn(5)
    for _ in range(4):
        loss.loss_and_grads(model, guide, x)
    assert loss.bounds(model, guide, x).per_datum.shape == (5,)
    assert not caplog.text


@pytest.mark.parametrize(
    "couple",
    [
        lambda z: torch.where(z.roll(1, -1) > 0, 1.0, -1.0),
        lambda z: z.argsort(-1).double(),
        lambda z: (z.roll(1, -1) > 0).double() + z,
        lambda z: z - z.amax(-1, keepdim=True),
        lambda z: z + 0.0 * z.mean(-1, keepdim=True),
    ],
    ids=["where", "order", "comparison", "maximum", "zero"],
)
def test_comparisons_hide_nothing(couple):
    assert plates(*coupled_pair(couple, 6)) == ()


def test_integers_hide_nothing_behind_a_layer_that_is_zero():
    table, out = nn.Embedding(3, 4), nn.Linear(4, 1)
    nn.init.zeros_(out.weight)

    def couple(z):
        h = table(z)
        return out(h - h.mean(-2, keepdim=True)).squeeze(-1)

    def model():
        pyro.module("table", table)
        pyro.module("out", out)
        pair[0]()

    pair = coupled_pair(couple, 4, lambda: dist.Categorical(torch.ones(3)))
    assert plates(model, pair[1]) == ()


@pytest.mark.parametrize("seed", range(3))
def test_what_python_reads_shares_one_weight_at_every_seed(seed, caplog):
    pyro.set_rng_seed(seed)
    pair = coupled_pair(lambda z: 2 * z if z.mean() > 0 else -z, 2)
    assert plates(*pair) == ()
    assert "reads a value that depends on site 'z'" in caplog.text


@pytest.mark.parametrize("how", ["plain", "detach", "no_grad", "list", "flag"])
def test_a_memory_bank_of_a_sequential_plate_has_the_evidence_of_a_coupled_pair(how):
    x = torch.tensor([1.5, 2.5, -0.5])

    def model():
        bank, seen = torch.zeros(3), []
        for i in pyro.plate("data", 3):
            z = pyro.sample(f"z{i}", dist.Normal(0.0, 1.0))
            if how == "plain":
                bank = bank.clone()
                bank[i] = z
            elif how == "detach":
                bank[i] = z.detach()
            elif how == "no_grad":
                with torch.no_grad():
                    bank[i] = z
            elif how == "list":
                seen.append(float(z))
                bank = torch.tensor(seen)
            else:
                bank = z + 3.0 if i and seen[-1] else z
                seen.append(bool(z > 9.0))
            pyro.sample(f"x{i}", dist.Normal(bank.sum(), 0.3), obs=x[i])

    def guide():
        for i in pyro.plate("data", 3):
            pyro.sample(f"z{i}", dist.Normal(torch.tensor([1.2, 0.8, -2.0])[i], 0.4))

    assert TraceIWAE_ELBO(2).bounds(model, guide).per_datum.shape == ()


def stopping(x):
    """A sequential plate of data, each with as many latents as its own stop bits say."""
    for i in pyro.plate("data", len(x)):
        total = 0.0
        for t in range(2):
            if pyro.sample(f"s{i}{t}", dist.Bernoulli(0.4)) == 1:
                break
            total = total + pyro.sample(f"z{i}{t}", dist.Normal(1.0, 1.0))
        pyro.sample(f"x{i}", dist.Normal(total, 0.7), obs=x[i])


def stopping_guide(x):
    for i in pyro.plate("data", len(x)):
        for t in range(2):
            if pyro.sample(f"s{i}{t}", dist.Bernoulli(0.4)) == 1:
                break
            pyro.sample(f"z{i}{t}", dist.Normal(1.0, 0.9))


@pytest.mark.slow
def test_branches_on_a_datums_own_latents_leave_its_weight(caplog):
    x = torch.tensor([0.5, 1.8])  # few, as each combination of branches is analysed
    elbo, count = TraceIWAE_ELBO(20), 6
    result = torch.stack([elbo.bounds(stopping, stopping_guide, x).per_datum for _ in range(count)])
    assert result.shape == (count, 2)
    assert "share one weight" not in caplog.text
    shares = torch.tensor([0.4, 0.24, 0.36]).log()
    spread = torch.tensor([0.49, 1.49, 2.49]).sqrt()
    means = torch.tensor([0.0, 1.0, 2.0])
    exact = (shares + dist.Normal(means, spread).log_prob(x.unsqueeze(-1))).logsumexp(-1)
    error = result.std(0) / count**0.5
    assert bool((result.mean(0) < exact + 4 * error).all())
    assert bool((result.mean(0) > exact - 4 * error - 0.1).all())


class Decoder(nn.Module):
    """Takes one dim for another in its midst."""

    def __init__(self, inputs, mix, zero=True, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.drop = mix, nn.Dropout(dropout)
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, 6)
        if zero:
            nn.init.zeros_(self.last.weight)

    def forward(self, z):
        return self.last(self.drop(self.mix(self.first(z))))


MIXES = {
    "softmax": lambda h: h.softmax(1),
    "normalize": F.normalize,
    "mean": lambda h: h - h.mean(0),
    "cumsum": lambda h: h.cumsum(1) if h.dim() > 2 else h.cumsum(-1),
    "where": lambda h: torch.where(h.sum(1, keepdim=True) > 0, h, -h),
}


def images(decoder, latent):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))

    def model():
        pyro.module("decoder", decoder)
        with pyro.plate("data", 12):
            z = pyro.sample("z", latent().to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x.to(z))

    def guide():
        with pyro.plate("data", 12):
            pyro.sample("z", latent().to_event(1))

    return model, guide


@in_turn(
    mix=[*MIXES, *MIXES],
    zero=[False, True],
    dropout=[0.0, 0.3],
    dtype=[torch.float32, torch.float64],
)
def test_particles_that_mix_are_found_whatever_the_weights_and_the_noise(mix, zero, dropout, dtype):
    decoder = Decoder(3, MIXES[mix], zero, dropout).to(dtype)
    pair = images(decoder, lambda: dist.Normal(torch.zeros(3, dtype=dtype), 1.0))
    sampler = ParticleSampler(3, None, math.inf)
    programs = Programs(*pair, (), {})
    sampler.sample(programs)
    assert sampler.runner.mode(programs) is not Mode.BATCHED


@pytest.mark.parametrize(("mix", "dropout"), [(lambda h: h.softmax(-1), 0.0), (torch.tanh, 0.3)])
def test_decoders_that_count_from_the_right_stay_in_one_batch(mix, dropout):
    pair = images(Decoder(3, mix, True, dropout), lambda: dist.Normal(torch.zeros(3), 1.0))
    sampler, programs = ParticleSampler(3, None, math.inf), Programs(*pair, (), {})
    sampler.sample(programs)
    assert sampler.runner.mode(programs) is Mode.BATCHED


@pytest.mark.usefixtures("leading_dims_only")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_slots_and_states_that_mix_are_found_at_zero_weights(dropout):
    decoder = Decoder(4, MIXES["normalize"], True, dropout)
    model, guide = images(decoder, lambda: dist.Bernoulli(0.5 * torch.ones(4)))
    with pytest.raises(RuntimeError, match="'x' of the model"):
        TraceRaoBlackwell_ELBO(4, 2, vectorize_particles=True).loss(model, guide)
    with pytest.raises(RuntimeError, match="states side by side"):
        TraceTruncated_ELBO(vectorize_particles=True).loss(model, TruncatedPosterior(model, 8))


@pytest.mark.parametrize(("zero", "dropout"), [(False, 0.0), (True, 0.3)])
def test_enumerated_values_that_mix_are_found(zero, dropout):
    decoder, x = Decoder(3, MIXES["normalize"], zero, dropout), torch.randn(7, 6)

    def model():
        pyro.module("decoder", decoder)
        with pyro.plate("data", 7):
            u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            c = pyro.sample("c", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            shape = torch.broadcast_shapes(u.shape[:-1], c.shape)
            z = torch.cat([u.expand((*shape, 2)), c.expand(shape).unsqueeze(-1)], -1)
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 7):
            pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(RuntimeError, match="site 'x' of the model has another log density"):
        TraceSGVB_ELBO().loss(model, guide)


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "draw", [lambda: np.random.randn(), lambda: RNG.normal()], ids=["global", "own"]
)
def test_particles_do_not_share_random_numbers_that_are_not_pytorchs(draw, caplog):
    pair = coupled_pair(lambda z: z * 0 + 2 * draw(), 2)
    sampler, programs = ParticleSampler(5, None, math.inf), Programs(*pair, (), {})
    sample = sampler.sample(programs)
    assert sampler.runner.mode(programs) is Mode.LOOPED
    assert len({round(float(w), 9) for w in sample.log_weight[:, 0]}) == 5


class Stateful(nn.Module):
    """Counts its calls in a buffer, an attribute and a list, and averages what it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.history, self.log = 0, torch.zeros(3), []
        self.linear = nn.Linear(2, 3)

    def forward(self, z):
        self.calls += 1
        self.number += 1
        self.log.append(self.number)
        h = self.linear(z)
        self.history = 0.9 * self.history + 0.1 * h.detach().reshape(-1, 3).mean(0)
        return h


@pytest.mark.parametrize(
    "make",
    [
        lambda: TraceSGVB_ELBO(num_particles=3),
        lambda: TraceIWAE_ELBO(3),
        lambda: TraceAIS_ELBO(2),
        TraceRaoBlackwell_ELBO,
    ],
)
def test_probe_runs_put_back_what_a_module_keeps(make):
    decoder, x, runs = Stateful(), torch.randn(6, 3), []

    def model():
        pyro.module("decoder", decoder)
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 6):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    elbo = make()
    for _ in range(9):
        before = decoder.number
        elbo.loss_and_grads(model, guide)
        assert decoder.calls == decoder.number == len(decoder.log)
        runs.append(decoder.number - before)
    assert len(set(runs)) == 1, "a step that analyses the programs calls them as often as others"


@pytest.mark.slow
def test_a_comparison_at_the_first_parameters_is_made_again():
    gate = nn.Parameter(torch.tensor(0.0))
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

    def mix(z):
        return z - gate * 3 * z.mean(1, keepdim=True)

    def model():
        with pyro.plate("data", 12):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(mix(z), 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 12):
            pyro.sample("z", dist.Normal(x / 2, 0.7).to_event(1))

    used, looped = TraceIWAE_ELBO(5), TraceIWAE_ELBO(5, vectorize_particles=False)
    used.loss(model, guide)
    gate.data.fill_(1.0)
    result = torch.tensor([[e.loss(model, guide) for _ in range(30)] for e in (used, looped)])
    error = result.std(1).norm() / 30**0.5
    assert abs(result[0].mean() - result[1].mean()) < 4 * error


@pytest.mark.parametrize("argument", [1, True, 0.5, np.int64(1)], ids=repr)
def test_sizes_and_choices_that_couple_are_noticed_at_once(argument):
    def model(n, k):
        with pyro.plate("t", n):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z.cumsum(-1) if k else z, 1.0), obs=torch.zeros(n))

    def guide(n, k):
        with pyro.plate("t", n):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    elbo = TraceIWAE_ELBO(2)
    assert elbo.bounds(model, guide, 3, type(argument)(0)).plates == ("t",)
    assert elbo.bounds(model, guide, 3, argument).plates == ()
    elbo.bounds(model, guide, 1, argument)
    assert elbo.bounds(model, guide, 3, argument).plates == ()
