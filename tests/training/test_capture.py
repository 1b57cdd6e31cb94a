"""A captured step is the plain step: on the CPU, on an emulated device, and on CUDA where it is."""

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from torch import nn

from pyro_mcvae import TraceIWAE_ELBO, TraceSIS_ELBO, capture
from pyro_mcvae.training import graph
from pyro_mcvae.training.graph import StepGraph
from tests.training.emulated import as_on_a_device, emulate
from tests.training.runs import OBJECTIVES, N, Run
from tests.training.syncs import Syncs

objectives = pytest.mark.parametrize("name", OBJECTIVES)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batches(count):
    made = torch.Generator().manual_seed(7)
    return [torch.randperm(N, generator=made)[:4] for _ in range(count)]


def begin(name):
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    run = Run(name, "module")
    return run, torch.optim.SGD(run.elbo.parameters(), lr=1e-4, momentum=0.9)


def plain(name, count=8):
    run, optimizer = begin(name)
    losses = []
    for index in batches(count):
        optimizer.zero_grad()
        loss = run.elbo(run.x[index], index)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, run.elbo.state_dict()


def assert_same(found, wanted):
    assert torch.equal(torch.stack(found[0]), torch.stack(wanted[0]))
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


@objectives
def test_on_the_cpu_it_is_the_plain_step(name):
    wanted = plain(name)
    run, optimizer = begin(name)
    step = capture(run.elbo, optimizer, run.x[:4], torch.arange(4))
    assert_same(([step(run.x[i], i) for i in batches(8)], run.elbo.state_dict()), wanted)


@objectives
def test_replayed_steps_are_the_plain_steps(name, monkeypatch):
    """With adaptation, optimizer, search states and new noise in every step."""
    wanted = plain(name)
    emulate(monkeypatch)
    run, optimizer = begin(name)
    examples = run.x[:4], torch.arange(4)
    step = capture(run.elbo, optimizer, *examples)
    step._graph = StepGraph(run.elbo, optimizer, torch.device("cpu"), step._examples)
    losses = [step(run.x[i], i) for i in batches(8)]
    assert step.replayed == 5
    assert_same((losses, run.elbo.state_dict()), wanted)


@objectives
@pytest.mark.parametrize("interface", ["svi", "module"])
def test_a_step_reads_nothing_but_the_returned_loss(name, interface, monkeypatch):
    as_on_a_device(monkeypatch)
    pyro.enable_validation(False)
    run = Run(name, interface)
    index = torch.arange(4)
    if interface == "module":

        def step(x, index):
            loss = run.elbo(x, index)
            loss.backward()

    else:
        step = run.svi.step
    step(run.x[index], index)
    with Syncs() as syncs:
        step(run.x[index], index)
    assert len(syncs.found) == (interface == "svi"), syncs.found


@needs_cuda
@objectives
def test_on_cuda_no_step_waits_for_the_device(name):
    pyro.enable_validation(False)
    run = Run(name, "module")
    run.elbo.to("cuda")
    x, index = run.x[:4].cuda(), torch.arange(4, device="cuda")
    for _ in range(2):
        run.elbo(x, index).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.elbo(x, index).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@objectives
def test_on_cuda_it_trains_as_the_plain_step(name):
    # The noise of a replayed step is another one: with the same data in every step and a small
    # step size, the mean loss after training is what can be compared.
    means = []
    for captured in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        run = Run(name, "module")
        run.elbo.to("cuda")
        optimizer = torch.optim.Adam(run.elbo.parameters(), lr=1e-2, capturable=True)
        x, index = run.x.cuda(), torch.arange(N, device="cuda")
        step = capture(run.elbo, optimizer, x, index, warmup=3 if captured else 10_000)
        losses = torch.stack([step(x, index) for _ in range(300)])
        assert step.replayed == (297 if captured else 0)
        means.append(losses[-100:].mean())
    assert abs(means[0] - means[1]) < 0.1 * abs(means[0])


# What is refused ------------------------------------------------------------------------------


def test_arguments_of_other_shapes_are_refused():
    run, optimizer = begin("iwae")
    step = capture(run.elbo, optimizer, run.x[:4], torch.arange(4), size=N)
    before = run.tensors()
    with pytest.raises(ValueError, match=r"argument 0 has shape \(3, 3\).*captured for \(4, 3\)"):
        step(run.x[:3], torch.arange(3), size=N)
    with pytest.raises(ValueError, match=r"argument 1 has shape .* dtype torch.int32"):
        step(run.x[:4], torch.arange(4).int(), size=N)
    with pytest.raises(ValueError, match="argument 2 is 13, but the step was captured for 12"):
        step(run.x[:4], torch.arange(4), size=13)
    with pytest.raises(ValueError, match="the step was captured for other arguments"):
        step(run.x[:4], torch.arange(4))
    with pytest.raises(ValueError, match="argument 0 is None, but"):
        step(None, torch.arange(4), size=N)
    assert all(torch.equal(v, run.tensors()[n]) for n, v in before.items())
    assert torch.isfinite(step(run.x[:4], torch.arange(4), size=N))


def test_optimizers_and_modules_that_cannot_be_captured_are_refused():
    run, optimizer = begin("iwae")
    with pytest.raises(ValueError, match=r"optimizer of torch.optim, got PyroOptim"):
        capture(run.elbo, pyro.optim.ClippedAdam({"lr": 0.1}))
    with pytest.raises(ValueError, match="warmup must be an int of at least 1, got 0"):
        capture(run.elbo, optimizer, warmup=0)
    with pytest.raises(ValueError, match=r"make it by torch.optim.Adam\(..., capturable=True\)"):
        graph._check_optimizer(torch.optim.Adam(run.elbo.parameters()))
    run.elbo.register_buffer("odd", torch.zeros((), device="meta"))
    with pytest.raises(ValueError, match=r"'odd' is on meta.*elbo_module.to\('cpu'\)"):
        graph._check_devices(run.elbo, torch.device("cpu"))
    parts = [nn.Parameter(torch.zeros((), device=d)) for d in ("cpu", "meta")]
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        capture(run.elbo, torch.optim.SGD(parts))


def captured(monkeypatch, run, optimizer, *args):
    emulate(monkeypatch)
    step = capture(run.elbo, optimizer, *args, warmup=1)
    step._graph = StepGraph(run.elbo, optimizer, torch.device("cpu"), step._examples)
    step(*args)
    step(*args)
    return step


def test_settings_that_changed_after_the_recording_are_refused(monkeypatch):
    run, optimizer = begin("sis")
    args = run.x[:4], torch.arange(4)
    step = captured(monkeypatch, run, optimizer, *args)
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(ValueError, match=r"'lr' of the optimizer's group 0 was 0.0001.*is 0.001"):
        step(*args)
    optimizer.param_groups[0]["lr"] = 1e-4
    run.loss.eval()
    with pytest.raises(ValueError, match="the training mode of 'elbo' was True"):
        step(*args)
    run.loss.train()
    assert torch.isfinite(step(*args))


def test_draws_on_the_host_are_refused(monkeypatch):
    class Model(nn.Module):
        def forward(self, x):
            with pyro.plate("data", len(x), subsample_size=2) as index:
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=x[index])

    class Guide(nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            with pyro.plate("data", len(x), subsample_size=2):
                pyro.sample("z", dist.Normal(self.loc, 1.0))

    real = graph._cpu_generators
    emulate(monkeypatch)
    elbo = TraceIWAE_ELBO(2)(Model(), Guide())
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.01)
    step = capture(elbo, optimizer, torch.zeros(5), warmup=1)
    step._graph = StepGraph(elbo, optimizer, torch.device("cpu"), step._examples)
    step(torch.zeros(5))
    states = iter([real(), [torch.rand(()).item()]])
    monkeypatch.setattr(graph, "_cpu_generators", lambda: next(states))
    with pytest.raises(ValueError, match=r"draws random numbers on the CPU.*subsample=index"):
        step(torch.zeros(5))


def test_programs_that_wait_for_the_device_name_the_line(monkeypatch):
    emulate(monkeypatch)

    class Model(nn.Module):
        def forward(self, x):
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                if graph.torch.cuda.mode == "error":  # as PyTorch does on CUDA
                    raise RuntimeError("called a synchronizing CUDA operation")
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    class Guide(nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(self.loc, 1.0))

    elbo = TraceSIS_ELBO(2)(Model(), Guide())
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.01)
    step = capture(elbo, optimizer, torch.zeros(5), warmup=2)
    step._graph = StepGraph(elbo, optimizer, torch.device("cpu"), step._examples)
    step(torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"the step waits for the device.*test_capture.py:\d+"):
        step(torch.zeros(5))
    assert graph.torch.cuda.mode == 0
