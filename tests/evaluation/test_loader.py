"""The evidence of data that come in batches."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_mcvae import HMC, log_evidence_loader

X = torch.tensor([0.3, -1.0, 2.0, 0.1, 1.2], dtype=torch.float64)


def model(x, label=None):
    with pyro.plate("data", 100, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x, label=None):
    with pyro.plate("data", 100, subsample_size=len(x)):
        pyro.sample("z", dist.Normal(x / 2, 0.8))


def exact():
    return dist.Normal(0.0, math.sqrt(2)).log_prob(X)


@pytest.mark.parametrize(
    "options", [{}, {"schedule": 3}, {"schedule": 3, "coordinates": "whitened", "warmup": 3}]
)
def test_batches_are_laid_side_by_side(options):
    loader = DataLoader(TensorDataset(X, torch.arange(5)), batch_size=2)
    result = log_evidence_loader(
        model, guide, loader, num_particles=1000, keep_log_weight=True, progress=False, **options
    )
    assert result.log_evidence.shape == (5,)
    assert result.log_weight.shape == (1000, 5)
    assert bool(((result.log_evidence - exact()).abs() < 4 * result.standard_error).all())
    assert result.scale == 1.0
    assert torch.allclose(result.total, result.log_evidence.sum())


def test_batches_of_every_form():
    forms = {
        "tensor": ([X[:2], X[2:]], None),
        "tuple": ([(X[:2],), (X[2:], None)], None),
        "mapping": ([{"x": X[:2]}, {"x": X[2:], "label": None}], None),
        "mapped": ([("a", X)], lambda batch: batch[1:]),
    }
    for batches, to_args in forms.values():
        result = log_evidence_loader(
            model, guide, batches, to_args=to_args, num_particles=30, progress=False
        )
        assert result.log_evidence.shape == (5,)


def test_the_step_size_adapts_once():
    kernel, seen = HMC(), []

    class Watch(type(kernel.step_size)):
        def update(self, acceptance, gradient=None):
            seen.append(self.training)
            super().update(acceptance, gradient)

    kernel.step_size.__class__ = Watch
    log_evidence_loader(
        model,
        guide,
        X.split(2),
        schedule=2,
        kernel=kernel,
        warmup=7,
        num_particles=10,
        progress=False,
    )
    assert len(seen) == 7


def test_parameters_that_never_were_are_the_same_in_every_batch():
    made, seen = [], {}

    def begin():
        made.append(torch.rand(()))
        return made[-1].clone()

    def fresh(x):
        slope = pyro.param("slope", begin)
        seen.setdefault(tuple(x.tolist()), []).append(float(slope))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope * x, 0.8))

    def plain(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    log_evidence_loader(plain, fresh, X.split(2), num_particles=10)
    assert len(made) == 1
    assert len(seen) == len(X.split(2))
    # Checks in between run with other values.
    assert all(values[0] == float(made[0]) == values[-1] for values in seen.values())
    assert list(pyro.get_param_store().keys()) == []


def test_nested_plates_ask_along_which():
    def model(x):
        with pyro.plate("rows", x.shape[0], dim=-2), pyro.plate("data", x.shape[1], dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("rows", x.shape[0], dim=-2), pyro.plate("data", x.shape[1], dim=-1):
            pyro.sample("z", dist.Normal(x / 2, 0.8))

    batches = torch.randn(3, 10).split(4, dim=1)
    options = {"num_particles": 30, "progress": False}
    result = log_evidence_loader(model, guide, batches, plate="data", **options)
    assert result.log_evidence.shape == (3, 10)
    with pytest.raises(ValueError, match=r"the plates \['rows', 'data'\]: pass the plate along"):
        log_evidence_loader(model, guide, batches, **options)
    with pytest.raises(ValueError, match="plate='cols', but the weights' plates are"):
        log_evidence_loader(model, guide, batches, plate="cols", **options)


def test_one_weight_for_all_data_does_not_add_up():
    def model(x):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(theta, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.8))

    with pytest.raises(ValueError, match="not the sum of their evidence"):
        log_evidence_loader(model, guide, X.split(2), progress=False)


def test_no_batch_is_no_data():
    with pytest.raises(ValueError, match="there was no batch"):
        log_evidence_loader(model, guide, [], progress=False)
