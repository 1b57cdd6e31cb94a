"""Enumerated sites in the model: what is refused, and what else runs such programs."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal, AutoNormalMessenger
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    ULA,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs

PARALLEL = {"enumerate": "parallel"}
X = torch.tensor([-0.7, 0.4, 1.9], dtype=torch.float64)


def mixture(x, infer=PARALLEL):
    prior = pyro.param("prior", torch.tensor([0.3, 0.7]))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        y = pyro.sample("y", dist.Categorical(prior), infer=infer)
        pyro.sample("x", dist.Normal(2.0 * y + z, 0.8), obs=x)


def guide(x):
    slope = pyro.param("slope", torch.tensor(0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(slope * x, 0.9))


@pytest.mark.parametrize(
    "infer", [{"enumerate": "sequential"}, {"enumerate": "parallel", "num_samples": 2}]
)
@pytest.mark.parametrize("elbo", [TraceIWAE_ELBO(2), TraceRaoBlackwell_ELBO()], ids=["iwae", "rb"])
def test_other_enumeration_is_refused_by_name(infer, elbo):
    with pytest.raises(ValueError, match=r"site 'y' of the model is marked for enumeration \("):
        elbo.loss(lambda x: mixture(x, infer), guide, X)


LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(2),
    "sis": lambda: TraceSIS_ELBO(2),
    "rb": TraceRaoBlackwell_ELBO,
    "judge": None,
}


@pytest.mark.parametrize(("loss", "validate"), [(n, i % 2 == 0) for i, n in enumerate(LOSSES)])
def test_a_markov_chain_that_forgets_too_much_is_refused(loss, validate):
    # Else a site's values would stand in the dim of those that it depends on.
    prior, table = torch.tensor([[0.25, 0.3], [0.6, 0.2]]), torch.tensor([0.25, 0.4])

    def model(history):
        before = last = torch.tensor(0)
        for t in pyro.markov(range(4), history=history):
            fn = dist.Bernoulli(Vindex(prior)[before, last])
            before, last = last, pyro.sample(f"x_{t}", fn, infer=PARALLEL).long()
            pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(table)[last]), obs=torch.tensor(0.0))

    def empty(history):
        pass

    def value(history):
        if loss == "judge":
            return -log_evidence(model, empty, history, num_particles=2).log_evidence.item()
        return LOSSES[loss]().loss(model, empty, history)

    with pyro.validation_enabled(validate):
        for history in (0, 1):
            with pytest.raises(ValueError, match=r"dim conflict at site 'x_\d' .* history size"):
                value(history)
        exact = 0.0
        for states in torch.cartesian_prod(*[torch.arange(2)] * 4):
            chain = [0, 0, *states.tolist()]
            p = 1.0
            for a, b, c in zip(chain, chain[1:], chain[2:], strict=False):
                p *= (prior[a, b] if c else 1 - prior[a, b]) * (1 - table[c])
            exact += p
        assert value(2) == pytest.approx(-math.log(exact), rel=1e-6)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "judge"])
def test_crossed_plates_that_meet_in_a_factor_are_refused_and_a_sequential_one_is_summed(loss):
    prior, table = torch.tensor([0.3, 0.7]), torch.tensor([[0.2, 0.6], [0.5, 0.9]])
    seen = torch.tensor([[0.0, 1.0], [0.0, 0.0]])

    @config_enumerate
    def model(crossed):
        columns, rows = pyro.plate("columns", 2, dim=-1), pyro.plate("rows", 2, dim=-2)
        with columns:
            b = pyro.sample("b", dist.Categorical(prior))
        if crossed:
            with rows:
                c = pyro.sample("c", dist.Categorical(prior))
            with columns, rows:
                pyro.sample("d", dist.Bernoulli(Vindex(table)[b, c]), obs=seen)
        else:
            for i in pyro.plate("each_row", 2):
                c = pyro.sample(f"c_{i}", dist.Categorical(prior))
                with columns:
                    pyro.sample(f"d_{i}", dist.Bernoulli(Vindex(table)[b, c]), obs=seen[i])

    elbo = LOSSES[loss]()
    with pytest.raises(ValueError, match=r"^Expected tree.*'b' in columns.*'c' in rows.*seq"):
        elbo.loss(model, lambda crossed: None, True)
    p = 0.0
    for b in itertools.product(range(2), repeat=2):
        for c in itertools.product(range(2), repeat=2):
            on = table[torch.tensor(b), torch.tensor(c)[:, None]]
            p += prior[list(b + c)].prod() * torch.where(seen > 0, on, 1 - on).prod()
    result = LOSSES[loss]().loss(model, lambda crossed: None, False)
    assert result == pytest.approx(-p.log().item(), rel=1e-6)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "judge"])
def test_a_scale_may_be_a_tensor_and_learned(loss):
    @config_enumerate
    def model():
        scale = pyro.param("scale", torch.tensor(2.0))
        table = pyro.param("table", torch.tensor([0.2, 0.8]))
        with poutine.scale(scale=scale):
            x = pyro.sample("x", dist.Bernoulli(0.3)).long()
            pyro.sample("y", dist.Bernoulli(table[x]), obs=torch.tensor(0.0))

    LOSSES[loss]().loss_and_grads(model, lambda: None)
    result = dict(pyro.get_param_store().named_parameters())
    p = 0.7 * 0.8 + 0.3 * 0.2  # loss = -scale log p
    assert result["scale"].grad.item() == pytest.approx(-math.log(p))
    assert result["table"].grad.tolist() == pytest.approx([2 * 0.7 / p, 2 * 0.3 / p])


@pytest.mark.parametrize("elbo", [TraceSGVB_ELBO(), TraceRaoBlackwell_ELBO()], ids=["sgvb", "rb"])
def test_a_sum_over_part_of_a_plate_is_refused(elbo):
    def model(scale):
        with poutine.scale(scale=scale):
            y = pyro.sample("y", dist.Categorical(torch.ones(2)), infer=PARALLEL)
        with pyro.plate("data", 9, subsample=torch.arange(3)):
            pyro.sample("x", dist.Normal(1.0 * y, 0.8), obs=X)

    for scale in (1.0, 3.0):
        with pytest.raises(ValueError, match=r"site 'x'.*'data'.*needs all 9 data.*\(3\)"):
            elbo.loss(model, lambda scale: None, scale)


def test_scales_inside_of_a_sum_are_refused_and_those_around_it_are_kept():
    def model(inner, outer):
        with poutine.scale(scale=outer), pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            y = pyro.sample("y", dist.Categorical(torch.ones(2)), infer=PARALLEL)
            with poutine.scale(scale=inner):
                pyro.sample("x", dist.Normal(2.0 * y + z, 0.8), obs=X)

    def fixed(inner, outer):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Delta(0.3 * X))

    elbo = TraceSGVB_ELBO()
    with pytest.raises(ValueError, match=r"to share a common poutine.scale, but 'y', 'x'"):
        elbo.loss(model, fixed, 0.5, 1.0)
    assert elbo.loss(model, fixed, 1.0, 0.3) == pytest.approx(0.3 * elbo.loss(model, fixed, 1, 1))


@pytest.mark.parametrize("expanded", [False, True])
def test_what_fails_on_the_dims_of_states_names_the_sites(expanded):
    """A decoder of y beside z, concatenated: z has no dim of y's values."""
    z_dim, decoder = 2, torch.nn.Linear(5, 1)

    def model(x):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)), infer=PARALLEL)
            z = pyro.sample("z", dist.Normal(torch.zeros(z_dim), 1.0).to_event(1))
            if expanded:
                shape = torch.broadcast_shapes(z.shape[:-1], y.shape[:-1])
                y, z = y.expand(*shape, -1), z.expand(*shape, -1)
            pyro.sample("x", dist.Normal(decoder(torch.cat([z, y], -1))[..., 0], 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(z_dim), 1.0).to_event(1))

    for elbo in (TraceSGVB_ELBO(), TraceIWAE_ELBO(3)):
        if expanded:
            assert math.isfinite(elbo.loss(model, guide, X))
        else:
            with pytest.raises(RuntimeError, match=r"same number of dim.* values of 'y' side by"):
                elbo.loss(model, guide, X)


class Clusters(PyroModule):
    """Means are a latent of the module, and an AutoGuide draws them."""

    def __init__(self):
        super().__init__()
        self.means = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x):
        means = self.means
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(torch.ones(2)))
            pyro.sample("x", dist.Normal(Vindex(means)[..., y], 1.0), obs=x)


def test_modules_and_autoguides():
    module = Clusters()
    model = config_enumerate(module)
    auto = AutoNormal(poutine.block(module, hide=["y"]))
    losses = []
    for elbo in (TraceEnum_ELBO(max_plate_nesting=1), TraceSGVB_ELBO(1, analytic_kl=False)):
        auto(X)
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, auto, X))
    assert losses[0] == pytest.approx(losses[1])
    for elbo in (
        TraceIWAE_ELBO(3, joint=True, vectorize_particles=True),
        TraceSIS_ELBO(2, ULA(0.01), num_particles=2, vectorize_particles=True),
    ):
        assert math.isfinite(elbo.loss_and_grads(model, auto, X))


@pytest.mark.parametrize("vectorize", [None, False])
def test_what_a_messenger_leaves_out_the_model_sums(vectorize):
    # It runs the model that it was made of: without y, which the loss's own model has.
    messenger = AutoNormalMessenger(poutine.block(mixture, hide=["y"]), init_scale=0.7)
    messenger(X)
    sampler = ParticleSampler(3, vectorize, math.inf)
    sample = sampler.sample(Programs(mixture, messenger, (X,), {}))
    z = torch.stack([run.guide_trace.nodes["z"]["value"] for run in sample.runs]).reshape(3, 3)
    log_joint = dist.Normal(torch.tensor([0.0, 2.0]) + z.unsqueeze(-1), 0.8).log_prob(
        X.unsqueeze(-1)
    )
    log_joint = (torch.tensor([0.3, 0.7]).log() + log_joint).logsumexp(-1)
    prior, q = dist.Normal(0.0, 1.0), dist.Normal(messenger.locs.z, messenger.scales.z)
    expected = log_joint + prior.log_prob(z) - q.log_prob(z)
    assert torch.allclose(sample.log_weight, expected, rtol=1e-10)


VECTORS = {
    "bernoulli": lambda: dist.Bernoulli(torch.tensor([0.2, 0.5, 0.9])).to_event(1),
    "categorical": lambda: dist.Categorical(
        torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    ).to_event(1),
    "masked": lambda: dist.Bernoulli(torch.tensor([0.2, 0.5])).mask(True).to_event(1),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_discrete_variables_are_summed_over_all_their_values(name):
    """Pyro's own enumeration has no product of supports."""
    make, x = VECTORS[name], torch.linspace(-1.0, 2.0, 5)

    def model():
        with pyro.plate("data", 5):
            z = pyro.sample("z", make(), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(z.to(x.dtype).sum(-1), 0.5), obs=x)

    def guide():
        pass

    base = make().base_dist
    base = getattr(base, "base_dist", base)
    each = [range(3 if name == "categorical" else 2)] * base.batch_shape[0]
    values = torch.tensor(list(itertools.product(*each)))
    prior = base.log_prob(values.to(x.dtype) if name != "categorical" else values).sum(-1)
    like = dist.Normal(values.to(x.dtype).sum(-1)[:, None], 0.5).log_prob(x)
    exact = float((prior[:, None] + like).logsumexp(0).sum())
    for elbo in (TraceSGVB_ELBO(), TraceIWAE_ELBO(3), TraceRaoBlackwell_ELBO()):
        assert elbo.loss(model, guide) == pytest.approx(-exact, rel=1e-5)


@pytest.mark.parametrize("fn", [dist.Poisson(2.0), dist.Bernoulli(torch.ones(30) / 2).to_event(1)])
def test_sites_with_too_many_values_are_refused_by_name(fn):
    def model():
        z = pyro.sample("z", fn, infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.0))

    with pytest.raises(
        ValueError, match=r"site 'z' of the model is marked for enumeration, but has"
    ):
        TraceSGVB_ELBO().loss(model, lambda: None)
