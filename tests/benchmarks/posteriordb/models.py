"""Posteriors of posteriordb as Pyro models, with the priors of the Stan programs."""

from __future__ import annotations

import io
import json
import math
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import pad

C = dist.constraints
ROOT: list[Path] = []  # the clone, set by the command line


def file_of(path: str) -> bytes:
    """Return a file of the clone, which may be bare."""
    command = ["git", "-C", str(ROOT[0]), "show", f"HEAD:posterior_database/{path}"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def unzipped(path: str) -> Any:
    archive = zipfile.ZipFile(io.BytesIO(file_of(path)))
    return json.loads(archive.read(archive.namelist()[0]))


def reference(name: str) -> dict[str, tuple[float, float]]:
    """Return the mean and the standard deviation of each parameter."""
    folder = "reference_posteriors/summary_statistics"
    try:
        chains = unzipped(f"reference_posteriors/draws/draws/{name}.json.zip")
        draws = {k: torch.tensor([v for c in chains for v in c[k]]) for k in chains[0]}
        return {k: (float(v.mean()), float(v.std())) for k, v in draws.items()}
    except subprocess.CalledProcessError:  # a partial clone, without large files
        means, squares = (
            json.loads(file_of(f"{folder}/{kind}/{kind}/{name}.json"))
            for kind in ("mean_value", "mean_squared_value")
        )
    pairs = zip(means["names"], means["mean_value"], squares["mean_squared_value"], strict=True)
    return {name: (mean, (square - mean**2) ** 0.5) for name, mean, square in pairs}


def data_of(name: str) -> dict[str, Any]:
    about = json.loads(file_of(f"posteriors/{name}.json"))
    data = unzipped(f"data/data/{about['data_name']}.json.zip")
    dtype = torch.get_default_dtype()
    return {k: torch.tensor(v, dtype=dtype) if isinstance(v, list) else v for k, v in data.items()}


@dataclass
class Posterior:
    """
    A model without arguments.

    :ivar quantities: from draws of the latents, ``[S, ...]``, to those of the reference, ``[S]``.
    """

    name: str
    model: Callable[[], None]
    quantities: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def flat(name, support=C.real, shape=()):
    return pyro.sample(name, dist.ImproperUniform(support, (), shape))


def vector(name, value):
    return {f"{name}[{i + 1}]": value[..., i] for i in range(value.shape[-1])}


def given(name, fn, value):  # target += fn.log_prob(value)
    pyro.sample(name, fn, obs=value)


def lag_solve(u, a):
    """e[t] = u[t] + a e[t-1], e[-1] = 0, along the last dim, by doubling."""
    n, k = u.shape[-1], 1
    while k < n:
        u = u + a.unsqueeze(-1) * pad(u[..., :-k], (k, 0))
        a, k = a * a, 2 * k
    return u


# Regressions: y ~ normal(X beta, sigma), flat beta; sigma flat or half-Cauchy(2.5).
def regression(name, design, cauchy=False):
    d = data_of(name)
    X, y = design(d)
    X = torch.stack([torch.ones_like(y), *X], -1)

    def model():
        beta = flat("beta", shape=(X.shape[1],))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.5)) if cauchy else flat("sigma", C.positive)
        mu = (X @ beta.unsqueeze(-1)).squeeze(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, sigma.unsqueeze(-1) if sigma.dim() else sigma), obs=y)

    return Posterior(name, model, lambda s: {**vector("beta", s["beta"]), "sigma": s["sigma"]})


def sd(x):
    return x.std()


def centre(x):
    return x - x.mean()


def kid_inter(a, b):
    return [a, b, a * b]


L = torch.log
REGRESSIONS = {
    "earnings-earn_height": lambda d: ([d["height"]], d["earn"]),
    "earnings-log10earn_height": lambda d: ([d["height"]], d["earn"].log10()),
    "earnings-logearn_height": lambda d: ([d["height"]], L(d["earn"])),
    "earnings-logearn_height_male": lambda d: ([d["height"], d["male"]], L(d["earn"])),
    "earnings-logearn_interaction": lambda d: (kid_inter(d["height"], d["male"]), L(d["earn"])),
    "earnings-logearn_interaction_z": lambda d: (
        kid_inter(centre(d["height"]) / sd(d["height"]), d["male"]),
        L(d["earn"]),
    ),
    "earnings-logearn_logheight_male": lambda d: ([L(d["height"]), d["male"]], L(d["earn"])),
    "kidiq_with_mom_work-kidscore_interaction_c": lambda d: (
        kid_inter(centre(d["mom_hs"]), centre(d["mom_iq"])),
        d["kid_score"],
    ),
    "kidiq_with_mom_work-kidscore_interaction_c2": lambda d: (
        kid_inter(d["mom_hs"] - 0.5, d["mom_iq"] - 100),
        d["kid_score"],
    ),
    "kidiq_with_mom_work-kidscore_interaction_z": lambda d: (
        kid_inter(
            centre(d["mom_hs"]) / (2 * sd(d["mom_hs"])), centre(d["mom_iq"]) / (2 * sd(d["mom_iq"]))
        ),
        d["kid_score"],
    ),
    "kidiq_with_mom_work-kidscore_mom_work": lambda d: (
        [(d["mom_work"] == i).double() for i in (2, 3, 4)],
        d["kid_score"],
    ),
    "mesquite-logmesquite": lambda d: (
        [L(d[k]) for k in ("diam1", "diam2", "canopy_height", "total_height", "density")]
        + [d["group"]],
        L(d["weight"]),
    ),
    "mesquite-logmesquite_logva": lambda d: (
        [L(d["diam1"] * d["diam2"] * d["canopy_height"]), L(d["diam1"] * d["diam2"]), d["group"]],
        L(d["weight"]),
    ),
    "mesquite-logmesquite_logvas": lambda d: (
        [
            L(d["diam1"] * d["diam2"] * d["canopy_height"]),
            L(d["diam1"] * d["diam2"]),
            L(d["diam1"] / d["diam2"]),
            L(d["total_height"]),
            L(d["density"]),
            d["group"],
        ],
        L(d["weight"]),
    ),
    "mesquite-logmesquite_logvash": lambda d: (
        [
            L(d["diam1"] * d["diam2"] * d["canopy_height"]),
            L(d["diam1"] * d["diam2"]),
            L(d["diam1"] / d["diam2"]),
            L(d["total_height"]),
            d["group"],
        ],
        L(d["weight"]),
    ),
    "mesquite-logmesquite_logvolume": lambda d: (
        [L(d["diam1"] * d["diam2"] * d["canopy_height"])],
        L(d["weight"]),
    ),
    "mesquite-mesquite": lambda d: (
        [d[k] for k in ("diam1", "diam2", "canopy_height", "total_height", "density", "group")],
        d["weight"],
    ),
    **{
        f"nes{year}-nes": lambda d: (
            [
                d["real_ideo"],
                d["race_adj"],
                *[(d["age_discrete"] == i).double() for i in (2, 3, 4)],
                d["educ1"],
                d["gender"],
                d["income"],
            ],
            d["partyid7"],
        )
        for year in range(1972, 2001, 4)
    },
}
CAUCHY = {
    "kidiq-kidscore_momhs": lambda d: ([d["mom_hs"]], d["kid_score"]),
    "kidiq-kidscore_momiq": lambda d: ([d["mom_iq"]], d["kid_score"]),
    "kidiq-kidscore_momhsiq": lambda d: ([d["mom_hs"], d["mom_iq"]], d["kid_score"]),
    "kidiq-kidscore_interaction": lambda d: (kid_inter(d["mom_hs"], d["mom_iq"]), d["kid_score"]),
}
MODELS = {n: (lambda n=n, f=f: regression(n, f)) for n, f in REGRESSIONS.items()}
MODELS |= {n: (lambda n=n, f=f: regression(n, f, True)) for n, f in CAUCHY.items()}


def register(name):
    def wrap(build):
        def make():
            return Posterior(name, *build(data_of(name)))

        MODELS[name] = make
        return build

    return wrap


def up(x):  # a dim for the data, to the right of those of particles
    return x.unsqueeze(-1)


def normals(name, loc, scale, n):
    return pyro.sample(name, dist.Normal(loc, scale).expand([n]).to_event(1))


@register("eight_schools-eight_schools_noncentered")
def _(d):
    def model():
        t = normals("theta_trans", 0.0, 1.0, 8)
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        pyro.sample("y", dist.Normal(t * up(tau) + up(mu), d["sigma"]).to_event(1), obs=d["y"])

    return model, lambda s: {
        **vector("theta", s["theta_trans"] * up(s["tau"]) + up(s["mu"])),
        "mu": s["mu"],
        "tau": s["tau"],
    }


@register("arK-arK")
def _(d):
    K, y = d["K"], d["y"]
    lags = torch.stack([y[K - k : len(y) - k] for k in range(1, K + 1)], -1)

    def model():
        alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
        beta = normals("beta", 0.0, 10.0, K)
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
        mu = up(alpha) + (lags @ up(beta)).squeeze(-1)
        pyro.sample("y", dist.Normal(mu, up(sigma)).to_event(1), obs=y[K:])

    return model, lambda s: {"alpha": s["alpha"], **vector("beta", s["beta"]), "sigma": s["sigma"]}


@register("arma-arma11")
def _(d):
    y = d["y"]

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        phi = pyro.sample("phi", dist.Normal(0.0, 2.0))
        theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
        rest = y[1:] - up(mu) - up(phi) * y[:-1]
        u = torch.cat([up(y[0] - mu - phi * mu), rest], -1)
        given("err", dist.Normal(0.0, up(sigma)).expand(u.shape).to_event(1), lag_solve(u, -theta))

    return model, lambda s: {k: s[k] for k in ("mu", "phi", "theta", "sigma")}


@register("garch-garch11")
def _(d):
    y = d["y"]

    def model():
        mu, alpha0 = flat("mu"), flat("alpha0", C.positive)
        # uniform on the triangle alpha1 + beta1 < 1
        alpha1 = pyro.sample("alpha1", dist.Beta(1.0, 2.0))
        beta1 = (1 - alpha1) * pyro.sample("part", dist.Uniform(0.0, 1.0))
        u = up(alpha0) + up(alpha1) * (y[:-1] - up(mu)) ** 2
        first = torch.full_like(u[..., :1], d["sigma1"] ** 2)
        var = lag_solve(torch.cat([first, u], -1), beta1)
        pyro.sample("y", dist.Normal(up(mu), var.sqrt()).to_event(1), obs=y)

    return model, lambda s: {
        "mu": s["mu"],
        "alpha0": s["alpha0"],
        "alpha1": s["alpha1"],
        "beta1": (1 - s["alpha1"]) * s["part"],
    }


def exp_quad(x, alpha, rho):
    return up(up(alpha)) ** 2 * torch.exp(-0.5 * ((x[:, None] - x) / up(up(rho))) ** 2)


@register("gp_pois_regr-gp_regr")
def _(d):
    x, y = d["x"], d["y"]

    def model():
        rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
        alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        cov = exp_quad(x, alpha, rho) + up(up(sigma)) * torch.eye(len(x))
        pyro.sample(
            "y",
            dist.MultivariateNormal(torch.zeros(len(x)), scale_tril=torch.linalg.cholesky(cov)),
            obs=y,
        )

    return model, lambda s: {k: s[k] for k in ("rho", "alpha", "sigma")}


@register("gp_pois_regr-gp_pois_regr")
def _(d):
    x, k = d["x"], d["k"]

    def latent(rho, alpha, f):
        cov = exp_quad(x, alpha, rho) + 1e-10 * torch.eye(len(x))
        return (torch.linalg.cholesky(cov) @ up(f)).squeeze(-1)

    def model():
        rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
        alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
        f = latent(rho, alpha, normals("f_tilde", 0.0, 1.0, len(x)))
        pyro.sample("k", dist.Poisson(f.exp()).to_event(1), obs=k)

    return model, lambda s: {
        "rho": s["rho"],
        "alpha": s["alpha"],
        **vector("f", latent(s["rho"], s["alpha"], s["f_tilde"])),
    }


def forward(log_theta, log_obs):
    """log p(x) of an HMM without initial weights; [..., K, K], [..., T, K]."""
    m = log_theta.unsqueeze(-3) + log_obs[..., 1:, None, :]  # [..., T-1, K, K]
    while m.shape[-3] > 1:
        n = m.shape[-3]
        even = m[..., : n // 2 * 2, :, :].unflatten(-3, (n // 2, 2))
        a, b = even[..., 0, :, :], even[..., 1, :, :]
        both = (a.unsqueeze(-1) + b.unsqueeze(-3)).logsumexp(-2)
        m = torch.cat([both, m[..., -1:, :, :]], -3) if n % 2 else both
    return (log_obs[..., 0, :, None] + m[..., 0, :, :]).logsumexp((-1, -2))


def two_state(prior):
    t = [pyro.sample(f"theta{i + 1}", dist.Dirichlet(prior[i])) for i in range(2)]
    return torch.stack([x.log() for x in torch.broadcast_tensors(*t)], -2)


@register("hmm_example-hmm_example")
def _(d):
    y = d["y"]

    def model():
        log_theta = two_state(torch.ones(2, 2))
        mu = flat("mu", C.positive_ordered_vector, (2,))
        given("prior", dist.Normal(torch.tensor([3.0, 10.0]), 1.0).to_event(1), mu)
        pyro.factor("y", forward(log_theta, dist.Normal(mu.unsqueeze(-2), 1.0).log_prob(up(y))))

    return model, lambda s: {
        **vector("theta1", s["theta1"]),
        **vector("theta2", s["theta2"]),
        **vector("mu", s["mu"]),
    }


def drive(name, constraint, emissions):
    @register(name)
    def _(d):
        def model():
            log_theta = two_state(d["alpha"])
            phi, lam = flat("phi", constraint, (2,)), flat("lambda", constraint, (2,))
            prior = dist.Normal(torch.tensor([0.0, 3.0]), 1.0).to_event(1)
            given("prior_phi", prior, phi)
            given("prior_lambda", prior, lam)
            u, v = emissions(d, phi.unsqueeze(-2), lam.unsqueeze(-2))
            pyro.factor("y", forward(log_theta, u.log_prob(up(d["u"])) + v.log_prob(up(d["v"]))))

        return model, lambda s: {
            k: v for n in ("theta1", "theta2", "phi", "lambda") for k, v in vector(n, s[n]).items()
        }


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
    y = d["y"]

    def model():
        mu = flat("mu", C.ordered_vector, (2,))
        given("prior", dist.Normal(torch.zeros(2), 2.0).to_event(1), mu)
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
        theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
        log_w = torch.stack([theta.log(), (-theta).log1p()], -1)
        lp = dist.Normal(mu.unsqueeze(-2), sigma.unsqueeze(-2)).log_prob(up(y)) + log_w.unsqueeze(
            -2
        )
        pyro.factor("y", lp.logsumexp(-1).sum(-1))

    return model, lambda s: {
        **vector("mu", s["mu"]),
        **vector("sigma", s["sigma"]),
        "theta": s["theta"],
    }


def blr(name):
    @register(name)
    def _(d):
        X, y = d["X"], d["y"]

        def model():
            beta = normals("beta", 0.0, 10.0, X.shape[1])
            sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
            with pyro.plate("data", len(y)):
                pyro.sample(
                    "y",
                    dist.Normal((X @ up(beta)).squeeze(-1), up(sigma) if sigma.dim() else sigma),
                    obs=y,
                )

        return model, lambda s: {**vector("beta", s["beta"]), "sigma": s["sigma"]}


blr("sblrc-blr")
blr("sblri-blr")


@register("diamonds-diamonds")
def _(d):
    X, y = d["X"][:, 1:], d["Y"]
    X = X - X.mean(0)

    def model():
        b = normals("b", 0.0, 1.0, X.shape[1])
        a = pyro.sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
        sigma = flat("sigma", C.positive)
        given("prior", dist.StudentT(3.0, 0.0, 10.0), sigma)
        mu = up(a) + (X @ up(b)).squeeze(-1)
        pyro.sample("y", dist.Normal(mu, up(sigma)).to_event(1), obs=y)

    means = d["X"][:, 1:].mean(0)
    return model, lambda s: {
        **vector("b", s["b"]),
        "Intercept": s["Intercept"],
        "sigma": s["sigma"],
        "b_Intercept": s["Intercept"] - s["b"] @ means,
    }


@register("kilpisjarvi_mod-kilpisjarvi")
def _(d):
    def model():
        a = pyro.sample("alpha", dist.Normal(d["pmualpha"], d["psalpha"]))
        b = pyro.sample("beta", dist.Normal(d["pmubeta"], d["psbeta"]))
        sigma = flat("sigma", C.positive)
        pyro.sample("y", dist.Normal(up(a) + up(b) * d["x"], up(sigma)).to_event(1), obs=d["y"])

    return model, lambda s: {k: s[k] for k in ("alpha", "beta", "sigma")}


def rk4(f, z, t0, times, step):
    """States at times (multiples of step)."""
    out, t = [], t0
    for end in times:
        n = max(1, round((end - t) / step))
        h = (end - t) / n
        for i in range(n):
            s = t + i * h
            k1 = f(s, z)
            k2 = f(s + h / 2, z + h / 2 * k1)
            k3 = f(s + h / 2, z + h / 2 * k2)
            k4 = f(s + h, z + h * k3)
            z = z + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        out.append(z)
        t = end
    return torch.stack(out, -2)


@register("hudson_lynx_hare-lotka_volterra")
def _(d):
    y = torch.cat([d["y_init"][None], d["y"]])
    loc = torch.tensor([1.0, 0.05, 1.0, 0.05])

    def model():
        # theta > 0 with normal priors, truncated (a constant)
        theta = flat("theta", C.positive, (4,))
        given("prior", dist.Normal(loc, torch.tensor([0.5, 0.05, 0.5, 0.05])).to_event(1), theta)
        z0 = pyro.sample("z_init", dist.LogNormal(math.log(10.0), 1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))
        a = theta[..., [0, 2]] * torch.tensor([1.0, -1.0])
        b = theta[..., [1, 3]] * torch.tensor([-1.0, 1.0])
        z = rk4(
            lambda t, z: a + b * z.flip(-1).exp(), z0.log(), 0.0, d["ts"].tolist(), 0.5
        )  # log z
        z = torch.cat([z0.log().unsqueeze(-2), z], -2)
        pyro.sample("y", dist.LogNormal(z, sigma.unsqueeze(-2)).to_event(2), obs=y)

    return model, lambda s: {
        k: v for n in ("theta", "z_init", "sigma") for k, v in vector(n, s[n]).items()
    }


@register("one_comp_mm_elim_abs-one_comp_mm_elim_abs")
def _(d):
    names = ("k_a", "K_m", "V_m", "sigma")

    def model():
        ka, km, vm, sigma = (pyro.sample(n, dist.HalfCauchy(1.0)) for n in names)

        def f(t, c):  # Stan's dose starts after t = 0: a point
            return torch.exp(-up(ka) * t) * up(ka) * (d["D"] / d["V"]) - up(vm) / d["V"] * c / (
                up(km) + c
            )

        c = rk4(f, torch.zeros_like(up(ka)), 0.0, d["times"].tolist(), 0.25).squeeze(-1)
        pyro.sample("C_hat", dist.LogNormal(c.log(), up(sigma)).to_event(1), obs=d["C_hat"])

    return model, lambda s: {k: s[k] for k in names}


@register("mcycle_gp-accel_gp")
def _(d):
    y = d["Y"]

    def process(suffix, intercept):
        X, frequency = d[f"Xgp{suffix}"], d[f"slambda{suffix}"][:, 0]
        sd = flat(f"sdgp{suffix}", C.positive)
        given(f"prior_sd{suffix}", dist.StudentT(3.0, 0.0, 36.0), sd)
        scale = pyro.sample(f"lscale{suffix}", dist.InverseGamma(1.124909, 0.0177))
        z = normals(f"zgp{suffix}", 0.0, 1.0, X.shape[1])
        spectrum = up(sd**2 * math.sqrt(2 * math.pi) * scale)
        spectrum = (spectrum * torch.exp(-0.5 * up(scale**2) * frequency**2)).sqrt()
        return up(intercept) + (X @ up(spectrum * z)).squeeze(-1)

    def model():
        mean = process("_1", pyro.sample("Intercept", dist.StudentT(3.0, -13.0, 36.0)))
        sigma = process("_sigma_1", pyro.sample("Intercept_sigma", dist.StudentT(3.0, 0.0, 10.0)))
        pyro.sample("y", dist.Normal(mean, sigma.exp()).to_event(1), obs=y)

    def quantities(s):
        scalars = ("Intercept", "sdgp_1", "lscale_1")
        scalars += ("Intercept_sigma", "sdgp_sigma_1", "lscale_sigma_1")
        vectors = {k: v for n in ("zgp_1", "zgp_sigma_1") for k, v in vector(n, s[n]).items()}
        return {**{n: s[n] for n in scalars}, **vectors}

    return model, quantities
