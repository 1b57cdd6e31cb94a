"""Pyro handlers around a run: recording, substituted values, plates of particles, minibatches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame, IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import NonlocalExit
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from pyro_mcvae.ops.tensors import Generators, refuse
from pyro_mcvae.programs.distributions import mended, moves_support
from pyro_mcvae.programs.sites import (
    is_masked,
    is_random,
    is_record,
    is_straight_through,
    reparameterized,
    site_in_full_precision,
    without_autocast,
)
from pyro_mcvae.programs.source_lines import program_line
from pyro_mcvae.programs.types import LEADING, Message, SiteError, check_options, note

# Reentrant checkpoints of programs, run as the others are.


class NonReentrant:
    """
    Around the run of a program: ``checkpoint(..., use_reentrant=True)`` is one with False.

    The numbers are the same. But a reentrant checkpoint of tensors that need no gradient, as
    latents without a path to the guide, has none for its parameters either, and it can be
    differentiated neither with respect to given tensors nor twice.
    """

    def __enter__(self) -> None:
        self._before = vars(CheckpointFunction).get("apply")
        setattr(CheckpointFunction, "apply", staticmethod(_non_reentrant))  # noqa: B010

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            del CheckpointFunction.apply  # and with it what hides that of its base class
        else:
            setattr(CheckpointFunction, "apply", self._before)  # noqa: B010


def _non_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


# The minibatch of a step, which all of its runs share.


class Minibatch(dict[str, Tensor]):
    """
    The indices of each plate of a step, by the plate's name.

    :ivar sizes: the plates' full sizes. A plate may be of another size in another run, as one over
        objects whose number is drawn: it then takes indices of its own, unless they are a choice.
    :ivar of_guide: the plates that the guide has, in which it draws latents.
    """

    def __init__(self, of: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(of or {})
        self.sizes: dict[str, int] = dict(getattr(of, "sizes", {}))
        self.of_guide: frozenset[str] = getattr(of, "of_guide", frozenset())

    def fill(self, msg: Message, drawn: bool = False) -> None:
        """
        Give a plate's message the indices that are known.

        :param bool drawn: whether the guide's latents have been drawn, for its own plates.
        :raises ValueError: if the model is given others of one of these then.
        """
        name, now = msg["name"], msg["fn"].size
        if name not in self:
            return
        # A value that is not done is the user's own choice, perhaps another one in each run.
        chosen = msg["value"] is not None and not msg["done"]
        if not chosen and now != self.sizes.get(name, now):
            self._check_whole(name, now)
            return
        if chosen and drawn and name in self.of_guide:
            _check_choice(name, msg["value"], self[name])
        msg["value"], msg["done"] = self[name], True

    def _check_whole(self, name: str, now: int) -> None:
        size = self.sizes[name]
        if len(self[name]) != size:
            raise ValueError(
                f"plate '{name}' has size {now}, but its minibatch of {len(self[name])} was "
                f"chosen from {size} in another run of the same step: give it one size in both "
                f"programs, which does not depend on latents"
            )

    def keep(self, msg: Message, drawn: bool = False) -> None:
        """Remember the indices of a plate's message."""
        self.of_guide |= {msg["name"]} if not drawn else set()
        if msg["name"] in self:
            return
        if len(msg["value"]) == 0:
            raise _empty(msg)
        self[msg["name"]] = msg["value"]
        self.sizes[msg["name"]] = msg["fn"].size


def _check_choice(name: str, given: Any, known: Tensor) -> None:
    """Most often both programs are given one object. Floats are no indices: their number counts."""
    if given is known or known.is_floating_point():
        return
    index = torch.as_tensor(given, device=known.device)
    if index.shape == known.shape and bool((index == known).all()):
        return
    raise ValueError(
        f"plate '{name}' of the model is given the minibatch {_some(given)}, and the guide has "
        f"drawn its latents for {_some(known)}, which are not those of these data: give the guide "
        f"the same subsample=, as by the argument create_plates of an AutoGuide, or let Pyro draw "
        f"the minibatch, by subsample_size="
    )


def _some(index: Any) -> str:
    shown = [int(i) for i in index[:4]]
    return f"[{', '.join(map(str, shown))}{', ...' if len(index) > 4 else ''}]"


def _empty(msg: Message) -> ValueError:
    return ValueError(
        f"plate '{msg['name']}' has an empty minibatch (0 of {msg['fn'].size} data); "
        f"pass at least one datum, for example by dropping an empty last batch"
    )


# What a model draws apart from its sites, as dropout does: the same numbers again.


class ModelNoise:
    """
    The numbers that a model draws apart from its sites: those of its first run, in every run.

    A chain is annealed along one density: with other numbers at each of its states the weight
    would be that of no density, and too small.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._before: Generators | None = None  # of a run that drew some

    def of_run(self) -> AbstractContextManager[None]:
        """Around a run of the model: the first one shows its numbers, which others then draw."""
        if not self._is_known:
            return self._shown()
        return nullcontext() if self._before is None else self._again(self._before)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        before = Generators()
        yield
        self._is_known, self._before = True, before if before.have_moved() else None

    @contextmanager
    def _again(self, before: Generators) -> Iterator[None]:
        """The same numbers, and the generators as they are."""
        now = Generators()
        before.put_back()
        try:
            yield
            # Not where the first run drew a minibatch only.
            drew = before.have_moved()
        finally:
            now.put_back()
        if drew:
            refuse(
                "the model draws random numbers apart from its sites, dropout say, which stay the "
                "same along a chain"
            )


# A model that draws what it observes.


class Unconditioned(UnconditionMessenger):
    """
    Observed sites are drawn, as by Pyro's ``uncondition``; but what is computed stays what it is:
    inside a plate Pyro's would draw it once for each element, with a dim too many.
    """

    def _pyro_sample(self, msg: Message) -> None:
        if not is_record(msg):
            super()._pyro_sample(msg)


# Pyro messengers: the plate of the particles, and values for the sites of a run.

# Called for a random guide site of a run; returns its value, or None to let Pyro draw.
SampleFn = Callable[[Message], Tensor | None]


class ParticlePlate(IndepMessenger):
    """
    The outermost plate that adds the leading dimension to every site but those of ``skip``.

    Unlike :class:`pyro.plate` it leaves global sites alone: they are drawn once for all particles.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(LEADING, size, dim)
        self.depth = dim
        self.skip = skip

    def _process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or site_is_subsample(msg) or msg["name"] in self.skip:
            return
        frame = CondIndepStackFrame(self.name, self.dim, self.size, self.counter)
        msg["cond_indep_stack"] = (frame, *msg["cond_indep_stack"])
        BroadcastMessenger._pyro_sample(msg)


@dataclass(frozen=True)
class Substitutes:
    """
    What a run of both programs takes, in place of draws of its own.

    :ivar subsamples: the minibatch, which every run of a step shares: the first one fills it.
    :ivar values: a value for each site to be fixed, by name.
    :ivar sample_fn: called for the other random sites, returns a value or None to let Pyro draw.
    :ivar attached: the guide's draws reach the model without their gradient to the guide, but for
        the sites named here and in ``values``; None to let all through.
    :ivar noise: what the model draws apart from its sites; None to let it draw.
    """

    subsamples: Minibatch = field(default_factory=Minibatch)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    sample_fn: SampleFn | None = None
    attached: frozenset[str] | None = None
    noise: ModelNoise | None = None


class Recorder(Messenger):
    """
    Records the sites of one run, substitutes values at them, and keeps the minibatch that it draws.

    What Pyro's ``trace`` and ``replay`` would do, at the cost of one handler: a model that runs
    several times in a step, often on few data, shows every message to each handler. Distributions
    that a network under autocast has made compute in single precision.

    :param substitutes: what is not drawn.
    :param drawn: of a model the run of the guide that it takes its draws from.
    :param records: whether sites are recorded, parameters too.
    :ivar trace: the sites.
    """

    def __init__(
        self, substitutes: Substitutes, drawn: Trace | None = None, records: bool = True
    ) -> None:
        super().__init__()
        self.trace, self._recorded = Trace(), ("sample", "param") if records else ()
        self._substitutes, self._drawn = substitutes, {} if drawn is None else drawn.nodes
        self._in_model = drawn is not None
        self._checkpoints = NonReentrant()

    def __enter__(self) -> Recorder:
        self._checkpoints.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpoints.__exit__()
        super().__exit__(*error)
        if error[1] is not None:
            self._add_place(*error[1:])

    def _add_place(self, error: Any, traceback: Any) -> None:
        """Add to an error from the user's code the program, the last site and the line."""
        other = isinstance(error, SiteError | NonlocalExit) or not isinstance(error, Exception)
        if other or not self._recorded:
            return
        names = [n for n, s in self.trace.nodes.items() if s.get("type") == "sample"]
        after = f"after site '{names[-1]}'" if names else "before its first site"
        program = "model" if self._in_model else "guide"
        *_, (frame, _) = walk_tb(traceback)
        place = f"in the {program}, {after}, at {program_line(frame)}"
        if sys.version_info >= (3, 11):
            error.add_note(place)
        elif error.args and isinstance(error.args[0], str):
            error.args = f"{error.args[0]}\n{place}", *error.args[1:]

    def _process_message(self, msg: Message) -> None:
        if site_is_subsample(msg):
            self._substitutes.subsamples.fill(msg, bool(self._drawn))
        elif msg["type"] == "sample":
            check_options(msg, self._drawn.get(msg["name"]), self._in_model)
            site_in_full_precision(msg)
            if not msg["is_observed"]:
                self._give(msg)

    def _give(self, msg: Message) -> None:
        """Give a latent its value."""
        drawn = self._drawn.get(msg["name"])
        if drawn is not None:
            msg["value"], msg["infer"], msg["done"] = drawn["value"], drawn["infer"], True
        elif not msg["done"] and msg["value"] is None:
            msg["fn"] = mended(msg["fn"])
            msg["value"] = self._value_of(msg)
            msg["done"] = msg["value"] is not None

    def _value_of(self, msg: Message) -> Tensor | None:
        value, sample_fn = self._substitutes.values.get(msg["name"]), self._substitutes.sample_fn
        # An untraced draw is noise of the program's own, as that of dropout is.
        untraced = msg["infer"].get("_do_not_trace", False)
        if value is not None or sample_fn is None or untraced or not is_random(msg):
            return value
        with without_autocast():
            return sample_fn(msg)

    def _postprocess_message(self, msg: Message) -> None:
        if site_is_subsample(msg):
            self._substitutes.subsamples.keep(msg, bool(self._drawn))
        if msg["type"] in self._recorded and not msg["infer"].get("_do_not_trace"):
            self.trace.add_node(msg["name"], **msg)


def is_param_tracer(handler: object) -> bool:
    """Whether a handler collects parameters alone, as ``SVI``'s does to train them."""
    return isinstance(handler, TraceMessenger) and handler.param_only


def score_function_draws(skip: frozenset[str]) -> SampleFn:
    """
    Takes reparameterization away from the guide's random sites but those of ``skip``.

    Notes so at the site: wrapped distributions do not let ``has_rsample`` be set.
    """

    def sample_fn(msg: Message) -> Tensor | None:
        # A distribution that masks itself would mask the score too; it keeps its own gradient, as
        # does one whose score has another mean than 0.
        fn = msg["fn"]
        keeps = is_masked(fn) or is_straight_through(fn) or moves_support(fn)
        if msg["name"] in skip or keeps or not reparameterized(msg):
            return None
        note(msg, scored=True)
        # A clone: flows cache the inverse of the very tensor that they drew, without a gradient
        # path to their parameters, which the score function needs. And called, as by Pyro: Zuko's
        # have no other draw.
        with torch.no_grad():
            drawn: Tensor = fn()
        return drawn.clone()

    return sample_fn


# What stands to the left of the plates of a run.


class Leading(NamedTuple):
    """
    The leading dims of one run.

    :ivar guide: the particles' plate around the guide; None without particles.
    :ivar model: that around the model.
    :ivar state_dim: the first batch dim for the values of the model's enumerated sites; None to
        draw these.
    """

    guide: ParticlePlate | None = None
    model: ParticlePlate | None = None
    state_dim: int | None = None


ALONE = Leading()
