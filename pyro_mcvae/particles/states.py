"""A sample in which the model's enumerated sites have a value each, as all other latents have."""

from __future__ import annotations

from dataclasses import replace

from pyro_mcvae.particles.layout import Layout
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs, run_model
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.run import Run, terms_of
from pyro_mcvae.programs.state_draws import draw_states


def with_drawn_states(programs: Programs, sample: WeightedParticles) -> WeightedParticles:
    """The same latents, and each enumerated site drawn from its posterior given these."""
    if all(run.state_dim is None for run in sample.runs):
        return sample
    shared = sample.structure.global_sites

    def with_states(run: Run) -> Run:
        leading = Layout(run.leading, run.nesting, shared, run.way).leading()
        substitutes = Substitutes(run.subsamples, draw_states(run.model_trace))
        model_trace = run_model(programs, run.guide_trace, substitutes, leading)
        terms = terms_of(run.guide_trace, model_trace)
        return replace(run, model_trace=model_trace, terms=terms, state_dim=None, noise=None)

    return sample.with_runs([with_states(run) for run in sample.runs])
