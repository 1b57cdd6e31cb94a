"""Stochastic gradient variational Bayes: the ELBO with closed-form KL terms where they exist."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import Cost, elbo_bounds, elbo_costs, elbo_estimate
from pyro_mcvae.elbos.estimate import Estimate
from pyro_mcvae.elbos.kl import analytic_kl_sites, sites_apart
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import PlateKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.types import Site


class TraceSGVB_ELBO(MonteCarloELBO):
    r"""
    The SGVB estimators of Kingma and Welling [1] for any Pyro program.

    .. math::
        \text{A:} \quad & \log p(x, z) - \log q(z \mid x), \qquad z = g_\phi(\epsilon, x) \\
        \text{B:} \quad & -KL(q(z \mid x) \,\|\, p(z)) + \log p(x \mid z)

    averaged over ``num_particles`` draws of z and scaled by N/B over the minibatch. Each site is
    treated by itself: estimator B where :func:`torch.distributions.kl_divergence` knows the pair
    of distributions and the model's distribution of the site depends on no draw of the guide that
    depends on the site; estimator A elsewhere. Sites without reparameterization use the score
    function with Pyro's plate-wise Rao-Blackwellization. Every program that
    :class:`~pyro.infer.Trace_ELBO` trains is trained, without the restriction to mean-field
    guides of :class:`~pyro.infer.TraceMeanField_ELBO`.

    Global latents with a guide of their own (full variational Bayes, appendix F of [1]) are sites
    like any other.

    :param int num_particles: draws of z per step.
    :param bool analytic_kl: use estimator B where possible; False is estimator A throughout.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`MonteCarloELBO`.
    :raises ValueError: if ``num_particles`` is not an int of at least 1.

    [1] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(slope * x, 0.7))
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=TraceSGVB_ELBO())
        >>> losses = [svi.step(torch.tensor([-2.0, 0.0, 2.0])) for _ in range(200)]
        >>> bool(abs(pyro.param("slope") - 0.5) < 0.2)
        True
    """

    def __init__(
        self,
        num_particles: int = 1,
        analytic_kl: bool = True,
        **options: Unpack[ELBOOptions],
    ) -> None:
        super().__init__(num_particles, **options)
        check_flag("analytic_kl", analytic_kl)
        self.analytic_kl = analytic_kl

    def _weighs(self, site: Site) -> bool:
        return False

    def estimate(self, programs: Programs) -> Estimate:
        runs = self.sampler.independent(programs)
        coupled: dict[FactorKey, frozenset[PlateKey]] = {}
        for run in runs:
            if any(isinstance(t.score, Tensor) for t in run.terms):
                # Which costs a score multiplies depends on whether a plate's elements meet.
                coupled |= self.sampler.structures.of(programs, run).coupled
        costs = [self._costs(programs, run) for run in runs]
        estimate = elbo_estimate(runs, costs, self.sampler.num_particles, coupled)
        estimate.causes = partial(_infinite_divergences, costs)
        estimate.bounds = lambda: elbo_bounds(self.sampler.arrange(programs, runs), costs)
        return estimate

    def _costs(self, programs: Programs, run: Run) -> list[Cost]:
        costs = elbo_costs(run.summands)
        if not self.analytic_kl:
            return costs

        @cache
        def find_apart() -> frozenset[str]:
            find = partial(sites_apart, programs, run)
            analysis = self.sampler.analyses.of(programs)
            return analysis.once(("closed", run.signature, run.sizes), find)

        closed = analytic_kl_sites(run, find_apart)
        return [c if (n := c.term.key.name) not in closed else _closed(c, closed[n]) for c in costs]


def _infinite_divergences(costs: Iterable[Iterable[Cost]]) -> list[str]:
    """A line for every site whose divergence in closed form is infinite."""
    closed = (c for each in costs for c in each if c.closed)
    lines = (
        f"site '{c.term.key.name}': the KL divergence of the guide's distribution from the model's "
        f"({type(c.term.site['fn']).__name__}) is infinite, as where the guide draws outside of "
        f"that one's support: give the guide a distribution with that support (or an AutoGuide, "
        f"which transforms to it)."
        for c in closed
        if isinstance(c.value, Tensor) and bool(c.value.isinf().any())
    )
    return list(dict.fromkeys(lines))


def _closed(cost: Cost, negative_kl: Tensor) -> Cost:
    # The divergence stands at the model's site; the guide's own summand is part of it.
    value = 0 if cost.term.in_guide else negative_kl
    return Cost(cost.term, value, value, closed=not cost.term.in_guide)
