"""Posterior draws: the guide's, resampled by their weights or moved by chains."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.chains.kernels import Target
from pyro_mcvae.coordinates.chain_density import WhitenedDensity
from pyro_mcvae.evaluation.draws import PosteriorDraws, site_draws
from pyro_mcvae.evaluation.evidence import weights_of
from pyro_mcvae.evaluation.options import LEAVE_OUT, make_options, make_programs
from pyro_mcvae.evaluation.weights import Density, ImportanceSampler, WeightSummary
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.types import Program


def choose(log_weight: Tensor) -> Tensor:
    """Draw the index of one candidate per draw and datum, ``[count, *plates]``."""
    # Where every candidate has weight zero, none is better than another.
    hopeless = log_weight.isneginf().all(1, keepdim=True)
    logits = torch.where(hopeless, 0.0, log_weight)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + noise).argmax(1)


def select_chosen(value: Tensor, chosen: Tensor) -> Tensor:
    """
    Select the chosen ones of ``[count * candidates, *plates, ...]``: ``[count, *plates, ...]``.
    """
    grouped = value.unflatten(0, (len(chosen), -1))
    index = chosen.unsqueeze(1)
    index = index.reshape(index.shape + (1,) * (grouped.dim() - index.dim()))
    return grouped.gather(1, index.expand(-1, -1, *grouped.shape[2:])).squeeze(1)


_LEAVE_OUT_ALL = (
    "leave out schedule, kernel and num_transitions, so that draws are chosen by weight"
)


def refine(
    model: Program,
    guide: Program,
    *args: object,
    num_samples: int = 1000,
    num_transitions: int = 0,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Any,
) -> PosteriorDraws:
    r"""
    Draw from the posterior :math:`p(z \mid x)`, starting with draws of the guide.

    Each draw is chosen among ``num_particles`` candidates :math:`z^k`, per datum, with probability

    .. math:: \Pr(k) = w_k / \sum_j w_j .

    Without a schedule or kernel the candidates are the guide's draws (sampling importance
    resampling [1]); with one they are the ends of annealed chains, weighed by W. Then
    ``num_transitions`` more transitions with the posterior as target move the draw. Draws are
    independent of each other. They follow the posterior exactly in the limit of many candidates,
    or of many transitions.

    Global latents that the guide draws are weighed and moved together with the local ones, over
    all data. With ``joint=False`` they are the guide's own draws, a new one for each draw, and only
    the local ones are refined given these (one draw after the other: slower). Sites that the model
    enumerates are drawn last, from p(y | x, z), as :func:`pyro.infer.infer_discrete` draws them.

    A :class:`TruncatedPosterior` has draws of its own: ``guide.posterior(...).sample``.

    :param int num_samples: how many draws.
    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments.
    :param int num_transitions: transitions at the end, with an adjusted kernel.
    :param model_kwargs: as in :func:`log_evidence`.
    :param options: as in :func:`log_evidence`; ``num_particles=10`` are the candidates per draw.
    :returns: :class:`.PosteriorDraws`, a dict for ``Predictive(model, posterior_samples=...)``, and
        for :func:`to_inference_data`.
    :raises ValueError: as :func:`log_evidence`, and for transitions of an unadjusted kernel.

    Warns where :math:`\hat k` of the candidates' weights is above 0.7.

    [1] Rubin (1988), *Using the SIR Algorithm to Simulate Posterior Distributions*.

    Example::

        >>> from pyro.infer import Predictive
        >>> def model(x=None):
        ...     with pyro.plate("data", 3):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", 3):
        ...         pyro.sample("z", dist.Normal(0.0, torch.ones(3)))
        >>> draws = refine(model, guide, torch.tensor([-2.0, 0.0, 2.0]), schedule=10)
        >>> draws["z"].shape
        torch.Size([1000, 3])
        >>> bool(((draws["z"].mean(0) - torch.tensor([-1.0, 0.0, 1.0])).abs() < 0.15).all())
        True
        >>> Predictive(model, posterior_samples=draws)()["x"].shape
        torch.Size([1000, 3])
    """
    settings = make_options("refine", options, num_particles=10)
    programs = make_programs(model, guide, args, model_kwargs)
    num_samples = check_count("num_samples", num_samples)
    num_transitions = check_count("num_transitions", num_transitions, 0)
    if num_transitions and settings.schedule is None and settings.kernel is None:
        settings = replace(settings, schedule=1)
    annealing = settings.annealing(_LEAVE_OUT_ALL if num_transitions else LEAVE_OUT)
    if num_transitions and annealing is not None and not annealing.kernel.adjusted:
        raise ValueError(
            f"num_transitions={num_transitions} needs a kernel that leaves the posterior "
            f"invariant, which {type(annealing.kernel).__name__} does not: use HMC, MALA or "
            f"RandomWalk, or num_transitions=0"
        )
    candidates = settings.num_particles
    summary, parts, done = WeightSummary(num_samples * candidates), [], 0
    with weights_of(programs, settings, annealing) as sampler:
        # A draw needs all of its candidates at once.
        size = 1 if sampler.has_fixed_draws else max(1, sampler.chunk_size // candidates)
        sampler.progress.expect(num_samples * candidates)
        while done < num_samples:
            if sampler.has_fixed_draws and done:
                sampler.renew()
            count = min(size, num_samples - done)
            parts.append(_refined(sampler, count, candidates, num_transitions, summary))
            done += count
            if annealing is None:
                sampler.progress.step(count * candidates)
        draws = _joined(parts)
        draws.pareto_k = summary.pareto_k.to(draws.log_weight.dtype)
        draws.step_size = (
            None if annealing is None else annealing.kernel.step_size().detach().clone()
        )
    bad = int((draws.pareto_k > 0.7).sum())
    if candidates > 1 and bad:
        warnings.warn(
            f"the Pareto k of the weights is above 0.7 for {bad} of {draws.pareto_k.numel()} "
            f"posteriors (largest {float(draws.pareto_k.max()):.2f}): their draws may miss what "
            f"the guide misses. {sampler.remedy}",
            stacklevel=2,
        )
    return draws


def _joined(parts: list[PosteriorDraws]) -> PosteriorDraws:
    """Concatenate draws."""
    draws = parts[0]
    draws.update({n: torch.cat([part[n] for part in parts]) for n in draws})
    draws.log_weight = torch.cat([part.log_weight for part in parts])
    draws.log_likelihood = {
        n: torch.cat([part.log_likelihood[n] for part in parts]) for n in draws.log_likelihood
    }
    accepted = [part.acceptance for part in parts if part.acceptance is not None]
    draws.acceptance = torch.cat(accepted) if accepted else None
    return draws


def _refined(
    sampler: ImportanceSampler,
    count: int,
    candidates: int,
    transitions: int,
    summary: WeightSummary,
) -> PosteriorDraws:
    density: Density | None = None
    if sampler.annealing is None:
        at = sampler.log_weight(count * candidates, coordinates="resting")
        log_weight, position, infos = at.first.log_weight, at.coordinates, []
        runs = at.first.sample.runs
    else:
        chain, density = sampler.chain(count * candidates, last_transition=True)
        at, log_weight, infos = density.log_weight, chain.log_weight, chain.infos
        position, runs = chain.state.position, density.runs
    sampler.check(log_weight, runs)
    summary.add(log_weight)
    chosen = choose(log_weight.reshape(count, candidates, *log_weight.shape[1:]))
    position = select_chosen(position, chosen)
    acceptance = None
    if infos:
        mean = sum(info.acceptance for info in infos) / len(infos)
        acceptance = select_chosen(torch.as_tensor(mean), chosen)
    if transitions and density is not None:
        position = _move(density, sampler, position, chosen, transitions)
    if isinstance(density, WhitenedDensity):
        position = density.whitening.position(position)
    sample = sampler.with_drawn_states(at(position.detach()).sample)
    return site_draws(sample, select_chosen(log_weight, chosen), acceptance)


def _move(
    density: Density,
    sampler: ImportanceSampler,
    position: Tensor,
    chosen: Tensor,
    transitions: int,
) -> Tensor:
    """Further transitions that leave the posterior invariant."""
    assert sampler.annealing is not None
    movable = density.log_weight.movable
    movable = None if movable is None else select_chosen(movable, chosen)
    target = Target(density, position.new_ones(()), movable)
    state = density(position)
    transition = sampler.annealing.transition(sampler.programs, transitions)
    for _ in range(transitions):
        state, _ = transition.step(state, target)
    return state.position
