"""Derive the structure of a model and guide: blocks, roots, collapsed and auxiliary sites."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.ops.checks import WarnOnce, check_flag
from pyro_mcvae.programs.contract import checked_run
from pyro_mcvae.programs.messengers import Leading
from pyro_mcvae.programs.probing import ProgramError
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, known_support, reparameterized
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, PlateKey, is_subsampled, plate_frames, plate_key
from pyro_mcvae.programs.vmap import particle_plates
from pyro_mcvae.structure import dependencies
from pyro_mcvae.structure.blocks import (
    Factor,
    Frames,
    Structure,
    derive_structure,
    needs_dependencies,
    weigh_together,
)
from pyro_mcvae.structure.cache import Analyses, Analysis
from pyro_mcvae.structure.dependencies import Dependencies, dependencies_of
from pyro_mcvae.structure.independence import find_dependent_plates, find_shared_noise

# Guide sites whose draws reach no data, which see the guide's parameters instead.


def find_collapsed(
    programs: Programs, run: Run, names: frozenset[str], known: Dependencies | None = None
) -> tuple[str, str] | None:
    """
    A guide site that reaches no data, and an observed site that has its parameters instead.

    :param names: the guide's random sites.
    :param known: what has been found out about them already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # programs that cannot be tracked tell nothing
        found = known or dependencies_of(programs, names, run)
    observed = {
        t.key
        for t in run.terms
        if not t.in_guide and any(factor.site["is_observed"] for factor in t.sites)
    }
    lost = names - _reaching(found, observed)
    if not lost:
        return None
    own = {n: found.parameters.get(FactorKey("guide", n), frozenset()) for n in names}
    # What a draw that reaches data has too says nothing: networks of several sites, tied weights.
    others = frozenset().union(*(own[n] for n in names - lost))
    for key in observed:
        for name in sorted(lost):
            if (own[name] - others) & found.parameters.get(key, frozenset()):
                return name, key.name
    return None


def _reaching(found: Dependencies, observed: set[FactorKey]) -> set[str]:
    """The draws that some data depend on, if through others in the model."""
    factors: Mapping[FactorKey, frozenset[str]] = found.factors
    reached = {name for key in observed for name in factors.get(key, frozenset())}
    before = -1
    while len(reached) != before:
        before = len(reached)
        for parents in factors.values():
            if parents & reached:
                reached |= parents
    return reached


# Draws of a guide that the model does not have: whether their density is one of its latents.


def without_auxiliary(programs: Programs, run: Run, analysis: Analysis) -> Run:
    r"""
    A run without the density of auxiliary draws that are no latents.

    AutoGuides draw u and make :math:`z = f(u)` of it, a point mass with the logarithm of f's
    Jacobian: log q(u) is part of log q(z). But a guide that draws u, and then z from q(z | u), has
    the marginal :math:`\int q(u) q(z \mid u)\, du`. With log q(u) in the weight each u would count
    for the latents once more: a mixture of M components would have M times the evidence. Without
    it, the weight p(x, z) / q(z | u) has the mean p(x) for every u whose q(z | u) reaches all z.
    """
    drawn = tuple(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    left_out = frozenset(drawn) - _latents(run.model_trace)
    points = tuple(_points(run)) if left_out else ()
    if points:
        left_out -= analysis.once(
            ("auxiliary", drawn, points), lambda: _behind(programs, run, frozenset(drawn), points)
        )
    if not left_out:
        return run
    terms = (t.without_density() if t.in_guide and t.key.name in left_out else t for t in run.terms)
    return replace(run, terms=tuple(terms))


def _latents(trace: Trace) -> set[str]:
    return {name for name, site in trace.nodes.items() if is_latent(site)}


def _points(run: Run) -> Iterator[str]:
    latents = _latents(run.model_trace)
    for term in run.terms:
        point = term.in_guide and is_latent(term.site) and is_delta(term.site["fn"])
        if point and term.key.name in latents:
            yield term.key.name


def _behind(
    programs: Programs, run: Run, drawn: frozenset[str], points: tuple[str, ...]
) -> frozenset[str]:
    """The draws from which point masses of their own kind, discrete or not, were computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing changes where it cannot be traced
        found = dependencies_of(programs, drawn, run)
    guide, model = run.guide_trace.nodes, run.model_trace.nodes
    behind: set[str] = set()
    for point in points:
        # A label that only chooses among maps of another draw is no part of a density in z.
        discrete = known_support(model[point]["fn"]).is_discrete
        parents = found.factors.get(FactorKey("guide", point), drawn)
        behind |= {n for n in parents if known_support(guide[n]["fn"]).is_discrete == discrete}
    return frozenset(behind)


# Finds the structure of a pair of programs from their runs, once for each structure they show.

_logger = logging.getLogger(__name__)

_NONE: frozenset[PlateKey] = frozenset()


class StructureFinder:
    """
    The blocks of the programs behind a run, remembered by the sites and plates that it shows.

    Where the plates alone do not tell what depends on what, the programs are run once more with
    dependencies traced, for each structure that they show.

    :param bool joint: one weight over everything.
    :param bool find_roots: also find out which guide sites depend on no other draw.
    """

    def __init__(
        self, joint: bool = False, find_roots: bool = False, analyses: Analyses | None = None
    ) -> None:
        check_flag("joint", joint)
        self.joint = joint
        self.find_roots = find_roots
        self.analyses = analyses or Analyses()
        self._warn = WarnOnce(_logger)  # each analysis finds it again

    def of(self, programs: Programs, run: Run) -> Structure:
        """Return the blocks of the programs that made this run."""
        scored = tuple([isinstance(t.score, Tensor) for t in run.terms])
        key = "structure", self.joint, self.find_roots, scored, run.signature, run.sizes
        analysis = self.analyses.of(programs)
        return analysis.compared(key, lambda: self._derive(programs, run))

    def _derive(self, programs: Programs, run: Run) -> Structure:
        frames = {t.key: plate_frames(t.site) for t in run.terms}
        for told in _other_names({t.key: plate_frames(t.site) for r in run.terms for t in r.sites}):
            self._warn(told)
        latents = [t for t in run.terms if t.in_guide and is_latent(t.site)]
        # A guide of point masses alone is weighed per datum as well.
        random = [t for t in latents if not is_delta(t.site["fn"])] or latents
        if any(_data_lead(t, run) for t in run.terms):
            checked_run(programs, strict_enumeration=False)  # raises for undeclared dims
        order = [t.key.name for t in random]
        names = frozenset(order)
        own = {n: frames[FactorKey("guide", n)] for n in order}
        coupled = {} if self.joint else self._coupled(programs, run)
        frames = _without_coupled(frames, coupled)
        noise = {} if self.joint else find_shared_noise(programs, run)
        declared, frames = frames, _without_coupled(frames, noise)
        factors = {key: Factor(f, None) for key, f in frames.items()}
        ask = not self.joint and needs_dependencies(factors, names)
        masked_by: dict[str, frozenset[str]] = {}
        found: dependencies.Dependencies | None = None
        if ask or (self.find_roots and (len(names) > 1 or run.guide_data)):
            found = dependencies.dependencies_of(programs, names, run)
            factors = {key: Factor(f, found.factors.get(key)) for key, f in frames.items()}
            masked_by = {k.name: f for k, f in found.masks.items() if f and k.program == "guide"}
        elif len(names) == 1:
            factors = {
                key: Factor(f, names if key.program == "guide" else None)
                for key, f in frames.items()
            }
        factors = _with_turns(factors, coupled, own)
        structure = derive_structure(factors, order, self.joint)
        shared = {f for key in noise for f in declared[key] - frames[key]}
        if any(map(is_subsampled, shared)) or (set(noise) & structure.outside):
            # Each particle has draws of its own, which are no global latents.
            structure = weigh_together(declared)
        block_of = dict(structure.block_of)
        for t in run.terms:
            # All or none of the sites of a sum are shared by the particles.
            block_of.update(dict.fromkeys((m.key for m in t.members), block_of[t.key]))
        # What lies in no plate is what a model may integrate for all data at once.
        alone = frozenset(n for n in names if not frames[FactorKey("guide", n)])
        collapsed = find_collapsed(programs, run, names, found) if alone else None
        return replace(
            structure,
            block_of=block_of,
            roots=_roots(run, random, factors, found),
            mean_field=_mean_field(factors, names),
            masked_by=masked_by,
            coupled=coupled,
            collapsed=collapsed,
        )

    def _coupled(self, programs: Programs, run: Run) -> dict[FactorKey, frozenset[PlateKey]]:
        """For each factor, find the plates across whose elements it depends on latents."""
        analysis, key = self.analyses.of(programs), ("plates", run.signature, run.sizes)
        found = analysis.once(key, lambda: self._dependent_plates(programs, run, analysis, key))
        sums = {t.key: [found.get(m.key, _NONE) for m in t.members] for t in run.terms if t.members}
        return found | {key: _NONE.union(*parts) for key, parts in sums.items() if any(parts)}

    def _dependent_plates(
        self, programs: Programs, run: Run, analysis: Analysis, key: tuple[object, ...]
    ) -> dict[FactorKey, frozenset[PlateKey]]:
        """
        Find the dependent plates of a run, and keep those that an earlier analysis has found.

        A repeated analysis separates fewer pairs of elements.
        """
        before: dict[FactorKey, frozenset[PlateKey]] = analysis.before(key, {})
        thorough = analysis.before(key) is None
        try:
            try:
                at = None if run.leading else run.latents
                found, reads = find_dependent_plates(programs, run.subsamples, thorough, at=at)
            except ProgramError:
                if run.leading is None:
                    raise
                # Programs may rely on the particles that they were promised.
                leading = _leading_of(run)
                found, reads = find_dependent_plates(programs, run.subsamples, thorough, leading)
            for read in reads[:1]:
                self._warn(
                    f"the model or guide reads a value that depends on site '{min(read.sites)}', "
                    f"at {read.line}, and may decide anything by it, so the elements of a plate "
                    f"that it was computed from share one weight: decide for each by torch.where"
                )
            for met, plates in () if reads else found.items():
                self._warn(_met(met, plates))
        except ProgramError as error:
            self._warn(
                f"the model and guide fail at other latents than those that they drew ({error}), "
                f"so whether the elements of a plate are independent is not known: they share one "
                f"weight"
            )
            frames = {t.key: plate_frames(t.site) for whole in run.terms for t in whole.sites}
            found = {k: frozenset(map(plate_key, f)) for k, f in frames.items() if f}
        return {k: found.get(k, _NONE) | before.get(k, _NONE) for k in {**found, **before}}


def _leading_of(run: Run) -> Callable[[], Leading]:
    """Makes leading dims as those of a run without shared sites."""
    none = frozenset[str](), frozenset[str]()
    count, dim = run.leading or 1, -run.nesting - 1
    return lambda: particle_plates(run.way, count, dim, none)


def _with_turns(
    factors: Mapping[FactorKey, Factor],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
    latents: Mapping[str, Frames],
) -> dict[FactorKey, Factor]:
    """What depends on another turn of a sequential plate may depend on all of its turns."""
    found = dict(factors)
    for key, plates in coupled.items():
        turns = {p.name for p in plates if p.dim is None}
        factor = found.get(key)
        if factor is not None and factor.parents is not None and turns:
            met = {n for n, frames in latents.items() if turns & {f.name for f in frames}}
            found[key] = factor._replace(parents=factor.parents | met)
    return found


def _roots(
    run: Run,
    random: list[Term],
    factors: Mapping[FactorKey, Factor],
    found: dependencies.Dependencies | None,
) -> frozenset[str]:
    """The guide's random sites that depend on no other reparameterized draw."""
    names = {t.key.name for t in random}
    paths = {t.key.name for t in random if reparameterized(t.site)}
    roots = set()
    for name in names:
        parents = factors[FactorKey("guide", name)].parents
        if parents is not None and not (parents & paths) - {name}:
            roots.add(name)
    # The second factor of a draw's gradient must not meet a score function behind the draw.
    for t in run.terms:
        if t.in_guide and isinstance(t.score, Tensor):
            behind = factors[t.key].parents
            roots -= names if behind is None else behind
    # Nor the gradient of what has no weight.
    for t in run.guide_data:
        roots -= names if found is None else found.factors.get(t.key, names)
    return frozenset(roots)


def _other_names(frames: Mapping[FactorKey, Frames]) -> Iterator[str]:
    """What is to be said of latents whose plates have another name in the model."""
    for key, own in frames.items():
        found = frames.get(FactorKey("model", key.name), own) if key.program == "guide" else own
        for f, g in ((f, g) for f in own - found for g in found - own):
            if g.dim == f.dim and g.name != f.name:
                yield (
                    f"site '{key.name}' lies in plate '{f.name}' of the guide and in plate "
                    f"'{g.name}' of the model, which are two plates, so that their elements share "
                    f"one weight: give them one name"
                )


def _met(key: FactorKey, plates: frozenset[PlateKey]) -> str:
    return (
        f"site '{key.name}' of the {key.program} lets the elements of plate "
        f"{', '.join(repr(p.name) for p in plates)} depend on each other's latents (as "
        f"z.cumsum(-1) does), so these share one weight"
    )


def _without_coupled(
    frames: Mapping[FactorKey, Frames], coupled: Mapping[FactorKey, frozenset[PlateKey]]
) -> dict[FactorKey, Frames]:
    """
    The plates across whose elements each factor is a product.

    A factor whose elements depend on each other's latents stands outside the plate, in effect.
    """
    none: frozenset[PlateKey] = frozenset()
    return {
        key: frozenset(f for f in found if plate_key(f) not in coupled.get(key, none))
        for key, found in frames.items()
    }


def _data_lead(term: Term, run: Run) -> bool:
    """Whether an observed value has the particles' dim: computed from latents, or undeclared."""
    if run.leading is None or not term.site["is_observed"]:
        return False
    value, event_dim = term.site["value"], getattr(term.site["fn"], "event_dim", 0)
    place = value.dim() - event_dim - run.nesting - 1
    return place >= 0 and value.shape[place] != 1


def _mean_field(factors: Mapping[FactorKey, Factor], names: frozenset[str]) -> bool:
    """Whether the guide is its random sites alone, none of which depends on another."""
    return all(
        key.name in names and factor.parents == frozenset({key.name})
        for key, factor in factors.items()
        if key.program == "guide"
    )
