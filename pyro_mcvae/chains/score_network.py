"""Parts of kernels whose parameters have the size of a chain; the learned reversal is one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.parameters import begin_with, of_transition
from pyro_mcvae.ops.checks import check_count


class SizedByChain(nn.Module, ABC):
    """
    Base class of parts whose parameters depend on the number of coordinates, D.

    The first chain creates the parameters.

    :ivar dim: D; None before the parameters are created.
    """

    dim: int | None = None
    # The name of a parameter whose first size is D.
    _sized: str

    def create(self, position: Tensor) -> None:
        """
        Create the parameters, unless they exist.

        Call it before an optimizer or a wrapper such as ``DistributedDataParallel`` collects them.

        :param ~torch.Tensor position: a tensor of shape ``[*batch, D]``, with the device and the
            dtype of a chain.
        :raises ValueError: if the parameters exist for another number of coordinates, as for
            sequences of another length.
        """
        dim = position.shape[-1]
        if dim and self.dim is None:  # a chain without coordinates does not need them
            self.dim = dim
            self._create(dim)
            self.to(position)
        elif dim not in (0, self.dim):
            raise ValueError(
                f"{type(self).__name__} has parameters for {self.dim} coordinates, but the chain "
                f"moves {dim}: use it with one model, whose data have latents of one size"
            )

    @abstractmethod
    def _create(self, dim: int) -> None:
        """Create parameters for ``dim`` coordinates."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        saved = state_dict.get(prefix + self._sized)
        if saved is not None:
            self.create(saved.new_empty(len(saved)))
        super()._load_from_state_dict(state_dict, prefix, *args)


class ScoreNetwork(SizedByChain):
    r"""
    A learned drift :math:`s_k(z, \tilde p)` of the reversed refreshments of a chain [1, 2].

    Pass it as ``reverse`` to :class:`UnderdampedLangevin`, whose docstring has the density.

    .. math::
        s_k(z, \tilde p) = W_3\, \sigma\big(W_2\, \sigma(W_1 [z, \tilde p] + a_k) + b_2\big) + b_3,
        \qquad \sigma = \text{softplus}.

    :math:`W_3` and :math:`b_3` are 0 at first, so the chain begins as without a network. The other
    weights begin at the same values in every process, and draw nothing from the generators.

    :param int num_transitions: one vector :math:`a_k` for each transition, the
        ``num_steps`` of the objective; None for one vector for all transitions.
    :param int width: the number of hidden units of both layers.
    :raises ValueError: for counts that are not ints of at least 1.

    Call it with positions and momenta of shape ``[*batch, D]`` and the number of the transition. It
    returns the drift, shape ``[*batch, D]``.

    [1] Doucet, Grathwohl, Matthews, Strathmann (2022), *Score-Based Diffusion meets Annealed
    Importance Sampling*.
    [2] Geffner, Domke (2023), *Langevin Diffusion Variational Inference*.

    Example::

        >>> import torch
        >>> from pyro_mcvae import ScoreNetwork, UnderdampedLangevin
        >>> network = ScoreNetwork(num_transitions=8, width=16)
        >>> network(torch.randn(5, 3), torch.randn(5, 3), 0).shape
        torch.Size([5, 3])
        >>> kernel = UnderdampedLangevin.trained(8, reverse=network)
    """

    _sized = "drift.bias"

    def __init__(self, num_transitions: int | None = None, *, width: int = 64) -> None:
        super().__init__()
        self.num_transitions, self.width = num_transitions, check_count("width", width)
        self.time = nn.Parameter(begin_with(torch.zeros(width), num_transitions))

    def _create(self, dim: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # all ranks begin with the same weights
            self.inputs = nn.Linear(2 * dim, self.width, device="cpu")
            self.hidden = nn.Linear(self.width, self.width, device="cpu")
            self.drift = nn.Linear(self.width, dim, device="cpu")
        nn.init.zeros_(self.drift.weight)
        nn.init.zeros_(self.drift.bias)

    def forward(self, position: Tensor, momentum: Tensor, transition: int = -1) -> Tensor:
        self.create(position)
        time = of_transition("score network", self.time, self.num_transitions, transition)
        hidden = nn.functional.softplus(self.inputs(torch.cat([position, momentum], -1)) + time)
        drift: Tensor = self.drift(nn.functional.softplus(self.hidden(hidden)))
        return drift
