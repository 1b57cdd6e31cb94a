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
from collections.abc import Mapping, Sequence

from torch import Tensor

from pyro_mcvae.checks.closeness import beyond_rounding, is_close, moved
from pyro_mcvae.checks.compared_runs import (
    Densities,
    TogetherError,
    one_of,
    probe_alone,
    probe_together,
    values_of,
)
from pyro_mcvae.checks.leading_dims import LeadingDimsName, not_vectorizable
from pyro_mcvae.checks.unseen import Batch, Read, UnseenDraw, Watch, shared_draws
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.probing import Probe, ProgramError, looking
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.tracking import TrackDraws

__all__ = ["check_count", "check_vectorization"]

_logger = logging.getLogger(__name__)

# A site is odd if it is so at each of so many draws: the inverse of a flow may fail at one.
_DRAWS = 2


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
        f"means[group]. The error was: {error}",
        reason=f"{count} {name.name} are taken for another dim of this size",
    ) from error


def _failure(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way
) -> Exception | None:
    """How the programs fail with so many particles, if they do."""
    with looking():
        try:
            probe_together(programs, run, shared, count, way)
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
    mixes: bool = True,
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
    :param mixes: whether batch normalisation may take all particles for one batch.
    :raises LeadingDimsError: naming the site that has another density, or the batch's line.
    """
    # Not as many as the data: these must not be taken for each other.
    count = next(n for n in itertools.count(2) if n not in run.inner_sizes)
    try:
        with looking():
            with Watch().watching() as watch:
                found = probe_together(programs, run, shared, count, way)
            _check_reads(programs, run, watch.reads, name)
            if run.leading is not None or not ran:  # slots may share what they are not values of
                values = values_of(found, 0, count, run.nesting)
                _check_draws(programs, run, values, watch.draws, name)
                if not mixes and watch.batches:
                    _check_batches(programs, run, values, watch.batches, name)
            odd = _odd(programs, run, found, count)
            for _ in range(1, _DRAWS if odd else 0):
                again = _odd(
                    programs, run, probe_together(programs, run, shared, count, way), count
                )
                odd = {key: sums for key, sums in odd.items() if key in again}
    except ProgramError as error:
        if isinstance(error, TogetherError) and not ran:
            raise not_vectorizable(name, count, run.nesting, error) from error
        _logger.info("%s cannot be compared with a loop: %s", name.name, error)
        return  # the run of the step itself has its own errors
    for key, (together, alone) in odd.items():
        raise LeadingDimsError(
            f"site '{key.name}' of the {key.program} has another log density with a leading dim "
            f"than at the same latents without ({together:.4g} and {alone:.4g} in sum), so the "
            f"program takes one dim for another, as softmax(1), flatten(1), z - z.mean(0) and "
            f"nn.BatchNorm1d do. The leading dim is that of the {name.name}. {name.remedy} count "
            f"dims from the right, as in softmax(-1), and put h.reshape(-1, h.shape[-1]) and a "
            f"reshape back around layers that take a batch",
            reason=f"site '{key.name}' of the {key.program} takes one dim for another",
        )


def _odd(
    programs: Programs, run: Run, found: Probe, count: int
) -> dict[FactorKey, tuple[float, float]]:
    """The factors whose density at one particle is not that of the particle alone, with both."""
    together = found.log_probs
    for particle in (count - 1, 0):
        values = values_of(found, particle, count, run.nesting)
        alone = probe_alone(programs, run.subsamples, values)
        pairs = {
            key: (one_of(together[key], particle, count, run.nesting), alone[key])
            for key in together.keys() & alone.keys()
        }
        odd = {key: pair for key, pair in pairs.items() if not is_close(*pair)}
        if odd:
            return _beyond_noise(programs, run.subsamples, values, odd)
    return {}


def _check_draws(
    programs: Programs,
    run: Run,
    values: Mapping[str, Tensor],
    drawn: Sequence[UnseenDraw],
    name: LeadingDimsName,
) -> None:
    """
    Check that no density depends on numbers that are drawn apart from sites, for all particles.

    :param values: the latents of one particle.
    :param drawn: what was drawn apart from sites for several.
    """
    found: list[Densities] = []

    def run_alone() -> list[UnseenDraw]:
        with Watch().watching() as watch:
            found.append(probe_alone(programs, run.subsamples, values))
        return watch.draws

    shared = shared_draws(drawn, run_alone)
    if not shared:
        return
    first, again = *found, probe_alone(programs, run.subsamples, values)
    for key in first:
        if key in again and not is_close(first[key], again[key]):
            raise LeadingDimsError(
                f"site '{key.name}' of the {key.program} depends on random numbers that are drawn "
                f"apart from sites at {shared[0].line}, which all {name.name} would share. "
                f"{name.remedy} draw them by pyro.sample",
                reason=f"site '{key.name}' of the {key.program} has draws that are no sites, at "
                f"{shared[0].line}",
            )


def _check_batches(
    programs: Programs,
    run: Run,
    values: Mapping[str, Tensor],
    together: Sequence[Batch],
    name: LeadingDimsName,
) -> None:
    """
    Check that each particle has the statistics of its own batch.

    :param values: the latents of one particle.
    :param together: what is normalised where there are several.
    """
    with Watch().reading() as watch:
        probe_alone(programs, run.subsamples, values)
    sizes = [batch.size for batch in watch.batches] + [0] * len(together)
    for batch, size in zip(together, sizes, strict=False):
        if batch.size > size:
            raise LeadingDimsError(
                f"batch normalisation at {batch.line} takes all {name.name} for one batch. "
                f"{name.remedy} have it in the encoder, which runs once, or normalise layers",
                reason=f"all {name.name} would be one batch at {batch.line}",
            )


def _check_reads(
    programs: Programs, run: Run, reads: Sequence[Read], name: LeadingDimsName
) -> None:
    """
    Check that no program decides for all particles by the values of their latents.

    :param reads: what the programs' Python code looks at.
    """
    if not reads:
        return
    latents = {
        n for t in (run.guide_trace, run.model_trace) for n, s in t.nodes.items() if is_random(s)
    }
    try:
        with Watch().reading() as watch, TrackDraws(frozenset(latents)):
            run_pair(programs, Substitutes(Minibatch(run.subsamples)))
        read = next((r for r in watch.reads if r.sites), None)
    except Exception:  # tensors that cannot be tracked
        read = Read(reads[0].line, frozenset(latents))
    if read is not None:
        raise LeadingDimsError(
            f"the programs look at a value that depends on site '{min(read.sites)}', at "
            f"{read.line}, and would decide for all {name.name} at once. {name.remedy} decide for "
            f"each by torch.where",
            reason=f"a value is read that depends on site '{min(read.sites)}', at {read.line}",
        )


def _beyond_noise(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    odd: Mapping[FactorKey, tuple[Tensor, Tensor]],
) -> dict[FactorKey, tuple[float, float]]:
    """Noise that the programs draw apart from their sites is no difference, nor is rounding."""
    again = probe_alone(programs, subsamples, values)
    elsewhere = probe_alone(
        programs, subsamples, {n: changed_draw(moved, v) for n, v in values.items()}
    )
    return {
        key: (float(found.sum()), float(expected.sum()))
        for key, (found, expected) in odd.items()
        if key in again
        and is_close(expected, again[key])
        and beyond_rounding(found, expected, elsewhere.get(key))
    }
