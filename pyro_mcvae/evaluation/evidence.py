"""The log evidence of a model, estimated per datum with a guide: is the bound any good?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.labellings import Labellings, find_labellings
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.weights import Weights, WeightSummary
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.ops.pareto import tail_length
from pyro_mcvae.programs.execution import Programs

__all__ = ["LogEvidence", "estimate", "guide_and_chains", "has_light_tail", "log_evidence"]

# Weights, below which k-hat says little of their tail.
_ENOUGH = 500


@dataclass(frozen=True)
class LogEvidence:
    r"""
    Estimates of :math:`\log p(x_n)` and what is known about their error.

    Tensors have one entry per datum: shape ``[*plates]``; ``[elements]`` for programs with several
    separate plates; a scalar where all data share one weight, as with global latents.

    :ivar log_evidence: :math:`\log \frac{1}{K} \sum_k w_k`, a lower bound in expectation.
    :ivar standard_error: of ``log_evidence``, from the spread of the weights. Too small where the
        weights' tail is heavy, see ``doubtful``.
    :ivar effective_sample_size: Kish's, between 1 and K.
    :ivar pareto_k: :math:`\hat k`, the weights' tail: above 0.7 the estimate is unreliable, above
        0.3 two standard errors hold less often than they say (measured, with 1,000 draws: 83 % of
        the time at 0.3 to 0.4, 68 % at 0.5 to 0.6); ``-inf`` for weights without a tail, NaN for 20
        particles or less, and where draws beside a :class:`TruncatedPosterior`'s states found
        nothing and were fewer than a state has neighbours.
    :ivar bound: the mean log weight: the ELBO, or the chains' bound.
    :ivar num_particles: how many weights each datum has, K.
    :ivar plates: the names of the plates, leftmost dimension first; empty for several separate
        ones, and for one weight of all data.
    :ivar scale: N/B of subsampled plates, a number or a tensor.
    :ivar shared: log density of what belongs to no single datum: observations outside of the
        plates, and the prior of a guide's point masses.
    :ivar given: latents that were held: point masses of the guide, and, with ``joint=False``,
        global latents that were drawn once. The evidence is conditional on them.
    :ivar log_weight: log w, shape ``[K, *plates]``, if it was asked for.
    :ivar acceptance: of chains, the mean acceptance of each transition, shape ``[transitions]``.
    :ivar step_size: of chains.
    :ivar whitened: whether the chains moved in white coordinates.
    :ivar labellings: what is exchangeable, and what was added for the labellings that the guide
        does not draw; None where nothing was.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 1.0))
        >>> found = log_evidence(model, guide, torch.zeros(3))
        >>> found.log_evidence.shape, found.plates, int(found.unreliable.sum())
        (torch.Size([3]), ('data',), 0)
    """

    log_evidence: Tensor
    standard_error: Tensor
    effective_sample_size: Tensor
    pareto_k: Tensor
    bound: Tensor
    num_particles: int
    plates: tuple[str, ...]
    scale: float | Tensor
    shared: Tensor
    given: tuple[str, ...]
    log_weight: Tensor | None = None
    acceptance: Tensor | None = None
    step_size: Tensor | None = None
    whitened: bool = False
    labellings: Labellings | None = None

    @property
    def total(self) -> Tensor:
        """The log evidence of all data, in nats; N/B times the minibatch's, where subsampled."""
        return self.shared.to(self.log_evidence) + (self.scale * self.log_evidence).sum()

    @property
    def total_standard_error(self) -> Tensor:
        """The Monte Carlo error of ``total``; which data a minibatch holds is not part of it."""
        return (self.scale * self.standard_error).square().sum().sqrt()

    @property
    def mean(self) -> Tensor:
        """The mean over the data, in nats per datum."""
        return self.log_evidence.mean()

    @property
    def mean_standard_error(self) -> Tensor:
        """The Monte Carlo error of ``mean``."""
        return self.standard_error.square().sum().sqrt() / self.standard_error.numel()

    @property
    def unreliable(self) -> Tensor:
        r"""Where :math:`\hat k > 0.7`."""
        return self.pareto_k > 0.7

    @property
    def pareto_k_error(self) -> Tensor:
        r"""The standard error of :math:`\hat k`, :math:`(1 + k) / \sqrt M` for M tail weights."""
        tail = max(1, tail_length(self.num_particles))
        return (1 + self.pareto_k).clamp_min(0.0) / math.sqrt(tail)

    @property
    def doubtful(self) -> Tensor:
        r"""
        Where the standard error may be too small: :math:`\hat k` plus two errors is above 0.5, or
        fewer than 500 weights are too few to know their tail; not where all weights are equal.
        """
        known = has_light_tail(self, 0.5)
        if self.num_particles < _ENOUGH:
            known = self.pareto_k.isneginf()
        return ~known

    @property
    def few(self) -> Tensor:
        """Where fewer than 10 draws dominate, whose spread says little of the error."""
        return self.effective_sample_size < min(10.0, self.num_particles / 2)

    def _shown_error(self, error: Tensor) -> str:
        """An error in digits, unless a few draws dominate more than a twentieth of the weights."""
        known = float(self.few.double().mean()) <= 0.05
        return f"{float(error):.3f}" if known else "unknown"

    def __str__(self) -> str:
        n, k = self.log_evidence.numel(), self.pareto_k.flatten()
        lines = [
            f"log evidence {float(self.mean):.3f} ± "
            f"{self._shown_error(self.mean_standard_error)} nats per weight "
            f"({n} in {', '.join(self.plates) or 'all data'}; {self.num_particles} particles)",
            f"total {float(self.total):.3f} ± {self._shown_error(self.total_standard_error)}, "
            f"bound {float(self.bound.mean()):.3f}",
            f"effective sample size: median {float(self.effective_sample_size.median()):.1f}, "
            f"least {float(self.effective_sample_size.min()):.1f}",
        ]
        if bool(k.isnan().all()):
            lines.append("Pareto k: not known")
        else:
            lines.append(
                f"Pareto k: median {float(k.median()):.2f}, largest {float(k.max()):.2f}; "
                f"{int(self.unreliable.sum())} of {n} above 0.7"
            )
        if self.acceptance is not None and len(self.acceptance):
            lines.append(f"chains: acceptance {float(self.acceptance.mean()):.2f}")
        if self.given:
            lines.append(f"given {', '.join(self.given)}")
        if self.labellings is not None:
            lines.append(str(self.labellings))
        return "\n".join(lines)


def has_light_tail(found: LogEvidence, most: float) -> Tensor:
    r"""
    Where the weights' :math:`\hat k` plus two of its errors is at most ``most``, or all weights are
    equal; not where there are too few to say.
    """
    return found.pareto_k + 2 * found.pareto_k_error <= most


@judge()
def log_evidence(
    programs: Programs, options: Options, *, keep_log_weight: bool = False
) -> LogEvidence:
    r"""
    Estimate :math:`\log p(x_n)` of each datum, without training anything.

    By importance sampling with the guide's draws, or, with a ``schedule`` or a ``kernel``, by
    annealed importance sampling:

    .. math::
        \log p(x_n) \approx \log \frac{1}{K} \sum_{k=1}^K w_{nk}, \qquad
        E\, w_{nk} = p(x_n) .

    * **Chains** move the guide's draws towards the posterior; W is that of
      :class:`TraceAIS_ELBO` for adjusted kernels and of :class:`TraceSIS_ELBO` for unadjusted ones,
      unbiased for both. An adaptive step size is adapted on ``warmup`` chains of its own and then
      frozen. Discrete sites of the guide stay where they were drawn, in each chain, and the
      continuous ones move: W is unbiased as ever.
    * **White coordinates** (``coordinates="whitened"``), where the guide is far off: chains from
      its draws then find too little, by tens of nats, at errors of tenths. A population of chains
      (two for each coordinate, 50 to 1,000) moves at the posterior, for ``warmup`` windows of five
      transitions; after each window a normal density is fitted to where it stands, by mean and
      covariance. The chains that weigh are drawn from the last one, :math:`z = \mu + L u`, and
      move u:

      .. math:: \log w'(u) = \log p(x, z) - \log N(z; \mu, L L^\top), \qquad u \sim N(0, I) .

      What they move is a posterior of about unit scale, whatever the guide's; :math:`\mu` and L are
      fixed before, so that W is unbiased as ever. Kernels with ``jitter`` suit it, as
      ``HMC(num_leapfrog=4, jitter=0.3)``. Modes that the guide does not reach stay unseen, and
      discrete sites of the guide are refused.
    * **Memory** is that of one chunk of particles, and :math:`3 \sqrt K + 1` weights per datum.
      By default a chunk has as many particles as make :math:`2^{23}` numbers at the programs'
      sites (64 MiB in float64), and works in at most 8 times that, beside a network's hidden
      layers.
    * **Nothing is trained**: kernel and schedule are copied, modules are in evaluation mode
      meanwhile (also those that the programs refer to), and no parameter is left in the store.
    * **A guide that never ran** has learned nothing: an AutoGuide is refused then, and the initial
      values of a function's ``pyro.param`` are reported. Call it once if they are what you mean.
    * **Global latents** that the guide draws give one weight for all data, so that the result is a
      scalar. It is :math:`p(x)` under their prior, also of held-out data: other data do not count.
      With ``joint=False`` they are drawn once, and the estimates are of
      :math:`\log p(x_n \mid \text{globals})`.
    * **Masked latents** that the guide draws and counts (padded entries of an AutoGuide, the
      unobserved site of ``obs_mask=``) count in the model too, by their own prior, if nothing
      that the model counts reads them: the evidence is that of what is observed. Training
      objectives take the masks as they are, as Pyro's do, and are then no bounds.
    * **Where all latents are summed**, and the guide draws nothing, the evidence is exact.
    * **A TruncatedPosterior** gives its states' part of the evidence exactly (``bound``), and the
      rest by draws near these states, where every other state may be drawn: an estimate from
      above its bound.
    * **Random numbers** come from PyTorch's generators; ``seed`` uses a stream of its own and
      leaves the present one as it was. Other chunk sizes are other draws.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param bool keep_log_weight: keep all log weights, in memory that grows with K.
    {options}
    :returns: a :class:`LogEvidence`.
    :raises ValueError: for latents outside of a subsampled plate, guides of point masses alone,
        point masses in the data's plates, chains where no latent is continuous, guides that never
        ran, masks and scales that do not cancel, log weights that are not a number; naming the site
        and the remedy.

    [1] Burda, Grosse, Salakhutdinov (2016), *Importance Weighted Autoencoders*.
    [2] Wu, Burda, Salakhutdinov, Grosse (2017), *On the Quantitative Analysis of Decoder-Based
    Generative Models*.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.8))
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> found = log_evidence(model, guide, x, num_particles=10_000)
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x)
        >>> bool(((found.log_evidence - exact).abs() < 4 * found.standard_error).all())
        True
        >>> bool((found.pareto_k < 0.5).all())
        True
    """
    check_flag("keep_log_weight", keep_log_weight)
    with weights_of(programs, options, options.annealing()) as weights:
        return estimate(weights, options.num_particles, keep_log_weight)


def guide_and_chains(programs: Programs, options: Options) -> tuple[LogEvidence, LogEvidence]:
    """The evidence by the guide's weights, and by chains, where they were asked for; else twice."""
    annealing = options.annealing()
    with weights_of(programs, options) as weights:
        guide = estimate(weights, options.num_particles)
        if annealing is None:
            return guide, guide
        return guide, estimate(weights.annealed(annealing), options.num_particles)


def estimate(
    weights: Weights, num_particles: int, keep_log_weight: bool = False, all_labellings: bool = True
) -> LogEvidence:
    """
    The evidence, by the weights of an importance sampler, of its chains, or of states.

    :param all_labellings: add what those of exchangeable components add; see :class:`Labellings`.
    """
    summary, kept, acceptance = WeightSummary(num_particles), [], []
    for count in weights.chunks(num_particles):
        log_weight, runs, rates = weights.weigh(count)
        weights.check(log_weight, runs)
        summary.add(log_weight)
        if rates is not None:
            acceptance.append(count * rates)
        if keep_log_weight:
            kept.append(log_weight)
    bound, annealing = weights.bound(summary), weights.annealing
    labellings = None
    if all_labellings and isinstance(weights, ImportanceSampler):
        labellings = find_labellings(weights, num_particles)
    log_evidence, tails = summary.log_mean, summary
    if labellings is not None and (whole := labellings.weights) is not None:
        added = whole.log_mean - log_evidence
        error = torch.hypot(whole.standard_error, summary.standard_error)
        tails, labellings = whole, replace(labellings, added=added)
        if bool((added.abs() <= torch.clamp(2 * error, 0.01, 0.1)).all()):
            tails, labellings = summary, None  # the guide draws about all of them
    if labellings is not None and labellings.added is not None:
        log_evidence = log_evidence + labellings.added
    return LogEvidence(
        log_evidence.to(bound.dtype),
        tails.standard_error.to(bound.dtype),
        tails.effective_sample_size.to(bound.dtype),
        weights.pareto_k(tails).to(bound.dtype),
        bound,
        tails.count,
        weights.plates,
        weights.scale,
        weights.shared(),
        weights.given,
        torch.cat(kept) if kept else None,
        torch.stack(acceptance).sum(0) / num_particles if acceptance else None,
        None if annealing is None else annealing.kernel.step_size().detach().clone(),
        annealing is not None and annealing.whitens,
        labellings,
    )
