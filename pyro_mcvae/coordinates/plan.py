"""What holds for the coordinates of all draws of one structure, found out once."""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass, field

from pyro_mcvae.coordinates.coordinate import UnconstrainedCoordinate
from pyro_mcvae.coordinates.packing import Packing
from pyro_mcvae.coordinates.placing import Record, packing_of
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.errors import NothingToMoveError
from pyro_mcvae.programs.sites import is_random

# Programs of stochastic structure can show ever new shapes: then all are forgotten.
_MAX_PLANS = 256


@dataclass(frozen=True)
class Plan:
    """
    What the coordinates of a structure are.

    :ivar packing: how they are packed into vectors.
    :ivar normal: whether their density under the guide is the standard normal one.
    :ivar entangled: whether a first coordinate may depend on another one, as a draw whose noise is
        not explicit does on the draws before it: gradients at the first draw are then no partial
        derivatives.
    :ivar discrete: the sites whose coordinate is a discrete value, which no chain moves.
    :ivar bounded: whether values of a site lie in a part of the real numbers only.
    :ivar looked: who has looked at the sites already, by keys of their own.
    """

    packing: Packing
    normal: bool
    entangled: bool
    discrete: tuple[str, ...]
    bounded: bool
    looked: set[Hashable] = field(default_factory=set)

    @property
    def moving(self) -> Set[str]:
        """The sites that chains move."""
        return self.packing.sites.keys() - set(self.discrete)


def plan_of(sample: WeightedParticles, records: list[Record], held: frozenset[str]) -> Plan:
    """
    The plan of a first draw.

    :param records: for each of its runs, where each site stands.
    :param held: local sites of the guide that stay as they are, so that no vector has them.
    :raises ValueError: for guides of which no latent has a weight, or coordinates; and if a mask
        depends on a latent that moves, so that it would change.
    """
    run, plans = sample.runs[0], sample.structure.notes
    sites = [(n, at.shape, at.dtype, c.kind) for record in records for n, (c, at) in record.items()]
    key = run.nesting, run.leading, run.shapes, len(records), tuple(sites), held
    if key not in plans:
        _add(plans, key, _made(sample, records, held))
    return plans[key]


def _add(plans: dict[Hashable, Plan], key: Hashable, plan: Plan) -> None:
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan


def _made(sample: WeightedParticles, records: list[Record], held: frozenset[str]) -> Plan:
    points = [t.key.name for t in sample.runs[0].terms if t.in_guide]
    if points and not any(is_random(t.site) for t in sample.runs[0].terms if t.in_guide):
        raise ValueError(
            f"the guide draws no random latent (its site '{points[0]}' is a point mass), so that "
            f"there are no coordinates to move: use TraceSGVB_ELBO, which needs none"
        )
    if not sample.blocks:
        raise NothingToMoveError(
            f"no latent of the guide ({', '.join(points) or 'it has none'}) can be weighed by "
            f"itself, because a subsampled plate does not enclose them: pass the full data, or "
            f"use TraceSGVB_ELBO"
        )
    packing = packing_of(sample, records[0], held)
    if points and not (packing.sites or held):
        raise NothingToMoveError(
            "all random latents of the guide are shared by several data of a minibatch, so "
            "that none can be moved for one datum: pass the full data, or use TraceSGVB_ELBO"
        )
    check_names(records, packing, sample.structure.global_sites.guide | held)
    first = [records[0][n].coordinate for n in packing.sites]
    unexplicit = any(isinstance(c, UnconstrainedCoordinate) for c in first)
    entangled = len(first) > 1 and unexplicit and not sample.structure.mean_field
    # The density of what is held may depend on the coordinates, unless no draw does on another.
    normal = all(c.normal for c in first) and (sample.structure.mean_field or not held)
    discrete = (n for n in packing.sites if not records[0][n].coordinate.moves)
    bounded = any(c.bounded for c in first)
    plan = Plan(packing, normal, entangled, tuple(discrete), bounded)
    for name, draws in sample.structure.masked_by.items():
        if not draws.isdisjoint(plan.moving):
            raise _moving(name, draws)
    return plan


def _moving(name: str, draws: frozenset[str]) -> ValueError:
    return ValueError(
        f"the mask of site '{name}' of the guide depends on {', '.join(sorted(draws))}, so "
        f"moves would change how many latents count: let the masks of both programs depend on "
        f"data only (an unmasked latent without an effect does no harm), or use TraceIWAE_ELBO"
    )


def check_names(records: list[Record], packing: Packing, others: frozenset[str]) -> None:
    """
    Check that sites do not come and go with the draws: they would have no place in a vector.

    :param others: the guide's sites that are not in it.
    :raises ValueError: naming such a site.
    """
    for record in records:
        differing = (record.keys() | others) ^ (packing.sites.keys() | others)
        if differing:
            raise ValueError(
                f"guide site '{min(differing)}' is drawn in some executions and not in others, "
                f"so that the latents make no vector of coordinates: draw it always, and mask "
                f"it where it does not count, or weigh whole draws with TraceIWAE_ELBO"
            )
