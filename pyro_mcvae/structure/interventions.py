"""
Interventions: find the densities that change when chosen latents do.

Latents are set to NaN. This needs no tolerance, and no particular weights: 0 times NaN is NaN, so a
zero-initialized layer or coefficient does not hide a dependence. A latent that cannot be NaN
(integers, programs that branch on its value) gets another value of its support.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import ALONE, Leading
from pyro_mcvae.programs.probing import Probe, ProgramError, perturbed, probe, probe_model, probing
from pyro_mcvae.programs.run import Programs, Run, is_messenger
from pyro_mcvae.programs.sites import (
    changed_draw,
    elementwise,
    is_delta,
    is_random,
    is_record,
    known_support,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, Message, PlateKey, Site, plate_frames, plate_key
from pyro_mcvae.structure.provenance import Read, ReadRecorder, reads_of_latents

Values = dict[str, Tensor]


def separating_subsets(size: int) -> Iterator[Tensor]:
    """
    Yield subsets of ``range(size)`` that separate each ordered pair of elements.

    For each pair, one subset has the first element and not the second. Each element is in half of
    the subsets, and no two elements are in the same half (Sperner). These are the fewest possible
    subsets, 9 for 100 elements. Each is a boolean tensor of shape ``[size]``.
    """
    count = next(r for r in itertools.count(2) if math.comb(r, r // 2) >= size)
    codes = itertools.islice(itertools.combinations(range(count), count // 2), size)
    member = torch.zeros(count, size, dtype=torch.bool)
    for element, code in enumerate(codes):
        member[list(code), element] = True
    yield from member


def random_half(shape: tuple[int, ...]) -> Tensor:
    """Return a random half of the entries of a shape, at least one: booleans."""
    size = math.prod(shape)
    half = torch.zeros(size, dtype=torch.bool)
    half[_random().sample(range(size), max(1, size // 2))] = True
    return half.reshape(shape)


def _random() -> random.Random:
    """Return a generator seeded by PyTorch's random state, which stays unchanged."""
    with torch._C.DisableTorchFunction():
        return random.Random(torch.get_rng_state().numpy().tobytes())


@contextmanager
def reseeded() -> Iterator[None]:
    """Make draws differ from those of a run that began with the same random state."""
    with isolated():
        seed = _random().getrandbits(31)
        # Like torch.manual_seed, without the stack trace that it formats for each device.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


def other_value(site: Site) -> Tensor:
    """Return another value for each element: a second draw, or the next discrete value."""
    value, support = site["value"], elementwise(known_support(site["fn"]))
    if support is constraints.boolean:
        return value.logical_not().to(value.dtype)
    if support is constraints.one_hot:
        return value.roll(1, -1)
    if isinstance(support, _INTERVAL):
        low, size = support.lower_bound, support.upper_bound - support.lower_bound + 1
        return (low + (value - low + 1) % size).to(value.dtype)
    if isinstance(support, _COUNTS):
        return value + 1
    try:
        drawn: Tensor = site["fn"](*site["args"], **site["kwargs"])
    except NotImplementedError:
        return value  # the distribution cannot draw; a handler set the value
    return drawn


_INTERVAL = type(constraints.integer_interval(0, 1))
_COUNTS = type(constraints.nonnegative_integer)


def intervene(
    sites: Mapping[str, Site],
    values: Mapping[str, Tensor],
    other_values: Mapping[str, Tensor],
    where: Mapping[str, Tensor],
    undefined: bool,
) -> Values:
    """
    Change some entries of latents.

    :param values: each latent's value.
    :param other_values: another value of each.
    :param where: the changed entries of each, broadcast with the batch dims of its value.
    :param bool undefined: whether floating-point entries become NaN, instead of another value.
    """
    changed = dict(values)
    for name, chosen in where.items():
        value, new = values[name], other_values[name]
        if undefined and value.is_floating_point():
            new = changed_draw(lambda v: torch.full_like(v, math.nan), value)
        if value.shape != new.shape:
            continue
        events = sites[name]["fn"].event_dim
        at = chosen.to(value.device).reshape(chosen.shape + (1,) * events)
        changed[name] = changed_draw(lambda a, b, at=at: torch.where(at, a, b), new, value)
    return changed


# Rounding of entries next to NaN: vectorized functions treat such blocks specially.
_ROUNDING = 2**10


def differing(before: Tensor, after: Tensor, undefined: bool) -> Tensor:
    """
    Return the mask of changed entries of a log density; all of them if the shape has changed.

    :param bool undefined: whether entries were set to NaN, next to which others may be rounded
        differently. Otherwise the comparison is bitwise: kernels and shapes are the same.
    """
    if before.shape != after.shape:
        return torch.ones_like(before, dtype=torch.bool)
    changed = before.isnan() != after.isnan()
    if not undefined:
        return changed | ((before != after) & ~before.isnan())
    allowed = _ROUNDING * torch.finfo(before.dtype).eps * before.abs().clamp(min=1.0)
    far = (before != after) & ~((before - after).abs() <= allowed)
    return changed | (far & ~before.isnan())


# Untraced draws of a model, and the data that share one of them.


class _Untraced(Messenger):
    """Records the plates of untraced draws."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[frozenset[CondIndepStackFrame]] = []

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["infer"].get("_do_not_trace") and is_random(msg):
            self.frames.append(plate_frames(msg))


def has_shared_noise(programs: Programs, run: Run) -> bool:
    """
    Return whether elements of a plate share an untraced draw, as with ``ConjugateReparam``.

    :param run: a run of the programs; if no computed value is scored, there is no such draw.
    """
    sites = [t.site for t in run.terms if not t.in_guide]
    if not any(s["is_observed"] and is_delta(s["fn"]) and not is_record(s) for s in sites):
        return False
    with probing(programs), _Untraced() as noise, suppress(ProgramError):
        probe(programs, run.subsamples)
    plates = frozenset().union(*map(plate_frames, sites))
    return not all(plates <= frames for frames in noise.frames)


# Plates whose elements depend on each other's latents, by factor.

Links = dict[FactorKey, frozenset[PlateKey]]


class DependentPlates(NamedTuple):
    """
    Plates whose elements depend on each other's latents.

    :ivar plates: for each factor, the plates around it in which it depends on latents of other
        elements.
    :ivar reads: reads of latents in such a plate by Python code, on which every factor may depend.
        A branch in a sequential plate is tested like other code.
    """

    plates: Links
    reads: list[Read]


def find_dependent_plates(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    thorough: bool = True,
    leading: Callable[[], Leading] = lambda: ALONE,
    at: Mapping[str, Tensor] | None = None,
) -> DependentPlates:
    """
    Find, for each factor, the plates in which it depends on latents of other elements.

    For a sequential plate the key has the factor's iteration. Batch normalization does not count:
    its purpose is to let data depend on each other.

    :param subsamples: the minibatch.
    :param bool thorough: separate every pair of elements, instead of a random half and its
        complement.
    :param leading: makes the leading dims of each run, for programs that need them.
    :param at: initial latents, on which the sites of the programs may depend.
    :raises ProgramError: for programs that fail at other latents.
    """
    with probing(programs), ReadRecorder() as recorder:
        first = probe(programs, subsamples, at, leading=leading())
    latents = {n: s for n, s in first.guide_trace.nodes.items() if is_random(s)}
    with reseeded():
        other_values = {n: other_value(s) for n, s in latents.items()}
        halves = [_Subset(p, random_half((p[0].size,))) for p in _plates(latents)]
    if not halves:
        return DependentPlates({}, [])
    reads = reads_of_latents(programs, first.subsamples, frozenset(latents), recorder.reads)
    drawn = at is None or not latents.keys() <= at.keys()
    experiment = _Experiment(programs, first, other_values, bool(reads), leading, drawn)
    links = _plates_of_reads(first, latents, reads)
    reads = [r for r in reads if any(_in_one_run(latents[n]) for n in r.sites & latents.keys())]
    for half in halves:
        if thorough:
            subsets = separating_subsets(half.frames[0].size)
            experiment.run(links, [half._replace(chosen=s) for s in subsets])
            # NaN hides behind comparisons.
            experiment.run(links, [half, half._replace(chosen=~half.chosen)], undefined=False)
        else:
            experiment.run(links, [half])
    return DependentPlates(links, reads)


class _Subset(NamedTuple):
    """
    Chosen elements of one plate.

    :ivar frames: the plate, or the iterations of a sequential one.
    :ivar chosen: the mask of its chosen elements or iterations.
    """

    frames: tuple[CondIndepStackFrame, ...]
    chosen: Tensor

    def where(self, latents: Mapping[str, Site], values: Values) -> Values:
        """Return the mask of the entries of each latent in the chosen elements."""
        masks = {}
        for name, site in latents.items():
            frame = next((f for f in self.frames if f in plate_frames(site)), None)
            if frame is None:
                continue
            if frame.dim is None:
                if self._has_iteration(frame):
                    masks[name] = torch.ones((), dtype=torch.bool)
            elif values[name].dim() >= site["fn"].event_dim - frame.dim:
                masks[name] = self.chosen.reshape((-1,) + (1,) * (-frame.dim - 1))
        return masks

    def outside(self, term: Term, changed: Tensor) -> bool:
        """Return whether a factor has changed at elements that were not chosen."""
        frame = next((f for f in self.frames if f in plate_frames(term.site)), None)
        if frame is None:
            return False
        if frame.dim is None:
            return not self._has_iteration(frame) and bool(changed.any())
        if changed.dim() < -frame.dim or changed.shape[frame.dim] != frame.size:
            return False
        at = (~self.chosen).to(changed.device).nonzero().squeeze(-1)
        return bool(changed.index_select(frame.dim, at).any())

    def key_of(self, term: Term) -> PlateKey:
        return plate_key(next(f for f in self.frames if f in plate_frames(term.site)))

    def _has_iteration(self, frame: CondIndepStackFrame) -> bool:
        return bool(self.chosen[plate_key(frame).counter - 1])


def _plates(latents: Mapping[str, Site]) -> list[tuple[CondIndepStackFrame, ...]]:
    """Return the plates around latents; all iterations of a sequential one together."""
    frames = sorted({f for s in latents.values() for f in plate_frames(s)}, key=str)
    plates = [(f,) for f in frames if f.dim is not None]
    for name in sorted({f.name for f in frames if f.dim is None}):
        plates.append(tuple(f for f in frames if f.dim is None and f.name == name))
    return [p for p in plates if p[0].size > 1]


def _in_one_run(site: Site) -> bool:
    """Return whether a site has its values at several elements of a plate in one tensor."""
    return any(f.dim is not None for f in plate_frames(site))


def _plates_of_reads(first: Probe, latents: Mapping[str, Site], reads: list[Read]) -> Links:
    """Return the plates of latents that Python code reads: factors in them may depend on all."""
    names = frozenset().union(*(r.sites for r in reads))
    plates = {f for n in names & latents.keys() for f in plate_frames(latents[n])}
    links = {}
    for key, term in first.terms.items():
        keys = {plate_key(f) for f in plate_frames(term.site) & plates if f.dim is not None}
        if keys:
            links[key] = frozenset(keys)
    return links


class _Experiment:
    """
    Runs of a model and guide at changed latents, compared with a run at the original ones.

    :param first: a run of both programs.
    :param other_values: another value of each random site of the guide.
    :param reads: whether Python code reads their values; NaN could then change its control flow.
    :param drawn: whether ``first`` drew latents. Otherwise it is the run at the original ones.
    """

    def __init__(
        self,
        programs: Programs,
        first: Probe,
        other_values: Values,
        reads: bool,
        leading: Callable[[], Leading],
        drawn: bool,
    ) -> None:
        self._programs, self._subsamples, self._leading = programs, first.subsamples, leading
        self._first, self._other_values = first, other_values
        self._latents = {name: first.guide_trace.nodes[name] for name in other_values}
        self._values: Values = {name: site["value"] for name, site in self._latents.items()}
        smooth = [v.is_floating_point() for v in self._values.values()]
        self._undefined, self._discrete = any(smooth) and not reads, not all(smooth)
        # With a single latent, only the model's factors are tested.
        several = len(other_values) > 1
        self._guide = None if several or is_messenger(programs) else first.guide_trace
        self._before = {} if drawn else {False: self._tested(first.terms)}
        self._unstable: dict[bool, frozenset[FactorKey]] = {}

    def run(self, links: Links, subsets: list[_Subset], undefined: bool = True) -> None:
        """
        Add the plates of factors that depend on chosen elements from outside them.

        :param bool undefined: whether latents may become NaN.
        """
        if undefined and self._undefined:
            try:
                return self._add(links, subsets, True, self._discrete)
            except ProgramError:
                self._undefined = False  # programs that reject NaN
        # With generic parameters, a zero-initialized layer does not hide a dependence.
        try:
            self._add(links, subsets, False, True)
        except ProgramError:
            self._add(links, subsets, False, False)
        return None

    def _add(self, links: Links, subsets: list[_Subset], undefined: bool, generic: bool) -> None:
        with perturbed(self._programs) if generic else nullcontext():
            for subset in subsets:
                self._add_subset(links, subset, undefined, generic)

    def _add_subset(self, links: Links, subset: _Subset, undefined: bool, generic: bool) -> None:
        where = subset.where(self._latents, self._values)
        moved = intervene(self._latents, self._values, self._other_values, where, undefined)
        before, after = self._baseline(generic), self._terms(moved)
        for key, term in before.items():
            old = term.log_prob.detach()
            new = after[key].log_prob.detach() if key in after else old.new_zeros(1, *old.shape)
            hit = subset.outside(term, differing(old, new, undefined))
            if hit and self._is_unstable(key, generic):
                hit = old.shape == new.shape and subset.outside(term, old.isnan() ^ new.isnan())
            if hit:
                links[key] = links.get(key, frozenset()) | {subset.key_of(term)}

    def _tested(self, terms: Mapping[FactorKey, Term]) -> dict[FactorKey, Term]:
        """Return the tested factors: with a single latent, only the model's."""
        return {key: t for key, t in terms.items() if len(self._values) > 1 or not t.in_guide}

    def _baseline(self, generic: bool) -> dict[FactorKey, Term]:
        if generic not in self._before:
            self._before[generic] = self._terms(self._values)
        return self._before[generic]

    def _is_unstable(self, key: FactorKey, generic: bool) -> bool:
        """Return whether a factor varies between runs, for example by atomic additions."""
        if generic not in self._unstable:
            second, before = self._terms(self._values), self._before[generic]
            self._unstable[generic] = frozenset(
                k
                for k, t in before.items()
                if k not in second or bool(differing(t.log_prob, second[k].log_prob, False).any())
            )
        return key in self._unstable[generic]

    def _terms(self, values: Values) -> dict[FactorKey, Term]:
        """Return the tested factors at some latents."""
        with probing(self._programs):
            leading = self._leading()
            if self._guide is None:
                terms = probe(self._programs, self._subsamples, values, leading=leading).terms
            else:
                terms = probe_model(self._programs, self._guide, self._subsamples, values, leading)
        return self._tested(terms)
