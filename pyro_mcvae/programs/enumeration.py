"""Enumerate and sum discrete latents of a model that the guide does not draw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, NamedTuple

import torch
from pyro import distributions as dist
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.einsum.adjoint import require_backward
from pyro.ops.rings import LogRing, SampleRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions.constraints import Constraint

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import ENUMERATE_DIM, dims_of
from pyro_mcvae.ops.tensors import guard
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.supports import Categories, support_of
from pyro_mcvae.programs.terms import Term, model_term, scored
from pyro_mcvae.programs.types import (
    PARTICLE_PLATE,
    Distribution,
    Message,
    Site,
    SiteError,
    first_line,
    is_subsampled,
    plate_frames,
)

# Enumerate the discrete latents of a model that the guide does not draw, in parallel.
#
# Pyro's enumeration gives each of them a separate batch dim, to the left of the plates' and of
# the particles'; :mod:`~pyro_mcvae.programs.enumeration` sums over them.


class StandIn(dist.TorchDistribution):
    """Passes values to Pyro's enumeration instead of a distribution's support."""

    arg_constraints: ClassVar[dict[str, Constraint]] = {}

    def __init__(self, fn: Distribution, value: Tensor) -> None:
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.value = value

    def enumerate_support(self, expand: bool = False) -> Tensor:
        return self.value


class ModelEnumeration(EnumMessenger):
    """
    Gives a model's enumerated sites all of their values.

    :param guide_trace: the guide's draws.
    :param first_available_dim: the first free batch dim; None to continue after the guide's dims.
    :raises SiteError: for a site that is not in the guide, if its kind of enumeration is not
        supported, or if it has the dim of a site that it depends on.
    """

    def __init__(self, guide_trace: Trace, first_available_dim: int | None = None) -> None:
        super().__init__(first_available_dim)
        self._drawn = guide_trace.nodes

    def _pyro_sample(self, msg: Message) -> None:
        undrawn = not msg["is_observed"] and msg["name"] not in self._drawn
        fn = msg["fn"]
        if undrawn:
            _check_kind(msg)
            if msg["infer"].get("enumerate") and not getattr(fn, "has_enumerate_support", True):
                msg["fn"] = StandIn(fn, _all_values(msg["name"], fn))
        super()._pyro_sample(msg)
        msg["fn"] = fn
        if undrawn and is_state(msg):
            _check_dim(msg)


class StateMessenger(ModelEnumeration):
    """
    Gives a model the guide's draws, and its enumerated sites all of their values.

    It combines Pyro's ``replay`` and enumeration in one handler. It does not change the annotations
    of the guide or the user, because chains run a model many times on one trace.

    :param guide_trace: the draws.
    :param int first_available_dim: the first batch dim that belongs to no plate and no particles.
    :raises RuntimeError: the model's error, with the enumerated sites it may not broadcast over.
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
                f"side, in dims to the left of all plates, and has to broadcast over them. Expand "
                f"concatenated tensors to one shape (torch.broadcast_shapes), index by "
                f"Vindex(table)[..., y], and count batch dims from the right (dim=-1). Or draw the "
                f"site in the guide"
            ) from error


# The annotations that enumeration adds to a site.
_OF_A_RUN = ("enumerate", ENUMERATE_DIM, compat.DIM_TO_ID)


def _check_kind(msg: Message) -> None:
    kind, draws = msg["infer"].get("enumerate"), msg["infer"].get("num_samples")
    if kind == "sequential" or (kind == "parallel" and draws is not None):
        raise SiteError(
            f"site '{msg['name']}' of the model is marked for enumeration ({kind}, num_samples="
            f"{draws}), but only exact sums in parallel are supported: mark it "
            f"infer={{'enumerate': 'parallel'}}, or draw it in the guide"
        )


def _all_values(name: str, fn: Distribution) -> Tensor:
    """Return the values of a distribution that Pyro does not list, such as those of vectors."""
    support = support_of(fn)
    if isinstance(support, Categories):
        return support.all_values().value
    why = "no finite list of values" if support is None else support.too_many
    raise SiteError(
        f"site '{name}' of the model is marked for enumeration, but has {why}: draw it in the "
        f"guide, or declare independent variables in a plate instead of to_event"
    )


def _check_dim(msg: Message) -> None:
    dim, batch = msg["infer"][ENUMERATE_DIM], msg["fn"].batch_shape
    if len(batch) >= -dim and batch[dim] != 1:
        raise SiteError(
            f"Enumeration dim conflict at site '{msg['name']}' of the model: it depends on an "
            f"enumerated site that its pyro.markov has forgotten. Try increasing pyro.markov "
            f"history size: history=k remembers the sites of k steps before"
        )


def is_state(site: Site) -> bool:
    """Return whether a scored site of a model is enumerated, with its values in a batch dim."""
    return ENUMERATE_DIM in site["infer"]


def has_unsummed_states(guide_trace: Trace, model_trace: Trace) -> bool:
    """Return whether a model that drew all of its sites has sites that must be summed."""
    return any(
        not site["is_observed"]
        and site["infer"].get("enumerate") == "parallel"
        and not is_state(site)
        and site["name"] not in guide_trace
        for site in scored(model_trace)
    )


def support_of_state(site: Site) -> Tensor:
    """Return the values of an enumerated site: ``[S, *event]``."""
    value, event_dim = site["value"], site["fn"].event_dim
    dim = site["infer"][ENUMERATE_DIM] - event_dim
    for axis in range(value.dim() - event_dim):
        if axis != value.dim() + dim:
            value = value.narrow(axis, 0, 1)
    return value.reshape(-1, *value.shape[value.dim() - event_dim :])


# The sum over the discrete latents of a model that the guide does not draw.


class StateFactor(NamedTuple):
    """
    A factor that depends on enumerated sites.

    :ivar site: the site.
    :ivar log_prob: its log density, packed, masked but not scaled.
    :ivar plates: the symbols of the plates around it.
    """

    site: Site
    log_prob: Tensor
    plates: frozenset[str]

    @property
    def dims(self) -> str:
        """Return the symbols of the dims of ``log_prob``."""
        return dims_of(self.log_prob)


class StateSum(NamedTuple):
    """
    The result of a sum over connected enumerated sites.

    :ivar members: the indices of its factors.
    :ivar log_prob: packed, not scaled.
    :ivar plates: the symbols of the plates that all members share.
    :ivar scale: the common scale of all members, which multiplies the logarithm.
    """

    members: tuple[int, ...]
    log_prob: Tensor
    plates: frozenset[str]
    scale: float | Tensor


def plates_of(site: Site, trace: Trace) -> frozenset[str]:
    """Return the symbols of the plates around a site of a trace whose dims have symbols."""
    frames = site["cond_indep_stack"]
    return frozenset(
        trace.plate_to_symbol[f.name] for f in frames if f.vectorized and f.name != PARTICLE_PLATE
    )


def pack(site: Site, program: str, value: Tensor, sums: bool = True) -> Tensor:
    """
    Pack a batch-shaped tensor of a site, so that each dim has a symbol.

    :param bool sums: whether dims outside plates may be summed. Those of an enumerated site are
        never summed: it has one value for each of their elements.
    :raises ValueError: naming a site with batch dims that lie in no plate.
    """
    if sums and site["infer"].get(ENUMERATE_DIM) is None:
        symbols = site["infer"][compat.DIM_TO_SYMBOL]
        # States lie to the left of the plates. If a program moves them there, nothing is summed.
        states = symbols.keys() - {f.dim for f in site["cond_indep_stack"]}
        first = max(-value.dim(), max(states, default=-value.dim() - 1) + 1)
        unnamed = [d for d in range(first, 0) if value.shape[d] != 1 and d not in symbols]
        value = value.sum(unnamed, keepdim=True) if unnamed else value
    try:
        return packed.pack(value, site["infer"][compat.DIM_TO_SYMBOL])
    except ValueError as error:
        raise ValueError(
            f"site '{site['name']}' of the {program} has batch shape {tuple(value.shape)}, and "
            f"some of its dims lie in no plate: enclose it in pyro.plate(...), or make them an "
            f"event by .to_event(...)"
        ) from error


def sum_states(
    factors: Sequence[StateFactor], states: Iterable[str], make_ring: type[LogRing] = LogRing
) -> Iterator[StateSum]:
    """
    Sum over enumerated sites, inside the logarithm, once for each set of connected factors.

    :param states: the symbols of the enumerated sites.
    :param make_ring: the ring for Pyro's algorithm.
    :raises SiteError: for factors of one sum with different scales, for a sum over a subsampled
        plate, and for a sum over crossed plates.
    """
    dims = set(states)
    sizes: dict[str, int] = {}
    for f in factors:
        sizes.update(zip(f.dims, f.log_prob.shape, strict=True))
    ring = make_ring(dim_to_size=sizes)
    for members in _connected(factors, dims):
        inside = [factors[i] for i in members]
        scale = _common_scale([f.site for f in inside])
        tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
        for f in inside:
            tree.setdefault(f.plates, []).append(f.log_prob)
        try:
            ((plates, (total,)),) = contract_tensor_tree(tree, dims, ring=ring).items()
        except NotImplementedError as error:
            # A run with other dims would not help.
            raise _crossed([f.site for f in inside]) from error
        yield StateSum(members, total, plates, scale)


def inside_sum(site: Site, is_summed: bool) -> Tensor:
    """Return the log density of a model's site inside a sum, masked but not scaled."""
    log_prob = sites.unscaled_log_prob(site, "model")
    # A mask removes factors from the sum, but no states: the remaining probabilities sum to one.
    return log_prob if is_summed else sites.unscaled_masked(site, log_prob)


def _connected(factors: Sequence[StateFactor], dims: set[str]) -> Iterator[tuple[int, ...]]:
    """Yield the factors that share enumerated sites, directly or through others."""
    groups: list[tuple[set[str], list[int]]] = []
    for i, f in enumerate(factors):
        group_dims, members = dims.intersection(f.dims), [i]
        disjoint = []
        for group in groups:
            if group_dims.isdisjoint(group[0]):
                disjoint.append(group)
            else:
                group_dims, members = group_dims | group[0], group[1] + members
        groups = [*disjoint, (group_dims, members)]
    return (tuple(sorted(members)) for _, members in groups)


def _crossed(members: Sequence[Site]) -> SiteError:
    """Return the error for sites in crossed plates that meet in one factor."""
    frames = {s["name"]: [f.name for f in plate_frames(s) if f.vectorized] for s in members}
    inside = ", ".join(f"'{n}' in {' and '.join(sorted(p))}" for n, p in frames.items() if p)
    return SiteError(
        f"Expected tree-structured plate nesting, but enumerated sites of the model in crossed "
        f"plates meet in one factor ({inside}), whose exact sum needs all combinations. Draw the "
        f"sites of one of the plates in the guide. Or make this plate sequential, for i in "
        f"pyro.plate(...), at a cost that is exponential in its size"
    )


def _common_scale(members: Sequence[Site]) -> float | Tensor:
    """Return the common scale of all factors of a sum, which multiplies its logarithm."""
    shared = frozenset.intersection(*map(plate_frames, members))
    for site in members:
        for f in plate_frames(site) - shared:
            if is_subsampled(f):
                raise SiteError(
                    f"site '{site['name']}' of the model lies in plate '{f.name}', and depends on "
                    f"an enumerated site outside it, whose sum needs all {f.full_size} data, "
                    f"but the plate is subsampled ({f.size}). Pass the full data, put the "
                    f"enumerated site into the plate, or draw it in the guide"
                )
    scales = {s["name"]: s["scale"] for s in members}
    common = next(iter(scales.values()))
    if not all(_is_same_scale(common, s) for s in scales.values()):
        raise SiteError(
            f"Expected all enumerated sample sites to share a common poutine.scale, but "
            f"{', '.join(map(repr, scales))} of the model, which depend on the same one, have "
            f"{list(scales.values())}: put one number around all of them, subsampled plates too"
        )
    return common


def _is_same_scale(common: float | Tensor, scale: float | Tensor) -> bool:
    """Return whether a scale equals the common number; poutine.scale makes tensors of it."""
    if isinstance(common, Tensor) or isinstance(scale, Tensor):
        a, b = torch.as_tensor(common), torch.as_tensor(scale)
        return not a.dim() and not b.dim() and (common is scale or guard(a.detach() == b.detach()))
    return common == scale


class StateFactors(NamedTuple):
    """
    The factors of a model that has run under :class:`StateMessenger`.

    :ivar terms: the factors that depend on no enumerated site.
    :ivar inside: the other factors.
    :ivar factors: the same, packed for the sum.
    :ivar states: the symbols of the enumerated sites.
    """

    terms: list[Term]
    inside: list[Term]
    factors: list[StateFactor]
    states: set[str]


def state_factors(model_trace: Trace) -> StateFactors:
    """Return the factors of a model that has run under :class:`StateMessenger`."""
    scored_sites = list(scored(model_trace))
    model_trace.symbolize_dims()
    states = {s["infer"][compat.ENUMERATE_SYMBOL] for s in scored_sites if is_state(s)}
    parts = StateFactors([], [], [], states)
    for site in scored_sites:
        masked = inside_sum(site, is_state(site))
        factor = StateFactor(site, pack(site, "model", masked), plates_of(site, model_trace))
        if is_state(site) or not states.isdisjoint(factor.dims):
            parts.inside.append(model_term(site, log_prob=masked))
            parts.factors.append(factor)
        else:
            parts.terms.append(model_term(site))
    return parts


def summed_terms(model_trace: Trace) -> list[Term]:
    """Return the factors of a model run under :class:`StateMessenger`, with states summed."""
    scored_sites = list(scored(model_trace))
    if not any(map(is_state, scored_sites)):
        return [model_term(s) for s in scored_sites]
    terms, inside, factors, states = state_factors(model_trace)
    return terms + [_summed_term(s, inside, model_trace) for s in sum_states(factors, states)]


def _summed_term(state_sum: StateSum, inside: Sequence[Term], trace: Trace) -> Term:
    """Return a sum as one factor, which replaces its members."""
    members = tuple(inside[i] for i in state_sum.members)
    state_site = next(t.site for t in members if is_state(t.site))
    frames = tuple(_shared_frames(state_site, members, state_sum.plates, trace))
    log_prob = batch_shaped(packed.unpack(state_sum.log_prob, trace.symbol_to_dim), frames)
    site: Site = {
        "type": "sample",
        "name": f"{state_site['name']} (summed)",
        "fn": dist.Unit(log_prob, validate_args=False),
        "value": log_prob.new_empty(0),
        "is_observed": True,
        "args": (),
        "kwargs": {},
        "infer": {},
        "scale": state_sum.scale,
        "mask": None,
        "cond_indep_stack": frames,
    }
    term = model_term(site, log_prob=sites.masked(site, log_prob))
    return replace(term, members=members)


def _shared_frames(
    state_site: Site, members: Sequence[Term], plates: frozenset[str], trace: Trace
) -> Iterator[CondIndepStackFrame]:
    """Yield the plates of a sum, with the particles' and sequential plates, outermost first."""
    stacks = [t.site["cond_indep_stack"] for t in members]
    for f in state_site["cond_indep_stack"]:
        if f.name == PARTICLE_PLATE or (
            trace.plate_to_symbol[f.name] in plates if f.vectorized else all(f in s for s in stacks)
        ):
            yield f


def batch_shaped(value: Tensor, frames: Sequence[CondIndepStackFrame]) -> Tensor:
    """Expand a tensor to the full size in each plate's dim."""
    sizes = {f.dim: f.size for f in frames if f.dim is not None}
    depth = max((-d for d in sizes), default=0)
    return value.expand([sizes.get(d, 1) for d in range(-depth, 0)])


# Draws of enumerated sites from their posterior, given everything else.


def draw_states(model_trace: Trace) -> dict[str, Tensor]:
    """
    Draw all enumerated sites jointly from p(y | x, z), as Pyro's ``infer_discrete`` does.

    :param model_trace: the trace of a model that has run under ``StateMessenger``.
    :returns: by site, shape ``[leading, *plates, *event]``.
    """
    _, _, factors, states = state_factors(model_trace)
    queries = [f for f in factors if is_state(f.site)]
    with torch.no_grad():
        for query in queries:
            require_backward(query.log_prob)
        for total in list(sum_states(factors, states, SampleRing)):
            compat.draw_from_sum(total.log_prob)
        return {q.site["name"]: _drawn(q, model_trace) for q in queries}


def _drawn(query: StateFactor, trace: Trace) -> Tensor:
    site = query.site
    index = batch_shaped(_index(query, trace), site["cond_indep_stack"])
    return support_of_state(site)[index]


def _index(query: StateFactor, trace: Trace) -> Tensor:
    """Return the index of a site's drawn value: ``[leading, *plates]``."""
    index = compat.drawn_index(query.log_prob, query.site["infer"][compat.ENUMERATE_SYMBOL])
    if index is None:
        return torch.zeros((), dtype=torch.long, device=query.log_prob.device)  # one value
    return packed.unpack(index, trace.symbol_to_dim)
