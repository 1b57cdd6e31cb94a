"""The densities of programs at given latents, to look at them beside a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pyro
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.messengers import SampleFn, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.terms import Term, guide_term, model_term, possible_terms

__all__ = ["Probe", "ProgramError", "looking", "probe"]


class ProgramError(Exception):
    """Programs failed while they were looked at; the cause is their own error."""


class Probe(NamedTuple):
    """One run that was looked at, and the minibatch that it had."""

    guide_trace: Trace
    model_trace: Trace
    terms: dict[FactorKey, Term]
    subsamples: Minibatch

    @property
    def log_probs(self) -> dict[FactorKey, Tensor]:
        return {key: torch.as_tensor(t.log_prob).detach() for key, t in self.terms.items()}


@contextmanager
def looking() -> Iterator[None]:
    """
    Around runs beside a step: in its gradient mode, which programs may depend on, without Pyro's
    validation, and leaving nothing behind. Every such block begins with the random stream of the
    step.
    """
    with isolated(), pyro.validation_enabled(False):
        yield


def probe(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    sample_fn: SampleFn | None = None,
    leading: Leading = ALONE,
) -> Probe:
    """
    Run the programs, inside of :func:`looking`.

    Factors whose density cannot be computed (a flow without an inverse) are left out.

    :param subsamples: the minibatch to look at.
    :param values: of guide sites, by name.
    :param sample_fn: gives the values of the other random sites.
    :param leading: the leading dims, with the particles' plates.
    :raises ProgramError: from the programs' own error.
    """
    substitutes = Substitutes(Minibatch(subsamples), values or {}, sample_fn)
    try:
        guide_trace, model_trace = run_pair(programs, substitutes, leading)
        found = [*possible_terms(model_term, model_trace)]
        found += possible_terms(guide_term, guide_trace)
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error
    return Probe(guide_trace, model_trace, {t.key: t for t in found}, substitutes.subsamples)
