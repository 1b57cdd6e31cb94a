"""States that were not found by evolution: draws from the model, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.search import Populations, merge
from pyro_mcvae.truncated.searched_sites import StatesError

__all__ = ["PriorDraws", "Proposals", "propose"]


@dataclass(frozen=True)
class PriorDraws:
    """
    Proposals for a truncated posterior's search: states drawn from the model itself.

    :param int count: how many for each datum in each step.
    :raises ValueError: if that is not an int of at least 1.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(9)).to_event(1))
        ...         pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)
        >>> guide = TruncatedPosterior(model, num_states=8, proposals=PriorDraws(2))
    """

    count: int = 4

    def __post_init__(self) -> None:
        check_count("count", self.count)


# Called with the model's arguments, returns for each discrete site values [C, *batch, *event].
Proposals = Callable[..., Mapping[str, Tensor]]


def propose(
    runs: JointRuns, populations: Populations, proposals: PriorDraws | Proposals
) -> Populations:
    """Merge states that were not found by evolution."""
    if isinstance(proposals, PriorDraws):
        return merge(runs, populations, _draw(runs, proposals.count))
    values = proposals(*runs.args, **runs.kwargs)
    found: list[Tensor | None] = []
    for layout, data_index in zip(runs.layouts.blocks, runs.data_index, strict=True):
        if layout is None or data_index is None:
            found.append(None)
            continue
        missing = [name for name in layout.sites if name not in values]
        if missing:
            raise StatesError(
                f"proposals= returned values of {sorted(values)}, but not of '{missing[0]}': "
                f"return a value [count, *batch, *event] for each discrete site"
            )
        found.append(layout.states(values, data_index))
    return merge(runs, populations, found)


def _draw(runs: JointRuns, count: int) -> list[Tensor | None]:
    """States drawn from the model given the other latents: for each block ``[E, C, D]``."""
    sample = runs.run(None, count)
    found: list[Tensor | None] = []
    for b, (layout, data_index) in enumerate(
        zip(runs.layouts.blocks, runs.data_index, strict=True)
    ):
        if layout is None or data_index is None:
            found.append(None)
            continue
        nodes = [run.model_trace.nodes for run in sample.runs]
        values = {n: torch.stack([t[n]["value"] for t in nodes]) for n in layout.sites}
        if sample.runs[0].leading is not None:
            values = {n: value[0] for n, value in values.items()}
        states = layout.states(values, data_index)
        if runs.layouts.masked:
            states = states.masked_fill(runs.frozen(sample, b), 0)
        found.append(states)
    return found
