"""What a model draws given posterior draws, or by itself: predictive draws of every site."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_mcvae.evaluation.draws import PosteriorDraws, site_dims
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.sites import is_record, is_scored
from pyro_mcvae.programs.types import Program, Site
from pyro_mcvae.programs.unconditioned import Unconditioned

__all__ = ["Predicted", "predict"]


@dataclass
class Predicted:
    """
    Draws with their number in front, by site.

    :ivar latents: of the latents.
    :ivar observed: of the observed sites, which are drawn here.
    :ivar deterministic: of what the model computes: ``pyro.deterministic``, reparameterized sites.
    :ivar dims: the names of the plates of each.
    """

    latents: dict[str, Tensor] = field(default_factory=dict)
    observed: dict[str, Tensor] = field(default_factory=dict)
    deterministic: dict[str, Tensor] = field(default_factory=dict)
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)


def predict(
    model: Program,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    draws: PosteriorDraws,
    num_prior: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> Predicted:
    """
    Run a model once for each draw, with its latents, on the minibatch that they belong to.

    :param num_prior: run it so often without latents, in the place.
    :raises ValueError: for a model that does not have the draws' sites, or not in each run.
    """
    count = draws.num_samples if num_prior is None else num_prior
    runs = []
    text = "posterior predictive" if num_prior is None else "prior predictive"
    with (
        evaluation_mode(model, seed=seed),
        torch.no_grad(),
        Progress(text, progress, "draw") as bar,
    ):
        bar.expect(count)
        for i in range(count):
            values = {n: v[i] for n, v in draws.items()} if num_prior is None else {}
            given = model, args, kwargs, draws.coords, values
            run = _run(*given, Unconditioned())
            if num_prior is None and any(map(is_record, run.values())):
                # Of the posterior, what is computed from data is so from those that were seen.
                run = {n: s for n, s in run.items() if not is_record(s)}
                run |= {n: s for n, s in _run(*given, nullcontext()).items() if is_record(s)}
            runs.append(run)
            bar.step()
    return _together(runs, draws)


class _OfDraws(Minibatch):
    """The data that draws are of."""

    def _check_whole(self, name: str, now: int) -> None:
        raise ValueError(
            f"plate '{name}' has size {now} with these arguments, and {self.sizes[name]} in the "
            f"draws: pass the arguments that were refined; predictions for other data are those of "
            f"pyro.infer.Predictive(model, posterior_samples=...), with draws of what they share"
        )


def _run(
    model: Program,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    coords: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    handler: AbstractContextManager[object],
) -> dict[str, Site]:
    with Recorder(Substitutes(_OfDraws(coords), values)) as recorder, handler:
        model(*args, **kwargs)
    nodes = recorder.trace.nodes.items()
    return {n: s for n, s in nodes if is_scored(s) or (s["type"] == "sample" and is_record(s))}


def _together(runs: list[dict[str, Site]], draws: PosteriorDraws) -> Predicted:
    found, first = Predicted(), runs[0]
    missing = [n for n in (*draws, *draws.observed) if n not in first]
    if missing:
        raise ValueError(
            f"the model has no site '{missing[0]}', which the draws have: pass the model that was "
            f"refined, with its arguments"
        )
    for name, site in first.items():
        values = [run[name]["value"] for run in runs if name in run]
        if len(values) < len(runs) or any(v.shape != values[0].shape for v in values):
            continue  # what comes and goes has no common shape
        found.dims[name] = site_dims(site)
        group = found.latents if name in draws else found.observed
        if is_record(site):
            group = found.deterministic
        elif name not in draws and name not in draws.observed:
            continue
        group[name] = torch.stack(values)
    return found
