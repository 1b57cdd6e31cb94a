"""What one asks of a truncated posterior: expectations, marginals, modes, draws, entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from pyro import distributions as dist
from torch import Tensor

from pyro_mcvae.truncated.evaluated_states import EvaluatedStates, weighted_sum
from pyro_mcvae.truncated.layout import StateLayout

__all__ = ["StatePosterior"]


class StatePosterior:
    r"""
    The truncated posteriors of the data of one call, :math:`q_n(z)` on S states each.

    Made by :meth:`TruncatedPosterior.posterior`; without gradients.

    :ivar states: what it answers from, for those who build on it.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> x = torch.tensor([0.5, 3.0])
        >>> posterior = TruncatedPosterior(model, num_states=2).posterior(x)
        >>> torch.allclose(posterior.marginals()["z"], (x - 0.5).sigmoid())
        True
        >>> posterior.map()["z"][1]
        tensor(1.)
    """

    def __init__(self, states: EvaluatedStates) -> None:
        self.states = states

    @property
    def values(self) -> dict[str, Tensor]:
        """For each discrete site its value in every state, ``[S, *batch, *event]``."""
        return self.states.values

    @property
    def log_joint(self) -> Tensor:
        """log p(x_n, z) of every state, ``[S, *plates]`` (``[S, elements]`` for several blocks)."""
        return self.states.log_joint

    @property
    def weights(self) -> Tensor:
        """q_n(z), of the same shape, summing to one over the states."""
        return self.states.weights

    @property
    def free_energy(self) -> Tensor:
        """The bound on log p(x_n) of each datum: ``[*plates]``."""
        # A block without discrete sites has one draw, the same in every row.
        parts = [
            own[:1] if population is None else own.logsumexp(0, keepdim=True)
            for own, population in zip(
                self.states.sample.split(self.log_joint), self.states.populations, strict=True
            )
        ]
        return self.states.sample.join(parts)[0]

    def entropy(self) -> Tensor:
        """The entropy of q_n in nats: ``[*plates]``."""
        # A weight that is rounded to more than 1 would make it negative.
        return torch.special.entr(self.weights).sum(0).clamp_min(0.0)

    def expectation(
        self, function: Callable[[Mapping[str, Tensor]], Tensor], plate: str | None = None
    ) -> Tensor:
        r"""
        :math:`\langle f(z) \rangle = \sum_z q_n(z) f(z)`.

        :param function: maps the sites' values, each ``[S, *batch, *event]``, to a tensor
            ``[S, *batch, ...]``, as a decoder does. The batch dims are those of all plates, of size
            1 where a site lies in none; what is summed over plates nested in a data plate keeps
            their dims (``keepdim=True``).
        :param str plate: the data plate that is meant, where a program has several side by side:
            the function is given the values of its sites only.
        :returns: shape ``[*batch, ...]``.
        :raises ValueError: for a result of another shape, and for a program with several data
            plates if ``plate`` names none of them.
        """
        b, layout = self._block_of_plate(plate)
        value = function({name: self.values[name] for name in layout.sites})
        weight = self.states.aligned(b, self.weights, value.dim())
        self._check_batch(value, weight)
        return weighted_sum(weight, value)

    def marginals(self) -> dict[str, Tensor]:
        """
        The posterior mean of each site, ``[*batch, *event]``; of a categorical site the
        probabilities of its categories, ``[*batch, *event, K]``.
        """
        found = {}
        for b, layout in self.states.runs.layouts.searched:
            for name, spec in layout.sites.items():
                value = self.values[name]
                if not spec.ordinal and not spec.one_hot and not value.is_floating_point():
                    value = torch.nn.functional.one_hot(value.long() - spec.low, spec.size)
                weight = self.states.aligned(b, self.weights, value.dim())
                found[name] = weighted_sum(weight, value)
        return found

    def map(self) -> dict[str, Tensor]:
        """The most probable state that is known: values ``[*batch, *event]``."""
        found = {}
        for b, layout in self.states.runs.layouts.searched:
            best = self.states.sample.split(self.log_joint)[b].argmax(0, keepdim=True)
            for name in layout.sites:
                found[name] = self.states.gather(b, name, best)[0]
        return found

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draws from q_n: values ``[count, *batch, *event]``."""
        found = {}
        for b, layout in self.states.runs.layouts.searched:
            index = dist.Categorical(probs=self.states.block_weights(b)).sample((count,))
            for name in layout.sites:
                found[name] = self.states.gather(b, name, index)
        return found

    def _block_of_plate(self, plate: str | None) -> tuple[int, StateLayout]:
        searched = self.states.runs.layouts.searched
        found = [s for s in searched if plate is None or plate in (p.name for p in s[1].plates)]
        if len(found) != 1:
            names = ", ".join(repr(layout.plates[-1].name) for _, layout in searched)
            raise ValueError(
                f"plate={plate!r} names no single one of the data plates, which have weights of "
                f"their own: pass one of {names}"
            )
        return found[0]

    def _check_batch(self, value: Tensor, weight: Tensor) -> None:
        """Refuse a result that would meet the weights of other data."""
        nesting = self.states.runs.layouts.nesting
        own, batch = value.shape[: nesting + 1], weight.shape[: nesting + 1]
        if len(own) != len(batch) or any(
            n not in (1, size) for n, size in zip(own, batch, strict=True) if size != 1
        ):
            raise ValueError(
                f"the function returned shape {tuple(value.shape)}, and the weights of states and "
                f"data have {tuple(batch)}: return [states, *batch, ...] with as many batch dims "
                f"as the sites' values have ({nesting}), as keepdim=True keeps them"
            )
