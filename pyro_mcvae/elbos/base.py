"""What every objective shares: Pyro's interface around one estimate of a bound."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TypedDict

import torch
from pyro.infer.elbo import ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn

from pyro_mcvae.coordinates.chain_density import costs_nothing_to_read
from pyro_mcvae.elbos.estimate import Bounds, Estimate, finite_loss
from pyro_mcvae.elbos.gradient_check import GradientCheck
from pyro_mcvae.elbos.notices import Notices, refuse_scores
from pyro_mcvae.ops.autograd import after_backward, with_gradient_of
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.ops.options import FixedOptions
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.precision import casts_with_gradients, without_autocast
from pyro_mcvae.programs.types import Program, Site


class ELBOOptions(TypedDict, total=False):
    """Pyro's own arguments, which every objective passes on to :class:`MonteCarloELBO`."""

    max_plate_nesting: float
    vectorize_particles: bool | None
    strict_enumeration_warning: bool
    retain_graph: bool | None
    ignore_jit_warnings: bool
    jit_options: dict[str, object] | None


def check_options(kind: type[MonteCarloELBO], options: Mapping[str, object]) -> None:
    """
    Check what an objective passes on to :class:`MonteCarloELBO`.

    :raises TypeError: for arguments of other objectives, which it would leave without effect.
    """
    for name in sorted(options.keys() - ELBOOptions.__annotations__.keys()):
        known = sorted(inspect.signature(kind).parameters.keys() - {"options"})
        raise TypeError(
            f"{kind.__name__} has no use for the argument {name}={options[name]!r}: it takes "
            f"{', '.join(known)}, and Pyro's {', '.join(ELBOOptions.__annotations__)}"
        )


class MonteCarloELBO(FixedOptions, ELBO):
    """
    Base class of the objectives of this package.

    A subclass implements :meth:`estimate`: value, surrogate and value per datum of one step. This
    class makes Pyro's interface of it: :meth:`loss`, :meth:`differentiable_loss`,
    :meth:`loss_and_grads` and :meth:`bounds` agree under one random seed.

    :param int num_particles: the number of draws.
    :param max_plate_nesting: how many batch dims the programs' plates occupy; found out by one
        extra run at the first step if it is left out and particles are vectorised.
    :param vectorize_particles: None runs all particles at once where that has a loop's numbers:
        in the outermost batch dim, or under ``vmap``; elsewhere in a loop, and a log line says
        why. True refuses programs that have to be looped over; False loops.
    :param bool strict_enumeration_warning: refuse guide sites that are marked for enumeration;
        False samples them. Sites of the model that are marked ``infer={"enumerate": "parallel"}``,
        and that the guide does not draw, are summed exactly: log p(x, z) = log sum_y p(x, y, z).
    :param bool retain_graph: passed on to ``backward``.
    :param bool ignore_jit_warnings: accepted as by Pyro's losses, and without an effect.
    :param dict jit_options: likewise; nothing is compiled by ``torch.jit``.
    :ivar sampler: for subclasses: the :class:`~pyro_mcvae.particles.sampler.ParticleSampler` of the
        weights of a step.
    :raises ValueError: if ``num_particles`` is not an int of at least 1.

    Example, an objective of one's own: the bound of the best of K particles, which takes
    ``self.sampler`` for the weights of a step and leaves plates, scales, subsampling, global
    and discrete latents, and both of Pyro's interfaces to the package::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> class TraceVRMax_ELBO(MonteCarloELBO):
        ...     def estimate(self, programs):
        ...         sample = self.sampler.sample(programs)
        ...         best = sample.log_weight.max(0).values
        ...         return local_estimate(sample, best.detach(), best)
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> elbo = TraceVRMax_ELBO(num_particles=5)
        >>> x = torch.zeros(3)
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x).sum()
        >>> bool(abs(elbo.loss(model, guide, x) + exact) < 1e-4)
        True
    """

    _assignable = frozenset({"num_particles", "retain_graph"})

    def __new__(cls, *args: object, **kwargs: object) -> MonteCarloELBO:
        if len(args) > 1 and callable(args[0]) and callable(args[1]):
            # SVI takes any function for a loss, and calls it with the model and the guide.
            raise ValueError(
                f"{cls.__name__} was called with a model and a guide, as SVI(..., "
                f"loss={cls.__name__}) does with a class: pass an object, loss={cls.__name__}()"
            )
        return super().__new__(cls)

    def __init__(
        self,
        num_particles: int = 1,
        max_plate_nesting: float = math.inf,
        vectorize_particles: bool | None = None,
        strict_enumeration_warning: bool = True,
        retain_graph: bool | None = None,
        ignore_jit_warnings: bool = False,
        jit_options: dict[str, object] | None = None,
    ) -> None:
        check_flag("vectorize_particles", vectorize_particles, or_none=True)
        check_flag("strict_enumeration_warning", strict_enumeration_warning)
        check_flag("retain_graph", retain_graph, or_none=True)
        self.sampler = ParticleSampler(
            check_count("num_particles", num_particles),
            vectorize_particles,
            max_plate_nesting,
            strict_enumeration=strict_enumeration_warning,
        )
        super().__init__(
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            strict_enumeration_warning=strict_enumeration_warning,
            retain_graph=retain_graph,
            ignore_jit_warnings=ignore_jit_warnings,
            jit_options=jit_options,
        )
        self._notices = Notices(self.sampler.analyses)

    def _is_made(self) -> bool:
        return "_notices" in vars(self)  # Pyro's base class assigns some of them twice

    def __getstate__(self) -> dict[str, object]:
        # As of a PyroModule: the store hangs weak references on parameters that SVI has trained.
        for parameter in self.parameters() if isinstance(self, nn.Module) else ():
            vars(parameter).pop("unconstrained", None)
        return self.__dict__.copy()

    @property
    def num_particles(self) -> int:
        """The number of draws, of the next step if it is assigned."""
        return self.sampler.num_particles

    @num_particles.setter
    def num_particles(self, num_particles: int) -> None:
        self._use_particles(check_count("num_particles", num_particles))

    def _use_particles(self, num_particles: int) -> None:
        """Draw that many from now on; a subclass refuses what its estimator cannot do with."""
        self.sampler.num_particles = num_particles

    def _weighs(self, site: Site) -> bool:
        """
        Whether a site of the guide is part of a weight, and the objective more than a mean of their
        logarithms: then scales do not multiply it, and every draw needs its density.
        """
        return True

    @abstractmethod
    def estimate(self, programs: Programs) -> Estimate:
        """One step's value and surrogate; the surrogate needs no graph where gradients are off."""

    def bounds_of(self, programs: Programs) -> Bounds:
        """
        One step's value per datum: by default that of :meth:`estimate`, without gradients.

        :raises NotImplementedError: if the estimate has no value per datum.
        """
        found = self.estimate(programs).bounds
        if found is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no bounds per datum: pass Estimate(..., bounds=), or "
                f"make the estimate by local_estimate"
            )
        return found()

    def _step(self, programs: Programs) -> Estimate:
        with casts_with_gradients():
            estimate = self.estimate(programs)
        if torch.is_grad_enabled() and not estimate.scored:
            refuse_scores(type(self).__name__, estimate.runs)
        self._notices.look(programs, estimate.runs, self._weighs)
        if estimate.averaged:
            self._notices.tell_averaged(programs, estimate.runs[0], self._weighs)
        return estimate

    def _get_trace(
        self,
        model: Program,
        guide: Program,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[Trace, Trace]:
        raise NotImplementedError("objectives of this package run model and guide together")

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """
        Minus the bound, estimated without gradients.

        :returns: the loss in nats, over the full data set where plates are subsampled.
        :raises ValueError: naming the sites where a log density is not finite.
        """
        with torch.no_grad():
            estimate = self._step(Programs(model, guide, args, kwargs))
        return finite_loss(estimate)

    def differentiable_loss(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> Tensor:
        """
        Minus the bound, as a scalar tensor whose ``backward`` yields the gradient estimate.

        Checks that the value, and after ``backward`` the gradient, are finite only while Pyro's
        validation is enabled, so that without validation no value leaves the device.

        :raises ValueError: as :meth:`loss`; in ``backward`` as :meth:`loss_and_grads`.
        """
        estimate = self._step(Programs(model, guide, args, kwargs))
        checked = is_validation_enabled()
        if checked:
            finite_loss(estimate)
        if estimate.finish is not None:
            estimate.finish()
        loss = with_gradient_of(-estimate.value, estimate.surrogate)
        if checked and loss.requires_grad and not is_recording():
            check = GradientCheck(estimate.runs, self)
            loss.register_hook(lambda _: after_backward(check.raise_if_not_finite))
        return loss

    def loss_and_grads(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> float:
        """
        Minus the bound; accumulates the gradient estimate in the parameters.

        :returns: the loss in nats, as :meth:`loss`.
        :raises ValueError: naming the sites where a log density is not finite; no gradient has
            been accumulated then. And naming the parameters whose gradient is not finite though the
            loss is; the gradients of the step's parameters are None then, so that no optimizer can
            train on them.
        """
        estimate = self._step(Programs(model, guide, args, kwargs))
        if not estimate.surrogate.requires_grad or is_recording():
            loss = finite_loss(estimate)
            if estimate.surrogate.requires_grad:
                self._backward(estimate.surrogate)
        else:
            loss = self._checked_backward(estimate)
        if estimate.finish is not None:
            estimate.finish()
        return loss

    def _checked_backward(self, estimate: Estimate) -> float:
        """Accumulate the gradient; the loss and whether it is finite leave a device at once."""
        check, free = GradientCheck(estimate.runs, self), costs_nothing_to_read(estimate.value)
        loss = finite_loss(estimate) if free else math.nan
        self._backward(estimate.surrogate)
        gradients = check.total()
        if gradients is None:
            return finite_loss(estimate)
        if free:
            total = float(gradients.double().numpy())  # at no cost: it is on the CPU
        else:
            loss, total = torch.stack([-estimate.value.double(), gradients.double()]).tolist()
            if not math.isfinite(loss):
                check.clear()
                return finite_loss(estimate)
        if not math.isfinite(total):
            check.raise_if_not_finite(loss)
        return loss

    def _backward(self, surrogate: Tensor) -> None:
        """Accumulate the gradient of the loss, minus that of the surrogate."""
        with without_autocast():
            minus = surrogate.new_full(surrogate.shape, -1.0)
            surrogate.backward(minus, retain_graph=self.retain_graph)

    def bounds(self, model: Program, guide: Program, *args: object, **kwargs: object) -> Bounds:
        """
        The bound per datum, without gradients.

        :returns: :class:`Bounds`; ``bounds.per_datum`` has the shape of the data's plates, and
            ``bounds.total`` is minus the loss.

        Example::

            >>> import pyro, torch
            >>> import pyro.distributions as dist
            >>> from pyro_mcvae import TraceSGVB_ELBO
            >>> def model(x):
            ...     with pyro.plate("data", len(x)):
            ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
            ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            >>> def guide(x):
            ...     with pyro.plate("data", len(x)):
            ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
            >>> bounds = TraceSGVB_ELBO().bounds(model, guide, torch.zeros(3))
            >>> bounds.per_datum.shape
            torch.Size([3])
            >>> torch.allclose(bounds.total, bounds.per_datum.sum())
            True
        """
        with torch.no_grad():
            programs = Programs(model, guide, args, kwargs)
            bounds = self.bounds_of(programs)
            self._notices.look(programs, [], self._weighs)
        return bounds
