"""Find kinks of the log weight, where the gradient of a chain's moves is discontinuous."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import CodeType, FunctionType

import pyro
from torch import distributions, nn

from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.smoothing import KinkFinder, Place
from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.isolation import find_modules
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure.cache import Analyses
from pyro_mcvae.structure.marked import MarkedRunError, marked

_logger = logging.getLogger(__name__)

_Kinks = dict[Place, tuple[float | None, ...]]

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
_SOUGHT = ("kinks sought",)


def _codes(*owners: object) -> frozenset[CodeType]:
    functions = (f for owner in owners for f in vars(owner).values())
    return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))


# Densities whose kinks cancel: those of max(x, 0) and log(1 + exp(-|x|)), for example.
CANCELLING = _codes(
    *(distributions.binomial, distributions.Binomial, distributions.ContinuousBernoulli),
    *(pyro.distributions.torch, pyro.distributions.Binomial),
)


class Smoothness:
    """
    Finds the kinks of the programs, where :math:`\\nabla \\log p` jumps, in the steps themselves.

    A chain may move along any function of its position: its weights still have the evidence as
    expectation. So kinks that the draws of a step lie on both sides of are smoothed in the
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

    def finder(self, programs: Programs) -> KinkFinder | None:
        """Return what sees the kinks of this step; None if no fresh analysis is due."""
        if is_recording() or self._analyses.of(programs).get(_SOUGHT):
            return None
        return KinkFinder(CANCELLING)

    def add(self, log_weight: LogWeight, finder: KinkFinder) -> bool:
        """
        Add the kinks that a finder has seen.

        :returns: whether there are some that ``log_weight`` was drawn without.
        """
        programs = log_weight.programs
        widths, analysis = self.widths(programs), self._analyses.of(programs)
        new = {place: w for place, w in finder.widths().items() if place not in widths}
        if not analysis.get(_SOUGHT):
            analysis.put(_SOUGHT, True)
            rough = _corners(log_weight)
            if rough or (new and not self._smooths):
                self._warn(_BIASED % ", ".join([*_names(new, log_weight), *rough]))
        if not (new and self._smooths):
            return False
        self._warn(_SMOOTHED % ", ".join(_names(new, log_weight)))
        widths.update(new)
        return True


def _corners(log_weight: LogWeight) -> list[str]:
    """Return the operations that cannot be smoothed."""
    try:
        corners = marked(log_weight.programs, log_weight.first.sample.runs[0]).corners
    except MarkedRunError:
        return ["an operation of the programs, which fail when they run again at the same draws"]
    return sorted({f"{corner.operator} at {corner.line}" for corner in corners})


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
