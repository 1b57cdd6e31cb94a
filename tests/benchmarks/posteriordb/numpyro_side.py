"""
The posteriors of ``models.py`` in NumPyro, with NUTS and with Pathfinder of BlackJAX.

The latents have the names and shapes of the Pyro models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blackjax
import jax
import numpyro
import numpyro.distributions as dist
import torch
from jax import numpy as jnp
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

from tests.benchmarks.posteriordb.models import CAUCHY, REGRESSIONS, data_of

jax.config.update("jax_enable_x64", True)
C = dist.constraints
sample = numpyro.sample
Draws = dict[str, torch.Tensor]
MODELS: dict[str, Callable[[dict[str, Any]], Callable[[], None]]] = {}
DRAWS, PATHS = 1000, 4
BRIEFLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def flat(name, support=C.real, shape=()):
    return sample(name, dist.ImproperUniform(support, (), shape))


def given(name, fn, value):
    sample(name, fn, obs=value)


def regression(x, y, sigma, beta=None):
    def model():
        b = flat("beta", C.real, x.shape[1:]) if beta is None else sample("beta", beta)
        sample("y", dist.Normal(x @ b, sigma()), obs=y)

    return model


def scale(fn):
    return lambda: sample("sigma", fn)


def program(name):
    """Return the model of a posterior."""
    if name in REGRESSIONS or name in CAUCHY:
        columns, y = (REGRESSIONS | CAUCHY)[name](data_of(name))
        x = torch.stack([torch.ones_like(y), *columns], -1)
        sigma = scale(dist.HalfCauchy(2.5)) if name in CAUCHY else lambda: flat("sigma", C.positive)
        return regression(jnp.asarray(x.numpy()), jnp.asarray(y.numpy()), sigma)
    data = data_of(name).items()
    return MODELS[name]({k: jnp.asarray(v.numpy()) if hasattr(v, "numpy") else v for k, v in data})


def register(name):
    def wrap(build):
        MODELS[name] = build
        return build

    return wrap


@register("eight_schools-eight_schools_noncentered")
def _(d):
    def model():
        t = sample("theta_trans", dist.Normal(0.0, 1.0).expand([8]))
        mu, tau = sample("mu", dist.Normal(0.0, 5.0)), sample("tau", dist.HalfCauchy(5.0))
        sample("y", dist.Normal(t * tau + mu, d["sigma"]), obs=d["y"])

    return model


@register("arK-arK")
def _(d):
    K, y = d["K"], d["y"]
    lags = jnp.stack([y[K - k : len(y) - k] for k in range(1, K + 1)], -1)

    def model():
        alpha = sample("alpha", dist.Normal(0.0, 10.0))
        beta = sample("beta", dist.Normal(0.0, 10.0).expand([K]))
        sample("y", dist.Normal(alpha + lags @ beta, sample("sigma", dist.HalfCauchy(2.5))), y[K:])

    return model


def lag_solve(u, a):
    """e[t] = u[t] + a e[t-1], e[-1] = 0."""

    def step(e, u):
        e = u + a * e
        return e, e

    return jax.lax.scan(step, 0.0, u)[1]


@register("arma-arma11")
def _(d):
    y = d["y"]

    def model():
        mu = sample("mu", dist.Normal(0.0, 10.0))
        phi, theta = (sample(n, dist.Normal(0.0, 2.0)) for n in ("phi", "theta"))
        sigma = sample("sigma", dist.HalfCauchy(2.5))
        u = y - mu - phi * jnp.concatenate([mu[None], y[:-1]])
        given("err", dist.Normal(0.0, sigma), lag_solve(u, -theta))

    return model


@register("garch-garch11")
def _(d):
    y = d["y"]

    def model():
        mu, alpha0 = flat("mu"), flat("alpha0", C.positive)
        alpha1 = sample("alpha1", dist.Beta(1.0, 2.0))
        beta1 = (1 - alpha1) * sample("part", dist.Uniform(0.0, 1.0))
        u = alpha0 + alpha1 * (y[:-1] - mu) ** 2
        var = lag_solve(jnp.concatenate([jnp.full(1, d["sigma1"] ** 2), u]), beta1)
        sample("y", dist.Normal(mu, jnp.sqrt(var)), obs=y)

    return model


def exp_quad(x, alpha, rho):
    return alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)


@register("gp_pois_regr-gp_regr")
def _(d):
    x, y = d["x"], d["y"]

    def model():
        rho, alpha = sample("rho", dist.Gamma(25.0, 4.0)), sample("alpha", dist.HalfNormal(2.0))
        cov = exp_quad(x, alpha, rho) + sample("sigma", dist.HalfNormal(1.0)) * jnp.eye(len(x))
        sample("y", dist.MultivariateNormal(0.0, scale_tril=jnp.linalg.cholesky(cov)), obs=y)

    return model


@register("gp_pois_regr-gp_pois_regr")
def _(d):
    x, k = d["x"], d["k"]

    def model():
        rho, alpha = sample("rho", dist.Gamma(25.0, 4.0)), sample("alpha", dist.HalfNormal(2.0))
        f = sample("f_tilde", dist.Normal(0.0, 1.0).expand([len(x)]))
        factor = jnp.linalg.cholesky(exp_quad(x, alpha, rho) + 1e-10 * jnp.eye(len(x)))
        sample("k", dist.Poisson(jnp.exp(factor @ f)), obs=k)

    return model


def forward(log_theta, log_obs):
    """log p(x) of an HMM without initial weights."""

    def step(at, obs):
        return jax.nn.logsumexp(at[:, None] + log_theta, 0) + obs, None

    return jax.nn.logsumexp(jax.lax.scan(step, log_obs[0], log_obs[1:])[0])


def two_state(prior):
    return jnp.log(jnp.stack([sample(f"theta{i + 1}", dist.Dirichlet(prior[i])) for i in range(2)]))


@register("hmm_example-hmm_example")
def _(d):
    def model():
        log_theta = two_state(jnp.ones((2, 2)))
        mu = flat("mu", C.positive_ordered_vector, (2,))
        given("prior", dist.Normal(jnp.array([3.0, 10.0]), 1.0), mu)
        numpyro.factor("y", forward(log_theta, dist.Normal(mu, 1.0).log_prob(d["y"][:, None])))

    return model


def drive(name, constraint, emissions):
    @register(name)
    def _(d):
        def model():
            log_theta = two_state(d["alpha"])
            phi, lam = flat("phi", constraint, (2,)), flat("lambda", constraint, (2,))
            given("prior_phi", dist.Normal(jnp.array([0.0, 3.0]), 1.0), phi)
            given("prior_lambda", dist.Normal(jnp.array([0.0, 3.0]), 1.0), lam)
            u, v = emissions(d, phi, lam)
            log_obs = u.log_prob(d["u"][:, None]) + v.log_prob(d["v"][:, None])
            numpyro.factor("y", forward(log_theta, log_obs))

        return model


drive(
    "bball_drive_event_0-hmm_drive_0",
    C.positive_ordered_vector,
    lambda d, p, q: (dist.Exponential(p), dist.Exponential(q)),
)
drive(
    "bball_drive_event_1-hmm_drive_1",
    C.ordered_vector,
    lambda d, p, q: (dist.Normal(p, d["tau"]), dist.Normal(q, d["rho"])),
)


@register("low_dim_gauss_mix-low_dim_gauss_mix")
def _(d):
    def model():
        mu = flat("mu", C.ordered_vector, (2,))
        given("prior", dist.Normal(0.0, 2.0), mu)
        sigma = sample("sigma", dist.HalfNormal(2.0).expand([2]))
        theta = sample("theta", dist.Beta(5.0, 5.0))
        log_w = jnp.log(jnp.stack([theta, 1 - theta]))
        parts = dist.Normal(mu, sigma).log_prob(d["y"][:, None]) + log_w
        numpyro.factor("y", jax.nn.logsumexp(parts, -1).sum())

    return model


def blr(d):
    beta = dist.Normal(0.0, 10.0).expand([d["X"].shape[1]])
    return regression(d["X"], d["y"], scale(dist.HalfNormal(10.0)), beta)


MODELS |= {"sblrc-blr": blr, "sblri-blr": blr}


@register("diamonds-diamonds")
def _(d):
    X = d["X"][:, 1:] - d["X"][:, 1:].mean(0)

    def model():
        b = sample("b", dist.Normal(0.0, 1.0).expand([X.shape[1]]))
        a = sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
        sigma = flat("sigma", C.positive)
        given("prior", dist.StudentT(3.0, 0.0, 10.0), sigma)
        sample("y", dist.Normal(a + X @ b, sigma), obs=d["Y"])

    return model


@register("kilpisjarvi_mod-kilpisjarvi")
def _(d):
    def model():
        a = sample("alpha", dist.Normal(d["pmualpha"], d["psalpha"]))
        b = sample("beta", dist.Normal(d["pmubeta"], d["psbeta"]))
        sample("y", dist.Normal(a + b * d["x"], flat("sigma", C.positive)), obs=d["y"])

    return model


def rk4(f, z, times, step):
    """States at times, which have equal distances and begin one distance after 0."""
    n = max(1, round(times[0] / step))
    h = times[0] / n

    def move(z, s):
        k1 = f(s, z)
        k2 = f(s + h / 2, z + h / 2 * k1)
        k3 = f(s + h / 2, z + h / 2 * k2)
        k4 = f(s + h, z + h * k3)
        z = z + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        return z, z

    return jax.lax.scan(move, z, h * jnp.arange(n * len(times)))[1][n - 1 :: n]


@register("hudson_lynx_hare-lotka_volterra")
def _(d):
    y = jnp.concatenate([d["y_init"][None], d["y"]])
    times = d["ts"].tolist()

    def model():
        theta = flat("theta", C.positive, (4,))
        loc, scale = jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
        given("prior", dist.Normal(loc, scale), theta)
        z0 = jnp.log(sample("z_init", dist.LogNormal(jnp.log(10.0), 1.0).expand([2])))
        sigma = sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]))
        a, b = theta[::2] * jnp.array([1.0, -1.0]), theta[1::2] * jnp.array([-1.0, 1.0])
        z = rk4(lambda t, z: a + b * jnp.exp(z[::-1]), z0, times, 0.5)
        sample("y", dist.LogNormal(jnp.concatenate([z0[None], z]), sigma), obs=y)

    return model


@register("one_comp_mm_elim_abs-one_comp_mm_elim_abs")
def _(d):
    times = d["times"].tolist()

    def model():
        ka, km, vm, sigma = (
            sample(n, dist.HalfCauchy(1.0)) for n in ("k_a", "K_m", "V_m", "sigma")
        )

        def f(t, c):
            dose = jnp.exp(-ka * t) * ka * (d["D"] / d["V"])
            return dose - vm / d["V"] * c / (km + c)

        c = rk4(f, jnp.zeros(()), times, 0.25)
        sample("C_hat", dist.LogNormal(jnp.log(c), sigma), obs=d["C_hat"])

    return model


@register("mcycle_gp-accel_gp")
def _(d):
    def process(suffix, intercept):
        X, frequency = d[f"Xgp{suffix}"], d[f"slambda{suffix}"][:, 0]
        sd = flat(f"sdgp{suffix}", C.positive)
        given(f"prior_sd{suffix}", dist.StudentT(3.0, 0.0, 36.0), sd)
        scale = sample(f"lscale{suffix}", dist.InverseGamma(1.124909, 0.0177))
        z = sample(f"zgp{suffix}", dist.Normal(0.0, 1.0).expand([X.shape[1]]))
        spectrum = sd**2 * jnp.sqrt(2 * jnp.pi) * scale
        spectrum = jnp.sqrt(spectrum * jnp.exp(-0.5 * scale**2 * frequency**2))
        return intercept + X @ (spectrum * z)

    def model():
        mean = process("_1", sample("Intercept", dist.StudentT(3.0, -13.0, 36.0)))
        sigma = process("_sigma_1", sample("Intercept_sigma", dist.StudentT(3.0, 0.0, 10.0)))
        sample("y", dist.Normal(mean, jnp.exp(sigma)), obs=d["Y"])

    return model


def to_torch(draws) -> Draws:
    return {k: torch.tensor(jax.device_get(v)) for k, v in draws.items()}


def nuts(name: str, seed: int) -> tuple[Draws, str]:
    """Draw with one chain of NUTS, with the defaults of NumPyro."""
    kernel = NUTS(program(name))
    chain = MCMC(kernel, num_warmup=1000, num_samples=DRAWS, progress_bar=False)
    chain.run(jax.random.key(seed))
    diverged = int(chain.get_extra_fields()["diverging"].sum())
    return to_torch(chain.get_samples()), f"{diverged} divergent" if diverged else ""


def pathfinder(name: str, seed: int) -> tuple[Draws, str]:
    """
    Draw with multi-path Pathfinder: resample 250 draws of each of four paths by their PSIS weights.

    The paths start like chains of NumPyro. Other settings are the defaults of BlackJAX. It is
    compiled without expensive optimizations, which takes a third of the time, and runs briefly.
    """
    first, paths, last = jax.random.split(jax.random.key(seed), 3)
    info = initialize_model(jax.random.split(first, PATHS), program(name))
    algorithm = blackjax.multipathfinder(lambda z: -info.potential_fn(z))
    fit = jax.jit(lambda z: algorithm.init(paths, z, DRAWS // PATHS)).lower(info.param_info.z)
    state, _ = fit.compile(compiler_options=BRIEFLY)(info.param_info.z)
    draws = algorithm.sample(last, state, DRAWS)
    k = float(blackjax.vi.multipathfinder.psis_weights(state)[1])
    return to_torch(jax.vmap(info.postprocess_fn)(draws)), f"Pareto k {k:.2f}"
