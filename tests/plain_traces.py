"""Pyro's own traces of two programs at given values, without any of the package's handlers."""

import pyro.poutine as poutine
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample

from pyro_mcvae.programs.types import PARTICLE_PLATE


class Fix(Messenger):
    """Gives sites their values, and does nothing else."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg):
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True


def values_of(run, subsamples, k):
    """The guide's values in particle k of a run, and the minibatch."""
    values = dict(subsamples)
    for name, site in run.guide_trace.nodes.items():
        if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
            continue
        value, frames = site["value"].detach(), site["cond_indep_stack"]
        if any(f.name == PARTICLE_PLATE for f in frames):
            value = value[k]
        depth = max((-f.dim for f in frames if f.dim and f.name != PARTICLE_PLATE), default=0)
        while value.dim() > depth + site["fn"].event_dim and value.shape[0] == 1:
            value = value[0]
        # A copy: nothing that is cached at the drawn tensor is found again.
        values[name] = value.clone()
    return values


def plain_traces(model, guide, args, values):
    """Of the model and of the guide, at these values, with log densities."""
    with Fix(values):
        if isinstance(guide, GuideMessenger):
            guide(*args)
            model_trace, guide_trace = guide.get_traces()
        else:
            guide_trace = poutine.trace(guide).get_trace(*args)
            model_trace = poutine.trace(model).get_trace(*args)
    model_trace.compute_log_prob()
    guide_trace.compute_log_prob()
    return model_trace, guide_trace
