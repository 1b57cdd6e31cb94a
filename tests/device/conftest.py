from collections.abc import Iterator

import pytest
import torch

from tests.device import simulated


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not simulated.AVAILABLE:
        pytest.skip("PyTorch has no Python backend for PrivateUse1 before 2.9")
    with simulated.simulated_device() as result:
        yield result
