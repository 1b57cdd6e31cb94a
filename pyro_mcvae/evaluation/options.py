"""Arguments of all evaluators, annealed weights, and evaluation without side effects."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args

import pyro
import torch
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
from pyro_mcvae.evaluation.clock import Stage
from pyro_mcvae.ops.checks import check_count, check_flag, check_positive
from pyro_mcvae.ops.compat import saved_tables, stored_parameters
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules, rewindable
from pyro_mcvae.programs.outside_state import OutsideState, buffers_of
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program

# Evaluation has no side effects: modes, parameters, buffers and random streams do not change.

# For each parameter, the modules that have it, with the name of the parameter.
_HOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def evaluation_mode(*programs: Program, seed: int | None = None) -> Iterator[None]:
    """
    Evaluate a model and guide without changing them.

    Inside, all modules that the model and guide use are in evaluation mode, because dropout and
    batch statistics would change the density in each run. Buffers that they change nevertheless are
    restored afterwards. If the parameter store has parameters of another module with the same name,
    each module uses its own parameters. Parameters that were not in the store before are removed
    from it afterwards.

    :param seed: seeds the random generators, which are restored afterwards; None uses the current
        random stream.
    :raises ValueError: for modules with lazy parameters that have no shape yet.
    """
    _check_seed(seed)
    roots = find_modules(*programs)
    _refuse_lazy(roots)
    store = pyro.get_param_store()
    restore_tables = saved_tables()
    read = Dependencies.of(*roots, executed=ExecutedCode(unknown=True))
    buffers = OutsideState(buffers_of(read), generators=False)
    with rewindable(seed is not None) as rewind, evaluation_modules(roots):
        try:
            for name, value in _own_parameters(roots):
                if name in store and dict(store.named_parameters())[name] is not value:
                    del store[name]  # another module's
            if seed is not None:
                pyro.set_rng_seed(seed)
            yield
        finally:
            restore_tables()
            buffers.put_back()
            rewind()


def _own_parameters(roots: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of PyroModules by name. Warn about those that another module has."""
    for module in (m for root in roots for m in root.modules()):
        for parameter, name in stored_parameters(module):
            value = getattr(module, f"{parameter}_unconstrained")
            holders = _HOLDERS.setdefault(value, weakref.WeakKeyDictionary())
            if any(known == name and other is not module for other, known in holders.items()):
                warnings.warn(
                    f"parameter '{name}' of {type(module).__name__} is shared with another module, "
                    f"because Pyro's parameter store identifies parameters by name. Both modules "
                    f"are evaluated with the values that were trained last: call "
                    f"pyro.clear_param_store() before you create and train each of them",
                    stacklevel=6,
                )
            holders[module] = name
            yield name, value


def _check_seed(seed: int | None) -> None:
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool | torch.Tensor)
    # The limits are those of NumPy's generator, which Pyro seeds, too.
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


# The transitions of an evaluator: a kernel and a schedule, adapted once and then fixed.


class Counted:
    """Transitions that are counted, and end with the time budget."""

    def __init__(self, inner: Transition, stage: Stage) -> None:
        self.adjusted = inner.adjusted
        self._inner, self._stage = inner, stage

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        self._stage.check()
        result = self._inner.step(state, target)
        self._stage.advance()
        return result


F = TypeVar("F", bound=Callable[..., Any])
EvaluatorCoordinates = Literal["noise", "latent", "whitened"]

# The number of steps if a kernel is given without a schedule.
DEFAULT_STEPS = 10
# The number of transitions above which recording pays off.
_LONG = 50
# Relative step of the adaptation in the first and in the second half of a warm-up.
_RATES = 0.3, 0.1


class Annealing:
    """
    A kernel along a schedule.

    Both are copies, so that an evaluation does not change the user's objects.

    :param options: with a ``schedule`` or a ``kernel``.
    :ivar whitens: whether to estimate white coordinates, which are stored in ``whitening``.
    """

    whitening: Whitening | None = None

    def __init__(self, options: Options) -> None:
        steps = DEFAULT_STEPS if options.schedule is None else None
        with torch.inference_mode(False):  # an adaptive step size is changed in place
            self.kernel = HMC() if options.kernel is None else copy.deepcopy(options.kernel)
            self.betas = as_schedule(options.schedule, steps)().detach().clone()
        self.whitens = options.coordinates == "whitened"
        self.coordinates: Coordinates = (
            "noise" if options.coordinates == "whitened" else options.coordinates
        )
        self._recorded: RecordedTransition | None = None
        self.warmup = options.warmup
        step_size = self.kernel.step_size
        self._chooses = isinstance(step_size, AdaptiveStepSize) and step_size.per_coordinate is None
        self.use(self.coordinates)

    def transition(self, programs: Programs, count: int | None = None) -> Transition:
        """
        Return the kernel. For many transitions it is recorded.

        :param count: the number of transitions, if not that of the schedule.
        """
        if (self.num_steps if count is None else count) < _LONG:
            return self.kernel
        if self._recorded is None:
            self._recorded = RecordedTransition(self.kernel, (programs.model, programs.guide))
        return self._recorded

    def use(self, coordinates: Coordinates) -> None:
        """Set the coordinates. Must be called before the warm-up."""
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
        """Adapt to one chain of the warm-up, if the step size still has to adapt."""
        step_size = self.kernel.step_size
        if not isinstance(step_size, AdaptiveStepSize):
            return
        step_size.rate = _RATES[0] if turn < self.warmup // 2 else _RATES[1]
        step_size.update(acceptance, gradient)

    def freeze(self) -> None:
        """Fix the step size, because an unbiased estimate needs equal chains."""
        self.kernel.eval()


# Transitions of a window.
MOVES = 5
# The number of entries of all factors above which correlations are left out.
_LARGEST = 1 << 24


def whiten(density: ChainDensity, annealing: Annealing, transition: Transition) -> Whitening:
    r"""
    Return the map to white coordinates, after ``annealing.warmup`` windows of five transitions.

    The chains start from draws of the guide, with the posterior as their target. After each window
    the coordinates are standardized with the current positions, and the step size has adapted. So
    the chains spread over the posterior, window by window.

    :param transition: a transition of the kernel.
    :raises ValueError: for discrete sites of the guide, and for angles.
    """
    discrete = density.log_weight.plan.discrete
    if discrete:
        raise ValueError(
            f"coordinates='whitened' moves all latents, but the guide's site{named(discrete)} "
            f"discrete: use coordinates='noise', which keeps their drawn values"
        )
    angles = [n for n, fn in density.log_weight.unconstrained.items() if is_circular(fn)]
    if angles:
        raise ValueError(
            f"coordinates='whitened' fits a normal density on the real line, but the guide's site"
            f"{named(tuple(angles))} an angle, which is periodic: use coordinates='noise'"
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


# The arguments of all evaluators: model and guide with their arguments, and options.


@dataclass(frozen=True)
class Options:
    """
    The options of all evaluators, which :func:`log_evidence` describes.
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
    time_budget: float | None = None

    def __post_init__(self) -> None:
        # Convert NumPy ints and tensors to int.
        object.__setattr__(self, "num_particles", check_count("num_particles", self.num_particles))
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", check_count("chunk_size", self.chunk_size))
        check_flag("joint", self.joint, or_none=True)
        check_flag("vectorize_particles", self.vectorize_particles, or_none=True)
        check_flag("strict_enumeration_warning", self.strict_enumeration_warning)
        check_flag("progress", self.progress, or_none=True)
        if self.time_budget is not None:
            check_positive("time_budget", self.time_budget)
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise ValueError(f"kernel must be a Kernel such as HMC(), got {self.kernel!r}")
        if self.coordinates not in get_args(EvaluatorCoordinates):
            raise ValueError(
                f"coordinates must be 'noise', 'latent' or 'whitened', got {self.coordinates!r}"
            )
        least = int(self.coordinates == "whitened")
        object.__setattr__(self, "warmup", check_count("warmup", self.warmup, least))

    def annealing(self) -> Annealing | None:
        """Return copies of the requested transitions; None without ``schedule`` and ``kernel``."""
        return None if self.schedule is None and self.kernel is None else Annealing(self)


class EvaluatorOptions(TypedDict, total=False):
    """The keyword arguments of all evaluators, for type checkers and editors."""

    num_particles: int
    schedule: Schedule | Tensor | int | None
    kernel: Kernel | None
    coordinates: EvaluatorCoordinates
    warmup: int
    chunk_size: int | None
    joint: bool | None
    seed: int | None
    vectorize_particles: bool | None
    max_plate_nesting: float
    strict_enumeration_warning: bool
    progress: bool | None
    time_budget: float | None


def with_options(**defaults: Any) -> Callable[[F], F]:
    """
    Return a decorator that puts the options of all evaluators into a function's signature.

    :param defaults: options that have other defaults in this evaluator.

    Example::

        >>> import inspect
        >>> from pyro_mcvae.evaluation.options import with_options
        >>> @with_options(num_particles=10)
        ... def evaluate(model, **options): ...
        >>> inspect.signature(evaluate).parameters["num_particles"].default
        10
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=field.type,
            )
            for field in fields(Options)
        ]
        signature = signature.replace(parameters=[*own, *shared])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def make_options(evaluator: str, options: Mapping[str, Any], **defaults: Any) -> Options:
    """
    Return the options of an evaluator.

    :param defaults: options that have other defaults in this evaluator.
    :raises TypeError: for an unknown keyword.
    """
    for keyword in (n for n in options if n not in Options.__dataclass_fields__):
        raise TypeError(
            f"{evaluator} has no option '{keyword}': keyword arguments of the model and the guide "
            f"go into model_kwargs={{'{keyword}': ...}}"
        )
    return Options(**{**defaults, **options})


def make_programs(
    model: Program,
    guide: Program,
    args: tuple[object, ...],
    model_kwargs: Mapping[str, object] | None,
) -> Programs:
    """
    Return model and guide with their arguments.

    :raises ValueError: if the keyword arguments are not a dict.
    """
    if not isinstance(model_kwargs, Mapping | None):
        raise ValueError(
            f"model_kwargs must be a dict of the programs' keyword arguments, got {model_kwargs!r}"
        )
    return Programs(model, guide, args, dict(model_kwargs or {}))


def as_arguments(batch: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """
    Return positional and keyword arguments from a tuple or list, a mapping, or a single argument.

    :raises ValueError: for None.
    """
    if batch is None:
        raise ValueError(
            "a batch, or the result of to_args, is None: return the arguments of model and guide "
            "as a tuple, a dict of keyword arguments, or a single argument"
        )
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def check_function(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}")
