"""Derive the structure of a model and guide: blocks, roots, collapsed and auxiliary sites."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.ops.checks import WarnOnce, check_flag
from pyro_mcvae.programs.contract import checked_run
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import (
    is_delta,
    is_latent,
    is_random,
    is_record,
    known_support,
    reparameterized,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, PlateKey, SiteError, plate_frames, plate_key
from pyro_mcvae.structure.blocks import (
    Factor,
    Frames,
    Structure,
    derive_structure,
    needs_dependencies,
    weigh_together,
)
from pyro_mcvae.structure.cache import Analyses, Analysis
from pyro_mcvae.structure.marked import DrawDependencies, MarkedRunError, dependencies_of, marked

# Guide sites on whose draws no data depend: the data depend on the guide's parameters instead.


def find_collapsed(
    programs: Programs, run: Run, names: frozenset[str], deps: DrawDependencies | None = None
) -> tuple[str, str] | None:
    """
    Find a guide site on which no data depend, and an observed site that has its parameters.

    :param names: the guide's random sites.
    :param deps: their dependencies, if already traced.
    """
    traced = deps or dependencies_of(programs, names, run)
    observed = {
        t.key
        for t in run.terms
        if not t.in_guide and any(factor.site["is_observed"] for factor in t.sites)
    }
    unread = names - _reaching(traced, observed)
    if not unread:
        return None
    parameters = {n: traced.parameters.get(FactorKey("guide", n), frozenset()) for n in names}
    # Parameters that also belong to sites on which data depend do not count: common networks, tied
    # weights.
    used = frozenset().union(*(parameters[n] for n in names - unread))
    for key in observed:
        for name in sorted(unread):
            if (parameters[name] - used) & traced.parameters.get(key, frozenset()):
                return name, key.name
    return None


def _reaching(traced: DrawDependencies, observed: set[FactorKey]) -> set[str]:
    """Return the draws that data depend on, directly or through others in the model."""
    factors: Mapping[FactorKey, frozenset[str]] = traced.factors
    reached = {name for key in observed for name in factors.get(key, frozenset())}
    before = -1
    while len(reached) != before:
        before = len(reached)
        for parents in factors.values():
            if parents & reached:
                reached |= parents
    return reached


# Auxiliary draws of a guide, and whether their density belongs to the model's latents.


def without_auxiliary(programs: Programs, run: Run, analyses: Analyses) -> Run:
    r"""
    Return a run without the density of auxiliary draws that do not determine latents.

    AutoGuides draw u and compute :math:`z = f(u)`, a point mass with the log Jacobian of f. Then
    log q(u) is part of log q(z). But a guide that draws u, and then z from q(z | u), has the
    marginal :math:`\int q(u) q(z \mid u)\, du`. With log q(u) in the weight the latents would be
    counted once per u. For example, a mixture of M components would have M times the evidence.
    Without it, the weight p(x, z) / q(z | u) has the mean p(x) for every u whose q(z | u) reaches
    all z.
    """
    drawn = tuple(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    left_out = frozenset(drawn) - _latents(run.model_trace)
    points = tuple(_points(run)) if left_out else ()
    if points:
        left_out -= analyses.of(programs).cached(
            ("auxiliary", drawn, points), lambda: _sources(programs, run, frozenset(drawn), points)
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


def _sources(
    programs: Programs, run: Run, drawn: frozenset[str], points: tuple[str, ...]
) -> frozenset[str]:
    """Return the draws from which point masses of the same kind (discrete or not) were computed."""
    try:
        traced = marked(programs, run).dependencies(drawn)
    except MarkedRunError as error:
        raise SiteError(
            f"it is unknown whether site '{points[0]}' of the guide is computed from its auxiliary "
            f"draws {', '.join(map(repr, sorted(drawn)))}, because the programs fail when they run "
            f"again at the same draws ({error}): make them run at any time with the same result"
        ) from error
    guide, model = run.guide_trace.nodes, run.model_trace.nodes
    sources: set[str] = set()
    for point in points:
        # A label that only chooses among maps of another draw is not part of a density of z.
        discrete = known_support(model[point]["fn"]).is_discrete
        parents = traced.factors.get(FactorKey("guide", point), drawn)
        sources |= {n for n in parents if known_support(guide[n]["fn"]).is_discrete == discrete}
    return frozenset(sources)


# Find the structure of a model and guide from their runs, once for each signature.

_logger = logging.getLogger(__name__)

_NONE: frozenset[PlateKey] = frozenset()


class StructureFinder:
    """
    Finds the blocks of the programs of a run, and caches them by its sites and plates.

    If the plates alone do not determine the dependencies, the programs are run again with tracing,
    once for each signature.

    :param bool joint: use one weight for the whole program.
    :param bool find_roots: also find the guide sites that depend on no other draw.
    """

    def __init__(self, joint: bool, find_roots: bool, analyses: Analyses) -> None:
        check_flag("joint", joint)
        self.joint = joint
        self.find_roots = find_roots
        self.analyses = analyses
        self._warn = WarnOnce(_logger)  # each analysis repeats the warnings

    def of(self, programs: Programs, run: Run) -> Structure:
        """Return the blocks of the programs that made this run."""
        scored = tuple([isinstance(t.score, Tensor) for t in run.terms])
        key = "structure", self.joint, self.find_roots, scored, run.signature
        analysis = self.analyses.of(programs)
        return analysis.compared(key, lambda: self._derive(programs, run))

    def _derive(self, programs: Programs, run: Run) -> Structure:
        frames = {t.key: plate_frames(t.site) for t in run.terms}
        for text in _renamed({t.key: plate_frames(t.site) for r in run.terms for t in r.sites}):
            self._warn(text)
        latents = [t for t in run.terms if t.in_guide and is_latent(t.site)]
        # A guide of only point masses has weights per datum as well.
        random = [t for t in latents if not is_delta(t.site["fn"])] or latents
        if any(_has_particle_dim(t, run) for t in run.terms):
            checked_run(programs, strict_enumeration=False)  # raises for undeclared dims
        order = [t.key.name for t in random]
        names = frozenset(order)
        latent_frames = {n: frames[FactorKey("guide", n)] for n in order}
        coupled = {} if self.joint else self._coupled(programs, run)
        declared, frames = frames, _without_coupled(frames, coupled)
        factors = {key: Factor(f, None) for key, f in frames.items()}
        trace = not self.joint and needs_dependencies(factors, names)
        masked_by: dict[str, frozenset[str]] = {}
        traced: DrawDependencies | None = None
        if trace or (self.find_roots and (len(names) > 1 or run.guide_data)):
            traced = dependencies_of(programs, names, run)
            factors = {key: Factor(f, traced.factors.get(key)) for key, f in frames.items()}
            masked_by = {k.name: f for k, f in traced.masks.items() if f and k.program == "guide"}
        elif len(names) == 1:
            factors = {
                key: Factor(f, names if key.program == "guide" else None)
                for key, f in frames.items()
            }
        factors = _with_iterations(factors, coupled, latent_frames)
        structure = derive_structure(factors, order, self.joint)
        if not self.joint and _has_shared_noise(programs, run):
            # Each particle has different untraced draws, so they are not global latents.
            structure = weigh_together(declared)
        block_of = dict(structure.block_of)
        for t in run.terms:
            # Particles share either all or none of the sites of a sum.
            block_of.update(dict.fromkeys((m.key for m in t.members), block_of[t.key]))
        # A model may integrate a latent outside plates in closed form, for all data together.
        unplated = frozenset(n for n in names if not frames[FactorKey("guide", n)])
        collapsed = find_collapsed(programs, run, names, traced) if unplated else None
        return replace(
            structure,
            block_of=block_of,
            roots=_roots(run, random, factors, traced),
            mean_field=_mean_field(factors, names),
            masked_by=masked_by,
            coupled=coupled,
            collapsed=collapsed,
        )

    def _coupled(self, programs: Programs, run: Run) -> dict[FactorKey, frozenset[PlateKey]]:
        """Find, for each factor, the plates in which it depends on latents of other elements."""
        analysis, key = self.analyses.of(programs), ("plates", run.signature)
        links = analysis.cached(key, lambda: self._dependent_plates(programs, run, analysis, key))
        sums = {t.key: [links.get(m.key, _NONE) for m in t.members] for t in run.terms if t.members}
        return links | {key: _NONE.union(*parts) for key, parts in sums.items() if any(parts)}

    def _dependent_plates(
        self, programs: Programs, run: Run, analysis: Analysis, key: tuple[object, ...]
    ) -> dict[FactorKey, frozenset[PlateKey]]:
        """Find the dependent plates of a run, including those found by an earlier analysis."""
        before: dict[FactorKey, frozenset[PlateKey]] = analysis.before(key, {})
        try:
            found = marked(programs, run)
            links = found.coupled
            for read in found.reads[:1] if links else ():
                self._warn(
                    f"the model or guide reads a value that depends on site '{min(read.sites)}', "
                    f"at {read.line}, and everything may depend on it, so the elements of a plate "
                    f"that it was computed from share one weight: decide for each by torch.where"
                )
            for coupled, plates in () if found.reads else links.items():
                self._warn(_coupling_warning(coupled, plates))
            for name in sorted(found.marks.unknown) if links else ():
                self._warn(
                    f"every entry that the operator '{name}' returns is taken to depend on all of "
                    f"its inputs, because how it combines them is unknown"
                )
        except MarkedRunError as error:
            self._warn(
                f"the model and guide fail when they run again at the same draws ({error}), so it "
                f"is unknown whether the elements of a plate are independent: they share one weight"
            )
            frames = {t.key: plate_frames(t.site) for whole in run.terms for t in whole.sites}
            links = {k: frozenset(map(plate_key, f)) for k, f in frames.items() if f}
        return {k: links.get(k, _NONE) | before.get(k, _NONE) for k in {**links, **before}}


def _has_shared_noise(programs: Programs, run: Run) -> bool:
    """
    Return whether elements of a plate share an untraced draw, as with ``ConjugateReparam``.

    :param run: a run of the programs; if no computed value is scored, there is no such draw.
    """
    sites = [t.site for t in run.terms if not t.in_guide]
    if not any(s["is_observed"] and is_delta(s["fn"]) and not is_record(s) for s in sites):
        return False
    plates = frozenset().union(*map(plate_frames, sites))
    try:
        return not all(plates <= frames for frames in marked(programs, run).marker.untraced)
    except MarkedRunError:
        return True


def _with_iterations(
    factors: Mapping[FactorKey, Factor],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
    latents: Mapping[str, Frames],
) -> dict[FactorKey, Factor]:
    """Add the latents of all iterations to factors that depend on another iteration's latents."""
    extended = dict(factors)
    for key, plates in coupled.items():
        names = {p.name for p in plates if p.dim is None}
        factor = extended.get(key)
        if factor is not None and factor.parents is not None and names:
            touched = {n for n, frames in latents.items() if names & {f.name for f in frames}}
            extended[key] = factor._replace(parents=factor.parents | touched)
    return extended


def _roots(
    run: Run,
    random: list[Term],
    factors: Mapping[FactorKey, Factor],
    traced: DrawDependencies | None,
) -> frozenset[str]:
    """Return the guide's random sites that depend on no other reparameterized draw."""
    names = {t.key.name for t in random}
    paths = {t.key.name for t in random if reparameterized(t.site)}
    roots = set()
    for name in names:
        parents = factors[FactorKey("guide", name)].parents
        if parents is not None and not (parents & paths) - {name}:
            roots.add(name)
    # The second factor of a draw's gradient must not multiply a score function that depends on the
    # draw.
    for t in run.terms:
        if t.in_guide and isinstance(t.score, Tensor):
            parents_of_score = factors[t.key].parents
            roots -= names if parents_of_score is None else parents_of_score
    # It must not multiply the gradient of factors without a weight either.
    for t in run.guide_data:
        roots -= names if traced is None else traced.factors.get(t.key, names)
    return frozenset(roots)


def _renamed(frames: Mapping[FactorKey, Frames]) -> Iterator[str]:
    """Yield a message for each latent whose plate has another name in the model."""
    for key, guide in frames.items():
        model = frames.get(FactorKey("model", key.name), guide) if key.program == "guide" else guide
        for f, g in ((f, g) for f in guide - model for g in model - guide):
            if g.dim == f.dim and g.name != f.name:
                yield (
                    f"site '{key.name}' lies in plate '{f.name}' of the guide and in plate "
                    f"'{g.name}' of the model, which count as two plates, so their elements share "
                    f"one weight: give them one name"
                )


def _coupling_warning(key: FactorKey, plates: frozenset[PlateKey]) -> str:
    return (
        f"site '{key.name}' of the {key.program} lets the elements of plate "
        f"{', '.join(repr(p.name) for p in plates)} depend on each other's latents (as "
        f"z.cumsum(-1) does), so these share one weight"
    )


def _without_coupled(
    frames: Mapping[FactorKey, Frames], coupled: Mapping[FactorKey, frozenset[PlateKey]]
) -> dict[FactorKey, Frames]:
    """
    Remove from each factor's plates those over whose elements it is not a product.

    A factor whose elements depend on each other's latents is effectively outside the plate.
    """
    none: frozenset[PlateKey] = frozenset()
    return {
        key: frozenset(f for f in site_frames if plate_key(f) not in coupled.get(key, none))
        for key, site_frames in frames.items()
    }


def _has_particle_dim(term: Term, run: Run) -> bool:
    """Return whether an observed value has the particles' dim (from latents, or undeclared)."""
    if run.leading is None or not term.site["is_observed"]:
        return False
    value, event_dim = term.site["value"], getattr(term.site["fn"], "event_dim", 0)
    place = value.dim() - event_dim - run.nesting - 1
    return place >= 0 and value.shape[place] != 1


def _mean_field(factors: Mapping[FactorKey, Factor], names: frozenset[str]) -> bool:
    """Return whether the guide has only random sites that do not depend on each other."""
    return all(
        key.name in names and factor.parents == frozenset({key.name})
        for key, factor in factors.items()
        if key.program == "guide"
    )
