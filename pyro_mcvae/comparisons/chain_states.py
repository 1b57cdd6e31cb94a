"""Where the chain of each datum stands, from one visit to the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_mcvae.ops.ranks import concat_over_ranks
from pyro_mcvae.particles.weighted import WeightedParticles


class ChainStates(nn.Module):
    """
    One chain per datum, found again by the indices of its plates.

    The buffers are made at the first visit, and are part of ``state_dict()``.

    :ivar positions: shape ``[K, *full plates, D]``.
    :ivar visited: which data have a chain, shape ``[*full plates]``.
    """

    positions: Tensor | None
    visited: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", None)
        self.register_buffer("visited", None)

    def forget(self) -> None:
        """Drop all positions, as if there had been no call."""
        self.positions = self.visited = None

    def resume(self, sample: WeightedParticles, drawn: Tensor) -> Tensor:
        """
        Where the minibatch's chains stand; data that come for the first time begin at ``drawn``.

        :param drawn: positions, shape ``[K, *plates, D]``.
        """
        index = _index(sample)
        if self.positions is None or self.visited is None:
            sizes = _full_sizes(sample)
            self.positions = drawn.new_zeros((drawn.shape[0], *sizes, drawn.shape[-1]))
            self.visited = torch.zeros(sizes, dtype=torch.bool, device=drawn.device)
        self._check(sample, drawn)
        known = self.visited[index] if index else self.visited
        kept = self.positions[_of_all_chains(index)]
        return torch.where(known[..., None], kept.to(drawn), drawn)

    @torch.no_grad()
    def keep(self, sample: WeightedParticles, positions: Tensor) -> None:
        """
        Remember where the minibatch's chains have got to.

        :param positions: shape ``[K, *plates, D]``.
        """
        assert self.positions is not None
        assert self.visited is not None
        at = torch.zeros((), dtype=torch.long, device=self.visited.device)
        for index, size in zip(_index(sample), self.visited.shape, strict=True):
            at = at * size + index.to(at.device)
        chains, numbers = positions.shape[0], positions.shape[-1]
        rows = positions.detach().to(self.positions).reshape(chains, -1, numbers).transpose(0, 1)
        # In a distributed run every rank keeps the chains of all data.
        at, rows = concat_over_ranks(at.flatten()), concat_over_ranks(rows)
        self.positions.view(chains, -1, numbers)[:, at] = rows.transpose(0, 1)
        self.visited.view(-1)[at] = True

    def _check(self, sample: WeightedParticles, drawn: Tensor) -> None:
        assert self.positions is not None
        shape = drawn.shape[0], *_full_sizes(sample), drawn.shape[-1]
        if self.positions.shape != shape:
            raise ValueError(
                f"the chains of an earlier step have shape {tuple(self.positions.shape)} "
                f"[particles, *data, numbers per datum], but the programs now need {shape}: make a "
                f"new MonteCarloEM for other data, or pass persistent=False"
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        # The chains saved may be those of data that this object has not seen.
        for name in ("positions", "visited"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _index(sample: WeightedParticles) -> tuple[Tensor, ...]:
    """The indices of the minibatch in each plate, broadcast against each other."""
    if len(sample.blocks) != 1 or len(sample.blocks[0].dims) != len(sample.blocks[0].plates):
        raise ValueError(
            "persistent=True finds the chains of a datum by the indices of its plates, but the "
            "programs have several separate plates of data, or sequential ones: use one vectorised "
            "plate, pyro.plate('data', N, dim=-1), or persistent=False"
        )
    frames = sample.frames[0]
    count = len(frames)
    return tuple(
        sample.subsamples[f.name].reshape((-1,) + (1,) * (count - 1 - i))
        for i, f in enumerate(frames)
    )


def _of_all_chains(index: tuple[Tensor, ...]) -> tuple[slice | Tensor, ...]:
    return (slice(None), *index)


def _full_sizes(sample: WeightedParticles) -> tuple[int, ...]:
    return tuple(f.full_size or f.size for f in sample.frames[0])
