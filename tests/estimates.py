"""Statistics of a loss and its gradient over repeated steps."""

import pyro
import torch


def called(guide, *args):
    """A guide after its first call: its initial values are meant, which evaluation asks for."""
    guide(*args)
    return guide


def values(elbo, programs, count, *args):
    """Minus the loss of ``count`` steps: shape [count]."""
    first = -elbo.loss(programs.model, programs.guide, *args)
    with pyro.validation_enabled(False):  # it costs most of the time, and has passed once
        rest = [-elbo.loss(programs.model, programs.guide, *args) for _ in range(count - 1)]
    return torch.tensor([first, *rest])


def gradients(elbo, programs, count, *args, losses=None):
    """
    Gradients of the bound over ``count`` steps: a dict of tensors [count, *parameter].

    :param losses: a list that takes the steps' losses.
    """
    steps = []
    for i in range(count):
        with pyro.validation_enabled(i == 0):
            loss = elbo.loss_and_grads(programs.model, programs.guide, *args)
        if losses is not None:
            losses.append(loss)
        steps.append(take_gradients(programs))
    return {name: torch.stack([step[name] for step in steps]) for name in programs.values}


def take_gradients(programs):
    """The bound's gradients by parameter, zero where there is none; clears them."""
    result = {}
    params = dict(pyro.get_param_store().named_parameters())
    for name, value in programs.values.items():
        param = params.get(name)
        if param is None or param.grad is None:
            result[name] = torch.zeros_like(value)
        else:
            result[name], param.grad = -param.grad, None
    return result


def assert_mean(samples, exact, sigmas=4.5):
    """The samples' mean equals ``exact`` within ``sigmas`` standard errors, entry by entry."""
    mean, error = samples.mean(0), samples.std(0) / len(samples) ** 0.5
    deviation = (mean - exact).abs()
    allowed = sigmas * error + 1e-9
    assert (deviation <= allowed).all(), f"mean {mean}, exact {exact}, standard error {error}"


def assert_gradient(elbo, programs, exact, count, *args, losses=None):
    """The mean gradient is the exact one, and the test could tell if it were zero."""
    result = gradients(elbo, programs, count, *args, losses=losses)
    telling = 0
    for name, samples in result.items():
        assert_mean(samples, exact[name])
        telling += int((exact[name].abs() > 9 * samples.std(0) / count**0.5).sum())
    assert telling > 0, "every exact gradient drowns in noise: take more samples"
