"""Posterior draws of all sites, and their export to ArviZ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.checks.masks import is_transported
from pyro_mcvae.evaluation.options import evaluation_mode
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.messengers import Minibatch, Recorder, Substitutes, Unconditioned
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_factor, is_latent, is_record, is_scored
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Program, Site, plate_frames

# Posterior draws, with what was seen on the way to them.


class PosteriorDraws(dict[str, Tensor]):
    """
    Draws of every latent of the model, by site, in its own space: shape ``[num_samples,
    *site_shape]``, as ``pyro.infer.Predictive(model, posterior_samples=draws)`` takes them.

    Made by :func:`refine`, whose example shows them.

    :ivar log_weight: of the candidate or chain that each draw is, shape ``[num_samples, *plates]``.
    :ivar pareto_k: the tail of all candidates' weights, shape ``[*plates]``.
    :ivar acceptance: of chains, the mean acceptance on the way to each draw, shaped as
        ``log_weight``; None without chains.
    :ivar step_size: of chains; None without.
    :ivar log_likelihood: by observed site (and ``pyro.factor``), log p(x | z) of each datum, shape
        ``[num_samples, *batch_shape]``; 0 where it is masked.
    :ivar observed: the observations, by site.
    :ivar plates: the names of the plates of ``log_weight``.
    :ivar dims: by site, the names of the plates of its batch dims, leftmost first.
    :ivar coords: by plate, the indices of its data.
    """

    log_weight: Tensor
    pareto_k: Tensor
    acceptance: Tensor | None
    step_size: Tensor | None
    log_likelihood: dict[str, Tensor]
    observed: dict[str, Tensor]
    plates: tuple[str, ...]
    dims: dict[str, tuple[str, ...]]
    coords: Minibatch

    @property
    def num_samples(self) -> int:
        """How many draws there are."""
        return len(self.log_weight)


def site_draws(
    sample: WeightedParticles, log_weight: Tensor, acceptance: Tensor | None
) -> PosteriorDraws:
    """
    What a sample's runs drew, in the shapes of a run without particles.

    :raises ValueError: if its runs have different sites.
    """
    found, first = PosteriorDraws(), sample.runs[0]
    found.log_weight, found.acceptance = log_weight, acceptance
    found.plates = sample.plate_names
    found.log_likelihood, found.observed, found.dims = {}, {}, {}
    found.coords = Minibatch()
    for name, site in _latents(first):
        found[name] = site_values(sample, name, site)
        found.dims[name] = site_dims(site)
    for term in _observed(first):
        name = term.key.name
        found.log_likelihood[name] = _stack(
            sample, name, term.site, 0, lambda run, n: _term(run, n).log_prob
        )
        found.dims[name] = site_dims(term.site)
        if not is_factor(term.site["fn"]):  # whose value is empty
            found.observed[name] = _in_full(term.site, len(found.dims[name]))
    sites = [t.site for t in first.terms if not t.in_guide]
    for name, size in _plate_sizes(sites).items():
        index = sample.subsamples.get(name)
        floats = isinstance(index, Tensor) and index.is_floating_point()  # which are no indices
        if not isinstance(index, Tensor) or floats or len(index) != size:
            index = torch.arange(size)
        found.coords[name] = index
        found.coords.sizes[name] = sample.subsamples.sizes.get(name, size)
    return found


def site_values(sample: WeightedParticles, name: str, site: Site) -> Tensor:
    """The values of a model's latent, with the draws in front: ``[K, *site_shape]``."""
    depth = site["fn"].event_dim
    return _stack(sample, name, site, depth, lambda run, n: run.model_trace.nodes[n]["value"])


def _in_full(site: Site, depth: int) -> Tensor:
    """An observed value with all of its plates' dims, over which it may broadcast."""
    shape, value = site["fn"].shape(), torch.as_tensor(site["value"])
    shape = shape[max(0, len(shape) - depth - site["fn"].event_dim) :]
    return value.expand(torch.broadcast_shapes(shape, value.shape))


def _plate_sizes(sites: list[Site]) -> dict[str, int]:
    """By plate, how many data it has; one that was made without a size does not say."""
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
    """The names of a site's batch dims: of its plates, leftmost first."""
    names = {f.dim: f.name for f in plate_frames(site) if f.dim is not None}
    depth = max((-d for d in names), default=0)
    # Dims between plates, of size one, get names of their own.
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
                f"values have no common shape: refine programs whose sites do not depend on latents"
            )
        parts.append(_leading(run, pick(run, name), len(site_dims(site)), event_dim))
    shape = parts[0].shape[1:]
    if any(p.shape[1:] != shape for p in parts):
        raise ValueError(
            f"site '{name}' has another shape in each draw of the model, such as {tuple(shape)}: "
            f"refine programs whose plates do not depend on latents"
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _leading(run: Run, value: Tensor, depth: int, event_dim: int) -> Tensor:
    """``[lead, *natural shape]`` of a value that may have ones between, or no leading dim."""
    begin = max(0, value.dim() - event_dim - depth)
    if run.leading is None:  # dims to the left that lie in no plate
        begin = next((i for i, n in enumerate(value.shape[:begin]) if n != 1), begin)
    inner = value.shape[begin:]
    batch = value.dim() - event_dim
    if run.leading is None or batch <= run.nesting:
        value = value.reshape(inner).unsqueeze(0)
        return value.expand(run.leading or 1, *inner)
    return value.expand(run.leading, *value.shape[1:]).reshape(run.leading, *inner)


# Posterior draws as ArviZ's InferenceData, with predictive draws of every site.


def to_inference_data(
    draws: PosteriorDraws,
    model: Program | None = None,
    *args: object,
    model_kwargs: Mapping[str, object] | None = None,
    num_prior: int = 500,
    seed: int | None = None,
    progress: bool | None = None,
) -> Any:
    """
    Draws of :func:`refine` for ArviZ: ``az.summary``, ``az.loo``, ``az.compare``, ``az.plot_*``.

    Groups: ``posterior``; ``log_likelihood``, one number per datum; ``sample_stats`` with the log
    weight, and of chains the acceptance and the step size; ``observed_data``. With a ``model`` also
    ``posterior_predictive``, one draw of the observed sites for each posterior draw, on its
    minibatch; ``prior`` and ``prior_predictive``; and what the model computes, in ``posterior``
    (from its data) and ``prior``: sites of ``pyro.deterministic``, with those that ``obs_mask``
    puts together, and reparameterized ones. The model is run for each draw, twice where it has
    such sites. Plates are named dimensions, whose coordinates are the indices of the data.
    The draws are independent; they are split into 4 chains, if that divides their number, so that
    ArviZ can compare them.

    :param PosteriorDraws draws: from :func:`refine`.
    :param model: the model that was refined, for predictive draws.
    :param args: its arguments.
    :param model_kwargs: its keyword arguments, in a dict.
    :param int num_prior: how many draws of the prior; 0 for none.
    :param int seed: for the predictive draws, of a random stream of its own.
    :param progress: show a bar for them, as :func:`log_evidence` does.
    :returns: ``arviz.InferenceData`` (ArviZ 0.x), or the ``xarray.DataTree`` of ArviZ 1.x.
    :raises ValueError: for another model.
    :raises ImportError: without ArviZ.

    Example::

        >>> import arviz as az  # doctest: +SKIP
        >>> data = to_inference_data(refine(model, guide, x), model, x)  # doctest: +SKIP
        >>> az.plot_ppc(data)  # doctest: +SKIP
    """
    if not isinstance(draws, PosteriorDraws):
        raise ValueError(
            f"draws must be the PosteriorDraws that refine returns, got {type(draws).__name__}: a "
            f"plain dict of draws goes into arviz.from_dict"
        )
    import arviz

    num_prior = check_count("num_prior", num_prior, 0)
    count = draws.num_samples
    chains = 4 if count % 4 == 0 and count >= 16 else 1
    stats = {"log_weight": draws.log_weight}
    if draws.acceptance is not None:
        stats["acceptance_rate"] = draws.acceptance
    if draws.step_size is not None:
        stats["step_size"] = draws.step_size.expand(count, *draws.step_size.shape)
    predicted: dict[str, Site] = {}
    prior: dict[str, Site] = {}
    if model is not None:
        call = model, args, model_kwargs or {}, draws
        predicted = _predict(*call, None, seed, progress)
        if num_prior:
            prior = _predict(*call, num_prior, seed, progress)
    computed = {n: s["value"] for n, s in predicted.items() if is_record(s)}
    groups = {
        "posterior": {**draws, **computed},
        "posterior_predictive": _values(predicted, draws.observed),
        "log_likelihood": draws.log_likelihood,
        "sample_stats": stats,
        "prior": {n: s["value"] for n, s in prior.items() if n in draws or is_record(s)},
        "prior_predictive": _values(prior, draws.observed),
    }
    arrays: dict[str, dict[str, Any]] = {
        name: {
            n: _numpy(v.reshape(1 if "prior" in name else chains, -1, *v.shape[1:]))
            for n, v in group.items()
        }
        for name, group in groups.items()
    }
    arrays["observed_data"] = {n: _numpy(v) for n, v in draws.observed.items()}
    arrays = {n: group for n, group in arrays.items() if group}
    plates = {n: site_dims(site) for n, site in predicted.items()} | draws.dims
    plates |= {"log_weight": draws.plates, "acceptance_rate": draws.plates}
    # A dimension cannot have the name of a variable.
    taken = {n for group in arrays.values() for n in group} | {"chain", "draw"}
    renamed = {n: f"{n}_plate" if n in taken else n for n in draws.coords}
    dims = {n: [renamed.get(d, d) for d in names] for n, names in plates.items() if names}
    used = {d for names in dims.values() for d in names}
    coords = {renamed[n]: _numpy(c) for n, c in draws.coords.items() if renamed[n] in used}
    if int(str(arviz.__version__).split(".")[0]) < 1:
        return arviz.from_dict(**arrays, coords=coords, dims=dims)
    return arviz.from_dict(arrays, coords=coords, dims=dims)


def _values(sites: Mapping[str, Site], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: sites[n]["value"] for n in names if n in sites}


def _numpy(value: object) -> Any:
    return torch.as_tensor(value).detach().cpu().numpy()


def _predict(
    model: Program,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    draws: PosteriorDraws,
    num_prior: int | None,
    seed: int | None,
    progress: bool | None,
) -> dict[str, Site]:
    """
    Run a model once for each draw, with its latents, on the minibatch that they belong to.

    :param num_prior: run it so often without latents instead.
    :returns: its sites, whose values have the draws in front.
    :raises ValueError: for a model that does not have the draws' sites, or not in each run.
    """
    count = draws.num_samples if num_prior is None else num_prior
    runs: list[dict[str, Site]] = []

    def run(values: Mapping[str, Tensor], handler: AbstractContextManager[object]) -> None:
        with Recorder(Substitutes(_OfDraws(draws.coords), values)) as recorder, handler:
            model(*args, **kwargs)
        sites = recorder.trace.nodes.items()
        runs[-1].update(
            {
                n: s
                for n, s in sites
                if (is_scored(s) or (s["type"] == "sample" and is_record(s)))
                and (is_record(s) or n not in runs[-1])
            }
        )

    text = "prior predictive" if num_prior else "posterior predictive"
    with (
        evaluation_mode(model, seed=seed),
        torch.no_grad(),
        Progress(text, progress, "draw") as bar,
    ):
        bar.expect(count)
        for i in range(count):
            values = {n: v[i] for n, v in draws.items()} if num_prior is None else {}
            runs.append({})
            run(values, Unconditioned())
            if num_prior is None and any(map(is_record, runs[-1].values())):
                # Of the posterior, what is computed from data is so from those that were seen.
                run(values, nullcontext())
            bar.step()
    missing = [n for n in (*draws, *draws.observed) if n not in runs[0]]
    if missing:
        raise ValueError(
            f"the model has no site '{missing[0]}', which the draws have: pass the model that was "
            f"refined, with its arguments"
        )
    found = {}
    for name, site in runs[0].items():
        each = [other[name]["value"] for other in runs if name in other]
        # What comes and goes has no common shape.
        if len(each) == count and all(v.shape == each[0].shape for v in each):
            found[name] = {**site, "value": torch.stack(each)}
    return found  # type: ignore[return-value]


class _OfDraws(Minibatch):
    """The data that draws are of."""

    def _check_whole(self, name: str, now: int) -> None:
        raise ValueError(
            f"plate '{name}' has size {now} with these arguments, and {self.sizes[name]} in the "
            f"draws: pass the arguments that were refined; predictions for other data are those of "
            f"pyro.infer.Predictive(model, posterior_samples=...), with draws of what they share"
        )
