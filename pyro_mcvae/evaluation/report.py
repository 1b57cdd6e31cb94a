"""A guide's verdict in one call: how good it is, where it is worst, and what to try next."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.coordinates.chain_density import outside_inference_mode
from pyro_mcvae.evaluation.annealing import make_annealing
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.sites import is_random

__all__ = ["Report", "report"]

_QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95


@dataclass(frozen=True)
class Report:
    """
    What :func:`report` found, whose example shows one. Tensors have one entry per datum, shape
    ``[*plates]``.

    :ivar evidence: the :class:`LogEvidence` to compare with: by chains, if they were asked for.
    :ivar guide: the :class:`LogEvidence` by importance sampling with the guide alone, whose
        effective sample size and k-hat tell how well the guide covers the posterior.
    :ivar discrete: the guide's discrete sites.
    """

    evidence: LogEvidence
    guide: LogEvidence
    discrete: tuple[str, ...]

    @property
    def bound(self) -> Tensor:
        """The ELBO."""
        return self.guide.bound

    @property
    def gap(self) -> Tensor:
        """Log evidence minus ELBO, in nats: an estimate of KL(guide || posterior)."""
        return self.evidence.log_evidence - self.bound

    def worst(self, count: int = 5) -> list[tuple[tuple[int, ...], float]]:
        """The data with the largest gaps: their indices in the plates, and the gaps in nats."""
        count = check_count("count", count)
        flat = self.gap.flatten()
        found = flat.topk(min(count, len(flat)))
        indices = [
            tuple(int(i) for i in torch.unravel_index(at, self.gap.shape)) for at in found.indices
        ]
        return list(zip(indices, found.values.tolist(), strict=True))

    @property
    def advice(self) -> str:
        """Which objective to try next, in a sentence or two."""
        k = self.guide.pareto_k
        bad = float((k > 0.7).double().mean())
        gap = float(self.gap.mean())
        alone = self.gap.dim() == 0
        if bad <= 0.05 and gap < 0.1:
            return "The guide is close to the posterior: the ELBO (TraceSGVB_ELBO) is tight enough."
        if self.discrete:
            return self._advice_for_discrete(bad)
        if bad <= 0.25:
            return (
                "The guide covers the posterior, but not closely: TraceIWAE_ELBO(num_particles=10) "
                "gains most of the gap."
            )
        richer = "AutoMultivariateNormal or a flow" if alone else "full covariances or a flow"
        again = ""
        if self.evidence is self.guide:
            again = " This evidence is an underestimate: pass schedule=10 for one by chains."
        return (
            f"The weights' tails are heavy: importance sampling will not repair this guide. Try "
            f"TraceSIS_ELBO(5, UnderdampedLangevin(), gradient_estimator='reweighted') after "
            f"training with the ELBO, or a richer guide ({richer}).{again}"
        )

    def _advice_for_discrete(self, bad: float) -> str:
        sites = ", ".join(self.discrete)
        if bad <= 0.25:
            return (
                f"TraceIWAE_ELBO(num_particles=10) tightens the bound; for less noise in the "
                f"gradients of {sites} use TraceRaoBlackwell_ELBO."
            )
        return (
            f"The guide misses values of {sites} that matter: let its sites depend on each other, "
            f"or use TruncatedPosterior with TraceTruncated_ELBO."
        )

    def __str__(self) -> str:
        evidence, k, ess = self.evidence, self.guide.pareto_k, self.guide.effective_sample_size
        n = self.gap.numel()
        error = evidence.standard_error.square().sum().sqrt() / n
        what = f"{n} in {', '.join(evidence.plates)}" if evidence.plates else f"{n}"
        way = "importance sampling" if evidence is self.guide else "annealed chains"
        rows = [
            ("weights", f"{what}; {evidence.num_particles} particles each"),
            ("ELBO", f"{float(self.bound.mean()):.3f}"),
            ("log evidence", f"{float(evidence.mean):.3f} ± {float(error):.3f} ({way})"),
            ("gap", f"{float(self.gap.mean()):.3f}"),
            ("Pareto k", _quantiles(k) + f"; above 0.7: {int((k > 0.7).sum())} of {n}"),
            ("effective sample size", _quantiles(ess)),
        ]
        if n > 1:
            worst = ", ".join(
                f"{index[0] if len(index) == 1 else index} ({gap:.2f})"
                for index, gap in self.worst()
            )
            rows.append(("largest gaps", worst))
        if evidence.given:
            rows.append(("given", ", ".join(evidence.given)))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        return "\n".join(["nats per weight; quantiles 5, 25, 50, 75, 95 %", *lines, self.advice])

    def plot(self) -> Any:
        """
        A figure: the gaps' histogram, and k-hat and effective sample size of each datum.

        :returns: a ``matplotlib`` figure, which belongs to no window.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.5, 3.2), layout="constrained")
        gaps, tails, sizes = figure.subplots(1, 3)
        gap = _plain(self.gap)
        gaps.hist(gap, bins=min(30, max(5, len(gap) // 3)), color="C0")
        gaps.axvline(float(self.gap.mean()), color="k", linewidth=1, label="mean")
        gaps.legend(fontsize="small")
        gaps.set(xlabel="gap: log evidence - ELBO (nats)", ylabel="data")
        k = _plain(self.guide.pareto_k)
        finite = [v for v in k if math.isfinite(v)]
        low, high = min([*finite, 0.0]) - 0.1, max([*finite, 1.0]) + 0.1
        tails.scatter(gap, [min(max(v, low), high) for v in k], s=8, color="C0")
        for level, style in ((0.5, ":"), (0.7, "--")):
            tails.axhline(level, color="k", linewidth=1, linestyle=style)
        tails.set(xlabel="gap (nats)", ylabel="Pareto k (0.7: unreliable)")
        sizes.scatter(gap, _plain(self.guide.effective_sample_size), s=8, color="C1")
        sizes.set(
            xlabel="gap (nats)",
            ylabel=f"effective sample size of {self.guide.num_particles}",
            yscale="log",
        )
        return figure


def report(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_particles: int = 1000,
    schedule: Schedule | Tensor | int | None = None,
    kernel: Kernel | None = None,
    chunk_size: int | None = None,
    joint: bool | None = None,
    coordinates: str = "noise",
    warmup: int = 20,
    seed: int | None = None,
    vectorize_particles: bool = True,
    max_plate_nesting: float = math.inf,
    strict_enumeration_warning: bool = True,
    **kwargs: Any,
) -> Report:
    r"""
    Judge a guide: its bound, the evidence, the gap between them, how heavy the weights' tails are,
    which data it serves worst, and what to try next.

    The guide's own weights are always looked at; with a ``schedule`` or a ``kernel`` the evidence
    is that of annealed chains, which is right for guides too narrow for importance sampling.

    :returns: a :class:`Report`, to print or to :meth:`~Report.plot`.
    :raises ValueError: as :func:`log_evidence`, whose arguments these are.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 1.2))
        >>> found = report(model, guide, torch.linspace(-2, 2, 50))
        >>> print(found.advice)
        The guide covers the posterior, but not closely: TraceIWAE_ELBO(num_particles=10) gains
        most of the gap.
    """
    num_particles = check_count("num_particles", num_particles)
    if chunk_size is not None:
        chunk_size = check_count("chunk_size", chunk_size)
    annealing = make_annealing(schedule, kernel, coordinates, warmup)
    programs = Programs(model, guide, args, kwargs)
    with (
        evaluation_mode(model, guide, seed=seed),
        outside_inference_mode(programs) as programs,
        torch.no_grad(),
    ):
        importance_sampler = ImportanceSampler(
            programs,
            None,
            joint,
            vectorize_particles,
            max_plate_nesting,
            strict_enumeration_warning,
        )
        plain = evidence = estimate(importance_sampler, num_particles, chunk_size)
        if annealing is not None:
            chains = importance_sampler.on(importance_sampler.programs)
            chains.annealing = annealing
            evidence = estimate(chains, num_particles, chunk_size)
        sites = [t.site for t in importance_sampler.reference.runs[0].terms if t.in_guide]
        discrete = tuple(s["name"] for s in sites if is_random(s) and s["fn"].support.is_discrete)
        return Report(evidence, plain, discrete)


def _quantiles(values: Tensor) -> str:
    # Without interpolation, which has no value between a number and infinity.
    ordered = values.flatten().sort().values
    picked = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES]
    return " ".join(f"{float(v):.2f}" for v in picked[: 1 if len(ordered) == 1 else None])


def _plain(value: Tensor) -> list[float]:
    return value.detach().double().flatten().cpu().tolist()
