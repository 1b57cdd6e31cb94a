"""Discrete distributions extended to relaxed values, which the gradient passes through."""

from __future__ import annotations

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.nn.functional import softplus

from pyro_mcvae.ops.gumbel import gumbel, straight_through
from pyro_mcvae.programs.supports import unmasked
from pyro_mcvae.programs.types import Distribution


def relaxed_sample(fn: Distribution, temperature: float, hard: bool) -> Tensor | None:
    """
    A draw of the Gumbel-softmax relaxation; None for distributions without one.

    :param fn: OneHotCategorical, Bernoulli, or a vector of independent ones.
    :param bool hard: one-hot (or binary) values, with the gradient of the soft ones.
    """
    fn = unmasked(fn)
    if isinstance(fn, torch.distributions.Independent):
        return relaxed_sample(fn.base_dist, temperature, hard)
    if isinstance(fn, dist.OneHotCategorical):
        soft = (gumbel(fn.logits) / temperature).softmax(-1)
        return straight_through(soft) if hard else soft
    if isinstance(fn, dist.Bernoulli):
        pair = torch.stack([torch.zeros_like(fn.logits), fn.logits], -1)
        soft = (gumbel(pair) / temperature).softmax(-1)
        return (straight_through(soft) if hard else soft)[..., 1]
    return None


def relaxed_log_prob(fn: Distribution, value: Tensor) -> Tensor:
    r"""
    The log density, linear in the value: :math:`\sum_k z_k \log q_k`.

    :raises NotImplementedError: for distributions without a relaxation.
    """
    if unmasked(fn) is not fn:
        return torch.where(fn._mask, relaxed_log_prob(unmasked(fn), value), 0.0)
    if isinstance(fn, torch.distributions.Independent):
        each = relaxed_log_prob(fn.base_dist, value)
        count = fn.reinterpreted_batch_ndims
        return each.sum(tuple(range(-count, 0))) if count else each
    if isinstance(fn, dist.OneHotCategorical):
        return (value * fn.logits.clamp_min(-1e4)).sum(-1)
    if isinstance(fn, dist.Bernoulli):
        return value * fn.logits - softplus(fn.logits)
    raise NotImplementedError(
        f"{type(fn).__name__} has no density at relaxed values: use OneHotCategorical or Bernoulli"
    )
