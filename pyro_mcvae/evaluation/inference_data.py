"""Posterior draws as ArviZ's InferenceData."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.evaluation.draws import PosteriorDraws

__all__ = ["to_inference_data"]


def to_inference_data(
    draws: PosteriorDraws,
    *,
    num_chains: int | None = None,
    coords: Mapping[str, object] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """
    Draws of :func:`refine` for ArviZ: ``az.summary``, ``az.loo``, ``az.plot_*``.

    Groups: ``posterior``; ``log_likelihood``, one number per datum; ``sample_stats`` with the log
    weight, and of chains the acceptance and the step size; ``observed_data``. Plates are named
    dimensions, whose coordinates are the indices of the data.

    :param PosteriorDraws draws: from :func:`refine`.
    :param int num_chains: split the draws, which are independent, into as many chains, so that
        ArviZ can compare them; 4 if that divides their number and leaves 4 in each, else 1.
    :param coords: further coordinates, or others, by dimension.
    :param dims: by site, the names of all of its dimensions, or of those behind its plates.
    :returns: ``arviz.InferenceData`` (ArviZ 0.x), or the ``xarray.DataTree`` of ArviZ 1.x.
    :raises ValueError: if the draws cannot be split into ``num_chains``.
    :raises ImportError: without ArviZ.

    Example::

        >>> import arviz as az  # doctest: +SKIP
        >>> data = to_inference_data(refine(model, guide, x))  # doctest: +SKIP
        >>> az.summary(data)  # doctest: +SKIP
    """
    if not isinstance(draws, PosteriorDraws):
        raise ValueError(
            f"draws must be the PosteriorDraws that refine returns, got {type(draws).__name__}: a "
            f"plain dict of draws goes into arviz.from_dict"
        )
    import arviz

    _check_names(draws, coords, dims)
    chains = _num_chains(draws.num_samples, num_chains)

    def split(values: Mapping[str, Tensor]) -> dict[str, object]:
        return {n: _numpy(v.reshape(chains, -1, *v.shape[1:])) for n, v in values.items()}

    stats = {"log_weight": draws.log_weight}
    if draws.acceptance is not None:
        stats["acceptance_rate"] = draws.acceptance
    if draws.step_size is not None:
        stats["step_size"] = draws.step_size.expand(draws.num_samples, *draws.step_size.shape)
    groups = {
        "posterior": split(draws),
        "log_likelihood": split(draws.log_likelihood),
        "sample_stats": split(stats),
        "observed_data": {n: _numpy(v) for n, v in draws.observed.items()},
    }
    groups = {n: group for n, group in groups.items() if group}
    taken = {*draws, *draws.log_likelihood, *stats, "chain", "draw"}
    # A dimension cannot have the name of a variable.
    renamed = {n: f"{n}_plate" if n in taken else n for n in draws.coords}
    names = _names(draws, dims or {}, renamed)
    known = {renamed[n]: _numpy(index) for n, index in draws.coords.items()}
    used = {d for found in names.values() for d in found}
    known = {**{n: c for n, c in known.items() if n in used}, **(coords or {})}
    if int(str(arviz.__version__).split(".")[0]) < 1:
        return arviz.from_dict(**groups, coords=known, dims=names)
    return arviz.from_dict(groups, coords=known, dims=names)


def _check_names(
    draws: PosteriorDraws, coords: object, dims: Mapping[str, Sequence[str]] | None
) -> None:
    for name, given in (("coords", coords), ("dims", dims)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a dict or None, got {given!r}")
    values: dict[str, Tensor] = {**draws, **draws.log_likelihood}
    for site, found in (dims or {}).items():
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
    draws: PosteriorDraws, own: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
) -> dict[str, list[str]]:
    """The names of every variable's dimensions; ArviZ names those behind the plates itself."""
    plates = {**draws.dims, "log_weight": draws.plates, "acceptance_rate": draws.plates}
    names = {n: [renamed.get(d, d) for d in found] for n, found in plates.items()}
    shapes = {**draws, **draws.log_likelihood}
    for site, found in own.items():
        batch = names.get(site, [])
        missing = shapes[site].dim() - 1 - len(batch) if site in shapes else 0
        names[site] = batch + list(found) if len(found) == missing else list(found)
    return {n: found for n, found in names.items() if found}


def _numpy(value: Tensor) -> object:
    return torch.as_tensor(value).detach().cpu().numpy()
