"""Models whose evidence and posterior are known exactly, with guides that can be set at will.

Every object holds data (drawn once from a generator of its own, so the same on every device) and
two plain Pyro programs, ``model`` and ``guide``. Those with a "data" plate take an optional
``subsample`` of indices, or draw ``subsample_size`` of them. The learnable parameters are
unconstrained ``pyro.param`` sites, and ``values`` holds what they start at. Their names are plain
("log_s"), so two objects in one parameter store share what their names have in common::

    exact = ConjugateGaussian(subsample_size=10)
    exact.set_guide("exact")  # or "mismatched", the default; or exact.set_guide(a=0.3)
    exact.log_evidence()  # the number that no bound may exceed
    exact.grad(exact.elbo)  # exact gradient of the closed-form ELBO, a dict by parameter

The closed forms take ``params``, a dict that replaces current parameter values, and are
differentiable in it.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.distributions import kl_divergence
from torch.nn.functional import logsigmoid


def gaussian_kl(squared_difference, scale_q, scale_p):
    """E KL(N(m_q, s_q) || N(m_p, s_p)), where ``squared_difference`` is E (m_q - m_p)^2."""
    ratio = (scale_q**2 + squared_difference) / (2 * scale_p**2)
    return torch.log(scale_p / scale_q) + ratio - 0.5


def expected_iwae(log_w, log_q, num_particles, alpha=0.0):
    """E_q[log mean_k w(z_k)] for z_1..z_K iid from a finite support of C points.

    Of the Rényi bound, log mean_k w(z_k)^(1 - alpha) / (1 - alpha), for another alpha.

    :param log_w: log weights of the points, shape [..., C].
    :param log_q: log probabilities of the points, shape [..., C].
    :returns: the sum over all C^K joint draws, shape [...].
    """
    points = torch.arange(log_w.shape[-1], device=log_w.device)
    draws = torch.cartesian_prod(*[points] * num_particles).reshape(-1, num_particles)
    log_mean_w = ((1 - alpha) * log_w[..., draws]).logsumexp(-1) - math.log(num_particles)
    return (log_q[..., draws].sum(-1).exp() * log_mean_w).sum(-1) / (1 - alpha)


class ExactModel:
    """Data, parameters and the "data" plate; see the module's docstring.

    :param int seed: seed of the data's own generator.
    :param dtype: of data and parameters; the default dtype when None.
    """

    max_plate_nesting = 1

    def __init__(self, N, subsample_size, seed, dtype, device):
        self.N = N
        self.subsample_size = subsample_size
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.values = {}

    def tensor(self, value):
        return torch.as_tensor(value, dtype=self.dtype, device=self.device)

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def plate(self, subsample=None):
        size = self.subsample_size if subsample is None else None
        return pyro.plate("data", self.N, size, subsample, dim=-1, device=self.device)

    def param(self, name):
        return pyro.param(name, lambda: self.values[name].clone())

    def params(self):
        """The current values (trained ones where the param store has them), detached."""
        store = pyro.get_param_store()
        trained = {name: store[name] for name in self.values if name in store}
        return {k: v.detach().clone() for k, v in {**self.values, **trained}.items()}

    def resolve(self, params):
        return {**self.params(), **(params or {})}

    def define(self, **values):
        """Adds parameters with the values that they start at."""
        for name, value in values.items():
            self.values[name] = self.tensor(value).detach().clone()

    def set_guide(self, preset=None, **values):
        """Sets parameters (also the model's) to a preset, by name, or both; others stay."""
        values = {**(self.presets()[preset] if preset else {}), **values}
        unknown = set(values) - set(self.values)
        if unknown:
            raise KeyError(f"no such parameters: {sorted(unknown)}")
        self.values = self.params()
        self.define(**values)
        store = pyro.get_param_store()
        for name in self.values:  # the next run starts at self.values
            if name in store:
                del store[name]

    def presets(self):
        raise NotImplementedError

    def log_evidence_per_datum(self, params=None):
        raise NotImplementedError

    def log_evidence(self, params=None):
        return self.log_evidence_per_datum(params).sum()

    def elbo_per_datum(self, params=None):
        raise NotImplementedError

    def elbo(self, params=None):
        return self.elbo_per_datum(params).sum()

    def grad(self, objective, *args):
        """Exact gradient of the (summed) closed form ``objective(*args, params=...)``."""
        params = {name: value.requires_grad_() for name, value in self.params().items()}
        total = objective(*args, params=params).sum()
        if not total.requires_grad:  # it depends on no parameter
            return {name: torch.zeros_like(value) for name, value in params.items()}
        grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
        return {
            name: torch.zeros_like(value) if grad is None else grad
            for (name, value), grad in zip(params.items(), grads, strict=True)
        }


class ConjugateGaussian(ExactModel):
    """z_n ~ N(0, 1), x_n ~ N(z_n, 1); guide z_n ~ N(a x_n + b, exp(log_s)).

    p(x_n) = N(x_n; 0, 2) and p(z_n | x_n) = N(x_n / 2, 1 / 2) (variances): a = 1/2, b = 0,
    s = sqrt(1/2). The default data have log p(x) = -172.8.
    """

    def __init__(self, N=100, subsample_size=None, seed=34, dtype=None, device="cpu"):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.x = self.tensor(math.sqrt(2) * self.randn(N))
        self.zero, self.one = self.tensor(0.0), self.tensor(1.0)
        self.define(**self.presets()["mismatched"])

    def presets(self):
        return {
            "exact": {"a": 0.5, "b": 0.0, "log_s": 0.5 * math.log(0.5)},
            "mismatched": {"a": 0.3, "b": 0.2, "log_s": 0.0},
        }

    def model(self, subsample=None):
        with self.plate(subsample) as idx:
            z = pyro.sample("z", dist.Normal(self.zero, self.one))
            pyro.sample("x", dist.Normal(z, self.one), obs=self.x[idx])

    def guide(self, subsample=None):
        a, b, log_s = self.param("a"), self.param("b"), self.param("log_s")
        with self.plate(subsample) as idx:
            pyro.sample("z", dist.Normal(a * self.x[idx] + b, log_s.exp()))

    def posterior(self):
        """Mean [N] and standard deviation [] of z given x."""
        return self.x / 2, self.tensor(math.sqrt(0.5))

    def log_evidence_per_datum(self, params=None):
        return dist.Normal(self.zero, self.tensor(math.sqrt(2))).log_prob(self.x)

    def elbo_per_datum(self, params=None):
        """log p(x_n) - KL(q(z_n) || p(z_n | x_n))."""
        p = self.resolve(params)
        loc, scale = self.posterior()
        difference = p["a"] * self.x + p["b"] - loc
        kl = gaussian_kl(difference**2, p["log_s"].exp(), scale)
        return self.log_evidence_per_datum() - kl

    def iwae_per_datum(self, num_particles, params=None, nodes=32, alpha=0.0):
        """E log mean_k w_nk by the product Gauss-Hermite rule, for at most 3 particles.

        Accurate to 1e-6 at the presets; far more nodes are needed for very broad guides.
        """
        p = self.resolve(params)
        eps, weights = np.polynomial.hermite_e.hermegauss(nodes)
        eps = self.tensor(eps)
        log_q = self.tensor(np.log(weights / weights.sum()))
        q = dist.Normal((p["a"] * self.x + p["b"]).unsqueeze(-1), p["log_s"].exp())
        z = q.loc + q.scale * eps
        log_p = dist.Normal(self.zero, self.one).log_prob(z)
        log_p = log_p + dist.Normal(z, self.one).log_prob(self.x.unsqueeze(-1))
        log_w = log_p - q.log_prob(z)
        return expected_iwae(log_w, log_q.expand_as(log_w), num_particles, alpha)


class SequentialPlate(ConjugateGaussian):
    """ConjugateGaussian in a sequential plate: sites z_0, z_1, ... and x_0, x_1, ..."""

    max_plate_nesting = 0

    def __init__(self, N=10, subsample_size=None, seed=0, dtype=None, device="cpu"):
        super().__init__(N, subsample_size, seed, dtype, device)

    def plate(self, subsample=None):
        size = self.subsample_size if subsample is None else None
        return pyro.plate("data", self.N, size, subsample, device=self.device)

    def model(self, subsample=None):
        for i in self.plate(subsample):
            z = pyro.sample(f"z_{i}", dist.Normal(self.zero, self.one))
            pyro.sample(f"x_{i}", dist.Normal(z, self.one), obs=self.x[i])

    def guide(self, subsample=None):
        a, b, log_s = self.param("a"), self.param("b"), self.param("log_s")
        for i in self.plate(subsample):
            pyro.sample(f"z_{i}", dist.Normal(a * self.x[i] + b, log_s.exp()))


class ProbabilisticPCA(ExactModel):
    """z_n ~ N(0, I_d), x_n ~ N(theta0 + theta1 z_n, sigma^2 I_p).

    p(x_n) = N(theta0, theta1 theta1' + sigma^2 I), p(z_n | x_n) = N(S theta1' (x_n - theta0) /
    sigma^2, S) with precision 1/S = I + theta1' theta1 / sigma^2. The best mean-field Gaussian
    has the same mean and the variances 1 / diag(1/S).

    Guide z_n ~ N(W x_n + c, L L'), L = diag(exp(log_s)) ("mean_field") or that plus the strictly
    lower part of ``lower`` ("full"). Presets "exact" and "mismatched"; for the mean-field family
    "exact" is the optimum within the family. ``learn`` makes theta0 and theta1 parameters.
    """

    def __init__(
        self,
        p=5,
        d=2,
        N=20,
        sigma=0.1,
        family="mean_field",
        learn=True,
        subsample_size=None,
        seed=0,
        dtype=None,
        device="cpu",
    ):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.p, self.d, self.family, self.learn = p, d, family, learn
        theta1, theta0 = ((2 * self.rand(*shape) - 1) / math.sqrt(d) for shape in [(p, d), (p,)])
        x = theta0 + self.randn(N, d) @ theta1.T + sigma * self.randn(N, p)
        self.x, self.sigma = self.tensor(x), self.tensor(sigma)
        self.zero, self.one = self.tensor(0.0), self.tensor(1.0)
        self.define(theta0=theta0, theta1=theta1)
        self.define(**self.presets()["mismatched"])

    def presets(self):
        p = self.params()
        gain, precision = self._gain(p)
        if self.family == "full":
            scale_tril = torch.linalg.cholesky(precision.inverse())
        else:
            scale_tril = precision.diagonal().rsqrt().diag()
        scale = scale_tril.diagonal()
        exact = {"W": gain, "c": -gain @ p["theta0"], "log_s": scale.log()}
        if self.family == "full":
            exact["lower"] = scale_tril.tril(-1)
        mismatched = {**exact, "c": exact["c"] + 0.5 * scale, "log_s": exact["log_s"] + 0.3}
        return {"exact": exact, "mismatched": mismatched}

    def _gain(self, p):
        """S theta1' / sigma^2 and the precision 1/S."""
        precision = torch.eye(self.d).to(self.x) + p["theta1"].T @ p["theta1"] / self.sigma**2
        return torch.linalg.solve(precision, p["theta1"].T / self.sigma**2), precision

    def _scale_tril(self, p):
        diagonal = p["log_s"].exp().diag()
        return diagonal + p["lower"].tril(-1) if self.family == "full" else diagonal

    def model(self, subsample=None):
        get = self.param if self.learn else self.values.get
        theta0, theta1 = get("theta0"), get("theta1")
        with self.plate(subsample) as idx:
            prior = dist.Normal(self.zero, self.one).expand([self.d]).to_event(1)
            loc = theta0 + pyro.sample("z", prior) @ theta1.T
            pyro.sample("x", dist.Normal(loc, self.sigma).to_event(1), obs=self.x[idx])

    def guide(self, subsample=None):
        p = {name: self.param(name) for name in self.values if not name.startswith("theta")}
        with self.plate(subsample) as idx:
            loc = self.x[idx] @ p["W"].T + p["c"]
            if self.family == "full":
                q = dist.MultivariateNormal(loc, scale_tril=self._scale_tril(p))
            else:
                q = dist.Normal(loc, p["log_s"].exp()).to_event(1)
            pyro.sample("z", q)

    def posterior(self, params=None):
        """Mean [N, d] and covariance [d, d] of z given x."""
        p = self.resolve(params)
        gain, precision = self._gain(p)
        return (self.x - p["theta0"]) @ gain.T, precision.inverse()

    def log_evidence_per_datum(self, params=None):
        p = self.resolve(params)
        noise = (self.sigma**2).expand(self.p)
        marginal = dist.LowRankMultivariateNormal(p["theta0"], p["theta1"], noise)
        return marginal.log_prob(self.x)

    def elbo_per_datum(self, params=None):
        """log p(x_n) - KL(q(z_n) || p(z_n | x_n)); exact in theta and in the guide."""
        p = self.resolve(params)
        loc, covariance = self.posterior(p)
        q = dist.MultivariateNormal(self.x @ p["W"].T + p["c"], scale_tril=self._scale_tril(p))
        posterior = dist.MultivariateNormal(loc, covariance)
        return self.log_evidence_per_datum(p) - kl_divergence(q, posterior)


class GammaPoisson(ExactModel):
    """z_n ~ Gamma(a, b), x_n ~ Poisson(z_n), a count.

    p(x_n) is negative binomial, Gamma(a + x) / (Gamma(a) x!) b^a / (1 + b)^(a + x), and
    p(z_n | x_n) = Gamma(a + x_n, b + 1). Guide Gamma(exp(log_c) + exp(log_g) x_n, exp(log_r)).
    """

    def __init__(self, N=20, a=2.0, b=0.5, subsample_size=None, seed=0, dtype=None, device="cpu"):
        super().__init__(N, subsample_size, seed, dtype, device)
        rate = -a / b * torch.log1p(-self.rand(N))
        self.x = self.tensor(torch.poisson(rate, generator=self.generator))
        self.a, self.b = self.tensor(a), self.tensor(b)
        self.define(**self.presets()["mismatched"])

    def presets(self):
        a, b = self.a.item(), self.b.item()
        return {
            "exact": {"log_c": math.log(a), "log_g": 0.0, "log_r": math.log(b + 1)},
            "mismatched": {
                "log_c": math.log(a) + 0.3,
                "log_g": -0.2,
                "log_r": math.log(b + 1) - 0.2,
            },
        }

    def model(self, subsample=None):
        with self.plate(subsample) as idx:
            z = pyro.sample("z", dist.Gamma(self.a, self.b))
            pyro.sample("x", dist.Poisson(z), obs=self.x[idx])

    def guide(self, subsample=None):
        p = {name: self.param(name) for name in self.values}
        with self.plate(subsample) as idx:
            pyro.sample("z", self._q(p, self.x[idx]))

    @staticmethod
    def _q(p, x):
        return dist.Gamma(p["log_c"].exp() + p["log_g"].exp() * x, p["log_r"].exp())

    def posterior(self):
        """Concentration [N] and rate [] of z given x."""
        return self.a + self.x, self.b + 1

    def log_evidence_per_datum(self, params=None):
        a, b, x = self.a, self.b, self.x
        coefficient = torch.lgamma(a + x) - torch.lgamma(a) - torch.lgamma(x + 1)
        return coefficient + a * b.log() - (a + x) * torch.log1p(b)

    def elbo_per_datum(self, params=None):
        """log p(x_n) - KL(q(z_n) || p(z_n | x_n))."""
        q = self._q(self.resolve(params), self.x)
        return self.log_evidence_per_datum() - kl_divergence(q, dist.Gamma(*self.posterior()))


class DiscreteMixture(ExactModel):
    """z_n ~ Categorical(logits=weight_logits), x_n ~ N(mu[z_n], sigma); C components.

    Guide z_n ~ Categorical(logits=guide_logits[n]). p(x_n) = sum_c weight_c N(x_n; mu_c, sigma),
    and the posterior's logits are the terms' logs. ``learn`` makes weight_logits and mu
    parameters.
    """

    def __init__(
        self,
        N=6,
        C=3,
        sigma=1.0,
        learn=True,
        subsample_size=None,
        seed=0,
        dtype=None,
        device="cpu",
    ):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.C, self.learn = C, learn
        self.sigma = self.tensor(sigma)
        self.x = self.tensor(2 * self.randn(N))
        self._mismatch = self.tensor(0.7 * self.randn(N, C))
        self.define(weight_logits=0.5 * self.randn(C), mu=torch.linspace(-2, 2, C))
        self.define(**self.presets()["mismatched"])

    def presets(self):
        exact = self.posterior()
        return {
            "exact": {"guide_logits": exact},
            "mismatched": {"guide_logits": 0.5 * exact + self._mismatch},
        }

    def model(self, subsample=None):
        get = self.param if self.learn else self.values.get
        weight_logits, mu = get("weight_logits"), get("mu")
        with self.plate(subsample) as idx:
            z = pyro.sample("z", dist.Categorical(logits=weight_logits))
            pyro.sample("x", dist.Normal(mu[z], self.sigma), obs=self.x[idx])

    def guide(self, subsample=None):
        guide_logits = self.param("guide_logits")
        with self.plate(subsample) as idx:
            pyro.sample("z", dist.Categorical(logits=guide_logits[idx]))

    def log_joint(self, params=None):
        """log p(x_n, z_n = c), shape [N, C]."""
        p = self.resolve(params)
        likelihood = dist.Normal(p["mu"], self.sigma).log_prob(self.x.unsqueeze(-1))
        return p["weight_logits"].log_softmax(-1) + likelihood

    def posterior(self, params=None):
        """Normalised logits [N, C] of z given x."""
        return self.log_joint(params).log_softmax(-1)

    def log_evidence_per_datum(self, params=None):
        return self.log_joint(params).logsumexp(-1)

    def elbo_per_datum(self, params=None):
        return self.iwae_per_datum(1, params)

    def iwae_per_datum(self, num_particles, params=None, alpha=0.0):
        """E_q log mean_k w_nk, summed over all C^K assignments.

        ``grad(self.iwae_per_datum, K)`` is its exact gradient, for guide and model alike.
        """
        p = self.resolve(params)
        log_q = p["guide_logits"].log_softmax(-1)
        return expected_iwae(self.log_joint(p) - log_q, log_q, num_particles, alpha)


class BetaBernoulli(ExactModel):
    """Global pi ~ Beta(a, b); local z_n ~ Bernoulli(pi), x_n ~ N(mu[z_n], sigma).

    With l_n(z) = p(x_n | z_n = z) and e_m the coefficient of t^m in prod_n (l_n(0) + l_n(1) t),
    p(x) = sum_m e_m B(a + m, b + N - m) / B(a, b); p(pi | x) mixes Beta(a + m, b + N - m) with
    weights proportional to those terms, and z_n | pi, x is Bernoulli with logit
    logit(pi) + log l_n(1) / l_n(0).

    Guide: pi ~ Beta(exp(log_alpha), exp(log_beta)), z_n ~ Bernoulli(logits[n] + slope logit(pi)).
    Slope 0 is mean field; the preset "conditional" makes z_n | pi exact (the joint posterior is
    not in the family: ``exact_guide`` is that).
    """

    def __init__(
        self,
        N=6,
        a=2.0,
        b=3.0,
        mu=(-1.0, 1.0),
        sigma=1.0,
        subsample_size=None,
        seed=0,
        dtype=None,
        device="cpu",
    ):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.a, self.b, self.mu, self.sigma = map(self.tensor, (a, b, mu, sigma))
        z = (self.rand(N) < a / (a + b)).long()
        self.x = self.mu[z.to(self.device)] + self.sigma * self.tensor(self.randn(N))
        self._mismatch = self.tensor(0.7 * self.randn(N))
        self.define(**self.presets()["mismatched"])

    def presets(self):
        likelihood = self.log_likelihood()
        log_ratio = likelihood[:, 1] - likelihood[:, 0]
        prior_logit = (self.a / self.b).log()
        # near a good Beta: the posterior mean, shifted, with about its concentration
        ones = torch.arange(self.N + 1).to(self.x)
        mean = (self.posterior().exp() * (self.a + ones)).sum() / (self.a + self.b + self.N)
        total = self.a + self.b + self.N / 2
        beta = {"log_alpha": (mean * total).log(), "log_beta": ((1 - mean) * total).log() + 0.3}
        return {
            "conditional": {**beta, "logits": log_ratio, "slope": 1.0},
            "mismatched": {
                **beta,
                "logits": prior_logit + 0.7 * log_ratio + self._mismatch,
                "slope": 0.0,
            },
        }

    def model(self, subsample=None):
        pi = pyro.sample("pi", dist.Beta(self.a, self.b))
        with self.plate(subsample) as idx:
            z = pyro.sample("z", dist.Bernoulli(pi))
            pyro.sample("x", dist.Normal(self.mu[z.long()], self.sigma), obs=self.x[idx])

    def guide(self, subsample=None):
        p = {name: self.param(name) for name in self.values}
        pi = pyro.sample("pi", dist.Beta(p["log_alpha"].exp(), p["log_beta"].exp()))
        with self.plate(subsample) as idx:
            logits = p["logits"][idx] + p["slope"] * torch.logit(pi)
            pyro.sample("z", dist.Bernoulli(logits=logits))

    def exact_guide(self, subsample=None):
        """The joint posterior p(pi | x) prod_n p(z_n | pi, x_n), without parameters."""
        ones = torch.arange(self.N + 1).to(self.x)
        betas = dist.Beta(self.a + ones, self.b + self.N - ones)
        mixture = dist.MixtureSameFamily(dist.Categorical(logits=self.posterior()), betas)
        pi = pyro.sample("pi", mixture)
        likelihood = self.log_likelihood()
        with self.plate(subsample) as idx:
            logits = torch.logit(pi) + (likelihood[:, 1] - likelihood[:, 0])[idx]
            pyro.sample("z", dist.Bernoulli(logits=logits))

    def log_likelihood(self):
        """log p(x_n | z_n = 0 and 1), shape [N, 2]."""
        return dist.Normal(self.mu, self.sigma).log_prob(self.x.unsqueeze(-1))

    def _log_terms(self):
        """log of e_m B(a + m, b + N - m) / B(a, b) for m = 0..N."""
        never = self.x.new_full((1,), -math.inf)
        log_e = self.x.new_zeros(1)
        for log_l in self.log_likelihood():
            zero, one = torch.cat([log_e, never]) + log_l[0], torch.cat([never, log_e]) + log_l[1]
            log_e = torch.logaddexp(zero, one)
        ones = torch.arange(self.N + 1).to(self.x)
        return log_e + (
            self._log_beta_function(self.a + ones, self.b + self.N - ones)
            - self._log_beta_function(self.a, self.b)
        )

    @staticmethod
    def _log_beta_function(alpha, beta):
        return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)

    def posterior(self):
        """Log weights [N + 1] of Beta(a + m, b + N - m) in p(pi | x)."""
        return self._log_terms().log_softmax(-1)

    def log_evidence(self, params=None):
        return self._log_terms().logsumexp(-1)

    def _expectation_over_pi(self, p, local):
        """E_q(pi)[log p(pi) - log q(pi) + local(log pi, log(1 - pi))], by the trapezoidal rule in
        logit(pi), which converges exponentially."""
        t = self.tensor(torch.linspace(-40, 40, 1601, dtype=torch.float64))
        log_pi, log_not = logsigmoid(t), logsigmoid(-t)

        def log_density(alpha, beta):  # of t
            return alpha * log_pi + beta * log_not - self._log_beta_function(alpha, beta)

        log_prior = log_density(self.a, self.b)
        log_q = log_density(p["log_alpha"].exp(), p["log_beta"].exp())
        return (log_q.exp() * (log_prior - log_q + local(log_pi, log_not))).sum() * (t[1] - t[0])

    def iwae(self, num_particles, params=None):
        """E_q(pi)[log p(pi) - log q(pi) + sum_n E_q log mean_k w_nk(pi)]: pi is drawn once, each
        z_n ``num_particles`` times."""
        p = self.resolve(params)

        def local(log_pi, log_not):
            logits = p["logits"] + p["slope"] * (log_pi - log_not).unsqueeze(-1)
            log_q = torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1)
            log_prior = torch.stack([log_not, log_pi], -1).unsqueeze(-2)
            log_w = log_prior + self.log_likelihood() - log_q
            return expected_iwae(log_w, log_q, num_particles).sum(-1)

        return self._expectation_over_pi(p, local)

    def elbo(self, params=None):
        return self.iwae(1, params)

    def global_bound(self, params=None):
        """E_q(pi)[log p(pi) - log q(pi) + sum_n log p(x_n | pi)]: the limit of ``iwae``."""

        def local(log_pi, log_not):
            log_prior = torch.stack([log_not, log_pi], -1).unsqueeze(-2)
            return (log_prior + self.log_likelihood()).logsumexp(-1).sum(-1)

        return self._expectation_over_pi(self.resolve(params), local)


class HierarchicalGaussian(ExactModel):
    """Global theta ~ N(0, tau0^2); local z_n ~ N(theta, tau^2), x_n ~ N(z_n, sigma^2).

    x ~ N(0, (tau^2 + sigma^2) I + tau0^2 11'). theta | x has precision
    1 / tau0^2 + N / (tau^2 + sigma^2); z_n | theta, x_n has precision 1 / tau^2 + 1 / sigma^2.

    Guide: theta ~ N(m, exp(log_s)), z_n | theta ~ N(c0[n] + c1 theta, exp(log_sz[n])). Presets:
    "exact" (jointly), "conditional" (exact z_n | theta, another theta) and "mismatched".
    """

    def __init__(
        self,
        N=10,
        tau0=1.5,
        tau=1.0,
        sigma=0.8,
        subsample_size=None,
        seed=0,
        dtype=None,
        device="cpu",
    ):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.zero = self.tensor(0.0)
        self.tau0, self.tau, self.sigma = map(self.tensor, (tau0, tau, sigma))
        self.x = self.tensor(tau0 * self.randn(1) + math.hypot(tau, sigma) * self.randn(N))
        self.define(**self.presets()["mismatched"])

    def presets(self):
        m, s = self.posterior_theta()
        c0, c1, sz = self.posterior_z()
        local = {"c0": c0, "c1": c1, "log_sz": sz.log().expand(self.N)}
        other = {"m": m + s, "log_s": s.log() + 0.4}
        return {
            "exact": {"m": m, "log_s": s.log(), **local},
            "conditional": {**other, **local},
            "mismatched": {
                **other,
                "c0": c0 + 0.3 * sz,
                "c1": 0.5 * c1,
                "log_sz": local["log_sz"] + 0.2,
            },
        }

    def model(self, subsample=None):
        theta = pyro.sample("theta", dist.Normal(self.zero, self.tau0))
        with self.plate(subsample) as idx:
            z = pyro.sample("z", dist.Normal(theta, self.tau))
            pyro.sample("x", dist.Normal(z, self.sigma), obs=self.x[idx])

    def guide(self, subsample=None):
        p = {name: self.param(name) for name in self.values}
        theta = pyro.sample("theta", dist.Normal(p["m"], p["log_s"].exp()))
        with self.plate(subsample) as idx:
            loc = p["c0"][idx] + p["c1"] * theta
            pyro.sample("z", dist.Normal(loc, p["log_sz"][idx].exp()))

    def posterior_theta(self):
        """Mean and standard deviation of theta given x."""
        v = self.tau**2 + self.sigma**2
        variance = 1 / (1 / self.tau0**2 + self.N / v)
        return variance * self.x.sum() / v, variance.sqrt()

    def posterior_z(self):
        """z_n | theta, x_n ~ N(c0[n] + c1 theta, s): returns c0 [N], c1 [], s []."""
        variance = 1 / (1 / self.tau**2 + 1 / self.sigma**2)
        return variance * self.x / self.sigma**2, variance / self.tau**2, variance.sqrt()

    def posterior(self):
        """Mean [N + 1] and covariance [N + 1, N + 1] of (theta, z_1..z_N) given x."""
        m, s = self.posterior_theta()
        c0, c1, sz = self.posterior_z()
        slope = torch.cat([torch.ones_like(c0[:1]), c1.expand(self.N)])
        noise = torch.cat([torch.zeros_like(c0[:1]), (sz**2).expand(self.N)])
        loc = torch.cat([torch.zeros_like(c0[:1]), c0]) + slope * m
        return loc, s**2 * torch.outer(slope, slope) + noise.diag()

    def log_evidence(self, params=None):
        """Of all data together: they are not independent."""
        noise = (self.tau**2 + self.sigma**2).expand(self.N)
        factor = self.tau0.expand(self.N, 1)
        return dist.LowRankMultivariateNormal(0 * self.x, factor, noise).log_prob(self.x)

    def global_bound(self, params=None):
        """E_q(theta)[log p(theta) - log q(theta) + sum_n log p(x_n | theta)], q = N(m, s^2)."""
        p = self.resolve(params)
        m, s = p["m"], p["log_s"].exp()
        v = self.tau**2 + self.sigma**2
        log_lik = -0.5 * (2 * math.pi * v).log() - ((self.x - m) ** 2 + s**2) / (2 * v)
        return log_lik.sum() - gaussian_kl(m**2, s, self.tau0)

    def elbo(self, params=None):
        """``global_bound`` - sum_n E_q(theta) KL(q(z_n | theta) || p(z_n | theta, x_n))."""
        p = self.resolve(params)
        c0, c1, sz = self.posterior_z()
        d1 = p["c1"] - c1
        difference = (p["c0"] - c0 + d1 * p["m"]) ** 2 + (d1 * p["log_s"].exp()) ** 2
        return self.global_bound(p) - gaussian_kl(difference, p["log_sz"].exp(), sz).sum()


class NestedGaussian(ExactModel):
    """Groups (dim=-1, size G) of individuals (dim=-2, size M): a_g ~ N(0, 1), b_mg ~ N(a_g, 1),
    x_mg ~ N(b_mg, 1). ``subsample`` and ``subsample_size`` are of groups.

    x_g ~ N(0, 2 I_M + 11'); a_g | x_g has precision 1 + M/2 and mean (S_g / 2) / (1 + M / 2), with
    S_g = sum_m x_mg; b_mg | a_g, x_mg ~ N((a_g + x_mg) / 2, 1/2). A "datum" here is a group.

    Guide: a_g ~ N(k S_g, exp(log_sa)), b_mg ~ N(u a_g + v x_mg, exp(log_sb)).
    """

    max_plate_nesting = 2

    def __init__(self, G=4, M=3, subsample_size=None, seed=0, dtype=None, device="cpu"):
        super().__init__(G, subsample_size, seed, dtype, device)
        self.G, self.M = G, M
        self.x = self.tensor(self.randn(G) + math.sqrt(2) * self.randn(M, G))
        self.zero, self.one = self.tensor(0.0), self.tensor(1.0)
        self.define(**self.presets()["mismatched"])

    def presets(self):
        precision = 1 + self.M / 2
        return {
            "exact": {
                "k": 0.5 / precision,
                "log_sa": -0.5 * math.log(precision),
                "u": 0.5,
                "v": 0.5,
                "log_sb": 0.5 * math.log(0.5),
            },
            "mismatched": {"k": 0.1, "log_sa": -0.2, "u": 0.4, "v": 0.3, "log_sb": -0.1},
        }

    def plates(self, subsample=None):
        size = self.subsample_size if subsample is None else None
        groups = pyro.plate("groups", self.G, size, subsample, dim=-1, device=self.device)
        return groups, pyro.plate("individuals", self.M, dim=-2, device=self.device)

    def model(self, subsample=None):
        groups, individuals = self.plates(subsample)
        with groups as idx:
            a = pyro.sample("a", dist.Normal(self.zero, self.one))
            with individuals:
                b = pyro.sample("b", dist.Normal(a, self.one))
                pyro.sample("x", dist.Normal(b, self.one), obs=self.x[:, idx])

    def guide(self, subsample=None):
        p = {name: self.param(name) for name in self.values}
        groups, individuals = self.plates(subsample)
        with groups as idx:
            x = self.x[:, idx]
            a = pyro.sample("a", dist.Normal(p["k"] * x.sum(0), p["log_sa"].exp()))
            with individuals:
                pyro.sample("b", dist.Normal(p["u"] * a + p["v"] * x, p["log_sb"].exp()))

    def posterior_a(self):
        """Mean [G] and standard deviation [] of a given x."""
        precision = 1 + self.M / 2
        return self.x.sum(0) / (2 * precision), self.tensor(precision**-0.5)

    def log_evidence_per_datum(self, params=None):
        """Per group, shape [G]."""
        factor = self.one.expand(self.M, 1)
        marginal = dist.LowRankMultivariateNormal(0 * self.x[:, 0], factor, 2 * factor[:, 0])
        return marginal.log_prob(self.x.T)

    def elbo_per_datum(self, params=None):
        """log p(x_g) - KL(q(a_g) || p(a_g | x_g)) - sum_m E KL(q(b_mg | a_g) || p(b_mg | ...))."""
        p = self.resolve(params)
        m, s = p["k"] * self.x.sum(0), p["log_sa"].exp()
        loc, scale = self.posterior_a()
        kl_a = gaussian_kl((m - loc) ** 2, s, scale)
        du, dv = p["u"] - 0.5, p["v"] - 0.5
        difference = (du * m + dv * self.x) ** 2 + (du * s) ** 2
        kl_b = gaussian_kl(difference, p["log_sb"].exp(), self.tensor(math.sqrt(0.5)))
        return self.log_evidence_per_datum() - kl_a - kl_b.sum(0)


class LinearGaussianChain(ExactModel):
    """z_t ~ N(0.9 z_{t-1}, 1) with z_0 = 0, x_t ~ N(z_t, 1), t = 1..T, in the "data" plate.

    z = A eps with A[t, s] = 0.9^(t - s) for s <= t, so x_n ~ N(0, A A' + I) and
    z_n | x_n ~ N(S x_n, S) with 1/S = (A A')^-1 + I. Since z is Markov given x,
    z_t | z_{t-1}, x ~ N(f_t z_{t-1} + h_t . x, s_t), f_t = S[t, t-1] / S[t-1, t-1],
    h_t = S[t] - f_t S[t-1], s_t^2 = S[t, t] - f_t S[t-1, t].

    Guide: that form, with parameters f [T], h [T, T] and log_s [T] (f[0] multiplies zero).
    ``markov`` loops over ``pyro.markov(range(T))`` instead of ``range(T)``.
    """

    def __init__(
        self, N=5, T=4, markov=True, subsample_size=None, seed=0, dtype=None, device="cpu"
    ):
        super().__init__(N, subsample_size, seed, dtype, device)
        self.T, self.markov = T, markov
        t = torch.arange(T, dtype=torch.float64)
        transition = (0.9 ** (t[:, None] - t)).tril()
        self.x = self.tensor(self.randn(N, T) @ transition.T + self.randn(N, T))
        self.transition = self.tensor(transition)
        self.zero, self.one = self.tensor(0.0), self.tensor(1.0)
        self.define(**self.presets()["mismatched"])

    def presets(self):
        _, S = self.posterior()
        f = torch.cat([S.new_zeros(1), S.diagonal(-1) / S.diagonal()[:-1]])
        previous = torch.cat([S.new_zeros(1, self.T), S[:-1]])
        h = S - f[:, None] * previous
        variance = S.diagonal() - f * previous.diagonal()
        exact = {"f": f, "h": h, "log_s": variance.log() / 2}
        return {
            "exact": exact,
            "mismatched": {"f": 0.7 * f, "h": 0.8 * h, "log_s": exact["log_s"] + 0.2},
        }

    def steps(self):
        return pyro.markov(range(self.T)) if self.markov else range(self.T)

    def model(self, subsample=None):
        with self.plate(subsample) as idx:
            x, z = self.x[idx], self.zero
            for t in self.steps():
                z = pyro.sample(f"z_{t + 1}", dist.Normal(0.9 * z, self.one))
                pyro.sample(f"x_{t + 1}", dist.Normal(z, self.one), obs=x[:, t])

    def guide(self, subsample=None):
        f, h, log_s = self.param("f"), self.param("h"), self.param("log_s")
        with self.plate(subsample) as idx:
            x, z = self.x[idx], self.zero
            for t in self.steps():
                loc = f[t] * z + x @ h[t]
                z = pyro.sample(f"z_{t + 1}", dist.Normal(loc, log_s[t].exp()))

    def _prior_covariance(self):
        return self.transition @ self.transition.T

    def posterior(self):
        """Mean [N, T] and covariance [T, T] of z given x."""
        identity = torch.eye(self.T).to(self.x)
        covariance = torch.linalg.inv(torch.linalg.inv(self._prior_covariance()) + identity)
        return self.x @ covariance, covariance

    def log_evidence_per_datum(self, params=None):
        covariance = self._prior_covariance() + torch.eye(self.T).to(self.x)
        return dist.MultivariateNormal(0 * self.x[0], covariance).log_prob(self.x)

    def elbo_per_datum(self, params=None):
        """log p(x_n) - KL(q(z_n) || p(z_n | x_n)): with F the matrix of f on the subdiagonal,
        q(z_n) = N((I - F)^-1 h x_n, (I - F)^-1 diag(s^2) (I - F)^-T)."""
        p = self.resolve(params)
        identity = torch.eye(self.T).to(self.x)
        inverse = torch.linalg.inv(identity - torch.diag(p["f"][1:], -1))
        q = dist.MultivariateNormal(
            self.x @ (inverse @ p["h"]).T, scale_tril=inverse * p["log_s"].exp()
        )
        return self.log_evidence_per_datum() - kl_divergence(
            q, dist.MultivariateNormal(*self.posterior())
        )


class UnequalPlates:
    """Two plates side by side, of one latent and of three per datum; a guide near the posterior."""

    def __init__(self):
        self.x = torch.tensor([1.0, -0.5]), torch.tensor([0.3, 2.0])

    def model(self):
        one = torch.ones(3)
        with pyro.plate("a", 2):
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
            pyro.sample("xa", dist.Normal(u, 1.0), obs=self.x[0])
        with pyro.plate("b", 2):
            v = pyro.sample("v", dist.Normal(0 * one, one).to_event(1))
            pyro.sample("xb", dist.Normal(v.sum(-1), 1.0), obs=self.x[1])

    def guide(self):
        with pyro.plate("a", 2):
            pyro.sample("u", dist.Normal(0.4 * self.x[0], 0.8))
        with pyro.plate("b", 2):
            loc = (0.2 * self.x[1]).unsqueeze(-1).expand(2, 3)
            pyro.sample("v", dist.Normal(loc, 0.9).to_event(1))

    def log_evidence_per_datum(self):
        parts = zip(self.x, (2.0, 4.0), strict=True)
        return torch.cat([dist.Normal(0.0, var**0.5).log_prob(x) for x, var in parts])


class UnequalWalks:
    """Random walks of two, one and three steps, in a sequential plate."""

    def __init__(self):
        self.x = torch.tensor([0.5, 1.2]), torch.tensor([0.7]), torch.tensor([-0.4, 0.1, 0.9])

    def model(self):
        for i in pyro.plate("walks", len(self.x)):
            z = torch.zeros(())
            for t, x in enumerate(self.x[i]):
                z = pyro.sample(f"z_{i}_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{i}_{t}", dist.Normal(z, 0.7), obs=x)

    def guide(self):
        for i in pyro.plate("walks", len(self.x)):
            for t, x in enumerate(self.x[i]):
                pyro.sample(f"z_{i}_{t}", dist.Normal(0.6 * x, 0.8))

    def log_evidence_per_datum(self):
        result = []
        for x in self.x:
            step = torch.eye(len(x)) - 0.9 * torch.ones(len(x) - 1).diag(-1)
            covariance = torch.linalg.inv(step.T @ step) + 0.49 * torch.eye(len(x))
            result.append(dist.MultivariateNormal(0 * x, covariance).log_prob(x))
        return torch.stack(result)
