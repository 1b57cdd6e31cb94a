"""Recorded steps are the plain steps, of every objective, with everything that has a state."""

import functools

import pyro
import pytest
import torch

from pyro_mcvae import CompiledELBO
from tests.compiled.programs import reasons, uses
from tests.training.runs import OBJECTIVES, Run

objectives = pytest.mark.parametrize("name", OBJECTIVES)
replay = functools.partial(CompiledELBO, backend="eager")
without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def needs_cuda(test):
    return pytest.mark.gpu(without_cuda(test))


# Each kind of objective once; Monte Carlo EM's loop of updates is long to record.
_QUICK = ("sis-trained", "rb-relax", "truncated")
recorded = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in _QUICK)) for n in OBJECTIVES]
)


@recorded
def test_recorded_steps_are_the_plain_steps(name):
    interface = "module" if list(OBJECTIVES).index(name) % 2 else "svi"
    result = []
    for wrap in (lambda loss: loss, replay):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        run = Run(name, interface, wrap=wrap)
        losses = [run.step() for _ in range(6)]
        loss = getattr(run.loss, "plain", run.loss)
        states = [m.state_dict() for m in (run.model, run.guide, loss) if hasattr(m, "state_dict")]
        result.append((losses, [(n, v.clone()) for state in states for n, v in state.items()]))
    (losses, tensors), (recorded_losses, recorded) = result
    assert recorded_losses == losses
    assert len(recorded) == len(tensors)
    for (key, value), (_, same) in zip(tensors, recorded, strict=True):
        assert torch.equal(value, same), key
    assert (uses(run.loss), len(reasons(run.loss))) == (3, 0)


@needs_cuda
@objectives
def test_on_cuda_no_step_waits_for_the_device(name):
    pyro.enable_validation(False)
    run = Run(name, "module")
    run.model.to("cuda")
    run.guide.to("cuda")  # which the loss follows
    x, index = run.x[:4].cuda(), torch.arange(4, device="cuda")
    for _ in range(2):
        run.elbo(x, index).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.elbo(x, index).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgvb", "sis", "ais", "rb"])
def test_on_cuda_graphs_it_trains_as_the_plain_step(name):
    # Random numbers may be others: with the same data in every step and a small step size, the
    # mean loss after training is what can be compared.
    means = []
    for wrap in (lambda loss: loss, functools.partial(CompiledELBO, mode="reduce-overhead")):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        run = Run(name, "module", wrap=wrap)
        run.elbo.to("cuda")
        optimizer = torch.optim.Adam(run.elbo.parameters(), lr=1e-2)
        x, index = run.x.cuda(), torch.arange(len(run.x), device="cuda")
        losses = []
        for _ in range(300):
            optimizer.zero_grad()
            loss = run.elbo(x, index)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means.append(torch.stack(losses)[-100:].mean())
    assert abs(means[0] - means[1]) < 0.1 * abs(means[0])
