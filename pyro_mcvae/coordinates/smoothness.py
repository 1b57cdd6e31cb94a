"""Find kinks of the log weight, where the gradient of a chain's moves is discontinuous."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_mcvae.chains.kernels import Kernel
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.smoothing import KinkFinder, Place, smoothed_gradients
from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.isolation import find_modules, isolated
from pyro_mcvae.programs.run import Programs, entered
from pyro_mcvae.structure.cache import Analyses

_logger = logging.getLogger(__name__)

_Kinks = dict[Place, tuple[float | None, ...]]

# The distance from the first draws within which jumps are searched: in steps of the chain, and the
# maximal step in noise coordinates.
_STEPS, _MOST = 3, 0.1
# The number of bisections, and the fraction of draws with jumps that is attributed to rounding.
_HALVINGS, _RARE = 12, 0.005

# Operations of an autograd graph whose derivative may jump.
_NONSMOOTH = re.compile(
    "(Relu|Abs|Clamp|Max|Min|Sort|Topk|Median|Mode|Kthvalue|Cummax|Cummin|Hard|Softshrink|Threshold"
    "|Prelu|Rrelu|Where|Sign|Sgn|Round|Floor|Ceil|Trunc|Fmod|Remainder|L1Loss|Norm|LinalgVectorNorm)"
    ".*"
)


# Operations without kinks, by their names in ATen. If there are no others, nothing is searched.
_SMOOTH_OPERATIONS = (
    # Views, copies and constants.
    "alias as_strided cat clone constant_pad_nd copy_ detach diagonal empty empty_like expand eye "
    "fill_ full full_like index lift_fresh new_empty new_full new_ones new_zeros ones ones_like "
    "permute repeat scalar_tensor select slice split split_with_sizes squeeze stack t _to_copy "
    "transpose tril triu unbind _unsafe_view unsqueeze view zeros zeros_like "
    # Elementwise; values are equal with probability 0.
    "add add_ cos digamma div div_ eq erf erfc exp expm1 gelu lgamma log log1p log_sigmoid_forward "
    "mul mul_ neg reciprocal rsub sigmoid silu sin softplus square sub sub_ tanh xlogy "
    # Sums and linear maps.
    "addmm baddbmm binary_cross_entropy_with_logits bmm convolution cumsum dot linalg_cholesky_ex "
    "_linalg_check_errors linalg_solve_triangular logsumexp _log_softmax mean mm mv "
    "native_layer_norm _softmax sum"
)

_JUMPS = (
    "the gradient of the log density jumps at %s, and autograd's second derivative omits the jumps"
)
_SMOOTHED = _JUMPS + (
    ". Chains move along a smoothed gradient there, for which bound and gradient are exact; the "
    "density is not changed. A smooth activation (nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh) has "
    "no jumps; TraceIWAE_ELBO does not differentiate twice"
)
_BIASED = _JUMPS + (
    ": the gradient of this objective is biased. Use a smooth operation (nn.GELU, nn.SiLU, "
    "nn.Softplus, nn.Tanh), or one that gradient_estimator='auto' smooths (torch.relu, abs, clamp, "
    "maximum), or TraceIWAE_ELBO, which does not differentiate twice"
)


class Smoothness:
    """
    Checks once per structure whether the gradients that move chains can be differentiated.

    A chain may move along any function of its position: its weights still have the evidence as
    expectation. So kinks of the programs, where :math:`\\nabla \\log p` jumps, are smoothed in the
    gradients that move chains, and nowhere else. The gradient of the bound is then exact.

    :param bool smooths: False to only warn.
    :param analyses: the cached analyses of the programs.
    """

    def __init__(self, smooths: bool, analyses: Analyses) -> None:
        self._smooths, self._analyses = smooths, analyses
        self._warn = WarnOnce(_logger)

    def widths(self, programs: Programs) -> _Kinks:
        """Return the widths of the kinks that were found in a model and guide."""
        analysis, key = self._analyses.of(programs), ("kinks",)
        return analysis.cached(key, lambda: dict(analysis.before(key) or {}))

    def check(self, log_weight: LogWeight, kernel: Kernel) -> bool:
        """
        Check a new structure.

        :param Kernel kernel: the kernel of the chain.
        :returns: whether it has kinks that ``log_weight`` was drawn without.
        """
        checked = log_weight.plan.checked
        return Smoothness not in checked and not is_recording() and self._check(log_weight, kernel)

    def _check(self, log_weight: LogWeight, kernel: Kernel) -> bool:
        log_weight.plan.checked.add(Smoothness)
        step = _length(kernel, log_weight)
        widths = self.widths(log_weight.programs)
        before = dict(widths)
        # If programs fail at positions outside the chain's range, no kinks are found.
        unvalidated = isolated(log_weight.programs.owners), pyro.validation_enabled(False)
        with suppress(ValueError, RuntimeError), entered(*unvalidated), torch.enable_grad():
            v = _STEPS * step * torch.randn_like(log_weight.coordinates)
            v = v if log_weight.movable is None else v * log_weight.movable.detach()
            if _may_jump(log_weight) and _jumps(log_weight, v):
                self._smooth(log_weight, widths, v)
        return widths != before

    def _smooth(self, log_weight: LogWeight, widths: _Kinks, v: Tensor) -> None:
        """Smooth the kinks, those in densities only if smoothing the others is not enough."""
        all_kinks = _find_kinks(log_weight, v)
        outside = {place: w for place, w in all_kinks.items() if not place.in_density}
        for kinks in filter(None, (outside, all_kinks)) if self._smooths else ():
            widths.update(kinks)
            if not _jumps(log_weight, v):
                self._warn_about(_SMOOTHED, _names(kinks, log_weight))
                return
        unexplained = not all_kinks or self._smooths
        names = (_nonsmooth_names if unexplained else _names)(all_kinks, log_weight)
        self._warn_about(_BIASED, names)

    def _warn_about(self, text: str, names: list[str]) -> None:
        self._warn(text % ", ".join(names))


@torch.no_grad()
def _length(kernel: Kernel, log_weight: LogWeight) -> Tensor:
    """Return the distance that noise alone moves a chain in one step."""
    value = kernel.step_size()
    step = value if kernel.step_size_power == 1 else (2.0 * value).sqrt()
    if step.dim() and step.shape[-1] != log_weight.coordinates.shape[-1]:
        step = step.log().mean().exp()  # a sequence of another length
    return step.clamp(max=_MOST) if log_weight.kind == "noise" else step


def _find_kinks(log_weight: LogWeight, v: Tensor) -> _Kinks:
    """Return the widths of the kinks that chains from the first draws may cross."""
    widths: _Kinks = {}
    for part in (-1, 0, 1):
        position = (log_weight.coordinates.detach() + part * v).requires_grad_()
        with KinkFinder() as finder:
            value = log_weight(position).log_weight
        widths = finder.widths(value, position) | widths
    return widths


class _Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        # Roots of squares are absolute values.
        is_square = name == "pow" and args[1] == 2 and not isinstance(args[1], Tensor)
        self.names.add("square" if is_square else name)
        return func(*args, **(kwargs or {}))


def _may_jump(log_weight: LogWeight) -> bool:
    """
    Return whether a log weight has operations that may have kinks.

    Reads of values, on which programs branch, are operations as well.
    """
    with _Operations() as operations:
        value = log_weight(log_weight.coordinates.detach().requires_grad_()).log_weight
    return not operations.names <= {*_SMOOTH_OPERATIONS.split()} or bool(_nonsmooth_nodes(value))


def _jumps(log_weight: LogWeight, v: Tensor) -> bool:
    """
    Return whether the gradient along moves v jumps anywhere on the segment.

    The segment is bisected repeatedly, towards the half over which the gradient changes more. Each
    bisection halves the change of a smooth gradient, even of a stiff one, while a jump keeps its
    size.
    """
    origin, changes = log_weight.coordinates.detach(), list[Tensor]()
    low, high = (torch.full(origin.shape[:-1], t, dtype=origin.dtype) for t in (-1.0, 1.0))
    low, high = low.to(origin), high.to(origin)

    def slope(at: Tensor) -> Tensor:
        position = (origin + at.unsqueeze(-1) * v).requires_grad_()
        with smoothed_gradients():
            return (_gradient(log_weight(position).log_weight, position) * v).sum(-1)

    first, last = slope(low), slope(high)
    size = first.abs() + last.abs()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        between = slope(middle)
        early = (between - first).abs() > (last - between).abs()
        low, first = torch.where(early, low, middle), torch.where(early, first, between)
        high, last = torch.where(early, middle, high), torch.where(early, between, last)
        size = torch.maximum(size, between.abs())
        changes.append((last - first).abs())
    # If the guide is the posterior, the gradient is a rounding error, relative to the gradient of
    # log q.
    position, eps = origin.clone().requires_grad_(), torch.finfo(origin.dtype).eps
    base = (_gradient(log_weight(position).log_base, position) * v).abs().sum(-1).mean()
    rounding = eps**0.35 * size + eps**0.75 * base
    persists = (changes[-1] > changes[-5] / 2) & (changes[-1] > rounding)
    return bool(persists.double().mean() > _RARE)


def _nonsmooth_names(smoothed: Iterable[Place], log_weight: LogWeight) -> list[str]:
    """Return the operations whose derivatives may jump, except smoothed ones."""
    value = log_weight(log_weight.coordinates.detach().requires_grad_()).log_weight
    smoothed_names = {place.name.replace("_", "") for place in smoothed}
    names = sorted(name for name in _nonsmooth_nodes(value) if name.lower() not in smoothed_names)
    return names or ["an operation of the programs"]


def _gradient(value: Tensor, position: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(position)
    (gradient,) = torch.autograd.grad(value.sum(), position, allow_unused=True)
    return torch.zeros_like(position) if gradient is None else gradient


def _nonsmooth_nodes(value: Tensor) -> set[str]:
    """Return the names of the operations of a graph whose derivatives may jump."""
    names, seen, pending = set[str](), set[object](), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [n for n, _ in node.next_functions]
        name = node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward")
        custom = hasattr(node, "_forward_cls") and name not in ("_Switch", "_Hinge")
        if custom or _NONSMOOTH.fullmatch(name):
            names.add(f"the autograd.Function {name}" if custom else name)
    return names


def _names(places: Iterable[Place], log_weight: LogWeight) -> list[str]:
    """Return the locations of kinks: ``nn.ReLU at Decoder.net.1``, or the line of the operation."""
    roots = find_modules(*log_weight.programs.pair)
    return [_name(place, roots) for place in places]


def _name(place: Place, roots: list[nn.Module]) -> str:
    if place.module is None:
        return f"{place.name} at {place.code.co_filename}:{place.line}"
    named = ((type(root).__name__, *pair) for root in roots for pair in root.named_modules())
    paths = [f" at {root}.{path}".rstrip(".") for root, path, m in named if m is place.module]
    return f"nn.{type(place.module).__name__}" + max(paths, key=len, default="")
