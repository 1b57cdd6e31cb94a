"""Modules whose parameters Pyro would train a copy of are refused; others are trained whole."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.nn import PyroModule
from pyro.optim import Adam
from torch import nn

from pyro_mcvae import (
    CompiledELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.params import in_turn

X = torch.rand(3, 2, 4, 4, dtype=torch.float64)
LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(2),
    "sis": lambda: TraceSIS_ELBO(2),
    "rao-blackwell": TraceRaoBlackwell_ELBO,
    "compiled": lambda: CompiledELBO(TraceSGVB_ELBO(), backend="eager"),
}


def network(memory_format=torch.contiguous_format):
    made = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 2))
    return made.to(memory_format=memory_format)


def programs(encoder, **options):
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            loc = z.unsqueeze(-1).unsqueeze(-1)
            pyro.sample("x", dist.Normal(loc + 0 * x, 1.0).to_event(3), obs=x)

    def guide(x):
        pyro.module("encoder", encoder, **options)
        with pyro.plate("data", len(x)):
            loc, log_scale = encoder(x).flatten(1).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    return model, guide


def changed(encoder, loss, **options):
    """Which parameters of the module two steps change."""
    svi = SVI(*programs(encoder, **options), Adam({"lr": 0.1}), loss)
    before = [p.detach().clone() for p in encoder.parameters()]
    for _ in range(2):
        svi.step(X)
    return [not torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True)]


@pytest.mark.parametrize("loss", LOSSES)
def test_memory_that_is_not_contiguous_is_refused(loss):
    with pytest.raises(ValueError, match=r"parameter 'encoder\$\$\$0.weight' .* not contiguous"):
        changed(network(torch.channels_last), LOSSES[loss]())
    assert changed(network(), LOSSES[loss](), update_module_params=True) == [True] * 4


def test_the_stores_own_values_are_refused_unless_the_module_takes_them():
    changed(network(), TraceSGVB_ELBO())
    with pytest.raises(ValueError, match=r"the store had one of this name.*update_module_params"):
        changed(network(), TraceSGVB_ELBO())
    assert changed(network(), TraceSGVB_ELBO(), update_module_params=True) == [True] * 4
    pyro.clear_param_store()
    assert changed(network(), TraceSGVB_ELBO()) == [True] * 4


def test_a_module_that_takes_the_stores_copies_is_trained():
    encoder = network(torch.channels_last)
    assert changed(encoder, TraceSGVB_ELBO(), update_module_params=True) == [True] * 4
    assert all(p.is_contiguous() for p in encoder.parameters())


def test_values_and_gradients_of_the_module_are_its_own():
    elbo, encoder = TraceSGVB_ELBO(), network(torch.channels_last)
    pair = programs(encoder)
    assert elbo.loss(*pair, X) > 0
    elbo.loss_and_grads(*pair, X)
    assert all((p.grad != 0).any() for p in encoder.parameters())
    with pytest.raises(ValueError, match="not contiguous"):
        SVI(*pair, Adam({"lr": 0.1}), elbo).step(X)
    with pytest.raises(ValueError, match="not contiguous"), poutine.trace(param_only=True):
        elbo.differentiable_loss(*pair, X)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_models_modules_are_looked_at_as_well(loss):
    def programs(decoder):
        def model(x):
            pyro.module("decoder", decoder)
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

        def guide(x):
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(x[:, :2], 1.0).to_event(1))

        return model, guide

    x = torch.rand(3, 4)
    SVI(*programs(nn.Linear(2, 4)), Adam({"lr": 0.1}), LOSSES[loss]()).step(x)
    with pytest.raises(ValueError, match=r"'decoder\$\$\$weight' .*the store had one of this name"):
        SVI(*programs(nn.Linear(2, 4)), Adam({"lr": 0.1}), LOSSES[loss]()).step(x)


@in_turn(loss=LOSSES, memory_format=[torch.contiguous_format, torch.channels_last])
def test_an_optimizer_of_the_module_needs_no_store(loss, memory_format):
    changed(network(), TraceSGVB_ELBO())  # The store has parameters of these names already.
    encoder = network(memory_format)
    elbo = LOSSES[loss]()(*programs(encoder))
    before = [p.detach().clone() for p in encoder.parameters()]
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        elbo(X).backward()
        optimizer.step()
    assert not any(map(torch.equal, before, encoder.parameters()))


class Part(PyroModule):
    """A model, or a guide, with a network of a given name."""

    def __init__(self, name, is_model):
        super().__init__()
        self.name, self.is_model = name, is_model
        setattr(self, name, nn.Linear(*((2, 3) if is_model else (3, 2))))

    def forward(self, x):
        network = getattr(self, self.name)
        with pyro.plate("data", len(x)):
            loc = torch.zeros(2) if self.is_model else network(x)
            z = pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))
            if self.is_model:
                pyro.sample("x", dist.Normal(network(z), 1.0).to_event(1), obs=x)


def test_the_remedies_for_parts_of_one_name_train_both():
    x = torch.rand(8, 3)

    def parts(*names):
        pyro.clear_param_store()
        return [Part(name, is_model) for name, is_model in zip(names, (True, False), strict=True)]

    with pytest.raises(ValueError, match=r"give these different names.* elbo\(model, guide\)"):
        SVI(*parts("net", "net"), Adam({"lr": 0.1}), TraceSGVB_ELBO()).step(x)
    result = parts("decoder", "encoder")
    before = [p.detach().clone() for part in result for p in part.parameters()]
    SVI(*result, Adam({"lr": 0.1}), TraceSGVB_ELBO()).step(x)
    with pyro.settings.context(module_local_params=True):
        both = parts("net", "net")
        before += [p.detach().clone() for part in both for p in part.parameters()]
        optimizer = torch.optim.Adam([p for part in both for p in part.parameters()], 0.1)
        TraceSGVB_ELBO()(*both)(x).backward()
        optimizer.step()
    after = [p for part in (*result, *both) for p in part.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Plain(nn.Module):
    """A module of torch.nn, whose parameters Pyro does not register by itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 3)

    def forward(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.net(z), 1.0).to_event(1), obs=x)


def plain_guide(x):
    loc = pyro.param("loc", torch.zeros(len(x), 2))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))


@pytest.mark.parametrize("name", LOSSES)
def test_svi_that_trains_no_parameter_of_a_module_is_warned_of_once(name, caplog):
    x, module, loss = torch.rand(4, 3), Plain(), LOSSES[name]()

    def registering(x):
        pyro.module("net", module)
        module(x)

    def lines():
        found = [r.getMessage() for r in caplog.records if "trains no parameter" in r.getMessage()]
        caplog.clear()
        return found

    svi = SVI(module, plain_guide, Adam({"lr": 0.1}), loss)
    for _ in range(3):
        svi.step(x)
    (line,) = lines()
    assert "of the Plain that the loss depends on ('net.weight', 'net.bias')" in line
    SVI(registering, plain_guide, Adam({"lr": 0.1}), LOSSES[name]()).step(x)
    LOSSES[name]().differentiable_loss(module, plain_guide, x).backward()  # not by SVI
    module.requires_grad_(False)
    SVI(module, plain_guide, Adam({"lr": 0.1}), LOSSES[name]()).step(x)
    assert not lines()
