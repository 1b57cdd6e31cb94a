"""Pyro handlers around a run: recording, substituted values, plates of particles, minibatches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame, IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import NonlocalExit
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.ops.compat import DO_NOT_TRACE, NonReentrant, broadcast_to_plates
from pyro_mcvae.ops.tensors import Generators, fail_if_recording
from pyro_mcvae.programs.distributions import moves_support, patched
from pyro_mcvae.programs.sites import (
    is_latent,
    is_masked,
    is_random,
    is_record,
    is_straight_through,
    reparameterized,
    site_in_full_precision,
    without_autocast,
)
from pyro_mcvae.programs.source_lines import is_core, program_line
from pyro_mcvae.programs.types import PARTICLE_PLATE, Message, SiteError, check_options, note

# The minibatch of a step, shared by all of its runs.


class Minibatch(dict[str, Tensor]):
    """
    The indices of each plate of a step, by the plate's name.

    :ivar sizes: the plates' full sizes. A plate may have another size in another run, for example
        one over a drawn number of objects. It then takes other indices, unless the user chose them.
    :ivar of_guide: the plates of the guide, in which it draws latents.
    """

    def __init__(self, indices: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(indices or {})
        self.sizes: dict[str, int] = dict(getattr(indices, "sizes", {}))
        self.of_guide: frozenset[str] = getattr(indices, "of_guide", frozenset())

    def fill(self, msg: Message, drawn: bool = False) -> None:
        """
        Set the indices of a plate's message, if they are known.

        :param bool drawn: whether the guide's latents have been drawn, for its own plates.
        :raises ValueError: if the model then has other indices in a plate of the guide.
        """
        name, now = msg["name"], msg["fn"].size
        if name not in self:
            return
        # A value that is not done was chosen by the user, and may differ between runs.
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
        """Store the indices of a plate's message."""
        self.of_guide |= {msg["name"]} if not drawn else set()
        if msg["name"] in self:
            return
        if len(msg["value"]) == 0:
            raise _empty(msg)
        self[msg["name"]] = msg["value"]
        self.sizes[msg["name"]] = msg["fn"].size


def _check_choice(name: str, chosen: Any, drawn: Tensor) -> None:
    """Check that the model's indices equal the guide's, unless they are floats (only counted)."""
    if chosen is drawn or drawn.is_floating_point():
        return
    index = torch.as_tensor(chosen, device=drawn.device)
    if index.shape == drawn.shape and bool((index == drawn).all()):
        return
    raise ValueError(
        f"plate '{name}' of the model has the minibatch {_some(chosen)}, and the guide has "
        f"drawn its latents for {_some(drawn)}: pass the same subsample= in the guide (for an "
        f"AutoGuide, by the argument create_plates), or let Pyro draw the minibatch with "
        f"subsample_size="
    )


def _some(index: Any) -> str:
    first = [int(i) for i in index[:4]]
    return f"[{', '.join(map(str, first))}{', ...' if len(index) > 4 else ''}]"


def _empty(msg: Message) -> ValueError:
    return ValueError(
        f"plate '{msg['name']}' has an empty minibatch (0 of {msg['fn'].size} data); "
        f"pass at least one datum, for example by dropping an empty last batch"
    )


# Random numbers that a model draws outside sample sites, for example by dropout, and their replay.


class ModelNoise:
    """
    Random numbers of a model outside sample sites: every run repeats those of the first run.

    A chain is annealed along one density. With other numbers at each state the weight would not
    belong to any density, and would be too small.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._before: Generators | None = None  # of a run that drew some

    def of_run(self) -> AbstractContextManager[None]:
        """Return a context for a run of the model: records the first run, replays it in others."""
        if not self._is_known:
            return self._recording()
        return nullcontext() if self._before is None else self._replaying(self._before)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        before = Generators()
        yield
        self._is_known, self._before = True, before if before.have_moved() else None

    @contextmanager
    def _replaying(self, before: Generators) -> Iterator[None]:
        """Draw the recorded numbers, and restore the generators afterwards."""
        now = Generators()
        before.put_back()
        try:
            yield
            # False if the first run drew only a minibatch.
            drew = before.have_moved()
        finally:
            now.put_back()
        if drew:
            fail_if_recording(
                "the model draws random numbers outside sample sites (dropout), which stay the "
                "same along a chain"
            )


# A model that draws its observed sites.


class Unconditioned(UnconditionMessenger):
    """
    Draws observed sites, as Pyro's ``uncondition`` does, but leaves deterministic sites unchanged.

    Inside a plate Pyro's handler would draw these once per element, with one dim too many.
    """

    def _pyro_sample(self, msg: Message) -> None:
        if not is_record(msg):
            super()._pyro_sample(msg)


# Pyro messengers: the plate of the particles, and values for the sites of a run.

# Called for a random guide site of a run; returns its value, or None to let Pyro draw.
SampleFn = Callable[[Message], Tensor | None]


class ParticlePlate(IndepMessenger):
    """
    The outermost plate, which adds the leading dimension to every site except those of ``skip``.

    Unlike :class:`pyro.plate` it can skip global sites: they are drawn once for all particles.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(PARTICLE_PLATE, size, dim)
        self.depth = dim
        self.skip = skip

    def _process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or site_is_subsample(msg) or msg["name"] in self.skip:
            return
        frame = CondIndepStackFrame(self.name, self.dim, self.size, self.counter)
        msg["cond_indep_stack"] = (frame, *msg["cond_indep_stack"])
        broadcast_to_plates(msg)


@dataclass(frozen=True)
class Substitutes:
    """
    Values that a run of both programs uses instead of drawing them.

    :ivar subsamples: the minibatch, shared by every run of a step: the first run fills it.
    :ivar values: a value for each site to be fixed, by name.
    :ivar sample_fn: called for the other random sites; returns a value, or None to let Pyro draw.
    :ivar attached: the guide's draws are detached in the model, except at the sites named here and
        in ``values``; None to detach none.
    :ivar noise: random numbers of the model outside sample sites; None to let it draw them.
    :ivar defers: whether log densities are computed only when they are needed.
    """

    subsamples: Minibatch = field(default_factory=Minibatch)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    sample_fn: SampleFn | None = None
    attached: frozenset[str] | None = None
    noise: ModelNoise | None = None
    defers: bool = False


class Recorder(Messenger):
    """
    Records the sites of one run, substitutes values at them, and stores its minibatch.

    It combines Pyro's ``trace`` and ``replay`` at the cost of one handler. That matters because a
    model runs several times in a step, often on few data. It also casts distributions of networks
    under autocast to single precision.

    :param substitutes: values that are not drawn.
    :param drawn: for a model, the trace of the guide that it is replayed on.
    :param records: whether to record sites and parameters.
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
        passed_on = isinstance(error, SiteError | NonlocalExit) or not isinstance(error, Exception)
        if passed_on or not self._recorded:
            return
        names = [n for n, s in self.trace.nodes.items() if s.get("type") == "sample"]
        after = f"after site '{names[-1]}'" if names else "before its first site"
        program = "model" if self._in_model else "guide"
        frames = [frame for frame, _ in walk_tb(traceback)]
        written = [f for f in frames if not is_core(f.f_code)] or frames  # it may call autograd
        place = f"in the {program}, {after}, at {program_line(written[-1])}"
        remedy = self._remedy(str(error))
        if sys.version_info >= (3, 11) and not remedy:
            error.add_note(place)
        elif error.args and isinstance(error.args[0], str):
            error.args = f"{error.args[0]}\n{place}{remedy}", *error.args[1:]

    def _remedy(self, error: str) -> str:
        """Return what to do if a program needs grad mode, or the dim of an enumerated site."""
        if "does not require grad" in error and not torch.is_grad_enabled():
            return (
                ". Losses are evaluated under torch.no_grad(): if the program computes a gradient, "
                "do this inside torch.enable_grad()"
            )
        for name, site in {**self._drawn, **self.trace.nodes}.items():
            if is_latent(site) and site["infer"].get("enumerate"):
                shape = tuple(site["value"].shape)
                if shape == tuple(site["fn"].shape()):
                    return (
                        f". Site '{name}' is marked for enumeration, but the first run, which "
                        f"finds the plates, draws one value of shape {shape}. Let both programs "
                        f"broadcast over any dims to the left of the site (expand instead of "
                        f"repeat), or train them with pyro.infer.TraceEnum_ELBO"
                    )
        return ""

    def _process_message(self, msg: Message) -> None:
        if site_is_subsample(msg):
            self._substitutes.subsamples.fill(msg, bool(self._drawn))
        elif msg["type"] == "sample":
            if "mcvae" in msg["infer"]:
                check_options(msg, self._drawn.get(msg["name"]), self._in_model)
            site_in_full_precision(msg)
            if not msg["is_observed"]:
                self._set_value(msg)

    def _set_value(self, msg: Message) -> None:
        """Set the value of a latent."""
        drawn = self._drawn.get(msg["name"])
        if drawn is not None:
            msg["value"], msg["infer"], msg["done"] = drawn["value"], drawn["infer"], True
        elif not msg["done"] and msg["value"] is None:
            msg["fn"] = patched(msg["fn"])
            msg["value"] = self._value_of(msg)
            msg["done"] = msg["value"] is not None

    def _value_of(self, msg: Message) -> Tensor | None:
        value, sample_fn = self._substitutes.values.get(msg["name"]), self._substitutes.sample_fn
        # An untraced draw counts as noise of the program, like dropout.
        untraced = msg["infer"].get(DO_NOT_TRACE, False)
        if value is not None or sample_fn is None or untraced or not is_random(msg):
            return value
        with without_autocast():
            return sample_fn(msg)

    def _postprocess_message(self, msg: Message) -> None:
        if site_is_subsample(msg):
            self._substitutes.subsamples.keep(msg, bool(self._drawn))
        if msg["type"] in self._recorded and not msg["infer"].get(DO_NOT_TRACE):
            self.trace.add_node(msg["name"], **msg)


def is_param_tracer(handler: object) -> bool:
    """Return whether a handler records only parameters, like the one in ``SVI``."""
    return isinstance(handler, TraceMessenger) and handler.param_only


def score_function_draws(skip: frozenset[str]) -> SampleFn:
    """
    Draw the guide's random sites without reparameterization, except those of ``skip``.

    Marks the site as scored, because ``has_rsample`` cannot be set on wrapped distributions.
    """

    def sample_fn(msg: Message) -> Tensor | None:
        # A distribution that masks itself would mask the score too; it keeps its path gradient, as
        # does one whose score does not have mean 0.
        fn = msg["fn"]
        keeps = is_masked(fn) or is_straight_through(fn) or moves_support(fn)
        if msg["name"] in skip or keeps or not reparameterized(msg):
            return None
        note(msg, scored=True)
        # A clone: flows cache the inverse of the tensor that they drew, without the gradient path
        # to their parameters that the score function needs. Called like in Pyro, because Zuko's
        # distributions cannot be drawn otherwise.
        with torch.no_grad():
            drawn: Tensor = fn()
        return drawn.clone()

    return sample_fn


# The dims to the left of the plates of a run.


class LeadingDims(NamedTuple):
    """
    The leading dims of one run.

    :ivar guide: the particles' plate around the guide; None without particles.
    :ivar model: the particles' plate around the model.
    :ivar state_dim: the first batch dim for the values of the model's enumerated sites; None to
        draw these sites.
    """

    guide: ParticlePlate | None = None
    model: ParticlePlate | None = None
    state_dim: int | None = None


ALONE = LeadingDims()
