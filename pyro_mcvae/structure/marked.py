"""
One marked run of a model and guide: what each factor of the log weight depends on.

Each random draw is marked: with one bit for its site and, for each plate around it, with a code of
the element. No code contains another (Sperner, 1928), so 9 bits distinguish 100 elements. The run
has the true parameters and true draws. Afterwards each density has the bits of all draws that it
depends on, entry by entry. A factor in element e of a plate whose bits are not in the code of e
depends on another element.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import torch
from pyro import distributions as dist
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.ops.compat import DO_NOT_TRACE, ENUMERATE_DIM, RELAXED, VALIDATION
from pyro_mcvae.ops.marks import WORD, Draw, Marks, Step, bits_of, mask_of_bits, union
from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.programs.contract import checked, checked_run, drawn_inside
from pyro_mcvae.programs.distributions import may_cache
from pyro_mcvae.programs.messengers import ALONE, LeadingDims, Minibatch, SampleFn, Substitutes
from pyro_mcvae.programs.outside_values import GeneratorStates
from pyro_mcvae.programs.run import Programs, Run, run_pair
from pyro_mcvae.programs.sites import (
    certain_entries,
    changed_draw,
    is_delta,
    is_latent,
    is_random,
    is_scored,
    masked_entries,
    masks_of,
    observes_data,
    own_mask,
    reparameterized,
    site_masks,
)
from pyro_mcvae.programs.source_lines import in_assertion, is_core, program_line
from pyro_mcvae.programs.terms import Term, guide_term, model_term
from pyro_mcvae.programs.types import (
    PARTICLE_PLATE,
    FactorKey,
    Message,
    PlateKey,
    Site,
    plate_frames,
    plate_key,
)
from pyro_mcvae.programs.vmap import particle_plates

# Codes of the elements of plates.


def codes(size: int) -> tuple[int, Tensor]:
    """
    Return codes of a plate's elements, of which none contains another.

    :returns: their number of bits, and one code for each element: shape ``[size]``.
    """
    count = next(r for r in itertools.count(2) if math.comb(r, r // 2) >= size)
    chosen = itertools.islice(itertools.combinations(range(count), count // 2), size)
    return count, torch.tensor([sum(1 << i for i in code) for code in chosen])


class _Code(NamedTuple):
    """
    The bits for the elements of one plate, or for the values of an enumerated site.

    :ivar place: the place of the first bit.
    :ivar width: the number of bits.
    :ivar of: the code of each element.
    """

    place: int
    width: int
    of: Tensor

    @property
    def field(self) -> int:
        return ((1 << self.width) - 1) << self.place

    def mask(self, dim: int, words: int, device: torch.device) -> Tensor:
        """Return the codes along a negative dim: ``[words, size, 1, ...]``."""
        word, shift = divmod(self.place, WORD)
        parts = torch.zeros(words, len(self.of), dtype=torch.int64)
        parts[word] = (self.of << shift) & ((1 << WORD) - 1)
        if shift + self.width > WORD:
            parts[word + 1] = self.of >> (WORD - shift)
        return parts.to(device).reshape(words, -1, *[1] * (-dim - 1))


class _Marker(Messenger):
    """
    Marks the draws of both programs, and records what Python has read before each site.

    :ivar site_bits: the bit of each marked draw, by site.
    :ivar codes: the codes of plates, by name, dim and size.
    :ivar control: by site, what Python had read: in the guide, then in the model.
    :ivar masked_bits: for each draw of the guide and its site in the model, the bit of the entries
        that masks remove from its density.
    :ivar upstream: by site, the marks from which its draw was computed: ``[words, *batch]``.
    :ivar leaves_of_draws: the ids of autograd leaves that are no parameters, but draws.
    :ivar untraced: the plates around untraced draws of the programs.
    :ivar draws_on_host: whether the programs drew from the generators of NumPy or Python.
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks
        self.site_bits: dict[str, int] = {}
        self.codes: dict[tuple[str, int, int], _Code] = {}
        self.control: dict[str, list[int]] = {}
        self.masked_bits: dict[FactorKey, int] = {}
        self.upstream: dict[str, Tensor] = {}
        self.leaves_of_draws: set[int] = set()
        self.untraced: list[frozenset[CondIndepStackFrame]] = []
        self.draws_on_host = self.creates = False

    def names(self, bits: int) -> frozenset[str]:
        """Return the sites that some bits belong to."""
        return frozenset(n for n, bit in self.site_bits.items() if bits & bit)

    def code(self, name: str, dim: int, size: int) -> _Code:
        """Return the code of a plate, the same for all sites in it."""
        key = name, dim, size
        if key not in self.codes:
            count, of = codes(size)
            place = self.marks.new_bits(count).bit_length() - 1
            self.codes[key] = _Code(place, count, of)
        return self.codes[key]

    def _process_message(self, msg: Message) -> None:
        # Pyro's handlers leave no trace of some draws; a run with particles has to repeat them.
        self.marks.at_site = not msg["infer"].get(DO_NOT_TRACE)
        self.creates = msg["type"] == "param" and msg["name"] not in pyro.get_param_store()

    def _postprocess_message(self, msg: Message) -> None:
        self.marks.at_site = False
        if self.creates:
            self._without_marks(msg)
        if msg["type"] != "sample":
            return
        self.control.setdefault(msg["name"], []).append(self.marks.control)
        if msg["infer"].get(DO_NOT_TRACE):
            if is_random(msg):
                self.untraced.append(plate_frames(msg))
        elif is_latent(msg) and msg["name"] not in self.site_bits:
            self._mark(msg)
            self._mark_masked(msg, "guide")
        elif is_latent(msg):
            self._mark_masked(msg, "model")

    def _without_marks(self, msg: Message) -> None:
        """
        Let a new parameter depend on no draw, even if its initial value was computed from one.

        It gets memory of its own, because it may share that of the draw, which keeps its marks.
        """
        value: Any = msg["value"]
        unconstrained = getattr(value, "unconstrained", None)  # a module's parameter has none
        parameter = value if unconstrained is None else unconstrained()
        if not self.marks.bits(parameter):
            return
        with self.marks.paused():
            parameter.data = parameter.data.clone()
            if value is not parameter:
                value = msg["value"] = value.clone()
                value.unconstrained = unconstrained

    def _mark(self, msg: Message) -> None:
        marks, drawn = self.marks, msg["value"]
        # A copy shares its memory with no other value. A flow recognizes the tensor that it drew.
        if not may_cache(msg["fn"]):
            fixed = reparameterized(msg) and not drawn.requires_grad
            copy = _with_gradient if fixed else torch.clone
            drawn = msg["value"] = changed_draw(copy, drawn)
            if fixed:
                self.leaves_of_draws |= autograd_leaves(drawn)
        with marks.paused():
            self._write(msg, drawn)

    def _write(self, msg: Message, drawn: Tensor) -> None:
        """Write the marks of a draw, and keep those from which it was computed."""
        marks, event_dim = self.marks, msg["fn"].event_dim
        before = marks.mask(drawn)
        if before is not None:
            inner = range(before.dim() - event_dim, before.dim())
            kept = before.shape[: before.dim() - event_dim]
            self.upstream[msg["name"]] = union(before.clone(), inner).reshape(kept)
        self.site_bits[msg["name"]] = bit = marks.new_bits()
        if reparameterized(msg) and not is_delta(msg["fn"]):
            marks.smooth |= bit
        batch = drawn.dim() - event_dim
        parts: list[tuple[int, _Code]] = []
        # A point mass is computed from other draws, and has their elements.
        for frame in msg["cond_indep_stack"] if is_random(msg) else ():
            if frame.dim is not None and frame.size > 1 and batch >= -frame.dim:
                at = frame.dim - event_dim
                if drawn.shape[at] == frame.size:
                    parts.append((at, self.code(frame.name, frame.dim, frame.size)))
        state_dim = msg["infer"].get(ENUMERATE_DIM)
        if state_dim is not None and batch >= -state_dim:
            at = state_dim - event_dim
            parts.append((at, self.code(_states(msg["name"]), state_dim, drawn.shape[at])))
        words = marks.words
        mask = mask_of_bits(bit, words, drawn)
        for at, code in parts:
            column = code.mask(at, words, drawn.device)
            mask = mask | column.reshape(words, *[1] * (drawn.dim() + at), *column.shape[1:])
        if not is_random(msg) and before is not None:
            mask = mask | before
        for value in (drawn, getattr(drawn, RELAXED, None)):
            if value is not None:
                marks.write(value, mask.expand(words, *value.shape))

    def _mark_masked(self, msg: Message, program: str) -> None:
        """Mark the entries of a value that the program's masks remove from its density."""
        marks, value, counted = self.marks, msg["value"], own_mask(msg)
        if counted is None:
            return
        with marks.paused():
            removed = ~(counted | certain_entries(msg))
            if not bool(removed.any()):
                return
            self.masked_bits[FactorKey(program, msg["name"])] = bit = marks.new_bits()
            marks.masked |= bit
            marks.masking |= marks.bits(site_masks(msg)) & ~marks.masked
            removed = _in_dims_of(value, removed)
            extra = mask_of_bits(bit, marks.words, value) * removed
            before = marks.mask(value)
            marks.write(value, extra if before is None else before | extra)


def _with_gradient(value: Tensor) -> Tensor:
    """Return a copy with a gradient, as draws have in training; programs may change it in place."""
    return value.detach().requires_grad_().clone()


def _in_dims_of(value: Tensor, removed: Tensor) -> Tensor:
    """Return the entries of a value that are removed in one of the places it broadcasts to."""
    while removed.dim() > value.dim():
        removed = removed.any(0)
    for dim in range(-removed.dim(), 0):
        if value.shape[dim] == 1:
            removed = removed.any(dim, keepdim=True)
    return removed


def _states(name: str) -> str:
    """Return the name of the code for the values of an enumerated site."""
    return f"{name} (states)"


# What a marked run finds.


class Read(NamedTuple):
    """
    A value that Python reads.

    :ivar line: the line of the program.
    :ivar sites: the sites whose draws it was computed from.
    :ivar is_branch: whether it is True or False.
    """

    line: str
    sites: frozenset[str]
    is_branch: bool


class DrawDependencies(NamedTuple):
    """
    Direct dependencies on the draws of the guide.

    :ivar factors: the parents of each site's log density with the user's scale and mask, including
        the site itself.
    :ivar masks: the parents of each site's masks.
    :ivar parameters: the ids of the autograd leaves of each site's log density, without those of
        densities of which masks leave no entry.
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

    def with_sums(self, terms: Iterable[Term]) -> DrawDependencies:
        """Add sums over enumerated sites, whose dependencies are those of their members."""
        sums = {t.key: [m.key for m in t.members] for t in terms if t.members}
        return (
            DrawDependencies(*({**part, **_unions(part, sums)} for part in self)) if sums else self
        )


def _unions(
    part: Mapping[FactorKey, frozenset[Any]], sums: Mapping[FactorKey, list[FactorKey]]
) -> dict[FactorKey, frozenset[Any]]:
    return {
        key: frozenset().union(*(part.get(m, frozenset()) for m in members))
        for key, members in sums.items()
        if any(m in part for m in members)
    }


@dataclass(frozen=True)
class MarkedRun:
    """
    The result of a marked run.

    :ivar marks: what operators and Python have done with marked values.
    :ivar marker: what was marked at the sites.
    :ivar terms: the factors whose density can be computed.
    :ivar entries: for each factor, the mask of its density without those of :attr:`whole`.
    :ivar whole: for each factor, the bits that all of its entries have.
    :ivar control: for each factor, those of values that Python has read before.
    :ivar masked: for each site, the bits of its masks.
    :ivar reads: the values that Python code has read.
    :ivar steps: for each factor that jumps with draws, the operators; see :attr:`.Marks.steps`.
    :ivar corners: the operators at which derivatives of densities jump; see
        :attr:`.Marks.corners`.
    :ivar error_alone: for a run with leading dims: the error of one without.
    """

    guide_trace: Trace
    model_trace: Trace
    subsamples: Minibatch
    marks: Marks
    marker: _Marker
    terms: dict[FactorKey, Term]
    entries: dict[FactorKey, Tensor | None]
    whole: dict[FactorKey, int]
    control: dict[FactorKey, int]
    masked: dict[FactorKey, int]
    reads: list[Read]
    steps: dict[FactorKey, frozenset[Step]]
    corners: frozenset[Step]
    error_alone: MarkedRunError | None = None

    @property
    def by_batches(self) -> frozenset[FactorKey]:
        """Return the factors that depend on draws through the statistics of a batch."""
        return frozenset(k for k, bits in self.bits.items() if bits & self.marks.batch_bit)

    @property
    def log_probs(self) -> dict[FactorKey, Tensor]:
        return {key: torch.as_tensor(t.log_prob).detach() for key, t in self.terms.items()}

    @cached_property
    def bits(self) -> dict[FactorKey, int]:
        """Return all bits of each factor."""
        return {
            key: whole | self.control[key] | bits_of(self.entries.get(key))
            for key, whole in self.whole.items()
        }

    def dependencies(self, tracked: frozenset[str]) -> DrawDependencies:
        """Return the dependencies on some of the guide's sites."""
        names, draws = self.marker.names, self.marker.leaves_of_draws
        return DrawDependencies(
            {key: names(bits) & tracked for key, bits in self.bits.items()},
            {key: names(bits) & tracked for key, bits in self.masked.items()},
            {k: _parameters_of(t).difference(draws) for k, t in self.terms.items()},
        )

    def readers_of_masked(self, key: FactorKey) -> list[FactorKey]:
        """Return the model's factors that depend on entries which the masks of a draw remove."""
        bit = self.marker.masked_bits.get(key, 0)
        return [k for k, bits in self.bits.items() if k.program == "model" and bits & bit]

    @cached_property
    def coupled(self) -> dict[FactorKey, frozenset[PlateKey]]:
        """
        Return, for each factor, the plates in which it depends on draws of other elements.

        The key of a sequential plate has the factor's iteration.
        """
        frames = {
            n: plate_frames(s)
            for trace in (self.model_trace, self.guide_trace)
            for n, s in trace.nodes.items()
            if n in self.marker.site_bits
        }
        found = {}
        for key, bits in self.bits.items():
            site = self.site(key)
            plates = set()
            for frame in plate_frames(site):
                if frame.dim is None:
                    others = (f for n in self.marker.names(bits) for f in frames.get(n, ()))
                    meets = any(
                        f.name == frame.name and f.dim is None and f.counter != frame.counter
                        for f in others
                    )
                else:
                    meets = self._meets(key, frame.name, frame.dim, frame.size)
                if meets:
                    plates.add(plate_key(frame))
            if plates:
                found[key] = frozenset(plates)
        return found

    @property
    def mixed(self) -> list[FactorKey]:
        """Return the factors of a batched run that depend on draws of other particles."""
        sizes = [(dim, size) for name, dim, size in self.marker.codes if name == PARTICLE_PLATE]
        return [
            k for k in self.bits if any(self._meets(k, PARTICLE_PLATE, *size) for size in sizes)
        ]

    @property
    def mixed_states(self) -> list[FactorKey]:
        """Return the factors that depend on other values of an enumerated site than their own."""
        names = {n: _states(n) for n in self.marker.site_bits}
        sizes = [key for key in self.marker.codes if key[0] in names.values()]
        return [k for k in self.bits if any(self._meets(k, *size) for size in sizes)]

    def site(self, key: FactorKey) -> Site:
        trace = self.guide_trace if key.program == "guide" else self.model_trace
        site: Site = trace.nodes[key.name]
        return site

    def _meets(self, key: FactorKey, name: str, dim: int, size: int) -> bool:
        """Return whether a factor has bits of other elements than that of each of its entries."""
        codes = self.marker.codes
        others = [c for (n, d, s), c in codes.items() if n == name and (d, s) != (dim, size)]
        if any(self.bits[key] & code.field for code in others):
            return True  # elements of another minibatch
        code = codes.get((name, dim, size))
        if code is None or not self.bits[key] & code.field:
            return False
        mask, whole = self.entries.get(key), (self.whole[key] | self.control[key]) & code.field
        if whole:
            return True
        if mask is None:
            return False
        if mask.dim() - 1 < -dim or mask.shape[dim] != size:
            return True
        own = code.mask(dim, mask.shape[0], mask.device)
        all_bits = mask_of_bits(code.field, mask.shape[0], torch.empty((), device=mask.device))
        all_bits = all_bits.reshape(-1, *[1] * (mask.dim() - 1))
        own = own.reshape(mask.shape[0], *[1] * (mask.dim() - own.dim()), *own.shape[1:])
        return bool((mask & all_bits & ~own).any())


def _parameters_of(term: Term) -> frozenset[int]:
    counted = masked_entries(term.site)
    is_empty = counted is not None and not bool(counted.any())
    return frozenset() if is_empty else _leaves_of(term.log_prob)


def _leaves_of(log_prob: object) -> frozenset[int]:
    if not isinstance(log_prob, Tensor) or not log_prob.requires_grad:
        return frozenset()
    return frozenset(autograd_leaves(log_prob))


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


# Marked runs.


class MarkedRunError(Exception):
    """The programs failed in a marked run; ``__cause__`` is their error."""


def _line() -> str | None:
    """Return the line of the program that is running; None for reads that decide nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_core(frame.f_code):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        is_check = name == "__init__" and file.startswith(_DISTRIBUTIONS)
        if name in VALIDATION or is_check:
            return None  # a check of arguments, which stops a program or has no effect
        frame = frame.f_back
    if frame is not None and in_assertion(frame):
        return None
    return program_line(sys._getframe(1))


_DISTRIBUTIONS = tuple(
    module.__file__.rpartition("__init__")[0]
    for module in (torch.distributions, pyro.distributions)
    if module.__file__
)


def marked_run(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    *,
    values: Mapping[str, Tensor] | None = None,
    sample_fn: SampleFn | None = None,
    leading: LeadingDims = ALONE,
    replayed: Sequence[Draw] = (),
    other_branch: Callable[[frozenset[str]], bool] | None = None,
) -> MarkedRun:
    """
    Run both programs with marked draws, and restore all state afterwards.

    :param subsamples: the minibatch.
    :param values: values of random sites, by name.
    :param sample_fn: returns values of the other random sites.
    :param leading: the leading dims, with the particles' plates.
    :param replayed: random numbers outside sample sites of a single run, which the last particle of
        this run uses.
    :param other_branch: called with the sites behind a condition: whether the programs take its
        other branch.
    :raises MarkedRunError: from the programs' error.
    """
    marks = Marks(
        _line, replayed, lambda bits: bool(other_branch and other_branch(marker.names(bits)))
    )
    marks.generators = [*programs.read.torch_generators.values()]
    marker = _Marker(marks)

    def draw(msg: Message) -> Tensor | None:
        marks.at_site = True  # the marker, an outer handler, is not called yet
        value = (values or {}).get(msg["name"])
        if value is not None:
            return _in_shape(value, msg["fn"].shape())
        return None if sample_fn is None else sample_fn(msg)

    substitutes = Substitutes(Minibatch(subsamples), {}, draw)
    with (
        programs.restored(),
        dist.validation_enabled(False),  # it would read values
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        try:
            before = GeneratorStates(programs.read, on_host=True)
            with marker, marks:
                traces = run_pair(programs, substitutes, leading)
            marker.draws_on_host = bool(before.moved())
            with marks:
                marks.at_site = True  # what densities draw is not drawn by the programs
                result = _result(marker, traces, substitutes.subsamples)
            marks.free()
            return result
        except Exception as error:
            raise MarkedRunError(f"{type(error).__name__}: {error}") from error


def _result(marker: _Marker, traces: tuple[Trace, Trace], subsamples: Minibatch) -> MarkedRun:
    marks, guide_trace, model_trace = marker.marks, *traces
    sites = sum(marker.site_bits.values())
    terms: dict[FactorKey, Term] = {}
    entries: dict[FactorKey, Tensor | None] = {}
    whole: dict[FactorKey, int] = {}
    control: dict[FactorKey, int] = {}
    masked: dict[FactorKey, int] = {}
    makes: tuple[tuple[str, Trace, Callable[[Site], Term]], ...] = (
        ("model", model_trace, model_term),
        ("guide", guide_trace, guide_term),
    )
    after = marks.control
    for program, trace, make in makes:
        for name, site in trace.nodes.items():
            if not is_scored(site):
                continue
            key, in_guide = FactorKey(program, name), program == "guide"
            controls = marker.control.get(name) or [after]
            marks.control = controls[0 if in_guide else -1]
            masked[key] = marks.bits(masks_of(site))
            upstream = marker.upstream.get(name) if in_guide else None
            try:
                terms[key] = make(site)
                log_prob = torch.as_tensor(terms[key].log_prob)
                with marks.paused():
                    entries[key] = _counted(site, marks.mask(log_prob))
                    entries[key] = _around(marks, site, entries[key], log_prob)
            except ValueError:
                entries[key] = upstream  # a flow without an inverse
            own = (bits_of(upstream) & sites) | marker.site_bits.get(name, 0) if in_guide else 0
            control[key] = marks.control
            whole[key] = own | (0 if key in terms else marks.bits(site["scale"]) | masked[key])
    marks.control = after
    reads = [Read(r.line, marker.names(r.bits), r.is_branch) for r in marks.reads]
    return MarkedRun(
        guide_trace,
        model_trace,
        subsamples,
        marks,
        marker,
        terms,
        entries,
        whole,
        control,
        masked,
        [r for r in reads if r.sites],
        {key: found for key, t in terms.items() if (found := marks.steps(t.log_prob))},
        frozenset[Step]().union(*(marks.corners(t.log_prob) for t in terms.values())),
    )


def _counted(site: Site, mask: Tensor | None) -> Tensor | None:
    """Return a copy of a density's marks, without those of entries that masks remove."""
    counted = None if mask is None else masked_entries(site)
    if mask is None or counted is None:
        return None if mask is None else mask.clone()
    return mask * torch.as_tensor(counted, device=mask.device)


def _around(marks: Marks, site: Site, mask: Tensor | None, log_prob: Tensor) -> Tensor | None:
    """Return the marks of a density with those of the scale and the masks around it."""
    for value in (site["scale"], *masks_of(site)):
        part = marks.mask(value) if isinstance(value, Tensor) else None
        if part is not None:
            shape = torch.broadcast_shapes(part.shape[1:], log_prob.shape)
            part = part.reshape(-1, *[1] * (len(shape) - part.dim() + 1), *part.shape[1:])
            part = part.expand(-1, *shape)
            mask = part if mask is None else mask | part
    return mask


def single_values(run: Run) -> dict[str, Tensor]:
    """Return the latents of one particle of a run: of the last one."""
    nodes = run.guide_trace.nodes
    return {
        name: last_entry(value, run.nesting + nodes[name]["fn"].event_dim)
        for name, value in run.latents.items()
    }


def _in_shape(value: Tensor, shape: torch.Size) -> Tensor:
    """
    Return a draw of a run with leading dims in the shape that its site has alone.

    Left of a site's own plates, such a draw has dims of size one, which an index sees.
    """
    if value.numel() != shape.numel():
        return value
    return changed_draw(lambda v: as_shape(v, shape), value)


def last_entry(value: Tensor, inner: int) -> Tensor:
    """Return the last entry of all dims to the left of the ``inner`` last ones."""
    count = max(0, value.dim() - inner)
    return changed_draw(lambda v: v[(-1,) * count] if count else v, value)


def marked(programs: Programs, run: Run) -> MarkedRun:
    """
    Return the marked run of programs at the latents of a run, made once for each call and form.

    :raises MarkedRunError: from the programs' error.
    """
    runs: dict[Hashable, MarkedRun] = programs.marked_runs
    if run.signature not in runs:
        runs[run.signature] = _marked(programs, run)
    return runs[run.signature]


def _marked(programs: Programs, run: Run) -> MarkedRun:
    try:
        found = marked_run(programs, run.subsamples, values=single_values(run))
        return _without_own_branches(programs, found)
    except MarkedRunError as error:
        if run.leading is None:
            raise
        # Programs may rely on leading dims (vectorize_particles=True).
        none = frozenset[str](), frozenset[str]()
        leading = particle_plates(run.mode, run.leading, -run.nesting - 1, none)
        found = marked_run(programs, run.subsamples, leading=leading)
        return replace(found, error_alone=error)


def checked_marked_run(programs: Programs, strict_enumeration: bool) -> Run:
    """
    Return a checked run without leading dims, and keep its marks for :func:`marked`.

    :raises ValueError: for a model and a guide that do not fit together.
    """
    try:
        found = marked_run(programs, {}, sample_fn=drawn_inside)
        if found.marks.draws:
            # A guide may have been set up, with draws that later runs do not repeat.
            found = marked_run(programs, {}, sample_fn=drawn_inside)
    except MarkedRunError:
        return checked_run(programs, strict_enumeration)  # raises the error of the programs
    traces = found.guide_trace, found.model_trace
    terms = tuple(t for t in found.terms.values() if not (t.in_guide and observes_data(t.site)))
    is_whole = found.terms.keys() == found.whole.keys()
    run = checked(*traces, found.subsamples, strict_enumeration, terms if is_whole else None)
    programs.marked_runs[run.signature] = _without_own_branches(programs, found)
    return run


def _without_own_branches(programs: Programs, found: MarkedRun) -> MarkedRun:
    """
    Return a marked run in which no datum of a sequential plate depends on the branches of another.

    Python code in a loop may branch on the latents of the datum. To find whether this decides about
    other data, too, the programs run again with the other branches at some data, and the densities
    of the other data are compared, for subsets that separate each pair of data. If they change, or
    if a value was read that is not a condition, the marked run is returned as it is.
    """
    iterations = {n: _iterations(s) for n, s in found.guide_trace.nodes.items() if is_latent(s)}
    places: dict[frozenset[PlateKey], int] = {}
    for read in found.reads:
        own = frozenset[PlateKey]().union(*(iterations.get(n, _NONE) for n in read.sites))
        if not read.is_branch or not own or any(iterations.get(n) != own for n in read.sites):
            return found
        places.setdefault(own, len(places))
    if not places:
        return found
    values = {n: s["value"] for n, s in found.guide_trace.nodes.items() if n in iterations}
    count, code = codes(max(2, len(places)))
    for bit in range(count):
        chosen = {own for own, i in places.items() if int(code[i]) >> bit & 1}

        def other_branch(sites: frozenset[str], chosen: Any = chosen) -> bool:
            return any(iterations.get(n) in chosen for n in sites)

        try:
            other = marked_run(
                programs,
                found.subsamples,
                values=values,
                replayed=found.marks.draws,
                other_branch=other_branch,
            )
        except MarkedRunError:
            return found
        for key in found.terms.keys() | other.terms.keys():
            run = found if key in found.terms else other
            if _iterations(run.site(key)) in chosen:
                continue
            before, after = found.log_probs.get(key), other.log_probs.get(key)
            if before is None or after is None or not torch.equal(before, after):
                return found
    bits = [*found.marker.site_bits.items()]
    bits += [(key.name, bit) for key, bit in found.marker.masked_bits.items()]
    own_control = {
        key: sum(
            bit
            for n, bit in bits
            if control & bit and iterations.get(n) == _iterations(found.site(key))
        )
        for key, control in found.control.items()
    }
    reads = [r for r in found.reads if not r.is_branch]
    return replace(found, control=own_control, reads=reads)


_NONE: frozenset[PlateKey] = frozenset()


def _iterations(site: Site) -> frozenset[PlateKey]:
    """Return the iterations of the sequential plates around a site."""
    return frozenset(plate_key(f) for f in plate_frames(site) if f.dim is None)


def dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> DrawDependencies:
    """
    Return the dependencies of the programs of a run on some sites of the guide.

    Sums over enumerated sites have those of their members. Programs that fail in the marked run
    have no entries: their factors are treated as depending on every site.
    """
    try:
        return marked(programs, run).dependencies(tracked).with_sums(run.terms)
    except MarkedRunError:
        return DrawDependencies({}, {}, {})
