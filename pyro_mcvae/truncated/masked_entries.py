"""Entries of discrete sites that are masked out, and what reads them all the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.layout import existing_entries, site_spec

__all__ = ["reader_of_masked"]


def reader_of_masked(programs: Programs, run: Run, names: Sequence[str]) -> str | None:
    """
    Which site has a density that masked entries of a discrete site change.

    A masked entry has no density of its own and is kept at zero. Where it steers another site,
    the states with another value there would be out of reach.

    :param run: without leading dims.
    :param names: the discrete sites.
    :returns: what is wrong, or None if nothing reads what is masked out.
    """
    nodes = run.model_trace.nodes
    values = {name: s["value"] for name, s in nodes.items() if is_latent(s)}
    before: dict[str, Tensor] | None = None
    for name in names:
        exists = existing_entries(nodes[name])
        if exists is None or bool(exists.all()):
            continue
        if before is None:
            before = _log_probs(programs, run, values)
        other = torch.where(exists, values[name], _another(nodes[name], run.nesting))
        after = _log_probs(programs, run, {**values, name: other})
        for site, log_prob in after.items():
            if site not in before or not _same(before[site], log_prob):
                return (
                    f"site '{name}' is masked out for some data, whose entries have the value zero "
                    f"in all states, but site '{site}' reads them: put poutine.mask around the "
                    f"observations alone, so that '{name}' has its prior everywhere"
                )
    return None


def _another(site: Site, nesting: int) -> Tensor:
    """Another value of each entry."""
    spec, value = site_spec(site, nesting), site["value"]
    entries = value.argmax(-1) if spec.one_hot else value - spec.low
    return spec.value(torch.where(entries == 0, entries + 1, torch.zeros_like(entries)))


def _log_probs(programs: Programs, run: Run, values: dict[str, Tensor]) -> dict[str, Tensor]:
    substitutes = Substitutes(Minibatch(run.subsamples), values)
    with isolated(programs.owners), Recorder(substitutes) as recorder:
        programs.model(*programs.args, **programs.kwargs)
    trace = recorder.trace
    trace.compute_log_prob()
    sites = {n: s for n, s in trace.nodes.items() if s["type"] == "sample"}
    return {n: s["log_prob"] for n, s in sites.items() if isinstance(s.get("log_prob"), Tensor)}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
