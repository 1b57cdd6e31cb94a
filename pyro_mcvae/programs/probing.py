"""Probe runs: the densities of programs at given latents, beside a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import pyro
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, run_model, run_pair, with_changes
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.fixed_noise import FixedNoise
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.known_logs import without_known_logs
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.messengers import SampleFn, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.terms import Term, guide_term, model_term, possible_terms, scored
from pyro_mcvae.programs.validation import unvalidated


class ProgramError(Exception):
    """The programs failed in a probe run; the cause is their own error."""


class Probe(NamedTuple):
    """One probe run, and its minibatch."""

    guide_trace: Trace
    model_trace: Trace
    terms: dict[FactorKey, Term]
    subsamples: Minibatch

    @property
    def log_probs(self) -> dict[FactorKey, Tensor]:
        return {key: torch.as_tensor(t.log_prob).detach() for key, t in self.terms.items()}


@contextmanager
def probing(programs: Programs, fixes: bool = True) -> Iterator[FixedNoise]:
    """
    Around probe runs: without Pyro's validation and warnings, and leaving nothing behind.

    The gradient mode is that of the step, on which programs may depend. Every such block begins
    with the random state of the step; random numbers outside sample sites are constants.

    :param bool fixes: False to let programs draw them.
    """
    noise = FixedNoise(fixes)
    with (
        isolated(programs.owners),
        pyro.validation_enabled(False),
        warnings.catch_warnings(),
        without_known_logs(),
        noise.active(),
    ):
        warnings.simplefilter("ignore")
        yield noise


@contextmanager
def perturbed(programs: Programs) -> Iterator[None]:
    """
    Let all parameters have generic values within.

    A zero-initialised layer has the same output at every discrete latent, which cannot be NaN.
    """
    modules = (m for m in programs.owners if isinstance(m, torch.nn.Module))
    own = [p for m in modules for p in m.parameters(recurse=False)]
    store = [p for _, p in pyro.get_param_store().named_parameters()]
    found = {id(p): p for p in (*own, *store) if p.is_floating_point()}
    before = [(p, p.data) for p in found.values()]
    try:
        for p, data in before:
            # No two entries change by the same, and no random numbers are taken.
            index = torch.arange(1, 1 + data.numel(), device=data.device)
            noise = (math.sqrt(2) * index.double()).sin().reshape(data.shape).to(data)
            p.data = data + 0.15 * noise * (1 + data.abs())
        yield
    finally:
        for p, data in before:
            p.data = data


def probe(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    sample_fn: SampleFn | None = None,
    leading: Leading = ALONE,
) -> Probe:
    """
    Run the programs, within :func:`probing`.

    Factors whose density cannot be computed (a flow without an inverse) are left out.

    :param subsamples: the minibatch.
    :param values: of guide sites, by name.
    :param sample_fn: gives the values of the other random sites.
    :param leading: the leading dims, with the particles' plates.
    :raises ProgramError: from the programs' own error.
    """
    substitutes = Substitutes(Minibatch(subsamples), values or {}, sample_fn)
    try:
        guide_trace, model_trace = run_pair(programs, substitutes, leading)
        with _taking_any_value(guide_trace, model_trace):
            found = [*possible_terms(model_term, model_trace)]
            found += possible_terms(guide_term, guide_trace)
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error
    return Probe(guide_trace, model_trace, {t.key: t for t in found}, substitutes.subsamples)


def probe_model(
    programs: Programs,
    guide_trace: Trace,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    leading: Leading = ALONE,
) -> dict[FactorKey, Term]:
    """
    Run the model alone, within :func:`probing`, and return its factors.

    :param guide_trace: of a run of both.
    :param values: of the guide's sites, by name.
    :raises ProgramError: from the model's own error.
    """
    drawn = with_changes(guide_trace, {name: {"value": v} for name, v in values.items()})
    try:
        trace = run_model(programs, drawn, Substitutes(Minibatch(subsamples)), leading)
        with _taking_any_value(trace):
            return {t.key: t for t in possible_terms(model_term, trace)}
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error


def _taking_any_value(*traces: Trace) -> AbstractContextManager[None]:
    """Let distributions take NaN that were made outside of the programs, with validation."""
    return unvalidated([s["fn"] for trace in traces for s in scored(trace)])
