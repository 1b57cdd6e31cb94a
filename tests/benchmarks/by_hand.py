"""The bounds of a VAE with normal latents and binary data, written by hand in PyTorch.

A step by hand asks a way of running the VAE for three things: what the guide's network says, the
likelihood, and the joint density. :class:`Plain` writes them out, and is what objectives are
measured against. The other ways show what a model that stays a Pyro program costs at the least.
"""

import math
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, distributions, nn
from torch.nn.functional import binary_cross_entropy_with_logits, hardtanh, one_hot


class Plain:
    """Networks and formulas, without the constants."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def guide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Location and log scale."""
        loc, log_scale = self.vae.encoder(x).chunk(2, -1)
        return loc, log_scale

    def likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """Summed over the data."""
        return -binary_cross_entropy_with_logits(self.vae.decoder(z), x, reduction="sum")

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Of each datum."""
        logits = self.vae.decoder(z)
        terms = binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none")
        return -terms.sum(-1) - 0.5 * z.square().sum(-1)


class Distributions(Plain):
    """The same by PyTorch's distributions, whose densities have their constants."""

    def guide_of(self, x: Tensor) -> distributions.Distribution:
        loc, log_scale = self.guide(x)
        return _normal(loc, log_scale.exp())

    def prior(self, x: Tensor) -> distributions.Distribution:
        return _normal(x.new_zeros(self.vae.latent), x.new_ones(self.vae.latent))

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """Of each datum."""
        data = distributions.Bernoulli(logits=self.vae.decoder(z), validate_args=False)
        return distributions.Independent(data, 1, validate_args=False).log_prob(x)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior(x).log_prob(z) + self.log_likelihood(x, z)


def _normal(loc: Tensor, scale: Tensor) -> distributions.Distribution:
    normal = distributions.Normal(loc, scale, validate_args=False)
    return distributions.Independent(normal, 1, validate_args=False)


class Bare(Plain):
    """The same of the programs as Pyro runs them, under one handler that does the least."""

    def guide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with Handler(None) as handler:
            self.vae.guide(x)
        normal = handler.found["z"][0].base_dist
        return normal.loc, normal.scale.log()

    def likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        with Handler(z) as handler:
            self.vae.model(x)
        fn, value = handler.found["x"]
        log_prob: Tensor = fn.log_prob(value)
        return log_prob.sum()

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        with Handler(z) as handler:
            self.vae.model(x)
        (prior, z), (data, x) = handler.found["z"], handler.found["x"]
        log_joint: Tensor = prior.log_prob(z) + data.log_prob(x) + constant(z)
        return log_joint


class Categories(Plain):
    """Of a one-hot latent: all of its log probabilities, and the joint density at some of them."""

    def guide(self, x: Tensor) -> Any:
        return self.vae.encoder(x).log_softmax(-1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        logits = self.vae.decoder(z)
        terms = binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none")
        return -terms.sum(-1) - math.log(z.shape[-1])

    def log_guide(self, log_q: Tensor, index: Tensor, z: Tensor) -> Tensor:
        """At some categories, as indices ``[*batch, n]`` and as one-hot vectors."""
        return log_q.gather(-1, index).t()


class CategoricalDistributions(Categories):
    """The same by PyTorch's distributions."""

    def guide(self, x: Tensor) -> Any:
        self.fn = distributions.OneHotCategorical(logits=self.vae.encoder(x), validate_args=False)
        return self.fn.logits

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        logits = x.new_zeros(self.vae.latent)
        prior = distributions.OneHotCategorical(logits=logits, validate_args=False)
        data = distributions.Bernoulli(logits=self.vae.decoder(z), validate_args=False)
        data = distributions.Independent(data, 1, validate_args=False)
        return prior.log_prob(z) + data.log_prob(x)

    def log_guide(self, log_q: Tensor, index: Tensor, z: Tensor) -> Tensor:
        return self.fn.log_prob(z)


class BareCategories(Categories):
    """The same of the programs as Pyro runs them."""

    def guide(self, x: Tensor) -> Any:
        with Handler(x) as handler:
            self.vae.guide(x)
        return handler.found["z"][0].logits

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        with Handler(z) as handler:
            self.vae.model(x)
        (prior, z), (data, x) = handler.found["z"], handler.found["x"]
        log_joint: Tensor = prior.log_prob(z) + data.log_prob(x)
        return log_joint


class Handler(Messenger):
    """Sets z, and remembers the sites."""

    def __init__(self, z: Tensor | None) -> None:
        super().__init__()
        self.z, self.found = z, {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "z":
            msg["value"] = msg["fn"].base_dist.loc if self.z is None else self.z
            msg["done"] = True

    def _pyro_post_sample(self, msg: Any) -> None:
        self.found[msg["name"]] = msg["fn"], msg["value"]


def constant(z: Tensor) -> float:
    """Of a standard normal density."""
    return 0.5 * z.shape[-1] * math.log(2 * math.pi)


def sgvb(vae: Plain, x: Tensor) -> Tensor:
    if isinstance(vae, Distributions):
        guide = vae.guide_of(x)
        kl = distributions.kl_divergence(guide, vae.prior(x))
        return (vae.log_likelihood(x, guide.rsample()) - kl).sum()
    loc, log_scale = vae.guide(x)
    z = loc + log_scale.exp() * torch.randn_like(loc)
    kl = 0.5 * (loc**2 + (2 * log_scale).exp() - 1) - log_scale
    return vae.likelihood(x, z) - kl.sum()


def iwae(vae: Plain, x: Tensor, num_particles: int = 10) -> Tensor:
    if isinstance(vae, Distributions):
        guide = vae.guide_of(x)
        z = guide.rsample(torch.Size([num_particles]))
        log_weight = vae.log_joint(x, z) - guide.log_prob(z)
    else:
        loc, log_scale = vae.guide(x)
        eps = torch.randn(num_particles, *loc.shape, device=x.device)
        log_weight = vae.log_joint(x, loc + log_scale.exp() * eps)
        log_weight = log_weight + (0.5 * eps**2 + log_scale).sum(-1)
    return (log_weight.logsumexp(0) - math.log(num_particles)).sum()


Guide = tuple[Tensor, Tensor, Tensor]  # location, scale, log determinant


def chain_guide(vae: Plain, x: Tensor) -> Guide:
    loc, log_scale = vae.guide(x)
    return loc, log_scale.exp(), log_scale.sum(-1)


def evaluate(vae: Plain, x: Tensor, guide: Guide, eps: Tensor) -> tuple[Any, ...]:
    """log base, log w and the latter's gradient at one state of a chain."""
    loc, scale, log_det = guide
    log_joint = vae.log_joint(x, loc + scale * eps)
    log_base = -0.5 * eps.square().sum(-1)
    log_weight = log_joint - log_base + log_det
    (gradient,) = torch.autograd.grad(log_weight.sum(), eps, create_graph=True)
    return log_base, log_weight, gradient


def kick(beta: float, gradient: Tensor, eps: Tensor, eta: float) -> Tensor:
    """Half a leapfrog step's change of the momentum, limited as in the package."""
    return hardtanh(math.sqrt(eta / 2) * (beta * gradient - eps), -10.0, 10.0)


def sis(vae: Plain, x: Tensor, num_steps: int = 5, eta: float = 0.05) -> Tensor:
    guide = chain_guide(vae, x)
    eps = torch.randn_like(guide[0]).requires_grad_()
    log_base, log_weight, gradient = evaluate(vae, x, guide, eps)
    total = -log_base
    for k in range(1, num_steps + 1):
        beta, noise = k / num_steps, torch.randn_like(eps)
        momentum = noise + kick(beta, gradient, eps, eta)
        eps = eps + math.sqrt(2 * eta) * momentum
        log_base, log_weight, gradient = evaluate(vae, x, guide, eps)
        back = momentum + kick(beta, gradient, eps, eta)
        total = total + 0.5 * (noise.square() - back.square()).sum(-1)
    return (total + log_base + log_weight).sum()


def ais(vae: Plain, x: Tensor, num_steps: int = 5, eta: float = 0.05) -> Tensor:
    guide = chain_guide(vae, x)
    eps = torch.randn(2, *guide[0].shape, device=x.device).requires_grad_()
    state = (eps, *evaluate(vae, x, guide, eps))
    parts, scores = [state[2] / num_steps], []
    for k in range(1, num_steps):
        beta, noise = k / num_steps, torch.randn_like(eps)
        momentum = noise + kick(beta, state[3], state[0], eta)
        eps = state[0] + math.sqrt(2 * eta) * momentum
        new = (eps, *evaluate(vae, x, guide, eps))
        back = momentum + kick(beta, new[3], eps, eta)
        change = new[1] - state[1] + beta * (new[2] - state[2])
        change = change + 0.5 * (noise.square() - back.square()).sum(-1)
        log_accept = change.clamp(max=0.0)
        accepted = torch.rand_like(log_accept) < log_accept.exp()
        rejected = torch.log(-torch.expm1(log_accept.masked_fill(accepted, -1.0)))
        scores.append(torch.where(accepted, log_accept, rejected))
        a, b = accepted, accepted.unsqueeze(-1)
        where = (b, a, a, b)
        state = tuple(torch.where(c, n, o) for c, n, o in zip(where, new, state, strict=True))
        parts.append(state[2] / num_steps)
    total = torch.stack(parts).sum(0).mean(0)
    rest = torch.stack(parts).detach().flip(0).cumsum(0).flip(0)[1:]
    for r, score in zip(rest, scores, strict=True):
        total = total + ((r - r.flip(0)) * score).mean(0)
    return total.sum()


def rao_blackwell(vae: Categories, x: Tensor, num_categories: int = 1) -> Tensor:
    log_q = vae.guide(x)
    q = log_q.exp()
    top, best = q.topk(num_categories, -1)
    drawn = q.detach().scatter(-1, best, 0.0).multinomial(1)
    rest = (1 - top.sum(-1, keepdim=True)).clamp_min(1e-30)
    weight = torch.cat([top, rest], -1).t()
    index = torch.cat([best, drawn], -1)
    z = one_hot(index.t(), q.shape[-1]).to(x)
    at = vae.log_guide(log_q, index, z)
    cost = vae.log_joint(x, z) - at
    score = at[-1] - rest[:, 0].log()
    noisy = (weight[-1] * cost[-1]).detach() * (score - score.detach())
    return ((weight * cost).sum(0) + noisy).sum()


def step(vae: nn.Module, bound: Any, x: Tensor, way: type[Plain] = Plain) -> Any:
    """A training step: a function that returns the loss."""
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def one() -> float:
        optimizer.zero_grad()
        loss = -bound(way(vae), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return one
