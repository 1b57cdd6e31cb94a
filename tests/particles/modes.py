"""The log weights and gradients of particles at given latents, in each way of running them."""

import pyro
import torch

from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.particles import runner as module
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.vmap import Mode

K = 3


def only(monkeypatch, *modes):
    """Leave out other ways to run several particles at once."""
    monkeypatch.setattr(module, "_AT_ONCE", modes)


def draws_of(sample):
    """The particles' draws of the local sites, as leaves of the graph."""
    shared = sample.structure.global_sites.guide
    result = {}
    for name, site in sample.runs[0].guide_trace.nodes.items():
        if is_random(site) and name not in shared:
            smooth = site["value"].is_floating_point()
            result[name] = site["value"].detach().clone().requires_grad_(smooth), site
    return result


def one(leaf, site, k, nesting):
    depth = nesting + site["fn"].event_dim
    if leaf.dim() > depth:
        leaf = leaf.select(leaf.dim() - depth - 1, k)
    return lambda msg: as_shape(leaf, msg["fn"].shape())


def gradients(log_weight, leaves):
    weights = torch.linspace(0.5, 1.5, log_weight.numel()).reshape(log_weight.shape)
    inputs = [t for t in leaves if t.requires_grad]
    result = torch.autograd.grad(
        (weights * log_weight).sum(), inputs, allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, result, strict=True)]


def check_way(model, guide, args=(), mode=None, vectorize=None, **options):
    """
    Check that log weights, and their gradients in latents and parameters, are those of a loop.

    :param mode: that is to be chosen; any that is no loop where it is left out.
    """
    programs = Programs(model, guide, args, {})
    sampler = ParticleSampler(K, vectorize, float("inf"), **options)
    first = sampler.sample(programs)
    chosen = sampler.runner.mode(programs)
    assert chosen is not Mode.LOOPED if mode is None else chosen is mode, chosen
    draws = draws_of(first)
    nesting = first.runs[0].nesting

    def given(msg):
        return draws[msg["name"]][0] if msg["name"] in draws else None

    def alone(k):
        def sample_fn(msg):
            name = msg["name"]
            return one(*draws[name], k, nesting)(msg) if name in draws else None

        return sample_fn

    together = sampler.resample(programs, first, K, lambda rows, shared: given)
    loop = ParticleSampler(K, False, float("inf"), **options)
    apart = loop.resample(programs, first, K, lambda rows, shared: alone(rows.start))
    assert len(together.runs) == 1
    assert len(apart.runs) == K
    torch.testing.assert_close(together.log_weight, apart.log_weight)
    modules = [p for m in (model, guide) if isinstance(m, torch.nn.Module) for p in m.parameters()]
    params = [p for _, p in pyro.get_param_store().named_parameters()] + modules
    leaves = [leaf for leaf, _ in draws.values()] + params
    result, expected = (gradients(s.log_weight, leaves) for s in (together, apart))
    torch.testing.assert_close(result, expected)
    assert any(bool(g.abs().sum() > 0) for g in result) or not result
    return chosen
