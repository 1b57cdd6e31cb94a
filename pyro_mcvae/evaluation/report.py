"""A guide judged in one call: its numbers, how far they can be trusted, what to try next."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.step_size import AdaptiveStepSize
from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.evaluation.annealing import DEFAULT_STEPS, JudgeCoordinates, make_annealing
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate, has_light_tail
from pyro_mcvae.evaluation.figures import draw_report
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.state_weights import StateWeights
from pyro_mcvae.evaluation.tables import filled, number
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.execution import Programs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "TrainedLoss", "climb", "report"]

_logger = logging.getLogger(__name__)

# Share of the weights that may be doubtful; of those with heavy tails that is much; nats per weight
# that are close enough, and those that are no difference; an error within which all agrees.
_FEW, _SOME, _CLOSE, _SMALL, _WIDE = 0.05, 0.25, 0.1, 0.02, 0.1
# Nats that a bound of many draws may leave, and those of the ELBO that such a bound halves at best
# (docs/choose.md, measured on nine models).
_MANY, _TENS = 10.0, 20.0
# Chance of a false alarm, over all data together.
_ALARM = 0.01
# Steps of the chains: the second ones show whether the first were long enough. Where they were not,
# the last ones move in coordinates of their own. Chains of all data, and the fewest of each datum.
_RUNGS: tuple[tuple[int, JudgeCoordinates | None], ...]
_RUNGS = (10, None), (40, None), (40, "whitened")
_CHAINS, _FEWEST = 10_000, 20
# From the prior: chains of all data, the fewest of each, and of a warm-up that begins with large
# steps, of the prior's own spread.
_LOOKS, _FEWEST_LOOKS, _WARMUP, _FIRST_STEP = 200, 50, 4, 0.5
# Values of the loss that trained.
_REPEATS = 20
_QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95
# Losses whose advice would be to use them: the ELBO, the bounds of several draws, and chains.
_ELBOS = "TraceSGVB_ELBO", "Trace_ELBO", "TraceMeanField_ELBO", "TraceGraph_ELBO"
_WEIGHTED = "TraceIWAE_ELBO", "RenyiELBO", "TraceRenyi_ELBO"
_BY_CHAINS = "TraceSIS_ELBO", "TraceAIS_ELBO"


class Reason(str):
    """Why something was not done, in words that fit a sentence; errors' messages are plain str."""


@dataclass(frozen=True)
class TrainedLoss:
    """
    The loss that a guide was trained by.

    :ivar name: its class.
    :ivar num_particles: how many it has; 1 if it does not say.
    :ivar bound: minus its value, in nats per weight.
    :ivar standard_error: of the bound.
    :ivar num_steps: of its chains, if it has any.
    """

    name: str
    num_particles: int
    bound: float
    standard_error: float
    num_steps: int | None = None

    @property
    def label(self) -> str:
        """As a user writes it, without its options."""
        return f"{self.name}({self.num_steps or self.num_particles})"

    def __str__(self) -> str:
        particles = f"{self.num_particles} particle{'s' * (self.num_particles != 1)}"
        steps = "" if self.num_steps is None else f"{self.num_steps} steps, "
        return f"{number(self.bound, self.standard_error)} ({steps}{particles})"


@dataclass(frozen=True)
class Report:
    """
    What :func:`report` found, whose example shows one. Tensors have one entry per datum, shape
    ``[*plates]``.

    :ivar evidence: the :class:`LogEvidence` to compare with: by chains, if they ran.
    :ivar guide: the :class:`LogEvidence` by importance sampling with the guide alone, whose
        effective sample size and k-hat tell how well the guide covers the posterior.
    :ivar discrete: the guide's discrete sites.
    :ivar prior: the :class:`LogEvidence` by chains from the prior, or why there is none.
    :ivar chains: those by chains from the guide's draws, the longest last.
    :ivar no_chains: why there are none, or no longer ones, though the guide's weights leave doubt.
    :ivar trained: the loss that the guide was trained by, if it was given, and its bound.
    :ivar states: how many a datum has, if the guide is a :class:`TruncatedPosterior`.
    """

    evidence: LogEvidence
    guide: LogEvidence
    discrete: tuple[str, ...]
    prior: LogEvidence | str = "nobody asked"
    chains: tuple[LogEvidence, ...] = ()
    no_chains: str = ""
    trained: TrainedLoss | None = None
    states: int | None = None

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
        Where chains find more of the posterior than the guide's weights, though :math:`\hat k` is
        good: the guide misses a part of it. By more than their errors allow, with a chance of one
        in a hundred that any datum is here without reason. False without chains.
        """
        missed = torch.zeros_like(self._good)
        for other in (self.evidence, self.prior if self.looked else None):
            if isinstance(other, LogEvidence) and other.log_evidence.shape == missed.shape:
                missed = missed | self._is_more(other, self._good & ~other.unreliable)
        return missed

    @property
    def misses(self) -> bool:
        """Whether the guide misses a part of the posterior, of some datum or of all together."""
        if bool(self.missed.any()):
            return True
        if not self.looked:
            return False
        prior, guide = self.prior, self.guide
        assert isinstance(prior, LogEvidence)
        if prior.log_evidence.shape == guide.log_evidence.shape:
            counts = ~prior.unreliable & self._good
            more = ((prior.log_evidence - guide.log_evidence) * counts).sum()
            error = (_error(prior, guide) * counts).square().sum().sqrt()
        else:
            more = prior.total - guide.total
            more = more * (~prior.unreliable.any() & self._good.all())
            error = torch.hypot(prior.total_standard_error, guide.total_standard_error)
        return bool((more > _CLOSE) & (more > 3 * error))

    def _is_more(self, found: LogEvidence, counts: Tensor) -> Tensor:
        """Where more was found than by the guide, beyond what chance does for so many data."""
        more = found.log_evidence - self.guide.log_evidence
        sizes = torch.minimum(found.effective_sample_size, self.guide.effective_sample_size)
        limit = _student_limit(1 - _ALARM / more.numel(), (sizes - 1).clamp_min(1.0))
        return counts & (more > _CLOSE) & (more > limit * _error(found, self.guide))

    @property
    def _good(self) -> Tensor:
        """
        Where the guide's weights would show what its draws reach: heavier tails find less, and
        where many are heavy, the guide is too narrow, and some k-hats are good by chance.
        """
        few = self.guide.unreliable.double().mean() <= 0.5
        return has_light_tail(self.guide, 0.7) & few

    @property
    def looked(self) -> bool:
        """Whether chains from the prior could tell of modes that the guide does not draw."""
        found = self.prior
        return not isinstance(found, str) and float(found.unreliable.double().mean()) <= 0.5

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
    def trusted(self) -> bool:
        r"""
        Whether the evidence is known within about its errors: for all but a twentieth of the
        weights, :math:`\hat k` plus two of its errors is at most 0.5, as ``LogEvidence.doubtful``
        says; or chains four times as long find no more. Never where :math:`\hat k` is above 0.7, or
        the effective sample size below 10, for more than a twentieth of the weights.
        """
        labellings = self.evidence.labellings
        open_ended = labellings is not None and labellings.added is None
        if self.misses or open_ended or _share(self.evidence.unreliable | self.evidence.few) > _FEW:
            return False
        return is_sure(self.evidence) or (len(self.chains) > 1 and settled(*self.chains[-2:]))

    @property
    def advice(self) -> str:
        """What to try next, in a sentence; not the same loss again, if it is known."""
        return _advice(self)

    def __str__(self) -> str:
        rows = [row for row in _rows(self) if row[1]]
        width = max(len(name) for name, _ in rows)
        lines = [filled(text, f"{name:<{width}}") for name, text in rows]
        head = "nats per weight; quantiles 5, 25, 50, 75, 95 %"
        return "\n".join([head, *lines, *map(filled, (_trust(self), _unseen(self), self.advice))])

    def plot(self) -> Figure:
        """
        A figure: the gaps' histogram, and k-hat and effective sample size of each datum; of a
        single weight the estimates of its evidence.

        :returns: a ``matplotlib`` figure, which belongs to no window.
        """
        return draw_report(self)


@judge()
def report(
    programs: Programs,
    options: Options,
    *,
    loss: object = None,
    look: bool | None = None,
    escalate: bool | None = None,
) -> Report:
    r"""
    Judge a guide: its bound, the evidence, the gap between them, how heavy the weights' tails are,
    which data it serves worst, and what to try next.

    The guide's own weights are always drawn. Where these leave doubt (:math:`\hat k` plus two
    of its errors above 0.5, or fewer than 500 draws, for more than a twentieth of the weights),
    annealed chains run as well, and the evidence is theirs: of ten steps, and of 40, if the first
    leave doubt too. Where these do as well, and the two do not closely agree, chains in white
    coordinates run (see :func:`log_evidence`). Chains of your own, by a ``schedule`` or a
    ``kernel``, take their place. ``found.trusted`` says whether the evidence is then known about
    as well as its error says.

    **What k-hat does not see**: :math:`\hat k` and the effective sample size describe the draws
    that were made. A mode of the posterior where the guide draws nothing shows in neither. So 50 to
    200 chains run from draws of the model's prior to the posterior, in ten steps. Where they find
    more evidence than the guide's weights, the guide misses something, and the report says so. They
    find less where the prior is far from the posterior, as with many latents: then nothing is
    known. They take about 100 gradients of the programs, of at most 200 particles each. Discrete
    latents that the guide draws are drawn from the prior and weighed.

    Where components are exchangeable, as in mixtures, all of their labellings are part of the
    evidence; see :class:`Labellings`.

    The gap of a :class:`TruncatedPosterior` is the posterior outside its states, in nats, as
    draws near them find it.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param loss: the loss that the guide was trained by: its bound is shown, and it is not advised
        again.
    :param bool look: run chains from the prior; None does so unless the programs are looped over,
        where each chain is a run of its own.
    :param bool escalate: run chains where the guide's weights leave doubt; None likewise.
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
        Next: take TraceIWAE_ELBO(num_particles=10).
    """
    check_flag("look", look, or_none=True)
    check_flag("escalate", escalate, or_none=True)
    annealing = options.annealing()
    with weights_of(programs, options) as weights:
        plain = estimate(weights, options.num_particles)
        no_chains = _unasked("escalate", escalate, weights.loops)
        prior: LogEvidence | str = _unasked("look", look, weights.loops)
        chains: tuple[LogEvidence, ...] = ()
        states: int | None = None
        if isinstance(weights, StateWeights):
            states, no_chains = weights.guide.num_states, Reason("no chain moves discrete states")
        if annealing is not None:
            chains, no_chains = (estimate(weights.annealed(annealing), options.num_particles),), ""
        elif not no_chains and not is_sure(plain):
            chains, no_chains = climb(weights, options)
        evidence = chains[-1] if chains else plain
        prior = prior or look_from_prior(weights, options.num_particles)
        trained = None if loss is None else trained_loss(weights, loss)
        return Report(evidence, plain, weights.discrete, prior, chains, no_chains, trained, states)


def _unasked(name: str, asked: bool | None, loops: bool) -> str:
    """Why chains do not run, if they shall not."""
    if asked is False:
        return Reason(f"{name}=False")
    looped = f"particles are looped over: {name}=True runs them"
    return Reason(looped) if loops and asked is None else ""


def is_sure(evidence: LogEvidence) -> bool:
    """Whether the standard errors of nearly all weights can be relied on."""
    return _share(evidence.doubtful) <= _FEW


def settled(short: LogEvidence, long: LogEvidence) -> bool:
    """Whether longer chains find the same, within two errors, so that a bias would show."""
    error = torch.hypot(short.mean_standard_error, long.mean_standard_error)
    return bool((long.mean - short.mean).abs() <= torch.clamp(2 * error, min=_SMALL))


def climb(weights: Weights, options: Options) -> tuple[tuple[LogEvidence, ...], str]:
    """
    Chains from the guide's draws, four times as long where the first leave doubt; and from a normal
    density that is fitted to the posterior, where both do, unless they closely agree.

    :param weights: those of the guide.
    :returns: what they found, the surest last, and why there are none.
    """
    found: list[LogEvidence] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for evidence in _rungs(weights, options):
                found.append(evidence)
                if is_sure(evidence) or _agree(found[-2:]):
                    break
    except (ValueError, RuntimeError, NotImplementedError) as error:
        _logger.info("chains from the guide's draws did not run: %s", first_line(error))
        return tuple(found), first_line(error)
    # Each is a lower bound in expectation.
    return (*found[:1], *sorted(found[1:], key=lambda e: float(e.mean))), ""


def _agree(last: list[LogEvidence]) -> bool:
    """Whether the last two found the same, and not for the width of their errors alone."""
    errors = torch.stack([e.mean_standard_error for e in last])
    return len(last) > 1 and settled(*last) and bool(errors.norm() <= _WIDE)


def _rungs(weights: Weights, options: Options) -> Iterator[LogEvidence]:
    count = min(options.num_particles, max(_FEWEST, _CHAINS // max(1, weights.elements)))
    kernel = options.kernel
    for steps, own in _RUNGS:
        if own and (weights.discrete or options.coordinates == own):
            return
        coordinates = own or options.coordinates
        warmup = max(1, options.warmup) if own else options.warmup
        annealing = make_annealing(steps, options.kernel if own else kernel, coordinates, warmup)
        assert annealing is not None
        yield estimate(weights.annealed(annealing), count)
        kernel = annealing.kernel  # with the step size that it has found


def look_from_prior(weights: Weights, num_particles: int) -> LogEvidence | str:
    """
    The evidence by chains that are annealed from draws of the model's own prior.

    It is unbiased as the guide's is, and reaches modes that the prior draws. Where it finds more,
    beyond its error, the guide has missed something; where the prior is far from the posterior it
    finds less, and tells nothing. Discrete latents are drawn from the prior and weighed.

    :param weights: those of the guide, whose minibatch is taken.
    :param num_particles: the most chains of each datum.
    :returns: the evidence, or why there is none.
    """
    if weights.given:
        return Reason(f"{', '.join(weights.given)} are held, and the prior draws them")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prior = weights.of_prior()
            if not prior.discrete:
                num_particles = min(num_particles, max(_FEWEST_LOOKS, _LOOKS // weights.elements))
                kernel = HMC(AdaptiveStepSize(_FIRST_STEP), num_leapfrog=2)
                prior.annealing = make_annealing(DEFAULT_STEPS, kernel, "noise", _WARMUP)
            return estimate(prior, num_particles, all_labellings=False)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # These chains are extra: the report stands without.
        _logger.info("chains from the prior did not run: %s", first_line(error))
        return first_line(error)


def trained_loss(weights: Weights, loss: Any) -> TrainedLoss:
    """
    Some values of a loss on the programs that are judged.

    :raises ValueError: for what is no loss.
    """
    plain = loss.plain if isinstance(loss, CompiledELBO) else loss
    if isinstance(plain, type) or not callable(getattr(plain, "loss", None)):
        raise ValueError(
            f"loss must be the loss that the guide was trained by, such as Trace_ELBO(), got "
            f"{loss!r}"
        )
    programs, num_weights = weights.programs, float(weights.reference.num_weights)
    values = torch.tensor(
        [
            -float(plain.loss(*programs.pair, *programs.args, **programs.kwargs)) / num_weights
            for _ in range(_REPEATS)
        ],
        dtype=torch.float64,
    )
    count = int(getattr(plain, "num_particles", 1))
    steps = getattr(plain, "num_steps", None)
    error = float(values.std()) / math.sqrt(_REPEATS)
    return TrainedLoss(type(plain).__name__, count, float(values.mean()), error, steps)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _error(one: LogEvidence, other: LogEvidence) -> Tensor:
    return torch.hypot(one.standard_error, other.standard_error)


def _student_limit(level: float, freedom: Tensor) -> Tensor:
    """The quantile of Student's t by its expansion around the normal one."""
    z = torch.special.ndtri(freedom.new_tensor(level))
    first = (z**3 + z) / (4 * freedom)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    guide, n = report.guide, report.gap.numel()
    where = f" in {', '.join(guide.plates)}" if guide.plates else ""
    yield "weights", f"{n}{where}; {guide.num_particles} particles each"
    yield "states of a datum", str(report.states or "")
    yield "guide: ELBO", f"{float(report.bound.mean()):.3f}"
    yield "guide: log evidence", _mean(guide)
    yield "guide: Pareto k", f"{_k_hat(guide)}; above 0.7: {int(guide.unreliable.sum())} of {n}"
    yield "guide: effective sample size", _quantiles(guide.effective_sample_size)
    for chains in report.chains:
        begin = ", from a fitted normal" if chains.whitened else ""
        text = f"{_mean(chains)} ({chains.num_particles} each{begin})"
        yield f"chains: log evidence, {_steps(chains)} steps", text
    if report.chains:
        yield "chains: Pareto k", _k_hat(report.chains[-1])
        yield "chains: effective sample size", _quantiles(report.chains[-1].effective_sample_size)
    if isinstance(report.prior, LogEvidence):
        # A figure below the guide's says that the prior is far away, and nothing of the guide.
        text = f"{_mean(report.prior)} ({report.prior.num_particles} each)"
        yield "from the prior: log evidence", text
    yield "gap: log evidence - ELBO", f"{float(report.gap.mean()):.3f}"
    if report.trained is not None:
        yield f"trained by: {report.trained.name}", str(report.trained)
    if n > 1:
        worst = (f"{i[0] if len(i) == 1 else i} ({gap:.2f})" for i, gap in report.worst())
        yield "largest gaps", ", ".join(worst)
    yield "given", ", ".join(guide.given)
    labellings = report.evidence.labellings
    if labellings is not None:
        yield "exchangeable components", labellings.short


def _trust(report: Report) -> str:
    evidence = report.evidence
    if report.trusted:
        by = "the guide's weights" if evidence is report.guide else "chains"
        return f"The evidence, by {by}, is known about as well as its error says."
    if report.misses:
        return "The evidence is not known: the guide misses a part of the posterior."
    if evidence.labellings is not None and evidence.labellings.added is None:
        return "The evidence is a lower bound: labellings that are not drawn add to it."
    steps = max((_steps(c) for c in report.chains), default=0)
    more = f"num_particles={10 * evidence.num_particles}"
    if not report.discrete and report.states is None:
        more = f"chains (schedule={4 * steps or 10}) or {more}"
    why = _because("no chains ran", report.no_chains, "found.no_chains")
    return (
        f"The evidence is not known well: take it for a lower bound, whose error may be many times "
        f"what is shown{why}; {more} may come closer."
    )


def _unseen(report: Report) -> str:
    if isinstance(report.prior, str):
        why = _because("no chains ran from the prior", report.prior, "found.prior")
        return f"Modes that the guide does not draw would not show{why}."
    if report.misses:
        return "Chains find more than the guide's weights: the guide misses a part, such as a mode."
    if not report.looked:
        return "Modes that the guide does not draw would not show: the prior is too far from them."
    return "Chains from the prior find no modes that the guide does not draw."


def _because(what: str, reason: str, attribute: str) -> str:
    if not reason:
        return ""
    return f" ({what}: {reason if isinstance(reason, Reason) else f'see {attribute}'})"


def _advice(report: Report) -> str:
    """
    The rule of ``docs/choose.md``: what a bound of many draws leaves decides, and of the ELBO's gap
    how much these are likely to leave.
    """
    trained, heavy = report.trained, _share(report.guide.unreliable)
    added = None if report.evidence.labellings is None else report.evidence.labellings.added
    # No loss closes the part of the gap that labellings are.
    missing = 0.0 if added is None else float(added.mean())
    gap = float(report.gap.mean()) - missing
    richer = "a richer guide (full covariances, or a flow)"
    if report.states is not None:
        sparse = bool(report.guide.pareto_k.isnan().any())
        if gap < _CLOSE and heavy <= _FEW and not (report.misses or sparse):
            return f"The {report.states} states of a datum hold nearly all of its posterior."
        return (
            f"Next: search on (guide.fit(..., num_steps=100), proposals=PriorDraws()), or keep "
            f"more states (num_states={4 * report.states})."
        )
    if report.misses:
        return f"Next: begin the guide's training elsewhere, or take {richer}."
    if heavy <= _FEW and gap < _CLOSE:
        part = "one labelling of " if missing > _CLOSE else ""
        return f"The guide is close to {part}the posterior: the ELBO is tight enough."
    if report.discrete and heavy > _SOME:
        sites = ", ".join(report.discrete)
        return (
            f"Next: let {sites} depend on each other in the guide, or use TruncatedPosterior with "
            f"TraceTruncated_ELBO."
        )
    if report.discrete and not _was(trained, "TraceRaoBlackwell_ELBO"):
        return "Next: take TraceRaoBlackwell_ELBO (less noise) or TraceIWAE_ELBO (a tighter bound)."
    if trained is not None and (float(report.evidence.mean) - missing) - trained.bound < _CLOSE:
        return f"The bound of {trained.label} is within {_CLOSE} nats of the evidence: it will do."
    by_elbo = trained is None or _was(trained, *_ELBOS, "TraceRaoBlackwell_ELBO")
    left = gap if trained is None else float(report.evidence.mean) - missing - trained.bound
    if not _was(trained, *_BY_CHAINS) and left > (_TENS if by_elbo else _MANY):
        return f"Next: take TraceSIS_ELBO(10, num_particles=8, multi_sample=True), or {richer}."
    if by_elbo:
        count = 100 if report.gap.numel() == 1 else 10
        then = f"; where that leaves {_MANY:.0f} nats, TraceSIS_ELBO" if heavy > _SOME else ""
        return f"Next: take TraceIWAE_ELBO(num_particles={count}){then}."
    assert trained is not None
    if _was(trained, *_WEIGHTED):
        return f"Next: take {trained.name} with {4 * trained.num_particles} particles, or {richer}."
    if _was(trained, *_BY_CHAINS) and heavy > _SOME:
        return f"Next: take more steps than {trained.label} has, or {richer}."
    return f"Next: take {richer}."


def _was(trained: TrainedLoss | None, *names: str) -> bool:
    return trained is not None and trained.name in names


def _quantiles(values: Tensor) -> str:
    # Without interpolation, which has no value between a number and infinity.
    ordered = values.flatten().sort().values
    picked = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES]
    return " ".join(f"{float(v):.2f}" for v in picked[: 1 if len(ordered) == 1 else None])


def _mean(evidence: LogEvidence) -> str:
    return f"{float(evidence.mean):.3f} ± {evidence._shown_error(evidence.mean_standard_error)}"


def _k_hat(evidence: LogEvidence) -> str:
    each = "" if evidence.pareto_k.numel() == 1 else ", each"
    return f"{_quantiles(evidence.pareto_k)}{each} ± {float(evidence.pareto_k_error.median()):.2f}"


def _steps(chains: LogEvidence) -> int:
    return 0 if chains.acceptance is None else len(chains.acceptance) + 1
