"""The runs that guards of leading dims compare: a few particles together, and one of them alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.programs.contract import check_batch_dims
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.mapping import Way, particle_plates
from pyro_mcvae.programs.probing import Probe, ProgramError, probe
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.programs.types import Message, Site
from pyro_mcvae.structure.blocks import GlobalSites

__all__ = ["Densities", "TogetherError", "one_of", "probe_alone", "probe_together", "values_of"]

Densities = dict[FactorKey, Tensor]


class TogetherError(ProgramError):
    """Programs failed with leading dims while they were looked at."""


def probe_together(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way
) -> Probe:
    """
    A run of so many particles.

    :raises TogetherError: where the programs have none.
    """
    plates = particle_plates(way, count, -run.nesting - 1, shared)
    try:
        found = probe(programs, run.subsamples, leading=plates)
        check_batch_dims([*found.terms.values()], run.nesting)
        return found
    except (ProgramError, ValueError) as error:
        raise TogetherError(str(error)) from error


def values_of(found: Probe, particle: int, count: int, nesting: int) -> dict[str, Tensor]:
    """The latents of one particle."""
    return {
        name: _one_draw(site, particle, count, nesting)
        # The model may have latents of its own, to be enumerated.
        for trace in (found.model_trace, found.guide_trace)
        for name, site in trace.nodes.items()
        if is_random(site)
    }


def probe_alone(
    programs: Programs, subsamples: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Densities:
    """The densities of one particle, whose latents these are."""

    def sample_fn(msg: Message) -> Tensor:
        # A latent that particles do not show: the error ends the comparison.
        return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

    return probe(programs, subsamples, sample_fn=sample_fn).log_probs


def _one_draw(site: Site, particle: int, count: int, nesting: int) -> Tensor:
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: one_of(v, particle, count, inner), site["value"])


def one_of(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """One particle of a tensor whose last ``inner`` dims are a particle's own."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)
