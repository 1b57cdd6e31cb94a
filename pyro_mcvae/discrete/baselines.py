"""Baselines and control variates for score-function gradients of discrete sites."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.ops.slots import FLOOR, conditional_gumbel
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.stored_module import StoredModule
from pyro_mcvae.programs.supports import Categories, Support

# Score-function surrogates over the slots of a discrete variable, and their baselines.


def score_surrogate(signal: Tensor, score: Tensor) -> Tensor:
    r"""
    Return a scalar whose gradient is :math:`\sum_s r_s \nabla \log q(z_s)`.

    :param ~torch.Tensor signal: r, the factor of each slot's score; it is detached.
    :param ~torch.Tensor score: :math:`\log q(z_s)`, of the same shape; it may be infinite if the
        signal is zero.

    Example::

        >>> import torch
        >>> from pyro_mcvae.discrete.baselines import score_surrogate
        >>> logits = torch.zeros(2, requires_grad=True)
        >>> score_surrogate(torch.tensor([1.0, 0.0]), logits.log_softmax(-1)).backward()
        >>> logits.grad
        tensor([ 0.5000, -0.5000])
    """
    signal = signal.detach()
    return (signal * score.masked_fill(signal == 0, 0.0)).sum()


def leave_one_out_baseline(cost: Tensor, sampled: Tensor) -> Tensor:
    r"""
    Return the mean cost of the other draws, or of all draws for summed categories.

    With :math:`b_j` for the draws and their mean :math:`\bar b` for the summed categories,

    .. math::
        \sum_{z \in C} \bar b \nabla q(z)
            + \frac{q(\bar C)}{n} \sum_j b_j \nabla \log q(v_j)

    has mean zero. Each :math:`b_j` is independent of :math:`v_j`, so the second term's mean is
    :math:`E[b] \nabla q(\bar C)`, and q sums to one.

    :param ~torch.Tensor cost: shape ``[S, *batch]``.
    :param ~torch.Tensor sampled: which slots are draws; at least two, or none, per batch element.
    :returns: the baselines, of the same shape; zero without draws.

    Example::

        >>> import torch
        >>> from pyro_mcvae.discrete.baselines import leave_one_out_baseline
        >>> sampled = torch.tensor([False, True, True])
        >>> leave_one_out_baseline(torch.tensor([5.0, 1.0, 2.0]), sampled)
        tensor([1.5000, 2.0000, 1.0000])
    """
    count = sampled.sum(0, keepdim=True)
    total = torch.where(sampled, cost, 0.0).sum(0, keepdim=True)
    mean_of_others = (total - cost) / (count - 1).clamp_min(1)
    return torch.where(sampled, mean_of_others, total / count.clamp_min(1))


# Baselines of the score function, subtracted from a discrete site's cost.


@dataclass(frozen=True)
class SiteSignal:
    """
    The input of a baseline for one discrete site; all tensors are detached except ``score``.

    :ivar name: the site's name.
    :ivar weight: the weight of each slot, shape ``[S, *batch]``.
    :ivar sampled: which slots are draws.
    :ivar score: log q of each slot's value, with its gradient.
    :ivar cost: the expected ELBO terms downstream of each slot, times ``upstream``.
    :ivar upstream: the weight of the slots of other sites on which the site depends, a shape that
        broadcasts with ``weight``.
    :ivar support: the site's values.
    :ivar value: the slots' values, ``[S, *batch, *event]``.
    :ivar exact: whether the slots are all values, without randomness.
    :ivar extra: whether the last slot is an independent draw, without weight.
    :ivar input: ``infer={"mcvae": {"baseline_input": ...}}`` of the site, or None.
    """

    name: str
    weight: Tensor
    sampled: Tensor
    score: Tensor
    cost: Tensor
    upstream: Tensor
    support: Support | None
    value: Tensor
    exact: bool
    extra: bool
    input: object
    programs: Programs

    def average_cost(self) -> Tensor:
        """Return the expected cost downstream of each slot; zero if its upstream weight is zero."""
        reached = self.upstream > 0
        return torch.where(reached, self.cost / torch.where(reached, self.upstream, 1.0), 0.0)


class Baseline:
    """
    A variance reduction of one discrete site's gradient that does not change its mean.

    Subclasses override :meth:`surrogate`; that of this class is REINFORCE, without a baseline.

    :cvar min_samples: the number of draws it needs.
    :cvar extra_draw: whether it needs another draw of the site, independent of the slots.

    Example, a constant that is subtracted from the cost of draws (``num_categories=0``)::

        >>> from pyro_mcvae import Baseline, TraceRaoBlackwell_ELBO
        >>> from pyro_mcvae.discrete.baselines import score_surrogate
        >>> class Constant(Baseline):
        ...     def surrogate(self, signal):
        ...         return score_surrogate(signal.weight * (signal.cost - 3.0), signal.score)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=0, baseline=Constant())
    """

    min_samples = 1
    extra_draw = False

    def surrogate(self, signal: SiteSignal) -> Tensor:
        r"""
        Return a scalar with the gradient of the site's distribution, and of learned parts; here
        :math:`\sum_s w_s f(z_s) \nabla \log q(z_s)`.
        """
        return score_surrogate(signal.weight * signal.cost, signal.score)


class IndependentDraw(Baseline):
    r"""
    REINFORCE+: the cost of an independent draw is subtracted from all slots' costs.

    All slots of a datum use the same draw, so a step evaluates k + n + 1 slots.

    Example::

        >>> from pyro_mcvae import IndependentDraw, TraceRaoBlackwell_ELBO
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=IndependentDraw())
    """

    extra_draw = True

    def surrogate(self, signal: SiteSignal) -> Tensor:
        if not signal.extra:  # an exact sum
            return super().surrogate(signal)
        # The last slot has weight zero.
        return score_surrogate(signal.weight * (signal.cost - signal.cost[-1:]), signal.score)


class LeaveOneOut(Baseline):
    r"""
    The mean cost of the other draws is subtracted from the cost of each draw. The mean cost of all
    draws is subtracted from the costs of the summed categories. See
    :func:`~pyro_mcvae.discrete.baselines.leave_one_out_baseline`.

    It needs ``num_samples >= 2``.

    Example::

        >>> from pyro_mcvae import LeaveOneOut, TraceRaoBlackwell_ELBO
        >>> elbo = TraceRaoBlackwell_ELBO(1, num_samples=2, baseline=LeaveOneOut())
    """

    min_samples = 2

    def surrogate(self, signal: SiteSignal) -> Tensor:
        baseline = leave_one_out_baseline(signal.cost, signal.sampled)
        return score_surrogate(signal.weight * (signal.cost - baseline), signal.score)


class SummedMean(Baseline):
    r"""
    The mean cost :math:`b = \sum_{z \in C} q(z) f(z) / q(C)` of the summed categories is
    subtracted from all slots' costs.

    It needs no further evaluation. It does not depend on the draws, so the mean does not change.
    It is not in the paper. Without summed categories it is REINFORCE.

    Example::

        >>> from pyro_mcvae import SummedMean, TraceRaoBlackwell_ELBO
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=SummedMean())
    """

    def surrogate(self, signal: SiteSignal) -> Tensor:
        mass = torch.where(signal.sampled, 0.0, signal.weight)
        total = (mass * signal.cost).sum(0, keepdim=True)
        mass = mass.sum(0, keepdim=True)
        baseline = torch.where(mass > 0, total / torch.where(mass > 0, mass, 1.0), 0.0)
        return score_surrogate(signal.weight * (signal.cost - baseline), signal.score)


class LearnedBaseline(Baseline, StoredModule):
    """
    A baseline with parameters, which are trained together with the parameters of the model.

    Its input is the first argument of the model and guide, or a site's
    ``infer={"mcvae": {"baseline_input": x[idx]}}``.
    """

    def input_of(self, signal: SiteSignal) -> object:
        """Return the input of the network."""
        if signal.input is not None:
            return signal.input
        args = signal.programs.args
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(
                f"{type(self).__name__} takes the first argument of the model as its input, got "
                f"{type(args[0]).__name__ if args else 'none'}: pass another one by "
                f"infer={{'mcvae': {{'baseline_input': x}}}} at guide site '{signal.name}'"
            )
        return args[0]

    def fitted(self, output: Tensor, signal: SiteSignal) -> Tensor:
        """Check a network's output, ``[*plates]`` or ``[*plates, 1]``, against the site's shape."""
        shape = torch.broadcast_shapes(signal.weight.shape, signal.cost.shape)[1:]
        for prediction in (output, output.squeeze(-1) if output.shape[-1:] == (1,) else output):
            try:
                if torch.broadcast_shapes(prediction.shape, shape) == shape:
                    return prediction
            except RuntimeError:
                pass
        while shape[:1] == (1,):
            shape = shape[1:]
        raise ValueError(
            f"{type(self).__name__} predicts one number for each datum of guide site "
            f"'{signal.name}', so its network must return shape {tuple(shape)} (or that with a "
            f"last dimension of 1), got {tuple(output.shape)}: pass the site's own minibatch by "
            f"infer={{'mcvae': {{'baseline_input': x[idx]}}}}"
        )


class NVIL(LearnedBaseline):
    r"""
    Subtracts a network's prediction b(x) of the cost [1], trained by least squares:

    .. math::
        \sum_s w_s (f(z_s) - b(x)) \nabla \log q(z_s), \qquad
        \min_b \sum_s w_s (f(z_s) - b(x))^2 .

    :param torch.nn.Module network: maps data to one number each, ``[*plates]`` or
        ``[*plates, 1]``. Its input is the first argument of the programs, or the site's
        ``"baseline_input"``. Costs include N/B of subsampled plates.

    [1] Mnih, Gregor (2014), *Neural Variational Inference and Learning in Belief Networks*.

    Example::

        >>> import torch
        >>> from pyro_mcvae import NVIL, TraceRaoBlackwell_ELBO
        >>> network = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.Tanh(),
        ...                               torch.nn.Linear(64, 1))
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=NVIL(network))
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def surrogate(self, signal: SiteSignal) -> Tensor:
        prediction = self.fitted(self.network(self.input_of(signal)), signal)
        baseline = signal.upstream * prediction.detach()
        loss = signal.weight * signal.upstream * (signal.average_cost() - prediction) ** 2
        gradient = score_surrogate(signal.weight * (signal.cost - baseline), signal.score)
        return gradient - loss.sum()


# Control variates from relaxations of a discrete site: REBAR and RELAX.


class RELAX(LearnedBaseline):
    r"""
    A learned control variate c of the relaxed site [1], conditioned on each slot's category.

    Let :math:`g` and :math:`\tilde g` be independent Gumbel noise given that the argmax is
    :math:`z_s`. With :math:`\sigma = \text{softmax}(g / \lambda)` as a function of the logits at
    fixed noise :math:`g - l`, and :math:`\tilde\sigma` at fixed category,

    .. math::
        \sum_s w_s \big\{ (f(z_s) - c(\tilde\sigma_s)) \nabla \log q(z_s)
            + \nabla c(\sigma_s) - \nabla c(\tilde\sigma_s) \big\}

    has the mean of REINFORCE for every c and weights of slots. Averaged over the category, both
    :math:`c(\tilde\sigma) \nabla \log q(z) + \nabla c(\tilde\sigma)` and :math:`\nabla c(\sigma)`
    are the gradient of :math:`E[c(\sigma)]`. The network and the temperature :math:`\lambda` are
    trained to minimize the squared gradient with respect to the logits. Exact sums have no control
    variate.

    :param torch.nn.Module network: ``network(relaxed, input)`` maps relaxed sites ``[S, *batch,
        K]`` to numbers ``[S, *batch]`` or ``[S, *batch, 1]``. The second input is the first
        argument of the programs, or the site's ``"baseline_input"``, or None.
    :param float temperature: the initial :math:`\lambda`.
    :raises ValueError: if the temperature is not positive; in a step, for sites that cannot be
        relaxed.

    [1] Grathwohl et al. (2018), *Backpropagation through the Void: Optimizing control variates for
    black-box gradient estimation*.

    Example::

        >>> import torch
        >>> from pyro_mcvae import RELAX, TraceRaoBlackwell_ELBO
        >>> class Network(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(10, 1)
        ...     def forward(self, relaxed, x):
        ...         return self.layer(relaxed)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=RELAX(Network()))
    """

    def __init__(
        self, network: Callable[[Tensor, Any], Tensor], *, temperature: float = 0.5
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.network = network
        self.log_temperature = torch.nn.Parameter(torch.tensor(math.log(temperature)))

    def control(self, relaxed: Tensor, signal: SiteSignal) -> Tensor:
        """Return c at relaxed values ``[S, *batch, K]``: ``[S, *batch]``."""
        args = signal.programs.args
        data = signal.input if signal.input is not None else (args[0] if args else None)
        values = self.network(relaxed, data)
        if values.shape == (*relaxed.shape[:-1], 1):
            values = values.squeeze(-1)
        if values.shape != relaxed.shape[:-1]:
            raise ValueError(
                f"{type(self).__name__} needs one number for each relaxed value of guide site "
                f"'{signal.name}', shape {tuple(relaxed.shape[:-1])}, got {tuple(values.shape)}"
            )
        return values

    def surrogate(self, signal: SiteSignal) -> Tensor:
        if not isinstance(signal.support, Categories):
            raise ValueError(
                f"{type(self).__name__} relaxes numbered categories, which guide site "
                f"'{signal.name}' has not: give it another baseline"
            )
        if signal.exact:
            return super().surrogate(signal)
        logits = signal.support.logits
        with torch.enable_grad():
            gradient = self._gradient(signal, logits.detach().requires_grad_())
        finite = torch.where(logits.isneginf(), 0.0, logits)
        return (gradient.detach() * finite).sum() - self._variance_surrogate(gradient)

    def _variance_surrogate(self, gradient: Tensor) -> Tensor | float:
        """Return a scalar with the gradient of the variance; only the square depends on c."""
        learned = [p for p in self.parameters() if p.requires_grad]
        if not learned or not gradient.requires_grad:
            return 0.0
        # Only for the control variate, which may also depend on parameters of the model or guide.
        gradients = torch.autograd.grad((gradient**2).sum(), learned, allow_unused=True)
        parts = [(g * p).sum() for g, p in zip(gradients, learned, strict=True) if g is not None]
        return torch.stack(parts).sum().to(gradient.dtype) if parts else 0.0

    def _gradient(self, signal: SiteSignal, logits: Tensor) -> Tensor:
        """Return the gradient in the site's logits, differentiable in c's parameters."""
        category = signal.support.category(signal.value)  # type: ignore[union-attr]
        category = category.expand(torch.broadcast_shapes(category.shape, signal.weight.shape))
        temperature = self.log_temperature.exp().to(logits)
        floored = logits.clamp_min(FLOOR)
        noise = (conditional_gumbel(logits, category) - floored).detach()
        free = ((floored + noise) / temperature).softmax(-1)
        bound_noise = conditional_gumbel(logits, category)
        bound = (bound_noise / temperature).softmax(-1)
        fixed = (bound_noise.detach() / temperature).softmax(-1)
        at_free, at_bound, at_fixed = (self.control(r, signal) for r in (free, bound, fixed))
        score = logits.log_softmax(-1).expand(*category.shape, -1)
        score = score.gather(-1, category.unsqueeze(-1)).squeeze(-1)
        cost = signal.cost - signal.upstream * at_fixed
        total = cost * torch.where(signal.weight > 0, score, 0.0)
        total = signal.weight * (total + signal.upstream * (at_free - at_bound))
        return torch.autograd.grad(total.sum(), logits, create_graph=True)[0]


class REBAR(RELAX):
    r"""
    The control variate :math:`c = \eta f` of a relaxed cost f [1], conditioned on each slot.

    Its scale :math:`\eta` and its temperature are trained. See :class:`RELAX` for the estimator.

    :param cost: ``cost(relaxed, input)``, an approximation of the ELBO terms downstream of the site
        at relaxed values ``[S, *batch, K]``; its parameters are not trained here.
    :param float temperature: the initial :math:`\lambda`.
    :param float scale: the initial :math:`\eta`.
    :raises ValueError: as in :class:`RELAX`.

    [1] Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein (2017), *REBAR: Low-variance, unbiased
    gradient estimates for discrete latent variable models*.

    Example::

        >>> import torch
        >>> from pyro_mcvae import REBAR, TraceRaoBlackwell_ELBO
        >>> locs = torch.arange(3.0)
        >>> rebar = REBAR(lambda y, x: -((x - y @ locs) ** 2) / 2)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=rebar)
    """

    def __init__(
        self, cost: Callable[[Tensor, Any], Tensor], *, temperature: float = 0.5, scale: float = 1.0
    ) -> None:
        # A lambda, because parameters of a submodule would be trained.
        super().__init__(lambda relaxed, data: cost(relaxed, data), temperature=temperature)
        self.scale = torch.nn.Parameter(torch.tensor(float(scale)))

    def control(self, relaxed: Tensor, signal: SiteSignal) -> Tensor:
        return self.scale.to(relaxed) * super().control(relaxed, signal)
