"""
Which factors let the elements of a plate depend on each other's latents.

A plate says that its elements are independent, and Pyro does not hold a program to it: a random
walk drawn as ``z.cumsum(-1)`` in a plate of steps, or states whose neighbours meet in ``z[1:] -
z[:-1]``, are trained by the plain ELBO all the same. A weight per element would be no weight, and
its bound no bound. So the programs are run at draws of which half of a plate's elements are
exchanged, and the densities of the other half must stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.probing import Probe, ProgramError, looking, probe
from pyro_mcvae.programs.sites import changed_draw, is_random, known_support
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site

__all__ = ["find_dependent_plates"]

_logger = logging.getLogger(__name__)

Values = dict[str, Tensor]
Terms = dict[FactorKey, Term]


def find_dependent_plates(
    programs: Programs, subsamples: Mapping[str, Tensor]
) -> dict[FactorKey, frozenset[PlateKey]]:
    """
    For each factor the plates, of those around it, across which it depends on random guide sites.

    Programs that fail at exchanged draws (of which the number of elements depends on a draw, say)
    yield nothing. Batch normalisation does not count: its use is to let data depend on each other.

    :param subsamples: the minibatch to look at.
    """
    try:
        return _find(programs, subsamples)
    except ProgramError as error:
        _logger.info("whether a plate's elements meet cannot be looked at: %s", error)
        return {}


def _find(
    programs: Programs, subsamples: Mapping[str, Tensor]
) -> dict[FactorKey, frozenset[PlateKey]]:
    with looking():
        first = probe(programs, subsamples)
        latents = {n: s for n, s in first.guide_trace.nodes.items() if is_random(s)}
        others = {n: _another(s) for n, s in latents.items()}
    values = {n: s["value"] for n, s in latents.items()}
    moves = list(_moves(programs, first.subsamples, latents, values, others))
    found = _dependent(_of_others(first, values), moves)
    if not found:
        return found
    # Noise that a program draws apart from its sites: the same stream at the same latents.
    before = _densities(programs, first.subsamples, values)
    found = _dependent(before, moves)
    if not found:
        return found
    # Noise from a generator that is not torch's own changes densities at the same latents, too.
    again = _densities(programs, first.subsamples, values)
    return {key: plates for key, plates in found.items() if _same(before[key], again.get(key))}


class _Move(NamedTuple):
    """The factors where some elements of a plate have other latents; ``kept`` ones have not."""

    frame: CondIndepStackFrame
    kept: Tensor
    after: Terms


def _moves(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    latents: Mapping[str, Site],
    values: Values,
    others: Values,
) -> Iterator[_Move]:
    """Each half of each plate's elements, exchanged."""
    for frame in sorted({f for s in latents.values() for f in plate_frames(s)}, key=str):
        if frame.dim is None or frame.size < 2:
            continue
        for half in (_half(frame.size), ~_half(frame.size)):
            moved = {
                n: _exchanged(s, frame, half, values[n], others[n]) for n, s in latents.items()
            }
            yield _Move(frame, ~half, _densities(programs, subsamples, moved))


def _dependent(before: Terms, moves: Iterable[_Move]) -> dict[FactorKey, frozenset[PlateKey]]:
    """For each factor the plates in which kept elements changed with the others."""
    found: dict[FactorKey, frozenset[PlateKey]] = {}
    for frame, kept, after in moves:
        for key in _changed(before, after, frame, kept):
            found[key] = found.get(key, frozenset()) | {plate_key(frame)}
    return found


def _another(site: Site) -> Tensor:
    """Another value for each element: a second draw, which may be the same where it is discrete."""
    value, support = site["value"], known_support(site["fn"])
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
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
        return site["fn"](*site["args"], **site["kwargs"])
    except NotImplementedError:
        return value  # a handler gave it to a distribution that cannot draw


_INTERVAL = type(constraints.integer_interval(0, 1))
_COUNTS = type(constraints.nonnegative_integer)


def _half(size: int) -> Tensor:
    """The Thue-Morse sequence: not periodic, so that it parts neighbours at whatever distance."""
    index, parity = torch.arange(size), torch.zeros(size, dtype=torch.bool)
    for bit in range(size.bit_length()):
        parity = parity ^ ((index >> bit) & 1).bool()
    return parity


def _exchanged(
    site: Site, frame: CondIndepStackFrame, half: Tensor, value: Tensor, other: Tensor
) -> Tensor:
    depth = site["fn"].event_dim - (frame.dim or 0)
    if frame not in plate_frames(site) or value.shape != other.shape or value.dim() < depth:
        return value
    where = half.to(value.device).reshape((-1,) + (1,) * (depth - 1))
    return changed_draw(lambda a, b: torch.where(where, a, b), other, value)


def _densities(programs: Programs, subsamples: Mapping[str, Tensor], values: Values) -> Terms:
    """The factors at given latents; the same random stream at each call."""
    with looking():
        return _of_others(probe(programs, subsamples, values), values)


def _of_others(found: Probe, values: Values) -> Terms:
    """The factors that may depend on more than their own site: one alone depends on no other."""
    return {key: t for key, t in found.terms.items() if len(values) > 1 or not t.in_guide}


def _changed(
    before: Terms, after: Terms, frame: CondIndepStackFrame, kept: Tensor
) -> Iterator[FactorKey]:
    """The factors whose density differs at elements of a plate whose own latents are the same."""
    for key, term in before.items():
        old, dim = term.log_prob, frame.dim or 0
        new = after[key].log_prob if key in after else old
        if frame not in plate_frames(term.site) or old.shape != new.shape or old.dim() < -dim:
            continue
        if old.shape[dim] != frame.size:
            continue
        at = kept.to(old.device).nonzero().squeeze(-1)
        if not _close(old.index_select(dim, at), new.index_select(dim, at)):
            yield key


def _same(before: Term, again: Term | None) -> bool:
    if again is None or again.log_prob.shape != before.log_prob.shape:
        return False
    return _close(before.log_prob, again.log_prob)


def _close(old: Tensor, new: Tensor) -> bool:
    tolerance = 1e-9 if old.dtype == torch.float64 else 1e-4
    return torch.allclose(old, new, rtol=tolerance, atol=tolerance, equal_nan=True)
