"""
Plates whose elements depend on each other's latents.

A plate says that its elements are independent, and Pyro does not enforce it: a random walk drawn as
``z.cumsum(-1)`` in a plate of steps, or neighbours that meet in ``z[1:] - z[:-1]``, are trained by
the plain ELBO all the same. A weight per element would be no weight, and its bound no bound.

So some of a plate's elements get other latents, and the densities of the others must stay as they
are. The subsets separate every pair of elements. A value that Python code reads may decide
anything: what it was computed from shares one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.programs.execution import Programs, is_messenger
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.plates import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.probing import (
    Probe,
    ProgramError,
    perturbed,
    probe,
    probe_model,
    probing,
)
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.interventions import (
    Values,
    another,
    differing,
    intervene,
    other_draws,
    random_halves,
    separating_subsets,
)
from pyro_mcvae.structure.reads import Read, Reads, reads_of_latents

Found = dict[FactorKey, frozenset[PlateKey]]


class DependentPlates(NamedTuple):
    """
    Plates whose elements depend on each other's latents.

    :ivar plates: for each factor the plates around it across which it depends on latents.
    :ivar reads: where Python code reads the value of a latent, by which it may decide anything.
    """

    plates: Found
    reads: list[Read]


def find_dependent_plates(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    thorough: bool = True,
    leading: Callable[[], Leading] = lambda: ALONE,
    at: Mapping[str, Tensor] | None = None,
) -> DependentPlates:
    """
    For each factor, find the plates around it across which it depends on random guide sites.

    Of a sequential plate the factor's own turn is named. Batch normalisation does not count: its
    use is to let data depend on each other.

    :param subsamples: the minibatch.
    :param bool thorough: separate every pair of elements, instead of a random half and the rest.
    :param leading: makes the leading dims of each run, for programs that do not run without.
    :param at: latents to begin with, on which the sites of the programs may depend.
    :raises ProgramError: for programs that fail at other latents.
    """
    with probing(programs), Reads() as watch:
        first = probe(programs, subsamples, at, leading=leading())
    latents = {n: s for n, s in first.guide_trace.nodes.items() if is_random(s)}
    with other_draws():
        others = {n: another(s) for n, s in latents.items()}
        halves = [(p, [*random_halves(p[0].size)]) for p in _plates(latents)]
    if not halves:
        return DependentPlates({}, [])
    values = {n: s["value"] for n, s in latents.items()}
    reads = reads_of_latents(programs, first.subsamples, frozenset(latents), watch.reads)
    experiment = _Experiment(programs, first, latents, values, others, bool(reads), leading)
    found = _read(first, latents, reads)
    for plate, pair in halves:
        both = [_Subset(plate, s) for s in pair]
        if thorough:
            experiment.run(found, [_Subset(plate, s) for s in separating_subsets(plate[0].size)])
            # NaN hides behind comparisons.
            experiment.run(found, both, undefined=False)
        else:
            experiment.run(found, both[:1])
    return DependentPlates(found, reads)


class _Subset(NamedTuple):
    """
    Chosen elements of one plate.

    :ivar frames: the plate, or the turns of a sequential one.
    :ivar chosen: which of its elements; of a sequential plate which turns.
    """

    frames: tuple[CondIndepStackFrame, ...]
    chosen: Tensor

    def where(self, latents: Mapping[str, Site], values: Values) -> Values:
        """Which entries of each latent lie in the chosen elements."""
        found = {}
        for name, site in latents.items():
            frame = next((f for f in self.frames if f in plate_frames(site)), None)
            if frame is None:
                continue
            if frame.dim is None:
                if self._has_turn(frame):
                    found[name] = torch.ones((), dtype=torch.bool)
            elif values[name].dim() >= site["fn"].event_dim - frame.dim:
                found[name] = self.chosen.reshape((-1,) + (1,) * (-frame.dim - 1))
        return found

    def kept(self, term: Term, changed: Tensor) -> bool:
        """Whether a factor has changed at elements that were not chosen."""
        frame = next((f for f in self.frames if f in plate_frames(term.site)), None)
        if frame is None:
            return False
        if frame.dim is None:
            return not self._has_turn(frame) and bool(changed.any())
        if changed.dim() < -frame.dim or changed.shape[frame.dim] != frame.size:
            return False
        at = (~self.chosen).to(changed.device).nonzero().squeeze(-1)
        return bool(changed.index_select(frame.dim, at).any())

    def key_of(self, term: Term) -> PlateKey:
        return plate_key(next(f for f in self.frames if f in plate_frames(term.site)))

    def _has_turn(self, frame: CondIndepStackFrame) -> bool:
        return bool(self.chosen[plate_key(frame).counter - 1])


def _plates(latents: Mapping[str, Site]) -> list[tuple[CondIndepStackFrame, ...]]:
    """The plates around latents; all turns of a sequential one together."""
    frames = sorted({f for s in latents.values() for f in plate_frames(s)}, key=str)
    plates = [(f,) for f in frames if f.dim is not None]
    for name in sorted({f.name for f in frames if f.dim is None}):
        plates.append(tuple(f for f in frames if f.dim is None and f.name == name))
    return [p for p in plates if p[0].size > 1]


def _read(first: Probe, latents: Mapping[str, Site], reads: list[Read]) -> Found:
    """The plates of latents whose values are read: any factor in them may depend on all of it."""
    names = frozenset().union(*(r.sites for r in reads))
    plates = {f for n in names & latents.keys() for f in plate_frames(latents[n])}
    found = {}
    for key, term in first.terms.items():
        met = {plate_key(f) for f in plate_frames(term.site) & plates if f.dim is not None}
        if met:
            found[key] = frozenset(met)
    return found


class _Experiment:
    """
    Runs of one pair of programs at changed latents, compared with a run at the same ones.

    :param latents: the random sites of the guide.
    :param values: their values.
    :param others: other values.
    :param reads: whether Python code reads a value of them; NaN might then lead anywhere.
    """

    def __init__(
        self,
        programs: Programs,
        first: Probe,
        latents: Mapping[str, Site],
        values: Values,
        others: Values,
        reads: bool,
        leading: Callable[[], Leading],
    ) -> None:
        self._programs, self._subsamples, self._leading = programs, first.subsamples, leading
        self._latents, self._values, self._others = latents, values, others
        smooth = [v.is_floating_point() for v in values.values()]
        self._undefined, self._discrete = any(smooth) and not reads, not all(smooth)
        # Of a single latent the guide has nothing to say.
        self._guide = None if len(values) > 1 or is_messenger(programs) else first.guide_trace
        self._before: dict[bool, dict[FactorKey, Term]] = {}
        self._unstable: dict[bool, frozenset[FactorKey]] = {}

    def run(self, found: Found, subsets: list[_Subset], undefined: bool = True) -> None:
        """
        Add what depends on chosen elements from outside of them.

        :param bool undefined: whether latents may become NaN.
        """
        if undefined and self._undefined:
            try:
                return self._add(found, subsets, True, self._discrete)
            except ProgramError:
                self._undefined = False  # programs that refuse NaN
        # At generic parameters a layer that is zero at first hides nothing.
        try:
            self._add(found, subsets, False, True)
        except ProgramError:
            self._add(found, subsets, False, False)
        return None

    def _add(self, found: Found, subsets: list[_Subset], undefined: bool, generic: bool) -> None:
        before = self._baseline(generic)
        for subset in subsets:
            where = subset.where(self._latents, self._values)
            moved = intervene(self._latents, self._values, self._others, where, undefined)
            after = self._terms(moved, generic)
            for key, term in before.items():
                old = term.log_prob.detach()
                new = after[key].log_prob.detach() if key in after else old.new_zeros(1, *old.shape)
                met = subset.kept(term, differing(old, new, undefined))
                if met and self._is_unstable(key, generic):
                    met = old.shape == new.shape and subset.kept(term, old.isnan() ^ new.isnan())
                if met:
                    found[key] = found.get(key, frozenset()) | {subset.key_of(term)}

    def _baseline(self, generic: bool) -> dict[FactorKey, Term]:
        if generic not in self._before:
            self._before[generic] = self._terms(self._values, generic)
        return self._before[generic]

    def _is_unstable(self, key: FactorKey, generic: bool) -> bool:
        """Whether a factor changes from run to run, as by another generator or atomic additions."""
        if generic not in self._unstable:
            again, before = self._terms(self._values, generic), self._before[generic]
            self._unstable[generic] = frozenset(
                k
                for k, t in before.items()
                if k not in again or bool(differing(t.log_prob, again[k].log_prob, False).any())
            )
        return key in self._unstable[generic]

    def _terms(self, values: Values, generic: bool) -> dict[FactorKey, Term]:
        """The factors that may depend on more than their own site: of one latent, the model's."""
        if generic:
            with perturbed(self._programs):
                return self._terms(values, False)
        with probing(self._programs):
            leading = self._leading()
            if self._guide is None:
                terms = probe(self._programs, self._subsamples, values, leading=leading).terms
            else:
                terms = probe_model(self._programs, self._guide, self._subsamples, values, leading)
        return {key: t for key, t in terms.items() if len(self._values) > 1 or not t.in_guide}
