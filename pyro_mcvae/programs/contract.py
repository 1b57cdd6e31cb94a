"""Check that model and guide fit each other; errors name the site and the remedy."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.infer.util import is_validation_enabled
from pyro.poutine.indep_messenger import CondIndepStackFrame as Frame
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.compat import ENUMERATE_DIM
from pyro_mcvae.programs.enumeration import is_state
from pyro_mcvae.programs.messengers import LeadingDims, Minibatch, Substitutes
from pyro_mcvae.programs.run import Programs, Run, run_pair, terms_of
from pyro_mcvae.programs.sites import (
    elementwise,
    is_delta,
    is_latent,
    is_scored,
    known_support,
    nonfinite_report,
    observes_data,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import PARTICLE_PLATE, Message, Site, is_subsampled

_logger = logging.getLogger(__name__)

# Checks of runs, whose errors name the site and say what to do instead.


def check_sites(
    guide_trace: Trace, model_trace: Trace, strict_enumeration: bool, before_sums: bool = False
) -> None:
    """
    Check that the guide draws what the model needs, and nothing else.

    :param bool strict_enumeration: reject guide sites that are marked for enumeration.
    :param bool before_sums: whether the model drew the sites marked for enumeration.
    :raises ValueError: naming the site and the remedy.
    :raises RuntimeError: naming a site that the guide has, but does not draw.
    """
    guide, model = guide_trace.nodes, model_trace.nodes
    _check_places(guide, model)
    for name, site in model.items():
        if not is_latent(site):
            continue
        if name in guide and (guide[name]["type"] != "sample" or guide[name]["is_observed"]):
            raise _not_drawn_error(name, guide[name])
        if name not in guide:
            kind = site["infer"].get("enumerate")
            if is_state(site) or is_delta(site["fn"]) or (kind == "parallel" and before_sums):
                continue
            if kind:
                raise ValueError(_not_summed(name, kind))
            raise ValueError(
                f"site '{name}' of the model is neither observed nor drawn by the guide: add "
                f"pyro.sample('{name}', ...) to the guide, or pass obs= in the model; if it is a "
                f"prediction, on which no data depend, pass poutine.block(model, hide=['{name}'])"
            )
    for name, site in guide.items():
        if not is_latent(site):
            continue
        if strict_enumeration and site["infer"].get("enumerate"):
            raise ValueError(_enumerated(name))
        if site["infer"].get("is_auxiliary") or (name in model and is_latent(model[name])):
            continue
        where = "is observed in the model" if name in model else "is missing from the model"
        raise ValueError(
            f"site '{name}' of the guide {where}: remove it from the guide, or mark it with "
            f"infer={{'is_auxiliary': True}} if other sites are drawn from it, as in a mixture: "
            f"its density is then left out, unless they are point masses computed from it"
        )


def _not_drawn_error(name: str, site: Site) -> RuntimeError:
    kind = "observed" if site["type"] == "sample" else f"a {site['type']}"
    return RuntimeError(
        f"site '{name}' is drawn by the model, and is {kind} in the guide: draw it there too, by "
        f"pyro.sample without obs=, or give it another name"
    )


def _check_places(guide: Mapping[str, Site], model: Mapping[str, Site]) -> None:
    """Raise an error if model and guide are swapped."""
    if any(s["type"] == "sample" and s["is_observed"] and is_scored(s) for s in model.values()):
        return
    for name, site in guide.items():
        if is_scored(site) and observes_data(site):
            raise ValueError(
                f"the model observes nothing, and the guide observes site '{name}': pass the model "
                f"first and the guide second"
            )


def _enumerated(name: str) -> str:
    return (
        f"site '{name}' of the guide is marked for enumeration, which this objective does not "
        f"support. To sum the site, use TraceRaoBlackwell_ELBO, or mark it in the model and leave "
        f"it out of the guide. To sample it, remove infer={{'enumerate': ...}}, or pass "
        f"strict_enumeration_warning=False"
    )


def _not_summed(name: str, kind: str) -> str:
    return (
        f"site '{name}' of the model is marked for enumeration ({kind}), and is not summed here: "
        f"mark it infer={{'enumerate': 'parallel'}}, which every loss and evaluator sums exactly, "
        f"unless the guide is a messenger; or draw it in the guide"
    )


def _check_same_plates(run: Run) -> None:
    """
    Check that latents have the same N/B in the guide as in the model.

    :raises ValueError: naming both plates, where their sizes differ or one program has none.
    """
    every = [f for t in run.terms if not t.in_guide for m in t.sites for f in _frames(m.site)]
    for term in (t for t in run.terms if t.in_guide and not is_delta(t.site["fn"])):
        guide, site = _frames(term.site), run.model_trace.nodes.get(term.key.name)
        model = every if site is None else _frames(site)
        for f in guide:
            named = [g for g in model if g.name == f.name]
            if named and all((g.size, g.full_size) != (f.size, f.full_size) for g in named):
                raise _plate_mismatch(term, f, named[0])
        for f in filter(is_subsampled, () if site is None else (*guide, *model)):
            in_guide, in_model = _match(f, guide), _match(f, model)
            if in_guide is None or in_model is None or in_guide.name != in_model.name:
                raise _plate_mismatch(term, in_guide, in_model)


def _frames(site: Site) -> list[Frame]:
    """Return the user's plates around a site, the outermost one first."""
    return [f for f in site["cond_indep_stack"] if f.name != PARTICLE_PLATE]


def _match(frame: Frame, frames: list[Frame]) -> Frame | None:
    """Return the plate with the frame's name, else the plate in its dim, else None."""
    named = (f for f in frames if f.name == frame.name)
    return next(named, next((f for f in frames if f.dim == frame.dim), None))


def _plate_mismatch(term: Term, guide: Frame | None, model: Frame | None) -> ValueError:
    return ValueError(
        f"site '{term.key.name}' lies in {_described(guide)} of the guide and in "
        f"{_described(model)} of the model, so its two densities are scaled by different N/B: put "
        f"it in the same plate in both programs, with one name, size and minibatch"
    )


def _described(frame: Frame | None) -> str:
    if frame is None:
        return "no plate"
    minibatch = f"{frame.size} of {frame.full_size}" if is_subsampled(frame) else f"{frame.size}"
    return f"plate '{frame.name}' ({minibatch})"


def check_nesting(value: object) -> None:
    """
    Check that ``max_plate_nesting`` is a number of batch dims, or infinity.

    :raises ValueError: otherwise.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not (number >= 0 and (number == math.inf or number == int(number))):
        raise ValueError(
            f"max_plate_nesting must be the number of batch dims that the programs' plates occupy, "
            f"an int of at least 0, got {value!r}: leave it out to have it inferred"
        )


def nonfinite_sites(runs: list[Run]) -> list[str]:
    """Return a line for every site whose log density is not finite, over all runs."""
    lines = []
    for term in (t for run in runs for t in run.summands):
        lines += _nonfinite(term)
    return list(dict.fromkeys(lines))


def _nonfinite(term: Term) -> list[str]:
    """Return a line for a nonfinite term, or for each nonfinite factor of a sum."""
    lines = [
        nonfinite_report(t.site, t.key.program, torch.as_tensor(t.log_prob))
        for t in (term, *term.members)
    ]
    total, *members = lines
    return [] if total is None else [line for line in members if line is not None] or [total]


def check_run(run: Run, depth: float, strict_enumeration: bool, before_sums: bool = False) -> None:
    """
    Check that guide and model draw the same sites in the same shapes.

    While Pyro's validation is enabled, also check that batch dims lie in plates, as Pyro does. A
    value of another shape would be broadcast: drawn once, and scored once per latent of the model.
    This is also checked with validation off, but without Pyro's warnings.

    :param depth: the number of batch dims that may belong to plates and particles.
    :param bool before_sums: whether the model drew the sites marked for enumeration.
    """
    check_sites(run.guide_trace, run.model_trace, strict_enumeration, before_sums)
    _check_same_plates(run)
    validated = is_validation_enabled()
    with warnings.catch_warnings():
        if not validated:
            warnings.simplefilter("ignore")
        check_model_guide_match(*_comparable(run.model_trace, run.guide_trace), depth)
    if validated:
        _check_shapes(run.summands, run.guide_trace, depth)


def _check_shapes(terms: Sequence[Term], guide_trace: Trace, depth: float) -> None:
    distinct_dims = _slots_have_distinct_dims(terms)
    for term in terms:
        infer = term.site["infer"]
        if distinct_dims and not term.in_guide and term.key.name in guide_trace:
            # The guide may draw the site's parents in the model after the site, with slots for each
            # of its slots. The site's slots then come back through these parents.
            infer = {k: v for k, v in infer.items() if k != ENUMERATE_DIM}
        check_site_shape({**term.site, "log_prob": term.log_prob, "infer": infer}, depth)


def _slots_have_distinct_dims(terms: Sequence[Term]) -> bool:
    """Return whether no two enumerated sites share a batch dim, as in ``pyro.markov``."""
    dims = {t.key.name: t.site["infer"].get(ENUMERATE_DIM) for t in terms}
    used = [dim for dim in dims.values() if dim is not None]
    return len(used) == len(set(used))


def _comparable(*traces: Trace) -> list[Trace]:
    """Return the traces without latents that only one of the programs has per particle."""
    model_trace, guide_trace = traces
    one_sided = [
        name
        for name, site in guide_trace.nodes.items()
        if name in model_trace and _leads(site) != _leads(model_trace.nodes[name])
    ]
    copies = [trace.copy() for trace in traces] if one_sided else list(traces)
    for trace in copies:
        for name in one_sided:
            trace.remove_node(name)
    return copies


def _leads(site: Site) -> bool:
    stack = site["cond_indep_stack"] if site["type"] == "sample" else ()
    return any(frame.name == PARTICLE_PLATE for frame in stack)


def check_batch_dims(terms: Sequence[Term], nesting: int) -> None:
    """
    Check that the particles of a run lie in the leading dim, and data in plate dims.

    :raises ValueError: naming a site with particles elsewhere, for example after z.sum(-1).
    """
    for term in terms:
        _check_batch_dims(term, nesting)


def _check_batch_dims(term: Term, nesting: int) -> None:
    declared = {f.dim for f in term.site["cond_indep_stack"]}
    shape = term.log_prob.shape
    outer = shape[: max(0, len(shape) - nesting - 1)]
    if any(size != 1 for size in outer):
        # For example z.unsqueeze(-1) of a global latent makes such dims: it moves the particles.
        raise ValueError(
            f"site '{term.key.name}' of the {term.key.program} has log_prob of shape "
            f"{tuple(shape)}, which has dims to the left of the particles' (dim {-nesting - 1}): "
            f"latents outside a plate broadcast by themselves, without unsqueeze or reshape"
        )
    for dim in range(-min(nesting, len(shape)), 0):
        if shape[dim] != 1 and dim not in declared:
            raise ValueError(
                f"site '{term.key.name}' of the {term.key.program} has log_prob of shape "
                f"{tuple(shape)}, whose dim {dim} belongs to no plate: reductions over plates "
                f"must keep their dims, as in z.sum(-1, keepdim=True)"
            )


# The number of batch dims that belong to the plates of a model and a guide.


def nesting_of(*traces: Trace) -> int:
    """Return the depth of the deepest plate dim in the traces, without the particles' plate."""
    dims = [
        frame.dim
        for trace in traces
        # Also deterministic sites: their plates take batch dims as well.
        for site in trace.nodes.values()
        if site["type"] == "sample" and not site_is_subsample(site)
        for frame in site["cond_indep_stack"]
        if frame.dim is not None and frame.name != PARTICLE_PLATE
    ]
    return -min(dims, default=0)


def single_run(programs: Programs, sums_in: int | None = None) -> Run:
    """
    Return a run without leading dims, and restore all state afterwards.

    :param sums_in: the number of batch dims of plates, to sum enumerated sites to their left; None
        to draw these sites.
    """
    state_dim = None if sums_in is None else -sums_in - 1
    with programs.isolated():
        batch = Minibatch()
        traces = run_pair(programs, Substitutes(batch), LeadingDims(state_dim=state_dim))
        terms, nesting = terms_of(*traces, state_dim), nesting_of(*traces)
        return Run(*traces, terms, nesting, None, subsamples=batch, state_dim=state_dim)


def drawn_inside(msg: Message) -> Tensor:
    """Draw from a site, but not the open end of its support, to which draws may be rounded."""
    value: Tensor = msg["fn"](*msg["args"], **msg["kwargs"])
    support = elementwise(known_support(msg["fn"]))
    if not (isinstance(support, _POSITIVE) and bool((value <= support.lower_bound).any())):
        return value
    least = torch.as_tensor(support.lower_bound) + torch.finfo(value.dtype).tiny
    return torch.where(value <= support.lower_bound, least.to(value), value)


_POSITIVE = type(constraints.positive)


def checked_run(programs: Programs, strict_enumeration: bool) -> Run:
    """
    Return a checked run without leading dims; its plates determine the nesting.

    :raises ValueError: for a model and a guide that do not fit together.
    """
    with programs.isolated():
        batch = Minibatch()
        traces = run_pair(programs, Substitutes(batch, sample_fn=drawn_inside))
        return checked(*traces, batch, strict_enumeration)


def checked(
    guide_trace: Trace,
    model_trace: Trace,
    subsamples: Minibatch,
    strict_enumeration: bool,
    terms: tuple[Term, ...] | None = None,
) -> Run:
    """
    Return the checked run of two traces without leading dims.

    :param terms: the factors of the traces, if they are known.
    :raises ValueError: for a model and a guide that do not fit together.
    """
    traces = guide_trace, model_trace
    check_sites(*traces, strict_enumeration, before_sums=True)
    terms = terms_of(*traces) if terms is None else terms
    run = Run(*traces, terms, nesting_of(*traces), None, subsamples=subsamples)
    with warnings.catch_warnings():
        # Sites that the model enumerates are in the model alone.
        warnings.filterwarnings("ignore", "Found vars in model but not guide")
        check_run(run, math.inf, strict_enumeration, before_sums=True)
    # Dims of size 1 outside plates are counted too, for example the time dim of
    # pyro.contrib.forecast. The dims of tensors that broadcast against them are to their right.
    deepest = max((t.log_prob.dim() for t in run.terms), default=0)
    return replace(run, nesting=max(run.nesting, deepest))


# A loss with its model and guide.


class LossModule(ELBOModule):
    """
    A loss with its model and guide: a module whose call on data returns the loss.

    If model or guide are methods of a module, this module is a part, with all of its parameters.
    """

    def __init__(self, model: Any, guide: Any, elbo: ELBO) -> None:
        super().__init__(model, guide, elbo)
        owners = (getattr(poutine.unwrap(p), "__self__", None) for p in (model, guide))
        self.owners = nn.ModuleList({id(o): o for o in owners if isinstance(o, nn.Module)}.values())
        self._warn = WarnOnce(_logger)
        self._was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().forward(*args, **kwargs)
        self._was_called = True
        return loss

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Warn about a guide without parameters, which an optimizer would leave untrained."""
        if isinstance(getattr(self.guide, "__self__", None), nn.Module):
            pass  # its module is a part
        elif not isinstance(self.guide, nn.Module):
            own, stored = super().named_parameters(), pyro.get_param_store().named_parameters()
            # After a call the store has the guide's parameters, if there are any.
            if not self._was_called or {id(p) for _, p in stored} - {id(p) for _, p in own}:
                self._warn(_FUNCTION)
        elif not self._was_called and next(self.guide.parameters(), None) is None:
            self._warn(_NO_PARAMETERS % type(self.guide).__name__)
        return super().named_parameters(*args, **kwargs)


_FUNCTION = (
    "the guide is not a module, so its parameters (pyro.param) are not among those of elbo(model, "
    "guide), and an optimizer of these does not train it: use SVI, or a PyroModule as guide"
)
_NO_PARAMETERS = (
    "the guide %s has no parameters yet, so an optimizer that is made now does not train it: call "
    "elbo(model, guide) on data first, because AutoGuides create their parameters then"
)
