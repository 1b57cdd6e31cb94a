"""The state of all random number generators that a training step may draw from."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyro
import torch

# The states of the generators by kind, of tensors and plain values.
RNGState: TypeAlias = dict[str, Any]


def rng_state() -> RNGState:
    """PyTorch's on all devices, NumPy's and Python's, of tensors and plain values."""
    state = pyro.util.get_rng_state()
    name, keys, *rest = state["numpy"]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    # A list, where NumPy has an array, which safe loading refuses.
    return {**state, "numpy": (name, keys.tolist(), *rest), "cuda": cuda}


def set_rng_state(state: RNGState) -> None:
    """Set what :func:`rng_state` returned."""
    pyro.util.set_rng_state({name: state[name] for name in ("torch", "random", "numpy")})
    # On a machine with fewer devices the others' states have nowhere to go.
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, device)


def seed_another(state: RNGState, rank: int) -> None:
    """Seed a rank that had no state of its own, from the first one's."""
    set_rng_state(state)
    seed = int(torch.randint(2**31, (rank + 1,))[-1])
    pyro.set_rng_seed(seed)
