"""Posterior draws: the guide's, resampled by their weights or moved by chains."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from pyro_mcvae.chains.kernel import Target
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.whitened import WhitenedDensity
from pyro_mcvae.evaluation.annealing import LEAVE_OUT
from pyro_mcvae.evaluation.draws import PosteriorDraws, SiteDraws, site_draws
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.state_weights import StateWeights, look_outside
from pyro_mcvae.evaluation.weights import Weights, WeightSummary
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.truncated.search import Population
from pyro_mcvae.truncated.states import take_rows

__all__ = ["RefinedStates", "choose", "refine", "take_chosen"]


def choose(log_weight: Tensor) -> Tensor:
    """The index of one candidate per draw and datum, ``[count, *plates]``."""
    # Where every candidate has weight zero, none is better than another.
    hopeless = log_weight.isneginf().all(1, keepdim=True)
    logits = torch.where(hopeless, 0.0, log_weight)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + noise).argmax(1)


def take_chosen(value: Tensor, chosen: Tensor) -> Tensor:
    """Of ``[count * candidates, *plates, ...]`` the chosen ones, ``[count, *plates, ...]``."""
    grouped = value.unflatten(0, (len(chosen), -1))
    index = chosen.unsqueeze(1)
    index = index.reshape(index.shape + (1,) * (grouped.dim() - index.dim()))
    return grouped.gather(1, index.expand(-1, -1, *grouped.shape[2:])).squeeze(1)


class RefinedStates:
    """
    One chunk of draws: of each datum's candidates one is a draw of q, with the weight of all states
    that are kept, and the others lie outside of these.

    :ivar sites: their values.
    :ivar log_weight: of the chosen candidates, shape ``[count, *plates]``.
    :ivar acceptance: None, as without chains.
    """

    acceptance: Tensor | None = None

    def __init__(
        self, weights: StateWeights, count: int, candidates: int, summary: WeightSummary
    ) -> None:
        posterior, others = weights.posterior, candidates - 1
        bound = posterior.free_energy
        proposed: Tensor | None = None
        outside = bound.new_full((0, *bound.shape), -math.inf)
        if others:
            proposed, outside, runs = look_outside(posterior, count * others)
            weights.check(outside, runs)
            summary.add(torch.logaddexp(bound.expand_as(outside), outside))
            outside = outside - math.log(others)
        whole = bound.expand(count, 1, *bound.shape)
        log_weight = torch.cat([whole, outside.reshape(count, others, *bound.shape)], 1)
        chosen = choose(log_weight)
        self.log_weight = take_chosen(log_weight.flatten(0, 1), chosen)
        states = _taken(posterior.population, proposed, chosen.flatten(1).t(), others)
        self.sites: SiteDraws = site_draws(posterior.runs.run(states, count))


def _taken(population: Population, proposed: Tensor | None, chosen: Tensor, others: int) -> Tensor:
    """
    The states of the chosen candidates, ``[E, count, D]``.

    :param proposed: those outside, ``[E, count * others, D]``.
    :param chosen: 0 for a draw of q, ``[E, count]``.
    """
    logits = population.log_joint.nan_to_num(neginf=torch.finfo(population.log_joint.dtype).min)
    index = torch.distributions.Categorical(logits=logits).sample((chosen.shape[1],)).t()
    kept = take_rows(population.states, index)
    if proposed is None:
        return kept
    at = torch.arange(chosen.shape[1], device=chosen.device) * others
    other = take_rows(proposed, (chosen - 1).clamp_min(0) + at)
    return torch.where((chosen == 0).unsqueeze(-1), kept, other)


_LEAVE_OUT_ALL = (
    "leave out schedule, kernel and num_transitions, so that draws are chosen by weight"
)


@judge(num_particles=10)
def refine(
    programs: Programs, options: Options, *, num_samples: int = 1000, num_transitions: int = 0
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
    the local ones are refined given these (one draw after the other: slower). Sites that the model
    enumerates are drawn last, from p(y | x, z), as :func:`pyro.infer.infer_discrete` draws them.

    Of a :class:`TruncatedPosterior` one candidate is a draw of q, with the weight of all states
    that are kept, and the others are states near these: ``num_particles=1`` draws from q. Latents
    that its own ``guide`` draws stay as that draws them, anew for each draw.

    :param int num_samples: how many draws.
    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param int num_particles: candidates per draw.
    :param int num_transitions: transitions at the end, with an adjusted kernel.
    {options}
    :returns: :class:`PosteriorDraws`, a dict for ``Predictive(model, posterior_samples=...)``, and
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
    num_samples = check_count("num_samples", num_samples)
    num_transitions = check_count("num_transitions", num_transitions, 0)
    if num_transitions and options.schedule is None and options.kernel is None:
        options = replace(options, schedule=1)
    annealing = options.annealing(_LEAVE_OUT_ALL if num_transitions else LEAVE_OUT)
    if num_transitions and annealing is not None and not annealing.kernel.adjusted:
        raise ValueError(
            f"num_transitions={num_transitions} needs a kernel that leaves the posterior "
            f"invariant, which {type(annealing.kernel).__name__} does not: use HMC, MALA or "
            f"RandomWalk, or num_transitions=0"
        )
    with weights_of(programs, options, annealing) as weights:
        return _collect(weights, num_samples, options.num_particles, num_transitions)


def _collect(
    weights: Weights, num_samples: int, candidates: int, transitions: int
) -> PosteriorDraws:
    summary = WeightSummary(num_samples * candidates)
    parts, done = [], 0
    # A draw needs all of its candidates at once.
    size = 1 if weights.holds_draws else max(1, weights.chunk_size // candidates)
    weights.progress.expect(num_samples * candidates)
    while done < num_samples:
        if weights.holds_draws and done:
            weights.renew()
        count = min(size, num_samples - done)
        parts.append(_refined(weights, count, candidates, transitions, summary))
        done += count
        if weights.annealing is None:
            weights.progress.step(count * candidates)
    sites = [part.sites for part in parts]
    draws = PosteriorDraws({n: torch.cat([s.latents[n] for s in sites]) for n in sites[0].latents})
    draws.log_weight = torch.cat([part.log_weight for part in parts])
    draws.log_likelihood = {
        n: torch.cat([s.log_likelihood[n] for s in sites]) for n in sites[0].log_likelihood
    }
    accepted = [part.acceptance for part in parts if part.acceptance is not None]
    draws.acceptance = torch.cat(accepted) if accepted else None
    draws.step_size = None
    if weights.annealing is not None:
        draws.step_size = weights.annealing.kernel.step_size().detach().clone()
    draws.observed, draws.dims, draws.coords = sites[0].observed, sites[0].dims, sites[0].coords
    draws.plates = weights.reference.plate_names
    draws.pareto_k = draws.log_weight.new_full(draws.log_weight.shape[1:], math.nan)
    if summary.count:
        draws.pareto_k = summary.pareto_k.to(draws.log_weight.dtype)
    if candidates > 1:
        _warn(draws.pareto_k, weights.remedy)
    return draws


def _refined(
    weights: Weights, count: int, candidates: int, transitions: int, summary: WeightSummary
) -> _Refined | RefinedStates:
    if isinstance(weights, ImportanceSampler):
        return _Refined(weights, count, candidates, transitions, summary)
    assert isinstance(weights, StateWeights)
    return RefinedStates(weights, count, candidates, summary)


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
        sampler: ImportanceSampler,
        count: int,
        candidates: int,
        transitions: int,
        summary: WeightSummary,
    ) -> None:
        annealing, density = sampler.annealing, None
        if annealing is None:
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
        position = take_chosen(position, chosen)
        self.log_weight = take_chosen(log_weight, chosen)
        if infos:
            acceptance = sum(info.acceptance for info in infos) / len(infos)
            self.acceptance = take_chosen(torch.as_tensor(acceptance), chosen)
        if transitions and density is not None:
            position = _move(density, sampler, position, chosen, transitions)
        if isinstance(density, WhitenedDensity):
            position = density.whitening.position(position)
        sample = at(position.detach()).sample
        self.sites = site_draws(sampler.with_drawn_states(sample))


def _move(
    density: ChainDensity | WhitenedDensity,
    sampler: ImportanceSampler,
    position: Tensor,
    chosen: Tensor,
    transitions: int,
) -> Tensor:
    """Further transitions that leave the posterior invariant."""
    assert sampler.annealing is not None
    movable = density.log_weight.movable
    movable = None if movable is None else take_chosen(movable, chosen)
    target = Target(density, position.new_ones(()), movable)
    state = density(position)
    transition = sampler.annealing.transition(sampler.programs, transitions)
    for _ in range(transitions):
        state, _ = transition.step(state, target)
    return state.position


def _warn(pareto_k: Tensor, remedy: str) -> None:
    bad = int((pareto_k > 0.7).sum())
    if bad:
        warnings.warn(
            f"the Pareto k of the weights is above 0.7 for {bad} of {pareto_k.numel()} posteriors "
            f"(largest {float(pareto_k.max()):.2f}): their draws may miss what the guide misses. "
            f"{remedy}",
            stacklevel=5,
        )
