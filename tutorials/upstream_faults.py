"""Measure known faults of PyTorch and Pyro: distributions, and the ELBO of padded series.

docs/migration.md lists them, and what the losses of this package do in each case. Run it::

    python tutorials/upstream_faults.py
"""

import math

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from torch import Tensor


def lkj(dim: int, count: int = 400_000) -> tuple[float, float]:
    """Return the mean weight of draws with concentration 1.5 under concentration 1.0 (exact 1)."""
    q, p = (dist.LKJCholesky(dim, torch.tensor(c)) for c in (1.5, 1.0))
    z = q.sample((count,))
    return float((p.log_prob(z) - q.log_prob(z)).exp().mean()), 1.0


def sine(count: int = 100_000) -> tuple[float, float]:
    """Return the mean cosine of the first angle, by draws and by quadrature of the density."""
    concentrations = {
        "phi_concentration": torch.tensor(5.0),
        "psi_concentration": torch.tensor(3.0),
    }
    fn = dist.SineBivariateVonMises(0.0, 0.0, correlation=torch.tensor(1.0), **concentrations)
    side = torch.linspace(-math.pi, math.pi, 801)[:-1]
    grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1)
    weight = fn.log_prob(grid).flatten().softmax(0)
    return float(fn.sample((count,))[..., 0].cos().mean()), float(
        (weight * grid[..., 0].cos().flatten()).sum()
    )


def coalescent(rate: float, count: int = 3000) -> tuple[float, float]:
    """Return the mean time to the first coalescence of three lineages, and the exact one."""
    fn = dist.CoalescentTimes(torch.zeros(3), rate=torch.tensor(rate))
    times = torch.stack([fn.sample() for _ in range(count)])
    return float(-times.max(-1).values.mean()), 1 / (3 * rate)


def mixture(shared: bool, count: int = 1_400_000) -> tuple[float, float]:
    """Return the derivative of E[z'Az] by the first logit, through draws and exactly."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    locs, scales = draw(3, 2) + 0.5, 0.4 + draw(*([] if shared else [3]), 2).square()
    logits, form = draw(3).requires_grad_(), torch.arange(1.0, 5.0).reshape(2, 2)
    kind = dist.MixtureOfDiagNormalsSharedCovariance if shared else dist.MixtureOfDiagNormals
    means = torch.einsum("ki,ij,kj->k", locs, form, locs)
    means = means + (scales.expand(3, 2) ** 2 * form.diagonal()).sum(-1)
    (exact,) = torch.autograd.grad((logits.softmax(-1) * means).sum(), logits)
    z = kind(locs, scales, logits).expand([count]).rsample()
    (result,) = torch.autograd.grad(torch.einsum("ni,ij,nj->n", z, form, z).mean(), logits)
    return float(result[0]), float(exact[0])


def sylvester(dim: int = 5, tries: int = 20) -> tuple[float, float]:
    """Return the largest error of the log determinant, over transforms with normal weights."""
    worst = 0.0
    for _ in range(tries):
        flow = dist.transforms.Sylvester(dim, count_transforms=1)
        for parameter in flow.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(dim)
        jacobian = torch.autograd.functional.jacobian(flow, x)
        stated = flow.log_abs_det_jacobian(x, flow(x)).detach()
        worst = max(worst, float((stated - torch.linalg.slogdet(jacobian)[1]).abs()))
    return worst, 0.0


def padded(steps: int = 400) -> tuple[float, float]:
    """The ELBO of two series, padded to two times, with an AutoNormal; and their log evidence."""
    x, there = torch.tensor([[1.9, 0.3], [2.5, 0.0]]), torch.tensor([[True, True], [True, False]])

    def model() -> None:
        with pyro.plate("series", 2):
            for t in range(2):
                with pyro.poutine.mask(mask=there[t]):
                    z = pyro.sample(f"z_{t}", dist.Normal(0.0, 1.0))
                    pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=x[t])

    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    for _ in range(steps):
        svi.step()
    elbo = -sum(svi.evaluate_loss() for _ in range(200)) / 200
    return elbo, float(dist.Normal(0.0, 2**0.5).log_prob(x)[there].sum())


def batch_norm(dim: int = 3, batch: int = 10, tries: int = 4000) -> tuple[float, float]:
    """Return the mean log density of a batch of draws of a flow in training mode; and the exact."""
    base, total = dist.Normal(torch.zeros(dim), 1.0).to_event(1), 0.0
    for _ in range(tries):
        flow = dist.TransformedDistribution(base, [dist.transforms.BatchNorm(dim)])
        total += float(flow.log_prob(flow.sample((batch,))).detach().mean())
    return total / tries, -0.5 * dim * (1 + math.log(2 * math.pi))


def renyi(draws: int = 400) -> tuple[float, float]:
    """The loss of RenyiELBO under an AutoDiagonalNormal, and the least value of a bound's loss."""
    x = torch.tensor([1.0, -1.0, 0.5])

    def model() -> None:
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    guide = AutoDiagonalNormal(model, init_scale=0.7)
    guide()
    loss = RenyiELBO(alpha=0, num_particles=5, vectorize_particles=True, max_plate_nesting=1)
    mean = sum(loss.loss(model, guide) for _ in range(draws)) / draws
    return mean, -float(dist.Normal(0.0, 2**0.5).log_prob(x).sum())


def main() -> None:
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    rows = {
        "LKJCholesky, 3 dims: mean weight": lkj(3),
        "LKJCholesky, 4 dims: mean weight": lkj(4),
        "SineBivariateVonMises: mean cosine": sine(),
        "CoalescentTimes, rate 4: mean time": coalescent(4.0),
        "MixtureOfDiagNormals: gradient": mixture(False),
        "... SharedCovariance: gradient": mixture(True),
        "Sylvester, 5 dims: log determinant": sylvester(),
        "Trace_ELBO, padded series": padded(),
        "BatchNorm, 3 dims: log density": batch_norm(),
        "RenyiELBO, AutoDiagonalNormal: loss": renyi(),
    }
    print(f"{'':36} {'result':>7} {'exact':>7}")
    for name, (result, exact) in rows.items():
        print(f"{name:36} {result:7.3f} {exact:7.3f}")


if __name__ == "__main__":
    main()
