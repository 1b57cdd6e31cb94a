"""A truncated posterior as a Pyro guide: its draws, in the places where the model has its sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.programs.plates import plate_frames
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.searched_sites import GuideDraws

_MARK = "_pyro_mcvae_states_of"

# Given draws of the other guide, the posterior of the discrete sites.
Ask = Callable[[GuideDraws], StatePosterior]


@contextmanager
def apart() -> Iterator[None]:
    """Hide runs from outer handlers, and outer plates, whose dim they may take, from runs."""
    # Pyro has no public way to free a dim for a while.
    allocator = poutine.runtime._DIM_ALLOCATOR
    stack, allocator._stack = allocator._stack, []
    try:
        with poutine.block():
            yield
    finally:
        allocator._stack = stack


def sample_states(ask: Ask, guide_trace: Trace, nesting: int) -> dict[str, Tensor]:
    """
    Draw a state of each datum, given the draws that ``guide`` has made for all to see.

    :param ask: answers with the truncated posterior given such draws.
    :param guide_trace: what ``guide`` has drawn, in whatever plates stand around it.
    :param nesting: how many batch dims are the programs' own.
    :returns: the values by site.
    """
    nodes = guide_trace.nodes
    made = [s for s in nodes.values() if s["type"] == "sample" and site_is_subsample(s)]
    chosen = {s["name"]: torch.as_tensor(s["value"]) for s in made}
    outer, draws = _per_particle(guide_trace, nesting)
    found = [ask(GuideDraws(values, chosen)) for values in draws]
    plates = _make_plates(found[0], frozenset(chosen))
    # Around this guide another minibatch may be set: that of the other particles of a step.
    before = found[0].runs.subsamples
    now = {n: plate.indices for n, plate in plates.items() if n in before}
    if any(not torch.equal(before[n].to(index), index) for n, index in now.items()):
        found = [ask(GuideDraws(values, {**chosen, **now})) for values in draws]
    layout = found[0].runs.layouts.layout
    weights = torch.stack([p._batch_weights for p in found])
    batch = weights.shape[1:-1]
    inner = (*(1,) * (nesting - len(batch)), *batch) if outer else batch
    with _entered(plates, [key.name for key in layout.plates]):
        index = pyro.sample(
            f"_{layout.name}_state",
            dist.Categorical(logits=weights.log().reshape(*outer, *inner, weights.shape[-1])),
            infer={"is_auxiliary": True, _MARK: tuple(layout.sites)},
        )
    values: dict[str, Tensor] = {}
    for name in layout.sites:
        site = found[0].particles.runs[0].model_trace.nodes[name]
        frames = sorted(plate_frames(site), key=lambda f: f.dim or 0)
        with _entered(plates, [f.name for f in frames]):
            value = found[0]._gather(name, index, leading=False)
            point = dist.Delta(value, event_dim=site["fn"].event_dim)
            values[name] = pyro.sample(name, point)
    return values


def drawn_from_states(site: Site) -> tuple[str, ...]:
    """The sites whose states a guide's site is the index of; nothing where it is no such index."""
    found: tuple[str, ...] = site["infer"].get(_MARK, ())
    return found


def _per_particle(
    guide_trace: Trace, nesting: int
) -> tuple[tuple[int, ...], list[dict[str, Tensor]]]:
    """
    The random draws of a guide, and of each element of the plates around it.

    :returns: the sizes of these plates' dims, and the draws of each of their elements.
    """
    sites = [s for s in guide_trace.nodes.values() if is_random(s)]
    shapes = {s["name"]: s["value"].shape for s in sites}
    cuts = {s["name"]: len(shapes[s["name"]]) - s["fn"].event_dim - nesting for s in sites}
    outer = torch.broadcast_shapes(*(shapes[n][: max(cut, 0)] for n, cut in cuts.items()))
    if not outer:
        return (), [{s["name"]: s["value"] for s in sites}]
    draws: list[dict[str, Tensor]] = [{} for _ in range(outer.numel())]
    for site in sites:
        name, own = site["name"], _own_shape(site, nesting)
        lead = shapes[name][: max(cuts[name], 0)]
        value = site["value"].reshape(*lead, *own).expand(*outer, *own)
        for one, part in zip(draws, value.reshape(-1, *own), strict=True):
            one[name] = part
    return tuple(outer), draws


def _own_shape(site: Site, nesting: int) -> torch.Size:
    """The shape of a draw that is made in the guide's own plates only."""
    value, fn = site["value"], site["fn"]
    depth = max((-f.dim for f in plate_frames(site) if f.dim and -f.dim <= nesting), default=0)
    batch = value.shape[: value.dim() - fn.event_dim][-nesting:] if nesting else torch.Size()
    # Outside of plates a draw has dims of size one, which the outer plates have put there.
    cut = len(batch) - depth
    keep = batch[cut:] if cut > 0 and all(n == 1 for n in batch[:cut]) else batch
    return keep + value.shape[value.dim() - fn.event_dim :]


def _make_plates(posterior: StatePosterior, known: frozenset[str]) -> dict[str, pyro.plate]:
    """The plates of the minibatch; those that the guide has made are not shown a second time."""
    nodes, subsamples = posterior.particles.runs[0].model_trace.nodes, posterior.runs.subsamples
    # One frame of each plate around the discrete sites, as they are in this minibatch.
    frames = {f.name: f for n in posterior.values for f in plate_frames(nodes[n])}
    made = {}
    for frame in frames.values():
        index, full = subsamples.get(frame.name), frame.full_size or frame.size
        with poutine.block() if frame.name in known else ExitStack():
            made[frame.name] = pyro.plate(frame.name, full, subsample=index, dim=frame.dim)
    return made


def _entered(plates: Mapping[str, pyro.plate], names: list[str]) -> ExitStack:
    stack = ExitStack()
    for name in names:
        stack.enter_context(plates[name])
    return stack
