"""The free energy of truncated posteriors, improved by evolutionary search."""

from __future__ import annotations

from functools import partial

import torch
from pyro import poutine
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions, Estimate, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import local_estimate
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.tensors import costs_nothing_to_read
from pyro_mcvae.ops.weights import normalized_weights
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.truncated.guide import EStep, TruncatedPosterior
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.states import take_rows


class TraceTruncated_ELBO(MonteCarloELBO):
    r"""
    The objective of a model whose discrete latents have a :class:`TruncatedPosterior` [1]:

    .. math::
        F = \log p(\vartheta) - \log q(\vartheta)
            + \frac{N}{B} \sum_n \log \sum_{z \in \Phi_n} \frac{p(x_n, z, w_n)}{q(w_n)}, \qquad
        \nabla F = \frac{N}{B} \sum_n \sum_{z \in \Phi_n} q_n(z) \nabla \log p(x_n, z) .

    A step evaluates the states of the minibatch, and searches for better states (an E-step, which
    never decreases F). It stores these in the guide, and computes the gradient of F through them.
    The ``guide`` argument of the truncated posterior may draw other latents (:math:`\vartheta`
    outside the data plate, w inside). They are drawn once per step, and are the same for all states
    of a datum.

    :meth:`loss`, :meth:`bounds` and calls without gradients also search, but do not store the
    states. So they return the value of a training step with the same seed. After ``guide.eval()``
    no call searches.

    :param int num_gradient_states: k. The gradient passes through the k states with the largest
        weights, and through ``num_sampled_states`` states drawn from the others. Their weights keep
        it unbiased (Rao-Blackwellization of the M-step [2]). None uses all states.
    :param int num_sampled_states: the number of sampled states, if ``num_gradient_states`` is set.
    :param options: ``vectorize_particles`` (of the states), ``max_plate_nesting``,
        ``strict_enumeration_warning`` and ``retain_graph``; see :class:`MonteCarloELBO`.
    :ivar num_runs: the number of passes through the model in the last step.
    :ivar num_evaluations: the number of evaluated states of a datum in the last step.
    :raises ValueError: for another guide, and for numbers that are not ints of at least 1.

    [1] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
    with Binary Latents*.
    [2] Liu, Regier, Tripuraneni, Jordan, McAuliffe (2019), *Rao-Blackwellized Stochastic Gradients
    for Discrete Distributions*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior
        >>> def model(x):
        ...     weight = pyro.param("weight", torch.ones(2, 3))
        ...     with pyro.plate("data", 100, subsample_size=10) as index:
        ...         z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(2)).to_event(1))
        ...         pyro.sample("x", dist.Normal(z @ weight, 1.0).to_event(1), obs=x[index])
        >>> guide = TruncatedPosterior(model, num_states=4)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=TraceTruncated_ELBO())
        >>> losses = [svi.step(torch.randn(100, 3)) for _ in range(3)]
    """

    def __init__(
        self,
        num_gradient_states: int | None = None,
        *,
        num_sampled_states: int = 1,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options)
        super().__init__(1, **options)
        if num_gradient_states is not None:
            num_gradient_states = check_count("num_gradient_states", num_gradient_states)
        num_sampled_states = check_count("num_sampled_states", num_sampled_states)
        self.num_gradient_states = num_gradient_states
        self.num_sampled_states = num_sampled_states
        self.num_runs, self.num_evaluations = 0, 0

    def _use_particles(self, num_particles: int) -> None:
        if num_particles != 1:
            raise ValueError(
                f"TraceTruncated_ELBO sums the states of its guide, and cannot draw num_particles="
                f"{num_particles}: their number is TruncatedPosterior(..., num_states=...)"
            )
        super()._use_particles(num_particles)

    def _weighs(self, site: Site) -> bool:
        return False

    def estimate(self, programs: Programs) -> Estimate:
        guide = _truncated(programs.guide)
        step = EStep(guide, programs, self.sampler)
        training, runs = torch.is_grad_enabled(), step.runs
        if training and guide.training:
            step.synchronize()
        at_once = training and self.num_gradient_states is None and _searches_little(guide, runs)
        with torch.set_grad_enabled(at_once):
            population, sample = step.evaluate()
            if guide.training:
                population = step.search(population)
        log_joint, shape = population.log_joint.detach(), sample.shapes[0]
        bound = surrogate = log_joint.logsumexp(1).reshape(shape)
        if training:
            if at_once and runs.finite:
                weight, joint = normalized_weights(log_joint, dim=1), population.log_joint
            else:
                # At an infinite density the gradient of a state without weight may be NaN.
                picked, weight = self._pick(log_joint)
                states = population.space.unpack(take_rows(population.packed, picked))
                sample = runs.run(states, weight.shape[1])
                joint = sample.log_weight.flatten(1).t()
            surrogate = (weight * joint).sum(1).reshape(shape)
            score = sample.local_sum(lambda t, i: t.score if t.in_guide else 0)[0]
            if score.requires_grad:
                surrogate = surrogate + bound * score
        self.num_runs, self.num_evaluations = runs.num_runs, runs.num_states
        estimate = local_estimate(sample, bound, surrogate, scored=True)
        estimate.remedy = lambda: _REMEDY
        if training and guide.training:
            estimate.finish = partial(step.keep, population, shared=True)
        return estimate

    def _pick(self, log_joint: Tensor) -> tuple[Tensor, Tensor]:
        """Select the states for the gradient, with their weights, ``[E, k]``."""
        top, drawn = self.num_gradient_states, self.num_sampled_states
        weight = normalized_weights(log_joint, dim=1)
        if top is None or top + drawn >= log_joint.shape[1]:
            index = torch.arange(log_joint.shape[1], device=log_joint.device)
            index = index.expand(log_joint.shape)
        else:
            index, weight = _top_and_sampled(weight, top, drawn)
        # A state with zero weight may have no gradient (log 0), so the best state replaces it.
        best = log_joint.argmax(1, keepdim=True)
        return torch.where(weight > 0, index, best), weight


_REMEDY = (
    "Where no state of a datum that is kept makes it possible: search before the first step "
    "(guide.fit(..., num_steps=100)), or let it draw from the model (prior_draws=)."
)


def _searches_little(guide: TruncatedPosterior, runs: JointRuns) -> bool:
    r"""
    Return whether it is cheaper to keep the graph of all S + C evaluated states.

    A backward pass costs two forward passes. With one graph for all states, a step costs 3 (S + C).
    With a search without a graph and another pass through the S best states, it costs S + C + 3 S.
    The first option has to check that all densities are finite, which makes the host wait for a
    GPU.
    """
    count = guide.evolution.num_evaluations if guide.training else 0
    read = costs_nothing_to_read(runs.model_layout.prior_draws)
    return not guide.prior_draws and read and 2 * count <= guide.num_states


def _top_and_sampled(weight: Tensor, top: int, drawn: int) -> tuple[Tensor, Tensor]:
    """Select the largest weights, and sample from the remaining ones: indices and weights."""
    largest, index = weight.topk(top, dim=1)
    remaining = weight.scatter(1, index, 0.0)
    mass = remaining.sum(1, keepdim=True)
    total = remaining.cumsum(1)
    at = (
        torch.rand(len(remaining), drawn, dtype=remaining.dtype, device=remaining.device)
        * total[:, -1:]
    )
    sampled = torch.searchsorted(total, at, right=True).clamp_max(weight.shape[1] - 1)
    return torch.cat([index, sampled], 1), torch.cat([largest, (mass / drawn).expand_as(at)], 1)


def _truncated(guide: Program) -> TruncatedPosterior:
    unwrapped = poutine.unwrap(guide)
    if not isinstance(unwrapped, TruncatedPosterior):
        raise ValueError(
            f"TraceTruncated_ELBO trains with a TruncatedPosterior as its guide, got "
            f"{type(unwrapped).__name__}: pass TruncatedPosterior(model, num_states=...), with the "
            f"guide of the latents that are not discrete as its guide="
        )
    return unwrapped
