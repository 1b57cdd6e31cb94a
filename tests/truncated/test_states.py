"""Packed states and keys: bijections, and two ways to find the moves that lead to new states."""

import pytest
import torch

from pyro_mcvae.truncated.search import Parents
from pyro_mcvae.truncated.states import StateSpace, duplicates

WIDTHS = [1, 7, 8, 9, 63, 64, 65, 130]


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_is_a_bijection(width):
    torch.manual_seed(width)
    space = StateSpace([2] * width)
    states = torch.randint(2, (3, 40, width), dtype=torch.uint8)
    packed = space.pack(states)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 40, space.num_bytes)
    assert torch.equal(space.unpack(packed), states)
    # Also of states in another dtype and memory order.
    turned = states.long().transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(space.pack(turned), packed)


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_are_linear_and_distinct(width):
    space = StateSpace([2] * width)
    units = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(torch.uint8)
    torch.manual_seed(width)
    states = torch.cat([units, torch.randint(2, (200, width), dtype=torch.uint8)])
    keys = space.keys(space.pack(states))
    assert torch.equal(keys, (states.long() * space.table("unit key", states.device)).sum(-1))
    distinct = len({tuple(row) for row in states.tolist()})
    assert distinct == len(keys) - int(duplicates(keys.unsqueeze(0)).sum())


@pytest.mark.parametrize("width", [3, 8, 63, 64])
def test_moves_to_known_states_are_found_both_ways(width):
    torch.manual_seed(width)
    space = StateSpace([2] * width)
    count = min(30, 1 << (width - 1))
    # Neighbours of a few states, so that many are known.
    seeds = torch.randint(2, (5, 1, width), dtype=torch.uint8)
    flips = torch.eye(width, dtype=torch.uint8)[torch.randint(width, (5, 4 * count))]
    states = torch.cat([seeds, seeds ^ flips], 1)
    rows = [row.unique(dim=0) for row in states]
    least = min(len(r) for r in rows)
    population = torch.stack([r[:least] for r in rows])
    keys = space.keys(space.pack(population))
    parents = torch.cat([population[:, :6], seeds, 1 - seeds], 1)
    joint = torch.zeros(keys.shape)
    result = Parents(space, parents, space.pack(population), joint, keys)
    own = space.keys(space.pack(parents)).unsqueeze(-1)
    assert torch.equal(~result._neighbours(own), result._look_up(own))
    moved = parents.unsqueeze(2) ^ torch.eye(width, dtype=torch.uint8)
    known = (moved.unsqueeze(3) == population[:, None, None]).all(-1).any(-1)
    assert torch.equal(result.allowed(), ~known)
    assert known.any()
