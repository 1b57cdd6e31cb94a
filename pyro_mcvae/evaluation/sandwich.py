"""Bound the log evidence from both sides, on data simulated from the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import anneal_back
from pyro_mcvae.checks.masks import is_transported
from pyro_mcvae.evaluation.clock import OutOfTimeError
from pyro_mcvae.evaluation.labellings import guide_values
from pyro_mcvae.evaluation.options import (
    DEFAULT_STEPS,
    Annealing,
    EvaluatorOptions,
    as_arguments,
    check_function,
    make_options,
    make_programs,
    with_options,
)
from pyro_mcvae.evaluation.weights import ImportanceSampler, weights_of
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.weights import log_mean_exp
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.run import Programs, Run, is_messenger
from pyro_mcvae.programs.sites import inner_scale, is_factor, is_flat, is_latent, is_scored
from pyro_mcvae.programs.substitute import substitute
from pyro_mcvae.programs.terms import model_term
from pyro_mcvae.programs.types import NoCoordinateError, Program, Site
from pyro_mcvae.training.wake_sleep import dream

# Data simulated from a model, with the latents that generated them.

ToArgs = Callable[[dict[str, Tensor]], object]


def simulate(
    programs: Programs,
    reference: WeightedParticles,
    fixed_sites: frozenset[str],
    to_args: ToArgs | None,
) -> tuple[Programs, dict[str, Tensor], Trace]:
    """
    Draw latents from the prior, then observations.

    :param reference: an execution on the user's data, for its minibatch and its fixed latents.
    :param fixed_sites: latents that keep the values of the reference.
    :param to_args: maps the observations, by site, to the arguments of model and guide. None
        replaces observed tensors in the arguments.
    :returns: model and guide on the simulated data; the latents that generated these; and the
        execution of the model that drew both. The latents are an exact posterior draw.
    :raises ValueError: for models from which no data can be drawn, naming the site; and if the
        observed data are not found in the arguments.
    """
    nodes = reference.runs[0].model_trace.nodes
    for name, site in nodes.items():
        if is_scored(site):
            _check_generative(name, site)
    for name in (n for n, s in nodes.items() if is_latent(s) and is_flat(s["fn"])):
        raise ValueError(
            f"site '{name}' of the model has .mask(False), so that the model has no prior from "
            f"which data could be drawn: remove the mask"
        )
    values = {n: nodes[n]["value"] for n in fixed_sites if n in nodes}
    simulation = dream(programs, reference.subsamples, values)
    drawn = {n: s["value"] for n, s in simulation.nodes.items() if is_scored(s)}
    data = {n: drawn[n] for n, s in nodes.items() if is_scored(s) and s["is_observed"]}
    latents = {n: v for n, v in drawn.items() if n not in data}
    if to_args is not None:
        args, kwargs = as_arguments(to_args(data))
        simulated = replace(programs, args=args, kwargs=kwargs)
    else:
        remedy = (
            f"pass to_args=..., which maps a dict of the simulated observations {sorted(data)} to "
            f"the arguments (to_args=lambda data: args, if guide and model do not read the data "
            f"from them)"
        )
        simulated = substitute(programs, nodes, data, reference.subsamples, remedy)
    simulated = replace(simulated, model=poutine.condition(simulated.model, data=data))
    return simulated, latents, simulation


def check_density(simulated: Trace, run: Run) -> None:
    """
    Check that the model has the same densities on the simulated data as when it drew them.

    :param simulated: the model's execution that drew them.
    :param run: an execution at the simulated latents.
    :raises ValueError: naming a site whose density differs.
    """
    for term in run.terms:
        site = simulated.nodes.get(term.key.name)
        if term.in_guide or site is None:
            continue
        expected = model_term(site).log_prob.sum()
        leads = run.leading is not None and term.log_prob.dim() > run.nesting
        density = term.log_prob.sum() / (len(term.log_prob) if leads else 1)
        if not torch.allclose(density, expected.to(density), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"the density of site '{term.key.name}' of the model is {float(density):.4g} on "
                f"the simulated data, but was {float(expected):.4g} when they were drawn: the "
                f"model uses its data outside obs=, or its arguments were not replaced. Pass "
                f"to_args=..., which maps the simulated observations to all arguments"
            )


def _check_generative(name: str, site: Site) -> None:
    if is_factor(site["fn"]):
        raise ValueError(
            f"site '{name}' of the model is a pyro.factor, from which no data can be drawn: write "
            f"it as a distribution with obs="
        )
    if is_transported(site):
        raise ValueError(
            f"site '{name}' of the model is a point mass with another density, as from "
            f"NeuTraReparam, from which no data can be drawn: pass the original model, with a "
            f"guide of its latents"
        )
    scale = inner_scale(site)
    if bool(torch.as_tensor(scale != 1.0).any()):
        raise ValueError(
            f"site '{name}' of the model is scaled by poutine.scale, so that the model is not a "
            f"distribution from which data can be drawn: remove the scale"
        )


# Bidirectional Monte Carlo: the accuracy of annealed chains on simulated data.


@dataclass(frozen=True)
class Sandwich:
    r"""
    Bounds on :math:`\log p(x)` from both sides, each in expectation, for simulated data.

    :func:`.sandwich` returns it, and has an example.

    :ivar lower: the bound by chains from the guide's draws, shape ``[num_simulations, *plates]``.
    :ivar upper: the bound by chains from the exact posterior draws that generated the data.
    :ivar num_particles: the number of chains per datum in each direction.
    :ivar plates: the names of the plates.
    :ivar fixed_latents: latents with fixed values; see :class:`.LogEvidence`.
    :ivar step_size: the step size of the kernel.
    """

    lower: Tensor
    upper: Tensor
    num_particles: int
    plates: tuple[str, ...]
    fixed_latents: tuple[str, ...]
    step_size: Tensor

    @property
    def gap(self) -> Tensor:
        """Return upper minus lower, in nats; in expectation at least the sum of both errors."""
        return self.upper - self.lower

    @property
    def mean_gap(self) -> Tensor:
        """Return the mean gap over data and simulations."""
        return self.gap.mean()

    @property
    def standard_error(self) -> Tensor:
        """
        Return the standard error of ``mean_gap`` over the simulated data; NaN for a single one.
        """
        if self.gap.numel() < 2:
            return self.gap.new_tensor(math.nan)
        return self.gap.std() / math.sqrt(self.gap.numel())

    def __str__(self) -> str:
        condition = f", given {', '.join(self.fixed_latents)}" if self.fixed_latents else ""
        return (
            f"log evidence of simulated data between {float(self.lower.mean()):.3f} and "
            f"{float(self.upper.mean()):.3f} nats per weight; gap {float(self.mean_gap):.3f} ± "
            f"{float(self.standard_error):.3f} ({self.gap.numel()} simulated, "
            f"{self.num_particles} chains each way{condition})"
        )


@with_options(num_particles=10)
def sandwich(
    model: Program,
    guide: Program,
    *args: object,
    num_simulations: int = 1,
    to_args: ToArgs | None = None,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> Sandwich:
    r"""
    Bound the log evidence of data simulated from the model from both sides [1].

    Latents :math:`z^*` are drawn from the prior and data from :math:`p(x \mid z^*)`, so that
    :math:`z^*` is an exact draw from the posterior. Annealed importance sampling from the guide
    gives a lower bound, and the same chain in reverse from :math:`z^*` gives an upper bound:

    .. math::
        E \log \frac{1}{P} \sum_i \exp W_i \le \log p(x) \le
        -E \log \frac{1}{P} \sum_i \exp(-W_i') .

    If the gap is small, :func:`log_evidence` with this schedule and kernel is accurate on data that
    are similar to simulated data. This requires an amortized guide, which is a function of the
    data. A guide that was trained on fixed data, such as an AutoGuide, does not fit simulated data.
    The bounds are then valid, but the gap does not apply to your data. Use :func:`.report` instead.

    Global latents that the guide draws are simulated, too. Point masses of the guide do not change.

    Observed sites are conditioned on the simulated data. Arguments that contain an observed tensor
    are replaced, so that the guide gets the simulated data. The argument may be the tensor, a view,
    a copy, or rows of a plate as in ``x[index]``. If an observation is another function of the
    arguments, or is not an argument, pass ``to_args``. The densities of the simulated data are
    compared with those at which they were drawn.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments, for the shapes of the data.
    :param int num_simulations: the number of data sets to simulate.
    :param to_args: maps the simulated observations, a dict by site, to the arguments of model and
        guide. These are a tuple, a dict of keyword arguments, or a single argument.
    :param model_kwargs: as in :func:`log_evidence`.
    :param options: as in :func:`log_evidence`. ``num_particles=10`` is the number of chains per
        datum in each direction, P. The default ``schedule`` has 10 linear steps, and the kernel
        must be adjusted; the default is :class:`HMC` with 3 leapfrog steps.
    :returns: a :class:`.Sandwich`.

    :raises ValueError: as :func:`log_evidence`; also for unadjusted kernels, ``pyro.factor`` and
        ``poutine.scale``, guides without a density at given latents, and data that are not found in
        the arguments.

    [1] Grosse, Ghahramani, Adams (2015), *Sandwiching the Marginal Likelihood Using Bidirectional
    Monte Carlo*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import sandwich
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 1.0))
        >>> result = sandwich(model, guide, torch.zeros(200), seed=0)
        >>> print(f"gap {result.mean_gap:.2f} ± {result.standard_error:.2f} nats")
        gap 0.02 ± 0.01 nats
    """
    settings = make_options("sandwich", options, num_particles=10)
    programs = make_programs(model, guide, args, model_kwargs)
    num_simulations = check_count("num_simulations", num_simulations)
    check_function("to_args", to_args)
    if is_messenger(programs):
        raise ValueError(
            f"the guide {type(programs.guide).__name__} runs its own model, which does not get the "
            f"simulated data: use the corresponding AutoGuide, such as AutoNormal"
        )
    if settings.schedule is None and settings.kernel is None:
        settings = replace(settings, schedule=DEFAULT_STEPS)
    annealing = settings.annealing()
    assert annealing is not None
    if not annealing.kernel.adjusted:
        raise ValueError(
            f"a chain of {type(annealing.kernel).__name__} cannot run backwards: use a kernel that "
            f"leaves its target invariant, HMC, MALA or RandomWalk"
        )
    with weights_of(programs, settings, annealing, "sandwich") as weights:
        pairs: list[tuple[Tensor, Tensor]] = []
        particles = settings.num_particles
        for _ in range(num_simulations):
            simulated = simulate(weights.programs, weights.reference, weights.fixed_sites, to_args)
            try:
                pairs.append(_both_bounds(weights, annealing, *simulated, particles))
            except OutOfTimeError:
                if not pairs:
                    raise
                weights.clock.warn(f"{len(pairs)} of {num_simulations} simulated data sets")
                break
        lower, upper = zip(*pairs, strict=True)
        return Sandwich(
            torch.stack(lower),
            torch.stack(upper),
            settings.num_particles,
            weights.reference.plate_names,
            weights.fixed_latents,
            annealing.kernel.step_size().detach().clone(),
        )


def _both_bounds(
    user: ImportanceSampler,
    annealing: Annealing,
    programs: Programs,
    latents: dict[str, Tensor],
    simulated: Trace,
    num_particles: int,
) -> tuple[Tensor, Tensor]:
    sampler = user.on(programs)
    values = guide_values(programs, sampler.reference, latents)
    try:
        sampler.density(1, values)
    except NoCoordinateError:  # the noise of a given value is not known
        if annealing.coordinates == "latent":
            raise
        annealing.use("latent")
    lower, upper = [], []
    for count in sampler.chunks(num_particles):
        chain, forward = sampler.chain(count)
        sampler.check(chain.log_weight, forward.runs)
        lower.append(chain.log_weight)
        density = sampler.density(count, values)
        check_density(simulated, density.log_weight.first.sample.runs[0])
        start = density.start()
        movable = density.log_weight.movable
        back = anneal_back(
            start, annealing.betas.to(start.log_weight.device), annealing.kernel, density, movable
        )
        sampler.check(-back, density.runs)
        upper.append(back)
    if sum(map(len, lower)) < num_particles:
        sampler.stage.check()
    return log_mean_exp(torch.cat(lower)), -log_mean_exp(-torch.cat(upper))
