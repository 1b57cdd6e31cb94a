"""The ELBO with a closed-form KL divergence for each site that has one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Set
from functools import cache, partial
from typing import Any, cast

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import (
    Categorical,
    ContinuousBernoulli,
    ExponentialFamily,
    Independent,
    OneHotCategorical,
    Transform,
    TransformedDistribution,
    Uniform,
    kl_divergence,
)
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions, Estimate, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import Cost, elbo_bounds, elbo_cost, elbo_costs, elbo_estimate
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.ops.compat import divergence_rule, state_of
from pyro_mcvae.programs.methods import has_methods_of, library_class
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import inner_scale, is_delta, is_latent, is_masked, layers, masked
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, PlateKey, Site
from pyro_mcvae.structure.marked import dependencies_of

# Closed-form Kullback-Leibler divergences of single sites.


def analytic_kl_sites(run: Run, find_separable: Callable[[], Set[str]]) -> dict[str, Tensor]:
    r"""
    Return :math:`E_q[\log p(z) - \log q(z)] = -KL(q \| p)` of each latent site with a closed form.

    The prior of the site must not depend on draws of the guide that depend on the site. This holds
    if all predecessors of the site in the model also precede it in the guide. Other sites are
    checked by running the model and guide.

    :param find_separable: returns the names of such sites.
    :returns: the divergences by site name, batch-shaped, with the user's scale and mask, but
        without the plates' N/B.
    """
    model = {t.key.name: t for t in run.terms if not t.in_guide and is_latent(t.site)}
    guide = {t.key.name: t for t in run.terms if t.in_guide and t.key.name in model}
    place = {name: i for i, name in enumerate(guide)}
    values, latest = {}, -1
    for name, model_term in model.items():
        if name not in guide:
            continue
        in_order = place[name] > latest
        latest = max(latest, place[name])
        if not is_delta(guide[name].site["fn"]) and (in_order or name in find_separable()):
            value = _negative_kl(model_term, guide[name])
            if value is not None:
                values[name] = value
    return values


def separable_sites(programs: Programs, run: Run) -> frozenset[str]:
    """Return the latents whose prior depends on no draw that depends on them."""
    names = frozenset(t.key.name for t in run.terms if t.in_guide and is_latent(t.site))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a site that cannot be checked is sampled
        dependencies = dependencies_of(programs, names, run)
    above = dependencies.ancestors(names)
    priors = {n: dependencies.factors.get(FactorKey("model", n), names) - {n} for n in names}
    return frozenset(n for n in names if not any(n in above[p] for p in priors[n]))


def _negative_kl(model_term: Term, guide_term: Term) -> Tensor | None:
    p, q = model_term.site, guide_term.site
    if is_masked(p["fn"]) or is_masked(q["fn"]):
        return None  # Pyro's closed form applies both masks to both densities
    if not _is_right(q["fn"], p["fn"]):
        return None
    try:
        divergence = _divergence(q["fn"], p["fn"])
        if _same_weighting(p, q):
            return -masked(q, divergence)
        # E[log p] = -KL - H and E[log q] = -H have separate scales and masks.
        entropy = q["fn"].entropy()
    except NotImplementedError:
        return None
    return masked(q, entropy) - masked(p, divergence + entropy)


def _divergence(q: Any, p: Any) -> Tensor:
    """Return the divergence; its gradient is finite also if both have a logit of -inf."""
    divergence: Tensor = kl_divergence(q, p)
    while isinstance(q, Independent) and isinstance(p, Independent):
        q, p = q.base_dist, p.base_dist
    if not any(isinstance(q, kind) and isinstance(p, kind) for kind in _CATEGORICAL):
        return divergence
    log_ratio = torch.where(q.probs > 0, q.logits - p.logits, 0.0)
    each = (q.probs * log_ratio).sum(-1)
    return cast("Tensor", sum_rightmost(each, each.dim() - divergence.dim()))


_CATEGORICAL = Categorical, OneHotCategorical


def _is_right(q: Any, p: Any) -> bool:
    """
    Return whether PyTorch's closed form is the divergence, with its gradient.

    A rule is for two classes. It is wrong for subclasses that override a method, for example
    ``log_prob``. Two rules of PyTorch are for whole families. The rule for transformed
    distributions assumes two equal invertible transforms. It is wrong for
    :class:`~pyro.distributions.FoldedDistribution`, and gives no gradient to parameters of two
    transforms with equal values. The rule for exponential families detaches the first distribution.
    Two rules are infinite at the ends of equal supports.
    """
    rule, pairs = divergence_rule(type(q), type(p))
    if rule in _WRONG_RULES or not any(
        has_methods_of(q, kind) and has_methods_of(p, other) for kind, other in pairs
    ):
        return False
    if isinstance(q, Independent) and isinstance(p, Independent):
        return _is_right(q.base_dist, p.base_dist)
    if rule is not _TRANSFORMED:
        # Rules for wrappers have the closed form of what is wrapped.
        parts = [*layers(q)][1:] + [*layers(p)][1:]
        return all(has_methods_of(f, library_class(f)) for f in parts)
    return _is_right(q.base_dist, p.base_dist) and all(
        a.bijective and (a is b or (_is_fixed(a) and _is_fixed(b)))
        for a, b in zip(q.transforms, p.transforms, strict=False)
    )


# The divergence of a uniform distribution on [0, 1] and a continuous Bernoulli is finite.
_WRONG_RULES = (
    divergence_rule(ExponentialFamily, ExponentialFamily)[0],
    divergence_rule(Uniform, ContinuousBernoulli)[0],
    divergence_rule(ContinuousBernoulli, Uniform)[0],
)
_TRANSFORMED = divergence_rule(TransformedDistribution, TransformedDistribution)[0]


def _is_fixed(transform: Transform) -> bool:
    """Return whether a transform has no parameters, so that equal transforms are identical."""
    return all(
        not v.requires_grad if isinstance(v, Tensor) else v is None or isinstance(v, int | float)
        for v in state_of(transform).values()
    )


def _same_weighting(p: Site, q: Site) -> bool:
    """
    Return whether both sites have the same user scale and mask, without reading tensors.
    """
    scales = inner_scale(p), inner_scale(q)
    if any(isinstance(s, torch.Tensor) for s in scales):
        same_scale = p["scale"] is q["scale"]
    else:
        same_scale = bool(scales[0] == scales[1])
    return same_scale and p["mask"] is q["mask"]


# Stochastic gradient variational Bayes: the ELBO with closed-form KL terms where they exist.


class TraceSGVB_ELBO(MonteCarloELBO):
    r"""
    The SGVB estimators of Kingma and Welling [1] for any Pyro program.

    .. math::
        \text{A:} \quad & \log p(x, z) - \log q(z \mid x), \qquad z = g_\phi(\epsilon, x) \\
        \text{B:} \quad & -KL(q(z \mid x) \,\|\, p(z)) + \log p(x \mid z)

    averaged over ``num_particles`` draws of z and scaled by N/B over the minibatch. Each site is
    treated separately. A site has estimator B if :func:`torch.distributions.kl_divergence` has its
    pair of distributions. In addition, its prior must not depend on draws of the guide that depend
    on the site. Otherwise it has estimator A. Sites without reparameterization use the score
    function with Pyro's plate-wise Rao-Blackwellization. It trains every model and guide that
    :class:`~pyro.infer.Trace_ELBO` does, and is not restricted to mean-field guides as
    :class:`~pyro.infer.TraceMeanField_ELBO` is.

    Global latents (full variational Bayes, appendix F of [1]) are treated like other sites.

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
        >>> from pyro_mcvae import TraceSGVB_ELBO
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
        >>> round(pyro.param("slope").item(), 1)  # of the posterior mean: 0.5
        0.5
    """

    def __init__(
        self, num_particles: int = 1, *, analytic_kl: bool = True, **options: Unpack[ELBOOptions]
    ) -> None:
        self._check_options(options)
        super().__init__(num_particles, **options)
        check_flag("analytic_kl", analytic_kl)
        self.analytic_kl = analytic_kl

    def _weighs(self, site: Site) -> bool:
        return False

    def estimate(self, programs: Programs) -> Estimate:
        runs = self.sampler.independent(programs, defers=self.analytic_kl)
        coupled: dict[FactorKey, frozenset[PlateKey]] = {}
        for run in runs:
            if any(isinstance(t.score, Tensor) for t in run.terms):
                # The costs of a score depend on whether elements of a plate are coupled.
                coupled |= self.sampler.structures.of(programs, run).coupled
        costs = [self._costs(programs, run) for run in runs]
        estimate = elbo_estimate(runs, costs, self.sampler.num_particles, coupled)
        estimate.causes = partial(_infinite_divergences, costs)
        estimate.bounds = lambda: elbo_bounds(self.sampler.arrange(programs, runs), costs)
        return estimate

    def _costs(self, programs: Programs, run: Run) -> list[Cost]:
        if not self.analytic_kl:
            return elbo_costs(run.summands)

        @cache
        def find_separable() -> frozenset[str]:
            find = partial(separable_sites, programs, run)
            analysis = self.sampler.analyses.of(programs)
            return analysis.cached(("closed", run.signature), find)

        closed = analytic_kl_sites(run, find_separable)
        return [
            elbo_cost(t) if (n := t.key.name) not in closed else _closed(t, closed[n])
            for t in run.summands
        ]


def _infinite_divergences(costs: Iterable[Iterable[Cost]]) -> list[str]:
    """Return a line for each site with an infinite closed-form divergence."""
    closed = (c for each in costs for c in each if c.closed)
    lines = (
        f"site '{c.term.key.name}': the KL divergence of the guide's distribution from the model's "
        f"({type(c.term.site['fn']).__name__}) is infinite, as where the guide draws outside "
        f"that one's support: give the guide a distribution with that support (or an AutoGuide, "
        f"which transforms to it)."
        for c in closed
        if isinstance(c.value, Tensor) and bool(c.value.isinf().any())
    )
    return list(dict.fromkeys(lines))


def _closed(term: Term, negative_kl: Tensor) -> Cost:
    # The divergence belongs to the model's site and includes the guide's summand.
    value = 0 if term.in_guide else negative_kl
    return Cost(term, value, value, closed=not term.in_guide)
