"""One loss of a comparison, with a copy of the trained state of its own."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyro_mcvae.evaluation.arguments import as_arguments, check_call
from pyro_mcvae.ops.trees import Tree
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.modules import evaluation_modules, find_modules
from pyro_mcvae.programs.types import Program
from pyro_mcvae.training.generators import RNGState, rng_state, set_rng_state
from pyro_mcvae.training.parts import ModulePart
from pyro_mcvae.training.store import ParamStorePart, Part, Undo

__all__ = ["Batches", "Contestant", "Rehearsal", "TrainedState", "contestants"]

Batches = Iterable[object] | Callable[[], Iterable[object]]


class TrainedState:
    """
    What training changes of a pair of programs: the parameter store, the programs' modules.

    The tensors stay the same objects, so that optimizers and recordings go on knowing them; each
    copy is a set of values.
    """

    def __init__(self, model: Program, guide: Program) -> None:
        found = find_modules(model, guide)
        inner = {id(part) for module in found for part in list(module.modules())[1:]}
        self._parts: list[Part] = [ModulePart(m) for m in found if id(m) not in inner]
        self._parts.append(ParamStorePart({}))

    def take(self) -> Undo:
        """Remember the present values; what it returns sets them again, once."""
        undos = [part.undo() for part in self._parts]

        def put() -> None:
            for undo in undos:
                undo()

        return put


class Rehearsal:
    """
    The training data, and how many weights a batch stands for, so that bounds are per weight.

    :param batches: None trains on the arguments of ``programs``.
    :param device: where to move the tensors of each batch.
    """

    def __init__(
        self,
        programs: Programs,
        batches: Batches | None,
        to_args: Callable[..., object] | None,
        device: torch.device | None = None,
    ) -> None:
        self._programs, self._batches, self._to_args = programs, batches, to_args
        self._device = device
        self._units: dict[object, float] = {}
        if batches is not None and not callable(batches) and iter(batches) is batches:
            raise ValueError(
                "batches must be something to go through again and again, got an iterator, which "
                "is used up after one pass: pass the DataLoader, a list, or a function that "
                "returns an iterator"
            )

    def first(self) -> Programs:
        """The programs on the first batch."""
        for programs in self:
            check_call(programs)
            return programs
        raise ValueError("there is no batch to train on: batches is empty")

    def length(self) -> int:
        """How many batches one pass has; counted, where they do not say."""
        if self._batches is None or isinstance(self._batches, Sized):
            return 1 if self._batches is None else len(self._batches)
        generators = rng_state()
        try:
            return sum(1 for _ in self)
        finally:
            set_rng_state(generators)

    def __iter__(self) -> Iterator[Programs]:
        """One pass over the data."""
        if self._batches is None:
            yield self._programs
            return
        for batch in self._batches() if callable(self._batches) else self._batches:
            batch = batch if self._to_args is None else self._to_args(batch)
            args, kwargs = as_arguments(batch, self._device)
            yield replace(self._programs, args=args, kwargs=kwargs)

    def weights(self, programs: Programs) -> float:
        """How many weights the loss on this batch is the sum of, N/B times those of a minibatch."""
        leaves, tree = tree_flatten((programs.args, programs.kwargs))
        key = (Tree(tree), *(v.shape if isinstance(v, Tensor) else type(v) for v in leaves))
        if key not in self._units:
            generators = rng_state()
            with torch.no_grad(), evaluation_modules(find_modules(*programs.pair)):
                self._units[key] = _weights(programs)
            set_rng_state(generators)
        return self._units[key]


def _weights(programs: Programs) -> float:
    sample = ParticleSampler(1, None, math.inf, strict_enumeration=False).sample(programs)
    if sample.structure.global_sites.guide:
        return 1.0
    return float(sample.num_weights)


@dataclass
class Contestant:
    """
    One loss, and what came of training by it.

    :ivar bounds: the loss's own bound at each step, in nats per weight.
    :ivar times: the seconds of each step, that of waiting for its batch included.
    :ivar seconds: their sum.
    :ivar failed: what stopped it.
    """

    name: str
    svi: SVI
    data: Rehearsal
    state: TrainedState
    put: Undo
    generators: RNGState
    bounds: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failed: str = ""
    _epoch: Iterator[Programs] = field(default_factory=lambda: iter(()))

    @contextmanager
    def playing(self) -> Iterator[None]:
        """The programs have this one's values inside, and keep them until another's are set."""
        self.put()
        try:
            yield
        finally:
            self.put = self.state.take()

    def train(self, seconds: float, num_steps: float) -> None:
        """Train until it has had so much time, or so many steps."""
        if self.failed:
            return
        outside = rng_state()
        set_rng_state(self.generators)
        while self.seconds < seconds and len(self.bounds) < num_steps and not self.failed:
            self._step()
        self.generators = rng_state()
        set_rng_state(outside)

    def _step(self) -> None:
        began = time.perf_counter()
        programs = self._next()
        waited = time.perf_counter() - began
        weights = self.data.weights(programs)
        began = time.perf_counter()
        try:
            loss = float(self.svi.step(*programs.args, **programs.kwargs))
        except (ValueError, RuntimeError) as error:
            if not self.bounds:
                raise
            self.failed = f"step {len(self.bounds) + 1}: {first_line(error)}"
            # What an unfinished step left in tensors that the next one's step would add to.
            zero_grads([p for _, p in pyro.get_param_store().named_parameters()])
            return
        self.times.append(waited + time.perf_counter() - began)
        self.seconds += self.times[-1]
        self.bounds.append(-loss / weights)
        if not math.isfinite(loss):
            self.failed = f"step {len(self.bounds)}: the loss is {loss}"

    def _next(self) -> Programs:
        for programs in self._epoch:
            return programs
        self._epoch = iter(self.data)
        return next(self._epoch)


@contextmanager
def contestants(
    programs: Programs,
    losses: dict[str, object],
    optims: Sequence[PyroOptim],
    data: Rehearsal,
    seed: int,
    rehearse: Callable[[], object],
) -> Iterator[list[Contestant]]:
    """
    Copies that all begin at the same values and the same random numbers, after a step of each that
    is thrown away: the first ones of a process pay for imports and caches. Outside, programs and
    generators are what they were, but for parameters that a first run has made.

    :param rehearse: called before any step.
    """
    first, outside = data.first(), rng_state()
    pyro.set_rng_seed(seed)
    try:
        with torch.no_grad(), evaluation_modules(find_modules(*programs.pair)):
            run_pair(first, Substitutes())
        rehearse()
        # These runs may have drawn what a later one does not.
        pyro.set_rng_seed(seed)
        state, generators = TrainedState(programs.model, programs.guide), rng_state()
        home = state.take()
        try:
            yield [
                _begin(first, name, loss, optim, data, state, generators)
                for (name, loss), optim in zip(losses.items(), optims, strict=True)
            ]
        finally:
            home()
    finally:
        set_rng_state(outside)


def _begin(
    first: Programs,
    name: str,
    loss: object,
    optim: PyroOptim,
    data: Rehearsal,
    state: TrainedState,
    generators: RNGState,
) -> Contestant:
    start = state.take()
    try:
        _svi(first, optim, loss).step(*first.args, **first.kwargs)
    finally:
        start()
    svi = _svi(first, optim, loss)
    return Contestant(name, svi, data, state, state.take(), generators)


def _svi(programs: Programs, optim: PyroOptim, loss: Any) -> SVI:
    return SVI(programs.model, programs.guide, copy.deepcopy(optim), copy.deepcopy(loss))
