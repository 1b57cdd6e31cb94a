"""The base class of all objectives, one step's value and gradient, and its warnings."""

from __future__ import annotations

import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from pyro.infer.elbo import ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn

from pyro_mcvae.checks.faults import (
    angle_errors,
    check_copied_parameters,
    collects_parameters,
    common_scale,
    density_steps,
    scaled_latents,
    untrained,
)
from pyro_mcvae.checks.masks import (
    check_unweighed,
    has_masks,
    mask_key,
    masked_latents,
    masked_otherwise,
    own_mask,
    with_priors,
)
from pyro_mcvae.ops.checks import FixedOptions, WarnOnce, check_count, check_flag
from pyro_mcvae.ops.compat import call_after_backward, stored_entries
from pyro_mcvae.ops.tensors import (
    costs_nothing_to_read,
    is_recording,
    read,
    total_norm,
    with_gradient_of,
)
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.contract import LossModule, nonfinite_sites, single_run
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import (
    bare,
    casts_with_gradients,
    counted_values,
    is_latent,
    is_random,
    is_scored,
    known_support,
    without_autocast,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Program, Site, is_subsampled, plate_frames
from pyro_mcvae.structure.cache import Analyses, Analysis

# The result of one step: its value, its gradient, and its value per datum.

# A sum of tensors, or a number if there are no summands.
Sum: TypeAlias = Tensor | float


class Bounds(NamedTuple):
    r"""
    An objective's value before it is summed: ``total = shared + (scale * per_datum).sum()``.

    :ivar ~torch.Tensor per_datum: the bound on log p(x_n) of each datum of the minibatch, in nats,
        not scaled by N/B. Its shape is ``[*plates]``, or ``[elements]`` for programs with several
        separate plates.
    :ivar scale: N/B of the subsampled plates: a number, or a tensor like ``per_datum``.
    :ivar ~torch.Tensor shared: the scaled terms that belong to no single datum: log p - log q of
        the global latents, and factors outside the data's plates; a scalar.
    :ivar plates: the names of the plates of ``per_datum``, the leftmost dimension first.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TraceIWAE_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", 6, subsample=torch.tensor([1, 4])):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", 6, subsample=torch.tensor([1, 4])):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> bounds = TraceIWAE_ELBO(2).bounds(model, guide, torch.zeros(2))
        >>> bounds.per_datum, bounds.scale, bounds.plates
        (tensor([-1.2655, -1.2655]), 3.0, ('data',))
    """

    per_datum: Tensor
    scale: float | Tensor
    shared: Tensor
    plates: tuple[str, ...]

    @property
    def total(self) -> Tensor:
        """Return the bound on the log evidence of the full data set, in nats: minus the loss."""
        return self.shared + (self.scale * self.per_datum).sum()


@dataclass(slots=True)
class Estimate:
    """
    The value and gradient of one step.

    :class:`MonteCarloELBO` has an example.

    :ivar value: the bound, a detached scalar.
    :ivar surrogate: a scalar whose gradient is the bound's gradient estimate.
    :ivar runs: the executions of the step, to name a site where the value is not finite.
    :ivar visited: further executions along chains, to name a latent where the gradient overflows.
    :ivar scored: whether the surrogate has the score-function terms of draws without
        reparameterization; otherwise a training step with such draws raises an error.
    :ivar averaged: whether no latent has a weight, so that particles are averaged as in the plain
        ELBO.
    :ivar overflow: the error message if every site is finite and the value is not.
    :ivar causes: returns the causes that are checked before the sites, one line each.
    :ivar remedy: returns the advice in error messages, or an empty string.
    :ivar finish: called after a successful training step, to adapt step sizes.
    :ivar bounds: returns the value per datum; None if the objective has no such value.
    """

    value: Tensor
    surrogate: Tensor
    runs: list[Run]
    _: KW_ONLY
    visited: list[Run] = field(default_factory=list)
    scored: bool = False
    averaged: bool = False
    overflow: str = "every site is finite: their sum overflows"
    causes: Callable[[], list[str]] = list
    remedy: Callable[[], str] = str
    finish: Callable[[], None] | None = None
    bounds: Callable[[], Bounds] | None = None


def add_up(summands: Iterable[Sum]) -> Sum:
    """Sum the values, without an operation for a single value."""
    tensors = [s for s in summands if isinstance(s, Tensor)]
    return sum(tensors[1:], tensors[0]) if tensors else 0.0


def times(value: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply, without an operation for a factor of the number 1."""
    return value if not isinstance(factor, Tensor) and factor == 1 else value * factor


def as_scalar(value: Sum) -> Tensor:
    """Convert a sum to a tensor, even if it is a number."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def finite_loss(estimate: Estimate) -> float:
    """
    Return minus the bound, in nats, if it is finite.

    :raises ValueError: naming the sites where a log density is not finite.
    """
    loss = -estimate.value.item()
    if not math.isfinite(loss):
        raise _nonfinite(estimate, loss)
    return loss


def _nonfinite(estimate: Estimate, loss: float) -> ValueError:
    lines = estimate.causes() or nonfinite_sites(estimate.runs) or [estimate.overflow]
    lines += filter(None, [estimate.remedy()])
    return ValueError(f"the loss is {loss}, because of\n  " + "\n  ".join(lines))


# Checks whether the gradients of a step are finite.

_REMEDY = (
    "their gradients are cleared, so that nothing is trained on them. Compute in double precision "
    "(torch.set_default_dtype(torch.float64)), keep latents and parameters off the ends of their "
    "supports (by larger concentrations, for example), and keep square roots, norms and divisions "
    "off 0, also in the branch of torch.where that is not taken; "
    "torch.autograd.set_detect_anomaly(True) names the operation"
)


class GradientCheck:
    """
    Finds gradients that are not finite after a backward pass.

    :param estimate: the estimate of the step, whose parameters are checked.
    :param loss: the objective, whose parameters are checked, too.
    """

    def __init__(self, estimate: Estimate, loss: object) -> None:
        self._estimate, self._loss = estimate, loss

    def total(self) -> Tensor | None:
        """Return a number that is finite if all gradients are finite; None without gradients."""
        return total_norm(g for p in self._trained() if (g := p.grad) is not None)

    def clear(self) -> None:
        """Set the gradients to None."""
        for param in self._trained():
            param.grad = None

    def raise_if_not_finite(self, loss: float | None = None) -> None:
        """
        Raise an error if a gradient is not finite, and clear all gradients.

        :raises ValueError: naming the parameters, and the latents that are near a boundary.
        """
        bad = [
            name
            for name, p in self._by_name().items()
            if p.grad is not None and not bool(_entries(p.grad).isfinite().all())
        ]
        if not bad:
            return  # their sum overflows
        names = ", ".join(f"'{n}'" for n in bad[:3]) + (" and others" if len(bad) > 3 else "")
        value = "finite" if loss is None else f"{loss:.6g}"
        further = filter(None, (self._estimate.remedy(), *self._near_boundaries()))
        lines = "".join(f"\n  {line}" for line in further)
        self.clear()
        raise ValueError(
            f"the gradient of {names} is not finite, though the loss is {value}: {_REMEDY}{lines}"
        )

    def _trained(self) -> Iterator[Tensor]:
        return iter({id(p): p for p in self._by_name().values()}.values())

    def _by_name(self) -> dict[str, Tensor]:
        """
        Return the parameters of the step by name. They are leaves of the graph, as in an optimizer.
        """
        params: dict[str, Any] = {}
        traces = {
            id(t): t for run in self._estimate.runs for t in (run.guide_trace, run.model_trace)
        }
        for trace in traces.values():
            for name, site in trace.nodes.items():
                if site["type"] == "param" and name not in params:
                    unconstrained = getattr(site["value"], "unconstrained", None)
                    params[name] = site["value"] if unconstrained is None else unconstrained()
        if isinstance(self._loss, nn.Module):
            params.update(self._loss.named_parameters())
        return {n: p for n, p in params.items() if isinstance(p, Tensor) and p.is_leaf}

    def _near_boundaries(self) -> Iterator[str]:
        """Yield a line for each latent of the guide with values at, or almost at, a boundary."""
        traces = {
            id(r.guide_trace): r.guide_trace
            for r in (*self._estimate.visited, self._estimate.runs[-1])
        }
        near: dict[str, list[Tensor]] = {}
        for name, site in ((n, s) for trace in traces.values() for n, s in trace.nodes.items()):
            if is_scored(site) and is_random(site) and not known_support(site["fn"]).is_discrete:
                near.setdefault(name, []).append(_near_boundary(site["value"].detach()))
        for name, parts in near.items():
            values = torch.cat(parts)
            if len(values):
                kind = type(bare(self._estimate.runs[-1].guide_trace.nodes[name]["fn"])).__name__
                what = f"{len(values)} values are almost 0, 1 or infinite, such as {values[0]:.4g}"
                yield f"site '{name}' of the guide ({kind}): {what}"


def _near_boundary(value: Tensor) -> Tensor:
    """Return the entries at which derivatives of elementary functions overflow."""
    info = torch.finfo(value.dtype)
    # Jacobians of powers have squares and cubes of the values.
    small, large = value.abs() < info.tiny**0.5, value.abs() > info.max ** (1 / 3)
    return value[small | ((1 - value).abs() < 2 * info.eps) | large]


def _entries(gradient: Tensor) -> Tensor:
    return stored_entries(gradient) if gradient.is_sparse else gradient


# Warnings and errors about a model and guide.

_logger = logging.getLogger(__name__)

Weighs = Callable[[Site], bool]

# Latents whose prior the model counts although a mask removes it.
_COUNTED = ("counted",)


class _Counted(NamedTuple):
    """
    The latents whose prior the model counts at entries that it masks.

    :ivar masks: the masks for which this was found; see :func:`.mask_key`.
    """

    masks: Hashable
    names: frozenset[str]


_BASELINE = (
    "infer={'baseline': ...} of the guide's site '%s' is for pyro.infer.TraceGraph_ELBO, and has "
    "no effect here: pass baseline= to TraceRaoBlackwell_ELBO, such as IndependentDraw() or "
    "NVIL(network)"
)
_OTHER_MASK = (
    "site '%s' has entries that a mask removes from the model, while the guide's mask counts them: "
    "no prior limits their entropy, and the objective is not a bound on log p(x). Put the same "
    "poutine.mask around the site in model and guide, or remove the guide's mask"
)
_POINTS = (
    "the guide draws no random latent (its site '%s' is a point mass): all particles are equal, "
    "and the objective is log p(x, z) at the point, which is not a bound on log p(x). "
    "TraceSGVB_ELBO has the same value with one particle; for a bound use a guide that draws, such "
    "as AutoNormal"
)
_OBSERVED = (
    "site '%s' of the guide is observed: as in Pyro, its log density is added to the loss, so that "
    "training decreases it. It is not part of weights or evidence. To train a network that "
    "predicts it, subtract its log_prob from differentiable_loss instead"
)
_TEMPERED = (
    "poutine.scale multiplies all sites in plates by %g, inside the weights, so that the objective "
    "is %s bound on %g log p(x). Multiply the loss instead; for a minibatch use pyro.plate(name, "
    "size, subsample_size=...), whose N/B is outside the weights"
)
_AVERAGED = (
    "no latent has a weight per datum, because %s: the particles are averaged as in the plain "
    "ELBO, which is also a bound. For weights pass the full data, or put the latents into the "
    "data's plate"
)
_SCALED = (
    "poutine.scale multiplies the log density of latent '%s' by %g in the model and %g in the "
    "guide, inside the weights. The loss is not a bound on the log evidence, but on the logarithm "
    "of the integral of p(x | z) p(z)^%g q(z)^(1 - %g), which %s. It is a bound on the evidence "
    "when the scales are 1, as at the end of annealing. TraceSGVB_ELBO has the objective of a "
    "beta-VAE; scaling the observations by 1 / beta instead gives a bound for every beta"
)


_UNTRAINED = (
    "SVI trains no parameter of the %s that the loss depends on (%s), because none is in Pyro's "
    "store: register it by pyro.module(name, module) in the model or guide, or train "
    "elbo(model, guide) by an optimizer of PyTorch. If it is fixed on purpose, call its "
    "requires_grad_(False)"
)
_ANOTHER = (
    "one loss object trains two models or guides, which then share its step sizes, schedule and "
    "baselines: create a separate loss for each"
)


class ModelWarnings:
    """Logs each warning about models and guides once per objective."""

    def __init__(self, analyses: Analyses, learns: bool) -> None:
        self._analyses, self._learns = analyses, learns
        self._warn = WarnOnce(_logger)
        self._scaled: set[tuple[str, bool]] = set()

    def check(self, programs: Programs, runs: list[Run], weighs: Weighs) -> None:
        """
        Warn about masks and scales that probably have no intended effect, or raise an error.

        Masks and scales may change, so each analysis of the model and guide checks them again.

        :param runs: the runs of the step.
        :param weighs: returns whether a site of the guide is part of a weight, and the objective is
            not a mean of log weights.
        """
        collected, analysis = collects_parameters(), self._analyses.of(programs)
        if runs and has_masks(runs[0], in_guide=True):
            self._check_masks(programs, runs[0], analysis, weighs)
        if is_recording():
            return  # the uncompiled steps before the recording were checked
        check = partial(self._check, programs, runs[:1], collected, weighs)
        analysis.cached(("warnings", collected), check)

    @staticmethod
    def _check_masks(programs: Programs, run: Run, analysis: Analysis, weighs: Weighs) -> None:
        """Check masks that were not checked before; a recording assumes what its masks have."""

        def concerns(_: Site, site: Site) -> bool:
            return weighs(site) and counted_values(site) is not None

        masks = mask_key(programs, run, analysis, concerns)
        if masks is not None and not is_recording():
            key = "unweighed", masks
            analysis.cached(key, lambda: check_unweighed(programs, run, weighs))

    def _check(self, programs: Programs, runs: list[Run], collected: bool, weighs: Weighs) -> None:
        runs = runs or [single_run(programs)]
        if self._learns and self._analyses.num_pairs > 1 and torch.is_grad_enabled():
            self._warn(_ANOTHER)
        for run in runs if collected else ():
            check_copied_parameters(programs, run)
            if torch.is_grad_enabled() and (found := untrained(programs, run)) is not None:
                self._warn(_UNTRAINED % found)
        for run in runs:
            if not any(t.in_guide and weighs(t.site) for t in run.terms):
                continue
            drawn = [t for t in run.terms if t.in_guide and is_latent(t.site)]
            if drawn and not any(is_random(t.site) for t in drawn):
                self._warn(_POINTS % drawn[0].key.name)
            scale = common_scale(run.terms)
            if scale is not None:
                self._warn(_TEMPERED % (scale, "not a" if scale > 1 else "a loose", scale))
            else:
                self._warn_scales(run)
        for why in (why for run in runs for why in angle_errors(run)):
            self._warn(why)
        if torch.is_grad_enabled():
            for why in (why for run in runs for why in density_steps(programs, run)):
                self._warn(why)
        for name in (n for run in runs for n in masked_otherwise(run)):
            self._warn(_OTHER_MASK % name)
        for term in (t for run in runs for t in run.terms if t.in_guide):
            if term.site["infer"].get("baseline"):
                self._warn(_BASELINE % term.key.name)
        for term in (t for run in runs for t in run.guide_data):
            self._warn(_OBSERVED % term.key.name)

    def warn_averaged(self, programs: Programs, run: Run, weighs: Weighs) -> None:
        """Warn once per model and guide that no latent has a weight, and name the cause."""
        drawn = {t.key.name: t for t in run.terms if t.in_guide and is_random(t.site)}
        if is_recording() or not any(weighs(t.site) for t in drawn.values()):
            return
        self._analyses.of(programs).cached(
            ("averaged",), lambda: self._warn(_AVERAGED % _why_averaged(run, drawn))
        )

    def _warn_scales(self, run: Run) -> None:
        """Warn once about each latent that is scaled inside the weights, and again above 1."""
        plated = any(plate_frames(t.site) for t in run.terms if t.in_guide)
        local = [t for t in run.terms if plate_frames(t.site) or not plated]
        for name, scales in scaled_latents(local).items():
            key = name, any(s > 1 for s in scales)
            if key not in self._scaled:
                self._scaled.add(key)
                what = "exists for few models only" if key[1] else "is that of another prior"
                _logger.warning(_SCALED, name, *scales, *scales, what)


def _why_averaged(run: Run, drawn: Mapping[str, Term]) -> str:
    plates = {f: None for t in run.terms for f in plate_frames(t.site) if is_subsampled(f)}
    for plate in plates:
        what = f"the subsampled plate '{plate.name}' ({plate.size} of {plate.full_size})"
        outside = [n for n, t in drawn.items() if plate not in plate_frames(t.site)]
        if outside:
            return f"data of {what} depend on the guide's {', '.join(map(repr, outside))} outside"
    return "elements of a subsampled plate depend on each other's latents"


def refuse_scores(objective: str, runs: list[Run]) -> None:
    """
    Raise an error for draws without reparameterization.

    Without their score-function terms the gradient would be wrong.

    :raises ValueError: naming such a draw.
    """
    for term in (t for run in runs for t in run.terms if isinstance(t.score, Tensor)):
        raise ValueError(
            f"the guide's draws of site '{term.key.name}' are not reparameterized "
            f"({type(term.site['fn']).__name__}), and the estimate of {objective} "
            f"does not say that its gradient has their score function: make it by local_estimate "
            f"or elbo_estimate, or add the terms and pass Estimate(..., scored=True)"
        )


# Pyro's interface around one estimate of a bound, for all objectives.


class ELBOOptions(TypedDict, total=False):
    """The arguments of Pyro's losses, which objectives pass to :class:`MonteCarloELBO`."""

    max_plate_nesting: float
    vectorize_particles: bool | None
    strict_enumeration_warning: bool
    retain_graph: bool | None
    ignore_jit_warnings: bool
    jit_options: dict[str, object] | None


class MonteCarloELBO(FixedOptions, ELBO):
    """
    Base class of the objectives of this package.

    A subclass implements :meth:`estimate`, which returns the value, surrogate and value per datum
    of one step. This class derives Pyro's interface from it. :meth:`loss`,
    :meth:`differentiable_loss`, :meth:`loss_and_grads` and :meth:`bounds` agree under the same
    random seed.

    :param int num_particles: the number of draws.
    :param max_plate_nesting: the number of batch dims of plates. By default one extra run at the
        first step determines it. Assigning it later, as Pyro's ``Forecaster`` does, has no effect.
    :param vectorize_particles: None runs all particles in one batch if that gives the densities of
        a loop: in the outermost batch dim, or under ``vmap``. Otherwise it loops and logs the
        reason. True raises an error instead of looping; False always loops.
    :param bool strict_enumeration_warning: raise an error for guide sites that are marked for
        enumeration; False samples them. If such a site is in the model but not in the guide, it is
        summed exactly: log p(x, z) = log sum_y p(x, y, z).
    :param bool retain_graph: passed to ``backward``.
    :param bool ignore_jit_warnings: has no effect; accepted for compatibility with Pyro's losses.
    :param dict jit_options: has no effect; accepted for compatibility with Pyro's losses.
    :ivar sampler: the :class:`~pyro_mcvae.particles.sampler.ParticleSampler`, from which subclasses
        get the weights of a step.
    :raises ValueError: if ``num_particles`` is not an int of at least 1.

    Example: a custom objective, the largest log weight of K particles. It takes the weights of a
    step from ``self.sampler``. The package handles plates, scales, subsampling, global and discrete
    latents, and Pyro's interfaces::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import MonteCarloELBO, local_estimate
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
        >>> round(-elbo.loss(model, guide, x), 3), round(exact.item(), 3)  # the guide is exact
        (-3.797, -3.797)
    """

    # Pyro's Forecaster guesses and assigns max_plate_nesting. Here each analysis infers it.
    _assignable = frozenset({"num_particles", "retain_graph", "max_plate_nesting"})

    def __new__(cls, *args: object, **kwargs: object) -> MonteCarloELBO:
        if len(args) > 1 and callable(args[0]) and callable(args[1]):
            # SVI accepts any function as a loss, and calls it with the model and the guide.
            raise ValueError(
                f"{cls.__name__} was called with a model and a guide, as SVI(..., "
                f"loss={cls.__name__}) does with a class: pass an object, loss={cls.__name__}()"
            )
        return super().__new__(cls)

    @classmethod
    def _check_options(cls, options: Mapping[str, object], own: Collection[str] = ()) -> None:
        """
        Check the arguments that an objective passes to this class.

        :param own: arguments of the objective that are not in its signature.
        :raises TypeError: for arguments of other objectives, because they would have no effect.
        """
        theirs = ELBOOptions.__annotations__.keys()
        for name in sorted(options.keys() - theirs):
            known = sorted({*inspect.signature(cls).parameters, *own} - {"options", *theirs})
            raise TypeError(
                f"{cls.__name__} does not accept the argument {name}={options[name]!r}: it takes "
                f"{', '.join(known)}, and Pyro's {', '.join(theirs)}"
            )

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
        self._warnings = ModelWarnings(self.sampler.analyses, isinstance(self, nn.Module))

    def __call__(self, model: nn.Module, guide: nn.Module) -> LossModule:
        """Return a module whose call on data returns the loss, for ``torch.optim``."""
        return LossModule(model, guide, self)

    def _is_initialized(self) -> bool:
        return "_warnings" in vars(self)  # Pyro's base class assigns some attributes twice

    def __getstate__(self) -> dict[str, object]:
        # As in a PyroModule: the store adds weak references to parameters that SVI has trained.
        for parameter in self.parameters() if isinstance(self, nn.Module) else ():
            vars(parameter).pop("unconstrained", None)
        return self.__dict__.copy()

    @property
    def num_particles(self) -> int:
        """Return the number of draws. A new value applies from the next step."""
        return self.sampler.num_particles

    @num_particles.setter
    def num_particles(self, num_particles: int) -> None:
        self._use_particles(check_count("num_particles", num_particles))

    def _use_particles(self, num_particles: int) -> None:
        """Set the number of draws. Subclasses raise an error for numbers they do not support."""
        self.sampler.num_particles = num_particles

    def _weighs(self, site: Site) -> bool:
        """
        Return whether a guide site is part of a weight, and the objective is not a mean of log
        weights. Then scales do not multiply the bound, and every draw needs its density.
        """
        return True

    @abstractmethod
    def estimate(self, programs: Programs) -> Estimate:
        """
        Return the value and surrogate of one step. If gradients are off, the surrogate needs no
        graph.
        """

    def _counted(self, programs: Programs) -> tuple[Programs, Estimate]:
        """
        Return the estimate and its programs.

        A mask may remove entries of a latent from the model but not from the guide, as in padded
        series with an AutoGuide. The model then counts their prior. This does not change the
        evidence, and without it nothing would limit the guide's entropy.
        """
        analysis = self.sampler.analyses.of(programs)
        used: _Counted | None = analysis.get(_COUNTED)
        if used is not None and used.masks is None:
            estimate = self._estimate_of(programs)
            if not (estimate.runs and has_masks(estimate.runs[0], in_guide=False)):
                return programs, estimate
        # A fresh analysis begins with the priors of the last one.
        return self._counted_by_masks(programs, used or analysis.before(_COUNTED), analysis)

    def _counted_by_masks(
        self, programs: Programs, used: _Counted | None, analysis: Analysis
    ) -> tuple[Programs, Estimate]:
        """Return the estimate of a step with masks, which may change from step to step."""
        with self.sampler.analyses.rewindable(programs, True) as rewind:
            counted, estimate, found = self._estimate_counted(programs, used, analysis)
            if found.names != (used.names if used else frozenset()):
                rewind()  # other priors were counted than the masks require
                counted, estimate, _ = self._estimate_counted(programs, found, analysis)
            return counted, estimate

    def _estimate_counted(
        self, programs: Programs, used: _Counted | None, analysis: Analysis
    ) -> tuple[Programs, Estimate, _Counted]:
        """Return the estimate with some priors counted, and the priors that its masks require."""
        counted = programs
        if used is not None and used.names:
            make = partial(with_priors, programs.model, dict.fromkeys(used.names))
            # The same model again, whose analyses are kept.
            model = self.sampler.analyses.derived(programs, used.names, make)
            counted = replace(programs, model=model)
        estimate = self._estimate_of(counted)
        if used is not None and (is_recording() or not estimate.runs):
            return counted, estimate, used
        run = estimate.runs[0] if estimate.runs else single_run(programs)
        found = self._find_counted(programs, run, analysis)
        analysis.put(_COUNTED, found)
        return counted, estimate, found

    def _estimate_of(self, programs: Programs) -> Estimate:
        estimate: object = self.estimate(programs)
        if not isinstance(estimate, Estimate):
            raise TypeError(
                f"{type(self).__name__}.estimate must return an Estimate, as from "
                f"local_estimate(sample, bound, surrogate), got {type(estimate).__name__}"
            )
        return estimate

    def _find_counted(self, programs: Programs, run: Run, analysis: Analysis) -> _Counted:
        """Return the latents whose prior the model counts, for the masks of a run."""
        masks = mask_key(programs, run, analysis, lambda site, _: own_mask(site) is not None)
        key = "counted", masks
        unread = analysis.cached(key, lambda: masked_latents(programs, run).unread)
        names = frozenset(n for n, guide_mask in unread.items() if guide_mask is None)
        return _Counted(masks, names)

    def _step(self, programs: Programs) -> Estimate:
        with casts_with_gradients():
            programs, estimate = self._counted(programs)
        if torch.is_grad_enabled() and not estimate.scored:
            refuse_scores(type(self).__name__, estimate.runs)
        self._warnings.check(programs, estimate.runs, self._weighs)
        if estimate.averaged:
            self._warnings.warn_averaged(programs, estimate.runs[0], self._weighs)
        return estimate

    def _get_trace(
        self, model: Program, guide: Program, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Trace, Trace]:
        raise NotImplementedError("objectives of this package run model and guide together")

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """
        Return minus the bound, estimated without gradients.

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
        Return minus the bound, as a scalar tensor whose ``backward`` adds the gradient estimate.

        If Pyro's validation is enabled, the value and, after ``backward``, the gradient are checked
        for finiteness. Without validation the host reads no value from the device.

        :raises ValueError: as :meth:`loss`; in ``backward`` as :meth:`loss_and_grads`.
        """
        estimate = self._step(Programs(model, guide, args, kwargs))
        checked = is_validation_enabled()
        if checked:
            finite_loss(estimate)
        if estimate.finish is not None:
            estimate.finish()
        loss = with_gradient_of(estimate.value, estimate.surrogate)
        if checked and loss.requires_grad and not is_recording():
            check = GradientCheck(estimate, self)
            loss.register_hook(lambda _: call_after_backward(check.raise_if_not_finite))
        return loss

    def loss_and_grads(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> float:
        """
        Return minus the bound, and add the gradient estimate to the parameters' gradients.

        :returns: the loss in nats, as :meth:`loss`.
        :raises ValueError: naming the sites where a log density is not finite. In this case no
            gradient has been accumulated. If only the gradient is not finite, the error names the
            parameters. The gradients of the step's parameters are then None, so that no optimizer
            uses them.
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
        """Accumulate the gradient. Read the loss and the check from the device together."""
        check, free = GradientCheck(estimate, self), costs_nothing_to_read(estimate.value)
        loss = finite_loss(estimate) if free else math.nan
        self._backward(estimate.surrogate)
        gradients = check.total()
        if gradients is None:
            return finite_loss(estimate)
        total = gradients.item() if free else math.nan
        if not free:
            loss, total = read(-estimate.value, gradients)
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
        Return the bound per datum, without gradients.

        :returns: :class:`.Bounds`; ``bounds.per_datum`` has the shape of the data's plates, and
            ``bounds.total`` is minus the loss.
        :raises NotImplementedError: for a custom objective without a value per datum.

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
            >>> print(f"{bounds.total:.3f} {bounds.per_datum.sum():.3f}")
            -4.260 -4.260
        """
        with torch.no_grad():
            programs = Programs(model, guide, args, kwargs)
            programs, estimate = self._counted(programs)
            make_bounds = estimate.bounds
            if make_bounds is None:
                raise NotImplementedError(
                    f"{type(self).__name__} has no bounds per datum: pass Estimate(..., bounds=), "
                    f"or make the estimate by local_estimate"
                )
            bounds = make_bounds()
            self._warnings.check(programs, estimate.runs, self._weighs)
        return bounds
