"""
Spread of the gradient of a guide's locations on eight schools, by gradient estimator.

    python -m tests.benchmarks.dreg_share

`AutoNormal` at `init_scale=0.1`, one weight, K = 10: the standard deviation over 200 repetitions,
its median over the ten locations; then after 1,500 steps with the default.
"""

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_mcvae import TraceIWAE_ELBO
from tests.benchmarks.posteriors.models import eight_schools


def spread(model: object, guide: AutoNormal, estimator: str, count: int) -> Tensor:
    """Of each location's gradient."""
    elbo = TraceIWAE_ELBO(10, gradient_estimator=estimator, joint=True)
    locations = [p for name, p in guide.named_parameters() if "locs" in name]
    result = []
    for _ in range(count):
        guide.zero_grad()
        elbo.loss_and_grads(model, guide)
        result.append(torch.cat([p.grad.reshape(-1) for p in locations]))
    return torch.stack(result).std(0)


def main(count: int = 200, num_steps: int = 1500) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    model = eight_schools()
    guide = AutoNormal(model, init_scale=0.1)
    guide()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceIWAE_ELBO(10, joint=True))
    for steps in (0, num_steps):
        for _ in range(steps):
            svi.step()
        for estimator in ("auto", "reparam", "dreg"):
            pyro.set_rng_seed(1)
            result = spread(model, guide, estimator, count)
            print(f"after {steps:4} steps  {estimator:8} {float(result.median()):.2f}", flush=True)


if __name__ == "__main__":
    main()
