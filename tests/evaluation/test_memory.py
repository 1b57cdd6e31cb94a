"""Memory of an evaluation: that of one chunk, however many particles there are."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_mcvae import MALA, log_evidence
from tests.cases import every
from tests.models import ProbabilisticPCA


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made inside have held at a time."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return result


def peak(function, *args, **options):
    """The most bytes, whenever cycles of garbage happen to be collected."""
    gc.collect()
    gc.disable()
    try:
        with Peak() as seen:
            function(*args, **options)
    finally:
        gc.enable()
    return seen.bytes


WAYS = {
    "importance sampling": (log_evidence, {}),
    "chains": (log_evidence, {"schedule": 2, "kernel": MALA(0.1), "warmup": 0}),
}


@pytest.mark.parametrize("way", every(2, WAYS))
def test_more_particles_take_no_more_memory(way):
    exact = ProbabilisticPCA(p=30, N=20)
    evaluator, options = WAYS[way]
    few, many = (
        peak(evaluator, exact.model, exact.guide, num_particles=k, chunk_size=25, **options)
        for k in (50, 250)
    )
    # The largest weights of each datum, to which the tail is fitted, in float64.
    tail = 8 * 20 * (3 * 250**0.5 + 1)
    # 25 draws of a datum's 30 numbers, in float64, are one of the tensors of a chunk.
    assert 8 * 25 * 20 * 30 < few <= many < few + 4 * tail


@pytest.mark.parametrize("way", every(2, WAYS, 1))
def test_a_chunk_has_the_memory_that_it_says(monkeypatch, way):
    """By default, a few times that of the numbers which it draws."""
    monkeypatch.setattr("pyro_mcvae.evaluation.weights._CHUNK", 1 << 17)
    exact = ProbabilisticPCA(p=30, N=20)
    evaluator, options = WAYS[way]
    result = peak(evaluator, exact.model, exact.guide, num_particles=300, **options)
    assert result < 8 * 8 * (1 << 17)
