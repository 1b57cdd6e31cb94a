"""
Discrete latents of a model that the guide does not draw: all of their values at once.

Pyro's enumeration gives each of them a batch dim of its own, to the left of the plates' and of the
particles'; :mod:`~pyro_mcvae.programs.state_sums` sums over them.
"""

from __future__ import annotations

from types import TracebackType

from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.errors import SiteError, first_line
from pyro_mcvae.programs.terms import scored
from pyro_mcvae.programs.types import Message, Site


class ModelEnumeration(EnumMessenger):
    """
    Gives all values to those of a model's sites that are to be enumerated.

    :param guide_trace: the guide's draws.
    :param first_available_dim: the first batch dim that is free; None to go on behind the guide's.
    :raises SiteError: for a site that the guide does not draw, marked for another sum than that, or
        whose dim is that of a site that it depends on.
    """

    def __init__(self, guide_trace: Trace, first_available_dim: int | None = None) -> None:
        super().__init__(first_available_dim)
        self._drawn = guide_trace.nodes

    def _pyro_sample(self, msg: Message) -> None:
        own = not msg["is_observed"] and msg["name"] not in self._drawn
        if own:
            _check_kind(msg)
        super()._pyro_sample(msg)
        if own and is_state(msg):
            _check_dim(msg)


class StateMessenger(ModelEnumeration):
    """
    Gives a model the guide's draws, and all values to those of its sites that are to be enumerated.

    Pyro's ``replay`` and enumeration in one handler, which leaves the guide's annotations and the
    user's as they are: chains run a model many times on one trace.

    :param guide_trace: the draws.
    :param int first_available_dim: the first batch dim that belongs to no plate and no particles.
    :raises RuntimeError: as the model does, with the sites whose values it may not broadcast over.
    """

    def __init__(self, guide_trace: Trace, first_available_dim: int) -> None:
        super().__init__(guide_trace, first_available_dim)
        self._summed: list[str] = []

    def _pyro_sample(self, msg: Message) -> None:
        drawn = None if msg["is_observed"] else self._drawn.get(msg["name"])
        msg["infer"] = dict(msg["infer"])
        if drawn is not None:
            msg["infer"].pop("enumerate", None)
        super()._pyro_sample(msg)
        if drawn is not None:
            msg["value"], msg["done"] = drawn["value"], True
            msg["infer"] = {k: v for k, v in drawn["infer"].items() if k not in _OF_A_RUN}
        elif is_state(msg):
            self._summed.append(f"'{msg['name']}'")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is RuntimeError and self._summed:
            names = ", ".join(self._summed)
            raise RuntimeError(
                f"{first_line(error or kind())}: the model runs with all values of {names} side by "
                f"side, in dims to the left of all plates, and has to broadcast over them: expand "
                f"what is concatenated to one shape (torch.broadcast_shapes), index by "
                f"Vindex(table)[..., y], and count batch dims from the right (dim=-1); or draw the "
                f"site in the guide"
            ) from error


# What enumeration notes at a site.
_OF_A_RUN = ("enumerate", "_enumerate_dim", "_dim_to_id")


def _check_kind(msg: Message) -> None:
    kind, draws = msg["infer"].get("enumerate"), msg["infer"].get("num_samples")
    if kind == "sequential" or (kind == "parallel" and draws is not None):
        raise SiteError(
            f"site '{msg['name']}' of the model is marked for enumeration ({kind}, num_samples="
            f"{draws}), of which the exact sum in parallel is done: mark it "
            f"infer={{'enumerate': 'parallel'}}, or draw it in the guide"
        )


def _check_dim(msg: Message) -> None:
    dim, batch = msg["infer"]["_enumerate_dim"], msg["fn"].batch_shape
    if len(batch) >= -dim and batch[dim] != 1:
        raise SiteError(
            f"Enumeration dim conflict at site '{msg['name']}' of the model: it depends on an "
            f"enumerated site that its pyro.markov has forgotten. Try increasing pyro.markov "
            f"history size: history=k remembers the sites of k steps before"
        )


def is_state(site: Site) -> bool:
    """Whether a scored site of a model has all of its values, in a dim of its own."""
    return "_enumerate_dim" in site["infer"]


def shows_states(guide_trace: Trace, model_trace: Trace) -> bool:
    """Whether a model that drew everything has sites that are to be summed."""
    return any(
        not site["is_observed"]
        and site["infer"].get("enumerate") == "parallel"
        and not is_state(site)
        and site["name"] not in guide_trace
        for site in scored(model_trace)
    )


def support_of_state(site: Site) -> Tensor:
    """The values of an enumerated site: ``[S, *event]``."""
    value, event_dim = site["value"], site["fn"].event_dim
    dim = site["infer"]["_enumerate_dim"] - event_dim
    for other in range(value.dim() - event_dim):
        if other != value.dim() + dim:
            value = value.narrow(other, 0, 1)
    return value.reshape(-1, *value.shape[value.dim() - event_dim :])
