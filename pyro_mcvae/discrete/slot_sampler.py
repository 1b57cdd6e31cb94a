"""Runs a pair of programs with slots, for all particles of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyro import poutine

from pyro_mcvae.checks.leading_dims import SLOTS
from pyro_mcvae.discrete.ancestry import CoupledSlotsError, find_ancestors
from pyro_mcvae.discrete.enumerated import SlotRun, take_apart
from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slots import SlotMessenger
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.particles.layout import Execution, Layout
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.enumeration import ModelEnumeration
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.execution import Programs, entered
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.isolation import rewindable
from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.run import Run

_logger = logging.getLogger(__name__)

# Whether the slots of the programs share a run.
_TOGETHER = ("slots together",)


class SlotSampler:
    """
    Runs programs with the slots of each site in a batch dim of its own, where that is right.

    Latents are drawn independently in every particle, and have the slots of their own draw.

    :param sampler: of the objective.
    :param options: how many slots a discrete site has that does not say so itself.
    """

    def __init__(self, sampler: ParticleSampler, options: SiteOptions) -> None:
        self.sampler, self.options = sampler, options
        self._tell = WarnOnce(_logger)

    def runs(self, programs: Programs) -> list[SlotRun] | None:
        """
        One vectorised run, or one run per particle, all on one minibatch.

        :returns: None for programs whose slots cannot share a run, in a leading dim or under vmap.
        """
        analysis = self.sampler.analyses.of(programs)
        together = analysis.get(_TOGETHER)
        if together is False:
            return None
        with rewindable(together is None) as rewind:
            try:
                found = [take_apart(run) for run in self._runs(programs)]
            except (LeadingDimsError, CoupledSlotsError) as error:
                if isinstance(error, LeadingDimsError) and self.sampler.runner.refuses_loops:
                    raise
                self._tell(
                    f"the slots of all discrete sites of a datum are summed together, each with "
                    f"all of its weight: {getattr(error, 'reason', error)}"
                )
                analysis.compared(_TOGETHER, lambda: False)
                rewind()
                return None
        analysis.compared(_TOGETHER, lambda: True)
        return found

    def ancestors(
        self, programs: Programs, slot_run: SlotRun
    ) -> Mapping[FactorKey, frozenset[str]]:
        """The random guide sites behind each factor, found once for each structure."""
        if not slot_run.scored:
            return {}
        key = "ancestors", slot_run.run.signature, slot_run.run.sizes
        analysis = self.sampler.analyses.of(programs)
        return analysis.compared(key, lambda: find_ancestors(programs, slot_run))

    def _runs(self, programs: Programs) -> list[Run]:
        subsamples, runner = Minibatch(), self.sampler.runner
        count = self.sampler.num_particles

        def execute(layout: Layout) -> Run:
            return self._execute(programs, Substitutes(subsamples), layout)

        def check(run: Run) -> None:
            self._check(programs, take_apart(run))

        execution = Execution(programs, execute, subsamples, name=SLOTS, several=True, check=check)
        if count > 1 or runner.way(programs) in (Way.MAPPED, Way.BOTH_MAPPED):
            run = runner.run_together(execution, count)
            if run is not None:
                return [run]
        try:
            return [runner.run(execution, None) for _ in range(count)]
        except LeadingDimsError:
            # Under vmap the one particle is a lane, too.
            run = runner.run_together(execution, 1) if count == 1 else None
            if run is None:
                raise
            return [run]

    def _check(self, programs: Programs, slot_run: SlotRun) -> None:
        """Look at a run of a structure that is not known."""
        self.ancestors(programs, slot_run)
        for name, scored in slot_run.scored.items():
            fn = scored.site["fn"]
            if scored.slots.entropy(fn) is None:
                why = f"that of {type(fn).__name__} has no closed form here"
                scored.slots.tell_entropy(name, why, self._tell)

    def _execute(self, programs: Programs, substitutes: Substitutes, layout: Layout) -> Run:
        """Run the guide with slots, then the model on its values."""
        nesting = layout.nesting
        assert nesting is not None
        leading = layout.leading()
        first_dim = -1 - nesting - (layout.count is not None)
        # Under vmap a program sees the value of one slot as it would see a draw.
        expand = layout.way is not Way.BATCHED
        slots = SlotMessenger(self.options, first_dim, self._tell, expand)
        with Recorder(substitutes) as recorder, slots, entered(leading.guide):
            programs.guide(*programs.args, **programs.kwargs)
        # The second one goes on where the first stopped to give dims away.
        with (
            Recorder(substitutes) as tracer,
            poutine.replay(trace=recorder.trace),
            ModelEnumeration(recorder.trace),
            entered(leading.model),
        ):
            programs.model(*programs.args, **programs.kwargs)
        return layout.run_of(recorder.trace, tracer.trace, leading, substitutes)
