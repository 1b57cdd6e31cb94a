r"""
Log densities of Normal sites, and of the priors of Bernoulli vectors, for many states.

Terms that all states share are computed only once.

A distribution broadcasts its parameters against each other, and plates expand them further. The
scale of a Gaussian decoder, one number, is expanded to shape ``[S, N, pixels]``, and ``log_prob``
computes as many logarithms and squares. Here parameters keep their size before the expansion:

.. math::
    \log N(x; \mu, \sigma) = -\frac{1}{2 \sigma^2} \sum_d (x_d - \mu_d)^2
        - \sum_d \log (\sqrt{2 \pi} \sigma), \qquad
    \log B(z; l) = \sum_d (z_d - m_d) l_d - \sum_d \log (1 + e^{-|l_d|}), \quad m_d = [l_d > 0] .
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions.utils import probs_to_logits
from torch.nn.functional import mse_loss, softplus

from pyro_mcvae.ops.compat import mask_of, source_of_view, validate
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.sites import masked, unscaled_log_prob, without_autocast
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Distribution, FactorKey, Site


def broadcast_log_prob(fn: Distribution, value: Tensor) -> Tensor | None:
    """
    Return ``fn.log_prob(value)`` of a Normal, also under ``to_event`` and ``mask``, or of a vector
    of Bernoulli variables with the same logits in all states.

    :param fn: a distribution.
    :param ~torch.Tensor value: broadcastable to its shape.
    :returns: the same up to rounding, with the same gradients; None for any other distribution.
    :raises ValueError: if the distribution's validation rejects the value.

    Example::

        >>> fn = dist.Normal(torch.zeros(5, 3), 2.0).to_event(1)
        >>> broadcast_log_prob(fn, torch.ones(3)).shape
        torch.Size([5])
    """
    base, events, mask = fn, 0, None
    while has_methods_of(base, torch.distributions.Independent):
        base, events = base.base_dist, events + base.reinterpreted_batch_ndims
    if type(base) is MaskedDistribution and isinstance(mask_of(base), Tensor):
        base, mask = base.base_dist, _unexpanded(mask_of(base))
    form = _FORMS.get(type(base))
    if form is None or not value.is_floating_point():
        return None
    validate(base, value)
    shape = torch.broadcast_shapes(value.shape, base.batch_shape)
    if mask is not None:
        # Missing entries may be NaN, whose gradient a later mask would not remove.
        value = torch.where(mask, value, torch.zeros_like(value))
    with without_autocast():
        log_prob = form(base, value, shape[len(shape) - events :], mask)
    batch = shape[: len(shape) - events]
    return log_prob if log_prob is None else log_prob.expand(batch)


def broadcast_term(site: Site) -> Term:
    """Return :func:`~pyro_mcvae.programs.terms.model_term`, with the faster density if possible."""
    log_prob = None
    if not site["infer"] and not site["args"] and not site["kwargs"]:
        try:
            log_prob = broadcast_log_prob(site["fn"], site["value"])
        except ValueError:
            log_prob = None  # unscaled_log_prob raises an error that names the site
    if log_prob is None:
        log_prob = unscaled_log_prob(site, "model")
    key = FactorKey("model", site["name"])
    return Term(key, site, masked(site, log_prob))


def _normal(base: Distribution, value: Tensor, event: torch.Size, mask: Tensor | None) -> Tensor:
    scale = _unexpanded(base.scale)
    dims = list(range(-len(event), 0))
    squares = _squares(base.loc, value)
    normaliser = scale.log() + math.log(math.sqrt(2 * math.pi))
    if mask is not None:
        squares, normaliser = _zero_masked(squares, mask), _zero_masked(normaliser, mask)
    normaliser = _sum(normaliser, event)
    # One scale for a whole event divides its sum.
    if dims and all(n == 1 for n in scale.shape[-len(dims) :]):
        squares = squares.sum(dims)
        variance = scale.reshape(scale.shape[: scale.dim() - len(dims)]).square()
        return torch.addcdiv(normaliser.neg(), squares, variance, value=-0.5)
    squares = squares / scale.square()
    return -0.5 * (squares.sum(dims) if dims else squares) - normaliser


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared difference, with the fewest forward and backward passes over memory."""
    if a.dtype != b.dtype:
        return (a - b).square()
    a, b = torch.broadcast_tensors(a, b)
    return mse_loss(a, b, reduction="none")


def _bernoulli(
    base: Distribution, value: Tensor, event: torch.Size, mask: Tensor | None
) -> Tensor | None:
    """Return the density of a vector with the same logits in all states; None for any other."""
    if "logits" in base.__dict__:
        logits = _unexpanded(base.logits)
    else:
        logits = probs_to_logits(_unexpanded(base.probs), is_binary=True)
    if mask is not None or len(event) != 1 or logits.numel() != event[0]:
        return None
    # Zero times an infinite logit is zero here.
    most = torch.finfo(logits.dtype).max / 4
    logits = logits.reshape(event).clamp(-most, most)
    # Relative to the most probable value: no two large terms cancel.
    mode = logits > 0
    less = value - mode.to(value)
    # Sums of log densities must not be rounded, even if float32 products may be.
    if torch.get_float32_matmul_precision() == "highest" and value.dtype == logits.dtype:
        total = torch.mv(less.reshape(-1, event[0]), logits).reshape(value.shape[:-1])
    else:
        total = (less * logits).sum(-1)
    total = total - softplus(torch.where(mode, -logits, logits)).sum()
    return torch.where(total < -most / 2, -torch.inf, total)


def _zero_masked(value: Tensor, mask: Tensor) -> Tensor:
    """Set masked entries to zero."""
    return torch.where(mask, value, torch.zeros_like(value))


_Form = Callable[[Distribution, Tensor, torch.Size, Tensor | None], Tensor | None]
_FORMS: dict[type, _Form] = {
    # Only these exact types, because subclasses may have another density.
    dist.Normal: _normal,
    dist.Bernoulli: _bernoulli,
    torch.distributions.Normal: _normal,
    torch.distributions.Bernoulli: _bernoulli,
}


def _sum(value: Tensor, event: torch.Size) -> Tensor:
    """Sum over event dims; those of size one count as the event's size."""
    if not event:
        return value
    sizes = value.shape[-len(event) :]
    repeats = math.prod(n for n, had in zip(event, sizes, strict=True) if had == 1)
    if all(n == 1 for n in sizes):
        value = value.reshape(value.shape[: value.dim() - len(event)])
    else:
        value = value.sum(list(range(-len(event), 0)))
    return value if repeats == 1 else repeats * value


def _unexpanded(parameter: Tensor) -> Tensor:
    """Return a parameter with size one in the dims along which it was expanded."""
    sizes, strides = parameter.shape, parameter.stride()
    shape = [1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True)]
    if tuple(shape) == sizes:
        return parameter
    source = source_of_view(parameter)
    if (
        source is not None
        # A detached parameter, too, may be a view.
        and source.requires_grad == parameter.requires_grad
        and source.numel() == math.prod(shape)
        and source.is_contiguous()
        and source.storage_offset() == parameter.storage_offset()
        and _is_contiguous(shape, strides)
    ):
        # Without the expansion, whose gradient would have the expanded size.
        return source.reshape(shape)
    for dim, (size, target) in enumerate(zip(sizes, shape, strict=True)):
        if target != size:
            parameter = parameter.narrow(dim, 0, 1)
    return parameter


def _is_contiguous(shape: list[int], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
