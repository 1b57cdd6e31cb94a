"""Probe runs that are compared: a few particles together, and one of them alone."""

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

__all__ = [
    "Densities",
    "TogetherError",
    "one_of",
    "probe_alone",
    "probe_together",
    "random_sites",
    "value_of",
]

Densities = dict[FactorKey, Tensor]


class TogetherError(ProgramError):
    """Programs failed with leading dims in a probe run."""


def probe_together(
    programs: Programs,
    run: Run,
    shared: GlobalSites,
    count: int,
    way: Way,
    values: Mapping[str, Tensor] | None = None,
) -> Probe:
    """
    Run so many particles.

    :param values: of all of their latents; drawn where left out.
    :raises TogetherError: where the programs fail.
    """
    plates = particle_plates(way, count, -run.nesting - 1, shared)
    sample_fn = None if values is None else lambda msg: values.get(msg["name"])
    try:
        found = probe(programs, run.subsamples, sample_fn=sample_fn, leading=plates)
        check_batch_dims([*found.terms.values()], run.nesting)
        return found
    except (ProgramError, ValueError) as error:
        raise TogetherError(str(error)) from error


def random_sites(found: Probe) -> dict[str, Site]:
    """The random sites of both programs: a model may have latents of its own, to be enumerated."""
    traces = found.model_trace, found.guide_trace
    return {n: s for trace in traces for n, s in trace.nodes.items() if is_random(s)}


def value_of(site: Site, value: Tensor, particle: int, count: int, nesting: int) -> Tensor:
    """One particle's value of a site."""
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: one_of(v, particle, count, inner), value)


def probe_alone(
    programs: Programs, subsamples: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Densities:
    """The densities of one particle, whose latents these are."""

    def sample_fn(msg: Message) -> Tensor:
        # A latent that particles do not have: the error ends the comparison.
        return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

    return probe(programs, subsamples, sample_fn=sample_fn).log_probs


def one_of(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """One particle of a tensor whose last ``inner`` dims are a particle's own."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)
