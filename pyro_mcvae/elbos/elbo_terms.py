"""The plain ELBO of whole runs, or of the global latents around the bounds of local latents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from pyro.infer.util import MultiFrameTensor
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.elbos.base import Bounds, Estimate, Sum, add_up, as_scalar, times
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, PlateKey, plate_key


class Cost(NamedTuple):
    """
    A summand of the ELBO that belongs to one site.

    :ivar term: the site's term.
    :ivar value: batch-shaped summand without the plates' N/B.
    :ivar path: the tensor that has its gradient: ``value``, another tensor, or 0.
    :ivar closed: whether the value is the same for every draw of the site, as for a closed-form
        divergence. It then needs no score function of the site.
    """

    term: Term
    value: Tensor | int
    path: Tensor | int
    closed: bool = False

    @property
    def is_pathwise(self) -> bool:
        """Return whether the gradient of the value is the whole gradient."""
        return self.path is self.value and not isinstance(self.term.score, Tensor)


def elbo_costs(terms: Iterable[Term]) -> list[Cost]:
    """
    Return the summands of the ELBO: log p of every model site, and -log q of every guide site.

    :param terms: the terms of one run, such as ``run.summands``.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import MonteCarloELBO, elbo_costs
        >>> from pyro_mcvae.elbos.elbo_terms import elbo_estimate
        >>> class PlainELBO(MonteCarloELBO):
        ...     def estimate(self, programs):
        ...         runs = self.sampler.independent(programs)
        ...         costs = [elbo_costs(run.summands) for run in runs]
        ...         return elbo_estimate(runs, costs, num_particles=1)
        >>> def model(x):
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=x)
        >>> def guide(x):
        ...     pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> round(PlainELBO().loss(model, guide, torch.tensor(0.0)), 2)
        1.27
    """
    return list(map(elbo_cost, terms))


def elbo_cost(term: Term) -> Cost:
    """Return the summand of the ELBO that belongs to a term."""
    value, path = term.log_prob, term.entropy
    if not term.in_guide:
        return Cost(term, value, value)
    value = -value
    return Cost(term, value, value if path is None else -path)


def total_cost(costs: Iterable[Cost]) -> Sum:
    """Return the ELBO of one run: detached, summed, with N/B."""
    values = ((c.value, c.term.plate_scale) for c in costs)
    return add_up(times(v.detach().sum(), scale) for v, scale in values if isinstance(v, Tensor))


def elbo_estimate(
    runs: list[Run],
    costs: list[list[Cost]],
    num_particles: int,
    coupled: Mapping[FactorKey, frozenset[PlateKey]] | None = None,
) -> Estimate:
    """
    Return the plain ELBO and its gradient, averaged over the particles.

    :param runs: one vectorized run, or one run per particle.
    :param costs: the costs of each run.
    :param coupled: for factors that depend on several elements of a plate, these plates.
    """
    each, wanted = 1 / num_particles, torch.is_grad_enabled()
    path = add_up(elbo_surrogate(c, coupled or {}) for c in costs) if wanted else 0.0
    surrogate = times(as_scalar(path), each)
    pathwise = wanted and all(c.is_pathwise for run_costs in costs for c in run_costs)
    value = surrogate if pathwise else times(as_scalar(add_up(map(total_cost, costs))), each)
    return Estimate(value.detach(), surrogate, runs, scored=True)


def elbo_bounds(sample: WeightedParticles, costs: list[list[Cost]]) -> Bounds:
    """Return the plain ELBO per datum, averaged over the particles."""
    values = [{c.term.key: c.value for c in run_costs} for run_costs in costs]
    shared = add_up(
        times(c.value.sum(), c.term.plate_scale)
        for i, run_costs in enumerate(costs)
        for c in run_costs
        if sample.block_of[i].get(c.term.key) is None and isinstance(c.value, Tensor)
    )
    shared = as_scalar(shared) / sample.num_particles
    if not sample.blocks:
        return Bounds(shared.new_zeros(0), 1.0, shared, ())
    per_datum = sample.local_sum(lambda t, i: values[i][t.key]).mean(0)
    return Bounds(per_datum, sample.scale, shared, sample.plate_names)


def local_estimate(
    sample: WeightedParticles, bound: Tensor, surrogate: Tensor, *, scored: bool = False
) -> Estimate:
    r"""
    Return a bound on the evidence of the local latents, plus the plain ELBO of everything global.

    The surrogate has the gradient through the draws' densities and paths. For local draws
    :math:`z_k` without reparameterization, :math:`L \sum_k \nabla \log q(z_k)` is added. The
    gradient of :math:`E[L]` is then unbiased for any function L of the particles. An objective with
    a less noisy signal, such as VIMCO's, adds its own terms to the surrogate and passes
    ``scored=True``.

    If all latents are global and a plate is subsampled, no latent has a weight per datum. The
    estimate is then the plain ELBO, averaged over the particles.

    :param sample: the particles of the step, from ``self.sampler``.
    :param bound: the bound L of each datum, detached, shape ``[*plates]``.
    :param surrogate: a tensor of the same shape with the gradient of the bound.
    :param bool scored: whether ``surrogate`` already has the score-function terms of the local
        draws.
    :raises ValueError: for tensors of another shape.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import MonteCarloELBO, local_estimate
        >>> class TraceLargest_ELBO(MonteCarloELBO):
        ...     def estimate(self, programs):
        ...         sample = self.sampler.sample(programs)
        ...         largest = sample.log_weight.max(0).values
        ...         return local_estimate(sample, largest.detach(), largest)
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):  # the posterior, so all weights are p(x)
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> TraceLargest_ELBO(5).bounds(model, guide, torch.zeros(2)).per_datum
        tensor([-1.2655, -1.2655])
    """
    sample.check_shapes(bound=bound, surrogate=surrogate)
    if not sample.blocks:
        return averaged_estimate(sample)
    return weighted_estimate(sample, bound, surrogate, scored)


def weighted_estimate(
    sample: WeightedParticles, bound: Tensor, surrogate: Tensor, scored: bool = True
) -> Estimate:
    """
    Return the estimate of :func:`local_estimate`, without its check of shapes.

    :param bound: the surrogate itself, if its gradient is the whole gradient.
    """
    is_own, total = surrogate is bound, times(surrogate, sample.scale).sum()
    bound = bound.detach()
    local = times(bound, sample.scale)
    values, paths = zip(guide_data(sample), _around(sample, local), strict=True)
    value = as_scalar(add_up((total.detach() if is_own else local.sum(), *values)))
    per_datum = partial(weighted_bounds, sample, bound)
    if not scored and sample.has_local_scores:
        score = bound * sample.local_sum(lambda t, i: t.score).sum(0)
        total = times(surrogate + score, sample.scale).sum()
    path = add_up((total, *paths))
    return Estimate(value, as_scalar(path), sample.runs, scored=True, bounds=per_datum)


def weighted_bounds(sample: WeightedParticles, bound: Tensor) -> Bounds:
    """Return the value of :func:`weighted_estimate` per datum."""
    shared = total_cost(elbo_costs(sample.global_terms())) + guide_data(sample)[0]
    return Bounds(bound, sample.scale, as_scalar(shared).to(bound), sample.plate_names)


def averaged_estimate(sample: WeightedParticles, costs: list[list[Cost]] | None = None) -> Estimate:
    """
    Return the plain ELBO of a sample, with any weights.

    :param costs: the costs of each run; by default log p and -log q of every site.
    """
    costs = costs or [elbo_costs(run.summands) for run in sample.runs]
    estimate = elbo_estimate(sample.runs, costs, sample.num_particles, sample.structure.coupled)
    estimate.averaged, estimate.bounds = True, partial(elbo_bounds, sample, costs)
    return estimate


def guide_data(sample: WeightedParticles) -> tuple[Sum, Sum]:
    """
    Sum the log densities of data that the guide observes, averaged over particles. As in Pyro, they
    are outside the weights.

    :returns: the value, and a scalar with its gradient; 0 if there are no such data.
    """
    return _observed(sample) if any(run.guide_data for run in sample.runs) else (0, 0)


def _observed(sample: WeightedParticles) -> tuple[Sum, Sum]:
    costs = []
    for run in sample.runs:
        scored = [Cost(t, 0, 0) for t in run.terms if isinstance(t.score, Tensor)]
        costs.append([*scored, *elbo_costs(run.guide_data)])
    coupled = sample.structure.coupled
    estimate = elbo_estimate(sample.runs, costs, sample.num_particles, coupled)
    return estimate.value, estimate.surrogate


def _around(sample: WeightedParticles, local: Tensor) -> tuple[Sum, Sum]:
    """Return the estimate of all global terms plus the scaled bounds of the data."""
    costs = elbo_costs(sample.global_terms())
    path: Sum = 0
    if costs and torch.is_grad_enabled():
        path = elbo_surrogate(costs, sample.structure.coupled, _downstream(sample, local))
    return total_cost(costs), path


def _downstream(sample: WeightedParticles, bound: Tensor) -> MultiFrameTensor:
    """
    Return the scaled bounds of the blocks, with their plates, as costs downstream of global sites.
    """
    costs = MultiFrameTensor()
    for b, part in enumerate(sample.split(bound)):
        frames = sample.frames[b]
        sizes: dict[int, int] = {f.dim: f.size for f in frames if f.dim is not None}
        depth = max((-d for d in sizes), default=0)
        costs.add((frames, part.reshape([sizes.get(d, 1) for d in range(-depth, 0)])))
    return costs


def elbo_surrogate(
    costs: list[Cost],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
    extra: MultiFrameTensor | None = None,
) -> Sum:
    """
    Return a scalar with the gradient of the ELBO: the pathwise gradient and score-function terms.

    :param coupled: for factors that depend on several elements of a plate, these plates.
    :param extra: more detached costs with their plates, downstream of every site. They enter only
        the score-function terms.
    """
    pairs = ((c.path, c.term.plate_scale) for c in costs)
    paths = add_up(times(p.sum(), scale) for p, scale in pairs if isinstance(p, Tensor))
    if not any(isinstance(c.term.score, Tensor) for c in costs):
        return paths
    return add_up((paths, score_function_term(costs, coupled, extra)))


def score_function_term(
    costs: list[Cost],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
    extra: MultiFrameTensor | None = None,
) -> Sum:
    r"""
    Return :math:`\sum_i R_i \log q(z_i)` over the sites without reparameterization.

    :math:`R_i` sums the costs over the plates that do not enclose the site. Costs of other elements
    of its plates do not depend on it (Pyro's plate-wise Rao-Blackwellization), unless a factor
    depends on several elements. The closed-form divergence of the site does not depend on its draw.
    """
    scored = [c.term for c in costs if isinstance(c.term.score, Tensor)]
    closed = {c.term.key.name: c for c in costs if c.closed and c.term.key not in coupled}
    downstream = MultiFrameTensor() if extra is None else MultiFrameTensor(*extra.items())
    for c in costs:
        if isinstance(c.value, Tensor):
            value = _padded(c.value.detach() * c.term.plate_scale, c.term)
            frames = c.term.site["cond_indep_stack"]
            meeting = coupled.get(c.term.key, frozenset())
            outside = [f for f in frames if plate_key(f) not in meeting]
            for f in frames:
                if f not in outside and f.dim is not None and value.dim() >= -f.dim:
                    value = value.sum(f.dim, keepdim=True)
            downstream.add((tuple(outside), value))
    return add_up(
        ((downstream.sum_to(frames) - _closed_form(closed.get(t.key.name), frames)) * t.score).sum()
        for t, frames in ((t, t.site["cond_indep_stack"]) for t in scored)
    )


def _closed_form(cost: Cost | None, frames: tuple[CondIndepStackFrame, ...]) -> Tensor | int:
    """
    Return the part of a site's downstream cost, in these plates, that does not depend on its draw.
    """
    if cost is None or not isinstance(cost.value, Tensor):
        return 0
    same = set(cost.term.site["cond_indep_stack"]) == set(frames)
    return _padded(cost.value.detach() * cost.term.plate_scale, cost.term) if same else 0


def _padded(value: Tensor, term: Term) -> Tensor:
    depth = max((-f.dim for f in term.site["cond_indep_stack"] if f.dim is not None), default=0)
    return (
        value.reshape((1,) * (depth - value.dim()) + value.shape) if depth > value.dim() else value
    )
