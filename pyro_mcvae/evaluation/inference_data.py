"""Posterior draws as ArviZ's InferenceData."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.evaluation.draws import PosteriorDraws
from pyro_mcvae.evaluation.predictive import Predicted, predict
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.types import Program

__all__ = ["to_inference_data"]


def to_inference_data(
    draws: PosteriorDraws,
    model: Program | None = None,
    *args: object,
    model_kwargs: Mapping[str, object] | None = None,
    num_prior: int = 500,
    constant_data: Mapping[str, object] | None = None,
    num_chains: int | None = None,
    coords: Mapping[str, object] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
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

    :param PosteriorDraws draws: from :func:`refine`.
    :param model: the model that was refined, for predictive draws.
    :param args: its arguments.
    :param model_kwargs: its keyword arguments, in a dict.
    :param int num_prior: how many draws of the prior; 0 for none.
    :param constant_data: further tensors or arrays by name, such as covariates; their dimensions
        are named in ``dims``.
    :param int num_chains: split the draws, which are independent, into as many chains, so that
        ArviZ can compare them; 4 if that divides their number and leaves 4 in each, else 1.
    :param coords: further coordinates, or others, by dimension.
    :param dims: by site, the names of all of its dimensions, or of those behind its plates.
    :param int seed: for the predictive draws, of a random stream of its own.
    :param progress: show a bar for them, as :func:`log_evidence` does.
    :returns: ``arviz.InferenceData`` (ArviZ 0.x), or the ``xarray.DataTree`` of ArviZ 1.x.
    :raises ValueError: if the draws cannot be split into ``num_chains``; for another model.
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

    constants = dict(constant_data or {})
    num_prior = check_count("num_prior", num_prior, 0)
    _check_names(draws, coords, dims, constants)
    chains = _num_chains(draws.num_samples, num_chains)
    stats = {"log_weight": draws.log_weight}
    if draws.acceptance is not None:
        stats["acceptance_rate"] = draws.acceptance
    if draws.step_size is not None:
        stats["step_size"] = draws.step_size.expand(draws.num_samples, *draws.step_size.shape)
    posterior, prior = Predicted(), Predicted()
    if model is not None:
        call = model, args, model_kwargs or {}, draws
        posterior = predict(*call, seed=seed, progress=progress)
        if num_prior:
            prior = predict(*call, num_prior=num_prior, seed=seed, progress=progress)
    drawn = {
        "posterior": {**draws, **posterior.deterministic},
        "posterior_predictive": posterior.observed,
        "log_likelihood": draws.log_likelihood,
        "sample_stats": stats,
    }
    groups = {n: _split(group, chains) for n, group in drawn.items()}
    groups["prior"] = _split({**prior.latents, **prior.deterministic}, 1)
    groups["prior_predictive"] = _split(prior.observed, 1)
    groups["observed_data"] = {n: _numpy(v) for n, v in draws.observed.items()}
    groups["constant_data"] = {n: _numpy(v) for n, v in constants.items()}
    groups = {n: group for n, group in groups.items() if group}
    plates = {**posterior.dims, **draws.dims}
    taken = {n for group in groups.values() for n in group} | {"chain", "draw"}
    # A dimension cannot have the name of a variable.
    renamed = {n: f"{n}_plate" if n in taken else n for n in draws.coords}
    shapes = {**draws, **posterior.deterministic, **draws.log_likelihood}
    names = _names(draws, plates, shapes, dims or {}, renamed)
    known = {renamed[n]: _numpy(index) for n, index in draws.coords.items()}
    used = {d for found in names.values() for d in found}
    known = {**{n: c for n, c in known.items() if n in used}, **(coords or {})}
    if int(str(arviz.__version__).split(".")[0]) < 1:
        return arviz.from_dict(**groups, coords=known, dims=names)
    return arviz.from_dict(groups, coords=known, dims=names)


def _split(values: Mapping[str, Tensor], chains: int) -> dict[str, object]:
    return {n: _numpy(v.reshape(chains, -1, *v.shape[1:])) for n, v in values.items()}


def _check_names(
    draws: PosteriorDraws,
    coords: object,
    dims: Mapping[str, Sequence[str]] | None,
    constants: Mapping[str, object],
) -> None:
    for name, given in (("coords", coords), ("dims", dims)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a dict or None, got {given!r}")
    values: dict[str, Tensor] = {**draws, **draws.log_likelihood}
    for site, found in (dims or {}).items():
        if site in constants:
            continue
        if site not in values:
            raise ValueError(f"dims names site '{site}', but the sites are {sorted(values)}")
        depth, batch = values[site].dim() - 1, len(draws.dims.get(site, ()))
        if isinstance(found, str) or len(found) not in (depth, depth - batch):
            raise ValueError(
                f"dims of site '{site}' must be a list of {depth - batch} names (of its dimensions "
                f"behind the plates) or of {depth} (of all), got {found!r}"
            )


def _num_chains(num_samples: int, num_chains: int | None) -> int:
    if num_chains is None:
        return 4 if num_samples % 4 == 0 and num_samples >= 16 else 1
    if isinstance(num_chains, bool) or not isinstance(num_chains, int):
        raise ValueError(f"num_chains must be an int of at least 1, got {num_chains!r}")
    if num_chains < 1 or num_samples % num_chains:
        raise ValueError(
            f"num_chains={num_chains} does not divide the {num_samples} draws: take another "
            f"number of chains, or of samples"
        )
    return num_chains


def _names(
    draws: PosteriorDraws,
    plates: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, Tensor],
    own: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
) -> dict[str, list[str]]:
    """The names of every variable's dimensions; ArviZ names those behind the plates itself."""
    plates = {**plates, "log_weight": draws.plates, "acceptance_rate": draws.plates}
    names = {n: [renamed.get(d, d) for d in found] for n, found in plates.items()}
    for site, found in own.items():
        batch = names.get(site, [])
        missing = shapes[site].dim() - 1 - len(batch) if site in shapes else 0
        names[site] = batch + list(found) if len(found) == missing else list(found)
    return {n: found for n, found in names.items() if found}


def _numpy(value: object) -> object:
    return torch.as_tensor(value).detach().cpu().numpy()
