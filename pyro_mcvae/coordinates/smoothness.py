"""Whether the gradient that moves a chain can be differentiated: it jumps at kinks of programs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.ops.smoothing import KinkFinder, Place, Widths, drifting
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.structure.cache import PairCache

__all__ = ["Smoothness"]

_logger = logging.getLogger(__name__)

# Of the change of a gradient what may be missing, and parts of a step over which, in how many
# directions: few in the first place, since smooth programs go no further.
_SMALL = 0.05
_MOVES = {1.0: 2, 0.1: 16, 0.03: 32}
_MOST = 0.1
# How many steps away kinks are looked for.
_REACH = 0, 1, 3

# Operations of an autograd graph whose derivative may jump, beside those that are smoothed.
_ROUGH = re.compile(
    "(Relu|Abs|Clamp|Max|Min|Sort|Topk|Median|Mode|Kthvalue|Cummax|Cummin|Hard|Softshrink|Threshold"
    "|Prelu|Rrelu|Where|Sign|Sgn|Round|Floor|Ceil|Trunc|Fmod|Remainder|L1Loss|Norm|LinalgVectorNorm)"
    ".*"
)


_JUMPS = (
    "the gradient of the log density jumps at %s, and autograd's second derivative leaves the "
    "jumps out"
)
_SMOOTHED = _JUMPS + (
    ". Chains move along a gradient that is smoothed there, for which bound and gradient are "
    "exact; the density stays as it is. A smooth activation (nn.GELU, nn.SiLU, nn.Softplus, "
    "nn.Tanh) has no jumps; TraceIWAE_ELBO does not differentiate twice"
)
_BIASED = _JUMPS + (
    ": the gradient of this objective is biased. Use a smooth operation (nn.GELU, nn.SiLU, "
    "nn.Softplus, nn.Tanh), or one that gradient_estimator='auto' smooths (torch.relu, abs, clamp, "
    "maximum), or TraceIWAE_ELBO, which does not differentiate twice"
)


class Smoothness:
    """
    Whether the gradients that move chains may be differentiated, found out once for each structure.

    A chain may move along any function of its position: the evidence stays the expectation of its
    weights. So kinks of the programs, at which :math:`\\nabla \\log p` jumps, are smoothed in the
    gradients that move chains, and nowhere else. The bound's own gradient is then exact.

    :param bool smooths: False to warn only.
    """

    def __init__(self, smooths: bool) -> None:
        self._smooths = smooths
        self._widths: PairCache[dict[Place, tuple[float | None, ...]]] = PairCache(dict)
        self._warn = WarnOnce(_logger)

    def widths(self, programs: Programs) -> Widths:
        """The widths of the kinks that were found in a pair of programs."""
        return self._widths.of(programs)

    def look(self, log_weight: LogWeight, step: Tensor) -> bool:
        """
        Look at a structure that was not looked at.

        :param step: how far a chain moves at once, a scalar or one per coordinate.
        :returns: whether kinks were found that ``log_weight`` was drawn without.
        """
        looked = log_weight.plan.looked
        if Smoothness in looked or is_recording():
            return False
        looked.add(Smoothness)
        if log_weight.kind == "noise":
            step = step.clamp(max=_MOST)  # which sees as much, and takes a narrow peak for no kink
        known, found = self._widths.of(log_weight.programs), _find_kinks(log_weight, step)
        changed = self._smooths and any(known.get(p) != w for p, w in found.items())
        if found:
            text = _SMOOTHED if self._smooths else _BIASED
            self._warn(text % ", ".join(_names(found, log_weight)))
        if self._smooths:
            known.update(found)
        if self._smooths or not found:
            rough = _find_jumps(log_weight, step)
            if rough:
                self._warn(_BIASED % ", ".join(rough))
        return changed


def _find_kinks(log_weight: LogWeight, step: Tensor) -> Widths:
    """The widths of the kinks that the first draws, and chains from there, may cross."""
    widths = dict[Place, tuple[float | None, ...]]()
    with isolated(), torch.enable_grad():
        for length in _REACH:
            home = log_weight.coordinates.detach()
            position = (home + length * _move(log_weight, step)).requires_grad_()
            with KinkFinder() as finder:
                value = log_weight(position).log_weight
            widths = finder.widths(value, position) | widths
    return widths


def _move(log_weight: LogWeight, step: Tensor) -> Tensor:
    """A random move of one step."""
    v = step * torch.randn_like(log_weight.coordinates)
    return v if log_weight.movable is None else v * log_weight.movable.detach()


def _find_jumps(log_weight: LogWeight, step: Tensor) -> list[str]:
    r"""
    The operations at which the gradient of a log weight may jump; none if it does not.

    :param step: how far a chain moves at once, a scalar or one per coordinate.
    """
    with isolated(), torch.enable_grad():
        try:
            # Of a smooth density, however stiff, less is missing from a shorter move.
            for part, directions in _MOVES.items():
                if _missing(log_weight, part * step, directions) < _SMALL:
                    return []
        except RuntimeError:
            return []  # cannot be differentiated twice, which the step itself will say
        value = log_weight(log_weight.coordinates.detach().requires_grad_()).log_weight
    return sorted(_rough_nodes(value)) or ["an operation of the programs"]


def _missing(log_weight: LogWeight, step: Tensor, directions: int) -> float:
    r"""
    What the derivative H of a gradient g leaves out of its change.

    .. math::
        \frac{E |\delta|}{E |v \cdot (g(z + v) - g(z - v))| + E |v|^2}, \qquad
        \delta = v \cdot (g(z + v) - g(z - v))
            - \tfrac{1}{3} v^\top (H(z - v) + 4 H(z) + H(z + v)) v,

    over moves v of one step: by Simpson's rule :math:`\delta` is of fifth order in v for smooth g.
    Jumps add what does not depend on the length of v.
    """
    home = log_weight.coordinates.detach()
    lost, change = home.new_zeros(()), home.new_zeros(())
    for _ in range(directions):
        v = _move(log_weight, step)
        found = [_along(log_weight, home + t * v, v) for t in (-1, 0, 1)]
        (slope, a), (_, b), (other, c) = found
        delta = other - slope - (a + 4 * b + c) / 3
        usable = delta.isfinite()
        lost = lost + torch.where(usable, delta, 0.0).abs().sum()
        size = (other - slope).abs() + v.square().sum(-1)
        change = change + torch.where(usable, size, 0.0).sum()
    return float(lost / change) if bool(change > 0) else 0.0


def _along(log_weight: LogWeight, position: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of the log weight along a move, per datum, and the slope of that."""
    position = position.requires_grad_()
    with drifting():
        slope = (_gradient(log_weight(position).log_weight, position, True) * v).sum(-1)
    return slope.detach(), (_gradient(slope, position, False) * v).sum(-1)


def _gradient(value: Tensor, position: Tensor, create_graph: bool) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(position)
    found = torch.autograd.grad(value.sum(), position, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(position) if found[0] is None else found[0]


def _rough_nodes(value: Tensor) -> set[str]:
    """The names of the operations of a graph whose derivatives may jump."""
    found, seen, left = set[str](), set[object](), [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [n for n, _ in node.next_functions]
        name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
        own = hasattr(node, "_forward_cls") and name != "_Switch"
        if own or _ROUGH.fullmatch(name):
            found.add(f"the autograd.Function {name}" if own else name)
    return found


def _names(places: Iterable[Place], log_weight: LogWeight) -> list[str]:
    """Kinks as a user finds them: ``nn.ReLU at decoder.1``, or the line of the operation."""
    roots = find_modules(*log_weight.programs.pair)
    return [_name(place, roots) for place in places]


def _name(place: Place, roots: list[nn.Module]) -> str:
    if place.module is None:
        return f"{place.name} at {place.code.co_filename}:{place.line}"
    paths = [
        f"{type(root).__name__}.{name}".rstrip(".")
        for root in roots
        for name, part in root.named_modules()
        if part is place.module
    ]
    # The longest path begins where the user's own names do.
    return " at ".join([f"nn.{type(place.module).__name__}", *sorted(paths, key=len)[-1:]])
