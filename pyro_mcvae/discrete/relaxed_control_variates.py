"""Control variates and estimators that relax a discrete site: REBAR, RELAX, Gumbel-softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.discrete.control_variates import (
    Baseline,
    LearnedBaseline,
    SiteSignal,
    no_baseline,
)
from pyro_mcvae.ops.gumbel import FLOOR, conditional_gumbel
from pyro_mcvae.programs.supports import Categories


class RELAX(LearnedBaseline):
    r"""
    A learned control variate c of the relaxed site [1], conditioned on each slot's category.

    With Gumbel noise :math:`g` given that its argmax is :math:`z_s`, an independent
    :math:`\tilde g` likewise, :math:`\sigma = \text{softmax}(g / \lambda)` as a function of the
    logits at fixed noise :math:`g - l`, and :math:`\tilde\sigma` at fixed category,

    .. math::
        \sum_s w_s \big\{ (f(z_s) - c(\tilde\sigma_s)) \nabla \log q(z_s)
            + \nabla c(\sigma_s) - \nabla c(\tilde\sigma_s) \big\}

    has the mean of REINFORCE for every c and weights of slots, because averaged over the category
    :math:`c(\tilde\sigma) \nabla \log q(z) + \nabla c(\tilde\sigma)` and
    :math:`\nabla c(\sigma)` are both the gradient of :math:`E[c(\sigma)]`. The network and the
    temperature :math:`\lambda` are trained to make the squared gradient with respect to the logits
    small. Exact sums take no control variate.

    :param torch.nn.Module network: ``network(relaxed, input)`` maps relaxed sites ``[S, *batch,
        K]``, and the first argument of the programs or what the site says under
        ``"baseline_input"`` (None if there is neither), to numbers ``[S, *batch]`` or ``[S,
        *batch, 1]``.
    :param float temperature: what :math:`\lambda` starts at.
    :raises ValueError: if the temperature is not positive; at a step, for sites that cannot be
        relaxed.

    [1] Grathwohl et al. (2018), *Backpropagation through the Void: Optimizing control variates for
    black-box gradient estimation*.

    Example::

        >>> class Network(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(10, 1)
        ...     def forward(self, relaxed, x):
        ...         return self.layer(relaxed)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=RELAX(Network()))
    """

    def __init__(self, network: Callable[[Tensor, Any], Tensor], temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.network = network
        self.log_temperature = torch.nn.Parameter(torch.tensor(math.log(temperature)))

    def control(self, relaxed: Tensor, signal: SiteSignal) -> Tensor:
        """c at relaxed values ``[S, *batch, K]``: ``[S, *batch]``."""
        args = signal.programs.args
        given = signal.input if signal.input is not None else (args[0] if args else None)
        found = self.network(relaxed, given)
        if found.shape == (*relaxed.shape[:-1], 1):
            found = found.squeeze(-1)
        if found.shape != relaxed.shape[:-1]:
            raise ValueError(
                f"{type(self).__name__} needs one number for each relaxed value of guide site "
                f"'{signal.name}', shape {tuple(relaxed.shape[:-1])}, got {tuple(found.shape)}"
            )
        return found

    def surrogate(self, signal: SiteSignal) -> Tensor:
        if not isinstance(signal.support, Categories):
            raise ValueError(
                f"{type(self).__name__} relaxes numbered categories, which guide site "
                f"'{signal.name}' has not: give it another baseline"
            )
        if signal.exact:
            return no_baseline(signal)
        logits = signal.support.logits
        with torch.enable_grad():
            gradient = self._gradient(signal, logits.detach().requires_grad_())
        finite = torch.where(logits.isneginf(), 0.0, logits)
        return (gradient.detach() * finite).sum() - self._variance_surrogate(gradient)

    def _variance_surrogate(self, gradient: Tensor) -> Tensor | float:
        """A scalar with the gradient of the variance, of which only the square depends on c."""
        learned = [p for p in self.parameters() if p.requires_grad]
        if not learned or not gradient.requires_grad:
            return 0.0
        # For the control variate alone: it may be computed from the programs' parameters.
        found = torch.autograd.grad((gradient**2).sum(), learned, allow_unused=True)
        parts = [(g * p).sum() for g, p in zip(found, learned, strict=True) if g is not None]
        return torch.stack(parts).sum().to(gradient.dtype) if parts else 0.0

    def _gradient(self, signal: SiteSignal, logits: Tensor) -> Tensor:
        """The estimate with respect to the site's logits, differentiable in c's parameters."""
        category = signal.support.category(signal.value)  # type: ignore[union-attr]
        category = category.expand(torch.broadcast_shapes(category.shape, signal.weight.shape))
        temperature = self.log_temperature.exp().to(logits)
        floored = logits.clamp_min(FLOOR)
        noise = (conditional_gumbel(logits, category) - floored).detach()
        free = ((floored + noise) / temperature).softmax(-1)
        bound_noise = conditional_gumbel(logits, category)
        bound = (bound_noise / temperature).softmax(-1)
        held = (bound_noise.detach() / temperature).softmax(-1)
        at_free, at_bound, at_held = (self.control(r, signal) for r in (free, bound, held))
        score = logits.log_softmax(-1).expand(*category.shape, -1)
        score = score.gather(-1, category.unsqueeze(-1)).squeeze(-1)
        cost = signal.cost - signal.upstream * at_held
        total = cost * torch.where(signal.weight > 0, score, 0.0)
        total = signal.weight * (total + signal.upstream * (at_free - at_bound))
        return torch.autograd.grad(total.sum(), logits, create_graph=True)[0]


class REBAR(RELAX):
    r"""
    The control variate :math:`c = \eta f` of a relaxed cost f [1], conditioned on each slot.

    Its scale :math:`\eta` and its temperature are trained. See :class:`RELAX` for the estimator.

    :param cost: ``cost(relaxed, input)``, an approximation of the ELBO terms behind the site that
        takes relaxed values ``[S, *batch, K]``; its own parameters are not trained by it.
    :param float temperature: what :math:`\lambda` starts at.
    :param float scale: what :math:`\eta` starts at.
    :raises ValueError: as :class:`RELAX`.

    [1] Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein (2017), *REBAR: Low-variance, unbiased
    gradient estimates for discrete latent variable models*.

    Example::

        >>> locs = torch.arange(3.0)
        >>> rebar = REBAR(lambda y, x: -((x - y @ locs) ** 2) / 2)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=rebar)
    """

    def __init__(
        self,
        cost: Callable[[Tensor, Any], Tensor],
        temperature: float = 0.5,
        scale: float = 1.0,
    ) -> None:
        # Not a module of this one, whose parameters would be trained.
        super().__init__(lambda relaxed, given: cost(relaxed, given), temperature)
        self.scale = torch.nn.Parameter(torch.tensor(float(scale)))

    def control(self, relaxed: Tensor, signal: SiteSignal) -> Tensor:
        return self.scale.to(relaxed) * super().control(relaxed, signal)


class GumbelSoftmax(Baseline):
    r"""
    For comparison: the site is drawn from its Gumbel-softmax relaxation [1], with gradients through
    it.

    A biased estimator. OneHotCategorical and Bernoulli sites, and vectors of them; nothing is
    summed, and their log densities are extended linearly to relaxed values. ``entropy="exact"``
    takes the relaxation out of the entropy.

    :param float temperature: may be set anew between steps, to anneal it.
    :param bool hard: straight-through: the programs see one-hot values, the gradient the soft ones.
    :raises ValueError: if the temperature is not positive.

    [1] Jang, Gu, Poole (2017), *Categorical Reparameterization with Gumbel-Softmax*.

    Example::

        >>> elbo = TraceRaoBlackwell_ELBO(baseline=GumbelSoftmax(0.5), entropy="exact")
    """

    relaxed = True

    def __init__(self, temperature: float = 0.5, hard: bool = True) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature
        self.hard = hard

    def surrogate(self, signal: SiteSignal) -> Tensor:
        return no_baseline(signal)
