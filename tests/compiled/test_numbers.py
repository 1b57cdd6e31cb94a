"""A replayed step has the plain step's numbers."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import (
    SVI,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)
from torch import Tensor

from pyro_mcvae import (
    NVIL,
    ULA,
    CompiledELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    load_checkpoint,
    save_checkpoint,
)
from tests.cases import every
from tests.compiled.programs import assert_same_run, batches, make, reasons, train, uses

MANY: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
# Those that training/test_recorded.py does not have.
LOSSES: dict[str, Callable[[], Any]] = {
    "IWAE, one by one": lambda: TraceIWAE_ELBO(2),
    "IWAE, reparam": lambda: TraceIWAE_ELBO(3, gradient_estimator="reparam", **MANY),
    "Trace_ELBO": Trace_ELBO,
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
    "TraceGraph_ELBO": TraceGraph_ELBO,
    "RenyiELBO": lambda: RenyiELBO(0.5, 3, **MANY),
}


@pytest.mark.parametrize("name", every(2, LOSSES))
def test_losses_and_parameters_are_those_of_the_plain_loss(name: str) -> None:
    loss = assert_same_run(LOSSES[name])
    assert uses(loss) == 9 + 1
    assert not reasons(loss)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"norm": True}], ids=str)
def test_dropout_and_running_statistics(options: dict[str, Any]) -> None:
    assert uses(assert_same_run(TraceSGVB_ELBO, **options)) == 10


@pytest.mark.slow
def test_layers_whose_kernels_depend_on_the_grad_mode() -> None:
    assert uses(assert_same_run(TraceSGVB_ELBO, recurrent=True)) == 10


@pytest.mark.slow
def test_step_sizes_adapt_and_the_record_of_the_step_is_the_last_one() -> None:
    result = []
    for wrap in (lambda loss: loss, lambda loss: CompiledELBO(loss, "eager")):
        loss = TraceSIS_ELBO(1, ULA(), coordinates="latent", max_plate_nesting=1)
        train(make(), wrap(loss), 8)
        record = loss.last_step
        assert record is not None
        result.append((loss.kernel.step_size(), record.acceptance, record.log_weight))
        assert len(loss.kernel.step_size()) == 2
    assert all(torch.equal(a, b) for a, b in zip(*result, strict=True))


class Column(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-1))


def discrete() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)

    def model(x: Tensor) -> None:
        logits = pyro.param("prior", torch.zeros(3))
        loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(logits=logits))
            pyro.sample("x", dist.Normal(loc[y], 1.0), obs=x)

    def guide(x: Tensor) -> None:
        weight = pyro.param("weight", torch.randn(3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x.unsqueeze(-1) * weight))

    return model, guide, [torch.randn(6) for _ in range(10)]


@pytest.mark.parametrize(
    "kind", [pytest.param("exact", marks=pytest.mark.slow), "sampled", "network", "enumerated"]
)
def test_discrete_latents(kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "exact": lambda: TraceRaoBlackwell_ELBO(3),
        "sampled": lambda: TraceRaoBlackwell_ELBO(1, num_samples=1),
        "network": lambda: TraceRaoBlackwell_ELBO(1, baseline=NVIL(Column())),
        "enumerated": lambda: TraceEnum_ELBO(max_plate_nesting=1),
    }
    runs = []
    for compiled in (False, True):
        pyro.clear_param_store()
        model, guide, data = discrete()
        guide = config_enumerate(guide) if kind == "enumerated" else guide
        loss = made[kind]()
        loss = CompiledELBO(loss, "eager") if compiled else loss
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        torch.manual_seed(1)
        runs.append([svi.step(x) for x in data])
    assert runs[0] == runs[1]
    assert uses(loss) == 7


@pytest.mark.parametrize(
    "make_loss",
    [TraceSGVB_ELBO, lambda: TraceRaoBlackwell_ELBO(0)],
    ids=["SGVB", "Rao-Blackwell"],
)
def test_one_hot_draws_and_labels(make_loss: Callable[[], Any]) -> None:
    """PyTorch's ``one_hot``, also within ``OneHotCategorical``, looks at values on the host."""

    def model(x: Tensor, label: Tensor) -> None:
        loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
        shift = torch.nn.functional.one_hot(label, num_classes=2).to(x) @ x.new_tensor([0.0, 0.5])
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.OneHotCategorical(logits=x.new_zeros(3)))
            pyro.sample("x", dist.Normal((y * loc).sum(-1) + shift, 1.0), obs=x)

    def guide(x: Tensor, label: Tensor) -> None:
        weight = pyro.param("weight", x.new_tensor([-1.0, 0.1, 0.6]))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.OneHotCategorical(logits=x.unsqueeze(-1) * weight))

    labels, runs = torch.tensor([0, 1, 1, 0]), []
    for loss in (make_loss(), compiled := CompiledELBO(make_loss(), "eager")):
        pyro.clear_param_store()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        torch.manual_seed(1)
        runs.append([svi.step(torch.randn(4), labels.roll(i)) for i in range(9)])
        with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
            svi.step(torch.randn(4), 2 * labels)
    assert runs[0] == runs[1]
    assert uses(compiled) == 6 + 1  # the last one is no comparison with a plain step
    assert not reasons(compiled)


@pytest.mark.slow
def test_plates_that_are_looped_over() -> None:
    """Pyro reads the indices of such a plate; in another order they are another step."""
    data, order = torch.randn(2, 2), torch.tensor([1, 0])

    def model(index: Tensor | None) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        inner = pyro.plate("inner", 2, subsample=index)
        for i in pyro.plate("outer", 2):
            z = pyro.sample(f"z_{i}", dist.Normal(loc, 1.0))
            for j in inner:
                pyro.sample(f"x_{i}_{j}", dist.Normal(z * (1 + j), 1.0), obs=data[i, j])

    def guide(index: Tensor | None) -> None:
        pyro.sample("loc", dist.Normal(pyro.param("loc_q", torch.tensor(0.1)), 0.5))
        for i in pyro.plate("outer", 2):
            pyro.sample(f"z_{i}", dist.Normal(pyro.param(f"z_q_{i}", torch.tensor(0.3)), 0.2))

    runs = []
    for compiled in (False, True):
        pyro.clear_param_store()
        loss = TraceIWAE_ELBO(2)
        loss = CompiledELBO(loss, "eager") if compiled else loss
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        torch.manual_seed(1)
        runs.append([svi.step(i) for i in [None] * 6 + [order] * 4 + [order.flip(0)]])
    assert runs[0] == runs[1]
    assert uses(loss) > 3
    assert not reasons(loss)


@pytest.mark.slow
def test_checkpoints_are_those_of_the_plain_loss(tmp_path: Path) -> None:
    def svi(net: Any, loss: Any) -> SVI:
        return SVI(net.model, net.guide, pyro.optim.Adam({"lr": 0.01}), loss)

    compiled = CompiledELBO(TraceSIS_ELBO(1, max_plate_nesting=1), "eager")
    first = svi(make(), compiled)
    for x in batches(8):
        first.step(x)
    save_checkpoint(tmp_path / "run.pt", {"svi": first})
    after = [first.step(x) for x in batches(8)]
    load_checkpoint(tmp_path / "run.pt", {"svi": first})
    assert [first.step(x) for x in batches(8)] == after


def test_copies_make_recordings_of_their_own() -> None:
    loss = CompiledELBO(TraceIWAE_ELBO(2), "eager")
    train(make(), loss, 5)
    assert uses(loss) > 0
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert uses(other) == 0
        assert other.num_particles == 2
