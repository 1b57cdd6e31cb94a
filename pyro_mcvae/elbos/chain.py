"""What SIS and AIS share: the programs as a density to anneal, and a record of each step."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import pyro
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import Chain, accept_score, anneal
from pyro_mcvae.chains.kernel import Kernel, of_moving
from pyro_mcvae.chains.schedules import LearnedSchedule, LinearSchedule, Schedule, as_schedule
from pyro_mcvae.chains.step_size import AdaptiveStepSize
from pyro_mcvae.chains.step_size_base import StepSize
from pyro_mcvae.coordinates.chain_checks import check_chain
from pyro_mcvae.coordinates.chain_density import ChainDensity, outside_inference_mode
from pyro_mcvae.coordinates.gradient import GradientMode
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.coordinates.smoothness import Smoothness
from pyro_mcvae.discrete.control_variates import Baseline
from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slot_choice import is_discrete
from pyro_mcvae.discrete.slot_draws import SlotDraws
from pyro_mcvae.discrete.slot_planner import SlotPlanner
from pyro_mcvae.elbos.base import ELBOOptions, MonteCarloELBO
from pyro_mcvae.elbos.chain_record import ChainRecord
from pyro_mcvae.elbos.elbo_terms import local_estimate, weighted_estimate
from pyro_mcvae.elbos.estimate import Estimate
from pyro_mcvae.elbos.slot_average import OneSlot, SlotAverage
from pyro_mcvae.ops.checks import check_choice, check_flag
from pyro_mcvae.ops.importance import log_mean_exp
from pyro_mcvae.ops.ranks import concat_over_ranks, mean_over_ranks, num_ranks
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.errors import NothingToMoveError
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.isolation import rewindable
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.finder import StructureFinder

ChainCoordinates = Literal["noise", "latent"]
ChainGradient = Literal["auto", "full", "reweighted"]

# What PyTorch says of operators, custom functions, cuDNN's RNNs and compiled modules.
_NO_DOUBLE_BACKWARD = re.compile("not implemented|once_differentiable|double backward", re.I)

_OVERFLOW = (
    "every site is finite, but the chain's moves went too far: take a smaller step size (last_step "
    "has the present one and the acceptance), or let it adapt from a small one"
)

# Whether chains move the latents of the programs.
_MOVES = ("moves",)
# In the order of creation, so that a program run again finds its parameters in the store.
_numbers = itertools.count()


class ChainOptions(ELBOOptions, total=False):
    """What every annealed objective takes by name."""

    coordinates: ChainCoordinates
    gradient_estimator: ChainGradient
    joint: bool
    num_categories: float | None
    num_samples: int | None
    budget: int | None
    baseline: Baseline | None


class ChainELBO(MonteCarloELBO, nn.Module):
    """
    Base class of the annealed objectives: a module that holds their kernel and schedule.

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
        nn.Module.__init__(self)
        check_flag("multi_sample", multi_sample)
        check_choice("coordinates", coordinates, get_args(ChainCoordinates))
        check_choice("gradient_estimator", gradient_estimator, get_args(ChainGradient))
        self.multi_sample, self.coordinates = multi_sample, coordinates
        self.gradient_estimator = gradient_estimator
        # A kernel that is given, the papers' say, goes along the papers' schedule.
        trained = kernel is None and gradient_estimator != "reweighted"
        default = LearnedSchedule if trained else LinearSchedule
        self.schedule = as_schedule(schedule, num_steps, default)
        MonteCarloELBO.__init__(self, num_particles, **options)
        self.kernel = self._checked(self._default_kernel(trained) if kernel is None else kernel)
        self.kernel.check_transitions(self.num_steps)
        self.last_step: ChainRecord | None = None
        self.param_name = f"{type(self).__name__}_{next(_numbers)}"
        for step_size in self.kernel.step_size.modules():
            if isinstance(step_size, AdaptiveStepSize):
                step_size.use_coordinates(coordinates)
        if gradient_estimator == "reweighted":
            self._refuse_learned_parts()
        self.joint, self.baseline = joint, baseline
        self.num_categories, self.num_samples, self.budget = num_categories, num_samples, budget
        site_options = SiteOptions(num_categories, num_samples, budget, baseline)
        self.slots: SlotPlanner | None = None  # discrete sites are drawn
        if self._has_slots:
            self.slots = SlotPlanner(site_options, common=multi_sample)
            # A site that is marked for enumeration has all of its values for slots.
            self.sampler.runner.strict_enumeration = False
        # Roots tell whether a guide is mean-field, which then need not be run again.
        self.sampler.structures = StructureFinder(joint, True, self.sampler.analyses)
        self._smoothness = Smoothness(gradient_estimator == "auto", self.sampler.analyses)

    def __setstate__(self, state: dict[str, object]) -> None:
        # A copy trains its own parts, which the store must not take for the original's.
        super().__setstate__(state)
        self.param_name = f"{type(self).__name__}_{next(_numbers)}"

    @property
    def num_steps(self) -> int:
        """K, the number of annealing steps."""
        return self.schedule.num_steps

    def _weighs(self, site: Site) -> bool:
        return not (self._has_slots and is_discrete(site))  # slots are averaged over

    def estimate(self, programs: Programs) -> Estimate:
        # Where no latent can be moved for one datum, the draws are averaged instead.
        analysis = self.sampler.analyses.of(programs)
        if analysis.get(_MOVES) is False:
            sample = self.sampler.sample(programs)
            drawn = (t for t in sample.runs[0].terms if t.in_guide and is_random(t.site))
            if not any(map(sample.is_local, drawn)):
                return _averaged(sample)
            analysis.put(_MOVES, None)
        with rewindable(not analysis.get(_MOVES)) as rewind:
            try:
                found = self._estimate(programs)
            except NothingToMoveError:
                rewind()
            else:
                analysis.put(_MOVES, True)
                return found
        analysis.put(_MOVES, False)
        return _averaged(self.sampler.sample(programs))

    def _estimate(self, programs: Programs) -> Estimate:
        wanted = torch.is_grad_enabled()
        with outside_inference_mode(programs) as programs:
            if wanted and any(p.requires_grad for p in self.parameters()):
                # SVI optimises what a step touches through Pyro's parameter store. Values that were
                # loaded there are these parts' own, or they would never be trained again.
                pyro.module(self.param_name, self, update_module_params=True)
            gradient = self._gradient if wanted else GradientMode.NONE
            density, slots = self._density(programs, gradient)
            chain = self._run(density, slots)
        with torch.set_grad_enabled(wanted):
            bound = slots.sum(self._average(slots.each(chain.log_weight.detach())))
            surrogate = self._surrogate(density, chain, slots) if wanted else bound
            estimate = weighted_estimate(density.log_weight.first.sample, bound, surrogate)
            if wanted:
                cost = partial(self._cost, density, chain, slots)
                estimate.surrogate = slots.with_scores(estimate.surrogate, cost, programs)
                estimate.finish = partial(self._adapt, chain)
        estimate.runs, estimate.overflow, estimate.causes = density.runs, _OVERFLOW, self._causes
        return estimate

    def _causes(self) -> list[str]:
        """What of the chain itself is not finite."""
        kind, step = type(self).__name__, self.last_step
        own = {f"the parameter '{n}' of {kind}": p.detach() for n, p in self.named_parameters()}
        if step is not None:
            own |= {"the schedule": step.betas, "the kernel's step size": step.step_size}
        return [
            f"{name} is not finite ({value.tolist()}): put an earlier value back, and train with "
            f"a lower learning rate"
            for name, value in own.items()
            if not bool(value.isfinite().all())
        ]

    @property
    def _gradient(self) -> GradientMode:
        """What a training step differentiates."""
        reweighted = self.gradient_estimator == "reweighted"
        return GradientMode.FIRST if reweighted else GradientMode.CHAIN

    def _density(self, programs: Programs, gradient: GradientMode) -> tuple[ChainDensity, OneSlot]:
        """The programs of one step as a function from positions to states, and its slots."""
        if self.kernel.needs_gradient:
            gradient |= GradientMode.COORDINATES

        # Whether gradients that move the chain are differentiated again, in training steps.
        twice = self.kernel.needs_gradient and self.gradient_estimator != "reweighted"
        widths = self._smoothness.widths(programs) if twice else None

        def make(draws: SlotDraws | None) -> tuple[LogWeight, WeightedParticles]:
            given = self.sampler, programs, self.coordinates, gradient
            log_weight = LogWeight(*given, begin=draws, widths=widths)
            return log_weight, log_weight.first.sample

        with torch.set_grad_enabled(bool(gradient)):
            if self.slots is None:
                log_weight, draws = make(None)[0], None
            else:
                log_weight, draws = self.slots.begin(self.sampler, programs, make)
        check_chain(log_weight, type(self).__name__)
        sample = log_weight.first.sample
        again = twice and self._smoothness.look(log_weight, self.kernel)
        return ChainDensity(log_weight, again), SlotAverage.of(sample, draws, self.multi_sample)

    def _surrogate(self, density: ChainDensity, chain: Chain, slots: OneSlot) -> Tensor:
        """Per datum, a tensor with the gradient: ``[*plates]``."""
        if self.gradient_estimator == "reweighted":
            return _reweighted(density, chain, slots)
        chain = slots.chain(chain)
        surrogate = self._average(chain.log_weight)
        if self.kernel.adjusted:
            surrogate = surrogate + accept_score(chain, self.multi_sample)
        return slots.without_entropy(slots.sum(surrogate))

    def _cost(self, density: ChainDensity, chain: Chain, slots: OneSlot) -> Tensor:
        """What the score functions of discrete draws multiply."""
        # The reweighted gradient of the guide is that of the plain ELBO.
        first = self.gradient_estimator == "reweighted"
        log_weight = (density.log_weight.first if first else chain).log_weight.detach()
        return self._average(slots.each(log_weight)) if self.multi_sample else log_weight

    def _run(self, density: ChainDensity, slots: OneSlot) -> Chain:
        betas, movable = self.schedule(), density.log_weight.movable
        with torch.set_grad_enabled(GradientMode.CHAIN in density.gradient):
            start = density.start()
            if start.grad_base is not None:
                # Let the step size see where the chains start.
                learns = self.training and density.gradient.keeps_graph
                seen = of_moving(start.grad_base.detach(), movable)
                self.kernel.step_size.begin(seen, learns)
            # The weight does not depend on AIS's last move, but a refined draw does.
            last = GradientMode.FIRST in density.gradient
            chain = anneal(start, betas, self.kernel, density, movable, last)
        log_weight = self._log_weight(chain)
        if self.kernel.adjusted:
            # Every move by parameters of NaN is rejected, as if nothing were wrong.
            for p in self.kernel.parameters():
                log_weight = log_weight + 0 * p.detach().sum()
        chain = replace(chain, weight=slots.row_weight, log_weight=log_weight)
        step_size = self.kernel.step_size.values().detach().clone()
        self.last_step = ChainRecord.of(chain, step_size, betas.detach(), slots)
        return chain

    def _log_weight(self, chain: Chain) -> Tensor:
        return chain.log_weight

    def _average(self, log_weight: Tensor) -> Tensor:
        return log_mean_exp(log_weight) if self.multi_sample else log_weight.mean(0)

    def _adapt(self, chain: Chain) -> None:
        step_size = self.kernel.step_size
        if not (self.training and chain.infos) or type(step_size).update is StepSize.update:
            return  # nothing to learn, and no rank to be waited for
        acceptance, gradient = chain.mean_acceptance, chain.gradient
        if num_ranks() > 1:
            acceptance, gradient = self._over_ranks(acceptance, gradient)
        step_size.update(acceptance, gradient)

    def _over_ranks(
        self, acceptance: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The mean that the chain took, and the gradients, over the data of all ranks."""
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
        """What moves the chains by default; trained with the bound, where it has the gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no default kernel")

    def _wrong_kernel(self, name: str) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not say which kernels it takes")

    def _refuse_learned_parts(self) -> None:
        learned = [name for name, p in self.named_parameters() if p.requires_grad]
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
    refined = density.log_weight.model_log_prob(chain.state.position)
    plain = slots.without_entropy(slots.mean(density.log_weight.guide_elbo()))
    return plain + (weight * refined).sum(0)


def _not_twice(error: Exception) -> str:
    return (
        f"the model or the guide cannot be differentiated twice, which the gradient of a chain "
        f"needs ({type(error).__name__}: {error}). Use another operator, "
        f"gradient_estimator='reweighted', or a kernel without gradients (RandomWalk)"
    )
