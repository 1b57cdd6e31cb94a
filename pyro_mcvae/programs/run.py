"""Run guide and model on one minibatch, and keep their traces and factors."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn

from pyro_mcvae.ops.compat import tree_flatten
from pyro_mcvae.ops.tensors import Tree
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.distributions import unvalidated, was_checked
from pyro_mcvae.programs.enumeration import StateMessenger, summed_terms
from pyro_mcvae.programs.fingerprint import observer
from pyro_mcvae.programs.isolation import isolated, restored
from pyro_mcvae.programs.log_values import leaf_of
from pyro_mcvae.programs.messengers import (
    ALONE,
    LeadingDims,
    Minibatch,
    ModelNoise,
    ParticlePlate,
    Recorder,
    Substitutes,
)
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode, is_a, is_hashable, numpy
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.programs.terms import (
    SiteForm,
    Term,
    guide_term,
    guide_terms,
    model_terms,
    observed_terms,
    scored,
)
from pyro_mcvae.programs.types import PARTICLE_PLATE, Program, SiteChanges, SiteError
from pyro_mcvae.programs.vmap import Mode

# Runs guide and model, one after the other, on one minibatch.

# Types of values that are compared by value; all others but tensors by identity.
_PLAIN = (bool, int, str, bytes, type(None), Enum, numpy.generic, torch.dtype, torch.device)
_LEAVES = {Tensor, nn.Parameter, bool, int, float, str, type(None)}


@dataclass(frozen=True, eq=False)
class Programs:
    """One call of a model and a guide: what belongs to it is kept by its identity."""

    model: Program
    guide: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        for role, program in (("model", self.model), ("guide", self.guide)):
            if not callable(program) or isinstance(program, type | ELBO | SVI):
                raise _no_program(role, program)

    @property
    def pair(self) -> tuple[Program, Program]:
        return self.model, self.guide

    @cached_property
    def call(self) -> Arguments:
        """Return what distinguishes this call from others of the same programs."""
        leaves, spec = flat(self.args, self.kwargs)
        floats = tuple([leaf for leaf in leaves if type(leaf) is float])
        key = (torch.is_grad_enabled(), spec, *map(_about, leaves))
        return Arguments(key, floats, [leaf for leaf in leaves if not is_a(leaf, (*_PLAIN, float))])

    @cached_property
    def read(self) -> Dependencies:
        """Return the values outside the programs that they may read, and in their arguments."""
        outside = Dependencies.of(*self.pair, executed=ExecutedCode(unknown=True))
        return outside.with_arguments(*self.args, *self.kwargs.values())

    @cached_property
    def marked_runs(self) -> dict[Hashable, Any]:
        """Return the marked runs of this call so far, by the signature of their :class:`Run`."""
        return {}

    def restored(self) -> AbstractContextManager[None]:
        """Return a context for extra runs, whose traces in the programs' state it removes."""
        return restored(self.read)

    def isolated(self) -> AbstractContextManager[None]:
        """Return the same with fixed statistics in batch normalization."""
        return isolated(self.read)


def _no_program(role: str, program: object) -> ValueError:
    return ValueError(
        f"the {role} must be a Pyro program, such as a function or an object that is called with "
        f"the data, got {program!r}"
    )


class Arguments(NamedTuple):
    """
    The arguments of a call.

    :ivar key: equal for calls whose arguments differ in the values of floats and tensors only.
    :ivar floats: the values of the floats.
    :ivar objects: tensors and other objects.
    """

    key: Hashable
    floats: tuple[float, ...]
    objects: list[object]


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[object], Hashable]:
    """
    Return the leaves of the arguments of a call, and their structure.

    The structure is a tree or, which is faster, the number and names of plain arguments.
    """
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) in _LEAVES for leaf in leaves):
        return leaves, (len(args), *kwargs)
    leaves, tree = tree_flatten((args, kwargs))
    return leaves, Tree(tree)


def _about(leaf: object) -> Hashable:
    if is_a(leaf, Tensor):  # a recording has a tensor without dims instead of a float
        return (type(leaf), leaf.shape, leaf.dtype) if leaf.dim() else float
    known = is_a(leaf, _PLAIN) and is_hashable(leaf)
    return float if type(leaf) is float else (type(leaf), leaf if known else id(leaf))


def is_messenger(programs: Programs) -> bool:
    """
    Return whether the guide is a GuideMessenger, which runs model and guide together.

    A GuideMessenger around another program, such as ``poutine.block(model, hide=["y"])``, is an
    ordinary guide: the model has the sites that it hides.
    """
    guide = _messenger(programs)
    return guide is not None and bool(guide.model == programs.model)


def _messenger(programs: Programs) -> Any:
    """Return the guide if it is a handler around another program, else None."""
    guide = poutine.unwrap(programs.guide)
    return guide if isinstance(guide, Messenger) else None


def _not_separate(programs: Programs) -> SiteError:
    return SiteError(
        f"this objective separates the gradients of guide and model, but the guide "
        f"{type(poutine.unwrap(programs.guide)).__name__} runs both together: use another "
        f"guide, or, for chains, gradient_estimator='auto'"
    )


def run_pair(
    programs: Programs, substitutes: Substitutes, leading: LeadingDims = ALONE
) -> tuple[Trace, Trace]:
    """
    Run the guide, then the model on its draws.

    :param substitutes: values and the minibatch.
    :param leading: the leading dims, with the particles' plates.
    :returns: ``(guide_trace, model_trace)``
    :raises SiteError: for a guide that runs both programs, if its draws must be detached.
    """
    if is_messenger(programs):
        return _run_messenger(programs, substitutes, leading)
    with Recorder(substitutes) as recorder, entered(leading.guide, observer()):
        programs.guide(*programs.args, **programs.kwargs)
    messenger = _messenger(programs)
    # The messenger's trace also has the sites that the program inside it observes.
    drawn = guide_trace = recorder.trace if messenger is None else messenger.get_traces()[1]
    if substitutes.attached is not None:
        drawn = _detached(drawn, substitutes.attached | set(substitutes.values))
    return guide_trace, run_model(programs, drawn, substitutes, leading)


def _run_messenger(
    programs: Programs, substitutes: Substitutes, leading: LeadingDims
) -> tuple[Trace, Trace]:
    """Run a GuideMessenger, which runs the model itself."""
    if substitutes.attached is not None:
        raise _not_separate(programs)
    both, guide_plate, model_plate = None, leading.guide, leading.model
    if guide_plate is not None and model_plate is not None:
        # One plate for one run: it skips the global sites of both programs.
        skip = guide_plate.skip | model_plate.skip
        both = ParticlePlate(guide_plate.size, guide_plate.depth, skip)
    with Recorder(substitutes, records=False), entered(both, observer()):
        programs.guide(*programs.args, **programs.kwargs)
    model_trace, guide_trace = poutine.unwrap(programs.guide).get_traces()
    return guide_trace, model_trace


def run_model(
    programs: Programs, guide_trace: Trace, substitutes: Substitutes, leading: LeadingDims = ALONE
) -> Trace:
    """Run the model on the draws of a guide's trace; ``leading`` as in :func:`run_pair`."""
    state_dim = leading.state_dim
    states = None if state_dim is None else StateMessenger(guide_trace, state_dim)
    drawn = guide_trace if states is None else None
    noise = None if substitutes.noise is None else substitutes.noise.of_run()
    with (
        Recorder(substitutes, drawn) as recorder,
        entered(states, leading.model, noise, observer()),
    ):
        programs.model(*programs.args, **programs.kwargs)
    return recorder.trace


def _detached(guide_trace: Trace, keep: frozenset[str]) -> Trace:
    """Copy a guide's trace with detached draws, except at the sites ``keep``."""
    leaves = {}
    for name, site in guide_trace.nodes.items():
        if sites.is_latent(site) and name not in keep and site["value"].is_floating_point():
            leaves[name] = {"value": leaf_of(site["value"])}
    return with_changes(guide_trace, leaves)


def with_changes(trace: Trace, changes: SiteChanges) -> Trace:
    """Copy a trace with other values, or annotations, at some sites."""
    changed = trace.copy()
    for name, fields in changes.items():
        site = trace.nodes[name]
        infer = {**site["infer"], **cast("dict[str, Any]", fields.get("infer", {}))}
        changed.nodes[name] = {**site, **fields, "infer": infer}
    return changed


def entered(*handlers: AbstractContextManager[object] | None) -> ExitStack:
    """Enter the handlers that are not None, the first one outermost."""
    stack = ExitStack()
    for handler in handlers:
        if handler is not None:
            stack.enter_context(handler)
    return stack


# One run of guide and model: its terms, its structure, and its sums over plates.


@dataclass(frozen=True)
class Run:
    """
    The terms of one execution of both programs.

    :ivar terms: by :func:`terms_of`, or without some of them.
    :ivar nesting: how many batch dims belong to plates.
    :ivar leading: the size of the leading dimension at ``-nesting - 1``, or None if there is none.
    :ivar subsamples: the minibatch: the indices of each plate.
    :ivar state_dim: the first batch dim for the values of the model's enumerated sites, which are
        summed; None if the model drew them, or has none.
    :ivar noise: random numbers that the model drew outside sample sites; None if not recorded.
    :ivar mode: how its particles were vectorized.
    """

    guide_trace: Trace
    model_trace: Trace
    terms: tuple[Term, ...]
    nesting: int
    leading: int | None
    subsamples: Minibatch = field(default_factory=Minibatch)
    state_dim: int | None = None
    noise: ModelNoise | None = None
    mode: Mode = Mode.BATCHED

    @cached_property
    def guide_data(self) -> list[Term]:
        """Return the densities of the guide's observed sites, which no weight includes."""
        return observed_terms(self.guide_trace)

    @property
    def latents(self) -> dict[str, Tensor]:
        """Return the guide's random draws, without their graph."""
        nodes = self.guide_trace.nodes.items()
        return {n: changed_draw(Tensor.detach, s["value"]) for n, s in nodes if is_random(s)}

    @property
    def summands(self) -> list[Term]:
        """Return the terms of a plain ELBO: the weight's factors and the guide's observed sites."""
        return [*self.terms, *self.guide_data]

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """
        Return the structure of the programs in this run: sites, plates, sizes, and minibatches.

        Runs of one model and guide with equal signatures have the same structure, with and without
        leading dims.
        """
        return tuple([form.structure for form in self.form])

    @cached_property
    def form(self) -> tuple[SiteForm, ...]:
        """Return everything about the run's sites except their values."""
        return tuple([t.form for t in self.summands])

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of the log densities."""
        return tuple([t.log_prob.shape for t in self.terms])

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Return the sizes of all dims of plates, events and enumerated sites."""
        sites = [m.site for t in self.terms for m in (t, *t.members)]
        plates = {f.size for s in sites for f in s["cond_indep_stack"] if f.name != PARTICLE_PLATE}
        events = {n for s in sites for n in getattr(s["fn"], "event_shape", ())}
        return frozenset(plates | events).union(*(t.states for t in self.terms))

    @property
    def outer_sizes(self) -> frozenset[int]:
        """Return the sizes of the dims left of the plates: of particles, states or slots."""
        inner = [t.log_prob.shape[: max(0, t.log_prob.dim() - self.nesting)] for t in self.terms]
        return frozenset(n for shape in inner for n in shape if n > 1)

    def sum_to(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """
        Sum a batch-shaped tensor over all plates except ``dims``.

        :returns: shape ``[leading, *dims]``, or ``[*dims]`` without a leading dimension.
        """
        needed = -min(dims, default=0)
        if value.dim() < needed:
            value = value.reshape((1,) * (needed - value.dim()) + value.shape)
        lead = -self.nesting - 1
        has_lead = self.leading is not None and value.dim() > self.nesting
        drop = [d for d in range(-value.dim(), 0) if d not in dims and not (has_lead and d == lead)]
        return value.sum(drop) if drop else value

    def align(self, weight: Tensor, dims: tuple[int, ...], value: Tensor, event_dim: int) -> Tensor:
        """
        Reshape ``[leading, *dims]`` so that it multiplies a site's value.

        :param weight: without its first dimension where the run has no leading one.
        """
        sizes = iter(weight.shape[len(weight.shape) - len(dims) :])
        batch = [next(sizes) if d in dims else 1 for d in range(-self.nesting, 0)]
        shape = [*weight.shape[: len(weight.shape) - len(dims)], *batch, *[1] * event_dim]
        # Without a leading dimension, a value outside some plates has fewer dims than the plates.
        return weight.reshape(shape[max(0, len(shape) - value.dim()) :])


def terms_of(
    guide_trace: Trace, model_trace: Trace, state_dim: int | None = None, defers: bool = False
) -> tuple[Term, ...]:
    """
    Return the log density of every site of both traces that is a factor of the weight.

    :param state_dim: as in :class:`Run`; None if the model drew its enumerated sites.
    :param bool defers: compute densities at their first use.
    """
    from_model = model_factors(model_trace, state_dim, defers)
    return (*from_model, *guide_terms(guide_trace, defers))


def model_factors(model_trace: Trace, state_dim: int | None, defers: bool = False) -> list[Term]:
    """Return the factors of the model; the arguments are those of :func:`terms_of`."""
    return model_terms(model_trace, defers) if state_dim is None else summed_terms(model_trace)


# A model replayed at other values of its latents.


def replay_model(
    programs: Programs, run: Run, changes: SiteChanges, leading: LeadingDims = ALONE
) -> tuple[Run, bool]:
    """
    Run the model with other values of the guide's draws, on the same minibatch.

    If the execution has the sites and plates of ``run``, their structure is the same, and the
    results of its checks remain valid.

    :param run: an execution of both programs; its guide depends on none of its draws. Random
        numbers that its model drew outside sample sites are reused.
    :param changes: by guide site, the fields that change.
    :param leading: the leading dims of ``run``, with a new plate for the model.
    :returns: the new execution, and whether it has the sites and plates of ``run``.
    """
    guide_trace = with_changes(run.guide_trace, changes)
    substitutes = Substitutes(run.subsamples, noise=run.noise)
    model_trace = run_model(programs, guide_trace, substitutes, leading)
    before = run.model_trace.nodes
    replayed_sites = [s for s in scored(model_trace) if s["name"] in before]
    with unvalidated([s["fn"] for s in replayed_sites if was_checked(before[s["name"]], s)]):
        from_model = model_factors(model_trace, run.state_dim)
    same = [t.form for t in from_model] == [t.form for t in run.terms if not t.in_guide]
    from_guide = [_replayed_guide_term(t, guide_trace) for t in run.terms if t.in_guide]
    traces = {"guide_trace": guide_trace, "model_trace": model_trace}
    return replace(run, **traces, terms=(*from_model, *from_guide)), same


def _replayed_guide_term(old: Term, guide_trace: Trace) -> Term:
    term = guide_term(guide_trace.nodes[old.key.name], old.key)
    return term.without_density() if old.left_out else term
