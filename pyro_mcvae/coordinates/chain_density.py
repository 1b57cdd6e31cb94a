"""The density of chains, in noise, latent or white coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_mcvae.chains.kernels import State, finite
from pyro_mcvae.checks.faults import check_scales
from pyro_mcvae.coordinates.log_weight import Evaluation, GradientMode, LogWeight
from pyro_mcvae.ops.compat import tree_map_only
from pyro_mcvae.ops.tensors import costs_nothing_to_read, guard, guard_at_most, guard_finite
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import bare, without_autocast
from pyro_mcvae.programs.terms import Term

# Requirements of chains on the guide's draws, checked once for each structure.


def check_chain(log_weight: LogWeight, objective: str) -> None:
    """
    Check that chains can move from the first draw, and that the draw has a gradient if the gradient
    of the bound passes through it.

    :raises ValueError: naming the site.
    """
    # Scales may change between steps. Scales that are numbers can be compared in each step.
    check_scales(_moving_terms(log_weight), objective, reads=False)
    key = "chain checked", objective, log_weight.gradient
    log_weight.found_once(key, lambda: _check_chain(log_weight, objective))


def _check_chain(log_weight: LogWeight, objective: str) -> None:
    check_continuous(log_weight, objective)
    check_scales(_moving_terms(log_weight), objective, reads=True)
    if log_weight.gradient.keeps_graph:
        _check_reparameterized(log_weight, objective)
        _check_factors(log_weight, objective)


def _moving_terms(log_weight: LogWeight) -> list[Term]:
    """Return the local factors, without those of discrete draws, which chains do not move."""
    sample, moving = log_weight.first.sample, log_weight.plan.moving
    guide = sample.runs[0].guide_trace.nodes
    terms = [t for t in sample.runs[0].terms if sample.is_local(t)]
    return [t for t in terms if t.key.name not in guide or t.key.name in moving]


def _check_reparameterized(log_weight: LogWeight, objective: str) -> None:
    unreparameterized = log_weight.unreparameterized
    if unreparameterized:
        nodes = log_weight.first.sample.runs[0].guide_trace.nodes
        kinds = ", ".join(type(bare(nodes[n]["fn"])).__name__ for n in unreparameterized)
        raise ValueError(
            f"{objective} needs draws with a gradient to the guide's parameters, but the "
            f"guide's site{named(unreparameterized)} not reparameterized ({kinds}): use a "
            f"distribution with rsample and without rejections, or TraceIWAE_ELBO, which "
            f"scores such sites"
        )


def _check_factors(log_weight: LogWeight, objective: str) -> None:
    hidden = [
        t.key.name
        for t in log_weight.first.sample.runs[0].terms
        if t.in_guide and t.site["is_observed"] and isinstance(t.score, Tensor)
    ]
    if hidden:
        raise ValueError(
            f"{objective} follows draws along gradients, but the guide's factor '{hidden[0]}' "
            f"has has_rsample=False, so its draws have no gradient: pass has_rsample=True if it "
            f"is a function of reparameterized draws and parameters, or use TraceIWAE_ELBO, which "
            f"has a score function for it"
        )


def check_continuous(log_weight: LogWeight, objective: str) -> None:
    """
    Check that every latent can be moved along gradients.

    :raises ValueError: naming the discrete sites.
    """
    if log_weight.plan.discrete:
        raise ValueError(
            f"{objective} moves latents along gradients, but the guide's site"
            f"{named(log_weight.plan.discrete)} discrete: sum discrete sites with "
            f"TraceRaoBlackwell_ELBO, weigh them with TraceIWAE_ELBO, or marginalize them "
            f"in the model"
        )


def named(names: tuple[str, ...]) -> str:
    """Format sites with their verb, such as "s 'a', 'b' are", to follow "site"."""
    quoted = ", ".join(f"'{n}'" for n in names)
    return f" {quoted} is" if len(names) == 1 else f"s {quoted} are"


# The log weight of a model and guide as the density of chains.

# The limit for diverging chains, in units of one or of the first position. Beyond it, models raise
# errors (for example for an infinite mean) for all data. Such a state gets weight zero, so that
# adjusted kernels reject it and unadjusted kernels report it.
_FAR = 1e6


class ChainDensity:
    r"""
    :math:`(\log \text{base}, \log w)` with their gradients, as a function from positions to states.

    :param LogWeight log_weight: the log weight, with the gradients that the kernel and the bound
        need.
    :param bool again: whether to evaluate the first draw again, because its gradients are not those
        that move the chain.
    """

    def __init__(self, log_weight: LogWeight, again: bool = False) -> None:
        self.log_weight = log_weight
        # Forward and reverse moves must follow one gradient: the partial derivatives.
        self._again = again or log_weight.plan.coordinates_interact
        self.gradient = log_weight.gradient
        self._full = GradientMode.CHAIN in self.gradient
        # None for empty vectors, if the guide draws only fixed latents.
        moves = log_weight.coordinates.shape[-1] > 0
        self._kernel_gradient = moves and GradientMode.COORDINATES in self.gradient
        self._latest = log_weight.first
        # With a graph for each evaluation: their runs, to name a site whose gradient overflows.
        self.visited: list[Run] = [*log_weight.first.sample.runs]

    @property
    def runs(self) -> list[Run]:
        """Return the first and the last evaluation, to name a site that is not finite."""
        return [*self.log_weight.first.sample.runs, *self._latest.sample.runs]

    def start(self) -> State:
        """Return the state at the first draw."""
        if self._kernel_gradient and self._again:
            return self(self.log_weight.coordinates)
        with torch.set_grad_enabled(bool(self.gradient)):
            state = self._state(self.log_weight.coordinates, self.log_weight.first)
            if costs_nothing_to_read(state.position) and self._is_finite(state, values=False):
                return state
            return self._with_finite_gradients(state)

    def __call__(self, position: Tensor) -> State:
        with torch.set_grad_enabled(self._full or self._kernel_gradient):
            if not self._full:
                position = position.detach()
            if self._kernel_gradient and not position.requires_grad:
                position = position.clone().requires_grad_()
            reads, far = costs_nothing_to_read(position), None
            if reads and position.numel() and guard_at_most(position.detach().abs().amax(), _FAR):
                # A new tensor, because transforms cache their result for a tensor.
                state = self._at(position, position.view_as(position))
                # Without a graph, only gradients are replaced.
                if self._is_finite(state, values=self._full):
                    return state
            else:
                far = ~(position.detach().abs() <= self._far)  # or not a number
                state = self._at(position, position.masked_fill(far, 0.0))
            return self._with_finite_values(state, far, reads)

    @cached_property
    def _far(self) -> Tensor:
        """Return the limit of each coordinate, over all draws of a datum, ``[1, *plates, D]``."""
        first = self.log_weight.coordinates.detach().abs()
        # The number of chains may differ here.
        first = first.amax(0, keepdim=True) if first.numel() else first
        return _FAR * first.clamp(1.0, torch.finfo(first.dtype).max / _FAR)

    def _is_finite(self, state: State, values: bool) -> bool:
        """
        Return whether gradients, and with ``values`` densities, are finite.

        Sums that overflow are not finite. The base density of standard noise and its gradient are
        finite if the position is within its limit.
        """
        parts = [state.grad_weight, state.log_weight if values else None]
        if not self.log_weight.plan.normal:
            parts += [state.grad_base, state.log_base if values else None]
        sums = [part.detach().sum() for part in parts if part is not None]
        return not sums or guard_finite(sum(sums[1:], sums[0]))

    def _with_finite_gradients(self, state: State) -> State:
        """Set non-finite gradients to zero."""
        grad_base = state.grad_base
        if grad_base is None or state.grad_weight is None:
            return state
        state = state._replace(grad_weight=finite(state.grad_weight))
        if self.log_weight.plan.normal:
            return state
        return state._replace(grad_base=finite(grad_base))

    def _with_finite_values(self, state: State, far: Tensor | None, reads: bool) -> State:
        """
        Give zero weight to non-finite values and to positions that are too far away.

        :param far: the mask of coordinates beyond their limit; None if there are none.
        """
        raw = state
        if far is not None:
            outside = far.any(-1)
            weight = state.log_weight.masked_fill(outside, -math.inf)
            state = state._replace(log_weight=weight)
        state = self._with_finite_gradients(state)
        if not (self._full and reads):
            return state
        regular = raw.log_weight.detach().isfinite() & raw.log_base.detach().isfinite()
        if far is not None:
            regular = regular & ~outside
        if raw.grad_joint is not None:
            regular = regular & raw.grad_joint.detach().isfinite().all(-1)
        return state if guard(regular.all()) else self._with_constants(state, regular)

    def _at(self, position: Tensor, moved: Tensor) -> State:
        self._latest = self.log_weight(moved)
        if self._full:
            self.visited += self._latest.sample.runs
        return self._state(position, self._latest)

    def _with_constants(self, state: State, regular: Tensor) -> State:
        """
        Replace the state by a constant at data where something is not finite.

        A rejected move there would leave 0 * NaN in the gradient of every parameter.
        """
        first, anchor = self._latest, self.log_weight.coordinates.detach()
        position = torch.where(regular.unsqueeze(-1), state.position, anchor)
        again = self._with_finite_gradients(self._at(position, position))
        self._latest = first
        fields: dict[str, Tensor] = {}
        for name, old in state._asdict().items():
            if old is not None and name != "position":
                where = regular.reshape(regular.shape + (1,) * (old.dim() - regular.dim()))
                fields[name] = torch.where(where, getattr(again, name), old.detach())
        return state._replace(**fields)

    def _state(self, position: Tensor, at: Evaluation) -> State:
        """
        Return the state of an evaluation, finite or not, without graphs that the bound does not
        need.
        """
        state = State(position, at.log_base, at.log_weight)
        if self._kernel_gradient:
            state = State(*state[:3], *self.log_weight.gradients(at, self._full))
        if self._full:
            return state
        return State(*(None if t is None else t.detach() for t in state))  # type: ignore[arg-type]


@contextmanager
def outside_inference_mode(programs: Programs) -> Iterator[Programs]:
    """Leave inference mode, because chains need gradients, and copy the data."""
    inside = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inside else nullcontext():
        yield _copied(programs) if inside else programs


def _copied(programs: Programs) -> Programs:
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (programs.args, programs.kwargs))
    return replace(programs, args=args, kwargs=kwargs)


# Coordinates in which a posterior is about standard normal: an affine map for each weight.


@dataclass(frozen=True)
class Whitening:
    r"""
    The map :math:`z = \mu + L u` from white coordinates u.

    :ivar mean: :math:`\mu`, shape ``[*plates, D]``.
    :ivar factor: L, lower triangular, shape ``[*plates, D, D]``; or only its diagonal, shape
        ``[*plates, D]``.
    :ivar movable: 1 for coordinates that move; 0 for fixed coordinates, which have no density. None
        if all move.
    """

    mean: Tensor
    factor: Tensor
    movable: Tensor | None = None

    @classmethod
    def none(cls, position: Tensor, movable: Tensor | None, dense: bool) -> Whitening:
        """Return the identity map, for positions of shape ``[K, *plates, D]``."""
        mean, ones = torch.zeros_like(position[0]), torch.ones_like(position[0])
        still = None if movable is None else movable.expand_as(position)[0]
        return cls(mean, ones.diag_embed() if dense else ones, still)

    @property
    def dense(self) -> bool:
        """Return whether the map has correlations."""
        return self.factor.dim() > self.mean.dim()

    @property
    def log_det(self) -> Tensor:
        """Return the log determinant of L, shape ``[*plates]``."""
        diagonal = self.factor.diagonal(dim1=-2, dim2=-1) if self.dense else self.factor
        return diagonal.log().sum(-1)

    def position(self, white: Tensor) -> Tensor:
        """Return z at u, shape ``[K, *plates, D]``."""
        return self.mean + self._times(self.factor, white)

    def white(self, position: Tensor) -> Tensor:
        """Return u at z."""
        moved = position - self.mean
        if not self.dense:
            return moved / self.factor
        with without_autocast():
            columns = moved.unsqueeze(-1)
            return torch.linalg.solve_triangular(self.factor, columns, upper=False)[..., 0]

    def pulled(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to u, given the gradient with respect to z."""
        return self._times(self.factor.mT if self.dense else self.factor, gradient)

    def log_normal(self, white: Tensor) -> Tensor:
        """Return the log density of u, shape ``[K, *plates]``."""
        density = -0.5 * (white.square() + math.log(2 * math.pi))
        return (density if self.movable is None else density * self.movable).sum(-1)

    def refined(self, white: Tensor) -> Whitening:
        r"""
        Return a map to coordinates in which draws have mean zero and about unit covariance. The new
        covariance has the weight :math:`1 - a`, and the current one a, with :math:`a = D / (K +
        D)`, or :math:`1 / (K + 1)` without correlations.

        :param white: shape ``[K, *plates, D]``.
        """
        count, dim = white.shape[0], white.shape[-1] if self.dense else 1
        shrinkage = dim / (count + dim)
        moves = torch.ones_like(self.mean) if self.movable is None else self.movable
        mean = white.mean(0) * moves
        centered = (white - mean) * moves
        floor = torch.full_like(moves, shrinkage).where(moves > 0, 1.0)
        if not self.dense:
            scale = ((1 - shrinkage) * centered.square().mean(0) + floor).sqrt()
            return replace(self, mean=self.position(mean), factor=self.factor * scale)
        with without_autocast():
            covariance = torch.einsum("k...i,k...j->...ij", centered, centered) / count
            step = torch.linalg.cholesky((1 - shrinkage) * covariance + floor.diag_embed())
            return replace(self, mean=self.position(mean), factor=self.factor @ step)

    def _times(self, factor: Tensor, vector: Tensor) -> Tensor:
        if not self.dense:
            return factor * vector
        with without_autocast():
            return torch.einsum("...ij,...j->...i", factor, vector)


class WhitenedDensity:
    r"""
    The density of chains in white coordinates. The base is the normal density :math:`q'(z) = N(z;
    \mu, L L^\top)` instead of the guide, and

    .. math:: \log w'(u) = \log \text{base}(z) + \log w(z) - \log q'(z), \qquad z = \mu + L u .

    The normalizing constant is the same for every fixed map.

    :param ChainDensity density: the density in the coordinates of the guide.
    :param bool at_start: start from the first draw of the density, not from draws of :math:`q'`.
    """

    def __init__(self, density: ChainDensity, whitening: Whitening, at_start: bool = False) -> None:
        self._density, self.whitening, self._at_start = density, whitening, at_start

    @property
    def log_weight(self) -> LogWeight:
        """Return the log weight in the guide's coordinates."""
        return self._density.log_weight

    @property
    def runs(self) -> list[Run]:
        """Return the first and the last evaluation of the density."""
        return self._density.runs

    def start(self) -> State:
        """Draw a starting point from the base density. Fixed coordinates keep their values."""
        position = self.whitening.white(self.log_weight.coordinates.detach())
        if self._at_start:
            return self(position)
        noise, movable = torch.randn_like(position), self.whitening.movable
        return self(noise if movable is None else torch.where(movable > 0, noise, position))

    def __call__(self, white: Tensor) -> State:
        state = self._density(self.whitening.position(white))
        log_base = self.whitening.log_normal(white)
        log_joint = state.log_base + state.log_weight + self.whitening.log_det
        gradient = state.grad_joint
        if gradient is None:
            return State(white, log_base, log_joint - log_base)
        joint = self.whitening.pulled(gradient)
        return State(white, log_base, log_joint - log_base, -white, joint + white)
