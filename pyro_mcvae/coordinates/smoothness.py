"""Find kinks in the log weight, at which the gradient of a chain's moves jumps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress

import pyro
import torch
from torch import Tensor, nn

from pyro_mcvae.chains.kernels import Kernel
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.smoothing import KinkFinder, Place, drifting
from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.isolation import find_modules, isolated
from pyro_mcvae.programs.run import Programs, entered
from pyro_mcvae.structure.cache import Analyses

_logger = logging.getLogger(__name__)

_Kinks = dict[Place, tuple[float | None, ...]]

# How far from the first draws jumps are looked for: in steps of the chain, and at most, which sees
# as much of noise.
_STEPS, _MOST = 3, 0.1
# How often the way is halved, and of how many draws none is taken for rounding.
_HALVINGS, _RARE = 12, 0.005

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
    :param analyses: what is known of the programs.
    """

    def __init__(self, smooths: bool, analyses: Analyses) -> None:
        self._smooths, self._analyses = smooths, analyses
        self._warn = WarnOnce(_logger)

    def widths(self, programs: Programs) -> _Kinks:
        """Return the widths of the kinks that were found in a model and guide."""
        analysis, key = self._analyses.of(programs), ("kinks",)
        return analysis.once(key, lambda: dict(analysis.before(key) or {}))

    def look(self, log_weight: LogWeight, kernel: Kernel) -> bool:
        """
        Look at a structure that was not looked at.

        :param Kernel kernel: moves the chain.
        :returns: whether kinks were found that ``log_weight`` was drawn without.
        """
        looked = log_weight.plan.looked
        return Smoothness not in looked and not is_recording() and self._look(log_weight, kernel)

    def _look(self, log_weight: LogWeight, kernel: Kernel) -> bool:
        log_weight.plan.looked.add(Smoothness)
        step = _length(kernel, log_weight)
        known = self.widths(log_weight.programs)
        before = dict(known)
        # Programs may fail at positions to which no chain goes: then nothing is found.
        unvalidated = isolated(log_weight.programs.owners), pyro.validation_enabled(False)
        with suppress(ValueError, RuntimeError), entered(*unvalidated), torch.enable_grad():
            v = _STEPS * step * torch.randn_like(log_weight.coordinates)
            v = v if log_weight.movable is None else v * log_weight.movable.detach()
            if _jumps(log_weight, v):
                self._smooth(log_weight, known, v)
        return known != before

    def _smooth(self, log_weight: LogWeight, known: _Kinks, v: Tensor) -> None:
        """Smooth the kinks, those in densities only if others are not to blame."""
        found = _find_kinks(log_weight, v)
        own = {place: w for place, w in found.items() if not place.in_density}
        for kinks in filter(None, (own, found)) if self._smooths else ():
            known.update(kinks)
            if not _jumps(log_weight, v):
                self._tell(_SMOOTHED, _names(kinks, log_weight))
                return
        rough = not found or self._smooths
        self._tell(_BIASED, _rough_names(log_weight, found) if rough else _names(found, log_weight))

    def _tell(self, text: str, names: list[str]) -> None:
        self._warn(text % ", ".join(names))


@torch.no_grad()
def _length(kernel: Kernel, log_weight: LogWeight) -> Tensor:
    """How far noise alone moves a chain at once."""
    value = kernel.step_size()
    step = value if kernel.step_size_power == 1 else (2.0 * value).sqrt()
    if step.dim() and step.shape[-1] != log_weight.coordinates.shape[-1]:
        step = step.log().mean().exp()  # a sequence of another length
    return step.clamp(max=_MOST) if log_weight.kind == "noise" else step


def _find_kinks(log_weight: LogWeight, v: Tensor) -> _Kinks:
    """The widths of the kinks that chains from the first draws may cross."""
    widths: _Kinks = {}
    for part in (-1, 0, 1):
        position = (log_weight.coordinates.detach() + part * v).requires_grad_()
        with KinkFinder() as finder:
            value = log_weight(position).log_weight
        widths = finder.widths(value, position) | widths
    return widths


def _jumps(log_weight: LogWeight, v: Tensor) -> bool:
    """
    Whether the gradient along moves v jumps anywhere on the way.

    The way is halved again and again, towards the half over which the gradient changes more. What
    is left of a smooth gradient's change is halved too, however stiff it is; a jump stays.
    """
    home, changes = log_weight.coordinates.detach(), list[Tensor]()
    low, high = (torch.full(home.shape[:-1], t, dtype=home.dtype) for t in (-1.0, 1.0))
    low, high = low.to(home), high.to(home)

    def slope(at: Tensor) -> Tensor:
        position = (home + at.unsqueeze(-1) * v).requires_grad_()
        with drifting():
            return (_gradient(log_weight(position).log_weight, position) * v).sum(-1)

    first, last = slope(low), slope(high)
    size = first.abs() + last.abs()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        between = slope(middle)
        left = (between - first).abs() > (last - between).abs()
        low, first = torch.where(left, low, middle), torch.where(left, first, between)
        high, last = torch.where(left, middle, high), torch.where(left, between, last)
        size = torch.maximum(size, between.abs())
        changes.append((last - first).abs())
    # A guide that is the posterior has a gradient of rounding alone, as large as that of log q.
    position, eps = home.clone().requires_grad_(), torch.finfo(home.dtype).eps
    base = (_gradient(log_weight(position).log_base, position) * v).abs().sum(-1).mean()
    rounding = eps**0.35 * size + eps**0.75 * base
    stays = (changes[-1] > changes[-5] / 2) & (changes[-1] > rounding)
    return bool(stays.double().mean() > _RARE)


def _rough_names(log_weight: LogWeight, smoothed: Iterable[Place]) -> list[str]:
    """The operations whose derivatives may jump, but for those that are smoothed."""
    value = log_weight(log_weight.coordinates.detach().requires_grad_()).log_weight
    known = {place.name.replace("_", "") for place in smoothed}
    names = sorted(name for name in _rough_nodes(value) if name.lower() not in known)
    return names or ["an operation of the programs"]


def _gradient(value: Tensor, position: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(position)
    (found,) = torch.autograd.grad(value.sum(), position, allow_unused=True)
    return torch.zeros_like(position) if found is None else found


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
        own = hasattr(node, "_forward_cls") and name not in ("_Switch", "_Hinge")
        if own or _ROUGH.fullmatch(name):
            found.add(f"the autograd.Function {name}" if own else name)
    return found


def _names(places: Iterable[Place], log_weight: LogWeight) -> list[str]:
    """Kinks as a user finds them: ``nn.ReLU at Decoder.net.1``, or the line of the operation."""
    roots = find_modules(*log_weight.programs.pair)
    return [_name(place, roots) for place in places]


def _name(place: Place, roots: list[nn.Module]) -> str:
    if place.module is None:
        return f"{place.name} at {place.code.co_filename}:{place.line}"
    named = ((type(root).__name__, *pair) for root in roots for pair in root.named_modules())
    paths = [f" at {root}.{path}".rstrip(".") for root, path, m in named if m is place.module]
    return f"nn.{type(place.module).__name__}" + max(paths, key=len, default="")
