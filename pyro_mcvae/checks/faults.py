"""Checks of single structures: angles, collapsed models, flows, scales, copied parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.transforms import BatchNorm, Sylvester
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn
from torch.distributions import TransformedDistribution, VonMises, constraints

from pyro_mcvae.programs.distributions import parts_of, transforms_of
from pyro_mcvae.programs.isolation import find_modules
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import (
    bare,
    inner_scale,
    is_delta,
    is_latent,
    is_random,
    known_support,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Distribution, Program, Site, Transform, plate_frames
from pyro_mcvae.structure.blocks import Structure

# Angles of a model that a guide draws on the whole line: each is there once for each turn.

_CIRCULAR = (VonMises, dist.SineBivariateVonMises, dist.SineSkewed)


def is_circular(fn: Distribution) -> bool:
    """Whether draws are angles: the density is one on the circle, and repeats on the line."""
    while not isinstance(fn, _CIRCULAR):
        base = getattr(fn, "base_dist", None)
        if base is None or isinstance(fn, TransformedDistribution):
            return False
        fn = base
    return True


def unwound(run: Run) -> list[str]:
    """
    What is wrong with the angles of a model that its guide draws on the line, for each of them.

    There the density does not end: the integral that a bound is one of is infinite.
    """
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide}
    # Point masses are an AutoGuide's, of draws, or alone, and then have no density.
    drawn = any(is_random(site) and name not in model for name, site in sites.items())
    found = []
    for name, site in sites.items():
        own = model.get(name)
        angle = own is not None and is_latent(site) and is_latent(own) and is_circular(own["fn"])
        if angle and _is_on_line(site, drawn):
            kind = type(bare(model[name]["fn"])).__name__
            found.append(
                f"site '{name}' of the model is an angle ({kind}), whose density repeats itself at "
                f"every turn, and the guide draws it on the whole line: bounds and evidences count "
                f"every turn, and have no limit. Draw it from dist.VonMises, or within [-pi, pi)"
            )
    return found


def check_angles(run: Run) -> None:
    """
    :raises ValueError: naming an angle that the guide draws on the line.
    """
    for why in unwound(run):
        raise ValueError(why)


def _is_on_line(site: Site, drawn: bool) -> bool:
    fn = site["fn"]
    if is_circular(fn):
        return False
    if is_delta(fn):
        return drawn
    if bool((site["value"].abs() > math.pi + 1e-6).any()):
        return True
    support = known_support(fn)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    # PyTorch has the whole line for a scaled Beta, too.
    return support is constraints.real and not isinstance(bare(fn), TransformedDistribution)


# Whether latents are collapsed: the data see the guide's parameters, and no draw.


def check_not_collapsed(structure: Structure) -> None:
    """
    Check that the draws may be weighed.

    :raises ValueError: naming the site that has the guide's parameters in place of its draws.
    """
    if structure.collapsed is not None and structure.blocks:
        latent, data = structure.collapsed
        raise ValueError(
            f"site '{data}' of the model has the parameters of the guide's site '{latent}' in it "
            f"and not its draws, as where the latent is integrated in closed form (VariationalGP, "
            f"VariationalSparseGP). Weights of such draws are no bound on the evidence: use "
            f"TraceSGVB_ELBO, or a model that reads its latent, as in x = f({latent})"
        )


# Flows whose density is not that of their draws.


def check_flows(run: Run) -> None:
    r"""
    Refuse flows of which Pyro's log determinant is not that of the map that draws.

    The map of ``Sylvester`` is :math:`y = x + \tanh(x S Q^\top + b) Q R`, and its log determinant
    that of :math:`Q R^\top` and :math:`S^\top Q^\top` in their place (van den Berg et al. 2018):
    with standard normal weights in five dims they are up to one nat apart, with larger ones up to
    five, where the map is not one to one any more. ``BatchNorm`` in training mode draws with its
    moving variance, and counts that of the batch.

    :raises ValueError: naming the site.
    """
    for term in run.terms:
        for transform in transforms_of(term.site["fn"]):
            for part in parts_of(transform):
                if (why := _fault(part, term)) is not None:
                    raise ValueError(f"site '{term.key.name}' of the {term.key.program} {why}")


def _fault(part: Transform, term: Term) -> str | None:
    if isinstance(part, Sylvester) and part.input_dim > 1:
        return (
            f"is a flow with Sylvester({part.input_dim}), of which Pyro's log determinant is not "
            f"that of its map, so that no bound holds: use planar, affine_autoregressive or "
            f"spline_coupling of pyro.distributions.transforms"
        )
    if isinstance(part, BatchNorm) and part.training and term.in_guide:
        return (
            f"is a flow with BatchNorm({part.input_dim}) in training mode, which draws with its "
            f"moving variance and has the density of the batch's: call eval() on it, or leave it "
            f"out of the guide"
        )
    return None


# Latents whose log densities the user scales inside the weights, as a beta-VAE does.


class Scales(NamedTuple):
    """The user's scale of a latent in each program, 1 where the program has no such site."""

    model: float = 1.0
    guide: float = 1.0


def scaled_latents(terms: Iterable[Term]) -> dict[str, Scales]:
    """Return the scales of the guide's latents that have another one than 1, by name."""
    sites = [(t.key, t.site) for term in terms for t in term.sites if is_latent(t.site)]
    drawn = {key.name for key, _ in sites if key.program == "guide"}
    found: dict[str, Scales] = {}
    for key, site in sites:
        if key.name in drawn and (key.program == "model" or is_random(site)):
            own = {key.program: _largest(inner_scale(site))}
            found[key.name] = found.get(key.name, Scales())._replace(**own)
    return {name: scales for name, scales in found.items() if scales != Scales()}


def refuse_large_scales(terms: list[Term], objective: str, reads: bool) -> None:
    """
    Refuse chains towards a density that has no integral.

    A scale around everything tempers p(x, z) as well, and is left alone.

    :param bool reads: whether the entries of tensors may be read.
    :raises ValueError: naming a latent that the guide scales by more than 1.
    """
    known = (t for t in terms if reads or not isinstance(t.site["scale"], Tensor))
    for name, scales in scaled_latents(known).items():
        if scales.guide > 1 and common_scale(terms) is None:
            raise ValueError(
                f"site '{name}' is scaled by poutine.scale ({scales.guide:g} in the guide, "
                f"{scales.model:g} in the model), and {objective} moves latents along p / q: its "
                f"chains run away, because q to the power {1 - scales.guide:g} grows without end. "
                f"Use TraceSGVB_ELBO, which has the objective of a beta-VAE, or scale the "
                f"observations by 1 / beta instead of the latents by beta"
            )


def common_scale(terms: Iterable[Term]) -> float | None:
    """Return the user's own scale of all sites in plates, if it is one, and another than 1."""
    scales = {inner_scale(t.site) for t in terms if plate_frames(t.site)}
    scale = scales.pop() if len(scales) == 1 else None
    return scale if isinstance(scale, float) and scale != 1.0 else None


def _largest(scale: float | Tensor) -> float:
    """The scale that is furthest above 1, or else furthest below."""
    if not isinstance(scale, Tensor):
        return float(scale)
    low, high = torch.aminmax(scale.detach())
    return float(high if high > 1 else low)


# Parameters that Pyro trains beside their module: refused, for the module would never change.

# What stands between a module's name and its parameter's in the names of `pyro.module`.
_DIVIDER = "$$$"
_CONTIGUOUS = (
    "its memory is not contiguous (channels last, say), and Pyro's store keeps a contiguous copy: "
    "leave the module's parameters contiguous, and change the memory format of inputs, or of the "
    "weights within forward"
)
_KNOWN = (
    "the store had one of this name, loaded or of another module: pass update_module_params=True "
    "to pyro.module, or call pyro.clear_param_store() before. If model and guide are PyroModules "
    "with parts of one name, give these different names, such as decoder and encoder; or train by "
    "elbo(model, guide) and an optimizer of PyTorch instead of SVI, which does not run with "
    "pyro.settings.set(module_local_params=True)"
)


def collects_parameters() -> bool:
    """Whether a caller trains what Pyro's store holds, as SVI does, and not a module's own."""
    return any(map(is_param_tracer, _PYRO_STACK))


def refuse_copied_parameters(programs: Programs, run: Run) -> None:
    """
    Refuse to train copies of parameters that a module registered by ``pyro.module`` does not read.

    :raises ValueError: naming such a parameter.
    """
    copied = {
        id(given): (name, given)
        for trace in (run.guide_trace, run.model_trace)
        for name, site in trace.nodes.items()
        if site["type"] == "param" and (given := _copied(name, site)) is not None
    }
    if not copied:
        return
    for module in find_modules(*programs.pair):
        for parameter in module.parameters():
            if id(parameter) in copied:
                name, given = copied[id(parameter)]
                raise ValueError(
                    f"parameter '{name}' of Pyro's store is a copy, of shape "
                    f"{tuple(given.shape)}, that its module does not read, so that training would "
                    f"leave the module as it is: {_KNOWN if given.is_contiguous() else _CONTIGUOUS}"
                )


def _copied(name: str, site: Site) -> Tensor | None:
    """What a module offered to the store, if the store has another tensor."""
    given = [*site["args"][1:2], site["kwargs"].get("init_tensor")][0]
    if _DIVIDER not in name or not isinstance(given, Tensor):
        return None
    return None if given._cdata == site["value"]._cdata else given


# A guide that never ran has learned nothing: evaluation refuses it where it begins.

_logger = logging.getLogger(__name__)


@contextmanager
def untrained_guide(guide: Program) -> Iterator[Callable[[Trace], None]]:
    """
    Around the first run of a guide that is evaluated; an error leaves its modules as they were.

    Parameters of modules that were there before are those of a trained module, or of a loaded one,
    whether or not Pyro's store knows them. Those that an AutoGuide makes at its first call have
    initial values that nobody chose, unless the store has saved ones: they are refused. Those of
    ``pyro.param(name, init)`` have values that the program says, which may be meant: they are
    logged.

    :returns: a check of the run's trace.
    :raises ValueError: naming the parameters of modules that the run made.
    """
    known = frozenset(pyro.get_param_store().keys())
    modules = [m for root in find_modules(guide) for m in root.modules()]
    before = [(m, _copy(vars(m))) for m in modules]
    parameters = {id(p) for m in modules for p in m.parameters(False)}
    unset = [m for m in modules if _is_unset(m)]

    def check(guide_trace: Trace) -> None:
        held = dict(pyro.get_param_store().named_parameters())
        new, sites = [n for n in pyro.get_param_store() if n not in known], guide_trace.nodes
        born = {id(p) for m in modules for p in m.parameters()} - parameters
        names = [n for n in new if id(held[n]) in born]
        if pyro.settings.get("module_local_params"):
            # The store knows of no module then, and no saved parameters wait there.
            set_up = [m for m in unset if not _is_unset(m)]
            names += [f"{type(m).__name__}.{n}" for m in set_up for n, _ in m.named_parameters()]
        if names:
            raise ValueError(
                f"{_name(guide)} never ran: its parameters ({_some(names)}) would be made by this "
                f"evaluation, and their initial values judged. Train it first, or load its "
                f"parameters (into Pyro's store, or into the guide after a first call of it); call "
                f"guide(*args) once, if its initial values are what you want to judge"
            )
        begun = [n for n in new if n in sites and _begins(sites[n])]
        if begun:
            _logger.warning(
                "%s never ran, so that the initial values of its parameters (%s) are judged: train "
                "it, or load Pyro's parameter store, unless they are meant",
                _name(guide),
                _some(begun),
            )

    try:
        yield check
    except BaseException:
        for module, parts in before:
            for name, part in parts.items():
                now = vars(module).get(name)
                if isinstance(part, dict) and isinstance(now, dict):
                    now.clear()
                    now.update(part)
                    parts[name] = now
            vars(module).clear()
            vars(module).update(parts)
        raise


def _name(guide: Program) -> str:
    inner = poutine.unwrap(guide)
    name = None if isinstance(inner, nn.Module) else getattr(inner, "__qualname__", None)
    return f"the guide {name or type(inner).__name__}"


def _is_unset(module: nn.Module) -> bool:
    return isinstance(module, AutoGuide) and module.prototype_trace is None


def _begins(site: Site) -> bool:
    """Whether ``pyro.param`` was given an initial value that is no parameter of a module."""
    given = [*site["args"][1:2], site["kwargs"].get("init_tensor")]
    return any(v is not None and not isinstance(v, nn.Parameter) for v in given)


def _some(names: list[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:3]) + (", ..." if len(names) > 3 else "")


def _copy(parts: dict[str, object]) -> dict[str, object]:
    return {n: v.copy() if isinstance(v, dict) else v for n, v in parts.items()}
