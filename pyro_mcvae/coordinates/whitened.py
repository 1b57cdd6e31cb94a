"""Coordinates in which a posterior is about a standard normal: an affine map of each weight's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_mcvae.chains.kernel import State
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.programs.precision import without_autocast
from pyro_mcvae.programs.run import Run


@dataclass(frozen=True)
class Whitening:
    r"""
    The map :math:`z = \mu + L u` from white coordinates u.

    :ivar mean: :math:`\mu`, shape ``[*plates, D]``.
    :ivar factor: L, lower triangular, shape ``[*plates, D, D]``; or its diagonal alone, shape
        ``[*plates, D]``.
    :ivar movable: 1 for the coordinates that move, likewise; 0 for those that stay as they are and
        have no density. None if all move.
    """

    mean: Tensor
    factor: Tensor
    movable: Tensor | None = None

    @classmethod
    def none(cls, position: Tensor, movable: Tensor | None, dense: bool) -> Whitening:
        """The identity, for positions of shape ``[K, *plates, D]``."""
        mean, ones = torch.zeros_like(position[0]), torch.ones_like(position[0])
        still = None if movable is None else movable.expand_as(position)[0]
        return cls(mean, ones.diag_embed() if dense else ones, still)

    @property
    def dense(self) -> bool:
        """Whether it knows of correlations."""
        return self.factor.dim() > self.mean.dim()

    @property
    def log_det(self) -> Tensor:
        """Of L, shape ``[*plates]``."""
        diagonal = self.factor.diagonal(dim1=-2, dim2=-1) if self.dense else self.factor
        return diagonal.log().sum(-1)

    def position(self, white: Tensor) -> Tensor:
        """z at u, shape ``[K, *plates, D]``."""
        return self.mean + self._times(self.factor, white)

    def white(self, position: Tensor) -> Tensor:
        """u at z."""
        moved = position - self.mean
        if not self.dense:
            return moved / self.factor
        with without_autocast():
            columns = moved.unsqueeze(-1)
            return torch.linalg.solve_triangular(self.factor, columns, upper=False)[..., 0]

    def pulled(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to u, of that with respect to z."""
        return self._times(self.factor.mT if self.dense else self.factor, gradient)

    def log_normal(self, white: Tensor) -> Tensor:
        """The density of u, shape ``[K, *plates]``."""
        density = -0.5 * (white.square() + math.log(2 * math.pi))
        return (density if self.movable is None else density * self.movable).sum(-1)

    def refined(self, white: Tensor) -> Whitening:
        r"""
        The map to coordinates in which draws, given as u, have mean zero and about unit covariance:
        a share :math:`1 - a` of theirs and a of the present one,
        :math:`a = D / (K + D)`, or :math:`1 / (K + 1)` without correlations.

        :param white: shape ``[K, *plates, D]``.
        """
        count, dim = white.shape[0], white.shape[-1] if self.dense else 1
        share = dim / (count + dim)
        moves = torch.ones_like(self.mean) if self.movable is None else self.movable
        mean = white.mean(0) * moves
        apart = (white - mean) * moves
        kept = torch.where(moves > 0, share, 1.0)
        if not self.dense:
            scale = ((1 - share) * apart.square().mean(0) + kept).sqrt()
            return replace(self, mean=self.position(mean), factor=self.factor * scale)
        with without_autocast():
            covariance = torch.einsum("k...i,k...j->...ij", apart, apart) / count
            step = torch.linalg.cholesky((1 - share) * covariance + kept.diag_embed())
            return replace(self, mean=self.position(mean), factor=self.factor @ step)

    def _times(self, factor: Tensor, vector: Tensor) -> Tensor:
        if not self.dense:
            return factor * vector
        with without_autocast():
            return torch.einsum("...ij,...j->...i", factor, vector)


class WhitenedDensity:
    r"""
    The density that chains move in, seen from white coordinates: the base is the normal density
    :math:`q'(z) = N(z; \mu, L L^\top)` in the place of the guide's, and

    .. math:: \log w'(u) = \log \text{base}(z) + \log w(z) - \log q'(z), \qquad z = \mu + L u .

    Its normalizing constant is the same, whatever map was fixed before.

    :param ChainDensity density: in the coordinates of the guide.
    :param bool at_given: begin where the density does, and not at draws of :math:`q'`.
    """

    def __init__(self, density: ChainDensity, whitening: Whitening, at_given: bool = False) -> None:
        self._density, self.whitening, self._at_given = density, whitening, at_given

    @property
    def log_weight(self) -> LogWeight:
        """In the coordinates of the guide."""
        return self._density.log_weight

    @property
    def runs(self) -> list[Run]:
        """As those of the density."""
        return self._density.runs

    def start(self) -> State:
        """A draw of the base, but for what does not move."""
        given = self.whitening.white(self.log_weight.coordinates.detach())
        if self._at_given:
            return self(given)
        noise, movable = torch.randn_like(given), self.whitening.movable
        return self(noise if movable is None else torch.where(movable > 0, noise, given))

    def __call__(self, white: Tensor) -> State:
        state = self._density(self.whitening.position(white))
        log_base = self.whitening.log_normal(white)
        log_joint = state.log_base + state.log_weight + self.whitening.log_det
        gradient = state.grad_joint
        if gradient is None:
            return State(white, log_base, log_joint - log_base)
        joint = self.whitening.pulled(gradient)
        return State(white, log_base, log_joint - log_base, -white, joint + white)
