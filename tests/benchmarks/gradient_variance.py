"""Noise of each gradient estimator on probabilistic PCA, whose exact evidence is known.

Total variance of the guide's gradient, and its signal-to-noise ratio |mean| / standard deviation
averaged over the parameters, at guides that are mismatched as in early training::

    python -m tests.benchmarks.gradient_variance
"""

import pyro
import torch
from pyro.infer import RenyiELBO, Trace_ELBO, TraceMeanField_ELBO

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO
from tests.estimates import gradients
from tests.models import ProbabilisticPCA

MANY = {"vectorize_particles": True, "max_plate_nesting": 1}
ROWS = {
    "Trace_ELBO": lambda: Trace_ELBO(),
    "TraceMeanField_ELBO": lambda: TraceMeanField_ELBO(),
    "SGVB, estimator A": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "SGVB, estimator B": lambda: TraceSGVB_ELBO(),
    **{f"RenyiELBO(0), K = {k}": lambda k=k: RenyiELBO(0, k, **MANY) for k in (5, 50)},
    **{
        f"IWAE {e}, K = {k}": lambda e=e, k=k: TraceIWAE_ELBO(k, gradient_estimator=e, **MANY)
        for e in ("reparam", "dreg", "stl", "vimco")
        for k in (5, 50)
    },
}


def main(count: int = 400) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    exact = ProbabilisticPCA(p=20, d=10, N=50)
    print(f"{'estimator':24}{'total variance':>16}{'signal-to-noise':>18}")
    for name, make in ROWS.items():
        pyro.set_rng_seed(0)
        result = gradients(make(), exact, count)
        flat = torch.cat([result[k].reshape(count, -1) for k in ("W", "c", "log_s")], dim=1)
        ratio = (flat.mean(0).abs() / flat.std(0)).mean()
        print(f"{name:24}{flat.var(0).sum():16.3g}{ratio:18.3f}", flush=True)


if __name__ == "__main__":
    main()
