"""Arguments that all evaluators share, annealed weights, and evaluation without side effects."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

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
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program
from pyro_mcvae.training.checkpoint import rng_state, set_rng_state

# Evaluation leaves no trace: modes, parameters, buffers and random streams stay as they are.

# What Pyro's parameter store consists of.
_TABLES = "_params", "_param_to_name", "_constraints"
# By parameter, the modules that hold it, each with the parameter's name.
_HOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_REMEDY = "call pyro.clear_param_store() before each of them is made and trained"


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
    generators = rng_state() if seed is not None else None
    try:
        for name, parameter in _own_parameters(*programs).items():
            if name in store and store._params[name] is not parameter.value:
                del store[name]  # another module's
            _warn_of_shared(name, parameter)
        with evaluation_modules(roots):
            if seed is not None:
                pyro.set_rng_seed(seed)
            yield
    finally:
        for table, before_table in zip(tables, before, strict=True):
            table.clear()
            table.update(before_table)
        if generators is not None:
            set_rng_state(generators)


def check_separate_parameters(pairs: Mapping[str, Programs]) -> None:
    """
    Check that no two modules of different pairs have the same tensor by the same name: the later
    module would have taken it from the store and trained it.

    :raises ValueError: where two modules of different pairs hold the same tensor by the same name:
        the later one has taken it out of the store, and trained it.
    """
    parameters = {name: _own_parameters(*programs.pair) for name, programs in pairs.items()}
    for (one, mine), (two, theirs) in itertools.combinations(parameters.items(), 2):
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if a.module is not b.module and a.value is b.value:
                raise ValueError(
                    f"parameter '{name}' is one and the same in modules of {one!r} and of {two!r}: "
                    f"Pyro's parameter store knows parameters by name, and gave those of the first "
                    f"to the second: {_REMEDY}"
                )


class _OwnParameter(NamedTuple):
    """A parameter that a module holds itself."""

    module: PyroModule
    value: Tensor


def _own_parameters(*programs: Program) -> dict[str, _OwnParameter]:
    """Return, by name in the store, the parameters of PyroModules."""
    parameters = {}
    for module in (m for root in find_modules(*programs) for m in root.modules()):
        if isinstance(module, PyroModule) and module._pyro_context.used:
            for parameter in module._pyro_params:
                name = module._pyro_get_fullname(parameter)
                entry = parameters[name] = _OwnParameter(
                    module, getattr(module, f"{parameter}_unconstrained")
                )
                _HOLDERS.setdefault(entry.value, weakref.WeakKeyDictionary())[module] = name
    return parameters


def _warn_of_shared(name: str, parameter: _OwnParameter) -> None:
    """Warn of a parameter that another module, seen before, has by the same name."""
    holders = _HOLDERS.get(parameter.value, {})
    if any(known == name and module is not parameter.module for module, known in holders.items()):
        warnings.warn(
            f"parameter '{name}' of {type(parameter.module).__name__} is one and the same in "
            f"another module: Pyro's parameter store knows parameters by name, and gave "
            f"those of the first to the second. What is evaluated is what was trained "
            f"last: {_REMEDY}",
            stacklevel=7,
        )


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
        kernel: Kernel,
        schedule: Schedule,
        coordinates: EvaluatorCoordinates,
        warmup: int,
        without: str,
    ) -> None:
        with torch.inference_mode(False):  # a step size that adapts is changed in place
            self.kernel = copy.deepcopy(kernel)
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


def make_annealing(
    schedule: Schedule | Tensor | int | None,
    kernel: Kernel | None,
    coordinates: EvaluatorCoordinates,
    warmup: int,
    without: str = LEAVE_OUT,
) -> Annealing | None:
    """
    Make an :class:`Annealing` of the user's options; None if there are none.

    :param str without: as in :class:`Annealing`.
    :raises ValueError: for what is no kernel or schedule.
    """
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError(f"kernel must be a Kernel such as HMC(), got {kernel!r}")
    if coordinates not in get_args(EvaluatorCoordinates):
        raise ValueError(
            f"coordinates must be 'noise', 'latent' or 'whitened', got {coordinates!r}"
        )
    warmup = check_count("warmup", warmup, int(coordinates == "whitened"))
    if schedule is None and kernel is None:
        return None
    schedule = as_schedule(schedule, DEFAULT_STEPS if schedule is None else None)
    with torch.inference_mode(False):
        kernel = HMC() if kernel is None else kernel
    return Annealing(kernel, schedule, coordinates, warmup, without)


# Chains for each coordinate, and the fewest and the most of a weight.
_PER_COORDINATE, _FEWEST, _MOST = 2, 50, 1000
# Transitions between two evaluations of the population.
MOVES = 5
# Numbers of the factors of all weights, above which correlations are left out.
_LARGEST = 1 << 24


def population(dim: int) -> int:
    """Return the number of chains that determine the covariance of so many coordinates."""
    return min(_MOST, max(_FEWEST, _PER_COORDINATE * dim))


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

# How many numbers the draws of one chunk may have by default, over all sites.
_CHUNK = 1 << 23


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

    def chunk(self, numbers: int) -> int:
        """Return the number of particles that run at once, for so many numbers each."""
        return self.chunk_size or max(1, _CHUNK // max(1, numbers))

    def __post_init__(self) -> None:
        # An int of NumPy, or a tensor, is an int from here on.
        object.__setattr__(self, "num_particles", check_count("num_particles", self.num_particles))
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", check_count("chunk_size", self.chunk_size))
        check_flag("joint", self.joint, or_none=True)
        check_flag("vectorize_particles", self.vectorize_particles, or_none=True)
        check_flag("strict_enumeration_warning", self.strict_enumeration_warning)
        check_flag("progress", self.progress, or_none=True)

    def annealing(self, without: str = LEAVE_OUT) -> Annealing | None:
        """Return the requested transitions; see :func:`make_annealing`."""
        return make_annealing(self.schedule, self.kernel, self.coordinates, self.warmup, without)


def prepare(
    evaluator: Callable[..., object],
    model: Program,
    guide: Program,
    args: tuple[object, ...],
    model_kwargs: Mapping[str, object] | None,
    keywords: Mapping[str, object],
    **defaults: object,
) -> tuple[Programs, Options]:
    """
    Divide the keywords of an evaluator's call into options and arguments of the programs.

    Names of options are options, all others are the programs'. If programs have an argument with
    the name of an option, ``model_kwargs`` holds all of their keyword arguments.

    :param evaluator: the function that was called, whose own parameters are options too.
    :param defaults: options that have other defaults in this evaluator.
    :raises ValueError: for a name that is an option and an argument of a program.
    """
    name, shared = evaluator.__name__, {f.name for f in fields(Options)}
    options = {n: v for n, v in keywords.items() if n in shared}
    keywords_of_model = {n: v for n, v in keywords.items() if n not in shared}
    parameters = inspect.signature(evaluator).parameters.values()
    ambiguous = {*options, *(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)}
    if model_kwargs is not None:
        if not isinstance(model_kwargs, Mapping):
            raise ValueError(
                f"model_kwargs must be a dict of the programs' keyword arguments, got "
                f"{model_kwargs!r}"
            )
        for keyword in keywords_of_model:
            raise TypeError(
                f"{name} has no option '{keyword}': with model_kwargs=, put all keyword arguments "
                f"of the programs into it"
            )
        keywords_of_model = dict(model_kwargs)
        ambiguous = {"model_kwargs"} - set(keywords_of_model)
    programs = Programs(model, guide, args, keywords_of_model)
    for role, program in (("model", model), ("guide", guide)):
        for option in sorted(ambiguous & _open_arguments(program, args)):
            raise ValueError(
                f"'{option}' is an option of {name} and an argument of the {role}: pass the "
                f"programs' keyword arguments as model_kwargs={{'{option}': ...}} (or "
                f"model_kwargs={{}}, to leave it out), and options beside it"
            )
    return programs, Options(**{**defaults, **options})  # type: ignore[arg-type]


def _signature(program: Program) -> inspect.Signature | None:
    """Return the signature of a program; None for a wrapper, which may take other arguments."""
    target = program.forward if isinstance(program, nn.Module) else program
    try:
        return inspect.signature(target, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def _open_arguments(program: Program, args: tuple[object, ...]) -> set[str]:
    """Return the named arguments of a program that are not passed by position."""
    if (signature := _signature(program)) is None:
        return set()
    parameters = list(signature.parameters.values())
    filled = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named - {p.name for p in filled[: len(args)]}


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
        if (signature := _signature(program)) is None:
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
