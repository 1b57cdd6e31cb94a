"""Rao-Blackwellized gradients for discrete sites: summed where it matters, sampled elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pyro_mcvae.discrete.control_variates import Baseline
from pyro_mcvae.discrete.enumerated import SlotRun
from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slot_choice import is_discrete
from pyro_mcvae.discrete.slot_planner import SlotPlanner
from pyro_mcvae.discrete.slot_sampler import SlotSampler
from pyro_mcvae.elbos.base import ELBOOptions, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import (
    Cost,
    averaged_bounds,
    averaged_estimate,
    elbo_bounds,
    weighted_bounds,
    weighted_estimate,
)
from pyro_mcvae.elbos.estimate import Bounds, Estimate, Sum, add_up, as_scalar, times
from pyro_mcvae.elbos.slot_average import OneSlot, SlotAverage
from pyro_mcvae.elbos.slot_sums import SlotSums
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs, is_messenger
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.types import Site

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TraceRaoBlackwell_ELBO(MonteCarloELBO, torch.nn.Module):
    r"""
    The ELBO, with the k most probable values of each discrete guide site summed [1]:

    .. math::
        E_{q(z)}[g(z)] \approx \sum_{z \in C} q(z) g(z)
            + q(\bar C) \frac{1}{n} \sum_{j=1}^n g(v_j), \qquad
        v_j \sim q(\cdot \mid \bar C),

    where C holds the k most probable values of each datum. It applies to values and gradients, has
    the mean of the plain estimator and at most :math:`q(\bar C)` times its variance. ``k = 0`` is
    the plain estimator, and k of at least the number of values the exact sum, as of
    :class:`~pyro.infer.TraceEnum_ELBO`.

    The guide needs no annotation. Sites may depend on each other and have reparameterized sites
    behind them: everything that depends on a site is evaluated at its k + n slots, in a batch dim
    of its own, as in Pyro's parallel enumeration, or under ``vmap`` where the programs do not
    broadcast. Sites that are not enclosed in ``pyro.markov`` multiply each other's slots where a
    factor depends on several of them. Model sites marked ``infer={"enumerate": "parallel"}`` and
    absent from the guide are summed inside of the logarithm. A cost is multiplied by the weights
    of those sites alone that it depends on, which is found out by running the programs once.

    Where no run can hold several slots (an ``nn.GRU``, Python that looks at a value), or elements
    of a plate meet in one factor, the slots are rows, as under the chains of
    :class:`~pyro_mcvae.TraceSIS_ELBO`: all sites of a datum multiply their slots, elements that
    meet are one variable together, and each slot has all costs of its datum. The mean is the same,
    and exact sums are; draws are noisier. A log message says why.

    * **Supports**: Categorical, OneHotCategorical, Bernoulli, Binomial and everything else with a
      finite ``enumerate_support``; vectors of these by ``to_event``, as one variable over their
      product; Poisson, Geometric and NegativeBinomial. Other discrete sites
      are sampled, with the score function as their gradient, and a log message says so.
    * **Per site**: ``infer={"mcvae": {"num_categories": 5, "num_samples": 2}}``, likewise
      ``"budget"``, ``"baseline"``, ``"exact_entropy"``. A guide site marked
      ``infer={"enumerate": "parallel"}`` (or ``"sequential"``) is summed exactly, and with
      ``"num_samples": n`` beside it has n draws.
    * **Baselines** (``baseline=``) all have the same mean. None is REINFORCE;
      :class:`~pyro_mcvae.IndependentDraw` is REINFORCE+; :class:`~pyro_mcvae.LeaveOneOut` compares
      draws; :class:`~pyro_mcvae.SummedMean` takes the summed categories' cost and no further
      evaluation. :class:`~pyro_mcvae.NVIL`, :class:`~pyro_mcvae.REBAR` and
      :class:`~pyro_mcvae.RELAX` have parts that are learned, by SVI's optimizer or as parameters
      of ``elbo(model, guide)``. :class:`~pyro_mcvae.GumbelSoftmax` is biased, for comparison.

    :param num_categories: k, the values to sum; ``math.inf`` for all.
    :param int num_samples: n, the draws from the others.
    :param budget: instead of both, N = k + n, where each datum has the k of Prop. 2 of [1]; the
        variance is then never more than that of N draws.
    :param baseline: a :class:`~pyro_mcvae.Baseline`, or None.
    :param entropy: ``"exact"`` sums the entropy of each discrete site over all of its values;
        ``"sampled"`` takes it at the slots, as do rows, masked distributions and supports without
        end whatever is asked for, which a log message says.
    :param int num_particles: independent repetitions to average over.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`MonteCarloELBO`.
    :raises ValueError: for counts out of range, a baseline without the draws that it needs, and
        sites without categories.
    :raises LeadingDimsError: for ``vectorize_particles=True``, if slots have to be looped over.

    [1] Liu, Regier, Tripuraneni, Jordan, McAuliffe (2019), *Rao-Blackwellized Stochastic Gradients
    for Discrete Distributions*.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         y = pyro.sample("y", dist.Categorical(torch.ones(10)))
        ...         pyro.sample("x", dist.Normal(y.float(), 1.0), obs=x)
        >>> def guide(x):
        ...     logits = pyro.param("logits", torch.zeros(len(x), 10))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Categorical(logits=logits))
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=2, num_samples=1)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=elbo)
        >>> losses = [svi.step(torch.tensor([2.0, 7.0])) for _ in range(300)]
        >>> pyro.param("logits").argmax(-1)
        tensor([2, 7])
    """

    # nn.Module would have it be a module.
    vectorize_particles: bool | None

    def __init__(
        self,
        num_categories: float | None = None,
        num_samples: int | None = None,
        budget: int | None = None,
        baseline: Baseline | None = None,
        entropy: Literal["sampled", "exact"] = "sampled",
        num_particles: int = 1,
        **options: Unpack[ELBOOptions],
    ) -> None:
        torch.nn.Module.__init__(self)
        super().__init__(num_particles, **options)
        if entropy not in ("sampled", "exact"):
            raise ValueError(f"entropy must be 'sampled' or 'exact', got {entropy!r}")
        self.baseline, self.entropy = baseline, entropy
        self.num_categories, self.num_samples, self.budget = num_categories, num_samples, budget
        self._site_options = SiteOptions(
            num_categories, num_samples, budget, baseline, entropy == "exact"
        )
        # A site that is marked for enumeration has all of its values for slots.
        self.sampler.runner.strict_enumeration = False
        self._slots = SlotSampler(self.sampler, self._site_options)
        self._rows = SlotPlanner(self._site_options, common=False)

    def _weighs(self, site: Site) -> bool:
        return False

    def estimate(self, programs: Programs) -> Estimate:
        if is_messenger(programs):
            return averaged_estimate(self._without_slots(programs))
        slot_runs = self._slots.runs(programs)
        if slot_runs is None:
            return self._estimate_by_rows(programs)
        found: list[tuple[Sum, Sum]] = []
        for slot_run in slot_runs:
            sums = self._sums(programs, slot_run)
            wanted = torch.is_grad_enabled()
            found.append(sums.differentiate(programs) if wanted else (sums.value(), 0.0))
        value, surrogate = map(as_scalar, map(add_up, zip(*found, strict=True)))
        each = 1 / self.sampler.num_particles
        value, surrogate = times(value, each), times(surrogate, each)
        return Estimate(value, surrogate, [r.run for r in slot_runs], scored=True)

    def bounds_of(self, programs: Programs) -> Bounds:
        if is_messenger(programs):
            return averaged_bounds(self._without_slots(programs))
        slot_runs = self._slots.runs(programs)
        if slot_runs is None:
            sample, slots = self._row_sample(programs)
            if slots.weight is None:
                return averaged_bounds(sample)
            return weighted_bounds(sample, slots.mean(sample.log_weight))
        costs = []
        for slot_run in slot_runs:
            sums = self._sums(programs, slot_run)
            summands = slot_run.run.summands
            values: dict[FactorKey, Tensor | int] = {t.key: 0 for t in summands}
            for c, value in zip(slot_run.costs, sums.expected(), strict=True):
                values[c.term.key] = values[c.term.key] + value * (c.scale / c.term.plate_scale)
            costs.append([Cost(t, values[t.key], 0) for t in summands])
        sample = self.sampler.arrange(programs, [r.run for r in slot_runs])
        return elbo_bounds(sample, costs)

    def _row_sample(self, programs: Programs) -> tuple[WeightedParticles, OneSlot]:
        sample, draws = self._rows.sample(self.sampler, programs)
        return sample, SlotAverage.of(sample, draws, common=False)

    def _estimate_by_rows(self, programs: Programs) -> Estimate:
        """The same sum over whole weights, for programs whose slots cannot stand in dims."""
        sample, slots = self._row_sample(programs)
        if slots.weight is None:
            return averaged_estimate(sample)
        log_weight = sample.log_weight
        bound, surrogate = slots.mean(log_weight.detach()), slots.mean(log_weight)
        estimate = weighted_estimate(sample, bound, slots.without_entropy(surrogate))
        if torch.is_grad_enabled():
            scores = slots.with_scores(estimate.surrogate, log_weight.detach, programs)
            estimate.surrogate = scores
        return estimate

    def _sums(self, programs: Programs, slot_run: SlotRun) -> SlotSums:
        return SlotSums(slot_run, self._slots.ancestors(programs, slot_run))

    def _without_slots(self, programs: Programs) -> WeightedParticles:
        sample = self.sampler.arrange(programs, self.sampler.independent(programs))
        for term in sample.runs[0].terms:
            if term.in_guide and is_discrete(term.site):
                raise ValueError(
                    f"guide site '{term.key.name}' ({type(term.site['fn']).__name__}) can have no "
                    f"slots, because this guide is a messenger, which runs model and guide at "
                    f"once: write the guide as a function or module of its own"
                )
        return sample
