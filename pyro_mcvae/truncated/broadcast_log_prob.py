r"""
Fast log densities of many states, for the sites of binary sparse coding.

A distribution expands its parameters to the shape of all states: the noise of a Gaussian decoder,
one number, to ``[S, N, pixels]``. Its ``log_prob`` then computes as many logarithms and divisions.
Here they are computed once:

.. math::
    \log N(x; \mu, \sigma) = -\frac{1}{2 \sigma^2} \sum_d (x_d - \mu_d)^2
        - D \log (\sqrt{2 \pi} \sigma), \qquad
    \log B(z; l) = \sum_d (z_d - m_d) l_d - \sum_d \log (1 + e^{-|l_d|}), \quad m_d = [l_d > 0] .

A step of denoising with 32 states then takes half of the time.
"""

from __future__ import annotations

import math

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions.utils import probs_to_logits
from torch.nn.functional import mse_loss, softplus

from pyro_mcvae.ops.compat import mask_of, source_of_view, validate
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.sites import masked, without_autocast
from pyro_mcvae.programs.terms import Term, model_term
from pyro_mcvae.programs.types import Distribution, FactorKey, Site

# Only these exact types, because subclasses may have another density.
_NORMAL = (dist.Normal, torch.distributions.Normal)
_BERNOULLI = (dist.Bernoulli, torch.distributions.Bernoulli)


def broadcast_term(site: Site) -> Term:
    """Return :func:`~pyro_mcvae.programs.terms.model_term`, with the faster density if possible."""
    log_prob = None
    if not site["infer"] and not site["args"] and not site["kwargs"]:
        log_prob = broadcast_log_prob(site["fn"], site["value"])
    if log_prob is None:
        return model_term(site)
    return Term(FactorKey("model", site["name"]), site, masked(site, log_prob))


def broadcast_log_prob(fn: Distribution, value: Tensor) -> Tensor | None:
    """
    Return ``fn.log_prob(value)`` of a vector with the same Normal noise in all entries, also
    masked, or of a vector of Bernoulli variables with the same logits in all states.

    :param fn: a distribution.
    :param ~torch.Tensor value: broadcastable to its shape.
    :returns: the same up to rounding, with the same gradients; None for other distributions, and
        for values that the distribution rejects.

    Example::

        >>> fn = dist.Normal(torch.zeros(5, 3), 2.0).to_event(1)
        >>> broadcast_log_prob(fn, torch.ones(3)).shape
        torch.Size([5])
    """
    base, events, mask = fn, 0, None
    while has_methods_of(base, torch.distributions.Independent):
        base, events = base.base_dist, events + base.reinterpreted_batch_ndims
    if type(base) is MaskedDistribution and isinstance(mask_of(base), Tensor):
        base, mask = base.base_dist, mask_of(base)
    if not events or not value.is_floating_point():
        return None
    log_prob = None
    with without_autocast():
        if type(base) in _NORMAL:
            log_prob = _normal(base, value, events, mask)
        elif type(base) in _BERNOULLI and mask is None and events == 1:
            log_prob = _bernoulli(base, value)
    if log_prob is None or not _is_valid(base, value):
        return None
    return log_prob.expand(torch.broadcast_shapes(value.shape, base.batch_shape)[:-events])


def _is_valid(base: Distribution, value: Tensor) -> bool:
    try:
        validate(base, value)
    except ValueError:
        return False
    return True


def _normal(base: Distribution, value: Tensor, events: int, mask: Tensor | None) -> Tensor | None:
    scale = _unexpanded(base.scale, 1)
    if scale is None or not value.dtype == base.loc.dtype == scale.dtype:
        return None
    scale, dims = scale.reshape(()), tuple(range(-events, 0))
    count: Tensor | int = math.prod(base.batch_shape[-events:])
    if mask is not None:
        batch_strides = mask.stride()[:-events]
        small = mask[tuple(slice(1) if s == 0 else slice(None) for s in batch_strides)]
        count = small.sum(dims)
        # Missing entries may be NaN, whose gradient a later mask would not remove.
        value = torch.where(small, value, torch.zeros_like(value))
    # The fewest forward and backward passes over memory.
    loc, value = torch.broadcast_tensors(base.loc, value)
    squares = mse_loss(loc, value, reduction="none")
    if mask is not None:
        squares = torch.where(mask, squares, torch.zeros_like(squares))
    normaliser = scale.log() + math.log(math.sqrt(2 * math.pi))
    return -squares.sum(dims) / (2 * scale.square()) - count * normaliser


def _bernoulli(base: Distribution, value: Tensor) -> Tensor | None:
    name = "logits" if "logits" in base.__dict__ else "probs"
    logits = _unexpanded(getattr(base, name), base.batch_shape[-1])
    if logits is None:
        return None
    if name == "probs":
        logits = probs_to_logits(logits, is_binary=True)
    # Zero times an infinite logit is zero here.
    most = torch.finfo(logits.dtype).max / 4
    logits = logits.clamp(-most, most)
    # Relative to the most probable value: no two large terms cancel.
    mode = logits > 0
    less = value - mode.to(value)
    # Sums of log densities must not be rounded, even if float32 products may be.
    if torch.get_float32_matmul_precision() == "highest" and value.dtype == logits.dtype:
        total = torch.mv(less.reshape(-1, len(logits)), logits).reshape(value.shape[:-1])
    else:
        total = (less * logits).sum(-1)
    total = total - softplus(torch.where(mode, -logits, logits)).sum()
    return torch.where(total < -most / 2, -torch.inf, total)


def _unexpanded(parameter: Tensor, size: int) -> Tensor | None:
    """Return the ``size`` numbers that a parameter was expanded from; None for other parameters."""
    whole = source_of_view(parameter)
    source = parameter if whole is None else whole
    sizes = zip(parameter.stride(), parameter.shape, strict=True)
    strides = [stride for stride, n in sizes if n != 1]
    expanded = strides[-1] == 1 and not any(strides[:-1]) if size > 1 else not any(strides)
    # A detached parameter, too, may be a view.
    same = source.is_contiguous() and source.requires_grad == parameter.requires_grad
    if not (expanded and same and source.numel() == size):
        return None
    return source.reshape(size)
