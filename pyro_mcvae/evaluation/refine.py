"""Posterior draws: draws of the guide, resampled by their weights or moved by chains."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_mcvae.chains.kernels import HMC, Target
from pyro_mcvae.checks.masks import is_transported
from pyro_mcvae.coordinates.chain_density import WhitenedDensity
from pyro_mcvae.evaluation.clock import Clock, OutOfTimeError
from pyro_mcvae.evaluation.continuation import continue_training
from pyro_mcvae.evaluation.ensemble import Ensemble, Verdict, normal_scores, split_r_hat
from pyro_mcvae.evaluation.laplace import FlatGuide, LogDensity, find_modes, latents_masked
from pyro_mcvae.evaluation.options import (
    DEFAULT_STEPS,
    Counted,
    EvaluatorOptions,
    Options,
    make_options,
    make_programs,
    with_options,
)
from pyro_mcvae.evaluation.tables import fraction, table
from pyro_mcvae.evaluation.weights import Density, ImportanceSampler, WeightSummary, weights_of
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.particles.sampler import WeightedParticles, with_drawn_states
from pyro_mcvae.programs.messengers import Minibatch
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_factor, is_latent
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Program, Site, first_line, plate_frames

_logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Posterior draws, with diagnostics.


class PosteriorDraws(dict[str, Tensor]):
    """
    A dict with draws of every latent of the model, in its support: shape ``[num_samples,
    *site_shape]``, for ``pyro.infer.Predictive(model, posterior_samples=draws)``.

    :func:`.refine` returns it, and has an example.

    :ivar verdict: a :class:`.Verdict`: whether the draws can be trusted, and why not.
    :ivar log_weight: the log weight of the candidate or chain of each draw, shape ``[num_samples,
        *plates]``. Chains without a guide have those of the normal density fitted to them.
    :ivar pareto_k: the tail index of the weights of all candidates, shape ``[*plates]``.
    :ivar acceptance: the mean acceptance of the chain of each draw, same shape as ``log_weight``;
        None without chains.
    :ivar step_size: the step size of chains; None without chains.
    :ivar log_likelihood: for each observed site (and ``pyro.factor``), log p(x | z) of each datum,
        shape ``[num_samples, *batch_shape]``; 0 where it is masked.
    :ivar observed: the observations, by site.
    :ivar plates: the names of the plates of ``log_weight``.
    :ivar dims: for each site, the names of the plates of its batch dims, leftmost first.
    :ivar coords: for each plate, the indices of its data.
    :ivar chains: the number of chains that the draws are from. Those of a chain follow each other,
        and all chains but the last one have as many. None if all draws are independent.
    """

    verdict: Verdict
    log_weight: Tensor
    pareto_k: Tensor
    acceptance: Tensor | None
    step_size: Tensor | None
    log_likelihood: dict[str, Tensor]
    observed: dict[str, Tensor]
    plates: tuple[str, ...]
    dims: dict[str, tuple[str, ...]]
    coords: Minibatch
    chains: int | None = None

    @property
    def num_samples(self) -> int:
        """Return the number of draws."""
        return len(self.log_weight)

    def __str__(self) -> str:
        rows, left = [["", "mean", "sd", "5%", "95%", "ESS", "R-hat"]], 0
        for name, draws in self.items():
            flat = draws.reshape(len(draws), -1)
            left += max(0, flat.shape[1] - _ROWS)
            for i, values in enumerate(flat.double().T[:_ROWS]):
                index = [int(n) for n in torch.unravel_index(torch.tensor(i), draws.shape[1:])]
                numbers = (values.mean(), values.std(), *values.quantile(_ENDS.to(values)))
                cells = [name + (str(index) if index else ""), *(f"{x:.4g}" for x in numbers)]
                rows.append([*cells, *self._diagnostics(values)])
        more = [f"and {left} more elements"] if left else []
        return "\n".join([table(rows), *more, str(self.verdict)])

    def _diagnostics(self, values: Tensor) -> tuple[str, str]:
        per_chain = math.ceil(len(values) / (self.chains or len(values)))
        if bool((values == values[0]).all()):
            return "", ""
        if per_chain < 4:
            return str(len(values)), ""
        whole = len(values) // per_chain  # the last chain may have fewer draws
        chains = values[: per_chain * whole].reshape(whole, per_chain)
        r_hat = split_r_hat(normal_scores(chains.unsqueeze(-1)))
        return f"{float(effective_sample_size(chains, 0, 1)):.0f}", f"{float(r_hat):.2f}"


# The number of elements of a site that are printed, and the ends of their interval.
_ROWS, _ENDS = 20, torch.tensor([0.05, 0.95])


def site_draws(
    sample: WeightedParticles, log_weight: Tensor, acceptance: Tensor | None
) -> PosteriorDraws:
    """
    Return the draws of a sample, in the shapes of a run without particles.

    :raises ValueError: if its runs have different sites.
    """
    draws, first = PosteriorDraws(), sample.runs[0]
    draws.log_weight, draws.acceptance = log_weight, acceptance
    draws.plates = sample.plate_names
    draws.log_likelihood, draws.observed, draws.dims = {}, {}, {}
    draws.coords = Minibatch()
    for name, site in _latents(first):
        draws[name] = site_values(sample, name, site)
        draws.dims[name] = site_dims(site)
    for term in _observed(first):
        name = term.key.name
        draws.log_likelihood[name] = _stack(
            sample, name, term.site, 0, lambda run, n: _term(run, n).log_prob
        )
        draws.dims[name] = site_dims(term.site)
        if not is_factor(term.site["fn"]):  # a factor has an empty value
            draws.observed[name] = _in_full(term.site, len(draws.dims[name]))
    sites = [t.site for t in first.terms if not t.in_guide]
    for name, size in _plate_sizes(sites).items():
        index = sample.subsamples.get(name)
        floats = isinstance(index, Tensor) and index.is_floating_point()  # floats are not indices
        if not isinstance(index, Tensor) or floats or len(index) != size:
            index = torch.arange(size)
        draws.coords[name] = index
        draws.coords.sizes[name] = sample.subsamples.sizes.get(name, size)
    return draws


def site_values(sample: WeightedParticles, name: str, site: Site) -> Tensor:
    """Return the values of a latent of the model, ``[K, *site_shape]``."""
    depth = site["fn"].event_dim
    return _stack(sample, name, site, depth, lambda run, n: run.model_trace.nodes[n]["value"])


def _in_full(site: Site, depth: int) -> Tensor:
    """Expand an observed value over all dims of its plates."""
    shape, value = site["fn"].shape(), torch.as_tensor(site["value"])
    shape = shape[max(0, len(shape) - depth - site["fn"].event_dim) :]
    return value.expand(torch.broadcast_shapes(shape, value.shape))


def _plate_sizes(sites: list[Site]) -> dict[str, int]:
    """Return the full size of each plate that has a size."""
    sizes: dict[str, int] = {}
    for site in sites:
        shape = site["fn"].batch_shape
        for frame in plate_frames(site):
            if frame.dim is not None:
                here = shape[frame.dim] if -frame.dim <= len(shape) else 1
                size = frame.size if frame.size >= 0 else here
                sizes[frame.name] = max(size, sizes.get(frame.name, 1))
    return sizes


def _latents(run: Run) -> Iterator[tuple[str, Site]]:
    return ((n, s) for n, s in run.model_trace.nodes.items() if is_latent(s))


def _observed(run: Run) -> Iterator[Term]:
    sites = (t for t in run.terms if not t.in_guide and t.site["is_observed"])
    return (t for t in sites if not is_transported(t.site))


def _term(run: Run, name: str) -> Term:
    return next(t for t in run.terms if not t.in_guide and t.key.name == name)


def site_dims(site: Site) -> tuple[str, ...]:
    """Return the names of a site's batch dims, which are those of its plates, leftmost first."""
    names = {f.dim: f.name for f in plate_frames(site) if f.dim is not None}
    depth = max((-d for d in names), default=0)
    # Dims of size one between plates get separate names.
    return tuple(names.get(d, f"{site['name']}_batch_{-d}") for d in range(-depth, 0))


def _stack(
    sample: WeightedParticles,
    name: str,
    site: Site,
    event_dim: int,
    pick: Callable[[Run, str], Tensor],
) -> Tensor:
    parts = []
    for run in sample.runs:
        if name not in run.model_trace.nodes:
            raise ValueError(
                f"site '{name}' is in some draws of the model and not in others, so that their "
                f"values have no common shape: use a model whose sites do not depend on latents"
            )
        parts.append(_leading(run, pick(run, name), len(site_dims(site)), event_dim))
    shape = parts[0].shape[1:]
    if any(p.shape[1:] != shape for p in parts):
        raise ValueError(
            f"site '{name}' has another shape in each draw of the model, such as {tuple(shape)}: "
            f"use a model whose plates do not depend on latents"
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _leading(run: Run, value: Tensor, depth: int, event_dim: int) -> Tensor:
    """Reshape to ``[lead, *natural shape]``, and remove dims of size one between them."""
    begin = max(0, value.dim() - event_dim - depth)
    if run.leading is None:  # dims to the left, outside all plates
        begin = next((i for i, n in enumerate(value.shape[:begin]) if n != 1), begin)
    inner = value.shape[begin:]
    batch = value.dim() - event_dim
    if run.leading is None or batch <= run.nesting:
        value = value.reshape(inner).unsqueeze(0)
        return value.expand(run.leading or 1, *inner)
    return value.expand(run.leading, *value.shape[1:]).reshape(run.leading, *inner)


# Choose draws by their weights, and move them.


def choose(log_weight: Tensor) -> Tensor:
    """Draw the index of one candidate per draw and datum, ``[count, *plates]``."""
    # If all candidates have weight zero, select one uniformly.
    hopeless = log_weight.isneginf().all(1, keepdim=True)
    logits = torch.where(hopeless, 0.0, log_weight)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + noise).argmax(1)


def select_chosen(value: Tensor, chosen: Tensor) -> Tensor:
    """Select the chosen candidates: ``[count * candidates, ...]`` to ``[count, *plates, ...]``."""
    grouped = value.unflatten(0, (len(chosen), -1))
    index = chosen.unsqueeze(1)
    index = index.reshape(index.shape + (1,) * (grouped.dim() - index.dim()))
    return grouped.gather(1, index.expand(-1, -1, *grouped.shape[2:])).squeeze(1)


# The tail index up to which weights suffice, and the share of a draw's distribution that may be
# wrong because it is selected from few candidates. The error of a mean is about as many standard
# deviations, like that of the chains.
_LIGHT, _HEAVY, _BIAS, _FEW = 0.5, 0.7, 0.05, 0.05
# Without options: candidates of each draw, and the chains that follow if their weights do not
# suffice.
_CANDIDATES, _TRANSITIONS = 40, 20


@with_options(num_particles=10)
def refine(
    model: Program,
    guide: Program | object = None,
    *args: object,
    num_samples: int = 1000,
    num_transitions: int = 0,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> PosteriorDraws:
    r"""
    Draw from the posterior :math:`p(z \mid x)`, and check whether the draws can be trusted.

    ``refine(model, *args)`` needs no guide. The latents move over unconstrained coordinates, in
    which flat priors (``ImproperUniform`` and ``.mask(False)``) are allowed. L-BFGS from several
    starts finds modes, and Newton's method a normal density at each. A hundred chains of HMC start
    there, in white coordinates that are fitted to the chains during the warm-up. Independent
    proposals from normal densities that are fitted to the chains of each mode move chains between
    modes. The chains run until every mean and standard deviation is known to 0.055 standard
    deviations, and split :math:`\hat R` over starts is at most 1.02; ``draws.verdict`` records
    whether they reached that. It also has a reason if chains hardly move at an end of a latent, as
    in the neck of a funnel, because they hardly enter it either.

    ``refine(model, guide, *args)`` begins with draws of the guide. Each draw is selected from 40
    candidates :math:`z^k`, per datum, with probability

    .. math:: \Pr(k) = w_k / \sum_j w_j

    (sampling importance resampling [1]). If the weights do not suffice, because of :math:`\hat k`
    or the effective sample size, chains move the draws. If all latents have one weight, these are
    the chains above. Otherwise each datum has chains of its own, in white coordinates, and 20
    transitions.

    An argument after the model is its guide if it is callable, as a function or a module is, and
    data otherwise. If the first argument of the model is callable, or None, pass None for the
    guide: ``refine(model, None, network, x)``.

    ``num_particles``, ``schedule``, ``kernel`` and ``num_transitions`` choose how the guide's draws
    are refined. With a schedule or kernel the candidates are the last positions of
    annealed chains, with their weights. Then ``num_transitions`` more transitions with the
    posterior as target move the draw.

    Global latents that the guide draws have a common weight with the local latents, and move
    together with them, over all data. With ``joint=False`` only the local latents are refined, and
    each draw has new global latents from the guide. This is slower, because the draws are computed
    one after another. Sites that the model enumerates are drawn last, from p(y | x, z), as in
    :func:`pyro.infer.infer_discrete`.

    For a :class:`TruncatedPosterior`, use ``guide.posterior(...).sample``.

    :param model: a Pyro model.
    :param guide: its guide, or the first of the arguments; None makes one.
    :param args: their arguments.
    :param int num_samples: the number of draws.
    :param int num_transitions: the number of final transitions, which need an adjusted kernel.
    :param model_kwargs: the keyword arguments of model and guide.
    :param options: as in :func:`log_evidence`. If an option sets how draws are refined,
        ``num_particles=10`` is the number of candidates per draw. After ``time_budget`` seconds,
        the draws that are finished are returned. If chains did not end, ``verdict.reasons`` has an
        entry for it.
    :returns: :class:`.PosteriorDraws`, a dict for ``Predictive(model, posterior_samples=...)``, and
        for :func:`to_inference_data`. ``print(draws)`` prints a summary and the verdict.
    :raises ValueError: as :func:`log_evidence`; for transitions of an unadjusted kernel; without a
        guide, for discrete latents that the model does not enumerate, and for a density that is
        zero at all starts.

    Draws without options that cannot be trusted are logged. With options, a warning is issued if
    :math:`\hat k` of the weights is above 0.7. With one candidate per draw this means that the
    chains, not only their selection, miss a part of the posterior.

    [1] Rubin (1988), *Using the SIR Algorithm to Simulate Posterior Distributions*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import Predictive
        >>> from pyro_mcvae import refine
        >>> def model(x=None):
        ...     with pyro.plate("data", 3):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> draws = refine(model, torch.tensor([-2.0, 0.0, 2.0]), seed=0)
        >>> draws["z"].shape
        torch.Size([1000, 3])
        >>> draws["z"].mean(0).abs().round()  # of -1, 0 and 1
        tensor([1., 0., 1.])
        >>> draws.verdict.reasons
        ()
        >>> Predictive(model, posterior_samples=draws)()["x"].shape
        torch.Size([1000, 3])
    """
    if guide is not None and not callable(guide):
        guide, args = None, (guide, *args)
    num_samples = check_count("num_samples", num_samples)
    num_transitions = check_count("num_transitions", num_transitions, 0)
    settings = make_options("refine", options, num_particles=10)
    chosen = [n for n in _OF_CHAINS if options.get(n) is not None]
    chosen += ["num_transitions"] * (num_transitions > 0)
    if guide is None and chosen:
        raise ValueError(
            f"{chosen[0]} refines the draws of a guide, but there is none: call "
            f"refine(model, guide, *args), or leave {chosen[0]} out"
        )
    second = model if guide is None else cast("Program", guide)
    programs = make_programs(model, second, args, model_kwargs)
    if chosen:
        return _refined_draws(programs, settings, num_samples, num_transitions, True)
    draw = _by_ensemble if guide is None else _automatic
    draws = draw(programs, settings, num_samples)
    if not draws.verdict.trusted:
        _logger.warning("%s", draws.verdict)
    return draws


# The options that say how draws of a guide are refined.
_OF_CHAINS = "num_particles", "schedule", "kernel", "coordinates", "warmup"


def _automatic(programs: Programs, settings: Options, num_samples: int) -> PosteriorDraws:
    """Refine by weights, or by chains if the weights do not suffice."""
    with Clock("refine", settings.progress, settings.time_budget) as clock:
        return _by_weights_or_chains(programs, settings, num_samples, clock)


def _by_weights_or_chains(
    programs: Programs, settings: Options, num_samples: int, clock: Clock
) -> PosteriorDraws:
    candidates = replace(settings, num_particles=_CANDIDATES)
    draws = _refined_draws(programs, candidates, num_samples, 0, False, clock)
    if draws.verdict.trusted:
        return draws
    with weights_of(programs, settings, call=clock):
        rise = continue_training(programs, draws.pareto_k.numel(), clock)
    try:
        if draws.pareto_k.numel() == 1 and settings.joint is not False:
            draws = _by_ensemble(programs, settings, num_samples, draws, clock)
        else:
            kernel = HMC(num_leapfrog=5, jitter=0.3)
            chains = replace(settings, schedule=DEFAULT_STEPS, kernel=kernel, num_particles=1)
            chains = replace(chains, coordinates="whitened")
            draws = _refined_draws(programs, chains, num_samples, _TRANSITIONS, False, clock)
    except (ValueError, NotImplementedError, OutOfTimeError) as error:
        # Such as discrete sites of the guide.
        failed = "did not end" if isinstance(error, OutOfTimeError) else "cannot move them"
        reason = f"chains {failed} ({first_line(error)})"
        reasons = (*draws.verdict.reasons, reason)
        draws.verdict = replace(draws.verdict, reasons=reasons)
    if rise.is_large or rise.why:
        draws.verdict = replace(draws.verdict, method=f"{draws.verdict.method}; {rise.text}")
    return draws


def _by_ensemble(
    programs: Programs,
    settings: Options,
    num_samples: int,
    start: PosteriorDraws | None = None,
    call: str | Clock = "refine",
) -> PosteriorDraws:
    """
    Move an ensemble, and return draws at regular transitions of each of its chains.

    :param start: draws from which half of the chains start.
    :param call: as in :func:`weights_of`.
    """
    model = latents_masked(programs.model)
    flat = replace(programs, model=model, guide=FlatGuide(model))
    with weights_of(flat, replace(settings, joint=True), call=call) as sampler:
        density = LogDensity(sampler)
        density.stage = sampler.clock.stage("moving an ensemble of chains", 1, "ensembles")
        modes = find_modes(density)
        first = None if start is None else density.position_of(start)
        ensemble = Ensemble.at_modes(density, modes, first)
        ensemble.warm_up()
        reasons = ensemble.sample(num_samples)
        density.stage.advance()
        density.stage = None
        kept = ensemble.kept()
        per_chain = math.ceil(num_samples / len(kept))
        times = torch.linspace(kept.shape[1] - 1, 0, per_chain).round().long().flip(0)
        # Systematic sampling: chains are ordered by start.
        count = math.ceil(num_samples / per_chain)
        rows = ((torch.arange(count) + torch.rand(())) * (len(kept) / count)).long()
        position = kept[rows][:, times].flatten(0, 1)[:num_samples]
        parts = []
        for part in position.split(sampler.chunk_size):
            at = density.evaluate(part)
            log_weight = ensemble.log_weight(part, (at.log_base + at.log_weight).flatten())
            sample = with_drawn_states(sampler.programs, at.sample)
            parts.append(site_draws(sample, log_weight, None))
    draws = _joined(parts)
    draws.acceptance = ensemble.acceptance[rows].repeat_interleave(per_chain)[:num_samples]
    draws.step_size, draws.chains = ensemble.kernel.step_size().detach(), count
    draws.pareto_k = torch.tensor(ensemble.k)
    nearest = torch.stack([mode.distance(position) for mode in modes]).argmin(0)
    counts = nearest.bincount(minlength=len(modes)) / len(position)
    shares = [(m.log_density, float(c)) for m, c in zip(modes, counts, strict=True)]
    draws.verdict = Verdict(
        f"{len(kept)} chains of {kept.shape[1]} transitions",
        tuple(reasons),
        ensemble.k,
        ensemble.size,
        ensemble.r_hat,
        float(ensemble.acceptance.mean()),
        tuple(shares),
        density.num_evaluations,
    )
    return draws


def _refined_draws(
    programs: Programs,
    settings: Options,
    num_samples: int,
    num_transitions: int,
    warn: bool,
    call: str | Clock = "refine",
) -> PosteriorDraws:
    """Refine draws of the guide by weights, and by chains with a schedule or a kernel."""
    if num_transitions and settings.schedule is None and settings.kernel is None:
        settings = replace(settings, schedule=1)
    annealing = settings.annealing()
    if num_transitions and annealing is not None and not annealing.kernel.adjusted:
        raise ValueError(
            f"num_transitions={num_transitions} needs a kernel that leaves the posterior "
            f"invariant, which {type(annealing.kernel).__name__} does not: use HMC, MALA or "
            f"RandomWalk, or num_transitions=0"
        )
    candidates = settings.num_particles
    summary, done = WeightSummary(num_samples * candidates), 0
    parts: list[PosteriorDraws] = []
    with weights_of(programs, settings, annealing, call) as sampler:
        # All candidates of a draw must be in the same chunk.
        size = 1 if sampler.drawn else max(1, sampler.chunk_size // candidates)
        moves = 0 if annealing is None else annealing.num_steps + num_transitions
        try:
            for count in sampler.chunks(num_samples, size, moves):
                if sampler.drawn and parts:
                    sampler.renew()
                parts.append(_refined(sampler, count, candidates, num_transitions, summary))
                done += count
        except OutOfTimeError:  # of unfinished chains
            if not parts:
                raise
        draws = _joined(parts)
        if done < num_samples:
            sampler.clock.warn(f"{done} of {num_samples} draws")
        draws.pareto_k = summary.pareto_k.to(draws.log_weight.dtype)
        draws.step_size = (
            None if annealing is None else annealing.kernel.step_size().detach().clone()
        )
    k, sizes = draws.pareto_k, summary.effective_sample_size
    accepted = math.nan if draws.acceptance is None else float(draws.acceptance.mean())
    method = "selected by weight" if draws.acceptance is None else "moved by chains"
    draws.verdict = Verdict(
        f"draws of the guide, {method}",
        weight_reasons(k, sizes, summary.count, candidates),
        float(k.max()),
        float(sizes.min()),
        acceptance=accepted,
    )
    bad = int((draws.pareto_k > _HEAVY).sum())
    if bad and warn:
        warnings.warn(
            f"the Pareto k of the weights is above {_HEAVY} for {bad} of {k.numel()} posteriors "
            f"(largest {float(k.max()):.2f}): draws may miss the same regions as the guide. Leave "
            f"out all options but num_samples, so that refine chooses chains, or use more steps",
            stacklevel=3,
        )
    return draws


def weight_reasons(
    pareto_k: Tensor, effective_sample_size: Tensor, count: int, candidates: int = _CANDIDATES
) -> tuple[str, ...]:
    """
    Return why draws that are selected by their weights cannot be trusted; empty if they can.

    :param count: the number of weights of each posterior.
    """
    bias = (count / effective_sample_size.clamp_min(1e-300) - 1) / candidates
    reasons, n = [], pareto_k.numel()
    if fraction(pareto_k > _LIGHT) > _FEW:
        number = int((pareto_k > _LIGHT).sum())
        reasons.append(f"Pareto k is above {_LIGHT} for {number} of {n} posteriors")
    if fraction(bias > _BIAS) > _FEW:
        how = f"to select from {candidates} candidates"
        if candidates == 1:
            how = "for draws that are not selected by weight (num_particles=1)"
        reasons.append(
            f"weights differ too much {how}, for {int((bias > _BIAS).sum())} of {n} posteriors"
        )
    return tuple(reasons)


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
        at = sampler.log_weight(count * candidates, coordinates="fixed")
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
    sample = with_drawn_states(sampler.programs, at(position.detach()).sample)
    return site_draws(sample, select_chosen(log_weight, chosen), acceptance)


def _move(
    density: Density,
    sampler: ImportanceSampler,
    position: Tensor,
    chosen: Tensor,
    transitions: int,
) -> Tensor:
    """Make further transitions that leave the posterior invariant."""
    assert sampler.annealing is not None
    movable = density.log_weight.movable
    movable = None if movable is None else select_chosen(movable, chosen)
    target = Target(density, position.new_ones(()), movable)
    state = density(position)
    inner = sampler.annealing.transition(sampler.programs, transitions)
    transition = Counted(inner, sampler.stage)
    for _ in range(transitions):
        state, _ = transition.step(state, target)
    return state.position


# Posterior draws as ArviZ's InferenceData.


def to_inference_data(draws: PosteriorDraws) -> Any:
    """
    Convert draws of :func:`.refine` for ArviZ: ``az.summary``, ``az.loo``, ``az.compare``,
    ``az.plot_*``.

    The groups are ``posterior``; ``log_likelihood``, one number per datum; ``sample_stats`` with
    the log weight and, for chains, the acceptance and the step size; and ``observed_data``. Plates
    are named dimensions, whose coordinates are the indices of the data. The draws are independent.
    They are split into 4 chains if their number is divisible by 4, so that ArviZ can compare them.

    For predictive draws and deterministic sites (``pyro.deterministic``), pass the result of
    ``pyro.infer.Predictive(model, posterior_samples=draws)`` to ``arviz.from_dict`` as
    ``posterior_predictive``.

    :param PosteriorDraws draws: the result of :func:`.refine`.
    :returns: ``arviz.InferenceData`` (ArviZ 0.x), or the ``xarray.DataTree`` of ArviZ 1.x.
    :raises ValueError: for other draws.
    :raises ImportError: without ArviZ.

    Example::

        >>> import arviz as az  # doctest: +SKIP
        >>> data = to_inference_data(refine(model, guide, x))  # doctest: +SKIP
        >>> az.loo(data)  # doctest: +SKIP
    """
    if not isinstance(draws, PosteriorDraws):
        raise ValueError(
            f"draws must be the PosteriorDraws that refine returns, got {type(draws).__name__}: "
            f"pass a plain dict of draws to arviz.from_dict"
        )
    try:
        import arviz
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_inference_data needs ArviZ: pip install arviz") from error
    count = draws.num_samples
    chains = 4 if count % 4 == 0 and count >= 16 else 1
    stats = {"log_weight": draws.log_weight}
    if draws.acceptance is not None:
        stats["acceptance_rate"] = draws.acceptance
    if draws.step_size is not None:
        stats["step_size"] = draws.step_size.expand(count, *draws.step_size.shape)
    groups = {"posterior": draws, "log_likelihood": draws.log_likelihood, "sample_stats": stats}
    arrays: dict[str, dict[str, Any]] = {
        name: {n: _numpy(v.reshape(chains, -1, *v.shape[1:])) for n, v in group.items()}
        for name, group in groups.items()
    }
    arrays["observed_data"] = {n: _numpy(v) for n, v in draws.observed.items()}
    arrays = {n: group for n, group in arrays.items() if group}
    plates = {**draws.dims, "log_weight": draws.plates, "acceptance_rate": draws.plates}
    # A dimension must not have the name of a variable.
    names_in_use = {n for group in arrays.values() for n in group} | {"chain", "draw"}
    renamed = {n: f"{n}_plate" if n in names_in_use else n for n in draws.coords}
    dims = {n: [renamed.get(d, d) for d in names] for n, names in plates.items() if names}
    used = {d for names in dims.values() for d in names}
    coords = {renamed[n]: _numpy(c) for n, c in draws.coords.items() if renamed[n] in used}
    if int(str(arviz.__version__).split(".")[0]) < 1:
        return arviz.from_dict(**arrays, coords=coords, dims=dims)
    return arviz.from_dict(arrays, coords=coords, dims=dims)


def _numpy(value: object) -> Any:
    return torch.as_tensor(value).detach().cpu().numpy()
