"""Baselines of the score function: what is subtracted from a discrete site's cost."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.discrete.score_function import leave_one_out_baseline, score_surrogate
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.support import Support

_counter = itertools.count()


@dataclass(frozen=True)
class SiteSignal:
    """
    What a baseline sees of one discrete site: everything detached but ``score``.

    :ivar name: the site's name.
    :ivar weight: the weight of each slot, shape ``[S, *batch]``.
    :ivar sampled: which slots are draws.
    :ivar score: log q of each slot's value, with its gradient.
    :ivar cost: the expected ELBO terms behind each slot, times ``upstream``.
    :ivar upstream: the weight of the slots of other sites on which the site depends, a shape that
        broadcasts with ``weight``.
    :ivar support: the site's values.
    :ivar value: the slots' values, ``[S, *batch, *event]``.
    :ivar exact: whether the slots are all values, so that nothing is random.
    :ivar extra: whether the last slot is an independent draw, without weight.
    :ivar input: ``infer={"mcvae": {"baseline_input": ...}}`` of the site, or None.
    """

    name: str
    weight: Tensor
    sampled: Tensor
    score: Tensor
    cost: Tensor
    upstream: Tensor
    support: Support | None
    value: Tensor
    exact: bool
    extra: bool
    input: object
    programs: Programs

    def average_cost(self) -> Tensor:
        """The expected cost behind each slot by itself; zero where nothing leads there."""
        known = self.upstream > 0
        return torch.where(known, self.cost / torch.where(known, self.upstream, 1.0), 0.0)


class Baseline(ABC):
    """
    A variance reduction of one discrete site's gradient that leaves its mean as it is.

    :cvar min_samples: how many draws it needs.
    :cvar extra_draw: whether it needs one further draw of the site, independent of the slots.
    :cvar relaxed: whether the site is not drawn at all, but relaxed.

    Example, a constant that is subtracted from the cost of draws (``num_categories=0``)::

        >>> from pyro_mcvae.discrete.score_function import score_surrogate
        >>> class Constant(Baseline):
        ...     def surrogate(self, signal):
        ...         return score_surrogate(signal.weight * (signal.cost - 3.0), signal.score)
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=0, baseline=Constant())
    """

    min_samples = 1
    extra_draw = False
    relaxed = False

    @abstractmethod
    def surrogate(self, signal: SiteSignal) -> Tensor:
        """A scalar with the gradient of the site's distribution, and of learned parts."""


def no_baseline(signal: SiteSignal) -> Tensor:
    r"""REINFORCE: :math:`\sum_s w_s f(z_s) \nabla \log q(z_s)`."""
    return score_surrogate(signal.weight * signal.cost, signal.score)


class IndependentDraw(Baseline):
    r"""
    REINFORCE+: the cost of an independent draw is subtracted from all slots' costs.

    One draw for each datum serves all of its slots, so a step evaluates k + n + 1 of them.

    Example::

        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=IndependentDraw())
    """

    extra_draw = True

    def surrogate(self, signal: SiteSignal) -> Tensor:
        if not signal.extra:  # an exact sum
            return no_baseline(signal)
        # The last slot has no weight of its own.
        return score_surrogate(signal.weight * (signal.cost - signal.cost[-1:]), signal.score)


class LeaveOneOut(Baseline):
    r"""
    The mean cost of the other draws is subtracted from each draw's, and that of all draws from
    the summed categories' (see :func:`~pyro_mcvae.discrete.score_function.leave_one_out_baseline`).

    Needs ``num_samples >= 2``.

    Example::

        >>> elbo = TraceRaoBlackwell_ELBO(1, num_samples=2, baseline=LeaveOneOut())
    """

    min_samples = 2

    def surrogate(self, signal: SiteSignal) -> Tensor:
        baseline = leave_one_out_baseline(signal.cost, signal.sampled)
        return score_surrogate(signal.weight * (signal.cost - baseline), signal.score)


class SummedMean(Baseline):
    r"""
    The mean cost :math:`b = \sum_{z \in C} q(z) f(z) / q(C)` of the summed categories is
    subtracted from all slots' costs.

    It takes no further evaluation, and does not depend on the draws, so the mean stays as it is.
    Not in the paper. Where nothing is summed it is REINFORCE.

    Example::

        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=SummedMean())
    """

    def surrogate(self, signal: SiteSignal) -> Tensor:
        mass = torch.where(signal.sampled, 0.0, signal.weight)
        total = (mass * signal.cost).sum(0, keepdim=True)
        mass = mass.sum(0, keepdim=True)
        baseline = torch.where(mass > 0, total / torch.where(mass > 0, mass, 1.0), 0.0)
        return score_surrogate(signal.weight * (signal.cost - baseline), signal.score)


class LearnedBaseline(Baseline, torch.nn.Module):
    """
    A baseline with parameters. As part of an ELBO it is trained by the optimizer of the step.

    It sees the first argument of the programs' call, or what a site hands it by
    ``infer={"mcvae": {"baseline_input": x[idx]}}``.
    """

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        # One name for each instance: the parameter store would let others share its parameters.
        self.param_name = f"mcvae_{type(self).__name__}_{next(_counter)}"

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.param_name = f"mcvae_{type(self).__name__}_{next(_counter)}"

    def input_of(self, signal: SiteSignal) -> object:
        """What the network is applied to."""
        if signal.input is not None:
            return signal.input
        args = signal.programs.args
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(
                f"{type(self).__name__} takes the programs' first argument as its input, got "
                f"{type(args[0]).__name__ if args else 'none'}: pass another one by "
                f"infer={{'mcvae': {{'baseline_input': x}}}} at guide site '{signal.name}'"
            )
        return args[0]

    def fitted(self, output: Tensor, signal: SiteSignal) -> Tensor:
        """A network's output, ``[*plates]`` or ``[*plates, 1]``, checked against the site."""
        shape = torch.broadcast_shapes(signal.weight.shape, signal.cost.shape)[1:]
        for found in (output, output.squeeze(-1) if output.shape[-1:] == (1,) else output):
            try:
                if torch.broadcast_shapes(found.shape, shape) == shape:
                    return found
            except RuntimeError:
                pass
        while shape[:1] == (1,):
            shape = shape[1:]
        raise ValueError(
            f"{type(self).__name__} predicts one number for each datum of guide site "
            f"'{signal.name}', so its network must return shape {tuple(shape)} (or that with a "
            f"last dimension of 1), got {tuple(output.shape)}: pass the site's own minibatch by "
            f"infer={{'mcvae': {{'baseline_input': x[idx]}}}}"
        )


class NVIL(LearnedBaseline):
    r"""
    Subtracts a network's prediction b(x) of the cost [1], trained by least squares:

    .. math::
        \sum_s w_s (f(z_s) - b(x)) \nabla \log q(z_s), \qquad
        \min_b \sum_s w_s (f(z_s) - b(x))^2 .

    :param torch.nn.Module network: maps data to one number each, ``[*plates]`` or
        ``[*plates, 1]``. Its input is the first argument of the programs, or what the site says
        under ``"baseline_input"``. Costs include N/B of subsampled plates.

    [1] Mnih, Gregor (2014), *Neural Variational Inference and Learning in Belief Networks*.

    Example::

        >>> network = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.Tanh(),
        ...                               torch.nn.Linear(64, 1))
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=1, baseline=NVIL(network))
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def surrogate(self, signal: SiteSignal) -> Tensor:
        prediction = self.fitted(self.network(self.input_of(signal)), signal)
        baseline = signal.upstream * prediction.detach()
        loss = signal.weight * signal.upstream * (signal.average_cost() - prediction) ** 2
        gradient = score_surrogate(signal.weight * (signal.cost - baseline), signal.score)
        return gradient - loss.sum()
