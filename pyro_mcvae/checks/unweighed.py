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

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.masks import counted_values
from pyro_mcvae.programs.probing import Probe, probe, probing
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import bare, is_random, known_support
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.interventions import another, differing, other_draws


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
    leading = Leading(state_dim=run.state_dim)

    def at(values: dict[str, Tensor]) -> Probe:
        # Each run begins with the same random numbers, those that the model draws by itself too.
        with probing(programs), torch.no_grad():
            return probe(programs, run.subsamples, values, leading=leading)

    drawn = [s for s in at({}).guide_trace.nodes.values() if is_random(s)]
    values = {s["name"]: s["value"] for s in drawn}
    before = at(values).log_probs
    for site in filter(weighs, drawn):
        name, counted = site["name"], counted_values(site)
        if counted is None or bool(counted.all()):
            continue
        with other_draws():
            changed = torch.where(counted | _is_sure(site), site["value"], another(site))
        after = at({**values, name: changed}).log_probs
        for key in (k for k in {**before, **after} if k.program == "model"):
            known = key in before and key in after
            if not known or bool(differing(before[key], after[key], undefined=False).any()):
                raise _read(name, key.name)


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


def _read(latent: str, reader: str) -> ValueError:
    return ValueError(
        f"a mask takes entries of site '{latent}' out of the guide's density, and site '{reader}' "
        f"of the model reads them: these draws have no density in the weight, so that it is no "
        f"estimate of the evidence, and bounds of it lie above. Use TraceSGVB_ELBO, which averages "
        f"log densities, or leave the mask out of the guide and of the model; a mask of padding is "
        f"right where no site that counts reads the padded entries"
    )
