"""Which loss: the same programs trained by several, and judged by one estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pyro
import torch
from pyro.optim import PyroOptim

from pyro_mcvae.evaluation.arguments import as_device, check_function
from pyro_mcvae.evaluation.comparison import Comparison
from pyro_mcvae.evaluation.contestant import Batches, Contestant, Rehearsal, contestants
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.evidence import estimate, guide_and_chains
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.trained_copy import Curve, TrainedCopy
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_count, check_positive
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.progress import Progress

__all__ = ["compare"]

# Of training, where nothing is said.
_SECONDS = 30.0


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
    with contestants(programs, losses, optims, data, options.seed or 0) as copies:
        judged = _run(copies, limits, programs, checks, options, num_checks)
        return Comparison(copies, judged, _learns(programs))


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
    """Whether the model has parameters."""
    with evaluation_mode(*programs.pair), torch.no_grad(), pyro.poutine.trace() as recorder:
        programs.model(*programs.args, **programs.kwargs)
    return any(site["type"] == "param" for site in recorder.trace.nodes.values())
