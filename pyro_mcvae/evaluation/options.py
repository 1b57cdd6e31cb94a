"""Arguments that all evaluators share, annealed weights, and evaluation without side effects."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from pyro_mcvae.chains.annealing import Transition, anneal
from pyro_mcvae.chains.kernels import HMC, Info, Kernel, State, Target
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.chains.schedules import Schedule, as_schedule
from pyro_mcvae.checks.faults import is_circular
from pyro_mcvae.compiled.transition import RecordedTransition
from pyro_mcvae.coordinates.chain_density import ChainDensity, WhitenedDensity, Whitening, named
from pyro_mcvae.coordinates.coordinate import Coordinates
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules, rewindable
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program

# Evaluation leaves no trace: modes, parameters, buffers and random streams stay as they are.

# What Pyro's parameter store consists of.
_TABLES = "_params", "_param_to_name", "_constraints"
# By parameter, the modules that hold it, each with the parameter's name.
_HOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def evaluation_mode(*programs: Program, seed: int | None = None) -> Iterator[None]:
    """
    Evaluate programs without changing them.

    Modules that the programs are, hold or refer to are in evaluation mode inside: dropout and batch
    statistics would make another density of each run. They have their own parameters, where the
    parameter store has those of another module by the same name. Parameters that were not in the
    store before are removed from it.

    :param seed: seeds the generators inside and sets them back afterwards; None uses the present
        random stream.
    :raises ValueError: for modules with lazy parameters that have no shape yet.
    """
    _check_seed(seed)
    roots = find_modules(*programs)
    _refuse_lazy(roots)
    store = pyro.get_param_store()
    # Not by deleting names afterwards: two of them may be of one parameter, which the store forgets
    # at the first.
    tables = [getattr(store, name) for name in _TABLES]
    before = [dict(table) for table in tables]
    with rewindable(seed is not None) as rewind, evaluation_modules(roots):
        try:
            for name, value in _own_parameters(roots):
                if name in store and store._params[name] is not value:
                    del store[name]  # another module's
            if seed is not None:
                pyro.set_rng_seed(seed)
            yield
        finally:
            for table, before_table in zip(tables, before, strict=True):
                table.clear()
                table.update(before_table)
            rewind()


def _own_parameters(roots: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of PyroModules by name; warn of those that another module holds."""
    for module in (m for root in roots for m in root.modules()):
        if not isinstance(module, PyroModule) or not module._pyro_context.used:
            continue
        for parameter in module._pyro_params:
            name = module._pyro_get_fullname(parameter)
            value = getattr(module, f"{parameter}_unconstrained")
            holders = _HOLDERS.setdefault(value, weakref.WeakKeyDictionary())
            if any(known == name and other is not module for other, known in holders.items()):
                warnings.warn(
                    f"parameter '{name}' of {type(module).__name__} is one and the same in "
                    f"another module: Pyro's parameter store knows parameters by name, and gave "
                    f"those of the first to the second. What is evaluated is what was trained "
                    f"last: call pyro.clear_param_store() before each of them is made and trained",
                    stacklevel=6,
                )
            holders[module] = name
            yield name, value


def _check_seed(seed: int | None) -> None:
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool | torch.Tensor)
    # NumPy's generator, which Pyro seeds too, takes no other.
    if seed is not None and not (whole and 0 <= seed < 1 << 32):
        raise ValueError(f"seed must be an int from 0 to 2**32 - 1, or None, got {seed!r}")


def _refuse_lazy(roots: list[nn.Module]) -> None:
    for root in roots:
        for name, parameter in root.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter '{name}' of {type(root).__name__} has no shape yet: the module "
                    f"never ran. Run it once on data (as training does) before it is evaluated"
                )


# The transitions of an evaluator: a kernel and a schedule, adapted once and then frozen.


class Counted:
    """Transitions that advance a progress bar."""

    def __init__(self, inner: Transition, progress: Progress, amount: float) -> None:
        self.adjusted = inner.adjusted
        self._inner, self._progress, self._amount = inner, progress, amount

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        moved = self._inner.step(state, target)
        self._progress.step(self._amount)
        return moved


EvaluatorCoordinates = Literal["noise", "latent", "whitened"]

# Where a kernel is given without a schedule.
DEFAULT_STEPS = 10
# What a user who gave them leaves out, where the latents cannot be moved.
LEAVE_OUT = "leave out schedule and kernel, so that importance sampling weighs them"
# From how many transitions on a recording pays.
_LONG = 50
# Relative step of the adaptation in the first and in the second half of a warm-up.
_RATES = 0.3, 0.1


class Annealing:
    """
    A kernel along a schedule.

    Both are copies, so that an evaluation changes nothing of the user's.

    :param int warmup: chains that an adaptive step size is adapted with before the evaluation.
    :param str without: how the user does without chains, where the latents cannot be moved.
    :ivar whitens: whether to find white coordinates, which ``whitening`` then has.
    """

    whitening: Whitening | None = None

    def __init__(
        self,
        kernel: Kernel | None,
        schedule: Schedule,
        coordinates: EvaluatorCoordinates,
        warmup: int,
        without: str,
    ) -> None:
        with torch.inference_mode(False):  # a step size that adapts is changed in place
            self.kernel = HMC() if kernel is None else copy.deepcopy(kernel)
            self.betas = schedule().detach().clone()
        self.whitens = coordinates == "whitened"
        self.coordinates: Coordinates = "noise" if coordinates == "whitened" else coordinates
        self._recorded: RecordedTransition | None = None
        self.warmup = warmup
        self.without = without
        step_size = self.kernel.step_size
        self._chooses = isinstance(step_size, AdaptiveStepSize) and step_size.per_coordinate is None
        self.use(self.coordinates)

    def transition(self, programs: Programs, count: int | None = None) -> Transition:
        """
        Return the kernel; for many transitions, a recorded one.

        :param count: how many there will be, if not those along the schedule.
        """
        if (self.num_steps if count is None else count) < _LONG:
            return self.kernel
        if self._recorded is None:
            self._recorded = RecordedTransition(self.kernel, (programs.model, programs.guide))
        return self._recorded

    def use(self, coordinates: Coordinates) -> None:
        """Move other coordinates; must come before the warm-up."""
        self.coordinates, self._recorded = coordinates, None
        if self._chooses:
            self.kernel.step_size.per_coordinate = coordinates == "latent"  # type: ignore[assignment]

    @property
    def num_steps(self) -> int:
        return len(self.betas) - 1

    @property
    def adapts(self) -> bool:
        """Return whether the step size still has to adapt."""
        step_size = self.kernel.step_size
        return isinstance(step_size, AdaptiveStepSize) and step_size.training and self.warmup > 0

    def adapt(self, turn: int, acceptance: Tensor, gradient: Tensor | None) -> None:
        """Learn from one chain of the warm-up, if there is something to learn."""
        step_size = self.kernel.step_size
        if not isinstance(step_size, AdaptiveStepSize):
            return
        step_size.rate = _RATES[0] if turn < self.warmup // 2 else _RATES[1]
        step_size.update(acceptance, gradient)

    def freeze(self) -> None:
        """
        Fix the step size, so that all later chains are the same, as an unbiased estimate requires.
        """
        self.kernel.eval()


# Transitions between two evaluations of the population.
MOVES = 5
# Numbers of the factors of all weights, above which correlations are left out.
_LARGEST = 1 << 24


def whiten(density: ChainDensity, annealing: Annealing, transition: Transition) -> Whitening:
    r"""
    Return the map to white coordinates, after ``annealing.warmup`` windows of five transitions.

    The chains begin at the guide's draws and move with respect to the posterior itself. After each
    window coordinates are white with respect to where they stand then, and the step size has
    adapted; so the chains spread as far as the posterior does, window by window.

    :param transition: by the kernel.
    :raises ValueError: for discrete sites of the guide, and for angles.
    """
    discrete = density.log_weight.plan.discrete
    if discrete:
        raise ValueError(
            f"coordinates='whitened' moves all latents, but the guide's site{named(discrete)} "
            f"discrete: use coordinates='noise', where they stay as they were drawn"
        )
    angles = [n for n, fn in density.log_weight.unconstrained.items() if is_circular(fn)]
    if angles:
        raise ValueError(
            f"coordinates='whitened' fits a normal density on the line, but the guide's site"
            f"{named(tuple(angles))} an angle, which has no end there: use coordinates='noise'"
        )
    position, movable = density.log_weight.coordinates.detach(), density.log_weight.movable
    dense = position[0].numel() * position.shape[-1] <= _LARGEST
    whitening = Whitening.none(position, movable, dense)
    betas = position.new_ones(MOVES + 1)
    for turn in range(annealing.warmup):
        white = WhitenedDensity(density, whitening)
        chain = anneal(white(whitening.white(position)), betas, transition, white, movable)
        if not chain.infos:
            break  # nothing can move
        annealing.adapt(turn, chain.mean_acceptance, None)
        position = whitening.position(chain.state.position)
        whitening = whitening.refined(chain.state.position)
    return whitening


# What all evaluators take: the model and the guide with their arguments, and the same options.


@dataclass(frozen=True)
class Options:
    """
    The options that all evaluators share.

    :param int num_particles: how many weights each datum has, K.
    :param schedule: for chains: a :class:`~pyro_mcvae.chains.schedules.Schedule`, a tensor from 0
        to 1, or the number of linear steps; 10 if only a kernel is given.
    :param Kernel kernel: for chains; :class:`HMC` with 3 leapfrog steps if only a schedule is
        given.
    :param str coordinates: what chains move, ``"noise"`` or ``"latent"``; ``"whitened"`` moves what
        makes the posterior about a standard normal, from a normal fitted to it: for guides that are
        far off. See :func:`log_evidence`.
    :param int warmup: annealed chains before the evaluation, from which an adaptive step size
        learns, one update each, and which are thrown away; 0 takes it as it is.
    :param int chunk_size: how many particles are run at once; by default as many as fit 64 MiB.
    :param joint: weigh global and local latents together; None does so if the guide draws global
        ones.
    :param int seed: for a random stream of its own.
    :param vectorize_particles: run the programs once per chunk, instead of once per particle; None
        where that has a loop's numbers.
    :param max_plate_nesting: as in Pyro; inferred by default.
    :param bool strict_enumeration_warning: refuse guide sites that are marked for enumeration,
        which are drawn otherwise.
    :param progress: show a bar, if ``tqdm`` is installed; None does on a terminal and in notebooks,
        for what takes longer than two seconds.
    """

    num_particles: int = 1000
    schedule: Schedule | Tensor | int | None = None
    kernel: Kernel | None = None
    coordinates: EvaluatorCoordinates = "noise"
    warmup: int = 20
    chunk_size: int | None = None
    joint: bool | None = None
    seed: int | None = None
    vectorize_particles: bool | None = None
    max_plate_nesting: float = math.inf
    strict_enumeration_warning: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        # An int of NumPy, or a tensor, is an int from here on.
        object.__setattr__(self, "num_particles", check_count("num_particles", self.num_particles))
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", check_count("chunk_size", self.chunk_size))
        check_flag("joint", self.joint, or_none=True)
        check_flag("vectorize_particles", self.vectorize_particles, or_none=True)
        check_flag("strict_enumeration_warning", self.strict_enumeration_warning)
        check_flag("progress", self.progress, or_none=True)
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise ValueError(f"kernel must be a Kernel such as HMC(), got {self.kernel!r}")
        if self.coordinates not in get_args(EvaluatorCoordinates):
            raise ValueError(
                f"coordinates must be 'noise', 'latent' or 'whitened', got {self.coordinates!r}"
            )
        least = int(self.coordinates == "whitened")
        object.__setattr__(self, "warmup", check_count("warmup", self.warmup, least))

    def annealing(self, without: str = LEAVE_OUT) -> Annealing | None:
        """
        Return copies of the requested transitions; None without ``schedule`` and ``kernel``.

        :param str without: as in :class:`Annealing`.
        """
        if self.schedule is None and self.kernel is None:
            return None
        schedule = as_schedule(self.schedule, DEFAULT_STEPS if self.schedule is None else None)
        return Annealing(self.kernel, schedule, self.coordinates, self.warmup, without)


def make_options(evaluator: str, options: Mapping[str, Any], **defaults: Any) -> Options:
    """
    Return the options of an evaluator.

    :param defaults: options that have other defaults in this evaluator.
    :raises TypeError: for a keyword that is no option.
    """
    for keyword in (n for n in options if n not in Options.__dataclass_fields__):
        raise TypeError(
            f"{evaluator} has no option '{keyword}': keyword arguments of the model and the guide "
            f"go into model_kwargs={{'{keyword}': ...}}, or for a loader into its batches"
        )
    return Options(**{**defaults, **options})


def make_programs(
    model: Program,
    guide: Program,
    args: tuple[object, ...],
    model_kwargs: Mapping[str, object] | None,
) -> Programs:
    """
    Return the programs with their arguments.

    :raises ValueError: for keyword arguments that are no dict.
    """
    if not isinstance(model_kwargs, Mapping | None):
        raise ValueError(
            f"model_kwargs must be a dict of the programs' keyword arguments, got {model_kwargs!r}"
        )
    return Programs(model, guide, args, dict(model_kwargs or {}))


def as_arguments(batch: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """
    Positional and keyword arguments: those of a tuple or a list, of a mapping, or a single one.

    :raises ValueError: for None.
    """
    if batch is None:
        raise ValueError(
            "a batch, or what to_args makes of it, is None: return the programs' arguments, as a "
            "tuple, a dict of keyword arguments, or the only one"
        )
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def check_function(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}")


def check_call(programs: Programs) -> None:
    """
    Check that a batch can be the programs' arguments.

    :raises ValueError: naming what a program says of arguments that it does not take.
    """
    for role, program in (("model", programs.model), ("guide", programs.guide)):
        target = program.forward if isinstance(program, nn.Module) else program
        try:
            signature = inspect.signature(target, follow_wrapped=False)
        except (TypeError, ValueError):  # a wrapper, which may take other arguments
            continue
        try:
            signature.bind(*programs.args, **programs.kwargs)
        except TypeError as error:
            arguments = [*programs.args, *programs.kwargs.values()]
            raise ValueError(
                f"the {role} cannot be called with a batch, whose entries are its arguments "
                f"({', '.join(type(a).__name__ for a in arguments)}): {error}. Pass to_args=..., "
                f"which makes the arguments of a batch, such as to_args=lambda batch: (batch[0],)"
            ) from error
