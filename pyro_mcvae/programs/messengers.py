"""Pyro messengers: the plate of the particles, and values for the sites of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame, IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.model_noise import ModelNoise
from pyro_mcvae.programs.moving_supports import moves_support
from pyro_mcvae.programs.precision import site_in_full_precision, without_autocast
from pyro_mcvae.programs.sites import (
    LEADING,
    is_masked,
    is_random,
    is_straight_through,
    reparameterized,
)
from pyro_mcvae.programs.types import Message, Site

__all__ = ["ParticlePlate", "Recorder", "SampleFn", "ScoreFunctionSites", "SubstituteMessenger"]

# Called for a random guide site of a run; returns its value, or None to let Pyro draw.
SampleFn = Callable[[Message], Tensor | None]


class ParticlePlate(IndepMessenger):
    """
    The outermost plate that adds the leading dimension to every site but those of ``skip``.

    Unlike :class:`pyro.plate` it leaves global sites alone: they are drawn once for all particles.

    :ivar unbatched: the sites whose distribution had no leading dimension of its own.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(LEADING, size, dim)
        self.depth = dim
        self.skip = skip
        self.unbatched: set[str] = set()

    def _process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or site_is_subsample(msg) or msg["name"] in self.skip:
            return
        if self.dim is not None and len(getattr(msg["fn"], "batch_shape", ())) < -self.dim:
            self.unbatched.add(msg["name"])
        frame = CondIndepStackFrame(self.name, self.dim, self.size, self.counter)
        msg["cond_indep_stack"] = (frame, *msg["cond_indep_stack"])
        BroadcastMessenger._pyro_sample(msg)


class SubstituteMessenger(Messenger):
    """
    Substitutes values at sites of a run, and keeps the minibatch that the run draws.

    Every further run of a step has the same minibatch.
    Distributions that a network under autocast has made compute in single precision.

    :param values: a value for each site to be fixed, by name.
    :param sample_fn: called for the other random sites, returns a value or None to let Pyro draw.
    :param attached: the guide's draws reach the model without their gradient to the guide, but for
        the sites named here and in ``values``; None to let all through.
    :param ModelNoise noise: what the model draws apart from its sites.
    :ivar noise: the same; None where it was neither given nor, as without ``sample_fn``, looked at.
    """

    def __init__(
        self,
        subsamples: Minibatch | None = None,
        values: Mapping[str, Tensor] | None = None,
        sample_fn: SampleFn | None = None,
        attached: frozenset[str] | None = None,
        noise: ModelNoise | None = None,
    ) -> None:
        super().__init__()
        self.subsamples = Minibatch() if subsamples is None else subsamples
        self.values = values or {}
        self.sample_fn = sample_fn
        self.attached = attached
        self.noise, self._holds = noise, noise is not None

    @contextmanager
    def around_model(self) -> Iterator[None]:
        """The model runs within, with the noise that was given, or shows what it draws."""
        if self.noise is not None and self._holds:
            with self.noise.again():
                yield
        elif self.sample_fn is None:
            yield
        else:
            self.noise = ModelNoise()
            yield
            self.noise.settle()

    def _process_message(self, msg: Message) -> None:
        if msg["type"] != "sample":
            return
        if site_is_subsample(msg):
            self.subsamples.fill(msg)
            return
        site_in_full_precision(msg)
        if not msg["is_observed"]:
            self._give(msg)

    def _give(self, msg: Message) -> None:
        """Give a latent its value."""
        if msg["done"] or msg["value"] is not None:
            return
        value = self.values.get(msg["name"])
        if value is None and self.sample_fn is not None and is_random(msg):
            with without_autocast():
                value = self.sample_fn(msg)
        if value is not None:
            msg["value"], msg["done"] = value, True

    def _postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and site_is_subsample(msg):
            self.subsamples.keep(msg)


class Recorder(SubstituteMessenger):
    """
    Records the sites of one run, and may give a model the guide's draws.

    What Pyro's ``trace`` and ``replay`` inside of the other do, at the cost of one handler: a model
    that runs several times in a step, often on few data, shows every message to each handler.

    :param substitute: what else is to be done; its minibatch is shared.
    :param drawn: a run of the guide.
    :ivar trace: the sites.
    """

    def __init__(self, substitute: SubstituteMessenger, drawn: Trace | None = None) -> None:
        super().__init__(substitute.subsamples, substitute.values, substitute.sample_fn)
        self.trace = Trace()
        self._drawn = {} if drawn is None else drawn.nodes
        # Of a guide its parameters too: judges ask which of them its first run made.
        self._recorded = ("sample", "param") if drawn is None else ("sample",)

    def _give(self, msg: Message) -> None:
        drawn = self._drawn.get(msg["name"])
        if drawn is None:
            super()._give(msg)
        elif drawn["type"] != "sample" or drawn["is_observed"]:
            raise _no_draw(msg["name"], drawn)
        else:
            msg["value"], msg["infer"], msg["done"] = drawn["value"], drawn["infer"], True

    def _postprocess_message(self, msg: Message) -> None:
        super()._postprocess_message(msg)
        if msg["type"] in self._recorded and not msg["infer"].get("_do_not_trace"):
            self.trace.add_node(msg["name"], **msg)


def _no_draw(name: str, drawn: Site) -> RuntimeError:
    kind = "observed" if drawn["type"] == "sample" else f"a {drawn['type']}"
    return RuntimeError(
        f"site '{name}' is drawn by the model, and is {kind} in the guide: draw it there too, by "
        f"pyro.sample without obs=, or give it another name"
    )


class ScoreFunctionSites(Messenger):
    """
    Takes reparameterization away from the guide's random sites but those of ``skip``.

    Says so in ``infer={"mcvae": {"score_function": True}}``: wrapped distributions do not let
    ``has_rsample`` be set.
    """

    def __init__(self, skip: frozenset[str]) -> None:
        super().__init__()
        self.skip = skip

    def _pyro_sample(self, msg: Message) -> None:
        if msg["done"] or not is_random(msg) or msg["name"] in self.skip:
            return
        # A distribution that masks itself would mask the score too; it keeps its own gradient, as
        # does one whose score has another mean than 0.
        fn = msg["fn"]
        keeps = is_masked(fn) or is_straight_through(fn) or moves_support(fn)
        if reparameterized(msg) and not keeps:
            # A clone: flows cache the inverse of the very tensor that they drew, without a
            # gradient path to their parameters, which the score function needs.
            with torch.no_grad():
                msg["value"] = msg["fn"].sample().clone()
            msg["done"] = True
            own = {**msg["infer"].get("mcvae", {}), "score_function": True}
            msg["infer"] = {**msg["infer"], "mcvae": own}
