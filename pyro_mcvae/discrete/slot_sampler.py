"""Runs a pair of programs with slots, for all particles of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyro import poutine
from pyro.poutine.enum_messenger import EnumMessenger

from pyro_mcvae.checks.leading_dims import SLOTS
from pyro_mcvae.discrete.ancestry import Ancestry
from pyro_mcvae.discrete.enumerated import SlotRun, take_apart
from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slots import SlotMessenger
from pyro_mcvae.particles.layout import Execution, Layout
from pyro_mcvae.particles.runner import Runner
from pyro_mcvae.programs.execution import Programs, entered
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Recorder, SubstituteMessenger
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.run import Run

__all__ = ["SlotSampler", "run_slots"]


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
        vectorize: bool | None,
        max_plate_nesting: float,
        tell: Callable[[str], object],
    ) -> None:
        self.options = options
        self.num_particles = num_particles
        self.tell = tell
        self.ancestry = Ancestry()
        self.runner = Runner(max_plate_nesting, strict_enumeration=False, vectorize=vectorize)

    def runs(self, programs: Programs) -> list[SlotRun]:
        """One vectorised run, or one run per particle, all on one minibatch."""
        subsamples = Minibatch()
        execution = self._execution(programs, subsamples)
        if self.num_particles > 1:
            run = self.runner.run_together(execution, self.num_particles)
            if run is not None:
                return [take_apart(run)]
        return [take_apart(self.runner.run(execution, None)) for _ in range(self.num_particles)]

    def ancestors(
        self, programs: Programs, slot_run: SlotRun
    ) -> Mapping[FactorKey, frozenset[str]]:
        """The random guide sites behind each factor."""
        return self.ancestry.of(programs, slot_run)

    def _execution(self, programs: Programs, subsamples: Minibatch) -> Execution:
        def execute(layout: Layout) -> Run:
            substitute = SubstituteMessenger(subsamples)
            return run_slots(programs, self.options, substitute, layout, self.tell)

        return Execution(programs, execute, subsamples, name=SLOTS, several=True)


def run_slots(
    programs: Programs,
    options: SiteOptions,
    substitute: SubstituteMessenger,
    layout: Layout,
    tell: Callable[[str], object],
) -> Run:
    """
    Run the guide with slots, then the model on its values.

    :param layout: with a nesting, and with the particles' plate or without one.
    """
    nesting = layout.nesting
    assert nesting is not None
    depth = nesting + (layout.count is not None)
    leading, args, kwargs = layout.plates(), programs.args, programs.kwargs
    slots = SlotMessenger(options, -1 - depth, tell)
    with Recorder(substitute) as recorder, slots, entered(leading[0]):
        programs.guide(*args, **kwargs)
    guide_trace = recorder.trace
    # The second one goes on where the first stopped to give dims away.
    with (
        substitute,
        poutine.trace() as tracer,
        poutine.replay(trace=guide_trace),
        EnumMessenger(),
        entered(leading[1]),
    ):
        programs.model(*args, **kwargs)
    model_trace = tracer.trace
    return layout.collect(guide_trace, model_trace, leading, substitute.subsamples)
