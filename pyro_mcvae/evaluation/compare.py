"""Compare losses of one model, and models of the same data, by one estimator of the evidence."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_mcvae.evaluation.clock import Clock, OutOfTimeError, Stage
from pyro_mcvae.evaluation.evidence import (
    LogEvidence,
    estimate,
    guide_and_chains,
    has_light_tail,
    known_error,
    with_error,
)
from pyro_mcvae.evaluation.options import (
    EvaluatorOptions,
    Options,
    as_arguments,
    check_function,
    make_options,
    make_programs,
    with_options,
)
from pyro_mcvae.evaluation.plots import panels, plot_curves, plot_estimates
from pyro_mcvae.evaluation.tables import filled, fraction, number, table
from pyro_mcvae.evaluation.weights import weights_of
from pyro_mcvae.ops.checks import check_count, check_positive, each_once
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules, restored
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.outside_state import OutsideState
from pyro_mcvae.programs.run import Programs, run_pair
from pyro_mcvae.programs.types import Program, first_line
from pyro_mcvae.training.checkpoint import Undo, undo_training

if TYPE_CHECKING:
    from typing_extensions import Unpack

Batches = Iterable[object] | Callable[[], Iterable[object]]
Curve: TypeAlias = dict[int, tuple[float, LogEvidence]]

# The default training time. The part of the time budget of a loss after which its training ends.
_SECONDS, _TRAINING = 30.0, 0.7
# Differences within this number of standard errors are not significant.
_ERRORS = 2.0
# The threshold for differences of the logarithm of effective sample sizes.
_ALIKE = 0.1


@dataclass
class TrainedCopy:
    """
    The results of one loss in :func:`.compare`.

    :ivar bounds: the bound of the loss at every step, in nats per weight.
    :ivar seconds: the training time.
    :ivar times: the time of each step, in seconds.
    :ivar curve: for some steps, the training time until then and the :class:`.LogEvidence`, by
        importance sampling with few particles.
    :ivar guide: the :class:`.LogEvidence` by importance sampling after training.
    :ivar evidence: the :class:`.LogEvidence` by chains, if a ``schedule`` or ``kernel`` is given;
        otherwise the same as ``guide``.
    :ivar failed: the error that stopped training, or an empty string. After an error, the evidence
        is the last one of the curve.
    :ivar cut: what the time budget left out, or an empty string.
    """

    bounds: list[float]
    seconds: float
    times: list[float]
    curve: Curve
    guide: LogEvidence
    evidence: LogEvidence
    failed: str = ""
    cut: str = ""

    @property
    def last_bound(self) -> float:
        """Return the mean bound of the loss over the last tenth of the steps."""
        last = self.bounds[-max(1, len(self.bounds) // 10) :]
        return sum(last) / len(last) if last else math.nan

    @property
    def seconds_per_step(self) -> float:
        """Return the median time of a step, which excludes the costs of the first steps."""
        return statistics.median(self.times) if self.times else math.nan


class Comparison(dict[str, TrainedCopy]):
    """
    The result of :func:`.compare`: a dict of :class:`.TrainedCopy` by name.

    :func:`.compare` has an example.

    :param copies: the results of each loss.
    :param bool learns: whether the model has parameters. If not, the evidence is the same for all.
    """

    def __init__(self, copies: dict[str, TrainedCopy], learns: bool) -> None:
        super().__init__(copies)
        self.learns = learns
        self._trained: dict[str, Undo] = {}

    def use(self, name: str) -> None:
        """
        Set the parameters of the model and guide to the trained values of this loss.

        :raises ValueError: for a name that was not compared.
        """
        if name not in self._trained:
            raise ValueError(f"{name!r} was not compared: there are {', '.join(self)}")
        self._trained[name]()

    def gain(self, name: str, over: str) -> tuple[float, float]:
        """
        Return the difference of the mean log evidence of two losses, and its standard error. This
        is the error of paired differences over data, or, with a single weight, the Monte Carlo
        error. It is NaN if the error of one of them is unknown.
        """
        first, second = self[name].evidence, self[over].evidence
        difference = first.log_evidence - second.log_evidence
        error = torch.hypot(first.standard_error, second.standard_error)
        if difference.numel() > 1:
            error = difference.std() / math.sqrt(difference.numel())
        return float(difference.mean()), known_error(error, first, second)

    @property
    def best(self) -> list[str]:
        """
        Return the names of the best loss and of those with no significant difference from it.

        If the model has parameters, losses are compared by the log evidence, within two standard
        errors. Otherwise they are compared by the effective sample size of the guide (geometric
        mean), within a tenth. If :attr:`.evaluated` is False, all losses are returned, with the
        highest ELBO first. Each loss has only one training run, so another seed may give another
        order.
        """
        names = self._running
        if not self.evaluated:
            return sorted(names, key=lambda n: -float(self[n].guide.bound.mean()))
        sizes = {n: float(self[n].guide.effective_sample_size.log().mean()) for n in names}
        if not self.learns:
            order = sorted(names, key=lambda n: -sizes[n])
            return [n for n in order if n == order[0] or sizes[order[0]] - sizes[n] < _ALIKE]
        order = sorted(names, key=lambda n: -float(self[n].evidence.mean))
        gains = {n: self.gain(order[0], n) for n in order[1:]}
        return [n for n in order if n == order[0] or not gains[n][0] > _ERRORS * gains[n][1]]

    @property
    def evaluated(self) -> bool:
        r"""
        Return whether the draws allow a comparison. They do not if the effective sample size is
        below 10 for most weights of every loss. If the model has parameters, weights with
        :math:`\hat k` above 0.7 count as well.
        """
        evidences = [self[n].evidence if self.learns else self[n].guide for n in self._running]
        return any(fraction(e.few | (e.unreliable & self.learns)) <= 0.5 for e in evidences)

    @property
    def _running(self) -> list[str]:
        return [n for n in self if not self[n].failed] or list(self)

    def plot(self, axes: Any = None) -> tuple[Any, Any]:
        """
        Plot the ELBO and the log evidence of each loss, and the evidence over training.

        Bars are two Monte Carlo errors. The curves are estimates with few particles, so their ends
        can be below the final evidence.

        :param axes: two matplotlib axes; None creates a figure.
        :returns: the two axes.

        Example::

            >>> left, right = result.plot()  # doctest: +SKIP
            >>> left.figure.savefig("comparison.png")  # doctest: +SKIP
        """
        left, right = panels(axes)
        plot_estimates(
            left,
            [
                row
                for name, copy in self.items()
                for row in (
                    (f"{name}: ELBO", copy.guide.bound.mean()),
                    (f"{name}: log p(x)", copy.evidence),
                )
            ],
        )
        left.set_title("Evaluated data, one estimator for all")
        curves = {
            name: {step: evidence for step, (_, evidence) in copy.curve.items()}
            for name, copy in self.items()
        }
        plot_curves(right, curves)
        right.set_title("During training")
        return left, right

    @property
    def verdict(self) -> str:
        """Return which loss is best and how reliable that is, in a few sentences."""
        best, by = self.best, "log evidence" if self.learns else "effective sample size"
        said = [f"Best by {by}: {best[0]}."]
        if not self.evaluated:
            said = [
                f"Not evaluated: too few effective draws, or too high a Pareto k, to tell "
                f"{', '.join(best)} apart; chains (schedule=10, or more) come closer. The highest "
                f"ELBO is that of {best[0]}."
            ]
        elif len(best) > 1:
            said = [f"{', '.join(best[:-1])} and {best[-1]} do not differ significantly by {by}."]
        doubtful = [n for n in self if fraction(~(self[n].evidence.pareto_k <= 0.7)) > 0.05]
        if doubtful and self.learns:
            names = ", ".join(doubtful)
            said.append(
                f"The evidence of {names} is too low (Pareto k), so the order may be wrong; chains "
                f"(schedule=10, or more) come closer."
            )
        return " ".join([*said, "One training run each; another seed may give another order."])

    def __str__(self) -> str:
        first = next(iter(self))
        head = ["loss", "steps", "ms/step", "own bound, training", "ELBO", "log evidence"]
        rows = [[*head, f"over {first}", "ESS", "k > 0.7"]]
        for name, trained in self.items():
            guide, evidence = trained.guide, trained.evidence
            rows.append(
                [
                    name,
                    str(len(trained.bounds)),
                    f"{1e3 * trained.seconds_per_step:.1f}",
                    f"{trained.last_bound:.3f}",
                    f"{float(guide.bound.mean()):.3f}",
                    with_error(evidence, evidence.mean, evidence.mean_standard_error),
                    "" if name == first else number(*self.gain(name, first)),
                    f"{float(guide.effective_sample_size.median()):.0f}",
                    f"{int(guide.unreliable.sum())} of {guide.pareto_k.numel()}",
                ]
            )
        units = (
            f"nats per weight; columns from ELBO on: evaluated data; ± Monte Carlo error, for "
            f"differences the error over the weights; ESS (median effective sample size) and k > "
            f"0.7: of {self[first].guide.num_particles} draws of the guide"
        )
        stopped = [f"{n} stopped at {f.failed}" for n, f in self.items() if f.failed]
        stopped += [f"{n}: the time budget ended; {f.cut}" for n, f in self.items() if f.cut]
        return "\n".join([filled(units), table(rows), *map(filled, [*stopped, self.verdict])])


@with_options()
def compare(
    model: Program,
    guide: Program,
    *args: object,
    losses: Mapping[str, object],
    optim: PyroOptim | Mapping[str, PyroOptim],
    seconds: float | None = None,
    num_steps: float | None = None,
    num_epochs: int | None = None,
    batches: Batches | None = None,
    to_args: Callable[..., object] | None = None,
    num_checks: int = 10,
    check_particles: int = 100,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> Comparison:
    r"""
    Train one model and guide with several losses, each for the same time or number of steps, and
    evaluate all of them with one estimator.

    The losses are trained one after the other, from the same parameters and random numbers. Their
    bounds are not comparable, but the evidence is. It is estimated by :func:`log_evidence`
    ``num_checks`` times during training, by importance sampling with ``check_particles``. This does
    not count as training time. After training it is estimated with ``num_particles``, or by chains
    if a ``schedule`` or a ``kernel`` is given. Then the initial parameters of the model and guide
    are restored; :meth:`.Comparison.use` sets those of a loss. Before the training, one step of
    each loss is run and discarded, so that one-time costs are not included in the times.

    Losses and optimizers are copied. For a :class:`CompiledELBO`, the training time includes
    recording and compiling, but the median time of a step (``ms/step``) does not. If the training
    of a loss fails, for example with a value that is not finite, the table names it. The other
    losses continue.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments: the data for the evaluation. Without ``batches`` these are also
        the training data.
    :param losses: a dict of losses by name. Any loss for ``SVI`` is accepted.
    :param optim: a Pyro optimizer, such as ``pyro.optim.Adam({"lr": 0.01})``, or a dict of
        optimizers by name of the loss.
    :param float seconds: the training time of each loss; 30 if no budget is given.
    :param int num_steps: the number of training steps of each loss, instead of ``seconds``.
    :param int num_epochs: the number of passes over ``batches``, instead of ``seconds``. The first
        pass determines the steps of an epoch.
    :param batches: the training data: a DataLoader or another iterable of batches; or a function
        that returns an iterable for each epoch. A tuple or list contains the arguments of the
        model, a mapping the keyword arguments, and any other batch is the only argument.
    :param to_args: maps a batch to the arguments of the model and guide.
    :param int num_checks: the number of evaluations during training.
    :param int check_particles: the number of particles of these evaluations.
    :param model_kwargs: as in :func:`log_evidence`.
    :param options: as in :func:`log_evidence`. Each loss has an equal part of ``time_budget``:
        seven tenths for training, the rest for the evaluation. The table names what was left out.
    :returns: a :class:`.Comparison`, to print.
    :raises ValueError: for an invalid loss, optimizer or budget, and as :func:`log_evidence`,
        before any training.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro.infer import Trace_ELBO
        >>> from pyro_mcvae import TraceIWAE_ELBO, compare
        >>> def model(x):
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     pyro.sample("x", dist.Normal(z.sum(-1, keepdim=True), 1.0).to_event(1), obs=x)
        >>> losses = {"ELBO": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(10)}
        >>> adam = pyro.optim.Adam({"lr": 0.02})
        >>> result = compare(model, AutoNormal(model), torch.ones(1), losses=losses, optim=adam,
        ...                 num_steps=200, seed=0)
        >>> list(result), len(result["IWAE"].bounds), result.learns
        (['ELBO', 'IWAE'], 200, False)
        >>> result.use(result.best[0])  # continue with it
    """
    settings = make_options("compare", options)
    programs = make_programs(model, guide, args, model_kwargs)
    pairs = _checked(losses, optim)
    budget = {"seconds": seconds, "num_steps": num_steps, "num_epochs": num_epochs}
    _check_budget({name: value for name, value in budget.items() if value is not None})
    num_checks = check_count("num_checks", num_checks)
    check_particles = check_count("check_particles", check_particles)
    check_function("to_args", to_args)
    data = _Data(programs, batches, to_args)
    seed = int(torch.randint(2**31, ())) if settings.seed is None else settings.seed
    settings = replace(settings, seed=seed)
    checks = replace(settings, schedule=None, kernel=None, num_particles=check_particles)
    if num_epochs is not None:
        num_steps = num_epochs * data.length()
    most = seconds or (_SECONDS if num_steps is None else math.inf)
    num_steps = num_steps or math.inf
    share = _TRAINING * (settings.time_budget or math.inf) / len(pairs)
    # Raise the errors of the final evaluation before training.
    few = replace(settings, num_particles=2, warmup=int(settings.coordinates == "whitened"))
    first = data.first()
    modules = find_modules(*programs.pair)

    def new_svi(loss: Any, optim: PyroOptim) -> SVI:
        return SVI(model, guide, copy.deepcopy(optim), copy.deepcopy(loss))

    clock = Clock("compare", settings.progress, settings.time_budget)
    with each_once(), first.restored(), clock:
        pyro.set_rng_seed(seed)
        with torch.no_grad(), evaluation_modules(modules):
            nodes = run_pair(first, Substitutes())[1].nodes
        learns = any(site["type"] == "param" for site in nodes.values())
        guide_and_chains(programs, few, clock)
        comparison, undo = Comparison({}, learns), undo_training(modules)
        outside = OutsideState(first.read, generators=False)

        def start() -> None:
            undo()
            outside.put_back()

        try:
            for i, (name, pair) in enumerate(pairs.items()):
                new_svi(*pair).step(*first.args, **first.kwargs)
                start()
                pyro.set_rng_seed(seed)
                svi, stream = new_svi(*pair), itertools.chain.from_iterable(itertools.repeat(data))
                with weights_of(programs, checks, call=clock) as weights:
                    untrained = estimate(weights, check_particles)
                trained = TrainedCopy([], 0.0, [], {0: (0.0, untrained)}, untrained, untrained)
                timed = math.isinf(num_steps)
                units = (most, "seconds") if timed else (num_steps, "steps")
                stage = clock.stage(f"training with {name}", *units)
                with clock.until((i + 1) / len(pairs)):
                    for turn in range(num_checks):
                        part = (turn + 1) / num_checks
                        limits = part * min(most, share), part * num_steps
                        _train(trained, svi, stream, data, stage, *limits)
                        _check(trained, programs, checks, clock)
                    if stage.done < units[0] and not trained.failed and clock.limited:
                        trained.cut = f"training ended after {stage.done:.0f} {stage.unit}"
                    if not trained.failed:
                        _evaluate(trained, programs, settings, clock)
                comparison[name] = trained
                comparison._trained[name] = undo_training(modules)
                start()
        finally:
            start()
    return comparison


def _checked(losses: object, optim: object) -> dict[str, tuple[object, PyroOptim]]:
    """
    Check losses and optimizers, and return them by name.

    :raises ValueError: for an invalid loss or optimizer.
    """
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(
            f"losses must be a dict of losses by name, such as {{'ELBO': Trace_ELBO()}}, got "
            f"{losses!r}"
        )
    checked = {}
    for name, loss in losses.items():
        if isinstance(loss, type) or not (callable(loss) or hasattr(loss, "loss_and_grads")):
            raise ValueError(f"losses[{name!r}] must be a loss that SVI takes, got {loss!r}")
        optimizer = optim.get(name) if isinstance(optim, Mapping) else optim
        if not isinstance(optimizer, PyroOptim):
            raise ValueError(
                f"optim must be one of pyro.optim, such as pyro.optim.Adam({{'lr': 0.01}}), or a "
                f"dict of them by name; for {name!r} got {optimizer!r}"
            )
        checked[name] = loss, optimizer
    return checked


def _check_budget(budgets: dict[str, float]) -> None:
    if len(budgets) > 1:
        several = " or ".join(f"{name}={value!r}" for name, value in budgets.items())
        raise ValueError(
            f"losses are compared after an equal time, number of steps or number of epochs: "
            f"pass {several}"
        )
    for name, value in budgets.items():
        (check_positive if name == "seconds" else check_count)(name, value)


class _Data:
    """
    The training data, with the number of weights of a batch, so that bounds are per weight.

    :param batches: None trains on the arguments of ``programs``.
    """

    def __init__(
        self,
        programs: Programs,
        batches: Batches | None,
        to_args: Callable[..., object] | None,
    ) -> None:
        self._programs, self._batches, self._to_args = programs, batches, to_args
        self._weights: dict[object, tuple[float, list[object]]] = {}
        if batches is not None and not callable(batches) and iter(batches) is batches:
            raise ValueError(
                "batches must be iterable several times, got an iterator, which is used up after "
                "one pass: pass the DataLoader, a list, or a function that returns an iterator"
            )

    def first(self) -> Programs:
        """Return the model and guide with the first batch as arguments."""
        if (programs := next(iter(self), None)) is None:
            raise ValueError("there is no batch to train on: batches is empty")
        return programs

    def length(self) -> int:
        """Return the number of batches in one pass; count them if they have no length."""
        if isinstance(self._batches, Sized):
            return len(self._batches)
        with restored():
            return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Programs]:
        """Yield the batches of one pass over the data."""
        if self._batches is None:
            yield self._programs
            return
        for batch in self._batches() if callable(self._batches) else self._batches:
            batch = batch if self._to_args is None else self._to_args(batch)
            args, kwargs = as_arguments(batch)
            yield replace(self._programs, args=args, kwargs=kwargs)

    def weights(self, programs: Programs) -> float:
        """Return the number of weights in the loss of a batch, N/B times those of a minibatch."""
        call = programs.call
        scalars = [float(v) for v in call.objects if isinstance(v, Tensor) and not v.dim()]
        key = call.key, call.floats, *scalars
        if key not in self._weights:
            modules = find_modules(*programs.pair)
            with programs.restored(), torch.no_grad(), evaluation_modules(modules):
                sampler = ParticleSampler(1, None, math.inf, strict_enumeration=False)
                sample = sampler.sample(programs)
            shared = sample.structure.global_sites.guide
            # Objects stay alive, so that no other one gets their id.
            kept = [v for v in call.objects if not isinstance(v, Tensor)]
            self._weights[key] = (1.0 if shared else float(sample.num_weights)), kept
        return self._weights[key][0]


def _train(
    trained: TrainedCopy,
    svi: SVI,
    stream: Iterator[Programs],
    data: _Data,
    stage: Stage,
    seconds: float,
    num_steps: float,
) -> None:
    """Train until a time or a number of steps is reached, or the budget ends."""
    while trained.seconds < seconds and len(trained.bounds) < num_steps and not trained.failed:
        if trained.bounds and stage.clock.expired:
            return
        began = time.perf_counter()
        programs = next(stream)
        waited = time.perf_counter() - began
        weights = data.weights(programs)
        began = time.perf_counter()
        try:
            loss = float(svi.step(*programs.args, **programs.kwargs))
        except (ValueError, RuntimeError) as error:
            if not trained.bounds:
                raise
            trained.failed = f"step {len(trained.bounds) + 1}: {first_line(error)}"
            # An unfinished step leaves gradients, to which the next loss would add.
            zero_grads([p for _, p in pyro.get_param_store().named_parameters()])
            return
        trained.times.append(waited + time.perf_counter() - began)
        trained.seconds += trained.times[-1]
        trained.bounds.append(-loss / weights)
        stage.advance(trained.times[-1] if stage.unit == "seconds" else 1)
        if not math.isfinite(loss):
            trained.failed = f"step {len(trained.bounds)}: the loss is {loss}"


def _evaluate(trained: TrainedCopy, programs: Programs, options: Options, clock: Clock) -> None:
    """Estimate the evidence after training; if no chain ends in time, by the guide's weights."""
    try:
        trained.guide, trained.evidence = guide_and_chains(programs, options, clock)
    except OutOfTimeError as error:
        plain = replace(options, schedule=None, kernel=None)
        trained.guide, trained.evidence = guide_and_chains(programs, plain, clock)
        trained.cut = first_line(error)


def _check(trained: TrainedCopy, programs: Programs, options: Options, clock: Clock) -> None:
    """Add an estimate of the current evidence to the curve, or the reason why there is none."""
    step = len(trained.bounds)
    if trained.failed or step in trained.curve:
        return
    try:
        with weights_of(programs, options, call=clock) as weights:
            evidence = estimate(weights, options.num_particles)
    except (ValueError, RuntimeError) as error:
        trained.failed = f"step {step}: {first_line(error)}"
        return
    trained.curve[step] = trained.seconds, evidence
    trained.guide = trained.evidence = evidence


# Models compared by their log evidence of the same data.

# The fraction of weights whose k-hat may be too high by chance.
_FEW = 0.05


class ModelComparison(dict[str, LogEvidence]):
    """
    The result of :func:`.compare_models`: a dict of :class:`.LogEvidence` by name, highest first.

    :func:`.compare_models` has an example.
    """

    def difference(self, name: str, other: str) -> tuple[float, float]:
        """
        Return the log Bayes factor of one model over another, in nats, and its standard error, or
        NaN if the error of one of them is unknown.
        """
        first, second = self[name], self[other]
        error = torch.hypot(first.total_standard_error, second.total_standard_error)
        return float(first.total - second.total), known_error(error, first, second)

    @property
    def probabilities(self) -> dict[str, float]:
        """
        Return the posterior probabilities of the models with equal prior probabilities. They use
        the estimated evidence, so they are meaningless for :attr:`doubtful` models.
        """
        totals = torch.stack([e.total.double() for e in self.values()])
        return dict(zip(self, totals.softmax(0).tolist(), strict=True))

    @property
    def doubtful(self) -> list[str]:
        r"""
        Return the models whose evidence may be underestimated.

        For these models, :math:`\hat k + 2 s / \sqrt n` is above 0.7 for more than a twentieth of
        the n weights, where s is the error of :math:`\hat k`. The errors of many weights cancel.
        """
        return [
            n
            for n, e in self.items()
            if fraction(~has_light_tail(e, 0.7, e.pareto_k.numel() ** -0.5)) > _FEW
        ]

    @property
    def best(self) -> list[str]:
        """
        Return the model with the highest evidence, and all models that may be as good.

        These are the models within two standard errors, and the doubtful ones, because their
        estimates may be too low.
        """
        close, doubtful = self._close, self.doubtful
        return [n for n in self if n in close or n in doubtful]

    @property
    def _close(self) -> list[str]:
        """Return the highest evidence, and those within two standard errors of it."""
        differences = {n: self.difference(next(iter(self)), n) for n in self}
        return [n for n, (below, error) in differences.items() if below <= _ERRORS * error]

    @property
    def verdict(self) -> str:
        """Return which model the data favor and how reliable that is, in a few sentences."""
        top, doubtful = next(iter(self)), self.doubtful
        close, doubtful_others = self._close, [n for n in doubtful if n != top]
        said = []
        if len(close) > 1:
            said.append(f"{', '.join(close)} do not differ significantly: draw more particles.")
        elif not doubtful_others:
            said.append(f"{top} has the highest evidence.")
        if doubtful:
            are = "is a lower bound" if len(doubtful) == 1 else "are lower bounds"
            said.append(
                f"The evidence{'s' * (len(doubtful) > 1)} of {', '.join(doubtful)} {are} (Pareto k "
                f"above 0.7, or within its error)"
                f"{', and may be the highest' if doubtful_others else ''}. To come closer, use "
                f"schedule=10 with num_particles=1000, num_particles=10_000, or a better guide."
            )
        said += [f"{n}: {e.labellings}." for n, e in self.items() if e.labellings is not None]
        return " ".join(said)

    def __str__(self) -> str:
        top = next(iter(self))
        rows = [["model", "log evidence", f"below {top}", "probability", "largest k"]]
        for name, evidence in self.items():
            rows.append(
                [
                    name,
                    with_error(evidence, evidence.total, evidence.total_standard_error),
                    "" if name == top else number(*self.difference(top, name)),
                    "not known" if self.doubtful else f"{self.probabilities[name]:.3f}",
                    f"{float(evidence.pareto_k.max()):.2f}",
                ]
            )
        return "\n".join(["nats, all data", table(rows), filled(self.verdict)])


@with_options()
def compare_models(
    models: Mapping[str, tuple[Any, ...]],
    *args: object,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> ModelComparison:
    r"""
    Compare models of the same data by their evidence: log Bayes factors with errors.

    .. math:: \log \frac{p(x \mid A)}{p(x \mid B)} = \log p_A(x) - \log p_B(x)

    The evidence of each model is estimated with its guide by :func:`log_evidence`: by importance
    sampling, or by chains with a ``schedule`` or a ``kernel``. If a guide is too narrow, the
    estimate is too low. Therefore a model whose :math:`\hat k`, with its error, may be above 0.7
    for more than a twentieth of its weights is never declared worse. Parameters that were fitted to
    the same data favor the larger model. Make them latent, with priors, or evaluate on held-out
    data. Models with exchangeable components, such as mixtures, have K! equal modes, which are all
    included; see :class:`.Labellings`.

    Guides of the same class (two ``AutoNormal``) have parameters with the same names. Call
    ``pyro.clear_param_store()`` before you train each guide. Each guide is then evaluated with its
    own parameters. A warning names parameters that two guides share.

    For predictive accuracy by ArviZ's ``compare``, see :func:`to_inference_data`.

    :param models: a dict with values ``(model, guide)``, or ``(model, guide, args)`` with a tuple
        of other arguments for this model and guide.
    :param args: the arguments of the models and guides.
    :param model_kwargs: the keyword arguments of the models and guides, in a dict.
    :param options: as in :func:`log_evidence`.
    :returns: a :class:`.ModelComparison`, to print.
    :raises ValueError: for an invalid dict; for subsampled plates; and as :func:`log_evidence`.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import compare_models
        >>> def make(scale):
        ...     def model(x):
        ...         z = pyro.sample("z", dist.Normal(0.0, scale))
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        ...     def guide(x):
        ...         precision = len(x) + scale**-2
        ...         pyro.sample("z", dist.Normal(x.sum() / precision, 1.2 * precision**-0.5))
        ...     return model, guide
        >>> x = torch.full((20,), 2.0)
        >>> result = compare_models({"narrow": make(0.1), "wide": make(3.0)}, x, seed=0)
        >>> print(result.verdict)
        wide has the highest evidence.
        >>> value, error = result.difference("wide", "narrow")
        >>> print(f"log Bayes factor {value:.1f}")
        log Bayes factor 30.6
    """
    settings = make_options("compare_models", options)
    pairs = _pairs(models, args, model_kwargs)
    evidences = {}
    clock = Clock("compare_models", settings.progress, settings.time_budget)
    with each_once(), clock:
        for i, (name, programs) in enumerate(pairs.items()):
            with clock.until((i + 1) / len(pairs)):
                evidences[name] = guide_and_chains(programs, settings, clock)[1]
    _check_alike(evidences)
    return ModelComparison(sorted(evidences.items(), key=lambda item: -float(item[1].total)))


def _pairs(
    models: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None
) -> dict[str, Programs]:
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError(
            f"models must be a dict of two pairs or more by name, such as "
            f"{{'a': (model, guide), 'b': (other, its_guide)}}, got {models!r}"
        )
    programs = {}
    for name, pair in models.items():
        if not isinstance(name, str):
            raise ValueError(f"models must have strings for names, got {name!r}")
        if not isinstance(pair, tuple) or len(pair) not in (2, 3):
            raise ValueError(f"models[{name!r}] must be (model, guide) or (model, guide, args)")
        model, guide, model_args = pair if len(pair) == 3 else (*pair, args)
        if not isinstance(model_args, tuple):
            raise ValueError(
                f"the arguments in models[{name!r}] must be a tuple, got {model_args!r}"
            )
        programs[name] = make_programs(model, guide, model_args, kwargs)
    return programs


def _check_alike(evidences: Mapping[str, LogEvidence]) -> None:
    """
    Check that the evidence of all models is for the same data.

    :raises ValueError: if it is not.
    """
    for name, evidence in evidences.items():
        if evidence.fixed_latents:
            raise ValueError(
                f"the evidence of {name!r} is conditional on {', '.join(evidence.fixed_latents)}, "
                f"which have fixed values in the guide, so it is not comparable: let the guide "
                f"draw them, and omit joint=False"
            )
        if bool((torch.as_tensor(evidence.scale) != 1).any()):
            raise ValueError(
                f"the evidence of {name!r} is that of a minibatch times N/B, and each model draws "
                f"another minibatch. Pass all data, in plates that are not subsampled, or add up "
                f"log_evidence(...).log_evidence over the same batches for each model"
            )
        if not math.isfinite(float(evidence.total)):
            raise ValueError(f"the log evidence of {name!r} is {float(evidence.total)}")
