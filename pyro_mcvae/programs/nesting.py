"""How many batch dims belong to the plates of a pair of programs."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample

from pyro_mcvae.programs.contract import check_run, check_sites
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.plates import LEADING
from pyro_mcvae.programs.run import Run, terms_of


def nesting_of(*traces: Trace) -> int:
    """The depth of the deepest plate dim in the traces, the particles' plate left out."""
    dims = [
        frame.dim
        for trace in traces
        # Also deterministic sites: their plates take batch dims as well.
        for site in trace.nodes.values()
        if site["type"] == "sample" and not site_is_subsample(site)
        for frame in site["cond_indep_stack"]
        if frame.dim is not None and frame.name != LEADING
    ]
    return -min(dims, default=0)


def single_run(programs: Programs, sums_in: int | None = None) -> Run:
    """
    A run without leading dims that leaves nothing behind.

    :param sums_in: how many batch dims belong to plates, to sum enumerated sites to their left;
        None to draw these.
    """
    state_dim = None if sums_in is None else -sums_in - 1
    with isolated(programs.owners):
        batch = Minibatch()
        traces = run_pair(programs, Substitutes(batch), Leading(state_dim=state_dim))
        terms, nesting = terms_of(*traces, state_dim), nesting_of(*traces)
        return Run(*traces, terms, nesting, None, subsamples=batch, state_dim=state_dim)


def checked_run(programs: Programs, strict_enumeration: bool) -> Run:
    """
    A run without leading dims, whose plates show how many batch dims they occupy.

    :raises ValueError: for programs that do not fit together, as without particles.
    """
    with isolated(programs.owners):
        batch = Minibatch()
        traces = run_pair(programs, Substitutes(batch))
        check_sites(*traces, strict_enumeration, before_sums=True)
        run = Run(*traces, terms_of(*traces), nesting_of(*traces), None, subsamples=batch)
        with warnings.catch_warnings():
            # What the model is to enumerate is in the model alone.
            warnings.filterwarnings("ignore", "Found vars in model but not guide")
            check_run(run, math.inf, strict_enumeration, before_sums=True)
    # Dims of size 1 that lie in no plate keep their place as well: what broadcasts against them
    # lies to their right, as the time of pyro.contrib.forecast.
    deepest = max((t.log_prob.dim() for t in run.terms), default=0)
    return replace(run, nesting=max(run.nesting, deepest))
