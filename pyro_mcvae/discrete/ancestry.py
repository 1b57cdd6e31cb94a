"""Which guide sites each factor of a program depends on, directly or through others."""

from __future__ import annotations

from collections.abc import Mapping

from pyro_mcvae.discrete.enumerated import SlotRun
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.probing import ProgramError
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.structure import dependencies
from pyro_mcvae.structure.independence import find_dependent_plates


class CoupledSlotsError(ValueError):
    """Elements of a site meet in a factor, so that each of their combinations is a value."""


def find_ancestors(programs: Programs, slot_run: SlotRun) -> Mapping[FactorKey, frozenset[str]]:
    """
    The random guide sites behind each factor: its ancestors, and itself.

    Factors for which that cannot be found out count as depending on everything.

    :raises CoupledSlotsError: for sites whose elements meet in a factor, or may.
    """
    run = slot_run.run
    names = frozenset(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    found = dependencies.find_dependencies(programs, names, run.subsamples)
    direct = {t.key: found.factors.get(t.key, names) for t in run.summands}
    closed = found.ancestors(names)
    # A factor of the guide with a score function stands for draws that are not seen: anything may
    # depend on them.
    unseen = {t.key.name for t in run.terms if t.in_guide and t.site["is_observed"]}
    hidden = frozenset(unseen & slot_run.scored.keys())
    ancestors = {key: hidden.union(*(closed[p] for p in ps)) for key, ps in direct.items()}
    try:
        coupled = find_dependent_plates(programs, run.subsamples).plates
    except ProgramError as error:
        raise CoupledSlotsError(f"the programs fail at other latents: {error}") from error
    _check_uncoupled(slot_run, ancestors, coupled)
    return ancestors


def _check_uncoupled(
    slot_run: SlotRun,
    ancestors: Mapping[FactorKey, frozenset[str]],
    coupled: Mapping[FactorKey, frozenset[PlateKey]],
) -> None:
    """Find sites whose elements meet in a factor: their slots cannot be summed one by one."""
    for cost in slot_run.costs:
        for site in slot_run.scored.values():
            if site.symbol in cost.dims and not site.plates <= cost.plates:
                raise CoupledSlotsError(
                    f"site '{cost.term.key.name}' of the {cost.term.key.program} depends on "
                    f"'{site.name}', but lies outside of a plate of '{site.name}'"
                )
    for key, plates in coupled.items():
        for name in sorted(ancestors.get(key, frozenset()) & slot_run.scored.keys()):
            frames = plate_frames(slot_run.scored[name].site)
            shared = sorted(f.name for f in frames if plate_key(f) in plates)
            if shared:
                raise CoupledSlotsError(
                    f"site '{key.name}' of the {key.program} depends, in one element of plate "
                    f"'{shared[0]}', on other elements of guide site '{name}'"
                )
