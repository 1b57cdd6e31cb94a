"""Small programs for recordings, and training runs to compare."""

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_mcvae import CompiledELBO

_counter = itertools.count()
Programs = tuple[Callable[..., None], Callable[..., None]]


class Recurrent(nn.LSTM):
    """Reads the entries of x in turn, in single precision, which has kernels of its own."""

    def __init__(self) -> None:
        super().__init__(1, 4, dtype=torch.float)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.float().T.unsqueeze(-1))[0][-1].to(x)


class Net(nn.Module):
    """A VAE with two latents, as a module whose methods are the programs."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, recurrent: bool = False) -> None:
        super().__init__()
        self.name = f"net{next(_counter)}"
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 4), nn.Dropout(dropout))
        self.norm = nn.BatchNorm1d(4) if norm else Recurrent() if recurrent else nn.Identity()
        self.width = 1.0

    def model(self, x: Tensor, beta: float = 1.0) -> None:
        pyro.module(self.name + ".decoder", self.decoder)
        with pyro.plate("data", len(x)):
            prior = dist.Normal(x.new_zeros(2), x.new_ones(2) * self.width).to_event(1)
            with pyro.poutine.scale(scale=beta):
                z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor, beta: float = 1.0) -> None:
        pyro.module(self.name + ".encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(self.norm(x)).chunk(2, -1)
            with pyro.poutine.scale(scale=beta):
                pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def batches(count: int, size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(size, 4, generator=generator).round() for _ in range(count)]


def make(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def train(net: Net, loss: Any, steps: int = 12, **kwargs: Any) -> tuple[list[float], list[Tensor]]:
    """Losses of training steps and of evaluations, and the parameters after them."""
    svi = SVI(net.model, net.guide, pyro.optim.Adam({"lr": 0.01}), loss)
    torch.manual_seed(1)
    losses = [svi.step(x, **kwargs) for x in batches(steps)]
    losses += [svi.evaluate_loss(x, **kwargs) for x in batches(4)]
    return losses, [v.detach().clone() for v in net.state_dict().values()]


def assert_same_run(make_loss: Callable[[], Any], **options: Any) -> CompiledELBO:
    """Check that a replayed training run has the numbers of the plain one; returns its loss."""
    losses, state = train(make(**options), make_loss())
    compiled = CompiledELBO(make_loss(), backend="eager")
    result, found_state = train(make(**options), compiled)
    assert result == losses
    assert all(torch.equal(a, b) for a, b in zip(found_state, state, strict=True))
    return compiled


def uses(loss: CompiledELBO) -> int:
    """How many steps were replayed."""
    return sum(r.uses for case in loss._specializations.values() for r in case._recordings)


def reasons(loss: CompiledELBO) -> list[str]:
    return [case.unsupported for case in loss._specializations.values() if case.unsupported]
