"""Extra runs of a program pair, without particles, that find out its structure."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.plates import plate_key
from pyro_mcvae.programs.probing import probing
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_scored, masks_of
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.tracking import Escapes, TrackDraws, marks_of, unmarked


class Dependencies(NamedTuple):
    """
    What depends on which draws of the guide, directly.

    :ivar factors: for each site's log density with the user's scale and mask, which depends on the
        site's value too.
    :ivar masks: for each site's masks.
    :ivar parameters: for each site's log density, the identities of the leaves that it has.
    """

    factors: dict[FactorKey, frozenset[str]]
    masks: dict[FactorKey, frozenset[str]]
    parameters: dict[FactorKey, frozenset[int]]

    def ancestors(self, names: frozenset[str]) -> dict[str, frozenset[str]]:
        """Each of some guide sites with those that it depends on, directly or through others."""
        keys = {name: FactorKey("guide", name) for name in names}
        closed = {name: self.factors.get(key, names) | {name} for name, key in keys.items()}
        for _ in names:
            wider = {n: frozenset().union(*(closed[p] for p in ps)) for n, ps in closed.items()}
            if wider == closed:
                break
            closed = wider
        return closed

    def with_sums(self, terms: Iterable[Term]) -> Dependencies:
        """What is known of sums over enumerated sites too, which depend as their members do."""
        sums = {t.key: [m.key for m in t.members] for t in terms if t.members}
        return Dependencies(*({**part, **_united(part, sums)} for part in self)) if sums else self


def _united(
    part: Mapping[FactorKey, frozenset[Any]], sums: Mapping[FactorKey, list[FactorKey]]
) -> dict[FactorKey, frozenset[Any]]:
    return {
        key: frozenset().union(*(part.get(m, frozenset()) for m in members))
        for key, members in sums.items()
        if any(m in part for m in members)
    }


def find_dependencies(
    programs: Programs,
    tracked: frozenset[str],
    subsamples: Mapping[str, Tensor],
    at: Mapping[str, Tensor] | None = None,
) -> Dependencies:
    """
    Find the tracked guide sites on which each factor of the weight depends directly.

    :param subsamples: the minibatch, for programs whose sites depend on it.
    :param at: the guide's latents, for programs whose sites depend on these; drawn if left out.

    Programs that cannot be tracked (an operator that refuses tensor subclasses) yield nothing,
    with a warning: their factors count as depending on everything, which is always correct,
    though the bound may be looser.
    """
    tracker = TrackDraws(tracked, frozenset(at or ()))
    try:
        with probing(programs), torch.enable_grad():
            escapes = Escapes()
            with tracker, escapes:
                guide_trace, model_trace = run_pair(
                    programs, Substitutes(Minibatch(subsamples), at or {})
                )
            traces = {"guide": guide_trace, "model": model_trace}
            found = _trace_factors(traces, tracker)
    except Exception as error:
        warnings.warn(
            f"cannot trace which sites depend on which ({type(error).__name__}: {error}); all "
            f"latents are weighed together, or, under subsampling, as in the plain ELBO",
            stacklevel=2,
        )
        return Dependencies({}, {}, {})
    # What became of these draws is not known: anything may depend on them. Whether another turn of
    # a sequential plate does is tested by interventions.
    escaped = {n: _turns(guide_trace.nodes[n]) for n in escapes.names & tracked}

    def wider(key: FactorKey, parents: frozenset[str]) -> frozenset[str]:
        turns = _turns(traces[key.program].nodes[key.name])
        same = (
            n for n, own in escaped.items() if all(turns.get(p, t) == t for p, t in own.items())
        )
        return parents.union(same)

    return found._replace(factors={key: wider(key, f) for key, f in found.factors.items()})


def _turns(site: Site) -> dict[str, int]:
    """The turns of the sequential plates that a site is in."""
    keys = map(plate_key, site["cond_indep_stack"])
    return {key.name: key.counter for key in keys if key.dim is None}


def dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    """
    The same of programs that made this run, with sums over enumerated sites.

    Runs of one call with and without leading dims, which show one structure, share the look.
    """
    found = programs.once(
        ("dependencies", tracked, run.signature),
        lambda: _dependencies_of(programs, tracked, run),
    )
    return found.with_sums(run.terms)


def _dependencies_of(programs: Programs, tracked: frozenset[str], run: Run) -> Dependencies:
    found = find_dependencies(programs, tracked, run.subsamples)
    known = {m.key for t in run.summands for m in t.sites} <= found.factors.keys()
    if known or run.leading is not None or not found.factors:
        return found
    # Draws of its own had other sites.
    return find_dependencies(programs, tracked, run.subsamples, run.latents)


def _trace_factors(traces: Mapping[str, Trace], tracker: TrackDraws) -> Dependencies:
    found = Dependencies({}, {}, {})
    for program, trace in traces.items():
        for name, site in trace.nodes.items():
            if not is_scored(site):
                continue
            key = FactorKey(program, name)
            upstream = None
            if program == "guide":
                upstream = tracker.upstream.get(name)
                if upstream is None:
                    # Of a point mass, the value says more than its density, a comparison.
                    upstream = _behind([site["value"]], tracker)
            around = _behind([site["scale"], *masks_of(site)], tracker)
            log_prob = _log_prob_at(site)
            parents = _parents_of(log_prob, upstream, tracker)
            if upstream is not None:
                parents |= upstream | ({name} & tracker.tracked)
            found.masks[key] = _behind(masks_of(site), tracker) & tracker.tracked
            found.factors[key] = (parents | around) & tracker.tracked
            found.parameters[key] = _leaves_of(log_prob)
    return found


def _log_prob_at(site: Site) -> Tensor | Exception:
    """A site's log density, or the error of a flow without an inverse."""
    try:
        return site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    except (NotImplementedError, KeyError) as error:
        return error


def _parents_of(
    log_prob: Tensor | Exception, upstream: frozenset[str] | None, tracker: TrackDraws
) -> frozenset[str]:
    if not isinstance(log_prob, Exception):
        return _behind([log_prob], tracker)
    if upstream is None:
        raise log_prob
    return upstream  # what the flow's draw was computed from says enough


def _leaves_of(log_prob: Tensor | Exception) -> frozenset[int]:
    if isinstance(log_prob, Exception):
        return frozenset()
    bare: Tensor = unmarked(log_prob)
    return frozenset(leaves_behind(bare)) if bare.requires_grad else frozenset()


def _behind(values: Sequence[object], tracker: TrackDraws) -> frozenset[str]:
    """The draws that some numbers were computed from."""
    found = marks_of(values)
    for value in map(unmarked, values):
        if isinstance(value, Tensor) and value.requires_grad:
            behind = leaves_behind(value)
            found |= {tracker.name_of[i] for i in behind if i in tracker.name_of}
    return found


def leaves_behind(tensor: Tensor) -> set[int]:
    """The identities of the leaves in a tensor's autograd graph."""
    found, seen, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return found
