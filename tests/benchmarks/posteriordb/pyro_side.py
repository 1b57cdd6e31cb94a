"""The posteriors of ``models.py`` with ``refine``, with jitted NUTS and with ADVI, all in Pyro."""

from __future__ import annotations

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import biject_to

from pyro_mcvae import refine
from tests.benchmarks.posteriordb.models import MODELS

Draws = dict[str, Tensor]
DRAWS, STEPS = 1000, 2000


def refined(name: str, seed: int) -> tuple[Draws, str]:
    """Draw with ``refine(model)``; the note has the reasons of the verdict."""
    draws = refine(MODELS[name]().model, seed=seed)
    return draws, "; ".join(draws.verdict.reasons)


class _Drawn(pyro.distributions.ImproperUniform):
    """A flat distribution with draws, from which Pyro takes a first value."""

    def sample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        transform = biject_to(self.support)
        shape = transform.inverse_shape(sample_shape + self.shape())
        return transform(4 * torch.rand(shape) - 2)


class _DrawFlat(poutine.messenger.Messenger):
    def _pyro_sample(self, msg: dict) -> None:
        fn = msg["fn"]
        if isinstance(fn, pyro.distributions.ImproperUniform):
            msg["fn"] = _Drawn(fn.support, fn.batch_shape, fn.event_shape)


def nuts(name: str, seed: int) -> tuple[Draws, str]:
    """Draw with one chain of NUTS, jitted, otherwise with the defaults of Pyro."""
    pyro.set_rng_seed(seed)
    model = _DrawFlat()(MODELS[name]().model)
    kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True)
    chain = MCMC(kernel, num_samples=DRAWS, warmup_steps=1000, disable_progbar=True)
    chain.run()
    diverged = len(chain.diagnostics()["divergences"]["chain 0"])
    return chain.get_samples(), f"{diverged} divergent" if diverged else ""


def advi(name: str, seed: int) -> tuple[Draws, str]:
    """Draw from ``AutoNormal`` after 2,000 steps of Adam with a step size of 0.02."""
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    model = _DrawFlat()(MODELS[name]().model)
    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(STEPS):
        svi.step()
    return Predictive(guide, num_samples=DRAWS)(), ""
