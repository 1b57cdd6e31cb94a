"""CUDA graphs, emulated on the CPU: what a step did to its memory is done to it again."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pyro_mcvae.coordinates import chain_density
from pyro_mcvae.structure import cache
from pyro_mcvae.training import graph
from tests.training.syncs import Syncs


class Recorder(TorchDispatchMode):
    """
    Keeps every operator with the very tensors that it read and wrote.

    As on a device, a tensor stays where it is, and nothing that Python does is repeated.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_flatten(value)[0]:
                    self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        return found


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, found in self.calls:
                new = func(*args, **kwargs)
                for old, now in zip(tree_flatten(found)[0], tree_flatten(new)[0], strict=True):
                    # Views and tensors that were written in place are there already.
                    if isinstance(old, torch.Tensor) and old.data_ptr() != now.data_ptr():
                        old.copy_(now)


@contextmanager
def record(made, stream):
    """Stands for torch.cuda.graph: nothing has happened afterwards."""
    rng = torch.get_rng_state()
    with (
        mock.patch.object(cache, "is_recording", return_value=True),
        Syncs() as syncs,
        Recorder() as recorder,
    ):
        yield
    if syncs.found:
        raise RuntimeError(f"operation not permitted when stream is capturing: {syncs.found}")
    made.calls = recorder.calls
    with torch.no_grad():
        for tensor, value in recorder.before.values():
            tensor.copy_(value)
    torch.set_rng_state(rng)


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


class Cuda:
    """Stands for torch.cuda in graph.py."""

    Stream = Stream
    CUDAGraph = Graph
    graph = staticmethod(record)

    def __init__(self):
        self.mode = 0

    def current_stream(self, device):
        return Stream()

    def stream(self, stream):
        return nullcontext()

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode


class Torch:
    """Stands for torch in graph.py."""

    def __init__(self):
        self.cuda = Cuda()

    def __getattr__(self, name):
        return getattr(torch, name)


def as_on_a_device(monkeypatch):
    """Leave out what is read on the CPU alone, where nobody has to wait for it."""
    monkeypatch.setattr(chain_density, "costs_nothing_to_read", lambda value: False)


def emulate(monkeypatch):
    as_on_a_device(monkeypatch)
    monkeypatch.setattr(graph, "torch", Torch())
    # Here the device's generator is the CPU's.
    monkeypatch.setattr(graph, "_cpu_generators", list)
