"""Evaluate a guide in one call: evidence, gap, reliability, what to try next."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.kernels import HMC
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.evaluation.clock import OutOfTimeError
from pyro_mcvae.evaluation.continuation import NOT_CHECKED, Rise, continue_training
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate, has_light_tail, with_error
from pyro_mcvae.evaluation.options import (
    DEFAULT_STEPS,
    Annealing,
    EvaluatorOptions,
    Options,
    make_options,
    make_programs,
    with_options,
)
from pyro_mcvae.evaluation.plots import panels, plot_estimates, plot_gaps
from pyro_mcvae.evaluation.refine import weight_reasons
from pyro_mcvae.evaluation.tables import filled, fraction, table
from pyro_mcvae.evaluation.weights import ImportanceSampler, weights_of
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.programs.types import Program, first_line

_logger = logging.getLogger(__name__)

# The fraction of weights that may be doubtful. The gap in nats per weight below which it counts as
# closed, and above which a bound of many draws halves it at best (docs/choose.md, measured on nine
# models).
_FEW, _CLOSE, _TENS = 0.05, 0.1, 20.0
# Chance of a false alarm, over all data together.
_ALARM = 0.01
# Steps of the chains from the guide, number of chains over all data, and the fewest per datum.
_STEPS, _CHAINS, _FEWEST = 40, 10_000, 20
# From the prior: number of chains over all data, the fewest per datum, warm-up steps, and the first
# step size, which has the scale of the prior.
_FROM_PRIOR, _FEWEST_FROM_PRIOR, _WARMUP, _FIRST_STEP = 200, 50, 4, 0.5
# The parts of a time budget after which the guide's draws, and chains from them, end.
_GUIDE, _FROM_GUIDE = 0.3, 0.8


@dataclass(frozen=True)
class Report:
    """
    The result of :func:`.report`. Tensors have one entry per datum, shape ``[*plates]``.

    :ivar evidence: the :class:`.LogEvidence` to compare with: by chains, if they ran, and by those
        from the prior if these reliably find more.
    :ivar guide: the :class:`.LogEvidence` by importance sampling with the guide alone, whose
        effective sample size and k-hat measure how well the guide covers the posterior.
    :ivar discrete: the guide's discrete sites.
    :ivar prior: the :class:`.LogEvidence` by chains from the prior, or the reason for its absence.
    :ivar chains: the :class:`.LogEvidence` by chains from the guide's draws; None if none ran.
    :ivar no_chains: the reason why no chains ran.
    :ivar rise: by how many nats the ELBO rises in 100 more steps of training, and the error; NaN if
        it was not checked.
    """

    evidence: LogEvidence
    guide: LogEvidence
    discrete: tuple[str, ...]
    prior: LogEvidence | str = "not requested"
    chains: LogEvidence | None = None
    no_chains: str = ""
    rise: Rise = NOT_CHECKED

    @property
    def bound(self) -> Tensor:
        """Return the ELBO of each datum."""
        return self.guide.bound

    @property
    def gap(self) -> Tensor:
        """Return log evidence minus ELBO, in nats: an estimate of KL(guide || posterior)."""
        return self.evidence.log_evidence - self.bound

    @property
    def missed(self) -> Tensor:
        r"""
        Return a mask of the data for which the guide misses a part of the posterior. For these
        :math:`\hat k` is good, but chains find significantly more evidence. The probability of a
        false alarm is 0.01 over all data. Without chains the mask is False.
        """
        missed = torch.zeros_like(self.guide.unreliable)
        for chains in (self.evidence, self.prior):
            more, error, counts, sizes = self._excess(chains)
            # The quantile of Student's t by its expansion around the normal one.
            freedom = (sizes - 1).clamp_min(1.0)
            z = torch.special.ndtri(freedom.new_tensor(1 - _ALARM / more.numel()))
            second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
            limit = z + (z**3 + z) / (4 * freedom) + second
            missed |= counts & (more > _CLOSE) & (more > limit * error)
        return missed

    @property
    def misses(self) -> bool:
        """
        Return whether the guide misses a part of the posterior, of one datum or of all together.
        """
        if self.evidence is self.prior:
            return True
        more, error, counts, _ = self._excess(self.prior)
        more, error = (more * counts).sum(), (error * counts).square().sum().sqrt()
        return bool(self.missed.any()) or bool((more > _CLOSE) & (more > 3 * error))

    @property
    def checked_modes(self) -> bool:
        """Return whether chains from the prior were compared with the guide for most data."""
        _, _, counts, sizes = self._excess(self.prior)
        return fraction(~counts | (sizes < 10)) <= 0.5

    def _excess(self, chains: LogEvidence | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Return by how much chains find more evidence than the guide, with its error, where both
        estimates count, and the smaller effective sample size. Heavier tails find less evidence; if
        many are heavy, the guide is too narrow, and some k-hats are good by chance. A finite k-hat
        therefore counts as at least the median over the data.
        """
        guide, shape = self.guide, self.guide.log_evidence.shape
        k = guide.pareto_k
        finite = k[k.isfinite()]
        if finite.numel():
            k = torch.where(k.isfinite(), k.clamp_min(float(finite.median())), k)
        counts = has_light_tail(replace(guide, pareto_k=k), 0.7)
        counts &= fraction(guide.unreliable) <= 0.5
        comparable = not isinstance(chains, str) and chains.pareto_k.numel() == shape.numel()
        if isinstance(chains, str) or not comparable or fraction(chains.unreliable) > 0.5:
            chains, counts = guide, torch.zeros_like(counts)
        # Chains have no dim for a plate of one datum, which the guide's weights may have.
        more = chains.log_evidence.reshape(shape) - guide.log_evidence
        error = torch.hypot(chains.standard_error.reshape(shape), guide.standard_error)
        sizes = chains.effective_sample_size.reshape(shape)
        sizes = torch.minimum(sizes, guide.effective_sample_size)
        return more, error, counts & ~chains.unreliable.reshape(shape), sizes

    def worst(self, count: int = 5) -> list[tuple[tuple[int, ...], float]]:
        """
        Return the data with the largest gaps: their indices in the plates, and the gaps in nats.
        """
        count = check_count("count", count)
        flat = self.gap.flatten()
        largest = flat.topk(min(count, len(flat)))
        indices = [
            tuple(int(i) for i in torch.unravel_index(at, self.gap.shape)) for at in largest.indices
        ]
        return list(zip(indices, largest.values.tolist(), strict=True))

    def plot(self, axes: Any = None) -> tuple[Any, Any]:
        r"""
        Plot the bound and the estimates of the evidence with two errors, and the gap of each datum
        over :math:`\hat k`.

        :param axes: two matplotlib axes; None creates a figure.
        :returns: the two axes.

        Example::

            >>> left, right = report(model, guide, x).plot()  # doctest: +SKIP
            >>> left.figure.savefig("report.png")  # doctest: +SKIP
        """
        left, right = panels(axes)
        rows: list[tuple[str, Tensor | LogEvidence]] = [("ELBO", self.bound.mean())]
        rows += [("weights of the guide", self.guide)]
        if self.chains is not None:
            start = "fitted normal" if self.chains.whitened else "guide"
            rows.append((f"{_steps(self.chains)} steps from the {start}", self.chains))
        if isinstance(self.prior, LogEvidence):
            rows.append(("chains from the prior", self.prior))
        plot_estimates(left, rows)
        left.set_title("Bound and log evidence")
        plot_gaps(right, self.gap, self.guide.pareto_k)
        right.set_title(f"Gap of each weight, mean {float(self.gap.mean()):.2f}")
        return left, right

    @property
    def trusted(self) -> bool:
        r"""
        Return whether the evidence and its error can be trusted. This holds if at most a twentieth
        of the weights is doubtful (see ``LogEvidence.doubtful``), or :math:`\hat k` is above 0.7
        for at most a twentieth of chains in white coordinates. It never holds if the effective
        sample size is below 10 for more than a twentieth of the weights, or if the evidence is
        :attr:`contradicted`.
        """
        bad = fraction(self.evidence.unreliable | self.evidence.few) > _FEW
        return not (self.misses or bad or self.contradicted) and (
            bool(self.evidence.whitened) or _is_sure(self.evidence)
        )

    @property
    def contradicted(self) -> bool:
        r"""
        Return whether chains from the prior find more evidence, by 0.1 nats and two errors, and
        :math:`\hat k` of ``evidence`` plus two of its errors is above 0.7 for more than a
        twentieth of the weights.
        """
        if isinstance(self.prior, str) or fraction(~has_light_tail(self.evidence, 0.7)) <= _FEW:
            return False
        return _finds_more(self.prior, self.evidence, 2)

    @property
    def close(self) -> bool:
        """
        Return whether the guide is close to the posterior, so that its draws need no weights: its
        gap, without that of labellings, is below 0.1 nats per weight.
        """
        heavy = fraction(self.guide.unreliable) > _FEW
        return float(self.gap.mean()) - self.evidence.added < _CLOSE and not (heavy or self.misses)

    @property
    def reweights(self) -> bool:
        """Return whether weights suffice for :func:`.refine`, which otherwise runs chains."""
        guide = self.guide
        size, count = guide.effective_sample_size, guide.num_particles
        return not (self.misses or weight_reasons(guide.pareto_k, size, count))

    @property
    def converged(self) -> bool:
        """
        Return whether the training has converged: 100 more steps do not raise the ELBO by 0.1 nats
        per weight, and by three errors. True if this was not checked, False if it is not known.
        """
        return not (self.rise.is_large or self.rise.why)

    @property
    def advice(self) -> str:
        """Return the next call."""
        # No loss closes the part of the gap that comes from labellings.
        missing = self.evidence.added
        gap, n = float(self.gap.mean()) - missing, self.gap.numel()
        if self.rise.is_large:
            return "Next: train on, from AutoNormal(model, **laplace_init(model, *args)) if slow."
        if self.misses and n == 1 and not self.discrete:
            return "Next: draws = refine(model, *args), which searches for modes."
        if self.misses:
            return "Next: train from other initial values, or a guide with several modes."
        if self.close:
            part = "one labelling of " if missing > _CLOSE else ""
            return f"The guide is close to {part}the posterior: the ELBO is tight enough."
        if n == 1 and not self.discrete:
            return "Next: draws = refine(model, guide, *args)."
        if self.discrete:
            return "Next: train with TraceRaoBlackwell_ELBO() or TraceIWAE_ELBO(num_particles=10)."
        loss = "TraceIWAE_ELBO(num_particles=10)"
        if gap > _TENS:
            loss = "TraceSIS_ELBO(10, num_particles=8, multi_sample=True)"
        elif fraction(self.guide.unreliable) > _FEW:  # the gap may be larger than its estimate
            loss += " (for a gap of ten nats, TraceSIS_ELBO)"
        return f"Next: train with {loss}, or draws = refine(model, guide, *args)."

    def __str__(self) -> str:
        guide, n = self.guide, self.gap.numel()
        plates = f" ({guide.where})" if guide.where else ""
        rows = [["", "draws", "log evidence", "Pareto k", "k > 0.7", "ESS"], _row("guide", guide)]
        if self.chains is not None:
            start = "fitted normal" if self.chains.whitened else "guide"
            rows.append(_row(f"{start}, {_steps(self.chains)} steps", self.chains))
        if isinstance(self.prior, LogEvidence):
            rows.append(_row("prior", self.prior))
        weights = f"{n} weight{'s' * (n > 1)}{plates}"
        lines = [
            f"nats per weight; {weights}; medians of k and ESS; chains by their start",
            table(rows),
        ]
        gap = f"ELBO {float(self.bound.mean()):.3f}, gap {float(self.gap.mean()):.3f}"
        if self.evidence.added:
            gap += f", {self.evidence.added:.3f} of it for labellings"
        lines.append(gap)
        if n > 1:
            worst = (f"{i[0] if len(i) == 1 else i} ({gap:.2f})" for i, gap in self.worst())
            lines.append(f"largest gaps: {', '.join(worst)}")
        if guide.fixed_latents:
            lines.append(f"given {', '.join(guide.fixed_latents)}")
        if self.no_chains:
            lines.append("no chains from the guide: see no_chains")
        if isinstance(self.prior, str):
            lines.append("no chains from the prior: see prior")
        if self.evidence.labellings is not None:
            lines.append(f"exchangeable: {self.evidence.labellings.short}")
        sentences = [*self._verdicts, self.advice]
        return "\n".join([lines[0], lines[1], *map(filled, (*lines[2:], *sentences))])

    @property
    def _verdicts(self) -> list[str]:
        """Return whether training, guide, draws and evidence can be used, and modes are missed."""
        sentences = [] if self.converged else [f"The {self.rise.text}."]
        instead = "can" if self.close else "cannot"
        sentences.append(f"The guide {instead} be used instead of the posterior.")
        how = "can be used: weights suffice" if self.reweights else "need chains: see draws.verdict"
        sentences.append(f"The draws of refine {how}.")
        if self.trusted:
            is_known = self.checked_modes or isinstance(self.prior, str)
            unless = "" if is_known else ", if no mode is missed"
            sentences.append(f"The evidence and its error can be trusted{unless}.")
        else:
            lower = "The evidence is a lower bound, and its error may be much larger than printed"
            sentences.append(f"{lower}.")
        if self.misses:
            return [*sentences, "The guide misses a part of the posterior, such as a mode."]
        if self.checked_modes:
            return [*sentences, "Chains from the prior find no modes that the guide misses."]
        return [*sentences, "Modes that the guide misses would not be detected."]


@with_options()
def report(
    model: Program,
    guide: Program,
    *args: object,
    check_modes: bool | None = None,
    run_chains: bool | None = None,
    check_training: bool | None = None,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> Report:
    r"""
    Evaluate a guide: its bound, the evidence, the gap between them, and the tails of the weights.
    The report also has the data with the largest gaps, and what to try next.

    The importance weights of the guide are always computed. They are doubtful if there are fewer
    than 500 draws. They are also doubtful if :math:`\hat k` plus two of its errors is above 0.5 for
    more than a twentieth of them. In these cases the evidence is estimated by annealed chains of 40
    steps in white coordinates (see :func:`log_evidence`). A ``schedule`` or a ``kernel`` replaces
    these chains.

    The report has separate sentences: whether the guide is close to the posterior
    (``Report.close``), whether :func:`.refine` draws by weights alone (``Report.reweights``), and
    whether the evidence and its error can be trusted (``Report.trusted``).

    **Training**: if all latents share one weight, or the guide is an AutoGuide, 100 more steps of
    Adam run, and all state is restored. If they raise the ELBO, training has not converged
    (``Report.converged``).

    **Missed modes**: if the guide never draws near a mode of the posterior, neither :math:`\hat k`
    nor the effective sample size changes. Therefore 50 to 200 chains run from draws of the model's
    prior to the posterior, in ten steps. If they find more evidence than the guide's weights, the
    guide misses a part of the posterior. If the prior is far from the posterior, as with many
    latents, they find less evidence, and the check is inconclusive. It takes about 100 gradients of
    the model and guide, with at most 200 particles each. Discrete latents of the guide are drawn
    from the prior and weighted.

    If components are exchangeable, as in mixtures, the evidence includes all labellings; see
    :class:`.Labellings`.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments.
    :param bool check_modes: run chains from the prior. None runs them unless particles run one by
        one, because each chain is then a separate run.
    :param bool run_chains: run chains if the guide's weights are doubtful. None runs them unless
        particles run one by one.
    :param bool check_training: check whether training has converged. None checks it as above,
        unless particles run one by one.
    :param model_kwargs: as in :func:`log_evidence`.
    :param options: as in :func:`log_evidence`. After ``time_budget`` seconds, the report has what
        is known then. The guide's draws end after three tenths of the budget, and chains from them
        after eight tenths. ``no_chains`` and ``prior`` name the chains that were not finished.
    :returns: a :class:`.Report`, to print.
    :raises ValueError: as :func:`log_evidence`.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import report
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 1.2))
        >>> result = report(model, guide, torch.linspace(-2, 2, 50), seed=0)
        >>> result.trusted, result.close, result.reweights
        (True, False, True)
        >>> print(result)
        nats per weight; 50 weights (data); medians of k and ESS; chains by their start
               draws      log evidence      Pareto k  k > 0.7  ESS
        -----  -----  ----------------  ------------  -------  ---
        guide   1000  -1.6123 ± 0.0025  -1.57 ± 0.00  0 of 50  758
        prior     50  -1.6146 ± 0.0055   0.06 ± 0.33  0 of 50   47
        ELBO -2.021, gap 0.408
        largest gaps: 7 (0.47), 27 (0.46), 10 (0.46), 35 (0.46), 34 (0.45)
        The guide cannot be used instead of the posterior.
        The draws of refine can be used: weights suffice.
        The evidence and its error can be trusted.
        Chains from the prior find no modes that the guide misses.
        Next: train with TraceIWAE_ELBO(num_particles=10), or draws = refine(model, guide, *args).
    """
    settings = make_options("report", options)
    programs = make_programs(model, guide, args, model_kwargs)
    check_flag("check_modes", check_modes, or_none=True)
    check_flag("run_chains", run_chains, or_none=True)
    check_flag("check_training", check_training, or_none=True)
    annealing, count = settings.annealing(), settings.num_particles
    with weights_of(programs, settings, call="report") as weights:
        with weights.clock.until(_GUIDE):
            plain = estimate(weights, count)
        no_chains = _why_not_run("run_chains", run_chains, weights.loops)
        chains: LogEvidence | None = None
        with weights.clock.until(_FROM_GUIDE):
            if annealing is not None:
                chains, no_chains = _requested(weights, annealing, count)
            elif not no_chains and not _is_sure(plain):
                chains, no_chains = _by_chains(weights, settings)
        evidence = chains or plain
        prior = _why_not_run("check_modes", check_modes, weights.loops) or _from_prior(
            weights, count
        )
        if not isinstance(prior, str) and _finds_more(prior, evidence, 3):
            evidence = prior
        if check_training is None and weights.loops:
            check_training = False
        rise = continue_training(
            programs, plain.log_evidence.numel(), weights.clock, check_training
        )
        return Report(evidence, plain, weights.discrete, prior, chains, no_chains, rise)


def _finds_more(prior: LogEvidence, evidence: LogEvidence, errors: float) -> bool:
    """Return whether chains from the prior are reliable and find more evidence in all."""
    if fraction(prior.unreliable | prior.few) > _FEW:
        return False
    more = float(prior.total - evidence.total)
    error = torch.hypot(prior.total_standard_error, evidence.total_standard_error)
    return more > _CLOSE and more > errors * float(error)


def _why_not_run(name: str, requested: bool | None, loops: bool) -> str:
    """Return why chains do not run; empty if they do."""
    if requested is None and loops:
        return f"particles run one by one: {name}=True runs them"
    return f"{name}=False" if requested is False else ""


def _is_sure(evidence: LogEvidence) -> bool:
    """Return whether the standard errors of nearly all weights are reliable."""
    return fraction(evidence.doubtful) <= _FEW


def _requested(
    weights: ImportanceSampler, annealing: Annealing, count: int
) -> tuple[LogEvidence | None, str]:
    """Run the requested chains; return their evidence, or None and why it is not known."""
    try:
        return estimate(weights.annealed(annealing), count), ""
    except OutOfTimeError as error:
        return None, first_line(error)


def _by_chains(weights: ImportanceSampler, options: Options) -> tuple[LogEvidence | None, str]:
    """
    Run chains from a normal density fitted to the posterior, or from draws of a discrete guide.

    :param weights: the importance sampler of the guide.
    :returns: the evidence, or None and why no chains ran.
    """
    count = min(options.num_particles, max(_FEWEST, _CHAINS // max(1, weights.elements)))
    if not weights.discrete:
        options = replace(options, coordinates="whitened", warmup=max(1, options.warmup))
    annealing = replace(options, schedule=_STEPS).annealing()
    assert annealing is not None
    chains = _optional("guide's draws", lambda: estimate(weights.annealed(annealing), count))
    return (None, chains) if isinstance(chains, str) else (chains, "")


def _optional(start: str, run: Callable[[], LogEvidence]) -> LogEvidence | str:
    """Return the evidence by chains without which the report is complete, or why none ran."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except (ValueError, RuntimeError, NotImplementedError, OutOfTimeError) as error:
        _logger.info("chains from the %s did not run: %s", start, first_line(error))
        return first_line(error)


def _from_prior(weights: ImportanceSampler, num_particles: int) -> LogEvidence | str:
    """
    Estimate the evidence by chains that are annealed from draws of the model's prior.

    The estimate is unbiased, as the guide's is, and includes modes that the prior draws. If it is
    higher, beyond its error, the guide misses a part of the posterior. If the prior is far from the
    posterior, it is lower, and contains no information. Discrete latents are drawn from the prior
    and weighted.

    :param weights: the importance sampler of the guide, whose minibatch is used.
    :param num_particles: the largest number of chains of each datum.
    :returns: the evidence, or why it could not be estimated.
    """
    if weights.fixed_latents:
        return f"{', '.join(weights.fixed_latents)} are fixed, but the prior draws them"

    def run() -> LogEvidence:
        prior, count = weights.of_prior(), num_particles
        if not prior.discrete:
            count = min(count, max(_FEWEST_FROM_PRIOR, _FROM_PRIOR // weights.elements))
            kernel = HMC(AdaptiveStepSize(_FIRST_STEP), num_leapfrog=2)
            options = Options(schedule=DEFAULT_STEPS, kernel=kernel, warmup=_WARMUP)
            prior.annealing = options.annealing()
        return estimate(prior, count, all_labellings=False)

    return _optional("prior", run)


def _row(name: str, evidence: LogEvidence) -> list[str]:
    return [
        name,
        str(evidence.num_particles),
        with_error(evidence, evidence.mean, evidence.mean_standard_error),
        f"{float(evidence.pareto_k.median()):.2f} ± {float(evidence.pareto_k_error.median()):.2f}",
        f"{int(evidence.unreliable.sum())} of {evidence.pareto_k.numel()}",
        f"{float(evidence.effective_sample_size.median()):.0f}",
    ]


def _steps(chains: LogEvidence) -> int:
    return 0 if chains.acceptance is None else len(chains.acceptance) + 1
