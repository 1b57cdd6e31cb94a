"""scvi-tools' amortized LDA, trained by its own Lightning loop."""

import functools

import numpy as np
import pytest
import torch
from pyro.infer import Trace_ELBO
from scipy.optimize import linear_sum_assignment

from pyro_mcvae import CompiledELBO, TraceIWAE_ELBO, TraceRaoBlackwell_ELBO
from tests.clients.losses import LOSSES

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
TOPICS, GENES, CELLS, LENGTH = 3, 20, 200, 100


@pytest.fixture(autouse=True)
def double_precision():
    """Its data are in single precision."""
    torch.set_default_dtype(torch.float32)


@functools.cache
def simulated():
    """Counts, and the topics that they were drawn from."""
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(GENES, 0.2), TOPICS)
    shares = rng.dirichlet(np.full(TOPICS, 0.3), CELLS)
    counts = np.stack([rng.multinomial(LENGTH, p) for p in shares @ topics])
    return counts.astype(np.float32), topics


def train(client, loss, epochs):
    scvi, anndata = client("scvi"), client("anndata")
    scvi.settings.seed = 0
    data = anndata.AnnData(simulated()[0])
    scvi.model.AmortizedLDA.setup_anndata(data)
    priors = {"cell_topic_prior": 0.3, "topic_feature_prior": 0.2}
    model = scvi.model.AmortizedLDA(data, n_topics=TOPICS, n_hidden=16, **priors)
    plan = {"loss_fn": loss, "optim_kwargs": {"lr": 0.05}, "n_epochs_kl_warmup": None}
    model.train(
        max_epochs=epochs,
        batch_size=100,
        train_size=1.0,
        accelerator="cpu",
        plan_kwargs=plan,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model.module.eval()
    return model


def distances(result, expected):
    """Total variation between topics, matched as well as they can be."""
    all_pairs = np.abs(result[:, None] - expected).sum(-1) / 2
    return all_pairs[linear_sum_assignment(all_pairs)]


def topics_of(model):
    return model.get_feature_by_topic(1000).to_numpy().T


def bound_of(model, count=10):
    """Of a cell, by one evaluator for all: Pyro's ELBO on all cells, with its error."""
    x = torch.tensor(simulated()[0])
    programs = model.module.model, model.module.guide
    bounds = [-Trace_ELBO().loss(*programs, x, x.sum(1), n_obs=CELLS) for _ in range(count)]
    return np.mean(bounds) / CELLS, np.std(bounds) / CELLS / count**0.5


@pytest.fixture(scope="module")
def by_pyro():
    """Bound and topics of what Trace_ELBO trains; made once."""
    return {}


@pytest.mark.parametrize("loss", [n for n in LOSSES if n != "rb"])
def test_topics_are_those_that_trace_elbo_finds(client, by_pyro, loss):
    if not by_pyro:
        model = train(client, Trace_ELBO(), 250)
        by_pyro.update(topics=topics_of(model), bound=bound_of(model))
    model = train(client, LOSSES[loss](), 250)
    assert distances(topics_of(model), simulated()[1]).max() < 0.15
    assert distances(topics_of(model), by_pyro["topics"]).max() < 0.15
    # Other losses leave other guides: one nat of some 230.
    (result, error), (expected, other_error) = bound_of(model), by_pyro["bound"]
    assert result > expected - 4 * (error**2 + other_error**2) ** 0.5 - 1.0
    # More particles tighten the bound of what was trained.
    x = torch.tensor(simulated()[0])
    tighter = TraceIWAE_ELBO(20).loss(model.module.model, model.module.guide, x, x.sum(1), CELLS)
    assert -tighter / CELLS > result - 4 * error - 0.5


@pytest.mark.parametrize("wrap", [TraceRaoBlackwell_ELBO, lambda: CompiledELBO(Trace_ELBO())])
def test_losses_that_are_trace_elbo_here_take_its_steps(client, wrap):
    expected, result = (topics_of(train(client, loss, 3)) for loss in (Trace_ELBO(), wrap()))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
