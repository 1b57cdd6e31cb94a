"""Chains leave the arithmetic of programs alone: operators have PyTorch's numbers, bit for bit."""

from queue import SimpleQueue

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_mcvae import ULA, TraceAIS_ELBO, TraceSIS_ELBO, log_evidence
from tests.cases import every

N = 3


@pytest.fixture(autouse=True)
def _single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def learned(name, *shape):
    return pyro.param(name, torch.full((N, *shape), 0.7), constraint=constraints.positive)


PRIORS = {
    "Gamma": lambda: dist.Gamma(learned("c"), 1.0),
    "Beta": lambda: dist.Beta(learned("c"), learned("d")),
    "Dirichlet": lambda: dist.Dirichlet(learned("c", 4)),
    "LogNormal": lambda: dist.LogNormal(learned("c"), 0.5),
    "RelaxedBernoulli": lambda: dist.RelaxedBernoulli(torch.tensor(0.5), logits=learned("c")),
    "RelaxedOneHotCategorical": lambda: dist.RelaxedOneHotCategorical(
        torch.tensor(0.5), logits=learned("c", 4)
    ),
    "Weibull": lambda: dist.Weibull(learned("c"), 0.5 + learned("d")),
}
NEGATIVE, SIGNS = torch.tensor(-1.5), torch.tensor([1.0, -2.0, 0.5])


def signed(z):
    return SIGNS if z.dim() < 2 or z.shape[-1] == N else torch.tensor([1.0, -2.0, 0.5, -1.0])


def written_through_data(z):
    y = z.clone()
    y.data.mul_(3.0)
    return y.log()


def written_to_copy(z):
    y = z.clone().detach()
    y.mul_(3.0)
    return y.log()


def written_in_place(z):
    y = z.clone()
    y.sub_(0.5).neg_().add_(1.0)
    return y.abs().log() + y[..., :1].log1p()


FUNCTIONS = {
    "log of complement of head": lambda z: (1 - z[..., :-1]).log(),
    "complement of cumsum": lambda z: (1 - z.cumsum(-1)).abs().log(),
    "cumsum of complement": lambda z: (1 - z).cumsum(-1).abs().log(),
    "cumsum of a dim": lambda z: z.cumsum(0).log(),
    "cumprod": lambda z: (1 - z).cumprod(-1),
    "odd power of a signed product": lambda z: (signed(z) * z) ** 3,
    "power of a negative tensor": lambda z: (NEGATIVE * z) ** 3,
    "square root of a negative": lambda z: (NEGATIVE * z).abs().sqrt() + (-z).square().sqrt(),
    "fractional power": lambda z: z.pow(0.3) + z ** torch.tensor(-0.5),
    "power of a number": lambda z: 2.0**z,
    "integer": lambda z: z.to(torch.long) / 2,
    "integer division": lambda z: (10 * z).int() // 3,
    "floor": lambda z: (7 * z).floor() / 2,
    "floor division": lambda z: z / 0.25 // 1,
    "remainder": lambda z: (7 * z) % 2,
    "round": lambda z: torch.round(z * 3) - z,
    "sign": lambda z: torch.sign(z - 0.5) * z.log(),
    "comparison": lambda z: torch.where(z > 0.5, z.log(), (1 - z).abs()),
    "comparison as number": lambda z: (z > 0.5).float() / 2,
    "index": lambda z: z[..., torch.tensor([0, -1])].log(),
    "boolean index": lambda z: z.detach()[..., [True] + [False] * (z.shape[-1] - 1)].log(),
    "negative step": lambda z: (1 - z.flip(-1)).abs().log(),
    "sum": lambda z: (1 - z.sum(-1)).abs(),
    "data view": lambda z: (z.detach().view(torch.int32) >> 23).float().mul(0.01).log(),
    "data write": written_through_data,
    "copy write": written_to_copy,
    "write in place": written_in_place,
    "numpy factor": lambda z: z * np.float32(2.0),
    "numpy double": lambda z: z * np.float64(2.0),
    "numpy divisor": lambda z: z / np.int64(2),
    "numpy array": lambda z: z + torch.from_numpy(np.log1p(z.detach().numpy())),
    "item": lambda z: z.log() + z.detach().flatten()[0].item() - 1,
    "log keyword": lambda z: torch.log(input=z),
    "exp keyword": lambda z: torch.exp(input=-z),
    "maximum keyword": lambda z: torch.maximum(z, other=torch.full((), 0.5)),
    "clamp keyword": lambda z: torch.clamp(input=z, max=1.0 - 1e-7).log(),
    "out": lambda z: torch.mul(z.detach(), 2.0, out=torch.empty_like(z)),
    "division by a latent": lambda z: 1 / (1 + 1 / z) + torch.div(2, z, rounding_mode="floor"),
    "subtraction with alpha": lambda z: torch.sub(1.0, z, alpha=2).abs(),
    "addition with alpha": lambda z: torch.add(z, 1.0, alpha=-1).abs(),
    "lgamma": lambda z: torch.lgamma(z) + torch.special.gammaln(input=1 - z / 2),
    "xlogy": lambda z: torch.xlogy(z - 0.5, z),
    "sigmoid": lambda z: (1 - torch.sigmoid(20 * z)).log1p(),
    "softmax": lambda z: (1 - (30 * z).softmax(-1)).log1p(),
    "logit": lambda z: torch.logit(z.clamp(0.01, 0.99), eps=0.1),
    "exp": lambda z: (100 * z.clamp(max=2.0)).exp(),
    "pad": lambda z: torch.nn.functional.pad(z, (1, 1), value=1.0).log(),
    "concatenation": lambda z: torch.cat([z, 1 - z], -1).abs().log(),
    "stack": lambda z: torch.stack([z, -z]).abs().log().sum(0),
    "double": lambda z: (1 - z.double()).abs().log(),
    "half": lambda z: (1 - z.half()).abs(),
    "complex": lambda z: torch.complex(z, 1 - z).abs(),
    "einsum": lambda z: torch.einsum("...i,...i->...", z, 1 - z),
    "matmul": lambda z: z.unsqueeze(-1) @ (1 - z).unsqueeze(-2),
}


def is_plain(value):
    return type(value) is torch.Tensor and not torch._C._functorch.is_batchedtensor(value)


READING = {"numpy array", "item"}  # Python reads the latents' values


# Operators that Python reads are few, and need one prior.
@pytest.mark.parametrize(
    ("prior", "reading"), every(2, [*((p, False) for p in PRIORS), (next(iter(PRIORS)), True)], 1)
)
def test_operators_have_the_numbers_of_pytorch(prior, reading):
    """Recorded within a chain, and computed again outside of it, at the same latents."""
    functions = {n: f for n, f in FUNCTIONS.items() if (n in READING) is reading}
    queue = SimpleQueue()  # the evaluations of a chain leave one entry in a list

    def model():
        with pyro.plate("data", N):
            z = pyro.sample("z", PRIORS[prior]())
            results = {name: f(z) for name, f in functions.items()}
            if all(map(is_plain, (z, *results.values()))):
                queue.put((z.detach().clone(), results))
            pyro.sample("x", dist.Normal(torch.zeros(N), 1.0), obs=torch.ones(N))

    def guide():
        with pyro.plate("data", N):
            pyro.sample("z", PRIORS[prior]())

    for make in (TraceSIS_ELBO, TraceAIS_ELBO):
        make(2).loss_and_grads(model, guide)
        runs = [queue.get() for _ in range(queue.qsize())]
        assert len(runs) > 2
        for z, results in runs:
            for name, result in results.items():
                options = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": name}
                torch.testing.assert_close(result.detach(), functions[name](z), **options)


# --- The evidence, and chains as short as a draw, against draws of the prior ----------------------


def simplex_tail(z):
    q = z[..., :-1]
    x = torch.tensor([[1.0, 0, 1], [0, 1, 1], [0, 0, 1]])
    return (x * q.log() + (1 - x) * (1 - q).log()).sum(-1)


def normal_at(f, *data):
    return lambda z: dist.Normal(f(z), 1.0).log_prob(torch.tensor(data))


EVIDENCE = {
    "simplex tail": (lambda: dist.Dirichlet(2 * torch.ones(4)), simplex_tail),
    "power of unknown sign": (
        lambda: dist.LogNormal(0.0, 0.5),
        normal_at(lambda z: (torch.tensor([-1.0]) * z) ** 3, -1.0, -0.3, -2.0),
    ),
    "integer": (
        lambda: dist.Gamma(3.0, 1.0),
        normal_at(lambda z: z.to(torch.long) / 2, 1.0, 2.0, 0.0),
    ),
    "data write": (lambda: dist.Beta(2.0, 2.0), normal_at(written_through_data, 1.0, -1.0, 0.5)),
}


@pytest.mark.parametrize("name", every(2, EVIDENCE, 1))
def test_evidence(name):
    prior, log_likelihood = EVIDENCE[name]

    def model():
        with pyro.plate("data", N):
            pyro.factor("x", log_likelihood(pyro.sample("z", prior())))

    def guide():
        with pyro.plate("data", N):
            pyro.sample("z", prior())

    count = 20_000
    draws = prior().expand([N]).sample((count,)).double()
    weight = log_likelihood(draws).exp()
    exact, error = weight.mean(0), weight.std(0) / count**0.5
    short = TraceSIS_ELBO(1, ULA(1e-6), num_particles=count, multi_sample=True)
    # The mean of exp(W) of chains as short as a draw, with the error of the same number of draws.
    result = short.bounds(model, guide).per_datum.exp()
    assert ((result - exact).abs() < 5 * 2**0.5 * error).all()
    evidence = log_evidence(model, guide, num_particles=2000, schedule=4, seed=0)
    spread = (evidence.standard_error**2 + (error / exact) ** 2).sqrt()
    assert ((evidence.log_evidence - exact.log()).abs() < 5 * spread).all()
