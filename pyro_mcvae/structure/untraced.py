"""
Draws of a model that leave no trace, and the data that share one of them.

``ConjugateReparam`` draws a latent aside, from its guess of the posterior: each particle has a draw
of its own, though no guide knows of it. In the plates around the draw that is noise of each
element, as that of dropout is; but the elements of other plates depend on the same draw.
"""

from __future__ import annotations

import pyro
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.probing import ProgramError, probe, probing
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_delta, is_random, is_record
from pyro_mcvae.programs.types import Message, Site


class _Untraced(Messenger):
    """Notes the draws that leave no trace, with their plates."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: dict[str, frozenset[CondIndepStackFrame]] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["infer"].get("_do_not_trace") and is_random(msg):
            self.frames[msg["name"]] = plate_frames(msg)


def find_shared_noise(programs: Programs, run: Run) -> dict[FactorKey, frozenset[PlateKey]]:
    """
    For each factor that depends on an untraced draw, the plates of which elements share the draw.

    :param run: of the programs; without a computed value that is scored there is nothing to find.
    """
    if not any(_is_computed(t.site) for t in run.terms if not t.in_guide):
        return {}
    try:
        return programs.once(("noise", run.signature), lambda: _find(programs, run))
    except ProgramError:
        return {}


def _is_computed(site: Site) -> bool:
    return bool(site["is_observed"] and is_delta(site["fn"]) and not is_record(site))


def _find(programs: Programs, run: Run) -> dict[FactorKey, frozenset[PlateKey]]:
    with probing(programs), _Untraced() as noise:
        first = probe(programs, run.subsamples)
    if not noise.frames:
        return {}
    latents = {n: s["value"] for n, s in first.guide_trace.nodes.items() if is_random(s)}
    # The same latents and another stream of random numbers: the draws alone are others.
    with probing(programs):
        pyro.set_rng_seed(int(torch.randint(2**31, ())))  # normals of the old one are cached
        again = probe(programs, first.subsamples, latents)
    around: frozenset[CondIndepStackFrame] = frozenset.intersection(*noise.frames.values())
    before, after = first.log_probs, again.log_probs
    return {
        key: frozenset(plate_key(f) for f in plate_frames(first.terms[key].site) - around)
        for key, old in before.items()
        if key.program == "model" and key in after and not torch.equal(old, after[key])
    }
