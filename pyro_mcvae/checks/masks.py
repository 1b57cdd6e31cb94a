"""Latents that a mask takes out of the model, though the guide counts their density."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, is_messenger, run_model, with_changes
from pyro_mcvae.programs.messengers import SubstituteMessenger
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import inner_scale, is_latent, is_random, masked_entries
from pyro_mcvae.programs.terms import terms_of

__all__ = ["check_masks", "count_masked"]


class _Counted(Messenger):
    """Counts what the guide counts at some sites of a model, beside what the model does."""

    def __init__(self, masks: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._masks = masks

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self._masks:
            return
        here, there = masked_entries(msg), self._masks[msg["name"]]
        while isinstance(msg["fn"], MaskedDistribution):
            msg["fn"] = msg["fn"].base_dist
        msg["mask"] = None if here is None or there is None else here | there


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
    masks = {}
    for name, site in _latents(run).items():
        there = masked_entries(site)
        if _lost(run.model_trace.nodes[name], there) and _is_unread(programs, run, other, name):
            masks[name] = there
    return replace(programs, model=_Counted(masks)(programs.model)) if masks else programs


def check_masks(run: Run, points: frozenset[str]) -> None:
    """
    Check that weights are p / q: both programs count the same entries, the guide's in full.

    :param points: the guide's point masses, which have no density.
    :raises ValueError: naming a site that is scaled in the guide, or masked in one program only.
    """
    for term in run.terms:
        scale = inner_scale(term.site)
        random = term.in_guide and is_random(term.site)
        if random and bool(torch.as_tensor(scale != 1.0).any()):
            raise ValueError(
                f"site '{term.key.name}' of the guide is scaled by poutine.scale ({scale}), so "
                f"that its draws do not have the density that it reports: evaluate without the "
                f"scale"
            )
    for name, site in _latents(run).items():
        here, there = masked_entries(run.model_trace.nodes[name]), masked_entries(site)
        if name in points or _count_alike(here, there):
            continue
        if _lost(run.model_trace.nodes[name], there):
            raise ValueError(
                f"site '{name}' has entries that a mask takes out of the model and not of the "
                f"guide, though the model reads them: without a prior of theirs the evidence is "
                f"no probability of the data. Mask the observations alone, or put the same "
                f"poutine.mask around the site in both programs"
            )
        raise ValueError(
            f"site '{name}' has entries that a mask takes out of the guide and not of the model, "
            f"so that their densities do not cancel: put the same poutine.mask around the site in "
            f"the model and in the guide, or leave it out of the guide"
        )


def _latents(run: Run) -> dict[str, Any]:
    """The guide's sites that are latents of the model."""
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide and is_latent(t.site)}
    return {n: s for n, s in sites.items() if n in model and is_latent(model[n])}


def _lost(site: Any, counted: Tensor | None) -> bool:
    """Whether the model's site masks entries out that are ``counted`` in the guide."""
    here = masked_entries(site)
    if here is None:
        return False
    return bool((~here if counted is None else counted & ~here).any())


def _is_unread(programs: Programs, run: Run, other: Run, name: str) -> bool:
    """Whether nothing that the model counts changes with the entries that it masks out."""
    site = run.model_trace.nodes[name]
    old, new = (r.guide_trace.nodes.get(name, {}).get("value") for r in (run, other))
    if old is None or new is None or old.shape != new.shape:
        return False
    mask = masked_entries(site)
    assert mask is not None
    mask = mask.reshape(mask.shape + (1,) * site["fn"].event_dim)
    changed = with_changes(run.guide_trace, {name: {"value": torch.where(mask, old, new)}})
    again = run_model(programs, changed, SubstituteMessenger(Minibatch(run.subsamples)), None)
    expected = {t.key: t.log_prob for t in run.terms if not t.in_guide}
    found = {t.key: t.log_prob for t in terms_of(Trace(), again)}
    return expected.keys() == found.keys() and all(
        torch.equal(found[key], value) for key, value in expected.items()
    )


def _count_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two masks take out the same entries; None takes out none."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(given.all())
    a, b = torch.broadcast_tensors(a, b)
    return bool((a == b).all())
