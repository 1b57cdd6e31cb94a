"""The truncated posterior in the benchmark: by hand the search is the package's, no more."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_mcvae import (
    EvolutionaryUpdate,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from tests.benchmarks.by_hand import Handler
from tests.benchmarks.truncated_by_hand import ByHand

DATA = 1000
Step = Callable[[], Any]


class Programs:
    """The model of :class:`ByHand` in Pyro, of the same networks."""

    def __init__(self, hand: ByHand, stored: bool = False) -> None:
        self.hand, self.stored = hand, stored
        self.networks = nn.Module()
        self.networks.decoder = hand.decoder
        self.networks.logits, self.networks.log_sigma = hand.logits, hand.log_sigma

    def model(self, x: Tensor, index: Tensor | None) -> None:
        hand = self.hand
        if self.stored:
            pyro.module("truncated", self.networks)
        with pyro.plate("data", hand.N if index is not None else len(x), subsample=index):
            z = pyro.sample("z", dist.Bernoulli(logits=hand.logits).to_event(1))
            data = dist.Normal(hand.decoder(z), hand.log_sigma.exp())
            pyro.sample("x", data.to_event(1), obs=x)


class Bare(ByHand):
    """The step by hand, over the density of the program as Pyro runs it."""

    def log_joint(self, states: Tensor, x: Tensor) -> Tensor:
        with Handler(states.float().transpose(0, 1)) as handler:
            Programs(self).model(x, None)
        (prior, z), (data, x) = handler.found["z"], handler.found["x"]
        log_joint: Tensor = prior.log_prob(z) + data.log_prob(x)
        return log_joint.t()


def sides(case: Any) -> dict[str, Callable[[], Step]]:
    """Of a case with S states and a batch; Pyro has nothing to compare."""
    size, index = {"N": DATA, "S": case.size, "batch": case.batch}, torch.arange(case.batch)

    def step(kind: type[ByHand]) -> Step:
        one = kind(**size)
        return lambda: one.step(index)

    def least() -> Step:
        one = ByHand(**size)
        return lambda: one.decode(index)

    def module() -> Step:
        one = ByHand(**size)
        elbo = _elbo()(model := Programs(one).model, _guide(one, model))

        def run() -> float:
            one.optimizer.zero_grad()
            loss = elbo(one.x[index], index)
            loss.backward()
            one.optimizer.step()
            return float(loss.item())

        return run

    def svi() -> Step:
        one = ByHand(**size)
        model = Programs(one, stored=True).model
        made = SVI(model, _guide(one, model), pyro.optim.Adam({"lr": 1e-3}), loss=_elbo())
        return lambda: made.step(one.x[index], index)

    return {
        "SVI": svi,
        "module": module,
        "by hand": lambda: step(ByHand),
        "bare Pyro": lambda: step(Bare),
        "least": least,
    }


def _elbo() -> TraceTruncated_ELBO:
    return TraceTruncated_ELBO(max_plate_nesting=1)


def _guide(hand: ByHand, model: Callable[..., None]) -> TruncatedPosterior:
    guide = TruncatedPosterior(
        model, hand.S, evolution=EvolutionaryUpdate(*hand.update, mutation=UniformFlips())
    )
    guide.register_buffer("states_data", hand.stored.clone())
    return guide
