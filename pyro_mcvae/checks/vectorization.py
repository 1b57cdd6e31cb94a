"""
Whether vectorised particles are the particles that a loop would run.

A program that counts dims from the left (``softmax(1)``, ``h - h.mean(0)``, ``nn.BatchNorm1d`` with
as many data as features) runs with a dim more in front, and is another program. Shapes do not show
it. So a few vectorised particles are run beside the same latents one at a time, and each site's
density must be the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.programs.execution import (
    Programs,
    Run,
    guide_term,
    model_term,
    possible_terms,
    run_pair,
)
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Minibatch, ParticlePlate, SubstituteMessenger
from pyro_mcvae.programs.sites import LEADING, changed_draw, is_random, plate_frames
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import StructureCache
from pyro_mcvae.structure.dependencies import isolated

__all__ = ["VectorizationCheck", "check_alike"]

Densities = dict[FactorKey, Tensor]
_NONE = GlobalSites()
_PARTICLES = "vectorised particles: pass vectorize_particles=False, or "
# Relative to a density in each precision.
_TOLERANCE = {torch.float64: 1e-6}
_SINGLE = 2e-3
# Runs of other shapes round in other ways, most where a network computes in half precision or a
# solver stops at a tolerance: as if the latents had moved by so much.
_ROUNDING = {torch.float64: 1e-4}
_SINGLE_ROUNDING = 0.02
# Programs of stochastic structure show ever new shapes, of which so many are looked at.
_MAX_SHAPES = 64
# A site is odd if it is so at each of so many draws: the inverse of a flow may fail at one.
_DRAWS = 2


class VectorizationCheck:
    """Checks vectorised runs, once for each pair of programs and the shapes that it shows."""

    def __init__(self) -> None:
        self._memory: StructureCache[bool] = StructureCache()
        self._left = _MAX_SHAPES

    def check(
        self, programs: Programs, run: Run, skip: GlobalSites = _NONE, particles: str = _PARTICLES
    ) -> None:
        """
        Check a run with leading dims, where the sizes of its plates are new.

        :param skip: the guide's and the model's sites that all particles share.
        :param particles: what stands in the leading dims, and what to do without them.
        :raises RuntimeError: as :func:`check_alike`.
        """
        # Not how many particles there are: they are compared in a number of their own.
        shapes = tuple(
            (t.key, *(f.size for f in t.site["cond_indep_stack"] if f.name != LEADING))
            for t in run.terms
        )

        def look() -> bool:
            if self._left > 0:
                sizes = {f.size for t in run.terms for f in plate_frames(t.site)}
                sizes |= {n for t in run.terms for n in t.site["fn"].event_shape}
                check_alike(programs, run.subsamples, run.nesting, sizes, skip, particles)
                self._left -= 1
            return True

        self._memory.of(programs, shapes, look, again=False)


def check_alike(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    nesting: int,
    sizes: set[int],
    skip: GlobalSites = _NONE,
    particles: str = _PARTICLES,
) -> None:
    """
    Check that a vectorised run has the densities of its particles run one by one.

    Programs that cannot be compared (they fail with these particles, or draw noise of their own)
    pass. Batch normalisation is by fixed statistics here: those of all particles together are
    other ones.

    :param subsamples: the minibatch to look at.
    :param nesting: how many batch dims belong to plates.
    :param sizes: of dims that particles should not be as many as.
    :param skip: the guide's and the model's sites that all particles share.
    :param particles: what stands in the leading dim, and what to do without it.
    :raises RuntimeError: naming the site that has another density.
    """
    count = next(n for n in itertools.count(2) if n not in sizes)
    try:
        with isolated(), torch.no_grad(), pyro.validation_enabled(False):
            odd = _odd(programs, subsamples, nesting, skip, count)
            for _ in range(1, _DRAWS if odd else 0):
                again = _odd(programs, subsamples, nesting, skip, count)
                odd = {key: sums for key, sums in odd.items() if key in again}
    except Exception:
        return  # the run of the step itself has its own errors
    for key, (together, alone) in odd.items():
        raise RuntimeError(
            f"site '{key.name}' of the {key.program} has another log density with a leading dim "
            f"than at the same latents without ({together:.4g} and {alone:.4g} in sum), so the "
            f"program takes one dim for another, as softmax(1), flatten(1), z - z.mean(0) and "
            f"nn.BatchNorm1d do. The leading dim is that of the {particles}count dims from the "
            f"right, as in softmax(-1), and put h.reshape(-1, h.shape[-1]) and a reshape back "
            f"around layers that take a batch"
        )


def _odd(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    nesting: int,
    skip: GlobalSites,
    count: int,
) -> dict[FactorKey, tuple[float, float]]:
    """The factors whose density at one particle is not that of the particle alone, with both."""
    leading = tuple(ParticlePlate(count, -nesting - 1, names) for names in skip)
    traces = run_pair(programs, SubstituteMessenger(Minibatch(subsamples)), leading)  # type: ignore[arg-type]
    together = _densities(traces)
    for particle in (count - 1, 0):
        values = {
            name: _particle_draw(site, particle, count, nesting)
            for trace in reversed(traces)  # the model may have latents of its own, to be enumerated
            for name, site in trace.nodes.items()
            if is_random(site)
        }
        alone = _alone(programs, subsamples, values)
        pairs = {
            key: (_particle(together[key], particle, count, nesting), alone[key])
            for key in together.keys() & alone.keys()
        }
        odd = {key: pair for key, pair in pairs.items() if not _close(*pair)}
        if odd:
            # Noise that the programs draw apart from their sites is no difference, nor is rounding.
            again = _alone(programs, subsamples, values)
            moved = _alone(
                programs, subsamples, {n: changed_draw(_moved, v) for n, v in values.items()}
            )
            return {
                key: (float(found.sum()), float(expected.sum()))
                for key, (found, expected) in odd.items()
                if key in again
                and _close(expected, again[key])
                and _beyond(found, expected, moved.get(key))
            }
    return {}


def _alone(
    programs: Programs, subsamples: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Densities:
    def draw(msg: Any) -> Tensor:
        # A latent that particles do not show: the error ends the comparison.
        return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

    return _densities(run_pair(programs, SubstituteMessenger(Minibatch(subsamples), draw=draw)))


def _densities(traces: tuple[Any, Any]) -> Densities:
    guide_trace, model_trace = traces
    terms = [*possible_terms(model_term, model_trace), *possible_terms(guide_term, guide_trace)]
    return {t.key: torch.as_tensor(t.log_prob) for t in terms}


def _particle_draw(site: Any, particle: int, count: int, nesting: int) -> Tensor:
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: _particle(v, particle, count, inner), site["value"])


def _particle(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """One particle of a tensor whose last ``inner`` dims are a particle's own."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)


def _moved(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    return value * (1 + _ROUNDING.get(value.dtype, _SINGLE_ROUNDING))


def _beyond(found: Tensor, expected: Tensor, moved: Tensor | None) -> bool:
    """Whether a density differs by more than rounding would make it."""
    if moved is None or moved.shape != expected.shape:
        return True
    rounding, difference = (moved - expected).abs(), (found - expected).abs()
    return not bool((difference <= 2 * rounding.max()).all())


def _close(found: Tensor, expected: Tensor) -> bool:
    try:
        found, expected = torch.broadcast_tensors(found, expected)
    except RuntimeError:
        return True  # not comparable
    # Where a density is infinite or NaN (the step says so itself), rounding decides which.
    both = found.isfinite() & expected.isfinite()
    found, expected = torch.where(both, found, 0.0), torch.where(both, expected, 0.0)
    tolerance = _TOLERANCE.get(found.dtype, _SINGLE)
    allowed = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    return torch.allclose(found, expected, rtol=tolerance, atol=allowed)
