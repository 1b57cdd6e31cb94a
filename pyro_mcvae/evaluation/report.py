"""A guide's verdict in one call: how good it is, where it is worst, and what to try next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.importance_sampler import importance_sampler
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.prior_look import look_from_prior
from pyro_mcvae.evaluation.report_figure import draw
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.sites import is_random, known_support

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "report"]

_RICHER = "full covariances or a flow"
_UNSEEN = (
    "Pareto k and effective sample size tell of the draws that were made: a mode of the posterior "
    "where the guide draws nothing shows in neither."
)
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
    :ivar prior: the :class:`LogEvidence` by chains from the prior, or why nobody looked.
    """

    evidence: LogEvidence
    guide: LogEvidence
    discrete: tuple[str, ...]
    prior: LogEvidence | str = "nobody asked"

    @property
    def bound(self) -> Tensor:
        """The ELBO."""
        return self.guide.bound

    @property
    def gap(self) -> Tensor:
        """Log evidence minus ELBO, in nats: an estimate of KL(guide || posterior)."""
        return self.evidence.log_evidence - self.bound

    @property
    def missed(self) -> Tensor:
        r"""
        Where chains find more of the posterior than the guide's weights, beyond their errors,
        though :math:`\hat k` is good: the guide misses a part of it. False without chains.
        """
        missed = self._more(self.evidence)[2]
        if self._looked is not None and self._looked.log_evidence.shape == missed.shape:
            missed = missed | (self._more(self._looked)[2] & ~self._looked.unreliable)
        return missed

    @property
    def misses(self) -> bool:
        """Whether the guide misses a part of the posterior, of some datum or of all together."""
        if bool(self.missed.any()):
            return True
        if self._looked is None:
            return False
        looked, guide = self._looked, self.guide
        if looked.log_evidence.shape == guide.log_evidence.shape:
            more, error, _ = self._more(looked)
            told = ~(looked.unreliable | guide.unreliable)
            more, error = (more * told).sum(), (error * told).square().sum().sqrt()
        else:
            more = looked.total - guide.total
            error = torch.hypot(looked.total_standard_error, guide.total_standard_error)
            more = more * ~(looked.unreliable.any() | guide.unreliable.any())
        return bool((more > 0.1) & (more > 3 * error))

    def _more(self, found: LogEvidence) -> tuple[Tensor, Tensor, Tensor]:
        """How much more was found than by the guide, the error, and where that is telling."""
        more = found.log_evidence - self.guide.log_evidence
        error = torch.hypot(found.standard_error, self.guide.standard_error)
        return more, error, (more > 0.1) & (more > 4 * error) & ~self.guide.unreliable

    @property
    def _looked(self) -> LogEvidence | None:
        """What chains from the prior found, if most weights can be relied on."""
        found = self.prior
        if isinstance(found, str) or float(found.unreliable.double().mean()) > 0.5:
            return None
        return found

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
        richer = "AutoMultivariateNormal or a flow" if self.gap.dim() == 0 else _RICHER
        if self.misses:
            where = f"for {int(self.missed.sum())} of {self.gap.numel()}"
            return (
                f"The chains find more than the guide's weights "
                f"{where if bool(self.missed.any()) else 'in total'}, where Pareto k is good: the "
                f"guide misses a part of the posterior, such as a mode. Begin its training "
                f"elsewhere, or try a richer guide ({richer})."
            )
        if bad <= 0.05 and gap < 0.1:
            return "The guide is close to the posterior: the ELBO (TraceSGVB_ELBO) is tight enough."
        if self.discrete:
            return self._advice_for_discrete(bad)
        if bad <= 0.25:
            return f"{self._covers}: TraceIWAE_ELBO(num_particles=10) gains most of the gap."
        again = ""
        if self.evidence is self.guide:
            again = " This evidence is an underestimate: pass schedule=10 for one by chains."
        return (
            f"The weights' tails are heavy: importance sampling will not repair this guide. Try "
            f"TraceSIS_ELBO(5, UnderdampedLangevin(), gradient_estimator='reweighted') after "
            f"training with the ELBO, or a richer guide ({richer}).{again}"
        )

    @property
    def _covers(self) -> str:
        if self._looked is None:
            return "Where the guide draws, it follows the posterior, but not closely"
        return "The guide covers the posterior, but not closely"

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
        rows = [*self._rows_of_the_guide(), *self._rows_of_chains()]
        by = "the guide's weights" if self.evidence is self.guide else "chains"
        rows.append((f"gap: log evidence by {by} - ELBO", f"{float(self.gap.mean()):.3f}"))
        if self.gap.numel() > 1:
            worst = ", ".join(
                f"{index[0] if len(index) == 1 else index} ({gap:.2f})"
                for index, gap in self.worst()
            )
            rows.append(("largest gaps", worst))
        if self.guide.given:
            rows.append(("given", ", ".join(self.guide.given)))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        head = "nats per weight; quantiles 5, 25, 50, 75, 95 %"
        return "\n".join([head, *lines, self.advice, self._unseen()])

    def _rows_of_the_guide(self) -> list[tuple[str, str]]:
        guide, n = self.guide, self.gap.numel()
        what = f"{n} in {', '.join(guide.plates)}" if guide.plates else f"{n}"
        bad = int(guide.unreliable.sum())
        return [
            ("weights", f"{what}; {guide.num_particles} particles each"),
            ("guide: ELBO", f"{float(self.bound.mean()):.3f}"),
            ("guide: log evidence", f"{_mean(guide)} (importance sampling)"),
            ("guide: Pareto k", f"{_quantiles(guide.pareto_k)}; above 0.7: {bad} of {n}"),
            ("guide: effective sample size", _quantiles(guide.effective_sample_size)),
        ]

    def _rows_of_chains(self) -> list[tuple[str, str]]:
        chains, rows = self.evidence, []
        if isinstance(self.prior, LogEvidence):
            # A figure below the guide's says that the prior is far away, and nothing of the guide.
            kind = "draws of" if self.prior.acceptance is None else "chains from"
            text = (
                f"{_mean(self.prior)} ({self.prior.num_particles} each; tells where it is higher)"
            )
            rows = [(f"{kind} the prior reach", text)]
        if chains is self.guide:
            return rows
        return [
            *rows,
            ("chains: log evidence", f"{_mean(chains)} (annealed from the guide's draws)"),
            ("chains: Pareto k", _quantiles(chains.pareto_k)),
            ("chains: effective sample size", _quantiles(chains.effective_sample_size)),
        ]

    def _unseen(self) -> str:
        if isinstance(self.prior, str):
            return f"{_UNSEEN} Nothing was drawn elsewhere ({self.prior})."
        if self._looked is None:
            return f"{_UNSEEN} Draws of the prior are too far from the posterior to tell."
        return f"{_UNSEEN} Draws of the prior found {'' if self.misses else 'no '}more."

    def plot(self) -> Figure:
        """
        A figure: the gaps' histogram, and k-hat and effective sample size of each datum.

        :returns: a ``matplotlib`` figure, which belongs to no window.
        """
        return draw(self)


@judge()
def report(programs: Programs, options: Options, *, look: bool | None = None) -> Report:
    r"""
    Judge a guide: its bound, the evidence, the gap between them, how heavy the weights' tails are,
    which data it serves worst, and what to try next.

    The guide's own weights are always looked at; with a ``schedule`` or a ``kernel`` annealed
    chains look as well, and the evidence is theirs, which is right for guides too narrow for
    importance sampling.

    **What no number here sees**: :math:`\hat k` and the effective sample size tell of the draws
    that were made. A mode of the posterior where the guide draws nothing shows in neither. So a few
    chains *look* from elsewhere: 50 to 200 of them, in ten steps from draws of the model's prior
    to the posterior. Where they find more evidence than the guide's weights, the guide misses
    something, and the report says so. They find less where the prior is far from the posterior,
    as with many latents: then nothing is known, which it says as well. The look takes about 100
    gradients of the programs, of at most 200 particles each.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param bool look: let chains look from the prior; None does so unless
        ``vectorize_particles=False``, where each chain is a run of its own.
    {options}
    :returns: a :class:`Report`, to print or to :meth:`~Report.plot`.
    :raises ValueError: as :func:`log_evidence`.

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
    check_flag("look", look, or_none=True)
    annealing = options.annealing()
    with importance_sampler(programs, options) as sampler:
        plain = evidence = estimate(sampler, options.num_particles)
        if annealing is not None:
            chains = sampler.on(sampler.programs)
            chains.annealing = annealing
            evidence = estimate(chains, options.num_particles)
        sites = [t.site for t in sampler.reference.runs[0].terms if t.in_guide]
        drawn = {s["name"]: known_support(s["fn"]) for s in sites if is_random(s)}
        discrete = tuple(name for name, support in drawn.items() if support.is_discrete)
        prior: LogEvidence | str = "look=False"
        if look is None and options.vectorize_particles is False:
            prior = "particles are looped over: look=True"
        elif look is not False:
            prior = look_from_prior(sampler, options.num_particles)
        return Report(evidence, plain, discrete, prior)


def _quantiles(values: Tensor) -> str:
    # Without interpolation, which has no value between a number and infinity.
    ordered = values.flatten().sort().values
    picked = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES]
    return " ".join(f"{float(v):.2f}" for v in picked[: 1 if len(ordered) == 1 else None])


def _mean(evidence: LogEvidence) -> str:
    error = evidence.standard_error.square().sum().sqrt() / evidence.standard_error.numel()
    return f"{float(evidence.mean):.3f} ± {float(error):.3f}"
