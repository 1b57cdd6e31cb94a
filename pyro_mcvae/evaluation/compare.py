"""Which loss: the same programs trained by several, and judged by one estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from pyro.optim import PyroOptim

from pyro_mcvae.evaluation.arguments import as_device, check_function
from pyro_mcvae.evaluation.contestant import Batches, Contestant, Rehearsal, contestants
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate, guide_and_chains
from pyro_mcvae.evaluation.figures import draw_comparison
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.tables import filled, number, table
from pyro_mcvae.evaluation.trained_copy import Curve, TrainedCopy
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_count, check_positive
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Comparison", "compare"]

# Of training, where nothing is said.
_SECONDS = 30.0
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
        by the guide's effective sample size (geometric mean), within a tenth. All of them where
        :attr:`evaluated` is False, the highest ELBO first. One training run of each is compared:
        another seed may give another order.
        """
        order = sorted(self._running, key=self._score, reverse=True)
        return [n for n in order if n == order[0] or self._alike(n, order[0])]

    @property
    def evaluated(self) -> bool:
        r"""
        Whether the draws tell the losses apart: not where fewer than 10 draws are effective (or,
        where the model learns, :math:`\hat k` is above 0.7) for most weights of every loss.
        """
        found = [self[n].evidence if self.learns else self[n].guide for n in self._running]
        bad = (e.few | e.unreliable if self.learns else e.few for e in found)
        return any(float(b.double().mean()) <= 0.5 for b in bad)

    @property
    def _running(self) -> list[str]:
        return [n for n in self if not self[n].failed] or list(self)

    def _score(self, name: str) -> float:
        if not self.evaluated:
            return float(self[name].guide.bound.mean())
        return float(self[name].evidence.mean) if self.learns else self._size(name)

    def _size(self, name: str) -> float:
        return float(self[name].guide.effective_sample_size.clamp_min(1.0).log().mean())

    def _alike(self, name: str, best: str) -> bool:
        if not self.evaluated:
            return True
        if not self.learns:
            return self._size(best) - self._size(name) < _ALIKE
        gain, error = self.gain(best, name)
        return gain <= _ERRORS * error

    @property
    def verdict(self) -> str:
        """Which is best, and how far that can be trusted, in a few sentences."""
        best = self.best
        last = "One training run each; another seed may give another order."
        if not self.evaluated:
            sizes = " ".join(f"{_size(self[n].guide):.0f}" for n in best)
            what = f"effective sample sizes of {sizes} (of {self[best[0]].guide.num_particles})"
            said = f"Not evaluated: {what} do not tell {', '.join(best)} apart."
            if not self.learns:
                # Where log p(x) is one number, a higher ELBO is a guide closer to the posterior.
                return f"{said} {best[0]} has the highest ELBO, of the same evidence. {last}"
            return f"{said} More particles or {self._longer(best)} come closer. {last}"
        by = "log evidence" if self.learns else "effective sample size"
        said = f"Best by {by}: {best[0]}."
        if len(best) > 1:
            said = f"{', '.join(best[:-1])} and {best[-1]} cannot be told apart by {by}."
        if not self.learns:
            said += (
                " The model learns nothing, so that the evidence is one number for all: what "
                "differs are the guides."
            )
        doubtful = [n for n in self if _is_doubtful(self[n].evidence)]
        if doubtful and self.learns:
            said += (
                f" The evidence of {', '.join(doubtful)} is underestimated (Pareto k above 0.7, or "
                f"not known), and may be the highest; {self._longer(doubtful)} come closer."
            )
        return f"{said} {last}"

    def _longer(self, names: list[str]) -> str:
        """Longer chains than those that ran."""
        rates = [self[n].evidence.acceptance for n in names]
        steps = max(0 if rate is None else len(rate) + 1 for rate in rates)
        return f"chains (schedule={4 * steps or 10})"

    def __str__(self) -> str:
        first = next(iter(self))
        head = ["loss", "steps", "ms/step", "own bound, training", "ELBO", "log evidence"]
        rows = [[*head, f"over {first}", "ESS", "k > 0.7"]]
        for name, found in self.items():
            guide, evidence, n = found.guide, found.evidence, found.guide.pareto_k.numel()
            rows.append(
                [
                    name,
                    str(len(found.bounds)),
                    f"{1e3 * found.seconds_per_step:.1f}",
                    f"{found.last_bound:.3f}",
                    f"{float(guide.bound.mean()):.3f}",
                    _shown(float(evidence.mean), float(evidence.mean_standard_error), evidence),
                    "" if name == first else _shown(*self.gain(name, first), evidence),
                    f"{_size(guide):.0f}",
                    f"{int(guide.unreliable.sum())} of {n}",
                ]
            )
        stopped = [f"{n} stopped at {f.failed}" for n, f in self.items() if f.failed]
        guide = self[first].guide
        n = guide.pareto_k.numel()
        units = (
            f"nats per weight, from ELBO on of the judged data ({n}{' in ' if guide.plates else ''}"
            f"{', '.join(guide.plates)}); ± Monte Carlo error"
            f"{', of differences over the weights, paired' if n > 1 else ''}; "
            f"ESS: effective sample size of {guide.num_particles} particles, median"
        )
        return "\n".join([filled(units), table(rows), *map(filled, [*stopped, self.verdict])])

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


def _is_doubtful(evidence: LogEvidence) -> bool:
    return float((~(evidence.pareto_k <= 0.7)).double().mean()) > 0.05


def _shown(value: float, error: float, evidence: LogEvidence) -> str:
    known = float(evidence.few.double().mean()) <= 0.05
    return number(value, error) if known else f"{value:.3f} ± unknown"


def _size(evidence: LogEvidence) -> float:
    return float(evidence.effective_sample_size.median())


@judge()
def compare(
    programs: Programs,
    options: Options,
    *,
    losses: Mapping[str, object],
    optim: PyroOptim | Mapping[str, PyroOptim],
    seconds: float | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batches: Batches | None = None,
    to_args: Callable[..., object] | None = None,
    device: torch.device | str | int | None = None,
    num_checks: int = 10,
    check_particles: int = 100,
) -> Comparison:
    r"""
    Train the same programs by several losses for an equal time, or equally many steps, and judge
    all of them by one estimator.

    All begin with the same parameters and the same random numbers, and take turns, so that a busy
    machine is as busy for each. Own bounds are not comparable with each other: the evidence is, and
    is estimated as :func:`log_evidence` does it, ``num_checks`` times on the way by importance
    sampling with ``check_particles``, which costs no training time, and in the end with
    ``num_particles``, or by chains, if a ``schedule`` or a ``kernel`` is given. Afterwards the
    programs have the values that they began with; ``found.use(name)`` gives them a loss's. One
    step of each comes before and is thrown away, so that none pays for what a process does once.

    Losses and optimizers are copied. A :class:`CompiledELBO` records and compiles its steps within
    the time that is counted; the median time of a step (``ms/step``) does not see that. A loss
    whose training fails on the way (no finite value, say) is said so, and the others go on.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments: the data that are judged, and, without ``batches``, trained on;
        keyword arguments likewise, see ``model_kwargs``.
    :param losses: the losses by name, any that ``SVI`` takes.
    :param optim: a Pyro optimizer, such as ``pyro.optim.Adam({"lr": 0.01})``, or one by name of
        the loss.
    :param float seconds: of training, each; 30 if nothing else is said.
    :param int num_steps: of training, each, in the place of seconds.
    :param int num_epochs: likewise, passes over ``batches``; as many steps as the first pass has,
        times their number.
    :param batches: the training data: a DataLoader or another iterable, whose batches are arguments
        as those of :func:`log_evidence_loader` are; or a function that returns one for each epoch.
    :param to_args: maps a batch to the programs' arguments.
    :param device: where to move the tensors of each batch.
    :param int num_checks: how often all are judged on the way.
    :param int check_particles: by how many particles.
    {options}
    :returns: a :class:`Comparison`, to print, to :meth:`~Comparison.plot` and to use.
    :raises ValueError: for what is no loss, optimizer or budget; and as :func:`log_evidence`,
        before any training.

    Example::

        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro.infer import Trace_ELBO
        >>> def model(x):
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     pyro.sample("x", dist.Normal(z.sum(-1, keepdim=True), 1.0).to_event(1), obs=x)
        >>> losses = {"ELBO": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(10)}
        >>> adam = pyro.optim.Adam({"lr": 0.02})
        >>> found = compare(model, AutoNormal(model), torch.ones(1), losses=losses, optim=adam,
        ...                 num_steps=200, seed=0)
        >>> list(found), len(found["IWAE"].bounds), found.learns
        (['ELBO', 'IWAE'], 200, False)
        >>> found.use(found.best[0])  # and go on with it
    """
    losses, optims = _losses(losses), _optims(optim, losses)
    given = {"seconds": seconds, "num_steps": num_steps, "num_epochs": num_epochs}
    _check_budget({name: value for name, value in given.items() if value is not None})
    num_checks = check_count("num_checks", num_checks)
    quick = {"num_particles": check_count("check_particles", check_particles)}
    check_function("to_args", to_args)
    data = Rehearsal(programs, batches, to_args, as_device(device))
    if options.seed is None:
        options = replace(options, seed=int(torch.randint(2**31, ())))
    checks = replace(options, schedule=None, kernel=None, **quick)  # type: ignore[arg-type]
    if num_epochs is not None:
        num_steps = num_epochs * data.length()
    limits = seconds or (_SECONDS if num_steps is None else math.inf), num_steps or math.inf
    rehearse = partial(_rehearse, programs, options)
    with contestants(programs, losses, optims, data, options.seed or 0, rehearse) as copies:
        learns = _learns(programs)
        judged = _run(copies, limits, programs, checks, options, num_checks)
        return Comparison(copies, judged, learns)


def _rehearse(programs: Programs, options: Options) -> None:
    """The evaluation at the end, of a few particles: what it refuses is refused before training."""
    few = replace(options, num_particles=2, warmup=int(options.coordinates == "whitened"))
    guide_and_chains(programs, few)


def _run(
    copies: list[Contestant],
    limits: tuple[float, float],
    programs: Programs,
    checks: Options,
    final: Options,
    num_checks: int,
) -> list[TrainedCopy]:
    curves: list[Curve] = [{} for _ in copies]
    with Progress("comparing", final.progress, "turn") as bar:
        bar.expect((num_checks + 1) * len(copies))
        for turn in range(num_checks + 1):
            until = [limit * turn / num_checks if turn else 0.0 for limit in limits]
            for player, curve in zip(copies, curves, strict=True):
                bar.say(player.name)
                with player.playing():
                    player.train(*until)
                    _check(player, programs, checks, curve)
                bar.step()
    return [_judge(*each, programs, final) for each in zip(copies, curves, strict=True)]


def _check(player: Contestant, programs: Programs, checks: Options, curve: Curve) -> None:
    """The evidence of this moment; what failed is judged as far as it got."""
    step = len(player.bounds)
    if player.failed or step in curve:
        return
    try:
        with weights_of(programs, checks) as weights:
            curve[step] = player.seconds, estimate(weights, checks.num_particles)
    except (ValueError, RuntimeError) as error:
        if not step:
            raise
        player.failed = f"step {step}: {first_line(error)}"


def _judge(player: Contestant, curve: Curve, programs: Programs, options: Options) -> TrainedCopy:
    guide = evidence = next(reversed(curve.values()))[1]
    if not player.failed:
        with player.playing():
            guide, evidence = guide_and_chains(programs, options)
    bounds, times = player.bounds, player.times
    return TrainedCopy(bounds, player.seconds, times, curve, guide, evidence, player.failed)


def _losses(losses: object) -> dict[str, object]:
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(
            f"losses must be a dict of losses by name, such as {{'ELBO': Trace_ELBO()}}, got "
            f"{losses!r}"
        )
    for name, loss in losses.items():
        if isinstance(loss, type) or not (callable(loss) or hasattr(loss, "loss_and_grads")):
            raise ValueError(f"losses[{name!r}] must be a loss that SVI takes, got {loss!r}")
    return dict(losses)


def _optims(optim: object, losses: Mapping[str, object]) -> list[PyroOptim]:
    found = [optim.get(n) if isinstance(optim, Mapping) else optim for n in losses]
    for name, one in zip(losses, found, strict=True):
        if not isinstance(one, PyroOptim):
            raise ValueError(
                f"optim must be one of pyro.optim, such as pyro.optim.Adam({{'lr': 0.01}}), or a "
                f"dict of them by name; for {name!r} got {one!r}"
            )
    return found


def _check_budget(given: dict[str, float]) -> None:
    if len(given) > 1:
        several = " or ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"losses are compared after an equal time, equally many steps or equally many epochs: "
            f"pass {several}"
        )
    for name, value in given.items():
        (check_positive if name == "seconds" else check_count)(name, value)


def _learns(programs: Programs) -> bool:
    """Whether the model has parameters, as it runs on the guide's draws."""
    with evaluation_mode(*programs.pair), torch.no_grad():
        nodes = run_pair(programs, Substitutes())[1].nodes
    return any(site["type"] == "param" for site in nodes.values())
