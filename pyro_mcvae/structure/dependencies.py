"""Extra runs of a program pair, without particles, that find out its structure."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import torch
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import SubstituteMessenger
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.sites import is_scored, masks_of
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Message, Site, TorchFunction

__all__ = [
    "Dependencies",
    "Escapes",
    "TrackDraws",
    "find_dependencies",
    "leaves_behind",
]


class Dependencies(NamedTuple):
    """
    What depends on which draws of the guide, directly.

    :ivar factors: for each site's log density with the user's scale and mask, which depends on the
        site's value too.
    :ivar distributions: for each site's distribution, whatever its value.
    :ivar observed: for each observed site's distribution and data together.
    :ivar masks: for each site's masks.
    :ivar parameters: for each site's log density, the identities of the leaves that it has.
    """

    factors: dict[FactorKey, frozenset[str]]
    distributions: dict[FactorKey, frozenset[str]]
    observed: dict[FactorKey, frozenset[str]]
    masks: dict[FactorKey, frozenset[str]]
    parameters: dict[FactorKey, frozenset[int]]

    def with_sums(self, terms: Iterable[Term]) -> Dependencies:
        """What is known of sums over enumerated sites too, which depend as their members do."""
        sums = {t.key: [m.key for m in t.members] for t in terms if t.members}
        return Dependencies(*({**part, **_united(part, sums)} for part in self)) if sums else self


def _united(
    part: Mapping[FactorKey, frozenset[Any]], sums: Mapping[FactorKey, list[FactorKey]]
) -> dict[FactorKey, frozenset[Any]]:
    return {
        key: frozenset().union(*(part.get(m, frozenset()) for m in members))
        for key, members in sums.items()
        if any(m in part for m in members)
    }


class TrackDraws(Messenger):
    """Marks the tracked draws of the guide, and notes what each was computed from."""

    def __init__(self, tracked: frozenset[str]) -> None:
        super().__init__()
        self.tracked = tracked
        self.leaves: dict[str, Tensor] = {}
        self.name_of: dict[int, str] = {}
        self.upstream: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["name"] not in self.tracked or msg["name"] in self.leaves:
            return
        self.upstream[msg["name"]] = frozenset(get_provenance(msg["value"]))
        leaf = detach_provenance(msg["value"]).detach()
        # Two trackers, because each is blind somewhere: provenance in custom autograd functions,
        # autograd at discrete values.
        if leaf.is_floating_point():
            leaf.requires_grad_()
        self.leaves[msg["name"]] = leaf
        self.name_of[id(leaf)] = msg["name"]
        msg["value"] = ProvenanceTensor(leaf, frozenset({msg["name"]}))


_TORCH_AND_METHOD = (
    "allclose",
    "argwhere",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
)
# Through these a draw's value leaves the tensors that are tracked: as a Python number or a string,
# as a shape, or copied into a new tensor.
_WAYS_OUT: set[object] = {
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__complex__,
    torch.Tensor.__contains__,
    torch.Tensor.__float__,
    torch.Tensor.__format__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.tensor,
    *(getattr(module, name) for module in (torch, torch.Tensor) for name in _TORCH_AND_METHOD),
}
_OPTIONS_ONLY: set[object] = {
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.new_empty,
    torch.Tensor.new_tensor,
    *(getattr(torch, f"{kind}_like") for kind in ("zeros", "ones", "full", "empty")),
    *(getattr(torch, f"{kind}_like") for kind in ("rand", "randn")),
}
_CONVERSIONS: set[object] = {torch.Tensor.type_as, torch.Tensor.to}


def _selects(func: TorchFunction, args: tuple[object, ...]) -> bool:
    """Whether a boolean mask selects entries, whose number then tells of the mask."""
    if func in (torch.where, torch.Tensor.where):
        return len(args) == 1
    if func is not torch.Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and detach_provenance(i).dtype is torch.bool for i in index)


class Escapes(TorchFunctionMode):
    """Notes draws that become Python numbers, or are written into an untracked tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if func in _WAYS_OUT or _selects(func, args):
            self.names |= get_provenance([args, kwargs or {}])
        elif func is torch.Tensor.new_tensor:
            # As torch.tensor, but for the first argument, of which only the dtype is taken.
            self.names |= get_provenance([args[1:], kwargs or {}])
        elif func is torch.Tensor.__setitem__ or (name[-1:] == "_" and name[-2:] != "__"):
            # Gradients tell what floating-point numbers were written into a tensor.
            written = [args[1:], kwargs or {}]
            self.names |= get_provenance([t for t in _tensors(written) if not _is_float(t)])
        if func in _OPTIONS_ONLY:
            # The draw only says the dtype and the device.
            args = (detach_provenance(args[0]), *args[1:])
        elif func in _CONVERSIONS and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], detach_provenance(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _tensors(values: object) -> list[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor)]


def _is_float(tensor: Tensor) -> bool:
    return detach_provenance(tensor).is_floating_point()


def find_dependencies(
    programs: Programs, tracked: frozenset[str], subsamples: Mapping[str, Tensor]
) -> Dependencies:
    """
    The tracked guide sites on which each factor of the weight depends directly.

    :param subsamples: the minibatch to look at, for programs whose sites depend on it.

    Programs that cannot be tracked (an operator that refuses tensor subclasses) yield nothing,
    with a warning: their factors count as depending on everything, which is always correct,
    though the bound may be looser.
    """
    tracker = TrackDraws(tracked)
    try:
        with isolated(), torch.enable_grad(), pyro.validation_enabled(False):
            escapes = Escapes()
            with tracker, escapes:
                guide_trace, model_trace = run_pair(
                    programs, SubstituteMessenger(Minibatch(subsamples))
                )
            found = _trace_factors({"guide": guide_trace, "model": model_trace}, tracker)
    except Exception as error:
        warnings.warn(
            f"cannot trace which sites depend on which ({type(error).__name__}: {error}); all "
            f"latents are weighed together, or, under subsampling, as in the plain ELBO",
            stacklevel=2,
        )
        return Dependencies({}, {}, {}, {}, {})
    # What became of these draws is not known: anything may depend on them.
    escaped = escapes.names & tracked
    return found._replace(factors={key: f | escaped for key, f in found.factors.items()})


def _trace_factors(traces: Mapping[str, Trace], tracker: TrackDraws) -> Dependencies:
    found = Dependencies({}, {}, {}, {}, {})
    for program, trace in traces.items():
        for name, site in trace.nodes.items():
            if not is_scored(site):
                continue
            key = FactorKey(program, name)
            upstream = None
            if program == "guide":
                upstream = tracker.upstream.get(name)
                if upstream is None:
                    # Of a point mass, the value says more than its density, a comparison.
                    upstream = _behind([site["value"]], tracker)
            around = _behind([site["scale"], *masks_of(site)], tracker)
            log_prob = _log_prob_at(site, site["value"])
            parents = _parents_of(log_prob, upstream, tracker)
            if upstream is not None:
                parents |= upstream | ({name} & tracker.tracked)
                own = upstream
            else:
                alone = _log_prob_at(site, detach_provenance(site["value"]).detach())
                own = _parents_of(alone, None, tracker)
            found.masks[key] = _behind(masks_of(site), tracker) & tracker.tracked
            found.factors[key] = (parents | around) & tracker.tracked
            found.parameters[key] = _leaves_of(log_prob)
            if site["is_observed"]:
                found.observed[key] = parents & tracker.tracked
            found.distributions[key] = own & tracker.tracked
    return found


def _log_prob_at(site: Site, value: Tensor) -> Tensor | Exception:
    """A site's log density, or the error of a flow without an inverse."""
    try:
        return site["fn"].log_prob(value, *site["args"], **site["kwargs"])
    except (NotImplementedError, KeyError) as error:
        return error


def _parents_of(
    log_prob: Tensor | Exception, upstream: frozenset[str] | None, tracker: TrackDraws
) -> frozenset[str]:
    if not isinstance(log_prob, Exception):
        return _behind([log_prob], tracker)
    if upstream is None:
        raise log_prob
    return upstream  # what the flow's draw was computed from says enough


def _leaves_of(log_prob: Tensor | Exception) -> frozenset[int]:
    if isinstance(log_prob, Exception):
        return frozenset()
    bare: Tensor = detach_provenance(log_prob)
    return frozenset(leaves_behind(bare)) if bare.requires_grad else frozenset()


def _behind(values: Sequence[object], tracker: TrackDraws) -> frozenset[str]:
    """The draws that some numbers were computed from."""
    found = frozenset(get_provenance(values))
    for value in map(detach_provenance, values):
        if isinstance(value, Tensor) and value.requires_grad:
            behind = leaves_behind(value)
            found |= {tracker.name_of[i] for i in behind if i in tracker.name_of}
    return found


def leaves_behind(tensor: Tensor) -> set[int]:
    """The identities of the leaves in a tensor's autograd graph."""
    found, seen, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return found
