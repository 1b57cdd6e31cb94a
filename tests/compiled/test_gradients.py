"""What decides which gradients a step has, and where they go, is noticed; hooks are called once."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_mcvae import CompiledELBO, TraceSGVB_ELBO
from tests.compiled.programs import reasons, uses

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


class Programs:
    penalty: Tensor

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1).double()
        nn.init.constant_(self.net.weight, 0.3)
        nn.init.constant_(self.net.bias, 0.1)

    def model(self, x: Tensor, target: Tensor) -> None:
        pyro.module("net", self.net, update_module_params=True)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = self.net((z + x).unsqueeze(-1)).squeeze(-1)
            pyro.sample("x", dist.Normal(loc, 1.0), obs=target)

    def guide(self, x: Tensor, target: Tensor) -> None:
        slope = pyro.param("slope", torch.tensor(0.1))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope * x, 0.7))


def penalized(loss: Any, programs: Programs) -> Callable[[Any, int], float]:
    """A term that the model leaves in an attribute is added to the loss."""

    def model(x: Tensor, target: Tensor) -> None:
        programs.penalty = programs.net.weight.square().sum()
        programs.model(x, target)

    elbo = loss(model, programs.guide)

    def step(args: Any, seed: int) -> float:
        torch.manual_seed(seed)
        programs.net.zero_grad()
        result = elbo(*args) + programs.penalty
        result.backward()
        with torch.no_grad():
            for p in programs.net.parameters():
                p -= 0.01 * p.grad
        return float(result.detach())

    return step


def by_svi(loss: Any, programs: Programs) -> Callable[[Any, int], float]:
    svi = pyro.infer.SVI(programs.model, programs.guide, pyro.optim.SGD({"lr": 0.01}), loss)

    def step(args: Any, seed: int) -> float:
        torch.manual_seed(seed)
        return float(svi.step(*args))

    return step


def by_module(loss: Any, programs: Programs) -> Callable[[Any, int], float]:
    elbo = loss(programs.model, programs.guide)

    def step(args: Any, seed: int) -> float:
        torch.manual_seed(seed)
        programs.net.zero_grad()
        result = elbo(*args)
        result.backward()
        with torch.no_grad():
            for p in programs.net.parameters():
                if p.grad is not None and p.requires_grad:
                    p -= 0.01 * p.grad
        return float(result.detach())

    return step


def train(compiled: bool, how: Any, change: Callable[[Programs, int], Any]) -> tuple[Any, ...]:
    """The losses and the weights of some steps, with a change before each."""
    pyro.clear_param_store()
    programs, plain = Programs(), TraceSGVB_ELBO()
    loss = CompiledELBO(plain, "eager") if compiled else plain
    step, result = how(loss, programs), []
    for i in range(24):
        args = change(programs, i) or (x, x)
        result += [step(args, i), *(p.item() for p in programs.net.parameters())]
    return result, loss


def freeze(programs: Programs, step: int) -> None:
    if step in (7, 17):
        programs.net.weight.requires_grad_(step == 17)


def unfreeze(programs: Programs, step: int) -> None:
    programs.net.weight.requires_grad_(step >= 9)


def hook(programs: Programs, step: int) -> None:
    if step == 0:
        programs.net.weight.register_hook(lambda gradient: gradient * 10)


def later_hook(programs: Programs, step: int) -> None:
    if step == 9:
        programs.net.bias.register_hook(lambda gradient: gradient * 10)


def ten_times(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(10)


def hook_after(programs: Programs, step: int) -> None:
    if step == 9:
        programs.net.bias.register_post_accumulate_grad_hook(ten_times)


def same_then_other(programs: Programs, step: int) -> tuple[Tensor, Tensor]:
    return (x, x) if step < 9 else (x, 2 * x)


def thaw_in_the_store(programs: Programs, step: int) -> None:
    if step in (1, 9):
        pyro.get_param_store()._params["slope"].requires_grad_(step == 9)


def later_hook_of_a_module(programs: Programs, step: int) -> None:
    if step == 9:
        programs.net.register_full_backward_hook(lambda _, inner, outer: (10 * inner[0],))


CHANGES = (thaw_in_the_store, later_hook_of_a_module)
CHANGES += (freeze, unfreeze, hook, later_hook, hook_after, same_then_other)


@pytest.mark.filterwarnings("ignore:weight was not registered in the param store")
@pytest.mark.parametrize(
    ("change", "how"),
    [  # hooks differ under SVI; of the other changes each is quick under one interface
        pytest.param(
            change, how, marks=[pytest.mark.slow] * ((how is by_svi) != under_svi or i % 2)
        )
        for i, change in enumerate(CHANGES)
        for under_svi in [change in (thaw_in_the_store, hook, later_hook, hook_after)]
        for how in (by_svi, by_module)
    ],
)
def test_steps_are_the_plain_ones_whatever_changes(change: Any, how: Any) -> None:
    plain, _ = train(False, how, change)
    result, loss = train(True, how, change)
    assert result == pytest.approx(plain, rel=1e-12)
    may_not = how is by_svi and change in (hook, later_hook, hook_after)
    assert bool(reasons(loss)) == may_not
    assert may_not or uses(loss) > 8


def test_a_penalty_that_a_program_leaves_behind_keeps_its_gradient() -> None:
    plain, _ = train(False, penalized, lambda programs, step: None)
    result, loss = train(True, penalized, lambda programs, step: None)
    assert result == pytest.approx(plain, rel=1e-12)
    assert "'penalty' of Programs has a gradient" in reasons(loss)[0]


def test_second_derivatives_are_refused() -> None:
    programs = Programs()
    elbo = CompiledELBO(TraceSGVB_ELBO(), "eager")(programs.model, programs.guide)
    parameters = list(programs.net.parameters())
    result = [elbo(x, x) for _ in range(3)][-1]  # the third is recorded
    with pytest.raises(RuntimeError, match=r"first derivatives only.*\.plain"):
        torch.autograd.grad(result, parameters, create_graph=True)
