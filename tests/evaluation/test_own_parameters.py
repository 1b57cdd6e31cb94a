"""A guide is evaluated with the parameters that its own modules hold."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_mcvae import TraceSGVB_ELBO, log_evidence, report
from tests.params import in_turn

x = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)


class Written(PyroModule[torch.nn.Module]):  # type: ignore[misc]
    """A guide with PyroParams."""

    def __init__(self, model: Callable[..., None]) -> None:
        super().__init__()
        self.loc = PyroParam(torch.tensor(0.0))
        self.scale = PyroParam(torch.tensor(1.0), constraint=dist.constraints.positive)

    def forward(self, x: Tensor) -> None:
        pyro.sample("m", dist.Normal(self.loc, self.scale))


def trained(make: Callable[..., Any], scale: float) -> tuple[Any, Any]:
    def model(x: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(m, scale), obs=x)

    guide = make(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.2}), TraceSGVB_ELBO(max_plate_nesting=1))
    for _ in range(10):
        svi.step(x)
    return model, guide


def of_log_evidence(pair: Any) -> Tensor:
    return log_evidence(*pair, x, num_particles=5, seed=0).bound


def of_report(pair: Any) -> Tensor:
    result = report(*pair, x, num_particles=5, check_modes=False, run_chains=False, seed=0)
    return result.guide.bound


@in_turn(make=[AutoNormal, AutoMultivariateNormal, Written], evaluate=[of_log_evidence, of_report])
def test_an_earlier_guide_keeps_its_parameters(make: Any, evaluate: Any) -> None:
    first = trained(make, 1.0)
    expected = evaluate(first)
    pyro.clear_param_store()
    trained(make, 5.0)
    store = dict(pyro.get_param_store()._params)
    assert torch.equal(evaluate(first), expected)
    now = pyro.get_param_store()._params
    assert now.keys() == store.keys()
    assert all(now[name] is value for name, value in store.items())


@pytest.mark.parametrize("make", [AutoNormal, Written])
def test_parameters_that_a_later_guide_has_taken_over_are_named(make: Any) -> None:
    first = trained(make, 1.0)
    second = trained(make, 5.0)  # with the first one's parameters in the store
    of_log_evidence(first)
    with pytest.warns(UserWarning, match=r"parameter '.*' of .* is shared with another module.*"):
        of_log_evidence(second)
