"""Parameters and buffers of a loss go where its model and guide are, and optimizers keep them."""

import copy
import functools

import pyro
import pytest
import torch

from pyro_mcvae import (
    NVIL,
    ULA,
    AdaptiveStepSize,
    CompiledELBO,
    SigmoidSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    load_checkpoint,
    save_checkpoint,
)
from tests.compiled.programs import uses
from tests.device.programs import BATCH, Training
from tests.device.simulated import host_reads
from tests.training.runs import D, Guide, Model, Run, data


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


LOSSES = {
    "sis": (lambda: TraceSIS_ELBO(2), "vae"),
    "ais": (lambda: TraceAIS_ELBO(schedule=SigmoidSchedule(2)), "vae"),
    "rb": (lambda: TraceRaoBlackwell_ELBO(1, baseline=NVIL(torch.nn.Linear(D, 1))), "categories"),
}


@pytest.mark.parametrize("name", ["sis", "rb", pytest.param("ais", marks=pytest.mark.slow)])
def test_under_svi(name, device):
    loss, programs = LOSSES[name]
    training = Training(loss(), programs, device)
    for _ in range(2):
        training.step()
    assert {t.device for t in tensors(training.loss).values()} == {device}
    store = pyro.get_param_store()
    own = {id(p) for p in training.loss.parameters()}
    assert own <= {id(store._params[name]) for name in store}
    assert own <= set(map(id, training.svi.optim.optim_objs))  # which trains the moved ones


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, functools.partial(CompiledELBO, backend="eager")]
)
def test_as_a_module_whose_optimizer_was_made_before(wrap, device):
    model, guide = Model().to(device), Guide().to(device)
    loss = TraceSIS_ELBO(2)
    elbo = wrap(loss)(model, guide)
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.1)
    x, index = data()[:BATCH].to(device), torch.arange(BATCH, device=device)
    before = copy.deepcopy(loss.schedule.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        elbo(x, index).backward()
        optimizer.step()
    assert [id(p) for p in parameters] == [id(p) for p in loss.parameters()]
    assert {t.device for t in tensors(loss).values()} == {device}
    assert all(p.grad is None or p.grad.device == device for p in parameters)
    for key, value in loss.schedule.state_dict().items():
        assert (value.cpu() != before[key]).any(), key


def test_after_a_checkpoint_of_the_cpu(tmp_path, device):
    losses = []
    run = Run("sis-trained", "svi")
    run.step()
    save_checkpoint(tmp_path / "run.pt", run.parts)
    for place in ("cpu", device):
        pyro.clear_param_store()
        other = Run("sis-trained", "svi")
        for program in (other.model, other.guide):
            program.to(place)
        load_checkpoint(tmp_path / "run.pt", other.parts)
        x, index = data()[:BATCH].to(place), torch.arange(BATCH, device=place)
        losses.append([other.svi.step(x, index) for _ in range(2)])
        assert {t.device.type for t in tensors(other.loss).values()} == {torch.device(place).type}
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_to_a_wider_dtype_only(wide):
    torch.set_default_dtype(torch.float32 if wide is torch.float64 else torch.float64)
    loss = TraceSIS_ELBO(2, ULA(AdaptiveStepSize(0.1)))
    torch.set_default_dtype(wide)
    Training(loss, "vae", "cpu").step()
    floating = {t.dtype for t in tensors(loss).values() if t.is_floating_point()}
    assert floating == {torch.float64}


OBJECTIVES = {
    "sgvb": (TraceSGVB_ELBO, "vae"),
    "iwae": (lambda: TraceIWAE_ELBO(3), "vae"),
    "sis": (lambda: TraceSIS_ELBO(2), "vae"),
    "rb": (lambda: TraceRaoBlackwell_ELBO(1), "categories"),
}
objectives = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "sis")) for n in OBJECTIVES]
)


@objectives
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(name, dtype, device):
    torch.set_default_dtype(torch.float32)
    make, programs = OBJECTIVES[name]
    losses = []
    for enabled in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        training = Training(make(), programs, device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            losses.append(training.step())
        parts = tensors(training.loss) if isinstance(training.loss, torch.nn.Module) else {}
        assert {t.dtype for t in parts.values() if t.is_floating_point()} <= {torch.float32}
    assert 0 < abs(losses[1] - losses[0]) < 0.05 * abs(losses[0])


@objectives
def test_modules_in_bfloat16(name, device):
    """Densities are computed in single precision, for modules of any precision."""
    torch.set_default_dtype(torch.float32)
    make, programs = OBJECTIVES[name]
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        training = Training(make(), programs, device)
        for program in training.pair:
            program.to(dtype)
        x, index = training.data
        training.data = x.to(dtype), index
        losses.append(training.step())
    assert 0 < abs(losses[1] - losses[0]) < 0.05 * abs(losses[0])


@pytest.mark.slow
@objectives
def test_a_replayed_step_is_the_plain_one_and_reads_once(name, device):
    make, programs = OBJECTIVES[name]
    losses = []
    for wrap in (lambda loss: loss, functools.partial(CompiledELBO, backend="eager")):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        loss = wrap(make())
        training = Training(loss, programs, device)
        # Two plain steps, a recorded one, and two replays that are compared.
        losses.append([training.step() for _ in range(5)])
        with host_reads() as reads:
            losses[-1].append(training.step())
    assert losses[1] == losses[0]
    assert uses(loss) == 3
    assert len(reads) == 1, reads.by_line
