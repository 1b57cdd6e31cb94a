"""Wake-sleep: both gradients against exact ones, dreams in any program, what cannot dream."""

import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, AutoNormalMessenger
from pyro.nn import PyroModule, PyroParam
from torch.distributions import constraints

from pyro_mcvae import WakeSleep
from tests.cases import every
from tests.estimates import assert_gradient, assert_mean

N, SIGMA = 20, 0.7
MANY = 200  # as many independent draws in one step
START = {"w": 1.3, "b": 0.4, "a": 0.2, "c": -0.3, "log_s": -0.2}


def make_data(n=N):
    generator = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return (1.5 * z + 0.5 + SIGMA * noise).to(torch.get_default_dtype())


class Linear:
    """z ~ N(0, 1), x ~ N(w z + b, 0.7); guide N(a x + c, exp(log_s)). The data are an argument."""

    def __init__(self, subsample_size=None, n=N):
        self.x = make_data(n)
        self.size = subsample_size
        self.values = {name: torch.tensor(v) for name, v in START.items()}

    def model(self, x):
        w, b = self.param("w"), self.param("b")
        with pyro.plate("data", len(x), self.size) as idx:
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(w * z + b, SIGMA), obs=x[idx] if self.size else x)

    def guide(self, x):
        a, c, log_s = self.param("a"), self.param("c"), self.param("log_s")
        with pyro.plate("data", len(x), self.size) as idx:
            pyro.sample("z", dist.Normal(a * (x[idx] if self.size else x) + c, log_s.exp()))

    def param(self, name):
        return pyro.param(name, lambda: self.values[name].clone())

    def objective(self, p):
        """What wake and sleep maximise, each for its own program's parameters."""
        q = dist.Normal(p["a"] * self.x + p["c"], p["log_s"].exp())
        frozen = dist.Normal(q.loc.detach(), q.scale.detach())
        error = (self.x - p["w"] * frozen.loc - p["b"]) ** 2 + (p["w"] * frozen.scale) ** 2
        wake = -(error / (2 * SIGMA**2)).sum()
        w, b = p["w"].detach(), p["b"].detach()
        variance = (1 - p["a"] * w) ** 2 + (p["a"] * SIGMA) ** 2 + (p["a"] * b + p["c"]) ** 2
        sleep = -len(self.x) * (variance / (2 * p["log_s"].exp() ** 2) + p["log_s"])
        return wake + sleep

    def gradient(self):
        p = {name: value.clone().requires_grad_() for name, value in self.values.items()}
        return dict(zip(p, torch.autograd.grad(self.objective(p), list(p.values())), strict=True))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (None, {}),
        (100, {"num_particles": 3, "vectorize_particles": True}),
        (None, {"num_particles": 3, "num_dreams": 4}),
    ],
    ids=["full", "minibatches", "more dreams and draws"],
)
def test_gradients_of_both_phases_are_exact(size, options):
    exact = Linear(size, 2 * MANY)
    assert_gradient(WakeSleep(**options), exact, exact.gradient(), 25, exact.x)


class Table:
    """c ~ Categorical, two bits x | c; the guide is a table of logits by x, all discrete."""

    def __init__(self):
        self.x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
        self.x = self.x.repeat(20, 1)
        self.values = {
            "prior": torch.tensor([0.3, -0.2, 0.5]),
            "bits": torch.tensor([[1.0, -1.0], [0.5, 0.7], [-1.5, 0.2]]),
            "table": torch.linspace(-1, 1, 12).reshape(4, 3),
        }

    def model(self, x):
        prior, bits = (pyro.param(n, lambda n=n: self.values[n].clone()) for n in ("prior", "bits"))
        with pyro.plate("data", len(x)):
            c = pyro.sample("c", dist.Categorical(logits=prior))
            pyro.sample("x", dist.Bernoulli(logits=bits[c]).to_event(1), obs=x)

    def guide(self, x):
        table = pyro.param("table", lambda: self.values["table"].clone())
        with pyro.plate("data", len(x)):
            pyro.sample("c", dist.Categorical(logits=table[(2 * x[:, 0] + x[:, 1]).long()]))

    def gradient(self):
        p = {name: value.clone().requires_grad_() for name, value in self.values.items()}

        def log_joint(x, prior, bits):  # shape [len(x), 3]
            likelihood = dist.Bernoulli(logits=bits).log_prob(x[:, None]).sum(-1)
            return prior.log_softmax(0) + likelihood

        log_q = p["table"].log_softmax(-1)
        every = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        model = p["prior"], p["bits"]
        rows = (2 * self.x[:, 0] + self.x[:, 1]).long()
        wake = (log_q[rows].exp().detach() * log_joint(self.x, *model)).sum()
        sleep = (log_joint(every, *model).exp().detach() * log_q).sum() * len(self.x)
        grads = torch.autograd.grad(wake + sleep, list(p.values()))
        return dict(zip(p, grads, strict=True))


def test_gradients_of_discrete_latents_are_exact():
    exact = Table()
    assert_gradient(WakeSleep(), exact, exact.gradient(), 50, exact.x)


@pytest.mark.parametrize("size", [None, 50])
def test_the_value_is_the_plain_elbo(size):
    exact = Linear(size, MANY)
    elbo = WakeSleep(num_particles=2)
    with pyro.validation_enabled(False):
        result = torch.tensor([elbo.loss(exact.model, exact.guide, exact.x) for _ in range(40)])
    p = exact.values
    q = dist.Normal(p["a"] * exact.x + p["c"], p["log_s"].exp())
    error = (exact.x - p["w"] * q.loc - p["b"]) ** 2 + (p["w"] * q.scale) ** 2
    likelihood = -error / (2 * SIGMA**2) - math.log(SIGMA) - 0.5 * math.log(2 * math.pi)
    kl = torch.distributions.kl_divergence(q, dist.Normal(torch.zeros(MANY), 1.0))
    assert_mean(result, -(likelihood - kl).sum())


@pytest.mark.parametrize("vectorize", [False, True])
def test_every_way_to_the_loss_agrees(vectorize):
    exact = Linear(5)
    result = []
    for name in ("loss", "differentiable_loss", "loss_and_grads", "bounds"):
        elbo = WakeSleep(2, vectorize_particles=vectorize)
        pyro.set_rng_seed(0)
        value = getattr(elbo, name)(exact.model, exact.guide, exact.x)
        value = -value.total if name == "bounds" else value
        result.append(float(torch.as_tensor(value).detach()))
    assert all(math.isclose(result[0], other, rel_tol=1e-9) for other in result)
    elbo = WakeSleep()
    pyro.clear_param_store()
    elbo.differentiable_loss(exact.model, exact.guide, exact.x).backward()
    params = dict(pyro.get_param_store().named_parameters())
    assert all(params[name].grad.abs() > 0 for name in START)


class Decoder(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroParam(torch.tensor(0.3))

    def forward(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(self.w * z, SIGMA), obs=x)


class Encoder(PyroModule):
    def __init__(self):
        super().__init__()
        self.a = PyroParam(torch.tensor(0.1))

    def forward(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.a * x, 0.5))


@pytest.mark.slow
def test_modules_train_with_torch_optimizers():
    x = make_data() - 0.5
    model, guide = Decoder(), Encoder()
    elbo = WakeSleep()(model, guide)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        elbo(x).backward()
        optimizer.step()
    assert abs(model.w.detach()) > 0.8
    assert abs(guide.a.detach() - model.w.detach() / (model.w.detach() ** 2 + SIGMA**2)) < 0.15


# --- Programs -------------------------------------------------------------------------------------


def slope(name="slope"):
    return pyro.param(name, torch.tensor(0.1))


def sequence(x):
    with pyro.plate("data", len(x)):
        z = torch.zeros(len(x))
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
            pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x[:, t])


def sequence_guide(x):
    with pyro.plate("data", len(x)):
        for t in pyro.markov(range(3)):
            pyro.sample(f"z_{t}", dist.Normal(slope() * x[:, t], 0.5))


def autoregressive(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        last = torch.zeros(len(x))
        for t in range(3):
            last = pyro.sample(f"x_{t}", dist.Normal(0.5 * last + z, 0.5), obs=x[:, t])


def one_latent(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(slope() * x.sum(-1), 0.5))


def ragged(batch):
    x, lengths = batch["x"], batch["lengths"]
    with pyro.plate("data", len(x)):
        z = torch.zeros(len(x))
        for t in range(3):
            with poutine.mask(mask=t < lengths):
                z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x[:, t])


def ragged_guide(batch):
    x, lengths = batch["x"], batch["lengths"]
    with pyro.plate("data", len(x)):
        for t in range(3):
            with poutine.mask(mask=t < lengths):
                pyro.sample(f"z_{t}", dist.Normal(slope() * x[:, t], 0.5))


def nested(x):
    with pyro.plate("columns", x.shape[1], dim=-1):
        a = pyro.sample("a", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", x.shape[0], subsample_size=2, dim=-2) as i:
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("x", dist.Normal(b, 0.5), obs=x[i])


def nested_guide(x):
    with pyro.plate("columns", x.shape[1], dim=-1):
        pyro.sample("a", dist.Normal(slope("up") * x.mean(0), 0.5))
        with pyro.plate("rows", x.shape[0], subsample_size=2, dim=-2) as i:
            pyro.sample("b", dist.Normal(slope() * x[i], 0.5))


def hierarchy(x):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(()), 2.0))
    for i in pyro.plate("data", len(x), subsample_size=2):
        z = pyro.sample(f"z_{i}", dist.Normal(loc[..., None] * torch.ones(3), 1.0).to_event(1))
        pyro.sample(f"x_{i}", dist.Normal(z, 0.5).to_event(1), obs=x[i])


def hierarchy_guide(x):
    pyro.sample("loc", dist.Normal(slope("up") * x.mean(), 0.5))
    for i in pyro.plate("data", len(x), subsample_size=2):
        pyro.sample(f"z_{i}", dist.Normal(slope() * x[i], 0.5).to_event(1))


def semi_supervised(x, y=None):
    with pyro.plate("data", len(x)):
        c = pyro.sample("y", dist.Categorical(torch.ones(2)), obs=y)
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        loc = (z + 2.0 * c)[..., None] * torch.ones(3)
        pyro.sample("x", dist.Normal(loc, 0.5).to_event(1), obs=x)


def semi_supervised_guide(x, y=None):
    with pyro.plate("data", len(x)):
        if y is None:
            logits = slope("up") * torch.stack([-x.sum(-1), x.sum(-1)], -1)
            y = pyro.sample("y", dist.Categorical(logits=logits))
        pyro.sample("z", dist.Normal(slope() * x.sum(-1) - 2.0 * y, 0.5))


def counts(x):
    with pyro.plate("data", len(x)):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("x", dist.Poisson(rate), obs=x)


def counts_guide(x):
    more = pyro.param("slope", torch.tensor(0.1), constraint=constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("rate", dist.Gamma(1.0 + more * x, 1.0))


X = torch.arange(12.0).reshape(4, 3) / 6
PROGRAMS = {
    "sequence": (sequence, sequence_guide, (X,)),
    "autoregressive": (autoregressive, one_latent, (X,)),
    "ragged": (ragged, ragged_guide, ({"x": X, "lengths": torch.tensor([3, 2, 1, 3])},)),
    "nested": (nested, nested_guide, (X,)),
    "hierarchy": (hierarchy, hierarchy_guide, (X,)),
    "labelled": (semi_supervised, semi_supervised_guide, (X, torch.tensor([0, 1, 1, 0]))),
    "unlabelled": (semi_supervised, semi_supervised_guide, (X,)),
    "counts": (counts, counts_guide, (torch.tensor([0.0, 3.0, 1.0, 2.0]),)),
}


def to_default(args):
    move = lambda t: t.to(torch.get_default_dtype()) if t.is_floating_point() else t  # noqa: E731
    return torch.utils._pytree.tree_map(move, args)


@pytest.mark.parametrize(
    ("name", "vectorize"), every(3, zip(PROGRAMS, itertools.cycle([False, True]), strict=False))
)
def test_a_step_of_every_program_recognizes_its_dreams_better(name, vectorize):
    """Every guide here does better with a larger slope, which only the sleep phase teaches."""
    model, guide, args = PROGRAMS[name]
    args = to_default(args)
    elbo = WakeSleep(2, num_dreams=2, vectorize_particles=vectorize)
    slopes = []
    for step in range(20):
        with pyro.validation_enabled(step == 0):
            assert math.isfinite(elbo.loss_and_grads(model, guide, *args))
        parameter = pyro.param("slope").unconstrained()
        slopes.append(-parameter.grad)
        parameter.grad = None
    slopes = torch.stack(slopes)
    assert slopes.mean() > 3 * slopes.std() / len(slopes) ** 0.5


def test_masked_entries_keep_their_value_in_a_dream():
    seen = []

    def guide(batch):
        seen.append(batch["x"])
        ragged_guide(batch)

    x, lengths = to_default(X) + 100, torch.tensor([3, 2, 1, 3])
    before = x.clone()
    elbo = WakeSleep()
    for _ in range(3):
        elbo.loss_and_grads(ragged, guide, {"x": x, "lengths": lengths})
    dreamt = [d for d in seen if not torch.equal(d, x)][-1]
    padding = torch.arange(3) >= lengths[:, None]
    assert (dreamt[padding] == x[padding]).all()
    assert (dreamt[~padding] < 50).all()
    assert (x == before).all()


def test_entries_that_are_masked_inside_of_an_event_keep_their_value_in_a_dream():
    mask, seen = torch.tensor([[True, False], [False, True]]), []

    def model(x):
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            fn = dist.Normal(z.unsqueeze(-1), torch.ones(2))
            pyro.sample("x", fn.mask(mask).to_event(1), obs=x)

    def guide(x):
        seen.append(x)
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(slope() * x.sum(-1), 0.5))

    WakeSleep().loss_and_grads(model, guide, torch.full((2, 2), 99.0))
    assert torch.equal(seen[-1] == 99, ~mask)


def test_missing_data():
    def model(x, observed):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x, obs_mask=observed)

    seen = []

    def guide(x, observed):
        seen.append(x)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(slope() * torch.where(observed, x, 0.0), 0.5))
            pyro.sample("x_unobserved", dist.Normal(z, 0.5).mask(~observed))

    x, observed = torch.full((4,), 99.0), torch.tensor([True, False, True, False])
    elbo = WakeSleep()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, x, observed)
    dreamt = [d for d in seen if not torch.equal(d, x)][-1]
    assert (dreamt == 99).tolist() == [False, True, False, True]


@pytest.mark.slow
def test_arguments_made_from_a_dream():
    table = make_data()

    def model(rows):
        with pyro.plate("data", N, subsample=rows):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, SIGMA), obs=table[rows])

    def guide(rows, x=None):
        x = table[rows] if x is None else x
        with pyro.plate("data", N, subsample=rows):
            pyro.sample("z", dist.Normal(slope() * x, 0.5))

    elbo = WakeSleep(dream_args=lambda dream, rows: ((rows,), {"x": dream["x"]}))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=elbo)
    for _ in range(120):
        svi.step(torch.randperm(N)[:10])
    assert abs(pyro.param("slope") - 1 / (1 + SIGMA**2)) < 0.15
    with pytest.raises(ValueError, match=r"as a pair \(args, kwargs\).*got Tensor"):
        WakeSleep(dream_args=lambda dream, rows: dream["x"]).loss_and_grads(
            model, guide, torch.arange(3)
        )
    with pytest.raises(ValueError, match=r"site 'x'.*none of them.*dream_args"):
        WakeSleep().loss_and_grads(model, guide, torch.arange(3))


# --- What is refused ------------------------------------------------------------------------------


def refused(model, guide, match, *args, **options):
    weight = pyro.param("slope", torch.tensor(0.1))
    with pytest.raises(ValueError, match=match):
        WakeSleep(**options).loss_and_grads(model, guide, *args)
    assert weight.grad is None


def test_a_model_that_reads_its_data():
    def model(x, tokens):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros_like(x[:, 0]), 1.0))
            for t in range(3):
                last = x[:, t - 1] if t else 0.0
                pyro.sample(f"x_{t}", dist.Normal(z + last, 1.0), obs=x[:, t])

    def discrete(x, tokens):
        probs = torch.eye(3) * 0.5 + 0.2
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0))
            pyro.sample("a", dist.Categorical(torch.ones(3)), obs=tokens[:, 0])
            pyro.sample("b", dist.Categorical(probs[tokens[:, 0]]), obs=tokens[:, 1])

    def guide(x, tokens):
        one_latent(x)

    tokens = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 0]])
    refused(model, guide, "site 'x_1' of the model depends on observed values", X, tokens)
    refused(discrete, guide, "site 'b' of the model depends on observed values", X, tokens)


def test_a_guide_that_reads_the_data_elsewhere():
    def model(x, scaled):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x, scaled):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope() * scaled, 0.5))

    x = make_data()
    refused(model, guide, "reads the data of 'x' from none of the arguments", x, x / 10)
    loss = WakeSleep(dream_args=lambda dream, x, scaled: ((x, dream["x"] / 10), {}))
    assert math.isfinite(loss.loss_and_grads(model, guide, x, x / 10))


def test_programs_that_cannot_be_tracked_are_compared_at_simulated_data():
    """They reject subclasses of tensors, so that marks do not come through."""

    def strict(*tensors):
        if any(type(t) is not torch.Tensor for t in tensors):
            raise TypeError("plain tensors only")

    def model(x, scaled, reads):
        strict(x)
        with pyro.plate("data", len(x) - 1):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            loc = z + 0.9 * x[:-1] if reads else z
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x[1:])

    def guide(x, scaled, elsewhere):
        strict(x)
        with pyro.plate("data", len(x) - 1):
            x = scaled if elsewhere else x
            pyro.sample("z", dist.Normal(slope() * x[1:], 0.7))

    def only_model(reads):
        return lambda x, scaled: model(x, scaled, reads)

    def only_guide(elsewhere):
        return lambda x, scaled: guide(x, scaled, elsewhere)

    x = make_data()
    refused(only_model(True), only_guide(False), "site 'x' of the model depends on obs", x, x / 10)
    refused(only_model(False), only_guide(True), "reads the data of 'x' from none", x, x / 10)
    loss = WakeSleep().loss_and_grads(only_model(False), only_guide(False), x, x / 10)
    assert math.isfinite(loss)


def test_numbers_as_data():
    def model(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(x))

    def guide(x):
        pyro.sample("z", dist.Normal(slope() * x, 1.0))

    refused(model, guide, r"site 'x'.*are in none of them", 3.0)
    loss = WakeSleep(dream_args=lambda dream, x: ((dream["x"],), {}))
    assert math.isfinite(loss.loss_and_grads(model, guide, 3.0))


def test_copies():
    exact = Linear()
    elbo = WakeSleep()
    elbo.loss_and_grads(exact.model, exact.guide, exact.x)
    other = pickle.loads(pickle.dumps(elbo))
    assert math.isfinite(other.loss_and_grads(exact.model, exact.guide, exact.x))


def test_covariates_are_no_data():
    def model(x, u):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(u, 1.0))
            pyro.sample(
                "x", dist.Normal(z[..., None].expand(x.shape), x.new_ones(3)).to_event(1), obs=x
            )

    def guide(x, u):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope() * x.sum(-1) + u, 0.5))

    assert math.isfinite(WakeSleep().loss_and_grads(model, guide, to_default(X), torch.ones(4)))


def test_factors():
    def model(x, depends):
        decay = pyro.param("decay", torch.tensor(1.0))
        pyro.factor("prior", -0.5 * decay**2)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(decay, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            if depends:
                pyro.factor("prefer", -(z**2))

    def guide(x, depends):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope() * x, 0.5))

    refused(
        model, guide, "factor 'prefer' depends on 'z'.*no data can be simulated", make_data(), True
    )
    assert math.isfinite(WakeSleep().loss_and_grads(model, guide, make_data(), False))


def test_guides_without_a_density_of_the_models_latents():
    exact = Linear()
    auto = AutoNormal(exact.model)
    refused(exact.model, auto, "for which the model simulates no value", exact.x)
    messenger = AutoNormalMessenger(exact.model)
    refused(exact.model, messenger, "AutoNormalMessenger runs both together", exact.x)

    def points(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Delta(slope() * x))

    refused(exact.model, points, "site 'z' of the guide is a point mass", exact.x)


def test_a_dream_outside_of_the_guides_support():
    exact = Linear()

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Uniform(slope() * x - 0.01, slope() * x + 0.01))

    refused(exact.model, guide, "cannot compute log_prob at site 'z' of the guide", exact.x)
    with pyro.validation_enabled(False):
        refused(exact.model, guide, "site 'z' of the guide .Uniform", exact.x)


def test_data_whose_shape_the_model_does_not_draw():
    def model(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        pyro.sample("z", dist.Normal(slope() * x.sum(), 1.0))

    with pyro.validation_enabled(False):
        refused(model, guide, r"site 'x' in shape \(20,\).*of shape \(\)", make_data())


def test_improper_priors():
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope() * x, 0.5))

    refused(model, guide, "no data can be simulated.*has no draws", make_data())
