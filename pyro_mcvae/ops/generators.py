"""PyTorch's generators: to draw the same numbers once more."""

from __future__ import annotations

import torch
from torch import Tensor


class Generators:
    """PyTorch's default generators as they are when this is made, to be put back."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()

    def put_back(self) -> None:
        """Draw the same numbers once more."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def have_moved(self) -> bool:
        """Whether numbers were drawn since."""
        now = Generators()
        before, after = [self._cpu, *self._cuda], [now._cpu, *now._cuda]
        with torch._C.DisableTorchFunction():  # no number of the step, if that is recorded
            return [t.numpy().tobytes() for t in before] != [t.numpy().tobytes() for t in after]
