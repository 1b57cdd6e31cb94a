"""What a report found, and how it is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pyro_mcvae.evaluation.advice import advise
from pyro_mcvae.evaluation.escalation import is_sure
from pyro_mcvae.evaluation.evidence import LogEvidence
from pyro_mcvae.evaluation.findings import Findings
from pyro_mcvae.evaluation.report_figure import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report"]

_UNSEEN = (
    "Pareto k and effective sample size tell of the draws that were made: a mode of the posterior "
    "where the guide draws nothing shows in neither."
)
_QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95


class Report(Findings):
    """
    What :func:`report` found, whose example shows one. Tensors have one entry per datum, shape
    ``[*plates]``.

    :ivar evidence: the :class:`LogEvidence` to compare with: by chains, if they were asked for.
    :ivar guide: the :class:`LogEvidence` by importance sampling with the guide alone, whose
        effective sample size and k-hat tell how well the guide covers the posterior.
    :ivar discrete: the guide's discrete sites.
    :ivar prior: the :class:`LogEvidence` by chains from the prior, or why nobody looked.
    :ivar chains: those by chains from the guide's draws, the longest last.
    :ivar no_chains: why there are none, or no longer ones, though the guide's weights leave doubt.
    :ivar trained: the loss that the guide was trained by, if it was given, and its bound.
    :ivar states: how many a datum has, if the guide is a :class:`TruncatedPosterior`.
    """

    @property
    def advice(self) -> str:
        """What to try next, in a sentence or two; not the same loss again, if it is known."""
        return advise(self)

    def __str__(self) -> str:
        rows = [*self._rows_of_the_guide(), *self._rows_of_chains()]
        by = "the guide's weights" if self.evidence is self.guide else "chains"
        rows.append((f"gap: log evidence by {by} - ELBO", f"{float(self.gap.mean()):.3f}"))
        if self.trained is not None:
            rows.append((f"trained by: {self.trained.name}", str(self.trained)))
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
        return "\n".join([head, *lines, self._trust(), self.advice, self._unseen()])

    @property
    def _how(self) -> str:
        if self.states is None:
            return "importance sampling"
        return f"{self.states} states exactly, the rest by draws near them"

    def _rows_of_the_guide(self) -> list[tuple[str, str]]:
        guide, n = self.guide, self.gap.numel()
        what = f"{n} in {', '.join(guide.plates)}" if guide.plates else f"{n}"
        return [
            ("weights", f"{what}; {guide.num_particles} particles each"),
            ("guide: ELBO", f"{float(self.bound.mean()):.3f}"),
            ("guide: log evidence", f"{_mean(guide)} ({self._how})"),
            (
                "guide: Pareto k",
                f"{_k_hat(guide)}; above 0.7: {int(guide.unreliable.sum())} of {n}",
            ),
            ("guide: effective sample size", _quantiles(guide.effective_sample_size)),
        ]

    def _rows_of_chains(self) -> list[tuple[str, str]]:
        rows = []
        if isinstance(self.prior, LogEvidence):
            # A figure below the guide's says that the prior is far away, and nothing of the guide.
            kind = "draws of" if self.prior.acceptance is None else "chains from"
            text = (
                f"{_mean(self.prior)} ({self.prior.num_particles} each; tells where it is higher)"
            )
            rows = [(f"{kind} the prior reach", text)]
        if not self.chains:
            return rows
        *shorter, last = self.chains
        rows += [
            (f"chains: log evidence, {_steps(c)}", f"{_mean(c)} ({c.num_particles} each)")
            for c in shorter
        ]
        return [
            *rows,
            (
                f"chains: log evidence, {_steps(last)}",
                f"{_mean(last)} ({last.num_particles} each, annealed from {_begin(last)})",
            ),
            ("chains: Pareto k", _k_hat(last)),
            ("chains: effective sample size", _quantiles(last.effective_sample_size)),
        ]

    def _trust(self) -> str:
        doubt = int(self.guide.doubtful.sum())
        if self.trusted and self.evidence is self.guide:
            return "The evidence is known about as well as its error says."
        if self.trusted:
            how = "long enough" if is_sure(self.evidence) else "as long as makes no difference"
            return (
                f"The guide's own weights leave doubt (Pareto k and its error, {doubt} of "
                f"{self.gap.numel()}); the evidence is that of chains {how}."
            )
        why = f" No chains looked ({self.no_chains})." if self.no_chains else ""
        return (
            f"The evidence is not known well: take it for a lower bound, whose error may be many "
            f"of its standard errors.{why}"
        )

    def _unseen(self) -> str:
        if isinstance(self.prior, str):
            return f"{_UNSEEN} Nothing was drawn elsewhere ({self.prior})."
        if not self.looked:
            return f"{_UNSEEN} Draws of the prior are too far from the posterior to tell."
        return f"{_UNSEEN} Draws of the prior found {'' if self.misses else 'no '}more."

    def plot(self) -> Figure:
        """
        A figure: the gaps' histogram, and k-hat and effective sample size of each datum.

        :returns: a ``matplotlib`` figure, which belongs to no window.
        """
        return draw(self)


def _quantiles(values: Tensor) -> str:
    # Without interpolation, which has no value between a number and infinity.
    ordered = values.flatten().sort().values
    picked = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES]
    return " ".join(f"{float(v):.2f}" for v in picked[: 1 if len(ordered) == 1 else None])


def _mean(evidence: LogEvidence) -> str:
    return f"{float(evidence.mean):.3f} ± {float(evidence.mean_standard_error):.3f}"


def _k_hat(evidence: LogEvidence) -> str:
    text = _quantiles(evidence.pareto_k)
    error = float(evidence.pareto_k_error.median())
    return (
        f"{text} ± {error:.2f}" if evidence.pareto_k.numel() == 1 else f"{text}, each ± {error:.2f}"
    )


def _begin(chains: LogEvidence) -> str:
    return "a normal fitted to the posterior" if chains.whitened else "the guide's draws"


def _steps(chains: LogEvidence) -> str:
    steps = 0 if chains.acceptance is None else len(chains.acceptance) + 1
    return f"{steps} steps{', whitened' if chains.whitened else ''}"
