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
from pyro.distributions.transforms import BatchNorm, ELUTransform, Sylvester
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn
from torch.distributions import TransformedDistribution, VonMises, constraints

from pyro_mcvae.ops.compat import HANDLERS, is_same_tensor
from pyro_mcvae.programs.distributions import parts_of, transforms_of
from pyro_mcvae.programs.isolation import find_modules
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import (
    bare,
    elementwise,
    inner_scale,
    is_delta,
    is_latent,
    is_random,
    known_support,
    reparameterized,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Distribution, Program, Site, Transform, plate_frames
from pyro_mcvae.structure.blocks import Structure
from pyro_mcvae.structure.marked import MarkedRunError, autograd_leaves, marked

# Angles of a model that a guide draws on the real line, where their density is periodic.

_CIRCULAR = (VonMises, dist.SineBivariateVonMises, dist.SineSkewed)


def is_circular(fn: Distribution) -> bool:
    """Return whether draws are angles: the density is periodic on the line."""
    while not has_methods_of(fn, *_CIRCULAR):
        base = getattr(fn, "base_dist", None)
        if base is None or isinstance(fn, TransformedDistribution):
            return False
        fn = base
    return True


def angle_errors(run: Run) -> list[str]:
    """
    Return an error message for each angle of a model that its guide draws on the real line.

    The density is periodic there, so its integral, and with it the evidence, is infinite.
    """
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide}
    # An AutoGuide computes point masses from draws. Other point masses have no density.
    drawn = any(is_random(site) and name not in model for name, site in sites.items())
    messages = []
    for name, site in sites.items():
        inner = model.get(name)
        angle = inner is not None and is_latent(inner) and is_circular(inner["fn"])
        if angle and is_latent(site) and _is_on_line(site, drawn):
            kind = type(bare(model[name]["fn"])).__name__
            messages.append(
                f"site '{name}' of the model is an angle ({kind}), whose density is periodic, but "
                f"the guide draws it on the whole real line: bounds and evidence have no finite "
                f"limit. Draw it from dist.VonMises, or within [-pi, pi)"
            )
    return messages


def _is_on_line(site: Site, drawn: bool) -> bool:
    fn = site["fn"]
    if is_circular(fn):
        return False
    if is_delta(fn):
        return drawn
    if bool((site["value"].abs() > math.pi + 1e-6).any()):
        return True
    support = elementwise(known_support(fn))
    # PyTorch reports the real line for a scaled Beta, too.
    return support is constraints.real and not isinstance(bare(fn), TransformedDistribution)


# Collapsed latents: the data depend on the guide's parameters, and on no draw.


def check_not_collapsed(structure: Structure) -> None:
    """
    Check that the data depend on the guide's draws, so that weights are valid.

    :raises ValueError: naming a site that has the guide's parameters instead of its draws.
    """
    if structure.collapsed is not None and structure.blocks:
        latent, data = structure.collapsed
        raise ValueError(
            f"site '{data}' of the model uses the parameters of the guide's site '{latent}', and "
            f"not its draws, as if the latent were integrated in closed form (VariationalGP, "
            f"VariationalSparseGP). Weights of such draws do not bound the evidence: use a model "
            f"that uses its latent, as in x = f({latent}). TraceSGVB_ELBO has the value of "
            f"Trace_ELBO, log E_q p(x | f), which is not a bound either"
        )


# Densities that jump.


def density_steps(programs: Programs, run: Run) -> list[str]:
    """Return a line for each density that jumps with reparameterized draws of the guide."""
    if not any(t.in_guide and is_random(t.site) and reparameterized(t.site) for t in run.terms):
        return []
    try:
        found = marked(programs, run)
    except MarkedRunError as error:
        return [
            f"the model and guide fail when they run again at the same draws ({error}), so it "
            f"is unknown whether a density jumps with draws, which gradients omit"
        ]
    return [
        f"the density of site '{key.name}' of the {key.program} jumps where '{step.operator}' of "
        f"site '{(latent := min(found.marker.names(step.bits)))}' does, at {step.line}: gradients "
        f"through reparameterized draws omit the jumps. Draw '{latent}' in the guide from a "
        f"distribution without rsample, such as Normal(loc, scale).has_rsample_(False), which has "
        f"a score function, or use a smooth step such as torch.sigmoid"
        for key, steps in found.steps.items()
        for step in steps
    ]


# Flows whose log density does not match their draws.


def check_flows(run: Run) -> None:
    r"""
    Reject flows whose log determinant or support in Pyro does not match their map.

    The map of ``Sylvester`` is :math:`y = x + \tanh(x S Q^\top + b) Q R`. Pyro's log determinant is
    that of a map with :math:`Q R^\top` and :math:`S^\top Q^\top` (van den Berg et al. 2018). With
    standard normal weights in five dims they differ by up to one nat. With larger weights, where
    the map is no longer invertible, they differ by up to five nats. ``BatchNorm`` in training mode
    draws with its moving variance, but uses that of the batch in the density. ``ELUTransform``
    declares positive values, and has values above -1, which AutoGuides and chains would not reach.

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
            f"is a flow with Sylvester({part.input_dim}), whose log determinant in Pyro is not "
            f"that of its map, so no bound holds: use planar, affine_autoregressive or "
            f"spline_coupling of pyro.distributions.transforms"
        )
    if isinstance(part, BatchNorm) and part.training and term.in_guide:
        return (
            f"is a flow with BatchNorm({part.input_dim}) in training mode, which draws with its "
            f"moving variance and has the density of the batch's: call eval() on it, or leave it "
            f"out of the guide"
        )
    if isinstance(part, ELUTransform) and is_latent(term.site) and not term.in_guide:
        return (
            "is a flow with ELUTransform, whose values Pyro declares to be positive, though they "
            "are above -1: AutoGuides and chains would have no draws below 0. Draw its input, and "
            "apply torch.nn.functional.elu to the draw"
        )
    return None


# Latents whose log densities are scaled inside the weights, as in a beta-VAE.


class Scales(NamedTuple):
    """The user's scale of a latent in each program, 1 if the program has no such site."""

    model: float = 1.0
    guide: float = 1.0


def scaled_latents(terms: Iterable[Term]) -> dict[str, Scales]:
    """Return the scales of the guide's latents that differ from 1, by name."""
    sites = [(t.key, t.site) for term in terms for t in term.sites if is_latent(t.site)]
    drawn = {key.name for key, _ in sites if key.program == "guide"}
    scales_of: dict[str, Scales] = {}
    for key, site in sites:
        if key.name in drawn and (key.program == "model" or is_random(site)):
            scale = {key.program: _largest(inner_scale(site))}
            scales_of[key.name] = scales_of.get(key.name, Scales())._replace(**scale)
    return {name: scales for name, scales in scales_of.items() if scales != Scales()}


def check_scales(terms: list[Term], objective: str, reads: bool) -> None:
    """
    Reject chains whose target density has no finite integral.

    A scale around all sites tempers p(x, z) as well, and is allowed.

    :param bool reads: whether the entries of tensors may be read.
    :raises ValueError: naming a latent that the guide scales by more than 1.
    """
    readable = (t for t in terms if reads or not isinstance(t.site["scale"], Tensor))
    for name, scales in scaled_latents(readable).items():
        if scales.guide > 1 and common_scale(terms) is None:
            raise ValueError(
                f"site '{name}' is scaled by poutine.scale ({scales.guide:g} in the guide, "
                f"{scales.model:g} in the model), and {objective} moves latents along p / q: its "
                f"chains diverge, because q to the power {1 - scales.guide:g} has no finite "
                f"integral. Use TraceSGVB_ELBO, which has the objective of a beta-VAE, or scale "
                f"the observations by 1 / beta instead of the latents by beta"
            )


def common_scale(terms: Iterable[Term]) -> float | None:
    """Return the common user scale of all sites in plates, if it exists and is not 1."""
    scales = {inner_scale(t.site) for t in terms if plate_frames(t.site)}
    scale = scales.pop() if len(scales) == 1 else None
    return scale if isinstance(scale, float) and scale != 1.0 else None


def _largest(scale: float | Tensor) -> float:
    """Return the largest scale if it is above 1, else the smallest."""
    if not isinstance(scale, Tensor):
        return float(scale)
    low, high = torch.aminmax(scale.detach())
    return float(high if high > 1 else low)


# Parameters in Pyro's store that are copies of a module's: training would not change the module.

# The separator of module and parameter names in `pyro.module`.
_DIVIDER = "$$$"
_CONTIGUOUS = (
    "its memory is not contiguous (channels last, say), and Pyro's store keeps a contiguous copy: "
    "leave the module's parameters contiguous, and change the memory format of inputs, or of the "
    "weights within forward"
)
_TAKEN = (
    "the store had one of this name, loaded or of another module: pass update_module_params=True "
    "to pyro.module, or call pyro.clear_param_store() before. If model and guide are PyroModules "
    "with parts of one name, give these different names, such as decoder and encoder; or train by "
    "elbo(model, guide) and an optimizer of PyTorch instead of SVI, which does not run with "
    "pyro.settings.set(module_local_params=True)"
)


def collects_parameters() -> bool:
    """Return whether a caller trains the parameters of Pyro's store, as SVI does."""
    return any(map(is_param_tracer, HANDLERS))


def check_copied_parameters(programs: Programs, run: Run) -> None:
    """
    Raise an error if the store has copies of parameters of a ``pyro.module``.

    :raises ValueError: naming such a parameter.
    """
    copied = {
        id(offered): (name, offered)
        for trace in (run.guide_trace, run.model_trace)
        for name, site in trace.nodes.items()
        if site["type"] == "param" and (offered := _copied(name, site)) is not None
    }
    if not copied:
        return
    for module in find_modules(*programs.pair):
        for parameter in module.parameters():
            if id(parameter) in copied:
                name, offered = copied[id(parameter)]
                raise ValueError(
                    f"parameter '{name}' of Pyro's store is a copy, of shape "
                    f"{tuple(offered.shape)}, that its module does not read, so training would not "
                    f"change the module: {_TAKEN if offered.is_contiguous() else _CONTIGUOUS}"
                )


def _copied(name: str, site: Site) -> Tensor | None:
    """Return the parameter that a module registered, if the store has another tensor."""
    offered = [*site["args"][1:2], site["kwargs"].get("init_tensor")][0]
    if _DIVIDER not in name or not isinstance(offered, Tensor):
        return None
    return None if is_same_tensor(offered, site["value"]) else offered


def untrained(programs: Programs, run: Run) -> tuple[str, str] | None:
    """
    Find a module that the loss depends on, and of which SVI trains no parameter.

    :returns: the class of the module and the names of its parameters; None without such a module.
    """
    stored = {
        leaf
        for trace in (run.guide_trace, run.model_trace)
        for site in trace.nodes.values()
        if site["type"] == "param"
        for leaf in (id(site["value"]), *autograd_leaves(site["value"]))
    }
    leaves = {leaf for t in run.terms for leaf in autograd_leaves(torch.as_tensor(t.log_prob))}
    for module in find_modules(*programs.pair):
        names = {id(p): n for n, p in module.named_parameters()}
        reached = [n for key, n in names.items() if key in leaves]
        if reached and not names.keys() & stored:
            return type(module).__name__, _some(reached)
    return None


# A guide that never ran is untrained: its evaluation raises an error.

_logger = logging.getLogger(__name__)


@contextmanager
def check_trained(guide: Program) -> Iterator[Callable[[Trace], None]]:
    """
    Yield a check for the first run of an evaluated guide; after an error, restore its modules.

    Parameters of modules that existed before belong to a trained or loaded module, whether or not
    they are in Pyro's store. Parameters that an AutoGuide creates at its first call have arbitrary
    initial values, unless the store has saved ones: they raise an error. Parameters of
    ``pyro.param(name, init)`` have values from the program, which may be intended: they are logged.

    :returns: a check of the run's trace.
    :raises ValueError: naming the parameters of modules that the run created.
    """
    names_before = frozenset(pyro.get_param_store().keys())
    modules = [m for root in find_modules(guide) for m in root.modules()]
    before = [(m, _copy(vars(m))) for m in modules]
    parameters = {id(p) for m in modules for p in m.parameters(False)}
    unset = [m for m in modules if _is_unset(m)]

    def check(guide_trace: Trace) -> None:
        stored = dict(pyro.get_param_store().named_parameters())
        new, sites = [n for n in pyro.get_param_store() if n not in names_before], guide_trace.nodes
        created = {id(p) for m in modules for p in m.parameters()} - parameters
        names = [n for n in new if id(stored[n]) in created]
        if pyro.settings.get("module_local_params"):
            # The store then has neither modules nor saved parameters of modules.
            set_up = [m for m in unset if not _is_unset(m)]
            names += [f"{type(m).__name__}.{n}" for m in set_up for n, _ in m.named_parameters()]
        if names:
            raise ValueError(
                f"{_name(guide)} never ran: its parameters ({_some(names)}) would be created by "
                f"this evaluation, with their initial values. Train it first, or load its "
                f"parameters (into Pyro's store, or into the guide after a first call of it); call "
                f"guide(*args) once, if you want to evaluate its initial values"
            )
        initialized = [n for n in new if n in sites and _has_initial_value(sites[n])]
        if initialized:
            _logger.warning(
                "%s never ran, so the initial values of its parameters (%s) are evaluated: train "
                "it, or load Pyro's parameter store, unless this is intended",
                _name(guide),
                _some(initialized),
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


def _has_initial_value(site: Site) -> bool:
    """Return whether ``pyro.param`` has an initial value other than a module's parameter."""
    values = [*site["args"][1:2], site["kwargs"].get("init_tensor")]
    return any(v is not None and not isinstance(v, nn.Parameter) for v in values)


def _some(names: list[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:3]) + (", ..." if len(names) > 3 else "")


def _copy(parts: dict[str, object]) -> dict[str, object]:
    return {n: v.copy() if isinstance(v, dict) else v for n, v in parts.items()}
