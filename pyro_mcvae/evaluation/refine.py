"""Posterior draws: the guide's, resampled by their weights or moved by chains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.chains.kernel import Kernel, Target
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.coordinates.chain_density import ChainDensity, outside_inference_mode
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.evaluation.annealing import LEAVE_OUT, make_annealing
from pyro_mcvae.evaluation.draws import PosteriorDraws, site_draws
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.weight_summary import WeightSummary
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.execution import Programs

__all__ = ["refine"]

_LEAVE_OUT_ALL = (
    "leave out schedule, kernel and num_transitions, so that draws are chosen by weight"
)


def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_particles: int = 10,
    schedule: Schedule | Tensor | int | None = None,
    kernel: Kernel | None = None,
    num_transitions: int = 0,
    chunk_size: int | None = None,
    joint: bool | None = None,
    coordinates: str = "noise",
    warmup: int = 20,
    seed: int | None = None,
    vectorize_particles: bool = True,
    max_plate_nesting: float = math.inf,
    strict_enumeration_warning: bool = True,
    **kwargs: Any,
) -> PosteriorDraws:
    r"""
    Draws from the posterior :math:`p(z \mid x)`, made of the guide's.

    Each draw is chosen among ``num_particles`` candidates :math:`z^k`, per datum, with probability

    .. math:: \Pr(k) = w_k / \sum_j w_j .

    Without a schedule or kernel the candidates are the guide's draws (sampling importance
    resampling [1]); with one they are the ends of annealed chains, weighed by W. Then
    ``num_transitions`` more transitions with the posterior as target move the draw. Draws are
    independent of each other. They follow the posterior exactly in the limit of many candidates,
    or of many transitions.

    Global latents that the guide draws are weighed and moved together with the local ones, over
    all data. With ``joint=False`` they are the guide's own draws, a new one for each draw, and only
    the local ones are refined given these (one draw after the other: slower).

    :param int num_samples: how many draws.
    :param int num_particles: candidates per draw.
    :param schedule: as in :func:`log_evidence`.
    :param Kernel kernel: as there.
    :param int num_transitions: transitions at the end, with an adjusted kernel.
    :param int chunk_size: how many candidates are run at once.
    :returns: :class:`PosteriorDraws`, a dict for ``Predictive(model, posterior_samples=...)``, and
        for :func:`to_inference_data`.
    :raises ValueError: as :func:`log_evidence`, and for transitions of an unadjusted kernel.

    Warns where :math:`\hat k` of the candidates' weights is above 0.7. The other arguments are
    those of :func:`log_evidence`.

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
    check_count("num_samples", num_samples)
    check_count("num_particles", num_particles)
    check_count("num_transitions", num_transitions, 0)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)
    if num_transitions and schedule is None and kernel is None:
        schedule = 1
    without = _LEAVE_OUT_ALL if num_transitions else LEAVE_OUT
    annealing = make_annealing(schedule, kernel, coordinates, warmup, without)
    if num_transitions and annealing is not None and not annealing.kernel.adjusted:
        raise ValueError(
            f"num_transitions={num_transitions} needs a kernel that leaves the posterior "
            f"invariant, which {type(annealing.kernel).__name__} does not: use HMC, MALA or "
            f"RandomWalk, or num_transitions=0"
        )
    programs = Programs(model, guide, args, kwargs)
    with (
        evaluation_mode(model, guide, seed=seed),
        outside_inference_mode(programs) as programs,
        torch.no_grad(),
    ):
        importance_sampler = ImportanceSampler(
            programs,
            annealing,
            joint,
            vectorize_particles,
            max_plate_nesting,
            strict_enumeration_warning,
        )
        return _collect(importance_sampler, num_samples, num_particles, num_transitions, chunk_size)


def _collect(
    importance_sampler: ImportanceSampler,
    num_samples: int,
    candidates: int,
    transitions: int,
    chunk_size: int | None,
) -> PosteriorDraws:
    summary = WeightSummary(num_samples * candidates)
    parts, done = [], 0
    whole = next(importance_sampler.chunks(num_samples * candidates, chunk_size))
    # A draw needs all of its candidates at once.
    size = 1 if importance_sampler.holds_draws else max(1, whole // candidates)
    while done < num_samples:
        if importance_sampler.holds_draws and done:
            importance_sampler.renew()
        count = min(size, num_samples - done)
        parts.append(_Refined(importance_sampler, count, candidates, transitions, summary))
        done += count
    sites = [part.sites for part in parts]
    draws = PosteriorDraws({n: torch.cat([s.latents[n] for s in sites]) for n in sites[0].latents})
    draws.log_weight = torch.cat([part.log_weight for part in parts])
    draws.log_likelihood = {
        n: torch.cat([s.log_likelihood[n] for s in sites]) for n in sites[0].log_likelihood
    }
    accepted = [part.acceptance for part in parts if part.acceptance is not None]
    draws.acceptance = torch.cat(accepted) if accepted else None
    draws.step_size = None
    if importance_sampler.annealing is not None:
        draws.step_size = importance_sampler.annealing.kernel.step_size().detach().clone()
    draws.observed, draws.dims, draws.coords = sites[0].observed, sites[0].dims, sites[0].coords
    draws.plates = importance_sampler.reference.plate_names
    draws.pareto_k = summary.pareto_k.to(draws.log_weight.dtype)
    if candidates > 1:
        _warn(draws.pareto_k)
    return draws


class _Refined:
    """
    One chunk of draws.

    :ivar sites: their values.
    :ivar log_weight: of the chosen candidates, shape ``[count, *plates]``.
    :ivar acceptance: likewise, of chains.
    """

    acceptance: Tensor | None = None

    def __init__(
        self,
        importance_sampler: ImportanceSampler,
        count: int,
        candidates: int,
        transitions: int,
        summary: WeightSummary,
    ) -> None:
        annealing, density = importance_sampler.annealing, None
        if annealing is None:
            at = importance_sampler.log_weight(count * candidates)
            log_weight, position, infos = at.first.log_weight, at.coordinates, []
            runs = at.first.sample.runs
        else:
            chain, density = importance_sampler.chain(count * candidates, last_transition=True)
            at, log_weight, infos = density.log_weight, chain.log_weight, chain.infos
            position, runs = chain.state.position, density.runs
        importance_sampler.check(log_weight, runs)
        summary.add(log_weight)
        chosen = _choose(log_weight.reshape(count, candidates, *log_weight.shape[1:]))
        position = _take(position, chosen)
        self.log_weight = _take(log_weight, chosen)
        if infos:
            acceptance = sum(info.acceptance for info in infos) / len(infos)
            self.acceptance = _take(torch.as_tensor(acceptance), chosen)
        if transitions and density is not None:
            position = _move(density, importance_sampler, position, chosen, transitions)
        self.sites = site_draws(_evaluate(at, position).sample)


def _evaluate(at: LogWeight, position: Tensor) -> Any:
    return at(position.detach())


def _choose(log_weight: Tensor) -> Tensor:
    """The index of one candidate per draw and datum, ``[count, *plates]``."""
    # Where every candidate has weight zero, none is better than another.
    hopeless = log_weight.isneginf().all(1, keepdim=True)
    logits = torch.where(hopeless, 0.0, log_weight)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + noise).argmax(1)


def _take(value: Tensor, chosen: Tensor) -> Tensor:
    """Of ``[count * candidates, *plates, ...]`` the chosen ones, ``[count, *plates, ...]``."""
    grouped = value.reshape(len(chosen), -1, *value.shape[1:])
    index = chosen.unsqueeze(1)
    index = index.reshape(index.shape + (1,) * (grouped.dim() - index.dim()))
    return grouped.gather(1, index.expand(-1, -1, *grouped.shape[2:])).squeeze(1)


def _move(
    density: ChainDensity,
    importance_sampler: ImportanceSampler,
    position: Tensor,
    chosen: Tensor,
    transitions: int,
) -> Tensor:
    """Further transitions that leave the posterior invariant."""
    assert importance_sampler.annealing is not None
    free = density.log_weight.movable
    free = None if free is None else _take(free, chosen)
    target = Target(density, position.new_ones(()), free)
    state = density(position)
    for _ in range(transitions):
        state, _ = importance_sampler.annealing.kernel.step(state, target)
    return state.position


def _warn(pareto_k: Tensor) -> None:
    bad = int((pareto_k > 0.7).sum())
    if bad:
        warnings.warn(
            f"the Pareto k of the weights is above 0.7 for {bad} of {pareto_k.numel()} posteriors "
            f"(largest {float(pareto_k.max()):.2f}): their draws may miss what the guide misses. "
            f"Use chains (schedule=10, and more), or num_transitions",
            stacklevel=4,
        )
