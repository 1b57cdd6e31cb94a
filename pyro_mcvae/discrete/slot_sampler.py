"""Runs a pair of programs with slots, for all particles of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pyro_mcvae.discrete.ancestry import Ancestry
from pyro_mcvae.discrete.enumerated import SlotRun, run_slots
from pyro_mcvae.discrete.slots import SiteOptions, SlotError
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Minibatch, SubstituteMessenger
from pyro_mcvae.structure import dependencies
from pyro_mcvae.structure.auxiliary import AuxiliaryDraws

__all__ = ["SlotSampler"]


class SlotSampler:
    """
    Draws the particles of one step, vectorised or one after the other.

    Latents are drawn independently in every particle, and have the slots of their own draw.

    :param options: how many slots a discrete site has that does not say so itself.
    :param tell: called with messages about sites that get no slots.
    """

    def __init__(
        self,
        options: SiteOptions,
        num_particles: int,
        vectorize: bool,
        max_plate_nesting: float,
        tell: Callable[[str], None],
    ) -> None:
        self.options = options
        self.num_particles = num_particles
        self.vectorize = vectorize
        self.declared_nesting = max_plate_nesting
        self.tell = tell
        self.ancestry = Ancestry()
        self.auxiliary = AuxiliaryDraws()
        self._found_nesting: int | None = None

    def runs(self, programs: Programs) -> list[SlotRun]:
        """One vectorised run, or one run per particle, all on one minibatch."""
        subsamples = Minibatch()
        if self.vectorize and self.num_particles > 1:
            return [self._run(programs, subsamples, self.num_particles)]
        return [self._run(programs, subsamples, None) for _ in range(self.num_particles)]

    def ancestors(
        self, programs: Programs, slot_run: SlotRun
    ) -> Mapping[FactorKey, frozenset[str]]:
        """The random guide sites behind each factor."""
        return self.ancestry.of(programs, slot_run)

    def _run(self, programs: Programs, subsamples: Minibatch, particles: int | None) -> SlotRun:
        if self.declared_nesting != math.inf:
            nesting = int(self.declared_nesting)
        elif self._found_nesting is not None:
            nesting = self._found_nesting
        else:
            nesting = self._found_nesting = self._find_nesting(programs)
        before = Minibatch(subsamples)
        try:
            return self._run_once(programs, subsamples, nesting, particles)
        except SlotError:
            raise
        except Exception as error:
            # The programs may fail without slots too (then this raises their own error), or have
            # other plates than at the last step.
            actual = self._find_nesting(programs)
            if actual > self.declared_nesting:
                raise ValueError(
                    f"max_plate_nesting={int(self.declared_nesting)}, but the programs have plates "
                    f"in {actual} batch dims: pass max_plate_nesting={actual} or leave it out"
                ) from error
            if actual > nesting:
                self._found_nesting = actual
                subsamples.clear()
                subsamples.update(before)
                return self._run_once(programs, subsamples, actual, particles)
            several, remedy = "several values of its discrete sites", "Make it"
            if particles is not None:
                several = f"{particles} vectorised particles and {several}"
                remedy = "Pass vectorize_particles=False, make it"
            raise RuntimeError(
                f"the model or the guide cannot be run with {several} "
                f"in batch dims to the left of its {nesting} plates, though it runs with one. "
                f"{remedy} broadcast over leading dims (index from the right, as in z[..., 0]; "
                f"Vindex for tables), or sample the sites plainly with num_categories=0, "
                f"num_samples=1. "
                f"The error was: {type(error).__name__}: {error}"
            ) from error

    def _run_once(
        self,
        programs: Programs,
        subsamples: Minibatch,
        nesting: int,
        particles: int | None,
    ) -> SlotRun:
        supply = SubstituteMessenger(subsamples)
        return run_slots(
            programs, self.options, supply, nesting, particles, self.tell, self.auxiliary
        )

    @staticmethod
    def _find_nesting(programs: Programs) -> int:
        return dependencies.find_nesting(programs, False, model_enumeration=True)
