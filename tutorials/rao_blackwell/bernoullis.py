"""Three Bernoulli variables (Liu et al. 2019, section 5.1): loss curves and gradient variance.

All three have the logit eta, and f(z) = sum (z - p)^2 with p = [0.6, 0.51, 0.48] is minimized; the
k most probable of the 8 configurations are summed, for k in {0, 1, 3, 8}::

    python tutorials/rao_blackwell/bernoullis.py --out results --paper

``--paper`` is the scale of the paper, 20 runs of each loss curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import Results, draw_curves, write_table
from torch import nn

from pyro_mcvae import IndependentDraw, TraceRaoBlackwell_ELBO

P = torch.tensor([0.6, 0.51, 0.48])


def model() -> None:
    z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(3)).to_event(1).mask(False))
    pyro.factor("f", -((z - P) ** 2).sum(-1))


class Guide(nn.Module):
    def __init__(self, eta: float) -> None:
        super().__init__()
        self.eta = nn.Parameter(torch.tensor(eta))

    def forward(self) -> None:
        # The mask removes the entropy, so that the loss is E[f].
        pyro.sample("z", dist.Bernoulli(logits=self.eta.expand(3)).to_event(1).mask(False))

    def exact(self) -> float:
        q = self.eta.detach().sigmoid()
        return (q * (1 - P) ** 2 + (1 - q) * P**2).sum().item()


def gradients(eta: float, elbo: TraceRaoBlackwell_ELBO, count: int) -> torch.Tensor:
    guide = Guide(eta)
    result = []
    for _ in range(count):
        elbo.loss_and_grads(model, guide)
        assert guide.eta.grad is not None
        result.append(guide.eta.grad.clone())
        guide.eta.grad = None
    return torch.stack(result)


def curve(eta: float, elbo: TraceRaoBlackwell_ELBO, steps: int, lr: float) -> list[float]:
    guide = Guide(eta)
    module = elbo(model, guide)
    optimizer = torch.optim.SGD([guide.eta], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        module().backward()
        optimizer.step()
        losses.append(guide.exact())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--paper", action="store_true", help="20 runs")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    if args.paper:
        args.repeats = 20
    pyro.set_rng_seed(args.seed)
    pyro.enable_validation(False)
    rows, results = [], Results(args.out / "bernoullis.csv", args.seed)
    for k in (0, 1, 3, 8):
        row = [f"k = {k}"]
        for base in (None, IndependentDraw()):
            for eta in (0.0, -4.0):
                result = gradients(eta, TraceRaoBlackwell_ELBO(k, baseline=base), args.draws)
                error = result.std() / args.draws**0.5
                row.append(f"{result.mean():.2e} ± {error:.0e}, var {result.var():.2e}")
                results.add(
                    estimator="REINFORCE" if base is None else "REINFORCE+",
                    k=k,
                    eta=eta,
                    gradient=result.mean().item(),
                    standard_error=error.item(),
                    variance=result.var().item(),
                )
        rows.append(row)
    header = ["", *(f"{b}, eta {e}" for b in ("REINFORCE", "REINFORCE+") for e in (0, -4))]
    print(write_table(args.out / "bernoullis.md", header, rows))
    curves = {}
    for base, name in ((None, "REINFORCE"), (IndependentDraw(), "REINFORCE+")):
        # The exact sum has no baseline, so it has one curve.
        for k in (0, 1, 3, 8) if base is None else (0, 1, 3):
            elbos = [TraceRaoBlackwell_ELBO(k, baseline=base) for _ in range(args.repeats)]
            runs = torch.tensor([curve(-4.0, elbo, args.steps, args.lr) for elbo in elbos])
            curves[f"{name}, k = {k}"] = runs.mean(0).tolist()
            loss, error = runs[:, -1].mean().item(), runs[:, -1].std().item() / len(runs) ** 0.5
            print(f"{name}, k = {k}: loss after {args.steps} steps {loss:.4f} ± {error:.4f}")
            results.add(
                estimator=name, k=k, eta=-4.0, steps=args.steps, loss=loss, standard_error=error
            )
    draw_curves(args.out / "bernoullis.png", curves, "step", "E f, from eta = -4")


if __name__ == "__main__":
    main()
