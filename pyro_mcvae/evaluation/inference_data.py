"""Posterior draws as ArviZ's InferenceData, with predictive draws of every site."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.evaluation.draws import PosteriorDraws, site_dims
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.sites import is_record, is_scored
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.programs.unconditioned import Unconditioned


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
