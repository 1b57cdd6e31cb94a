"""
Whether vectorised particles are the particles that a loop would run.

A program that counts dims from the left (``softmax(1)``, ``h - h.mean(0)``, ``nn.BatchNorm1d`` with
as many data as features) runs with a dim more in front, and is another program. Shapes do not show
it. So a few vectorised particles are run beside the same latents one at a time, and each site's
density must be the same.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.checks.closeness import beyond_rounding, is_close, moved
from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.programs.contract import check_batch_dims
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.mapping import Way, particle_plates
from pyro_mcvae.programs.probing import Probe, ProgramError, looking, probe
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.programs.types import Message, Site
from pyro_mcvae.structure.blocks import GlobalSites

__all__ = [
    "LeadingDimsName",
    "check_count",
    "check_vectorization",
    "not_vectorizable",
]

_logger = logging.getLogger(__name__)

Densities = dict[FactorKey, Tensor]
# A site is odd if it is so at each of so many draws: the inverse of a flow may fail at one.
_DRAWS = 2


class LeadingDimsName(NamedTuple):
    """
    What stands in leading dims, for errors.

    :ivar remedy: what to do without them, to be followed by another remedy.
    :ivar sizes: what to do where sizes do not match.
    """

    name: str
    remedy: str
    sizes: str = ""


class _TogetherError(ProgramError):
    """Programs failed with leading dims while they were looked at."""


def not_vectorizable(
    name: LeadingDimsName, count: int | None, nesting: int, error: Exception
) -> str:
    """What is wrong with programs that fail with leading dims only."""
    several = f"{count} {name.name}" if count is not None else name.name
    cause = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
    return (
        f"the model or the guide cannot be run with {several} in batch dim {-nesting - 1}, to the "
        f"left of its plates, though it runs with one. {name.remedy} make it broadcast over "
        f"leading dims: index from the right, as in z[..., 0], or means[..., group] in the place "
        f"of means[group] (Vindex for tables). {name.sizes if 'must match' in cause else ''}"
        f"The error was: {cause}"
    )


def check_count(
    programs: Programs, run: Run, count: int, shared: GlobalSites, way: Way, name: LeadingDimsName
) -> None:
    """
    Check that as many particles as there are data are not taken for the data.

    ``means[group]`` takes particles in the place of groups, and where these are as many as the
    data the shapes fit all the same. With another count they do not.

    :param run: with leading dims.
    :param count: how many stand in them, the size of another dim of the run.
    :param shared: the guide's and the model's sites that all particles share.
    :param way: how these are run.
    :param name: what stands in the leading dims.
    :raises LeadingDimsError: if the programs do not run with another count.
    """
    other = next(n for n in itertools.count(count + 1) if n not in run.inner_sizes)
    error = _failure(programs, run, shared, other, way)
    if error is None:
        return
    if run.leading != count and _failure(programs, run, shared, count, way) is not None:
        return  # these programs have leading dims at some sites only
    raise LeadingDimsError(
        f"the model or the guide runs with {count} {name.name}, the size of another dim, but not "
        f"with {other}, so that one may be taken for the other. {name.remedy} make it broadcast "
        f"over leading dims: index from the right, as in means[..., group] in the place of "
        f"means[group]. The error was: {error}"
    ) from error


def _failure(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way
) -> Exception | None:
    """How the programs fail with so many particles, if they do."""
    with looking():
        try:
            _together(programs, run, shared, count, way)
        except ProgramError as error:
            return error
    return None


def check_vectorization(
    programs: Programs,
    run: Run,
    shared: GlobalSites,
    way: Way,
    name: LeadingDimsName,
    ran: bool = True,
) -> None:
    """
    Check that a vectorised run has the densities of its particles run one by one.

    Programs that cannot be compared (they fail with these particles, or draw noise of their own)
    pass; a failure is logged. Batch normalisation is by fixed statistics here: those of all
    particles together are other ones.

    :param run: shows the programs' plates and sizes.
    :param shared: the guide's and the model's sites that all particles share.
    :param way: how these are run.
    :param name: what stands in the leading dims.
    :param ran: whether ``run`` was made in that way: then it is known that the programs can be.
    :raises LeadingDimsError: naming the site that has another density.
    """
    # Not as many as the data: these must not be taken for each other.
    count = next(n for n in itertools.count(2) if n not in run.inner_sizes)
    try:
        with looking():
            if run.leading is not None or not ran:  # slots may share what they are not values of
                _check_unseen_draws(programs, run, shared, count, way, name)
            odd = _odd(programs, run, shared, count, way)
            for _ in range(1, _DRAWS if odd else 0):
                again = _odd(programs, run, shared, count, way)
                odd = {key: sums for key, sums in odd.items() if key in again}
    except ProgramError as error:
        if isinstance(error, _TogetherError) and not ran:
            raise LeadingDimsError(not_vectorizable(name, count, run.nesting, error)) from error
        _logger.info("%s cannot be compared with a loop: %s", name.name, error)
        return  # the run of the step itself has its own errors
    for key, (together, alone) in odd.items():
        raise LeadingDimsError(
            f"site '{key.name}' of the {key.program} has another log density with a leading dim "
            f"than at the same latents without ({together:.4g} and {alone:.4g} in sum), so the "
            f"program takes one dim for another, as softmax(1), flatten(1), z - z.mean(0) and "
            f"nn.BatchNorm1d do. The leading dim is that of the {name.name}. {name.remedy} count "
            f"dims from the right, as in softmax(-1), and put h.reshape(-1, h.shape[-1]) and a "
            f"reshape back around layers that take a batch"
        )


def _together(programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way) -> Probe:
    plates = particle_plates(way, count, -run.nesting - 1, shared)
    try:
        found = probe(programs, run.subsamples, leading=plates)
        check_batch_dims([*found.terms.values()], run.nesting)
        return found
    except (ProgramError, ValueError) as error:
        raise _TogetherError(str(error)) from error


def _odd(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way
) -> dict[FactorKey, tuple[float, float]]:
    """The factors whose density at one particle is not that of the particle alone, with both."""
    found = _together(programs, run, shared, count, way)
    together = found.log_probs
    for particle in (count - 1, 0):
        values = _values(found, particle, count, run.nesting)
        alone = _alone(programs, run.subsamples, values)
        pairs = {
            key: (_particle(together[key], particle, count, run.nesting), alone[key])
            for key in together.keys() & alone.keys()
        }
        odd = {key: pair for key, pair in pairs.items() if not is_close(*pair)}
        if odd:
            return _beyond_noise(programs, run.subsamples, values, odd)
    return {}


def _values(found: Probe, particle: int, count: int, nesting: int) -> dict[str, Tensor]:
    """The latents of one particle."""
    return {
        name: _particle_draw(site, particle, count, nesting)
        # The model may have latents of its own, to be enumerated.
        for trace in (found.model_trace, found.guide_trace)
        for name, site in trace.nodes.items()
        if is_random(site)
    }


def _check_unseen_draws(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way, name: LeadingDimsName
) -> None:
    """
    Check that a factor of the guide, which may be the density of a draw by ``torch.rand``, is not
    that of one draw for all particles: then their weights would not be independent.
    """
    factors = [t.key for t in run.terms if t.in_guide and not is_random(t.site)]
    if not factors:
        return
    found = _together(programs, run, shared, count, way)
    values = _values(found, 0, count, run.nesting)
    first, again = (_alone(programs, run.subsamples, values) for _ in range(2))
    for key in (k for k in factors if k in first.keys() & again.keys() & found.log_probs.keys()):
        each = [_particle(found.log_probs[key], k, count, run.nesting) for k in range(count)]
        if not is_close(first[key], again[key]) and all(torch.equal(each[0], e) for e in each):
            raise LeadingDimsError(
                f"site '{key.name}' of the guide is a factor of what the guide draws apart from "
                f"its sites (by torch.rand, say), which all {name.name} would share. {name.remedy} "
                f"draw it by pyro.sample"
            )


def _beyond_noise(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    odd: Mapping[FactorKey, tuple[Tensor, Tensor]],
) -> dict[FactorKey, tuple[float, float]]:
    """Noise that the programs draw apart from their sites is no difference, nor is rounding."""
    again = _alone(programs, subsamples, values)
    elsewhere = _alone(programs, subsamples, {n: changed_draw(moved, v) for n, v in values.items()})
    return {
        key: (float(found.sum()), float(expected.sum()))
        for key, (found, expected) in odd.items()
        if key in again
        and is_close(expected, again[key])
        and beyond_rounding(found, expected, elsewhere.get(key))
    }


def _alone(
    programs: Programs, subsamples: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Densities:
    def sample_fn(msg: Message) -> Tensor:
        # A latent that particles do not show: the error ends the comparison.
        return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

    return probe(programs, subsamples, sample_fn=sample_fn).log_probs


def _particle_draw(site: Site, particle: int, count: int, nesting: int) -> Tensor:
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: _particle(v, particle, count, inner), site["value"])


def _particle(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """One particle of a tensor whose last ``inner`` dims are a particle's own."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)
