"""
Whether a model with all values of its enumerated sites side by side is the model at each of them.

A program that counts dims from the left, or reads a shape, runs with the dims of states in front,
and is another program. So it is compared with runs in which each of these sites has one value: in
its densities, and in which of their entries change when some latents of the guide do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.checks.closeness import far_apart
from pyro_mcvae.programs.enumeration import is_state, support_of_state
from pyro_mcvae.programs.execution import Programs, run_model, with_changes
from pyro_mcvae.programs.leading import Leading
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.probing import ProgramError, perturbed, probe, probing
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent, is_random, unscaled_log_prob
from pyro_mcvae.programs.terms import scored
from pyro_mcvae.programs.types import Message
from pyro_mcvae.programs.validation import unvalidated
from pyro_mcvae.structure.interventions import (
    Values,
    another,
    differing,
    intervene,
    other_draws,
    random_half,
)

__all__ = ["check_states"]

Densities = dict[str, Tensor]


def check_states(programs: Programs, run: Run) -> None:
    """
    Check that a model's densities do not depend on how many values of its sites there are.

    :param run: in which the model's enumerated sites are summed.
    :raises RuntimeError: naming the site that has another density, or saying that it is not known.
    """
    try:
        with probing(programs):
            guide_trace = probe(programs, run.subsamples).guide_trace
        latents = {s["name"]: s for s in scored(guide_trace) if is_random(s)}
        with other_draws():
            others = {n: another(s) for n, s in latents.items()}
            halves = {n: _half(s["fn"].batch_shape) for n, s in latents.items()}
        states = _States(programs, run, guide_trace)
        # A point mass at a parameter stays where it is while parameters are perturbed.
        values = {s["name"]: s["value"] for s in scored(guide_trace) if is_latent(s)}
        smooth = any(values[n].is_floating_point() for n in latents)
        for generic in (True, False):
            try:
                with perturbed(programs) if generic else nullcontext():
                    for undefined in (True, False) if smooth else (False,):
                        one = intervene(latents, values, others, halves, undefined)
                        two = {n: ~half for n, half in halves.items()}
                        two = intervene(latents, values, others, two, undefined)
                        states.compare(values, [one, two], undefined)
            except ProgramError:
                if not generic:
                    raise
    except ProgramError as error:
        raise RuntimeError(
            f"the values of the model's enumerated sites cannot be compared with single ones "
            f"({error}): draw these sites in the guide, or make the model run at any latents"
        ) from error


def _half(shape: tuple[int, ...]) -> Tensor:
    return random_half(math.prod(shape)).reshape(shape)


class _States:
    """Runs of a model with all values of its enumerated sites, and with one value of each."""

    def __init__(self, programs: Programs, run: Run, guide_trace: Trace) -> None:
        self._programs, self._run, self._guide_trace = programs, run, guide_trace

    def compare(self, values: Values, changed: list[Values], undefined: bool) -> None:
        """
        Compare densities, and which entries change, at the first and the last value of each site.

        :param values: the latents of the guide.
        :param changed: the same with some entries changed.
        """
        together, states = self._together(values)
        after = [self._together(c)[0] for c in changed]
        for at in (-1, 0):
            drawn = {name: support[at] for name, support in states.items()}
            alone = self._alone(values, drawn)
            for name in together.keys() & alone.keys():
                self._check(name, _state(together[name], at, self._run.nesting), alone[name])
            for one, moved in zip(after, changed, strict=True):
                after_alone = self._alone(moved, drawn)
                for name in together.keys() & alone.keys() & one.keys() & after_alone.keys():
                    met = differing(together[name], one[name], undefined)
                    own = differing(alone[name], after_alone[name], undefined)
                    if bool((_state(met, at, self._run.nesting) & ~own).any()):
                        raise _mismatch(name, "")

    def _check(self, name: str, together: Tensor, alone: Tensor) -> None:
        if bool(far_apart(together, alone).any()):
            sums = f" ({float(together.sum()):.4g} and {float(alone.sum()):.4g} in sum)"
            raise _mismatch(name, sums)

    def _together(self, values: Values) -> tuple[Densities, dict[str, Tensor]]:
        """The densities, and the values of each enumerated site."""
        changes = {n: {"value": v} for n, v in values.items()}
        guide_trace = with_changes(self._guide_trace, changes)
        leading = Leading(state_dim=-1 - self._run.nesting)
        with probing(self._programs):
            try:
                trace = run_model(
                    self._programs,
                    guide_trace,
                    Substitutes(Minibatch(self._run.subsamples)),
                    leading,
                )
                return _log_probs(trace), {
                    s["name"]: support_of_state(s) for s in scored(trace) if is_state(s)
                }
            except Exception as error:
                raise ProgramError(f"{type(error).__name__}: {error}") from error

    def _alone(self, values: Values, states: Mapping[str, Tensor]) -> Densities:
        def sample_fn(msg: Message) -> Tensor | None:
            state = states.get(msg["name"])
            return None if state is None else state.expand(msg["fn"].shape())

        with probing(self._programs):
            found = probe(self._programs, self._run.subsamples, values, sample_fn)
        return _log_probs(found.model_trace)


def _mismatch(name: str, sums: str) -> RuntimeError:
    return RuntimeError(
        f"site '{name}' of the model has another log density where all values of the enumerated "
        f"sites stand side by side than at one of them{sums}, so the program takes one dim for "
        f"another: index and reduce from the right, as in Vindex(means)[..., y] and softmax(-1), "
        f"and read no shape of an enumerated value; or draw these sites in the guide"
    )


def _log_probs(trace: Trace) -> Densities:
    with unvalidated([s["fn"] for s in scored(trace)]):
        return {s["name"]: unscaled_log_prob(s, "model").detach() for s in scored(trace)}


def _state(value: Tensor, at: int, nesting: int) -> Tensor:
    """One value of each enumerated site: ``[*plates]``."""
    while value.dim() > nesting:
        value = value[at]
    return value
