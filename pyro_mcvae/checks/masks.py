"""Checks of masks, and of draws that a factor reads without a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from pyro import distributions as dist
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.enumeration import summed_terms
from pyro_mcvae.programs.messengers import Leading, Minibatch, Substitutes
from pyro_mcvae.programs.probing import Probe, probe, probing
from pyro_mcvae.programs.run import (
    Programs,
    Run,
    is_messenger,
    run_model,
    run_pair,
    terms_of,
    with_changes,
)
from pyro_mcvae.programs.sites import (
    bare,
    counted_values,
    hides_masks,
    inner_scale,
    is_flat,
    is_latent,
    is_random,
    is_scored,
    known_support,
    layers,
    with_mask,
)
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.independence import differing, other_draws, other_value

# Latents that a mask takes out of the model, though the guide counts their density.


class _Counted(Messenger):
    """Counts what the guide counts at some sites of a model, beside what the model does."""

    def __init__(self, counted: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._counted = counted

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] not in self._counted:
            return
        here, there = counted_values(msg), self._counted[msg["name"]]
        both = None if here is None or there is None else here | there
        fn = with_mask(msg["fn"], both)
        if fn is not None:
            msg["fn"], msg["mask"] = fn, None


def masks_latents(run: Run) -> bool:
    """Whether the model masks a latent."""
    sites = [t.site for term in run.terms if not term.in_guide for t in term.sites]
    return any(is_latent(site) and counted_values(site) is not None for site in sites)


def count_masked(programs: Programs, run: Run, other: Run) -> Programs:
    r"""
    The programs, with a model that counts the masked-out latents that the guide counts.

    Padded entries of an AutoGuide, or the entries of ``x_unobserved`` that are observed, have a
    density under the guide and none under the model, so that the weight's expectation is the
    infinite :math:`\int p(x, z)\, q(u) / q(u)\, du\, dz`. Where nothing that is counted reads
    :math:`u`, counting its prior as well leaves the evidence what it is,
    :math:`\int p(x, z)\, p(u \mid z)\, du\, dz = p(x)`, and makes the weight's expectation that.

    :param run: an execution of both programs.
    :param other: another one on the same minibatch, at independent draws.
    """
    if is_messenger(programs):
        return programs
    counted = {
        name: counted_values(site)
        for name, site in _lost_latents(run).items()
        if _is_unread(run, _redrawn(programs, run, other, name))
    }
    return replace(programs, model=_Counted(counted)(programs.model)) if counted else programs


def counted_by_guide_alone(programs: Programs, run: Run) -> list[str]:
    """
    Return the latents with entries that the guide counts, the model masks out, and nothing reads.

    Their entropy is added to every bound, and no prior limits it. See :func:`count_masked`.

    :param run: an execution of the programs, with any leading dims.
    """
    sites = run.model_trace.nodes.values()
    if is_messenger(programs) or not _lost_latents(run) or any(map(is_transported, sites)):
        return []
    with probing(programs), torch.no_grad():
        substitutes = Substitutes(Minibatch(run.subsamples))
        leading = Leading(state_dim=run.state_dim)
        first, other = (
            replace(run, guide_trace=g, model_trace=m, terms=terms_of(g, m, run.state_dim))
            for g, m in (run_pair(programs, substitutes, leading) for _ in range(2))
        )
        names = [*_lost_latents(first)]
        return [n for n in names if _is_unread(first, _redrawn(programs, first, other, n))]


def transported(programs: Programs, run: Run, other: Run) -> frozenset[str]:
    """
    The masked-out latents whose density is that of another variable, computed from them.

    ``NeuTraReparam`` draws the noise of a flow without a density of its own, and counts prior and
    Jacobian at observed point masses, whose values move with the noise.
    """
    return frozenset(
        name
        for name in _lost_latents(run)
        if _carries(run.model_trace, _redrawn(programs, run, other, name))
    )


def check_masks(run: Run, apart: frozenset[str]) -> None:
    """
    Check that weights are p / q: both programs count the same entries, the guide's in full.

    :param apart: sites whose densities do not meet: the guide's point masses, and
        :func:`transported` latents.
    :raises ValueError: naming a site that is scaled, masked in one program only,
        masked inside a transform, or auxiliary and masked by itself.
    """
    for term in (t for found in run.terms for t in found.sites):
        if is_latent(term.site):
            _check_site(term.site, term.key.program)
    _check_auxiliary(run)
    for name, site in _latents(run).items():
        model_site = run.model_trace.nodes[name]
        scale = inner_scale(model_site)
        if bool(torch.as_tensor(scale != 1.0).any()):
            raise ValueError(
                f"site '{name}' of the model is scaled by poutine.scale ({scale}), so that its "
                f"prior is no density and the evidence none of the data: evaluate without the scale"
            )
        if name in apart or _count_alike(counted_values(model_site), counted_values(site)):
            continue
        if is_flat(model_site["fn"]) and counted_values(site) is None:
            continue  # as ImproperUniform: its prior is in the factors that read it
        if _lost(model_site, site):
            raise ValueError(
                f"site '{name}' has entries that a mask takes out of the model and not of the "
                f"guide, though the model reads them: without a prior of theirs the evidence is "
                f"no probability of the data. Mask the observations alone, or put the same "
                f"poutine.mask around the site in both programs; or, where its prior is in other "
                f"factors, draw it from a distribution with .mask(False)"
            )
        raise ValueError(
            f"site '{name}' has entries that a mask takes out of the guide and not of the model, "
            f"so that their densities do not cancel: put the same poutine.mask around the site in "
            f"the model and in the guide, or leave it out of the guide"
        )


def _check_site(site: Site, program: str) -> None:
    scale = inner_scale(site)
    if program == "guide" and is_random(site) and bool(torch.as_tensor(scale != 1.0).any()):
        raise ValueError(
            f"site '{site['name']}' of the guide is scaled by poutine.scale ({scale}), so "
            f"that its draws do not have the density that it reports: evaluate without the "
            f"scale"
        )
    if hides_masks(site["fn"]):
        raise ValueError(
            f"site '{site['name']}' of the {program} has a mask inside of a "
            f"{type(site['fn']).__name__}, which takes out a part of its density alone: mask the "
            f"whole, as in {type(site['fn']).__name__}(...).mask(...)"
        )


def _check_auxiliary(run: Run) -> None:
    """Refuse to leave out the density of what latents follow from, where theirs is counted."""
    latents = _latents(run)
    if any(_masks_out(site) for site in latents.values()):
        return
    for term in run.terms:
        auxiliary = term.in_guide and is_random(term.site) and term.key.name not in latents
        if auxiliary and _masks_out(term.site):
            raise ValueError(
                f"a mask takes entries out of the guide's auxiliary site '{term.key.name}', whose "
                f"density is then missing from that of the latents which follow from it: leave "
                f"the mask out"
            )


def _masks_out(site: Site) -> bool:
    counted = counted_values(site)
    return counted is not None and not bool(counted.all())


def _latents(run: Run) -> dict[str, Site]:
    """The guide's sites that are latents of the model."""
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide and is_latent(t.site)}
    return {n: s for n, s in sites.items() if n in model and is_latent(model[n])}


def _lost_latents(run: Run) -> dict[str, Site]:
    """Those with entries that the model masks out and the guide counts."""
    model = run.model_trace.nodes
    return {n: s for n, s in _latents(run).items() if _lost(model[n], s)}


def _lost(model_site: Site, guide_site: Site) -> bool:
    here, there = counted_values(model_site), counted_values(guide_site)
    if here is None:
        return False
    return bool((~here if there is None else there & ~here).any())


def _redrawn(programs: Programs, run: Run, other: Run, name: str) -> Trace | None:
    """The model where the entries that it masks out are those of another draw, if they can be."""
    old, new = (r.guide_trace.nodes.get(name, {}).get("value") for r in (run, other))
    if old is None or new is None or old.shape != new.shape:
        return None
    counted = counted_values(run.model_trace.nodes[name])
    assert counted is not None
    changed = with_changes(run.guide_trace, {name: {"value": torch.where(counted, old, new)}})
    substitutes = Substitutes(Minibatch(run.subsamples))
    return run_model(programs, changed, substitutes, Leading(state_dim=run.state_dim))


def _is_unread(run: Run, redrawn: Trace | None) -> bool:
    """Whether nothing that the model counts has changed."""
    if redrawn is None:
        return False
    expected = {t.key: t.log_prob for t in run.terms if not t.in_guide}
    found = {t.key: t.log_prob for t in summed_terms(redrawn)}
    return expected.keys() == found.keys() and all(
        torch.equal(found[key], value) for key, value in expected.items()
    )


def is_transported(site: Site) -> bool:
    """Whether a site may be a latent that is computed from another: a point mass with a density."""
    if not is_scored(site) or not site["is_observed"]:
        return False
    points = [layer for layer in layers(site["fn"]) if isinstance(layer, dist.Delta)]
    return any(bool((torch.as_tensor(p.log_density) != 0).any()) for p in points)


def _carries(model_trace: Trace, redrawn: Trace | None) -> bool:
    """Whether a density has moved with the value that it is of: data do not move."""
    nodes = {} if redrawn is None else redrawn.nodes
    return any(
        is_transported(site) and n in nodes and not torch.equal(site["value"], nodes[n]["value"])
        for n, site in model_trace.nodes.items()
    )


def _count_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two masks take out the same entries; None takes out none."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(given.all())
    a, b = torch.broadcast_tensors(a, b)
    return bool((a == b).all())


# Draws that have no density in the weight, and that a factor of the model reads all the same.


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
            changed = torch.where(counted | _is_sure(site), site["value"], other_value(site))
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
