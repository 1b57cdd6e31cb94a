"""Find what each factor depends on, by marking draws in a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro.ops.provenance import ProvenanceTensor, extract_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pyro_mcvae.programs.isolation import batch_size
from pyro_mcvae.programs.messengers import Minibatch, Substitutes
from pyro_mcvae.programs.probing import probing
from pyro_mcvae.programs.run import Programs, Run, run_pair
from pyro_mcvae.programs.sites import is_scored, masks_of
from pyro_mcvae.programs.source_lines import in_assertion, is_core, program_line
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, Message, Site, TorchFunction, plate_key

# Draws that are marked, so that what was computed from them can be told.

_NONE: frozenset[str] = frozenset()


class _Marked(ProvenanceTensor):
    """Pyro's tensor, which takes each argument for a tree: most are tensors and numbers."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        inputs, marks = _parted(args)
        options, more = _parted(kwargs or {})
        result = func(*inputs, **options)
        if func is torch.broadcast_tensors:
            # As all distributions broadcast their parameters: each tells nothing of the others.
            parts = zip(result, map(marks_of, args), strict=True)
            return tuple(_mark(wide, own) if own else wide for wide, own in parts)
        return _mark(result, marks | more)


def _mark(value: Any, marks: frozenset[str]) -> Any:
    """A value whose tensors have these marks too."""
    if not isinstance(value, Tensor):
        return tree_map_only(Tensor, partial(_mark, marks=marks), value)
    bare, own = _parted(value)
    # Before torch 2.6, what a dispatch mode of the caller's returned is refused as a subclass.
    with torch._C._DisableTorchDispatch():
        return _Marked(bare, marks | own)


def _parted(value: Any) -> tuple[Any, frozenset[str]]:
    """A value without its marks, and these."""
    if isinstance(value, ProvenanceTensor):
        return value._t, value._provenance
    if type(value) in (tuple, list):
        parts = [_parted(v) for v in value]
        return type(value)([v for v, _ in parts]), _NONE.union(*[m for _, m in parts])
    if type(value) is dict:
        values, marks = _parted(tuple(value.values()))
        return dict(zip(value, values, strict=True)), marks
    if isinstance(value, tuple | list | dict | set | frozenset) and type(value) is not torch.Size:
        return extract_provenance(value)
    return value, _NONE


def marks_of(value: object) -> frozenset[str]:
    """The names of the marked draws behind a structure of tensors."""
    return _parted(value)[1]


def unmarked(value: Any) -> Any:
    """The same without marks."""
    return _parted(value)[0]


class TrackDraws(Messenger):
    """
    Marks the tracked draws of the guide, and records what each was computed from.

    :param given: the sites whose values were given, not drawn.
    """

    def __init__(self, tracked: frozenset[str], given: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.tracked = tracked
        self._given = given
        self.leaves: dict[str, Tensor] = {}
        self.name_of: dict[int, str] = {}
        self.upstream: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["name"] not in self.tracked or msg["name"] in self.leaves:
            return
        drawn = msg["value"]
        if msg["name"] in self._given:
            # What it would have been computed from is what its density is computed from.
            drawn = msg["fn"].log_prob(msg["value"])
        self.upstream[msg["name"]] = marks_of(drawn)
        with torch._C.DisableTorchFunction():  # no longer in what earlier draws were written into
            leaf = unmarked(msg["value"]).detach().clone()
        # Two trackers, because each is blind somewhere: provenance in custom autograd functions,
        # autograd at discrete values.
        if leaf.is_floating_point():
            leaf.requires_grad_()
        self.leaves[msg["name"]] = leaf
        self.name_of[id(leaf)] = msg["name"]
        msg["value"] = _mark(leaf, frozenset({msg["name"]}))


def _as_function_and_method(*names: str) -> set[object]:
    return {getattr(module, name) for module in (torch, torch.Tensor) for name in names}


# Through these the values of a tensor become a Python number.
READS: frozenset[object] = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__complex__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__int__,
        torch.Tensor.item,
        torch.Tensor.tolist,
        *_as_function_and_method("allclose", "equal", "is_nonzero"),
    }
)
_SHAPED_BY_VALUES = (
    "argwhere",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
)
# Through these a draw's value leaves the tensors that are tracked: as a Python number or a string,
# as a shape, or copied into a new tensor.
_WAYS_OUT: set[object] = {
    *READS,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.Tensor.__format__,
    torch.Tensor.numpy,
    torch.tensor,
    *_as_function_and_method(*_SHAPED_BY_VALUES),
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
# The second argument only says the dtype and the device, or the shape.
_CONVERSIONS: set[object] = {
    torch.Tensor.type_as,
    torch.Tensor.to,
    torch.Tensor.expand_as,
    torch.Tensor.reshape_as,
    torch.Tensor.view_as,
}


def _selects(func: TorchFunction, args: tuple[object, ...]) -> bool:
    """Whether a boolean mask selects entries, whose number then tells of the mask."""
    if func in (torch.where, torch.Tensor.where):
        return len(args) == 1
    if func is not torch.Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and unmarked(i).dtype is torch.bool for i in index)


class Escapes(TorchFunctionMode):
    """
    Records draws that become Python numbers, and marks tensors that draws are written into.

    :ivar names: the draws of which it is not known what became of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()
        # By storage, which is kept alive so that no other tensor has its place.
        self._written: dict[int, tuple[Any, frozenset[str]]] = {}

    def _write(self, target: object, marks: frozenset[str]) -> None:
        if marks and isinstance(target, Tensor):
            storage = unmarked(target).untyped_storage()
            _, before = self._written.get(storage._cdata, (None, _NONE))
            self._written[storage._cdata] = storage, before | marks

    def _recalled(self, value: Tensor) -> Tensor:
        """A tensor with the marks of what was written into it, or into a view of it."""
        with torch._C.DisableTorchFunction():
            storage = unmarked(value).untyped_storage()
        found = self._written.get(storage._cdata)
        return value if found is None else _mark(value, found[1])

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self._written:
            args, kwargs = tree_map_only(Tensor, self._recalled, (args, kwargs or {}))
        name = getattr(func, "__name__", "")
        if func in _WAYS_OUT or _selects(func, args):
            self.names |= marks_of([args, kwargs or {}])
        elif func is torch.Tensor.new_tensor:
            # As torch.tensor, but for the first argument, of which only the dtype is taken.
            self.names |= marks_of([args[1:], kwargs or {}])
        elif func is torch.Tensor.__setitem__ or (name[-1:] == "_" and name[-2:] != "__"):
            # Where there is no gradient, autograd does not record what is written into a tensor.
            self._write(args[0], marks_of([args[1:], kwargs or {}]))
        if func in _OPTIONS_ONLY:
            # The draw only says the dtype and the device.
            args = (unmarked(args[0]), *args[1:])
        elif func in _CONVERSIONS and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], unmarked(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


# Extra runs of a program pair, without particles, that find out its structure.


class Dependencies(NamedTuple):
    """
    What depends on which draws of the guide, directly.

    :ivar factors: for each site's log density with the user's scale and mask, which depends on the
        site's value too.
    :ivar masks: for each site's masks.
    :ivar parameters: for each site's log density, the identities of the leaves that it has.
    """

    factors: dict[FactorKey, frozenset[str]]
    masks: dict[FactorKey, frozenset[str]]
    parameters: dict[FactorKey, frozenset[int]]

    def ancestors(self, names: frozenset[str]) -> dict[str, frozenset[str]]:
        """Each of some guide sites with those that it depends on, directly or through others."""
        keys = {name: FactorKey("guide", name) for name in names}
        closed = {name: self.factors.get(key, names) | {name} for name, key in keys.items()}
        for _ in names:
            wider = {n: frozenset().union(*(closed[p] for p in ps)) for n, ps in closed.items()}
            if wider == closed:
                break
            closed = wider
        return closed

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


def find_dependencies(
    programs: Programs,
    tracked: frozenset[str],
    subsamples: Mapping[str, Tensor],
    at: Mapping[str, Tensor] | None = None,
) -> Dependencies:
    """
    Find the tracked guide sites on which each factor of the weight depends directly.

    :param subsamples: the minibatch, for programs whose sites depend on it.
    :param at: the guide's latents, for programs whose sites depend on these; drawn if left out.

    Programs that cannot be tracked (an operator that refuses tensor subclasses) yield nothing,
    with a warning: their factors count as depending on everything, which is always correct,
    though the bound may be looser.
    """
    tracker = TrackDraws(tracked, frozenset(at or ()))
    try:
        with probing(programs), torch.enable_grad():
            escapes = Escapes()
            with tracker, escapes:
                guide_trace, model_trace = run_pair(
                    programs, Substitutes(Minibatch(subsamples), at or {})
                )
            traces = {"guide": guide_trace, "model": model_trace}
            found = _trace_factors(traces, tracker)
    except Exception as error:
        warnings.warn(
            f"cannot trace which sites depend on which ({type(error).__name__}: {error}); all "
            f"latents are weighed together, or, under subsampling, as in the plain ELBO",
            stacklevel=2,
        )
        return Dependencies({}, {}, {})
    # What became of these draws is not known: anything may depend on them. Whether another turn of
    # a sequential plate does is tested by interventions.
    escaped = {n: _turns(guide_trace.nodes[n]) for n in escapes.names & tracked}

    def wider(key: FactorKey, parents: frozenset[str]) -> frozenset[str]:
        turns = _turns(traces[key.program].nodes[key.name])
        same = (
            n for n, own in escaped.items() if all(turns.get(p, t) == t for p, t in own.items())
        )
        return parents.union(same)

    return found._replace(factors={key: wider(key, f) for key, f in found.factors.items()})


def _turns(site: Site) -> dict[str, int]:
    """The turns of the sequential plates that a site is in."""
    keys = map(plate_key, site["cond_indep_stack"])
    return {key.name: key.counter for key in keys if key.dim is None}


def dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    """
    The same of programs that made this run, with sums over enumerated sites.

    Runs of one call with and without leading dims, which show one structure, share the look.
    """
    found = programs.once(
        ("dependencies", tracked, run.signature),
        lambda: _dependencies_of(programs, tracked, run),
    )
    return found.with_sums(run.terms)


def _dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    found = find_dependencies(programs, tracked, run.subsamples)
    known = {m.key for t in run.summands for m in t.sites} <= found.factors.keys()
    if known or run.leading is not None or not found.factors:
        return found
    # Draws of its own had other sites.
    return find_dependencies(programs, tracked, run.subsamples, run.latents)


def _trace_factors(traces: Mapping[str, Trace], tracker: TrackDraws) -> Dependencies:
    found = Dependencies({}, {}, {})
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
            log_prob = _log_prob_at(site)
            parents = _parents_of(log_prob, upstream, tracker)
            if upstream is not None:
                parents |= upstream | ({name} & tracker.tracked)
            found.masks[key] = _behind(masks_of(site), tracker) & tracker.tracked
            found.factors[key] = (parents | around) & tracker.tracked
            found.parameters[key] = _leaves_of(log_prob)
    return found


def _log_prob_at(site: Site) -> Tensor | Exception:
    """A site's log density, or the error of a flow without an inverse."""
    try:
        return site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
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
    bare: Tensor = unmarked(log_prob)
    return frozenset(leaves_behind(bare)) if bare.requires_grad else frozenset()


def _behind(values: Sequence[object], tracker: TrackDraws) -> frozenset[str]:
    """The draws that some numbers were computed from."""
    found = marks_of(values)
    for value in map(unmarked, values):
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


# Python code of programs that reads the values of tensors, or normalises by a batch.

_FINITE: set[object] = {
    getattr(m, n) for m in (torch, Tensor) for n in ("isfinite", "isinf", "isnan")
}


class Read(NamedTuple):
    """
    A tensor of which the user's code makes a Python number.

    :ivar line: where.
    :ivar sites: whose draws it was computed from, where these are tracked.
    """

    line: str
    sites: frozenset[str]


class Batch(NamedTuple):
    """
    What is normalised by its own statistics.

    :ivar size: of how many numbers.
    :ivar line: where.
    """

    size: int
    line: str


class Reads(TorchFunctionMode):
    """
    Records what programs read and normalise.

    :ivar reads: the values that Python code has read.
    :ivar batches: what batch normalisation has taken for a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.batches: list[Batch] = []

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func in _FINITE:
            # Whether all particles are finite is whether each is, and a program stops otherwise.
            args = unmarked(args)
        frame = sys._getframe(1)
        if func in READS and not (is_core(frame.f_code) or in_assertion(frame)):
            self.reads.append(Read(program_line(frame), marks_of(args)))
        if func is batch_norm and (size := batch_size(args, kwargs or {})):
            self.batches.append(Batch(size, program_line(frame)))
        return func(*args, **(kwargs or {}))


def reads_of_latents(
    programs: Programs, subsamples: Minibatch, latents: frozenset[str], reads: list[Read]
) -> list[Read]:
    """
    Find the reads of values that depend on latents, in one more run with draws tracked.

    Where tensors cannot be tracked, every read may depend on all latents.

    :param latents: the random sites.
    :param reads: what a run without tracking has read.
    """
    if not reads:
        return []
    try:
        with probing(programs), Reads() as found, TrackDraws(latents):
            run_pair(programs, Substitutes(Minibatch(subsamples)))
    except Exception:  # tensors that cannot be tracked
        return [Read(reads[0].line, latents)]
    return [r for r in found.reads if r.sites]
