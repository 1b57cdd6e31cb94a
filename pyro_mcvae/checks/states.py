"""
Whether a model with all values of its enumerated sites side by side is the model at each of them.

A program that counts dims from the left, or reads a shape, runs with the dims of states in front,
and is another program. Shapes do not show it. So its densities at the last value of each site are
compared with those of a run in which the site has that value alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.checks.closeness import is_close
from pyro_mcvae.programs.enumeration import is_state, support_of_state
from pyro_mcvae.programs.execution import Programs, run_model
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.probing import ProgramError, looking, probe
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent, unscaled_log_prob
from pyro_mcvae.programs.terms import scored

__all__ = ["check_states"]

_logger = logging.getLogger(__name__)


def check_states(programs: Programs, run: Run) -> None:
    """
    Check that a model's densities do not depend on how many values of its sites are looked at.

    Programs that cannot be compared (they draw noise of their own) pass.

    :param run: in which the model's enumerated sites are summed.
    :raises RuntimeError: naming the site that has another density.
    """
    try:
        with looking():
            odd = _odd(programs, run)
    except ProgramError as error:
        _logger.info("states cannot be compared with single ones: %s", error)
        return
    for name, (together, alone) in odd.items():
        raise RuntimeError(
            f"site '{name}' of the model has another log density where all values of the "
            f"enumerated sites stand side by side than at one of them ({together:.4g} and "
            f"{alone:.4g} in sum), so the program takes one dim for another: index and reduce "
            f"from the right, as in Vindex(means)[..., y] and softmax(-1), and read no shape of an "
            f"enumerated value; or draw these sites in the guide"
        )


def _odd(programs: Programs, run: Run) -> dict[str, tuple[float, float]]:
    guide_trace = probe(programs, run.subsamples).guide_trace
    substitutes = Substitutes(Minibatch(run.subsamples))
    together = run_model(programs, guide_trace, substitutes, Leading(state_dim=-1 - run.nesting))
    values = {s["name"]: s["value"] for s in scored(guide_trace) if is_latent(s)}
    drawn = probe(programs, run.subsamples, values).model_trace.nodes
    for site in scored(together):
        if is_state(site) and site["name"] in drawn:
            shape = drawn[site["name"]]["fn"].shape()
            values[site["name"]] = support_of_state(site)[-1].expand(shape)
    alone, again = _densities(programs, run, values), _densities(programs, run, values)
    found = _log_probs(together)
    last = {name: _at_last(value, run.nesting) for name, value in found.items()}
    return {
        name: (float(last[name].sum()), float(value.sum()))
        for name, value in alone.items()
        if name in last and is_close(value, again[name]) and not is_close(last[name], value)
    }


def _densities(programs: Programs, run: Run, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _log_probs(probe(programs, run.subsamples, values).model_trace)


def _log_probs(trace: Trace) -> dict[str, Tensor]:
    return {s["name"]: unscaled_log_prob(s, "model") for s in scored(trace)}


def _at_last(log_prob: Tensor, nesting: int) -> Tensor:
    """A log density at the last value of each enumerated site: ``[*plates]``."""
    while log_prob.dim() > nesting:
        log_prob = log_prob[-1]
    return log_prob
