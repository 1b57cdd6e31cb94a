"""
Draws that have no density in the weight, and that a factor of the model reads all the same.

A mask takes entries of a latent out of the guide's density. Where no factor that counts depends on
them, they are padding, and the weight is right. Where one does, as in GPyTorch's Pyro programs,
the weight is p / q without the entries' own q: an ELBO given them, but no estimate of the evidence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.masks import counted_values
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.probing import probing
from pyro_mcvae.programs.run import Run, model_factors
from pyro_mcvae.programs.sites import bare, is_random, known_support
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.interventions import another, other_draws

__all__ = ["check_unweighed"]


def check_unweighed(programs: Programs, run: Run, weighs: Callable[[Site], bool]) -> None:
    """
    Check that no factor of the model reads what the guide draws without counting its density.

    The model runs again where these entries have other values and all other draws are the same:
    no entry of a log density may change.

    :param run: an execution of the programs, with any leading dims.
    :param weighs: whether a site of the guide is part of the weights. Others are averaged over.
    :raises ValueError: naming the latent, and the site of the model that reads it.
    """
    draws = (t.site for t in run.terms if t.in_guide and is_random(t.site))
    if all(counted_values(site) is None for site in draws):
        return
    nodes, _ = _model_at(programs, run, {})
    drawn = [s for s in nodes.values() if is_random(s)]
    values = {s["name"]: s["value"] for s in drawn}
    _, before = _model_at(programs, run, values)
    for site in filter(weighs, drawn):
        name, counted = site["name"], counted_values(site)
        if counted is None or bool(counted.all()):
            continue
        with other_draws():
            changed = torch.where(counted | _is_sure(site), site["value"], another(site))
        _, after = _model_at(programs, run, {**values, name: changed})
        for key in before.keys() | after.keys():
            if not _equal(before.get(key), after.get(key)):
                raise _read(name, key.name)


def _model_at(
    programs: Programs, run: Run, values: dict[str, Tensor]
) -> tuple[dict[str, Site], dict[FactorKey, Tensor]]:
    """The guide's sites, and the model's log densities, at values of some draws of the guide."""
    # Each run begins with the same random numbers, those that the model draws by itself too.
    with probing(programs), torch.no_grad():
        leading = Leading(state_dim=run.state_dim)
        substitutes = Substitutes(Minibatch(run.subsamples), values)
        guide_trace, model_trace = run_pair(programs, substitutes, leading)
        factors = model_factors(model_trace, run.state_dim)
    return dict(guide_trace.nodes), {t.key: t.log_prob for t in factors}


def _is_sure(site: Site) -> Tensor | bool:
    """Which entries have one value that the guide may draw, of which the density is one."""
    fn = bare(site["fn"])
    if isinstance(fn, torch.distributions.Categorical):
        return (fn.probs > 0).sum(-1) == 1
    try:
        sure = fn.variance == 0
    except NotImplementedError:
        return False
    for dim in range(-fn.event_dim, 0):
        sure = sure.all(dim, keepdim=True)
    return sure if known_support(site["fn"]).is_discrete else False


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _read(latent: str, reader: str) -> ValueError:
    return ValueError(
        f"a mask takes entries of site '{latent}' out of the guide's density, and site '{reader}' "
        f"of the model reads them: these draws have no density in the weight, so that it is no "
        f"estimate of the evidence, and bounds of it lie above. Use TraceSGVB_ELBO, which averages "
        f"log densities, or leave the mask out of the guide and of the model; a mask of padding is "
        f"right where no site that counts reads the padded entries"
    )
