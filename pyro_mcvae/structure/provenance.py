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

# Marked draws, to trace the values that are computed from them.

_NONE: frozenset[str] = frozenset()


class _Marked(ProvenanceTensor):
    """Pyro's tensor, faster: it traverses only containers, as most arguments are tensors."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        inputs, marks = _split_marks(args)
        options, more = _split_marks(kwargs or {})
        result = func(*inputs, **options)
        if func is torch.broadcast_tensors:
            # All distributions broadcast their parameters: each keeps only its own marks.
            parts = zip(result, map(marks_of, args), strict=True)
            return tuple(_mark(wide, names) if names else wide for wide, names in parts)
        return _mark(result, marks | more)


def _mark(value: Any, marks: frozenset[str]) -> Any:
    """Add marks to the tensors of a value."""
    if not isinstance(value, Tensor):
        return tree_map_only(Tensor, partial(_mark, marks=marks), value)
    bare, old_marks = _split_marks(value)
    # Before torch 2.6, a tensor returned by a dispatch mode of the caller cannot be a subclass.
    with torch._C._DisableTorchDispatch():
        return _Marked(bare, marks | old_marks)


def _split_marks(value: Any) -> tuple[Any, frozenset[str]]:
    """Return a value without its marks, and the marks."""
    if isinstance(value, ProvenanceTensor):
        return value._t, value._provenance
    if type(value) in (tuple, list):
        parts = [_split_marks(v) for v in value]
        return type(value)([v for v, _ in parts]), _NONE.union(*[m for _, m in parts])
    if type(value) is dict:
        values, marks = _split_marks(tuple(value.values()))
        return dict(zip(value, values, strict=True)), marks
    if isinstance(value, tuple | list | dict | set | frozenset) and type(value) is not torch.Size:
        return extract_provenance(value)
    return value, _NONE


def marks_of(value: object) -> frozenset[str]:
    """Return the names of the marked draws behind a structure of tensors."""
    return _split_marks(value)[1]


def unmarked(value: Any) -> Any:
    """Return a structure of tensors without marks."""
    return _split_marks(value)[0]


class TrackDraws(Messenger):
    """
    Marks the tracked draws of the guide, and records the draws that each was computed from.

    :param fixed: the sites with fixed values, which are not drawn.
    """

    def __init__(self, tracked: frozenset[str], fixed: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.tracked = tracked
        self._fixed = fixed
        self.leaves: dict[str, Tensor] = {}
        self.name_of: dict[int, str] = {}
        self.upstream: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["name"] not in self.tracked or msg["name"] in self.leaves:
            return
        drawn = msg["value"]
        if msg["name"] in self._fixed:
            # A draw would have been computed from the inputs of its density.
            drawn = msg["fn"].log_prob(msg["value"])
        self.upstream[msg["name"]] = marks_of(drawn)
        with torch._C.DisableTorchFunction():  # without the marks of overwritten tensors
            leaf = unmarked(msg["value"]).detach().clone()
        # Two trackers, because each fails somewhere: provenance in custom autograd functions,
        # autograd at discrete values.
        if leaf.is_floating_point():
            leaf.requires_grad_()
        self.leaves[msg["name"]] = leaf
        self.name_of[id(leaf)] = msg["name"]
        msg["value"] = _mark(leaf, frozenset({msg["name"]}))


def _as_function_and_method(*names: str) -> set[object]:
    return {getattr(module, name) for module in (torch, torch.Tensor) for name in names}


# Functions that turn the values of a tensor into a Python number.
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
# Functions through which a draw's value leaves the tracked tensors: as a Python number or a
# string, as a shape, or copied into a new tensor.
_ESCAPES: set[object] = {
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
# The second argument only determines the dtype and the device, or the shape.
_CONVERSIONS: set[object] = {
    torch.Tensor.type_as,
    torch.Tensor.to,
    torch.Tensor.expand_as,
    torch.Tensor.reshape_as,
    torch.Tensor.view_as,
}


def _selects(func: TorchFunction, args: tuple[object, ...]) -> bool:
    """Return whether a boolean mask selects entries, so that the shape depends on the mask."""
    if func in (torch.where, torch.Tensor.where):
        return len(args) == 1
    if func is not torch.Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and unmarked(i).dtype is torch.bool for i in index)


class Escapes(TorchFunctionMode):
    """
    Records draws that become Python numbers, and marks tensors that draws are written into.

    :ivar names: the draws that could not be tracked further.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()
        # By storage, which is kept alive so that its address is not reused.
        self._written: dict[int, tuple[Any, frozenset[str]]] = {}

    def _write(self, target: object, marks: frozenset[str]) -> None:
        if marks and isinstance(target, Tensor):
            storage = unmarked(target).untyped_storage()
            _, before = self._written.get(storage._cdata, (None, _NONE))
            self._written[storage._cdata] = storage, before | marks

    def _with_marks(self, value: Tensor) -> Tensor:
        """Mark a tensor by the draws that were written into it, or into a view of it."""
        with torch._C.DisableTorchFunction():
            storage = unmarked(value).untyped_storage()
        entry = self._written.get(storage._cdata)
        return value if entry is None else _mark(value, entry[1])

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self._written:
            args, kwargs = tree_map_only(Tensor, self._with_marks, (args, kwargs or {}))
        name = getattr(func, "__name__", "")
        if func in _ESCAPES or _selects(func, args):
            self.names |= marks_of([args, kwargs or {}])
        elif func is torch.Tensor.new_tensor:
            # Like torch.tensor, except that the first argument only determines the dtype.
            self.names |= marks_of([args[1:], kwargs or {}])
        elif func is torch.Tensor.__setitem__ or (name[-1:] == "_" and name[-2:] != "__"):
            # Without a gradient, autograd does not record writes into a tensor.
            self._write(args[0], marks_of([args[1:], kwargs or {}]))
        if func in _OPTIONS_ONLY:
            # The draw only determines the dtype and the device.
            args = (unmarked(args[0]), *args[1:])
        elif func in _CONVERSIONS and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], unmarked(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


# Extra runs of model and guide, without particles, to find their structure.


class Dependencies(NamedTuple):
    """
    Direct dependencies on the draws of the guide.

    :ivar factors: the parents of each site's log density with the user's scale and mask, including
        the site itself.
    :ivar masks: the parents of each site's masks.
    :ivar parameters: the ids of the autograd leaves of each site's log density.
    """

    factors: dict[FactorKey, frozenset[str]]
    masks: dict[FactorKey, frozenset[str]]
    parameters: dict[FactorKey, frozenset[int]]

    def ancestors(self, names: frozenset[str]) -> dict[str, frozenset[str]]:
        """Return the guide sites that each site depends on, directly or through others."""
        keys = {name: FactorKey("guide", name) for name in names}
        closed = {name: self.factors.get(key, names) | {name} for name, key in keys.items()}
        for _ in names:
            wider = {n: frozenset().union(*(closed[p] for p in ps)) for n, ps in closed.items()}
            if wider == closed:
                break
            closed = wider
        return closed

    def with_sums(self, terms: Iterable[Term]) -> Dependencies:
        """Add sums over enumerated sites, whose dependencies are those of their members."""
        sums = {t.key: [m.key for m in t.members] for t in terms if t.members}
        return Dependencies(*({**part, **_unions(part, sums)} for part in self)) if sums else self


def _unions(
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

    If programs cannot be tracked (an operator may reject tensor subclasses), return an empty
    result, with a warning. All factors are then treated as if they depended on every site. This is
    always correct, though the bound may be looser.

    :param subsamples: the minibatch, for programs whose sites depend on it.
    :param at: the guide's latents, for programs whose sites depend on these; None to draw them.
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
            deps = _trace_factors(traces, tracker)
    except Exception as error:
        warnings.warn(
            f"cannot trace which sites depend on which ({type(error).__name__}: {error}); all "
            f"latents share one weight, or, under subsampling, none (plain ELBO)",
            stacklevel=2,
        )
        return Dependencies({}, {}, {})
    # These draws escaped tracking: every factor may depend on them. Dependence between iterations
    # of a sequential plate is tested by interventions instead.
    escaped = {n: _iterations(guide_trace.nodes[n]) for n in escapes.names & tracked}

    def with_escaped(key: FactorKey, parents: frozenset[str]) -> frozenset[str]:
        steps = _iterations(traces[key.program].nodes[key.name])
        same = (n for n, at in escaped.items() if all(steps.get(p, t) == t for p, t in at.items()))
        return parents.union(same)

    return deps._replace(factors={key: with_escaped(key, f) for key, f in deps.factors.items()})


def _iterations(site: Site) -> dict[str, int]:
    """Return the iteration of each sequential plate around a site."""
    keys = map(plate_key, site["cond_indep_stack"])
    return {key.name: key.counter for key in keys if key.dim is None}


def dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    """
    Return the dependencies of the programs of a run, with sums over enumerated sites.

    Runs of one call with the same structure, with and without leading dims, share the analysis.
    """
    traced = programs.cached(
        ("dependencies", tracked, run.signature),
        lambda: _dependencies_of(programs, tracked, run),
    )
    return traced.with_sums(run.terms)


def _dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    traced = find_dependencies(programs, tracked, run.subsamples)
    is_complete = {m.key for t in run.summands for m in t.sites} <= traced.factors.keys()
    if is_complete or run.leading is not None or not traced.factors:
        return traced
    # A run at other draws had other sites.
    return find_dependencies(programs, tracked, run.subsamples, run.latents)


def _trace_factors(traces: Mapping[str, Trace], tracker: TrackDraws) -> Dependencies:
    traced = Dependencies({}, {}, {})
    for program, trace in traces.items():
        for name, site in trace.nodes.items():
            if not is_scored(site):
                continue
            key = FactorKey(program, name)
            upstream = None
            if program == "guide":
                upstream = tracker.upstream.get(name)
                if upstream is None:
                    # A point mass: its density is a comparison, so the dependencies of its value
                    # are used.
                    upstream = _sources([site["value"]], tracker)
            around = _sources([site["scale"], *masks_of(site)], tracker)
            log_prob = _log_prob_at(site)
            parents = _parents_of(log_prob, upstream, tracker)
            if upstream is not None:
                parents |= upstream | ({name} & tracker.tracked)
            traced.masks[key] = _sources(masks_of(site), tracker) & tracker.tracked
            traced.factors[key] = (parents | around) & tracker.tracked
            traced.parameters[key] = _leaves_of(log_prob)
    return traced


def _log_prob_at(site: Site) -> Tensor | Exception:
    """Return a site's log density, or the error of a flow without an inverse."""
    try:
        return site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    except (NotImplementedError, KeyError) as error:
        return error


def _parents_of(
    log_prob: Tensor | Exception, upstream: frozenset[str] | None, tracker: TrackDraws
) -> frozenset[str]:
    if not isinstance(log_prob, Exception):
        return _sources([log_prob], tracker)
    if upstream is None:
        raise log_prob
    return upstream  # the inputs of the flow's draw


def _leaves_of(log_prob: Tensor | Exception) -> frozenset[int]:
    if isinstance(log_prob, Exception):
        return frozenset()
    bare: Tensor = unmarked(log_prob)
    return frozenset(autograd_leaves(bare)) if bare.requires_grad else frozenset()


def _sources(values: Sequence[object], tracker: TrackDraws) -> frozenset[str]:
    """Return the draws that some values were computed from."""
    sources = marks_of(values)
    for value in map(unmarked, values):
        if isinstance(value, Tensor) and value.requires_grad:
            leaves = autograd_leaves(value)
            sources |= {tracker.name_of[i] for i in leaves if i in tracker.name_of}
    return sources


def autograd_leaves(tensor: Tensor) -> set[int]:
    """Return the ids of the leaves in a tensor's autograd graph."""
    leaves, seen, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return leaves


# Python code of programs that reads the values of tensors, or normalizes by a batch.

_FINITE: set[object] = {
    getattr(m, n) for m in (torch, Tensor) for n in ("isfinite", "isinf", "isnan")
}


class Read(NamedTuple):
    """
    A tensor that the user's code converts to a Python number.

    :ivar line: the line of the program.
    :ivar sites: the sites whose draws it was computed from, if these are tracked.
    """

    line: str
    sites: frozenset[str]


class Batch(NamedTuple):
    """
    A tensor that is normalized by its batch statistics.

    :ivar size: the number of values per statistic.
    :ivar line: the line of the program.
    """

    size: int
    line: str


class ReadRecorder(TorchFunctionMode):
    """
    Records data-dependent control flow and batch normalization.

    :ivar reads: the values that Python code has read.
    :ivar batches: the tensors that batch normalization has normalized.
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
            # All particles are finite if each is, and a program stops otherwise.
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
    Find the reads of values that depend on latents, in another run with tracked draws.

    If tensors cannot be tracked, every read may depend on all latents.

    :param latents: the random sites.
    :param reads: the reads of a run without tracking.
    """
    if not reads:
        return []
    try:
        with probing(programs), ReadRecorder() as recorder, TrackDraws(latents):
            run_pair(programs, Substitutes(Minibatch(subsamples)))
    except Exception:  # tensors that cannot be tracked
        return [Read(reads[0].line, latents)]
    return [r for r in recorder.reads if r.sites]
