"""Pyro messengers: the plate of the particles, and values for the sites of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame, IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.programs.annotations import check_options, note
from pyro_mcvae.programs.checkpoints import NonReentrant
from pyro_mcvae.programs.mended_draws import mended
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.model_noise import ModelNoise
from pyro_mcvae.programs.moving_supports import moves_support
from pyro_mcvae.programs.plates import LEADING
from pyro_mcvae.programs.precision import site_in_full_precision, without_autocast
from pyro_mcvae.programs.sites import is_masked, is_random, is_straight_through, reparameterized
from pyro_mcvae.programs.types import Message

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
    What a run of both programs takes, in the place of draws of its own.

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
