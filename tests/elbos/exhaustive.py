"""The ELBO of discrete guides as a sum over every assignment of values to every element."""

import itertools

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample


def assignments(site):
    """All values of a site as one tensor each; every element of its batch takes every value."""
    fn, shape = site["fn"], site["fn"].shape()
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    values = fn.enumerate_support(expand=False)
    values = values.reshape(len(values), *fn.event_shape)
    for chosen in itertools.product(values, repeat=fn.batch_shape.numel()):
        yield torch.stack(chosen).reshape(shape)


def exhaustive(model, guide, *args):
    """
    The loss of a guide without continuous sites, and its gradients by parameter; clears these.

    Programs are run with one assignment at a time, so that they may be anything.
    """
    shown = poutine.trace(guide).get_trace(*args)
    discrete = {
        name: site
        for name, site in shown.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
    }
    elbo = torch.zeros(())
    for values in itertools.product(*map(assignments, discrete.values())):
        data = dict(zip(discrete, values, strict=True))
        q = poutine.trace(poutine.condition(guide, data=data)).get_trace(*args)
        p = poutine.trace(poutine.condition(model, data=data)).get_trace(*args)
        # A mask or a scale changes the density of a draw, and not how often it is drawn.
        log_q = sum(q.nodes[name]["fn"].log_prob(data[name]).sum() for name in discrete)
        elbo = elbo + log_q.exp() * (p.log_prob_sum() - q.log_prob_sum())
    named = [*pyro.get_param_store().named_parameters()]
    grads = torch.autograd.grad(-elbo, [p for _, p in named], allow_unused=True)
    result = {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named, grads, strict=True)
    }
    return -elbo.item(), result
