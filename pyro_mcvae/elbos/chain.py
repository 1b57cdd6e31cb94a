"""L-MCVAE and A-MCVAE: bounds by annealed chains, with defensive weights."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_tb
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import Chain, accept_score, anneal
from pyro_mcvae.chains.kernels import HMC, ULA, Kernel, UnderdampedLangevin, of_moving
from pyro_mcvae.chains.parameters import AdaptiveStepSize, StepSize
from pyro_mcvae.chains.schedules import LearnedSchedule, LinearSchedule, Schedule, as_schedule
from pyro_mcvae.chains.score_network import SizedByChain
from pyro_mcvae.coordinates.chain_density import ChainDensity, check_chain, outside_inference_mode
from pyro_mcvae.coordinates.log_weight import CHANGES, GradientMode, LogWeight
from pyro_mcvae.coordinates.smoothness import Smoothness
from pyro_mcvae.discrete.baselines import Baseline
from pyro_mcvae.discrete.site_slots import SiteOptions, is_discrete
from pyro_mcvae.discrete.slot_rows import SlotDraws, SlotPlanner
from pyro_mcvae.elbos.base import ELBOOptions, Estimate, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import local_estimate, weighted_estimate
from pyro_mcvae.elbos.rao_blackwell import OneSlot, SlotAverage
from pyro_mcvae.ops.checks import check_choice, check_flag
from pyro_mcvae.ops.distributed import concat_over_ranks, mean_over_ranks, num_ranks
from pyro_mcvae.ops.tensors import follow, is_due, is_recording
from pyro_mcvae.ops.vmap_dims import is_transformed
from pyro_mcvae.ops.weights import effective_sample_size, log_mean_exp
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.stored_module import StoredModule
from pyro_mcvae.programs.types import NothingToMoveError, Site
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.finder import StructureFinder

_logger = logging.getLogger(__name__)

# Defensive mixtures: a diverged chain has about the weight of its first draw.

# Good chains lose 0.01 nats. A diverged chain loses log(100) = 4.6 nats against its first draw.
_BY_DEFAULT = 0.01


def defensive_weight(weight: float | None, trained: bool, reweighted: bool) -> float:
    """
    Check and return the weight of the first draw in a defensive mixture.

    :param weight: the user's value; None for the default, which is 0 unless the default kernel is
        trained.
    :param bool reweighted: whether the gradient is the reweighted one.
    :raises ValueError: for invalid values, and for the reweighted gradient, with which no chain can
        dominate a step.
    """
    if weight is None:
        return _BY_DEFAULT if trained else 0.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1:
        raise ValueError(f"defensive must be a number from 0 to below 1, got {weight!r}")
    if weight and reweighted:
        raise ValueError(
            f"defensive={weight} limits the effect of diverged chains, which have none with "
            f"gradient_estimator='reweighted': leave it out"
        )
    return float(weight)


def defensive_mixture(chain: Chain, weight: float) -> Tensor:
    r"""
    Return the log weight of a mixture of an unadjusted chain and its first draw.

    .. math:: W' = \log\big((1 - \alpha)\, e^W + \alpha\, w(z_0)\big)

    :param float weight: :math:`\alpha`, between 0 and 1.
    :returns: shape ``[*batch]``; W where that is not finite.
    """
    usable, first = chain.log_weight.isfinite(), chain.start.log_weight
    log_weight = torch.where(usable, chain.log_weight, 0.0) + math.log1p(-weight)
    first = torch.where(first.isfinite(), first, -math.inf) + math.log(weight)
    return torch.where(usable, torch.logaddexp(log_weight, first), chain.log_weight)


# The record of the chains of one step.


@dataclass(frozen=True, slots=True)
class ChainRecord:
    r"""
    A record of the chains of one step. Its tensors are detached and stay on the device.

    :ivar ~torch.Tensor acceptance: the mean acceptance probability of each transition, shape
        ``[transitions]``; for unadjusted kernels the acceptance that their moves would have had.
    :ivar ~torch.Tensor step_size: the step size, a scalar or shape ``[D]``; with one row for each
        transition if transitions have different step sizes.
    :ivar ~torch.Tensor betas: the schedule, shape ``[num_steps + 1]``.
    :ivar ~torch.Tensor log_weight: the chains' log weights W, shape ``[num_particles, *plates]``;
        for guides with discrete sites ``[num_particles, slots, *plates]``.
    :ivar slot_weight: the weight of each slot, of the same shape; None without discrete sites.
    """

    acceptance: Tensor
    step_size: Tensor
    betas: Tensor
    log_weight: Tensor
    slot_weight: Tensor | None = None

    @classmethod
    def of(cls, chain: Chain, step_size: Tensor, betas: Tensor, slots: OneSlot) -> ChainRecord:
        """Make the record of a chain."""
        log_weight = slots.fold(chain.log_weight.detach())
        each = [info.acceptance for info in chain.infos]
        acceptance = chain.mean(torch.stack(each), 1) if each else log_weight.new_zeros(0)
        return cls(acceptance, step_size, betas, log_weight, slots.weight)

    @property
    def effective_sample_size(self) -> Tensor:
        """Return Kish's effective number of chains per datum, shape ``[*plates]``."""
        if self.slot_weight is None:
            return effective_sample_size(self.log_weight)
        return effective_sample_size((self.log_weight + self.slot_weight.log()).flatten(0, 1))


# The base of SIS and AIS: model and guide as an annealed density, and a record of each step.

ChainCoordinates = Literal["noise", "latent"]
ChainGradient = Literal["auto", "reparam", "reweighted"]

# PyTorch's errors for operators, custom functions, cuDNN's RNNs and compiled modules.
_NO_DOUBLE_BACKWARD = re.compile("not implemented|once_differentiable|double backward", re.I)

_OVERFLOW = (
    "every site is finite, but the chain's moves went too far: take a smaller step size (last_step "
    "has the present one and the acceptance), or let it adapt from a small one"
)

_MOVED_OUT = (
    "The programs compute these values from latents to which %s has moved: use a smaller step "
    "size, or AdaptiveStepSize(), which finds one"
)


def _moved_out(error: ValueError, kind: str) -> ValueError:
    """Return an error of a chain's move, with the remedy for parameters that are not valid."""
    evaluated = (f.f_code is LogWeight.__call__.__code__ for f, _ in walk_tb(error.__traceback__))
    if "to satisfy the constraint" not in str(error) or not any(evaluated):
        return error
    return ValueError(f"{error}\n{_MOVED_OUT % kind}")


# Moves are checked at 8, 16, 32, ... training steps. Step sizes that adapt have more time.
_FIRST_CHECK, _FIRST_CHECK_IF_ADAPTIVE = 8, 64
_LEAST_ACCEPTANCE = 0.01

# Whether no latent of the programs has a weight per datum, so that chains would move nothing.
_NOTHING_MOVES = ("nothing moves",)


class ChainOptions(ELBOOptions, total=False):
    """The keyword arguments of every annealed objective."""

    coordinates: ChainCoordinates
    gradient_estimator: ChainGradient
    joint: bool
    num_categories: float | None
    num_samples: int | None
    budget: int | None
    baseline: Baseline | None


class ChainELBO(MonteCarloELBO, StoredModule):
    """
    Base class of the annealed objectives: a module with their kernel and schedule.

    :ivar last_step: the :class:`ChainRecord` of the last step; None before the first.
    """

    _adjusted: bool
    # Whether discrete sites of the guide have slots.
    _has_slots = True
    kernel: Kernel
    schedule: Schedule

    def __init__(
        self,
        num_steps: int | None = None,
        kernel: Kernel | None = None,
        schedule: Schedule | Tensor | None = None,
        num_particles: int = 1,
        multi_sample: bool = False,
        coordinates: ChainCoordinates = "noise",
        gradient_estimator: ChainGradient = "auto",
        joint: bool = False,
        num_categories: float | None = None,
        num_samples: int | None = None,
        budget: int | None = None,
        baseline: Baseline | None = None,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options, ChainOptions.__annotations__)
        StoredModule.__init__(self)
        check_flag("multi_sample", multi_sample)
        check_choice("coordinates", coordinates, get_args(ChainCoordinates))
        check_choice("gradient_estimator", gradient_estimator, get_args(ChainGradient))
        self.multi_sample, self.coordinates = multi_sample, coordinates
        self.gradient_estimator = gradient_estimator
        # With a kernel, such as that of a paper, the default schedule is that of the papers.
        trained = kernel is None and gradient_estimator != "reweighted"
        default = LearnedSchedule if trained else LinearSchedule
        self.schedule = as_schedule(schedule, num_steps, default)
        MonteCarloELBO.__init__(self, num_particles, **options)
        self.kernel = self._checked(self._default_kernel(trained) if kernel is None else kernel)
        self.kernel.check_transitions(self.num_steps)
        self._sized = [m for m in self.kernel.modules() if isinstance(m, SizedByChain)]
        self.last_step: ChainRecord | None = None
        self._warned = False
        if gradient_estimator == "reweighted":
            self._refuse_learned_parts()
        self.joint, self.baseline = joint, baseline
        self.num_categories, self.num_samples, self.budget = num_categories, num_samples, budget
        site_options = SiteOptions(num_categories, num_samples, budget, baseline)
        self.slots: SlotPlanner | None = None  # discrete sites are drawn
        if self._has_slots:
            self.slots = SlotPlanner(site_options, common=multi_sample)
            # A site that is marked for enumeration has a slot for each of its values.
            self.sampler.runner.strict_enumeration = False
        # A mean-field guide, which its roots determine, does not have to run again.
        self.sampler.structures = StructureFinder(joint, True, self.sampler.analyses)
        self._smoothness = Smoothness(gradient_estimator == "auto", self.sampler.analyses)

    @property
    def num_steps(self) -> int:
        """Return K, the number of annealing steps."""
        return self.schedule.num_steps

    def _weighs(self, site: Site) -> bool:
        return not (self._has_slots and is_discrete(site))  # slots are averaged over

    def estimate(self, programs: Programs) -> Estimate:
        # If no latent has a weight per datum, the draws are averaged instead.
        analysis = self.sampler.analyses.of(programs)
        if analysis.get(_NOTHING_MOVES) and (averaged := self._averaged_again(programs, analysis)):
            return averaged
        with self.sampler.analyses.rewindable(programs, analysis.get(CHANGES) is None) as rewind:
            try:
                return self._estimate(programs)
            except NothingToMoveError:
                rewind()
            except ValueError as error:
                raise _moved_out(error, type(self).__name__) from error.__cause__
        analysis.put(_NOTHING_MOVES, True)
        return _averaged(self.sampler.sample(programs))

    def _averaged_again(self, programs: Programs, analysis: Analysis) -> Estimate | None:
        """Return the averaged estimate, unless a latent now has a weight per datum."""
        sample = self.sampler.sample(programs)
        drawn = (t for t in sample.runs[0].terms if t.in_guide and is_random(t.site))
        if not any(map(sample.is_local, drawn)):
            return _averaged(sample)
        analysis.put(_NOTHING_MOVES, False)
        return None

    def _estimate(self, programs: Programs) -> Estimate:
        wanted = torch.is_grad_enabled()
        if self.kernel.needs_gradient and is_transformed():
            raise _transformed_error(self)
        with outside_inference_mode(programs) as programs:
            density, slots = self._density(programs, wanted)
            if wanted and any(p.requires_grad for p in self.parameters()):
                self.add_to_store()
            chain = self._run(density, slots)
            if (finder := density.log_weight.finder) is not None:
                self._smoothness.add(density.log_weight, finder)  # for the next steps
        with torch.set_grad_enabled(wanted):
            bound = slots.sum(self._average(slots.each(chain.log_weight)))
            surrogate = self._surrogate(density, chain, slots, bound) if wanted else bound
            estimate = weighted_estimate(density.log_weight.first.sample, bound, surrogate)
            if wanted:
                cost = partial(self._cost, density, chain, slots)
                estimate.surrogate = slots.with_scores(estimate.surrogate, cost, programs)
                estimate.finish = partial(self._adapt, programs, chain)
        estimate.runs, estimate.overflow, estimate.causes = density.runs, _OVERFLOW, self._causes
        estimate.visited, estimate.remedy = density.visited, self._remedy
        return estimate

    def _causes(self) -> list[str]:
        """Return a line for each parameter of the chain that is not finite."""
        kind, step = type(self).__name__, self.last_step
        values = {f"the parameter '{n}' of {kind}": p.detach() for n, p in self.named_parameters()}
        if step is not None:
            values |= {"the schedule": step.betas, "the kernel's step size": step.step_size}
        return [
            f"{name} is not finite ({value.tolist()}): put an earlier value back, and train with "
            f"a lower learning rate"
            for name, value in values.items()
            if not bool(value.isfinite().all())
        ]

    def _remedy(self) -> str:
        """Return the advice for moves that go too far."""
        return self._too_far() if self._acceptance() < _LEAST_ACCEPTANCE else ""

    def _acceptance(self) -> float:
        """Return the acceptance of the last step's worst transition; of the best, if adjusted."""
        step = self.last_step
        if step is None or not step.acceptance.numel():
            return 1.0
        return float(step.acceptance.max() if self.kernel.adjusted else step.acceptance.min())

    def _too_far(self, fall: str = "") -> str:
        sizes = self.last_step.step_size.flatten()[:3].tolist() if self.last_step else []
        size = ", ".join(f"{s:.3g}" for s in sizes)
        return (
            f"the moves of {type(self).__name__} go too far: the acceptance of a transition is "
            f"{self._acceptance():.3f}{fall}. The step size is {size}: use a smaller one, or "
            f"AdaptiveStepSize(), which finds one (last_step has both)"
        )

    def _density(self, programs: Programs, trains: bool) -> tuple[ChainDensity, OneSlot]:
        """
        Make the function from positions to states of one step, and the slots of discrete sites.
        """
        if self.last_step is None:
            self._claim_kernel()
        reweighted = self.gradient_estimator == "reweighted"
        gradient = GradientMode.COORDINATES if self.kernel.needs_gradient else GradientMode.NONE
        if trains:
            gradient |= GradientMode.FIRST if reweighted else GradientMode.CHAIN

        # Whether gradients that move the chain are differentiated again, in training steps.
        twice = self.kernel.needs_gradient and not reweighted
        widths = self._smoothness.widths(programs) if twice else None
        finder = self._smoothness.finder(programs) if twice else None

        def make(draws: SlotDraws | None) -> tuple[LogWeight, WeightedParticles]:
            arguments = self.sampler, programs, self.coordinates, gradient
            log_weight = LogWeight(*arguments, begin=draws, widths=widths, finder=finder)
            return log_weight, log_weight.first.sample

        with torch.set_grad_enabled(bool(gradient)):
            if self.slots is None:
                log_weight, draws = make(None)[0], None
            else:
                log_weight, draws = self.slots.begin(self.sampler, programs, make)
        for part in self._sized:
            part.create(log_weight.coordinates)
        follow(self, log_weight.coordinates)
        check_chain(log_weight, type(self).__name__)
        sample = log_weight.first.sample
        again = finder is not None and self._smoothness.add(log_weight, finder)
        return ChainDensity(log_weight, again), SlotAverage.of(sample, draws, self.multi_sample)

    def _claim_kernel(self) -> None:
        """Set the coordinates of adaptive step sizes, or raise an error for a shared kernel."""
        for step_size in self.kernel.step_size.modules():
            if isinstance(step_size, AdaptiveStepSize):
                step_size.use_coordinates(self.coordinates)

    def _surrogate(
        self, density: ChainDensity, chain: Chain, slots: OneSlot, bound: Tensor
    ) -> Tensor:
        """
        Return a tensor of shape ``[*plates]`` with the gradient: the bound itself, if its gradient
        is the whole gradient.
        """
        if self.gradient_estimator == "reweighted":
            return _reweighted(density, chain, slots)
        if self.kernel.adjusted:
            chain = slots.chain(chain)
            score = accept_score(chain, self.multi_sample)
            bound = slots.sum(self._average(chain.log_weight) + score)
        return slots.without_entropy(bound)

    def _cost(self, density: ChainDensity, chain: Chain, slots: OneSlot) -> Tensor:
        """Return the cost that multiplies the score functions of discrete draws."""
        # The reweighted gradient of the guide is that of the plain ELBO.
        first = self.gradient_estimator == "reweighted"
        log_weight = (density.log_weight.first if first else chain).log_weight.detach()
        return self._average(slots.each(log_weight)) if self.multi_sample else log_weight

    def _run(self, density: ChainDensity, slots: OneSlot) -> Chain:
        betas, movable = self.schedule(), density.log_weight.movable
        with torch.set_grad_enabled(GradientMode.CHAIN in density.gradient):
            start = density.start()
            if start.grad_base is not None:
                # Initialize the step size at the start of the chains.
                first = of_moving(start.grad_base.detach(), movable)
                self.kernel.step_size.begin(first, self.training and density.gradient.keeps_graph)
            # The weight does not depend on AIS's last move, but a refined draw does.
            last = GradientMode.FIRST in density.gradient
            chain = anneal(start, betas, self.kernel, density, movable, last)
        log_weight = self._log_weight(chain)
        if self.kernel.adjusted:
            # With NaN parameters every move would be rejected, without an error.
            for p in self.kernel.parameters():
                log_weight = log_weight + 0 * p.detach().sum()
        chain = replace(chain, weight=slots.row_weight, log_weight=log_weight)
        step_size = self.kernel.step_size.values().detach().clone()
        self.last_step = ChainRecord.of(chain, step_size, betas.detach(), slots)
        return chain

    def _log_weight(self, chain: Chain) -> Tensor:
        return chain.log_weight

    def _average(self, log_weight: Tensor) -> Tensor:
        if self.multi_sample:
            return log_mean_exp(log_weight)
        return log_weight.squeeze(0) if len(log_weight) == 1 else log_weight.mean(0)

    def _adapt(self, programs: Programs, chain: Chain) -> None:
        count = self.sampler.analyses.of(programs).uses
        if is_due(count) and not is_recording():
            self._check_moves(chain, count)
        step_size = self.kernel.step_size
        if not (self.training and chain.infos) or type(step_size).update is StepSize.update:
            return  # nothing to adapt, and no need to wait for other ranks
        acceptance, gradient = chain.mean_acceptance, chain.gradient
        if num_ranks() > 1:
            acceptance, gradient = self._over_ranks(acceptance, gradient)
        step_size.update(acceptance, gradient)

    def _check_moves(self, chain: Chain, count: int) -> None:
        """
        Warn once if moves go so far that they would hardly ever be accepted.

        :param int count: the number of steps until now.
        """
        adapts = type(self.kernel.step_size).update is not StepSize.update
        first = _FIRST_CHECK_IF_ADAPTIVE if adapts else _FIRST_CHECK
        if count < first or self._warned or self._acceptance() >= _LEAST_ACCEPTANCE:
            return
        fall = ""
        if not self.kernel.adjusted:
            ends = (chain.start.log_weight, chain.log_weight)
            start, end = (float(w.detach().mean()) for w in ends)
            if end > start - 1.0:
                return
            fall = f", and the mean log weight falls from {start:.1f} (first draws) to {end:.1f}"
        self._warned = True
        _logger.warning(self._too_far(fall))

    def _over_ranks(
        self, acceptance: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Average the acceptance and the gradients over the data of all ranks."""
        if self.kernel.adjusted:
            acceptance = mean_over_ranks(acceptance)
        else:
            acceptance = mean_over_ranks(acceptance.log()).exp()
        if gradient is not None and getattr(self.kernel.step_size, "per_coordinate", True):
            gradient = concat_over_ranks(gradient.reshape(-1, gradient.shape[-1]))
        return acceptance, gradient

    def _backward(self, surrogate: Tensor) -> None:
        try:
            super()._backward(surrogate)
        except RuntimeError as error:
            if not _NO_DOUBLE_BACKWARD.search(str(error)):
                raise
            raise RuntimeError(_not_twice(error)) from error

    def _checked(self, kernel: Kernel) -> Kernel:
        if not isinstance(kernel, Kernel):
            raise ValueError(f"kernel must be a Kernel such as ULA() or MALA(), got {kernel!r}")
        if not hasattr(kernel, "step_size"):
            raise ValueError(
                f"{type(kernel).__name__} has no step size: its __init__ must call "
                f"super().__init__(step_size)"
            )
        if kernel.adjusted != self._adjusted:
            raise ValueError(self._wrong_kernel(type(kernel).__name__))
        return kernel

    def _default_kernel(self, trained: bool) -> Kernel:
        """Make the default kernel; it trains with the bound if the gradient estimator allows it."""
        raise NotImplementedError(f"{type(self).__name__} has no default kernel")

    def _wrong_kernel(self, name: str) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not say which kernels it takes")

    def _refuse_learned_parts(self) -> None:
        learned = [name for name, p in self.named_parameters() if p.requires_grad]
        learned += [f"the {type(part).__name__}" for part in self._sized if part.dim is None]
        if learned:
            raise ValueError(
                f"gradient_estimator='reweighted' runs its chains without a graph, so "
                f"{', '.join(learned)} would get no gradient: use 'auto', or parts that are fixed "
                f"or adapt"
            )


def _averaged(sample: WeightedParticles) -> Estimate:
    mean = sample.log_weight.mean(0)
    return replace(local_estimate(sample, mean.detach(), mean), averaged=True)


def _reweighted(density: ChainDensity, chain: Chain, slots: OneSlot) -> Tensor:
    weight = slots.normalized(chain.log_weight.detach())
    refined = density.log_weight.detached(chain.state.position).model_log_prob
    plain = slots.without_entropy(slots.mean(density.log_weight.guide_elbo()))
    return plain + (weight * refined).sum(0)


def _not_twice(error: Exception) -> str:
    return (
        f"the model or the guide cannot be differentiated twice, which the gradient of a chain "
        f"needs ({type(error).__name__}: {error}). Use another operator, "
        f"gradient_estimator='reweighted', or a kernel without gradients (RandomWalk)"
    )


# The annealed Langevin bound (L-MCVAE) for any Pyro program.


def _transformed_error(loss: ChainELBO) -> NotImplementedError:
    return NotImplementedError(
        f"{type(loss).__name__} differentiates the log weight at each move, which transforms of "
        f"torch.func (grad, vmap) do not allow: use loss.backward(), or TraceIWAE_ELBO"
    )


class TraceSIS_ELBO(ChainELBO):
    r"""
    Sequential importance sampling with unadjusted Langevin moves: L-MCVAE of Thin et al. [1].

    A draw :math:`z_0` of the guide moves towards the posterior in K steps, with the densities
    :math:`m_k` of moves for :math:`\gamma_\beta = q(z \mid x)^{1 - \beta} p(x, z)^\beta`:

    .. math::
        W = -\log q(z_0 \mid x) + \sum_{k=1}^K
              \log \frac{m_k(z_k \to z_{k-1})}{m_k(z_{k-1} \to z_k)} + \log p(x, z_K),
        \qquad L = E[W] \le \log p(x) = \log E[\exp W]

    per datum, for any kernel, step size and schedule. One backward pass differentiates the whole
    chain. By default chains move the noise of the guide's draws, and step sizes, momenta and the
    schedule are trained. :doc:`/api/chains` describes this, the costs, diverged chains, discrete
    sites, kinks, and the reweighted gradient.

    :param int num_steps: K; 5 if neither it nor a schedule is given.
    :param Kernel kernel: an unadjusted kernel; by default :meth:`UnderdampedLangevin.trained`, and
        :class:`ULA` with the ``"reweighted"`` gradient.
    :param schedule: a :class:`~pyro_mcvae.Schedule` or a tensor from 0 to 1; by default
        :class:`LearnedSchedule`; :class:`LinearSchedule` with a given kernel or ``"reweighted"``.
    :param int num_particles: independent chains, whose W are averaged.
    :param bool multi_sample: average :math:`\exp W` inside the logarithm, a tighter bound.
    :param float defensive: the part of the first draw's weight in each weight, 0.01 by default; 0
        with a given kernel or ``"reweighted"``.
    :param str coordinates: ``"noise"``, or ``"latent"`` for the unconstrained latents.
    :param str gradient_estimator: ``"auto"``, ``"reparam"`` or ``"reweighted"``.
    :param bool joint: one weight for global and local latents together, on the full data.
    :param num_categories: the number of most probable values of each discrete site of the guide
        that are summed; 1 by default, ``math.inf`` for all.
    :param int num_samples: the number of draws from the values that are not summed.
    :param budget: the sum of both numbers.
    :param baseline: a :class:`~pyro_mcvae.Baseline` of the discrete sites, or None.
    :param options: as in :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :ivar last_step: the :class:`~pyro_mcvae.elbos.chain.ChainRecord` of the last step.
    :raises ValueError: for counts out of range, a schedule that does not increase from 0 to 1, and
        an adjusted kernel.
    :raises RuntimeError: from ``loss_and_grads``, if the model cannot be differentiated twice.

    [1] Thin, Kotelevskii, Doucet, Durmus, Moulines, Panov (2021), *Monte Carlo Variational
    Auto-Encoders*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TraceSIS_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.4 * x, 0.9))
        >>> elbo = TraceSIS_ELBO(num_steps=5, num_particles=100)
        >>> round(-elbo.loss(model, guide, torch.tensor([-2.0, 0.0, 2.0])), 1)  # exact: -5.8
        -5.9
    """

    _adjusted = False

    def __init__(
        self,
        num_steps: int | None = None,
        kernel: Kernel | None = None,
        *,
        schedule: Schedule | Tensor | None = None,
        num_particles: int = 1,
        multi_sample: bool = False,
        defensive: float | None = None,
        **options: Unpack[ChainOptions],
    ) -> None:
        super().__init__(num_steps, kernel, schedule, num_particles, multi_sample, **options)
        reweighted = self.gradient_estimator == "reweighted"
        self.defensive = defensive_weight(defensive, kernel is None and not reweighted, reweighted)

    def _log_weight(self, chain: Chain) -> Tensor:
        return defensive_mixture(chain, self.defensive) if self.defensive else chain.log_weight

    def _default_kernel(self, trained: bool) -> Kernel:
        return UnderdampedLangevin.trained(self.num_steps) if trained else ULA()

    def _wrong_kernel(self, name: str) -> str:
        return (
            f"TraceSIS_ELBO weighs every move by its density, which the rejections of {name} do "
            f"not have: use ULA or UnderdampedLangevin, or TraceAIS_ELBO for {name}"
        )


# The annealed importance sampling bound (A-MCVAE) for any Pyro program.


class TraceAIS_ELBO(ChainELBO):
    r"""
    Annealed importance sampling with Metropolis-adjusted moves: A-MCVAE of Thin et al. [1].

    A draw :math:`z_0` of the guide moves along
    :math:`\log \gamma_\beta = (1 - \beta) \log q(z \mid x) + \beta \log p(x, z)`. The kernels leave
    :math:`\gamma_{\beta_k}` invariant. The bound is

    .. math::
        W = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log \frac{p(x, z_{k-1})}{q(z_{k-1} \mid x)},
        \qquad L = E[W] \le \log p(x),

    per datum. Moves are accepted separately for each datum. N/B is outside the logarithm, and
    global latents are handled as in :class:`TraceIWAE_ELBO`. Gradients pass through the draws, the
    moves and the densities. The accept decisions :math:`a_k` are not reparameterized, so they add
    the score-function term

    .. math::
        \sum_k (R_k - b_k)\, \nabla \log \Pr(a_k), \qquad
        R_k = \sum_{j \ge k} (\beta_{j+1} - \beta_j) \log w(z_j),

    The baseline :math:`b_k` is the mean of :math:`R_k` over the other particles. The paper uses the
    whole W as the signal. This class uses :math:`R_k`, the part after the decision, and omits the
    last move, because W does not depend on it. The expectation is the same, with less noise. W
    needs 2K - 1 evaluations of the model with its gradient (K with :class:`MALA`, one less than
    :class:`TraceSIS_ELBO`).

    By default a move is two leapfrog steps of :class:`HMC`, and the schedule is trained with the
    bound. One move in 33 is always rejected (``laziness``), which bounds the score of a rejection.
    The step size starts small and adapts after each training step; ``eval()`` freezes it.
    ``kernel=MALA()`` is the chain of the paper, with a linear schedule by default.

    Coordinates, masks, discrete sites, kinks such as those of ReLU, and the ``"reweighted"``
    gradient are as in :class:`TraceSIS_ELBO`. With the ``"reweighted"`` gradient the last move is
    not omitted, and one particle is enough.

    :param int num_steps: K; 5 if neither it nor a schedule is given.
    :param Kernel kernel: an adjusted kernel: :class:`HMC` (the default, with two leapfrog steps),
        :class:`MALA`, :class:`RandomWalk`, or a custom one.
    :param schedule: a :class:`~pyro_mcvae.Schedule` or a tensor from 0 to 1; by default
        :class:`LearnedSchedule`, or :class:`LinearSchedule` if a kernel is given or with the
        ``"reweighted"`` gradient.
    :param int num_particles: independent chains, whose W are averaged; 2 by default. One chain has
        no baseline, as in Algorithm 2 of the paper, and a much noisier gradient.
    :param bool multi_sample: average :math:`\exp W` inside the logarithm, which gives a tighter
        bound for several particles. The learning signal is then that of VIMCO.
    :param str coordinates: ``"noise"`` or ``"latent"``.
    :param str gradient_estimator: ``"auto"``, ``"reparam"`` or ``"reweighted"``.
    :param bool joint: compute one weight over everything, for global and local latents together.
        This needs the full data.
    :param num_categories: the number of most probable values of each discrete site of the guide
        that are summed; 1 by default, ``math.inf`` for all.
    :param int num_samples: the number of draws from the other values; 1 by default.
    :param budget: the sum of both numbers, as in :class:`~pyro_mcvae.TraceRaoBlackwell_ELBO`.
    :param baseline: a :class:`~pyro_mcvae.Baseline` of the discrete sites, or None.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :ivar last_step: acceptance, step size and log weights of the last step, a
        :class:`~pyro_mcvae.elbos.chain.ChainRecord`.
    :raises ValueError: for ``num_steps`` below 1, a schedule that does not increase from 0 to 1, an
        unadjusted kernel, and counts out of range. At the first step, for discrete sites that
        cannot have slots.
    :raises RuntimeError: from ``loss_and_grads``, if the model cannot be differentiated twice.

    [1] Thin, Kotelevskii, Doucet, Durmus, Moulines, Panov (2021), *Monte Carlo Variational
    Auto-Encoders*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import MALA, TraceAIS_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x).sum()
        >>> elbo = TraceAIS_ELBO(40, MALA(0.3), num_particles=100)
        >>> round(-elbo.loss(model, guide, x), 1), round(exact.item(), 1)
        (-4.4, -4.3)
    """

    _adjusted = True

    def __init__(
        self,
        num_steps: int | None = None,
        kernel: Kernel | None = None,
        *,
        schedule: Schedule | Tensor | None = None,
        num_particles: int = 2,
        multi_sample: bool = False,
        **options: Unpack[ChainOptions],
    ) -> None:
        super().__init__(num_steps, kernel, schedule, num_particles, multi_sample, **options)

    def _default_kernel(self, trained: bool) -> Kernel:
        return HMC(num_leapfrog=2, laziness=0.03)

    def _wrong_kernel(self, name: str) -> str:
        return (
            f"TraceAIS_ELBO needs kernels that leave their target invariant, which {name} does "
            f"not: use MALA, HMC or RandomWalk, or TraceSIS_ELBO for {name}"
        )
