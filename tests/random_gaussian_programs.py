"""
Random programs of which everything is known: trees of plates with linear-Gaussian sites.

Vectors and scalars, four families of distributions that are Gaussian in coordinates of their own.
The log density is quadratic, so that algebra gives the evidence and, site after site, the
posterior::

    model, guide, log_evidence = solved(seed=3)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import transforms

from tests.random_programs import Draws, Plate, Program, Site


@dataclass(kw_only=True)
class Linear(Site):
    """
    A normal draw, given others: loc + sum_q coefficient_q (z_q - center_q), with a factor tril.

    :ivar loc: ``[*batch, event]``, and so are ``center`` and ``tril``'s first dims.
    :ivar vector: whether the event is a vector; else it is the only element of one.
    """

    vector: bool
    family: str
    loc: Tensor
    tril: Tensor
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    centers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.loc.shape[-1]

    def cut(self, cut: Callable[[Tensor, int], Tensor]) -> "Linear":
        site = cast("Linear", super().cut(cut))
        return replace(
            site,
            value=None if self.value is None else cut(self.value, 1),
            loc=cut(self.loc, 1),
            tril=cut(self.tril, 2),
            coefficients={k: cut(v, 2) for k, v in self.coefficients.items()},
            centers={k: cut(v, 1) if v.dim() else v for k, v in self.centers.items()},
        )

    def state(self, value: Tensor) -> Tensor:
        value = value.log() if self.family == "LogNormal" else value
        return value if self.vector else value.unsqueeze(-1)

    def value_of(self, state: Tensor) -> Tensor:
        value = state if self.vector else state.squeeze(-1)
        return value.exp() if self.family == "LogNormal" else value

    def distribution(self, draws: dict[str, Tensor]) -> dist.Distribution:
        loc = self.loc
        for name, coefficient in self.coefficients.items():
            loc = loc + (coefficient @ (draws[name] - self.centers[name]).unsqueeze(-1)).squeeze(-1)
        if self.vector and self.tril.tril(-1).any():
            result = dist.MultivariateNormal(loc, scale_tril=self.tril)
            exp = transforms.ExpTransform()
            return (
                dist.TransformedDistribution(result, [exp])
                if self.family == "LogNormal"
                else result
            )
        scale = self.tril.diagonal(dim1=-2, dim2=-1)
        if not self.vector:
            loc, scale = loc.squeeze(-1), scale.squeeze(-1)
        if self.family == "LogNormal":
            result = dist.LogNormal(loc, scale)
        elif self.family == "flow":
            white = dist.Normal(torch.zeros_like(loc + scale), 1.0)
            result = dist.TransformedDistribution(white, [transforms.AffineTransform(loc, scale)])
        else:
            result = dist.Normal(loc, scale)
        return result.to_event(1) if self.vector else result


class Gaussian(NamedTuple):
    """A quadratic log density: its maximum, its curvature and the logarithm of its integral."""

    mean: Tensor
    precision: Tensor
    log_normalizer: Tensor


class GaussianProgram(Program):
    """One whose log density is quadratic in the coordinates of its latents."""

    def log_density(self, coordinates: Tensor) -> Tensor:
        """Of all latents' coordinates, by Pyro alone."""
        total, index = coordinates.new_zeros(()), self.index()
        values = {}
        for s in self.latents:
            u = coordinates[index[s.name]]
            values[s.name] = s.value_of(u)
            total = total + (u.sum() if s.family == "LogNormal" else 0.0)
        return total + poutine.trace(poutine.condition(self, values)).get_trace().log_prob_sum()

    def gaussian(self) -> Gaussian:
        zeros = torch.zeros(sum(i.numel() for i in self.index().values()), dtype=torch.float64)
        gradient = torch.autograd.functional.jacobian(self.log_density, zeros)
        precision = -torch.autograd.functional.hessian(self.log_density, zeros)
        mean = torch.linalg.solve(precision, gradient)
        spread = len(zeros) * math.log(2 * math.pi) - torch.linalg.slogdet(precision)[1]
        return Gaussian(mean, precision, self.log_density(mean) + 0.5 * spread)


class LinearDraws(Draws):
    """Sites whose means are linear in earlier ones."""

    def _latent(self, plates: tuple[Plate, ...], parents: list[Site]) -> Linear:
        return self._site("z", plates, parents)

    def _observed(self, plates: tuple[Plate, ...], parents: list[Site]) -> Linear:
        site = self._site("x", plates, parents)
        return replace(site, value=self._normal(*site.batch, site.size))

    def _site(self, kind: str, plates: tuple[Plate, ...], parents: list[Site]) -> Linear:
        vector, size = self._choose.choice([(False, 1), (True, 1), (True, 2), (True, 3)])
        family = self._choose.choice(["Normal", "Normal", "flow", "LogNormal"])
        empty = torch.zeros(())
        site = Linear(
            name=self._name(kind),
            plates=plates,
            vector=vector,
            family=family,
            loc=empty,
            tril=empty,
        )
        around = site.batch if self._choose.random() < 0.7 else ()
        tril = torch.diag_embed(0.7 * (0.3 * self._normal(*around, size)).exp())
        if family == "Normal" and self._choose.random() < 0.4:
            tril = tril + 0.3 * torch.ones_like(tril).tril(-1)
        chosen = self._some(parents)
        return replace(
            site,
            loc=0.5 * self._normal(*around, size),
            tril=tril,
            coefficients={q.name: 0.7 * self._normal(size, q.size) for q in chosen},
            centers={q.name: empty for q in chosen},
        )


class Solved(NamedTuple):
    """A model, the guide that is its posterior, and its log evidence."""

    model: GaussianProgram
    guide: GaussianProgram
    log_evidence: float

    def looped(self, seed: int) -> "Solved":
        """The same programs with some plates as loops."""
        return self._replace(model=self.model.looped(seed), guide=self.guide.looped(seed))

    def off(self, seed: int) -> "Solved":
        """With a guide near the posterior: each site is moved and widened a little."""
        draws = torch.Generator().manual_seed(seed)
        size = 0.35 / math.sqrt(len(self.model.gaussian().mean))

        def moved(site: Linear) -> Linear:
            shift, widening = torch.rand(2, generator=draws).tolist()
            return replace(
                site, loc=site.loc + 0.3 * size * shift, tril=site.tril * (1.0 + size * widening)
            )

        return self._replace(guide=GaussianProgram(self.guide.root.changed(moved)))

    def elbo(self) -> float:
        """In closed form: the mean of one quadratic under the density of another."""
        model, guide = self.model.gaussian(), self.guide.gaussian()
        covariance = torch.linalg.inv(guide.precision)
        energy = self.model.log_density(guide.mean) - 0.5 * (model.precision @ covariance).trace()
        entropy = 0.5 * len(guide.mean) - self.guide.log_density(guide.mean)
        return float(energy + entropy)


def solved(seed: int) -> Solved:
    """A random program, solved."""
    return _solved(GaussianProgram(LinearDraws(seed).tree()))


def minibatch(seed: int) -> Solved:
    """A random program of which a third of the data are run, with the same guide for all."""
    model, guide, log_evidence = _solved(GaussianProgram(LinearDraws(seed).forest()))
    return Solved(
        GaussianProgram(model.root, 1 / 3), GaussianProgram(guide.root, 1 / 3), 3 * log_evidence
    )


def _solved(model: GaussianProgram) -> Solved:
    exact, index = model.gaussian(), model.index()
    covariance = torch.linalg.inv(exact.precision)
    before: list[Linear] = []
    sites: dict[str, Linear] = {}
    for site in model.latents:
        sites[site.name] = _conditional(site, before, index, exact.mean, covariance)
        before.append(site)
    guide = GaussianProgram(model.root.changed(lambda s: sites.get(s.name)))
    return Solved(model, guide, float(exact.log_normalizer))


def _conditional(
    site: Linear, before: list[Linear], index: dict[str, Tensor], mean: Tensor, covariance: Tensor
) -> Linear:
    """A site's normal distribution given those before it, of which it needs its ancestors alone."""
    own, flat = index[site.name], index[site.name].flatten()
    given = torch.cat([own.new_zeros(0), *(index[s.name].flatten() for s in before)])
    slopes = torch.linalg.solve(covariance[given][:, given], covariance[given][:, flat]).mT
    rest = covariance[flat][:, flat] - slopes @ covariance[given][:, flat]
    size = own.shape[-1]
    elements = own.reshape(-1, size) - int(own.min())
    blocks = torch.stack([rest[e][:, e] for e in elements])
    coefficients, used = {}, torch.zeros_like(slopes)
    position = {int(i): k for k, i in enumerate(given)}
    for name in (s.name for s in before if set(s.plates) <= set(site.plates)):
        columns = index[name].expand(*own.shape[:-1], -1).reshape(len(elements), -1)
        at = torch.tensor([[position[int(i)] for i in row] for row in columns])
        result = torch.stack([slopes[e][:, c] for e, c in zip(elements, at, strict=True)])
        for e, c in zip(elements, at, strict=True):
            used[e.unsqueeze(-1), c] = slopes[e.unsqueeze(-1), c]
        if result.abs().max() > 1e-9:
            coefficients[name] = result.reshape(*own.shape[:-1], size, -1)
    assert torch.allclose(used, slopes, atol=1e-9), "a site depends on one that is no ancestor"
    return Linear(
        name=site.name,
        plates=site.plates,
        vector=site.vector,
        family=site.family,
        loc=mean[own],
        tril=torch.linalg.cholesky(blocks).reshape(*own.shape, size),
        coefficients=coefficients,
        centers={n: mean[index[n]] for n in coefficients},
    )
