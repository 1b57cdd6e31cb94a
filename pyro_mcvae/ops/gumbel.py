"""Gumbel noise of categorical variables: by itself, and given the category that it leads to."""

from __future__ import annotations

import torch
from torch import Tensor

# Stands for minus infinity: exp of it is zero, and its gradients are numbers.
FLOOR = -1e4


def gumbel(logits: Tensor) -> Tensor:
    r"""
    :math:`g = l + \epsilon` with standard Gumbel :math:`\epsilon`; argmax g is categorical.

    :param ~torch.Tensor logits: shape ``[..., K]``; the gradient passes through.
    """
    return logits.clamp_min(FLOOR) - _exponential(logits, logits.shape).log()


def one_hot(category: Tensor, size: int) -> Tensor:
    """Booleans ``[..., size]``; unlike PyTorch's, without a look at the values by the host."""
    return category.unsqueeze(-1) == torch.arange(size, device=category.device)


def conditional_gumbel(logits: Tensor, category: Tensor) -> Tensor:
    r"""
    A draw of :func:`gumbel` given that its argmax is a category [1]:

    .. math::
        g_z = \log \textstyle\sum_i e^{l_i} - \log E_z, \qquad
        g_i = -\log \big( e^{-g_z} + E_i e^{-l_i} \big), \qquad E \sim \text{Exp}(1) .

    :param ~torch.Tensor logits: shape ``[*batch, K]``; the gradient passes through.
    :param ~torch.Tensor category: the category z, a shape that broadcasts with the batch.
    :returns: shape ``[*batch, K]``, broadcast.

    [1] Tucker et al. (2017), *REBAR: Low-variance, unbiased gradient estimates for discrete latent
    variable models*, appendix C.

    Example::

        >>> category = torch.tensor([0, 2])
        >>> conditional_gumbel(torch.zeros(2, 3), category).argmax(-1)
        tensor([0, 2])
    """
    logits = logits.clamp_min(FLOOR)
    hit = one_hot(category, logits.shape[-1])
    log_noise = _exponential(logits, torch.broadcast_shapes(hit.shape, logits.shape)).log()
    top = logits.logsumexp(-1, keepdim=True) - log_noise
    top = torch.where(hit, top, 0.0).sum(-1, keepdim=True)
    return torch.where(hit, top, -torch.logaddexp(-top, log_noise - logits))


def straight_through(soft: Tensor) -> Tensor:
    """The one-hot vector of the largest entry, with the gradient of the soft one."""
    hard = one_hot(soft.argmax(-1), soft.shape[-1]).to(soft)
    return hard + (soft - soft.detach())


def _exponential(like: Tensor, shape: torch.Size) -> Tensor:
    # In single precision the smallest draws may be zero, whose logarithm is not finite.
    noise = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_()
    return noise.clamp_min(torch.finfo(like.dtype).tiny)
