r"""
The sum over the discrete latents of a model that the guide does not draw.

.. math:: \log p(x, z) = \log \sum_y p(x, y, z)

Pyro's sum-product algorithm sums the factors that depend on them. What connected ones leave is one
factor, in the plates that they share: a weight per datum stays one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from pyro import distributions as dist
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.ops.recording import holds
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.enumeration import is_state
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.plates import LEADING, is_subsampled, plate_frames
from pyro_mcvae.programs.terms import Term, model_term, scored
from pyro_mcvae.programs.types import Site


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
        """The symbols of the dims of ``log_prob``."""
        return self.log_prob._pyro_dims  # type: ignore[attr-defined]


class StateSum(NamedTuple):
    """
    What the sum over connected enumerated sites leaves.

    :ivar members: which of the factors are in it.
    :ivar log_prob: packed, not scaled.
    :ivar plates: the symbols of the plates that all members share.
    :ivar scale: the common scale of all members, which multiplies the logarithm.
    """

    members: tuple[int, ...]
    log_prob: Tensor
    plates: frozenset[str]
    scale: float | Tensor


def plates_of(site: Site, trace: Trace) -> frozenset[str]:
    """The symbols of the plates around a site of a trace whose dims have symbols."""
    frames = site["cond_indep_stack"]
    return frozenset(
        trace.plate_to_symbol[f.name] for f in frames if f.vectorized and f.name != LEADING
    )


def pack(site: Site, program: str, value: Tensor, sums: bool = True) -> Tensor:
    """
    A batch-shaped tensor of a site, of which each dim has a symbol.

    :param bool sums: whether dims that lie in no plate may be summed. Those of an enumerated site
        may not: it has one value for each of their elements.
    :raises ValueError: naming a site with batch dims that lie in no plate.
    """
    if sums and site["infer"].get("_enumerate_dim") is None:
        known = site["infer"]["_dim_to_symbol"]
        # States stand to the left of the plates. A program that moves them there sums nothing.
        states = known.keys() - {f.dim for f in site["cond_indep_stack"]}
        first = max(-value.dim(), max(states, default=-value.dim() - 1) + 1)
        apart = [d for d in range(first, 0) if value.shape[d] != 1 and d not in known]
        value = value.sum(apart, keepdim=True) if apart else value
    try:
        return packed.pack(value, site["infer"]["_dim_to_symbol"])
    except ValueError as error:
        raise ValueError(
            f"site '{site['name']}' of the {program} has batch shape {tuple(value.shape)}, of "
            f"which some dims lie in no plate: enclose it in pyro.plate(...), or make them an "
            f"event by .to_event(...)"
        ) from error


def sum_states(
    factors: Sequence[StateFactor], states: Iterable[str], make_ring: type[LogRing] = LogRing
) -> Iterator[StateSum]:
    """
    Sum over enumerated sites, inside of the logarithm: one sum for each set of connected factors.

    :param states: the symbols of the enumerated sites.
    :param make_ring: what Pyro's algorithm does with the sums.
    :raises SiteError: for factors of one sum with different scales, for a sum that holds a whole
        plate of which there is a minibatch only, and for one over crossed plates.
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
            # Not a matter of dims: no run with others would help.
            raise _crossed([f.site for f in inside]) from error
        yield StateSum(members, total, plates, scale)


def inside_sum(site: Site, is_summed: bool) -> Tensor:
    """The log density of a model's site inside of a sum: masks act there, scales outside of it."""
    log_prob = sites.unscaled_log_prob(site, "model")
    # A mask takes factors out of the sum, and no state: what remains of those sums to one.
    return log_prob if is_summed else sites.unscaled_masked(site, log_prob)


def _connected(factors: Sequence[StateFactor], dims: set[str]) -> Iterator[tuple[int, ...]]:
    """The factors that share enumerated sites, directly or through others."""
    groups: list[tuple[set[str], list[int]]] = []
    for i, f in enumerate(factors):
        own, members = dims.intersection(f.dims), [i]
        apart = []
        for group in groups:
            if own.isdisjoint(group[0]):
                apart.append(group)
            else:
                own, members = own | group[0], group[1] + members
        groups = [*apart, (own, members)]
    return (tuple(sorted(members)) for _, members in groups)


def _crossed(found: Sequence[Site]) -> SiteError:
    """What is wrong where Pyro's algorithm finds sites in crossed plates that meet in a factor."""
    frames = {s["name"]: [f.name for f in plate_frames(s) if f.vectorized] for s in found}
    inside = ", ".join(f"'{n}' in {' and '.join(sorted(p))}" for n, p in frames.items() if p)
    return SiteError(
        f"Expected tree-structured plate nesting, but enumerated sites of the model in crossed "
        f"plates meet in one factor ({inside}), which has no exact sum but over all combinations: "
        f"make one of the plates sequential, for i in pyro.plate(...), at a cost exponential in "
        f"its size, or draw the sites of one of them in the guide"
    )


def _common_scale(found: Sequence[Site]) -> float | Tensor:
    """The one scale of all factors of a sum, which multiplies its logarithm."""
    shared = frozenset.intersection(*map(plate_frames, found))
    for site in found:
        for f in plate_frames(site) - shared:
            if is_subsampled(f):
                raise SiteError(
                    f"site '{site['name']}' of the model lies in plate '{f.name}', and depends on "
                    f"an enumerated site outside of it, whose sum needs all {f.full_size} data, "
                    f"but the plate is subsampled ({f.size}): pass the full data, put the "
                    f"enumerated site into the plate, or draw it in the guide"
                )
    scales = {s["name"]: s["scale"] for s in found}
    common = next(iter(scales.values()))
    if not all(_is_the(common, s) for s in scales.values()):
        raise SiteError(
            f"Expected all enumerated sample sites to share a common poutine.scale, but "
            f"{', '.join(map(repr, scales))} of the model, which depend on the same one, have "
            f"{list(scales.values())}: put one number around all of them, subsampled plates too"
        )
    return common


def _is_the(common: float | Tensor, scale: float | Tensor) -> bool:
    """Whether a scale is the common number, of which poutine.scale makes a tensor at each site."""
    if isinstance(common, Tensor) or isinstance(scale, Tensor):
        a, b = torch.as_tensor(common), torch.as_tensor(scale)
        return not a.dim() and not b.dim() and (common is scale or holds(a.detach() == b.detach()))
    return common == scale


class StateFactors(NamedTuple):
    """
    The factors of a model that has run under :class:`StateMessenger`.

    :ivar terms: those that depend on no enumerated site.
    :ivar inside: the others.
    :ivar factors: these packed, as they are to be summed.
    :ivar states: the symbols of the enumerated sites.
    """

    terms: list[Term]
    inside: list[Term]
    factors: list[StateFactor]
    states: set[str]


def state_factors(model_trace: Trace) -> StateFactors:
    """The factors of a model that has run under :class:`StateMessenger`."""
    found = list(scored(model_trace))
    model_trace.symbolize_dims()
    states = {s["infer"]["_enumerate_symbol"] for s in found if is_state(s)}
    parts = StateFactors([], [], [], states)
    for site in found:
        masked = inside_sum(site, is_state(site))
        factor = StateFactor(site, pack(site, "model", masked), plates_of(site, model_trace))
        if is_state(site) or not states.isdisjoint(factor.dims):
            parts.inside.append(model_term(site, log_prob=masked))
            parts.factors.append(factor)
        else:
            parts.terms.append(model_term(site))
    return parts


def summed_terms(model_trace: Trace) -> list[Term]:
    """The factors of a model that has run under :class:`StateMessenger`: none has states left."""
    found = list(scored(model_trace))
    if not any(map(is_state, found)):
        return [model_term(s) for s in found]
    terms, inside, factors, states = state_factors(model_trace)
    return terms + [_term(s, inside, model_trace) for s in sum_states(factors, states)]


def _term(found: StateSum, inside: Sequence[Term], trace: Trace) -> Term:
    """A sum as the factor that it is, in the place of its members."""
    members = tuple(inside[i] for i in found.members)
    home = next(t.site for t in members if is_state(t.site))
    frames = tuple(_shared_frames(home, members, found.plates, trace))
    log_prob = batch_shaped(packed.unpack(found.log_prob, trace.symbol_to_dim), frames)
    site: Site = {
        "type": "sample",
        "name": f"{home['name']} (summed)",
        "fn": dist.Unit(log_prob, validate_args=False),
        "value": log_prob.new_empty(0),
        "is_observed": True,
        "args": (),
        "kwargs": {},
        "infer": {},
        "scale": found.scale,
        "mask": None,
        "cond_indep_stack": frames,
    }
    term = model_term(site, log_prob=sites.masked(site, log_prob))
    return replace(term, members=members)


def _shared_frames(
    home: Site, members: Sequence[Term], plates: frozenset[str], trace: Trace
) -> Iterator[CondIndepStackFrame]:
    """The plates of a sum, the particles' and sequential ones among them, outermost first."""
    stacks = [t.site["cond_indep_stack"] for t in members]
    for f in home["cond_indep_stack"]:
        if f.name == LEADING or (
            trace.plate_to_symbol[f.name] in plates if f.vectorized else all(f in s for s in stacks)
        ):
            yield f


def batch_shaped(value: Tensor, frames: Sequence[CondIndepStackFrame]) -> Tensor:
    """A tensor with the full size in each plate's dim."""
    sizes = {f.dim: f.size for f in frames if f.dim is not None}
    depth = max((-d for d in sizes), default=0)
    return value.expand([sizes.get(d, 1) for d in range(-depth, 0)])
