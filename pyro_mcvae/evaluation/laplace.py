"""The posterior over unconstrained coordinates: its density, its modes, normal densities there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger, init_to_value
from torch import Tensor
from torch.distributions import transform_to

from pyro_mcvae.checks.faults import is_circular
from pyro_mcvae.coordinates.coordinate import bijection_of
from pyro_mcvae.coordinates.log_weight import Evaluation, GradientMode, LogWeight
from pyro_mcvae.evaluation.clock import Stage
from pyro_mcvae.evaluation.options import Options, make_programs
from pyro_mcvae.evaluation.weights import ImportanceSampler, weights_of
from pyro_mcvae.programs.sites import bare, known_support, with_mask
from pyro_mcvae.programs.types import Distribution, Program, Site, is_subsampled, plate_frames

# A guide that is flat over unconstrained coordinates: its weights are the posterior density there.

# The first draws are uniform between minus and plus this.
_NEAR = 0.1


class _Flat(pyro.distributions.TorchDistribution):
    """The distribution of values whose unconstrained coordinates have density one."""

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, fn: Distribution, like: Tensor) -> None:
        self._fn, self._transform, self._like = fn, bijection_of(fn), like
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self._fn.support

    def expand(self, batch_shape: Any, _instance: object = None) -> _Flat:
        return _Flat(self._fn.expand(batch_shape), self._like)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._transform.inverse_shape(torch.Size(sample_shape) + self.shape())
        return cast("Tensor", self._transform(self._like.new_empty(shape).uniform_(-_NEAR, _NEAR)))

    def log_prob(self, value: Tensor) -> Tensor:
        at = self._transform.inv(value)
        log_det = self._transform.log_abs_det_jacobian(at, value)
        extra = self.event_dim - self._transform.codomain.event_dim
        return -(log_det.flatten(log_det.dim() - extra).sum(-1) if extra else log_det)


def _feasible(site: Site) -> Tensor:
    """Return the value at zero of the unconstrained coordinates."""
    name, kind = site["name"], type(bare(site["fn"])).__name__
    if known_support(site["fn"]).is_discrete:
        raise ValueError(
            f"site '{name}' is discrete ({kind}), and chains move latents along gradients: mark it "
            f"infer={{'enumerate': 'parallel'}} in the model, or pass a guide that draws it"
        )
    if is_circular(site["fn"]):
        raise ValueError(
            f"site '{name}' is an angle ({kind}), which has no unconstrained form, because its "
            f"density is periodic: pass a guide that draws it from dist.VonMises"
        )
    try:
        bijection_of(site["fn"])
        transform = transform_to(known_support(site["fn"]))
    except NotImplementedError as error:
        raise ValueError(
            f"site '{name}' ({kind}) has no unconstrained form ({error}): pass a guide that draws "
            f"it from a distribution with this support"
        ) from error
    with torch.random.fork_rng(devices=[]):
        try:
            like = site["fn"].sample()
        except NotImplementedError:  # of a flat distribution, which has no dtype
            like = torch.empty(())
    return cast("Tensor", transform(like.new_zeros(transform.inverse_shape(site["fn"].shape()))))


class _LatentMask(poutine.messenger.Messenger):
    """Moves ``poutine.mask(mask=False)`` of a latent into its distribution, which is then flat."""

    def _pyro_sample(self, msg: Site) -> None:
        if msg["mask"] is False and not msg["is_observed"]:
            msg["fn"], msg["mask"] = msg["fn"].mask(False), None


def latents_masked(model: Program) -> Program:
    """Return a model whose latents are flat under ``poutine.mask(mask=False)``."""
    return cast("Program", _LatentMask()(model))


class FlatGuide(AutoGuide):
    """
    A guide that draws every latent, and whose density is one over unconstrained coordinates.

    Sites that the model enumerates are left out.

    :raises ValueError: for other discrete sites, and for subsampled plates.
    """

    def __init__(self, model: Program) -> None:
        summed = poutine.block(model, hide_fn=lambda site: "enumerate" in site.get("infer", ()))
        super().__init__(InitMessenger(_feasible)(summed))

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        for _, site in self.prototype_trace.iter_stochastic_nodes():
            for frame in filter(is_subsampled, plate_frames(site)):
                raise ValueError(
                    f"plate '{frame.name}' is subsampled ({frame.size} of {frame.full_size}), and "
                    f"a posterior is that of all data: pass the full data"
                )

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates, values = self._create_plates(*args, **kwargs), {}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            with ExitStack() as stack:
                for frame in plate_frames(site):
                    stack.enter_context(plates[frame.name])
                fn = with_mask(site["fn"], None) or site["fn"]
                values[name] = pyro.sample(name, _Flat(fn, site["value"]))
        return values


class LogDensity:
    r"""
    The log density of a posterior over unconstrained coordinates, up to a constant, and its
    gradient.

    :param sampler: of a :class:`FlatGuide`.
    """

    def __init__(self, sampler: ImportanceSampler) -> None:
        self._sampler, self._log_weights = sampler, dict[int, LogWeight]()
        self.num_evaluations = 0
        self.stage: Stage | None = None
        self.like = self._log_weight(1).coordinates[0].flatten()

    @property
    def dim(self) -> int:
        """Return D, the number of coordinates."""
        return len(self.like)

    def _log_weight(self, count: int) -> LogWeight:
        if count not in self._log_weights:
            with torch.enable_grad():
                self._log_weights[count] = self._sampler.log_weight(
                    count, gradient=GradientMode.COORDINATES, coordinates="latent"
                )
        return self._log_weights[count]

    def evaluate(self, position: Tensor) -> Evaluation:
        """Run the programs at positions of shape ``[K, D]``, until the time budget ends."""
        if self.stage is not None:
            self.stage.check()
        log_weight = self._log_weight(len(position))
        return log_weight(position.reshape(-1, *log_weight.coordinates.shape[1:]))

    def position_of(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of latents of shape ``[K, *site_shape]``."""
        log_weight = self._log_weight(1)
        records = log_weight.records[0]
        at = {n: records[n].coordinate.at(values[n]) for n in log_weight.packing.sites}
        return log_weight.packing.pack_runs([at]).flatten(1)

    def sites(self, position: Tensor) -> dict[str, Tensor]:
        """Return the latents at positions, shape ``[K, *site_shape]``."""
        log_weight = self._log_weight(1)
        at = log_weight.packing.unpack(position.reshape(-1, *log_weight.coordinates.shape[1:]))
        values = {n: log_weight.records[0][n].coordinate.value(u) for n, u in at.items()}
        shapes = cast("Any", self._sampler.programs.guide).prototype_trace.nodes
        return {n: v.reshape(-1, *shapes[n]["value"].shape) for n, v in values.items()}

    def values(self, position: Tensor) -> tuple[list[str], Tensor]:
        """Return the latents at positions, side by side, and a name for each number of them."""
        names, values = list[str](), list[Tensor]()
        for name, value in self.sites(position).items():
            values.append(value.flatten(1) if value.dim() > 1 else value[:, None])
            count = values[-1].shape[1]
            names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
        return names, torch.cat(values, -1)

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return the log density, shape ``[K]``, and its gradient, shape ``[K, D]``.

        Where the density is not finite, or a matrix cannot be factorized, the density is zero and
        the gradient is too.
        """
        self.num_evaluations += 1
        value, gradient = self._differentiate(position)
        bad = ~(value.isfinite() & gradient.isfinite().all(-1))
        return value.masked_fill(bad, -math.inf), gradient.masked_fill(bad[:, None], 0.0)

    def _differentiate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        moved = position.detach().clone().requires_grad_()
        try:
            with pyro.validation_enabled(False), torch.enable_grad():
                at = self.evaluate(moved)
                value = (at.log_base + at.log_weight).flatten()
                return value.detach(), torch.autograd.grad(value.sum(), moved)[0]
        except torch.linalg.LinAlgError:
            if len(position) == 1:
                return position.new_full((1,), -math.inf), torch.zeros_like(position)
        # One matrix that is not positive definite fails the batch: find its row by halves.
        halves = map(self._differentiate, position.tensor_split(2))
        values, gradients = zip(*halves, strict=True)
        return torch.cat(values), torch.cat(gradients)


# Modes: L-BFGS from several starts, then Newton's method.

_STARTS, _ITERATIONS, _MEMORY, _NEWTON = 16, 200, 20, 20
# The first half of the starts is uniform between minus and plus the first number, as in Stan.
_RADII = 2.0, 10.0
# The largest expected rise, in nats, at a mode. The nats of Laplace evidence within which another
# mode counts, and the number of modes. The nats by which the ELBO of a normal density may be lower
# than its Laplace evidence.
_CLOSE, _MARGIN, _MOST, _GAP = 1e-3, 10.0, 4, 5.0


class Mode(NamedTuple):
    r"""
    A mode :math:`\mu`, with the normal density :math:`N(\mu, L L^\top)` that has its curvature.

    If almost nothing of the posterior is near the mode, as where a density is not bounded, this is
    another position on the way there.

    :ivar mean: shape ``[D]``.
    :ivar factor: L, lower triangular, shape ``[D, D]``.
    :ivar log_density: at the mode.
    :ivar log_evidence: of the Laplace approximation.
    :ivar elbo: of the normal density.
    """

    mean: Tensor
    factor: Tensor
    log_density: float
    log_evidence: float
    elbo: float

    def distance(self, position: Tensor) -> Tensor:
        """Return half the squared distance of positions ``[K, D]``, in standard deviations."""
        away = (position - self.mean).mT
        return 0.5 * torch.linalg.solve_triangular(self.factor, away, upper=False).square().sum(0)


def find_modes(density: LogDensity) -> list[Mode]:
    """
    Return the modes that starts reach, best first, without those of negligible mass.

    :raises ValueError: if no start has a positive density.
    """
    radius = density.like.new_tensor(_RADII).repeat_interleave(_STARTS // 2)[:, None]
    rows = radius * (2 * torch.rand(_STARTS, density.dim).to(radius) - 1)
    rows[0] = 0.0
    for _ in range(10):  # Stan tries a hundred times
        bad = density(rows)[0].isinf()
        if not bad.any():
            break
        rows[bad] = (_RADII[0] * (2 * torch.rand_like(rows) - 1))[bad]
    rows = rows[~density(rows)[0].isinf()]
    if not len(rows):
        raise ValueError(
            f"the posterior density is zero or not finite at {10 * _STARTS} starts with "
            f"unconstrained values from -10 to 10: pass a guide, or rescale the model's latents"
        )
    paths = _climb(density, rows)
    rows, values = paths[-1], density(paths[-1])[0]
    modes, tries = list[Mode](), 0
    for i in values.argsort(descending=True).tolist():
        if tries == 2 * _MOST or any(_is_near(rows[i], float(values[i]), m) for m in modes):
            continue
        tries += 1
        mode = _newton(density, rows[i])
        if mode.log_evidence - mode.elbo > _GAP:
            way = (_newton(density, path[i], 0) for path in paths)
            mode = max((mode, *way), key=lambda m: m.elbo)
            mode = mode._replace(log_evidence=mode.elbo)
        if not any(_is_near(mode.mean, mode.log_density, m) for m in modes):
            modes.append(mode)
    modes.sort(key=lambda m: -m.log_evidence)
    return [m for m in modes[:_MOST] if m.log_evidence > modes[0].log_evidence - _MARGIN]


def _is_near(position: Tensor, value: float, mode: Mode) -> bool:
    """Return whether a position has about the density that a mode's normal density has there."""
    return float(mode.distance(position[None])) < 2 * abs(mode.log_density - value) + 0.5


def _climb(density: LogDensity, u: Tensor) -> list[Tensor]:
    """
    Maximize from each row with L-BFGS, whose steps are shortened until the density rises.

    :returns: the rows after 0, 1, 2, 4, ... iterations and after the last one.
    """
    (value, gradient), paths = density(u), [u]
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = 1 / gradient.norm(dim=-1).clamp_min(1e-12)
    slow = torch.zeros_like(value)
    for iteration in range(1, _ITERATIONS + 1):
        step, coefficients = gradient, []
        for s, y, rho in reversed(pairs):
            coefficients.append(a := rho * (s * step).sum(-1))
            step = step - a[:, None] * y
        step = step * scale[:, None]
        for (s, y, rho), a in zip(pairs, reversed(coefficients), strict=True):
            step = step + (a - rho * (y * step).sum(-1))[:, None] * s
        rise = (step * gradient).sum(-1)
        length = torch.ones_like(value)
        new, new_value, new_gradient = u, value, gradient
        todo = torch.ones_like(value, dtype=torch.bool)
        for _ in range(12):
            trial = torch.where(todo[:, None], u + length[:, None] * step, new)
            at, slope = density(trial)
            good = todo & (at >= value + 1e-4 * length * rise)
            new = torch.where(good[:, None], trial, new)
            new_value = torch.where(good, at, new_value)
            new_gradient = torch.where(good[:, None], slope, new_gradient)
            todo = todo & ~good & (slow < 2)
            if not todo.any():
                break
            length = torch.where(todo, 0.3 * length, length)
        s, y = new - u, gradient - new_gradient
        curvature = (s * y).sum(-1)
        valid = curvature > 1e-10 * s.norm(dim=-1) * y.norm(dim=-1)
        rho = torch.where(valid, 1 / curvature, 0.0)
        scale = torch.where(valid, curvature / y.square().sum(-1), scale)
        pairs = [*pairs[1 - _MEMORY :], (s, y, rho)]
        slow = torch.where(new_value - value < _CLOSE, slow + 1, 0.0)
        u, value, gradient = new, new_value, new_gradient
        if not iteration & (iteration - 1):
            paths.append(u)
        if bool((slow >= 2).all()):
            break
    return [*paths, u]


def _newton(density: LogDensity, u: Tensor, steps: int = _NEWTON) -> Mode:
    """Maximize with Newton's method, whose Hessians are differences of gradients."""
    value, gradient = (part[0] for part in density(u[None]))
    width = 1e-4 * (1 + u.abs())
    for left in range(steps, -1, -1):
        for _ in range(3):  # differences over about a tenth of a standard deviation
            plus, minus = density(torch.cat([u + width.diag(), u - width.diag()]))[1].chunk(2)
            hessian = (minus - plus) / (2 * width[:, None])
            new = 0.1 * hessian.diagonal().abs().clamp_min(1e-16).rsqrt()
            done = bool(((new / width).log().abs() < 1.0).all())
            width = torch.minimum(new, 1e3 * width)
            if done:
                break
        unit = hessian.diagonal().abs().clamp_min(1e-16).rsqrt()
        scaled = unit[:, None] * (hessian + hessian.mT) / 2 * unit
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        root = unit[:, None] * vectors / eigenvalues.abs().clamp_min(1e-10).sqrt()
        upper = torch.linalg.qr(root.mT).R  # the factor even of an almost singular covariance
        factor = upper.mT * upper.diagonal().sign()
        step = factor @ (factor.mT @ gradient)
        rise, length = float(step @ gradient), 1.0
        if rise < _CLOSE or not left:
            break
        while length > 1e-4:
            at, slope = (part[0] for part in density((u + length * step)[None]))
            if float(at) > float(value):
                u, value, gradient = u + length * step, at, slope
                break
            length *= 0.3
        else:
            break
    log_det = float(factor.diagonal().log().sum())
    entropy = log_det + density.dim / 2 * math.log(2 * math.pi * math.e)
    values = density(u + torch.randn(100, density.dim).to(u) @ factor.mT)[0]
    elbo = float(values.clamp_min(float(value) - 1e3).mean()) + entropy  # some may be impossible
    return Mode(u, factor, float(value), float(value) + entropy - density.dim / 2, elbo)


def laplace_init(
    model: Program,
    *args: object,
    seed: int | None = None,
    model_kwargs: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    r"""
    Return the first location and scale of an AutoGuide from a Laplace approximation.

    The latents of most regressions have different scales and are not near zero, so an AutoGuide
    that starts from its defaults takes many thousand steps. The location is a mode of the posterior
    over unconstrained coordinates, which L-BFGS finds from several starts. It is chosen among the
    modes, or among positions on the way if a mode has little mass, by the ELBO of a normal density,

    .. math:: E_{u \sim N(\mu, H^{-1})} [\log p(x, u)] + \tfrac{1}{2} \log \det (2 \pi e H^{-1}),

    where H is the Hessian of :math:`-\log p(x, u)`. The scale is the smallest standard deviation of
    a coordinate given all others, :math:`\min_i H_{ii}^{-1/2}`, with which no coordinate leaves the
    mode. Flat priors (``ImproperUniform`` and ``.mask(False)``) are allowed.

    :param model: a Pyro model.
    :param args: its arguments.
    :param int seed: the seed of a separate random stream.
    :param model_kwargs: its keyword arguments.
    :returns: ``init_loc_fn`` and ``init_scale``, for ``AutoNormal`` and ``AutoMultivariateNormal``.
    :raises ValueError: as :func:`refine` without a guide.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_mcvae import laplace_init
        >>> def model(x, y):
        ...     slope = pyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.tensor([100.0, 200.0])
        >>> start = laplace_init(model, x, 30.0 * x, seed=0)
        >>> guide = AutoNormal(model, **start)
        >>> guide(x, 30.0 * x)["slope"].round().item(), round(start["init_scale"], 5)
        (30.0, 0.00447)
    """
    programs = make_programs(latents_masked(model), FlatGuide(model), args, model_kwargs)
    with weights_of(programs, Options(joint=True, seed=seed)) as sampler:
        density = LogDensity(sampler)
        best = max(find_modes(density), key=lambda mode: mode.elbo)
        values = density.sites(best.mean[None])
    precision = torch.cholesky_inverse(best.factor).diagonal()
    return {
        "init_loc_fn": init_to_value(values={n: v[0] for n, v in values.items()}),
        "init_scale": float(precision.max().rsqrt()),
    }
