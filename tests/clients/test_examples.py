"""Pyro's examples with the loss swapped: each of ours trains them as Pyro's own does."""

import functools
import math

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO

from pyro_mcvae import CompiledELBO, TraceIWAE_ELBO
from tests.clients.losses import LOSSES
from tests.clients.programs import EXAMPLES

pytestmark = pytest.mark.clients
CHAINS = "sis", "ais"
# Without latents of each document, or sequence, that a chain could move.
ALL_GLOBAL = "lda", "hmm"


def started(name):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return EXAMPLES[name]()


def arguments(name, example, loss):
    """With the examples' minibatches, where the loss takes these."""
    whole = example.batch_size is None or (name in ALL_GLOBAL and loss in CHAINS)
    return example.data if whole else (*example.data, example.batch_size)


def evaluated(example, count=20):
    """One bound for all on the full data, with its standard error."""
    pyro.set_rng_seed(1)
    elbo = TraceIWAE_ELBO(10)
    bounds = torch.tensor(
        [-elbo.loss(example.model, example.guide, *example.data) for _ in range(count)]
    )
    return bounds.mean(), bounds.std() / count**0.5


def train(name, elbo, loss, num_steps=50):
    example = started(name)
    svi = SVI(example.model, example.guide, pyro.optim.Adam({"lr": 0.02}), elbo)
    losses = [svi.step(*arguments(name, example, loss)) for _ in range(num_steps)]
    return example, losses


@functools.cache
def baseline(name, with_minibatches):
    """What as many steps of Pyro's loss gain, and where they end."""
    untrained = started(name)
    before, _ = evaluated(untrained)
    elbo = TraceEnum_ELBO if untrained.enumerated else Trace_ELBO
    example, _ = train(name, elbo(), "sgvb" if with_minibatches else "sis")
    after, error = evaluated(example)
    return after, error, after - before


# Not lda: its losses and gradients are those of Pyro's loss in mean, but the density of its Delta
# has no bound, and runs end in different local optima.
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "lda"])
def test_every_loss_fits_what_pyros_loss_fits(name, loss):
    expected, other_error, gain = baseline(name, loss not in CHAINS)
    example, losses = train(name, LOSSES[loss](), loss)
    assert torch.tensor(losses).isfinite().all()
    result, error = evaluated(example)
    # Noise of the training moves both ends; a tenth of what was gained.
    assert result > expected - 4 * (error**2 + other_error**2).sqrt() - 0.1 * gain.abs()
    assert result > expected - 0.9 * gain


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_gradient_is_finite_and_reaches_every_parameter(name, loss):
    example = started(name)
    LOSSES[loss]().loss_and_grads(example.model, example.guide, *example.data)
    store = pyro.get_param_store()
    for parameter in store.keys():  # noqa: SIM118, iterating it gives no names
        gradient = store[parameter].unconstrained().grad
        assert gradient is not None, parameter
        assert gradient.isfinite().all(), parameter


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_compiled_loss_takes_the_same_steps(name, loss):
    _, expected = train(name, LOSSES[loss](), loss, 8)
    _, result = train(name, CompiledELBO(LOSSES[loss](), backend="eager"), loss, 8)
    assert result == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", CHAINS)
@pytest.mark.parametrize("name", ALL_GLOBAL)
def test_chains_average_on_minibatches_without_local_latents(name, loss, caplog):
    example = started(name)
    elbo = LOSSES[loss]()
    result = elbo.loss(example.model, example.guide, *example.data, example.batch_size)
    assert math.isfinite(result)
    assert "no latent has a weight per datum, because data of the subsampled plate" in caplog.text
