"""What stands in the leading dims of runs, for errors, and what to do without it."""

from __future__ import annotations

from typing import NamedTuple

from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.probing import ProgramError


class LeadingDimsName(NamedTuple):
    """
    What stands in leading dims, for errors.

    :ivar remedy: what to do without them, to be followed by another remedy.
    :ivar sizes: what to do where sizes do not match.
    """

    name: str
    remedy: str
    sizes: str = ""


_EXPAND = (
    "Where labels are joined with data, infer={'enumerate': 'parallel', 'expand': True} at the "
    "discrete site gives its values the sizes of the plates. "
)
PARTICLES = LeadingDimsName("vectorised particles", "Pass vectorize_particles=False, or")
STATES = LeadingDimsName("states side by side", "Pass vectorize_particles=False, or")
ENUMERATED = LeadingDimsName(
    "all values of its enumerated sites",
    "Remove infer={'enumerate': 'parallel'} and draw these in the guide, or",
    _EXPAND,
)
SLOTS = LeadingDimsName(
    "slots of discrete sites and vectorised particles",
    "Pass num_categories=0, num_samples=1 and vectorize_particles=False, or",
    _EXPAND,
)


def not_vectorizable(
    name: LeadingDimsName, count: int | None, nesting: int, error: Exception
) -> LeadingDimsError:
    """What is wrong with programs that fail with leading dims only."""
    several = f"{count} {name.name}" if count is not None else name.name
    cause = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
    return LeadingDimsError(
        f"the model or the guide cannot be run with {several} in batch dim {-nesting - 1}, to the "
        f"left of its plates, though it runs with one. {name.remedy} make it broadcast over "
        f"leading dims: index from the right, as in z[..., 0], or means[..., group] in the place "
        f"of means[group] (Vindex for tables). {name.sizes if 'must match' in cause else ''}"
        f"The error was: {cause}",
        reason=cause,
    )


class NotComparedError(LeadingDimsError):
    """Programs run with leading dims, and cannot be compared with runs of one."""

    def __init__(self, name: LeadingDimsName, error: Exception) -> None:
        super().__init__(
            f"the {name.name} cannot be compared with runs of one: {error}. {name.remedy} make the "
            f"model and guide run at any latents",
            reason=f"runs of one cannot be compared with: {error}",
        )


def not_settled(attempts: int, shared: frozenset[str]) -> LeadingDimsError:
    """What is wrong with programs whose global sites are others in each run."""
    return LeadingDimsError(
        f"the programs show other global sites in each of {attempts} runs on the same minibatch "
        f"(now {sorted(shared)}), so the particles cannot be vectorised: pass "
        f"vectorize_particles=False"
    )
