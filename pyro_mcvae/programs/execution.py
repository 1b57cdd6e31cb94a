"""One execution of guide and model, its log densities, and their sums over plates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import is_identically_zero
from pyro.infer import ELBO, SVI
from pyro.infer.util import is_validation_enabled
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from pyro_mcvae.programs import sites
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Minibatch, ParticlePlate, SubstituteMessenger
from pyro_mcvae.programs.sites import is_scored

__all__ = [
    "Programs",
    "Run",
    "Term",
    "check_separate",
    "collect",
    "entered",
    "guide_term",
    "is_messenger",
    "model_term",
    "nesting_of",
    "possible_terms",
    "run_model",
    "run_pair",
    "scored",
    "terms_of",
    "with_changes",
]


@dataclass(slots=True)
class Term:
    """
    One factor of the weight of one run.

    :ivar log_prob: the site's log density with the user's scale and mask, not the plates' N/B;
        shape ``[leading, *batch]``.
    :ivar entropy: the part of a guide's ``log_prob`` that its own gradient passes through.
    :ivar score: the guide's score-function term, unscaled, or 0 where it is reparameterized.
    :ivar plate_scale: N/B of the plates around the site.
    :ivar coupled: the plates whose elements meet in the factor, as far as that was looked for.
    :ivar left_out: whether it is the draw of an auxiliary variable, whose density has no place in
        the weight.
    """

    key: FactorKey
    site: Any
    log_prob: Tensor
    plate_scale: float = 1.0
    entropy: Any = 0
    score: Any = 0
    coupled: frozenset[sites.PlateKey] = frozenset()
    left_out: bool = False

    @property
    def in_guide(self) -> bool:
        return self.key.program == "guide"

    def leave_out(self) -> None:
        """Make it no factor: the guide's draw was made, and has its score, but no density."""
        self.left_out = True
        self.log_prob, self.entropy = torch.zeros_like(self.log_prob), 0


@dataclass(slots=True)
class Run:
    """
    The terms of one execution of both programs.

    :ivar nesting: how many batch dims belong to plates.
    :ivar leading: the size of the leading dimension at ``-nesting - 1``, or None if there is none.
    :ivar unbatched: the factors whose distribution did not have that dimension by itself.
    :ivar subsamples: the minibatch: the indices of each plate.
    """

    guide_trace: Trace
    model_trace: Trace
    terms: list[Term]
    nesting: int
    leading: int | None
    unbatched: frozenset[FactorKey] = frozenset()
    subsamples: Minibatch = field(default_factory=Minibatch)

    @property
    def guide_data(self) -> list[Term]:
        """
        The densities of what the guide observes: nothing was drawn from them, so no weight has
        them. Averages of log p - log q count them, as Pyro does.
        """
        nodes = scored(self.guide_trace)
        return [_observed_term(site) for site in nodes if sites.observes_data(site)]

    @property
    def summands(self) -> list[Term]:
        """What a plain ELBO sums: the factors of the weight, and what the guide observes."""
        return [*self.terms, *self.guide_data]

    def sum_to(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Sum a batch-shaped tensor over all plates but ``dims``: ``[leading, *dims]``."""
        needed = max((-d for d in dims), default=0)
        if value.dim() < needed:
            value = value.reshape((1,) * (needed - value.dim()) + value.shape)
        lead = -self.nesting - 1
        has_lead = self.leading is not None and value.dim() > self.nesting
        drop = [d for d in range(-value.dim(), 0) if d not in dims and not (has_lead and d == lead)]
        if drop:
            value = value.sum(drop)
        return value if has_lead else value.unsqueeze(0)

    def align(self, weight: Tensor, dims: tuple[int, ...], value: Tensor, event_dim: int) -> Tensor:
        """
        Reshape ``[leading, *dims]`` so that it multiplies a site's value.

        :param weight: without its first dimension where the run has no leading one.
        """
        sizes = iter(weight.shape[len(weight.shape) - len(dims) :])
        batch = [next(sizes) if d in dims else 1 for d in range(-self.nesting, 0)]
        shape = [*weight.shape[: len(weight.shape) - len(dims)], *batch, *[1] * event_dim]
        # Without a leading dimension a value outside of some plates has fewer dims than they.
        return weight.reshape(shape[max(0, len(shape) - value.dim()) :])


@dataclass(frozen=True, slots=True)
class Programs:
    """A model and a guide with the arguments of one call."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        for role, program in (("model", self.model), ("guide", self.guide)):
            if not callable(program) or isinstance(program, type | ELBO | SVI):
                raise ValueError(
                    f"the {role} must be a Pyro program, such as a function or an object that is "
                    f"called with the data, got {program!r}"
                )


def is_messenger(programs: Programs) -> bool:
    """Whether the guide is a GuideMessenger, which runs both programs at once."""
    return isinstance(poutine.unwrap(programs.guide), Messenger)


def check_separate(programs: Programs) -> None:
    """
    Check that guide and model run one after the other, so that their gradients can be separated.

    :raises ValueError: for a GuideMessenger.
    """
    if is_messenger(programs):
        raise ValueError(
            f"this objective separates the gradients of guide and model, but the guide "
            f"{type(poutine.unwrap(programs.guide)).__name__} runs both at once: use another "
            f"guide, or, for chains, gradient_estimator='full'"
        )


def run_pair(
    programs: Programs,
    supply: SubstituteMessenger,
    leading: tuple[ParticlePlate, ParticlePlate] | tuple[None, None] = (None, None),
    inside: Messenger | None = None,
) -> tuple[Trace, Trace]:
    """
    Run the guide, then the model on its draws.

    :param supply: values and the minibatch; entered outermost.
    :param leading: the particles' plate for the guide and for the model.
    :param inside: a further handler around the guide, inside of ``supply``.
    :returns: ``(guide_trace, model_trace)``
    """
    args, kwargs = programs.args, programs.kwargs
    with supply:
        unwrapped = poutine.unwrap(programs.guide)
        if is_messenger(programs):
            both = None
            if leading[0] is not None:
                # One plate for one run: it leaves out the global sites of both programs.
                guide_plate, model_plate = leading
                skip = guide_plate.skip | model_plate.skip
                both = ParticlePlate(guide_plate.size, guide_plate.depth, skip)
            with entered(inside, both):
                programs.guide(*args, **kwargs)
            model_trace, guide_trace = unwrapped.get_traces()
            for plate in leading:
                if plate is not None and both is not None:
                    plate.unbatched |= both.unbatched
            return guide_trace, model_trace
        with poutine.trace() as tracer, entered(inside, leading[0]):
            programs.guide(*args, **kwargs)
    replayed = tracer.trace
    if supply.cut is not None:
        replayed = with_changes(replayed, _leaves(replayed, supply.cut | set(supply.values)))
    return tracer.trace, run_model(programs, replayed, supply, leading[1])


def run_model(
    programs: Programs,
    guide_trace: Trace,
    supply: SubstituteMessenger,
    leading: ParticlePlate | None,
) -> Trace:
    """Run the model on the draws of a guide's trace."""
    with (
        supply,
        poutine.trace() as tracer,
        poutine.replay(trace=guide_trace),
        entered(leading),
    ):
        programs.model(*programs.args, **programs.kwargs)
    return tracer.trace


def _leaves(guide_trace: Trace, but: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Copies of the guide's draws that begin a graph of their own."""
    leaves = {}
    for name, site in guide_trace.nodes.items():
        if sites.is_latent(site) and name not in but and site["value"].is_floating_point():
            leaf = site["value"].detach().requires_grad_(torch.is_grad_enabled())
            leaves[name] = {"value": leaf}
    return leaves


def with_changes(trace: Trace, changes: Mapping[str, Mapping[str, Any]]) -> Trace:
    """A copy of a trace with other values, or annotations, at some sites."""
    changed = trace.copy()
    for name, fields in changes.items():
        changed.nodes[name] = {**trace.nodes[name], **fields}
    return changed


def entered(*handlers: Messenger | None) -> ExitStack:
    """Enter the handlers that there are, the first one outermost."""
    stack = ExitStack()
    for handler in handlers:
        if handler is not None:
            stack.enter_context(handler)
    return stack


def collect(
    guide_trace: Trace,
    model_trace: Trace,
    nesting: int,
    leading: int | None,
    declared_nesting: float = math.inf,
) -> Run:
    """
    Compute the log density of every scored site of both traces.

    :param nesting: how many batch dims belong to plates.
    :param leading: the size of the leading dimension, or None if there is none.
    :param declared_nesting: without a leading dimension, how many batch dims must belong to
        plates; by default all, because others would be summed as if they did.
    """
    terms = terms_of(guide_trace, model_trace)
    run = Run(guide_trace, model_trace, terms, nesting, leading)
    if is_validation_enabled():
        depth: Any = declared_nesting if leading is None else nesting + 1
        check_model_guide_match(*_comparable(model_trace, guide_trace), depth)
        for term in run.summands:
            term.site["log_prob"] = term.log_prob
            check_site_shape(term.site, depth)
    if leading is not None:
        for term in terms:
            _check_batch_dims(term, nesting)
    return run


def terms_of(guide_trace: Trace, model_trace: Trace) -> list[Term]:
    """The log density of every scored site that is a factor of the weight, the model's first."""
    terms = [model_term(s) for s in scored(model_trace)]
    return terms + [guide_term(s) for s in scored(guide_trace) if not sites.observes_data(s)]


def _comparable(*traces: Trace) -> list[Trace]:
    """Traces without the latents that only one of the programs has per particle."""
    model_trace, guide_trace = traces
    apart = [
        name
        for name, site in guide_trace.nodes.items()
        if name in model_trace and _leads(site) != _leads(model_trace.nodes[name])
    ]
    copies = [trace.copy() for trace in traces] if apart else list(traces)
    for trace in copies:
        for name in apart:
            trace.remove_node(name)
    return copies


def _leads(site: Any) -> bool:
    stack = site["cond_indep_stack"] if site["type"] == "sample" else ()
    return any(frame.name == sites.LEADING for frame in stack)


def _check_batch_dims(term: Term, nesting: int) -> None:
    """Refuse particles in a dim that belongs to data, as z.sum(-1) in a model moves them there."""
    declared = {f.dim for f in term.site["cond_indep_stack"]}
    shape = term.log_prob.shape
    outer = shape[: max(0, len(shape) - nesting - 1)]
    if any(size != 1 for size in outer):
        # As z.unsqueeze(-1) of a global latent makes them, by crossing the particles.
        raise ValueError(
            f"site '{term.key.name}' of the {term.key.program} has log_prob of shape "
            f"{tuple(shape)}, which has dims to the left of the particles' (dim {-nesting - 1}): "
            f"latents outside of a plate broadcast by themselves, without unsqueeze or reshape"
        )
    for dim in range(-min(nesting, len(shape)), 0):
        if shape[dim] != 1 and dim not in declared:
            raise ValueError(
                f"site '{term.key.name}' of the {term.key.program} has log_prob of shape "
                f"{tuple(shape)}, whose dim {dim} belongs to no plate: reductions over plates "
                f"must keep their dims, as in z.sum(-1, keepdim=True)"
            )


def nesting_of(*traces: Trace) -> int:
    """The depth of the deepest plate dim in the traces, the particles' plate left out."""
    dims = [
        frame.dim
        for trace in traces
        # Also deterministic sites: their plates take batch dims as well.
        for site in trace.nodes.values()
        if site["type"] == "sample" and not site_is_subsample(site)
        for frame in site["cond_indep_stack"]
        if frame.dim is not None and frame.name != sites.LEADING
    ]
    return -min(dims, default=0)


def scored(trace: Trace) -> Iterator[Any]:
    """The sites of a trace that carry a log density."""
    return (site for site in trace.nodes.values() if is_scored(site))


def possible_terms(make: Callable[[Any], Term], trace: Trace) -> Iterator[Term]:
    """The terms of a trace, by :func:`model_term` or :func:`guide_term`, that can be computed."""
    for site in scored(trace):
        try:
            yield make(site)
        except ValueError:
            continue  # a flow without an inverse


def model_term(site: Any, key: FactorKey | None = None) -> Term:
    """The log density of a scored site of the model; ``key`` where it is known already."""
    log_prob = sites.masked(site, sites.unscaled_log_prob(site, "model"))
    key = key or FactorKey("model", site["name"])
    return Term(key, site, log_prob, sites.subsampling_scale(site))


def guide_term(site: Any, key: FactorKey | None = None) -> Term:
    """The log density of a scored site of the guide; ``key`` where it is known already."""
    parts = sites.score_parts(site)
    log_prob = sites.masked(site, parts.log_prob)
    if parts.entropy_term is parts.log_prob or site["is_observed"]:
        # What is observed in a guide, a factor, is a function of the draws and of parameters: it
        # has a gradient of its own, whether or not a score function comes with it.
        entropy = log_prob
    elif is_identically_zero(parts.entropy_term):
        entropy = 0
    else:
        entropy = sites.masked(site, parts.entropy_term)
    score = 0 if is_identically_zero(parts.score_function) else parts.score_function
    key = key or FactorKey("guide", site["name"])
    return Term(key, site, log_prob, sites.subsampling_scale(site), entropy, score)


def _observed_term(site: Any) -> Term:
    """The log density of what a guide observes, with all of its gradient."""
    log_prob = sites.masked(site, sites.unscaled_log_prob(site, "guide"))
    key = FactorKey("guide", site["name"])
    # Which elements' draws meet in it is not looked for: as if all did.
    plates = frozenset(map(sites.plate_key, sites.plate_frames(site)))
    return Term(key, site, log_prob, sites.subsampling_scale(site), log_prob, coupled=plates)
