"""What came of a comparison of losses: who is best, and how far that can be trusted."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Literal

import torch

from pyro_mcvae.evaluation.contestant import Contestant
from pyro_mcvae.evaluation.figures import draw_comparison
from pyro_mcvae.evaluation.tables import number, table
from pyro_mcvae.evaluation.trained_copy import TrainedCopy

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Comparison"]

# Differences within so many standard errors are none.
_ERRORS = 2.0
# Effective sample sizes within a factor of e to this, likewise.
_ALIKE = 0.1


class Comparison(dict[str, TrainedCopy]):
    """
    What :func:`compare` found, whose example shows one: a :class:`TrainedCopy` by name.

    :param copies: the trained states.
    :param judged: what was found of each.
    :param bool learns: whether the model has parameters; if not, all have one evidence.
    """

    def __init__(self, copies: list[Contestant], judged: list[TrainedCopy], learns: bool) -> None:
        super().__init__({c.name: found for c, found in zip(copies, judged, strict=True)})
        self.learns = learns
        self._copies = {c.name: c for c in copies}

    def use(self, name: str) -> None:
        """
        Give the programs the values that training by this loss ended with.

        :raises ValueError: for a name that was not compared.
        """
        if name not in self._copies:
            raise ValueError(f"{name!r} was not compared: there are {', '.join(self)}")
        with self._copies[name].playing():
            pass

    def gain(self, name: str, over: str) -> tuple[float, float]:
        """
        How much higher the mean log evidence of one is than that of another, and the standard
        error: over the data, whose differences are paired; with one weight, Monte Carlo's alone.
        """
        one, other = self[name].evidence, self[over].evidence
        difference = one.log_evidence - other.log_evidence
        error = torch.hypot(one.standard_error, other.standard_error)
        if difference.numel() > 1:
            error = difference.std() / math.sqrt(difference.numel())
        return float(difference.mean()), float(error)

    @property
    def best(self) -> list[str]:
        """
        The best loss, and those that cannot be told apart from it.

        By the log evidence, within two standard errors, where the model learns. Where it does not,
        by the guide's effective sample size (geometric mean), within a tenth. One training run of
        each is compared: another seed may give another order.
        """
        running = [n for n in self if not self[n].failed] or list(self)
        score = self._score if self.learns else self._size
        order = sorted(running, key=score, reverse=True)
        return [n for n in order if n == order[0] or self._alike(n, order[0])]

    def _score(self, name: str) -> float:
        return float(self[name].evidence.mean)

    def _size(self, name: str) -> float:
        return float(self[name].guide.effective_sample_size.clamp_min(1.0).log().mean())

    def _alike(self, name: str, best: str) -> bool:
        if not self.learns:
            return self._size(best) - self._size(name) < _ALIKE
        gain, error = self.gain(best, name)
        return gain <= _ERRORS * error

    @property
    def verdict(self) -> str:
        """Which is best, and how far that can be trusted, in a few sentences."""
        best = self.best
        names = f"{', '.join(best[:-1])} and {best[-1]}" if len(best) > 1 else best[0]
        by = "log evidence" if self.learns else "effective sample size"
        said = [
            f"Best by {by}: {names}."
            if len(best) == 1
            else f"{names} cannot be told apart by {by}."
        ]
        if not self.learns:
            said.append(
                "The model learns nothing, so that the evidence is one number for all: what "
                "differs are the guides."
            )
        doubtful = [n for n in self if float(self[n].evidence.unreliable.double().mean()) > 0.05]
        behind = [n for n in doubtful if n not in best]
        if doubtful and self.learns:
            rest = "their" if len(doubtful) > 1 else "its"
            said.append(
                f"Pareto k is above 0.7 for more than a twentieth of the weights of "
                f"{', '.join(doubtful)}: {rest} evidence is underestimated"
                + (", and may be the highest" if behind else "")
                + ". Annealed chains (schedule=10, and more) come closer."
            )
        return " ".join([*said, "One training run each; another seed may give another order."])

    def __str__(self) -> str:
        first = next(iter(self))
        head = [
            "loss",
            "steps",
            "ms/step",
            "seconds",
            "own bound",
            "ELBO",
            "log evidence",
            f"over {first}",
        ]
        rows = [[*head, "ESS", "k > 0.7"]]
        for name, found in self.items():
            guide, evidence, n = found.guide, found.evidence, found.guide.pareto_k.numel()
            rows.append(
                [
                    name,
                    str(len(found.bounds)),
                    f"{1e3 * found.seconds_per_step:.1f}",
                    f"{found.seconds:.1f}",
                    f"{found.last_bound:.3f}",
                    f"{float(guide.bound.mean()):.3f}",
                    number(float(evidence.mean), float(evidence.mean_standard_error)),
                    "" if name == first else number(*self.gain(name, first)),
                    f"{float(guide.effective_sample_size.median()):.0f}",
                    f"{int(guide.unreliable.sum())} of {n}",
                ]
            )
        stopped = [f"{n} stopped at {f.failed}" for n, f in self.items() if f.failed]
        guide = self[first].guide
        n = guide.pareto_k.numel()
        units = (
            f"nats per weight ({n}{' in ' if guide.plates else ''}{', '.join(guide.plates)}), "
            f"± Monte Carlo error{', of differences over the weights, paired' if n > 1 else ''}; "
            f"ESS: effective sample size of {guide.num_particles} particles, median"
        )
        said = [*stopped, self.verdict]
        return "\n".join([units, table(rows), *(textwrap.fill(s, 100) for s in said)])

    def plot(
        self,
        figure: Figure | SubFigure | None = None,
        over: Literal["seconds", "steps"] = "seconds",
    ) -> Figure | SubFigure:
        """
        A figure: each loss's own bound, and the evidence of the judged data, over time.

        :param figure: a ``matplotlib`` figure, or a part of one, to draw in.
        :param str over: ``"seconds"`` of training, or ``"steps"``.
        :returns: that figure; without one a new one, which belongs to no window.
        :raises ValueError: for another ``over``.
        """
        return draw_comparison(self, figure, over)
