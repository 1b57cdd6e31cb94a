"""Programs of Pyro's examples whose evidence is known: no bound lies above it, and many particles
come close to it."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import TraceIWAE_ELBO, TraceRaoBlackwell_ELBO, TraceSGVB_ELBO


def captures():
    """Cormack, Jolly and Seber: who is alive is seen at recaptures only, and masked before."""
    seen = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0.0]])
    known = seen.flip(1).cumsum(1).flip(1) > 0
    survive, capture = 0.8, 0.5

    def walk(is_model):
        with pyro.plate("animals", 5):
            alive, marked = torch.ones(5), torch.zeros(5, dtype=torch.bool)
            for t in pyro.markov(range(4)):
                with poutine.mask(mask=marked):
                    prob = torch.where(marked, survive * alive, 1.0)
                    if not is_model:
                        prob = torch.where(marked & ~known[:, t], 0.7 * alive, torch.ones(5))
                    alive = pyro.sample(f"z_{t}", dist.Bernoulli(prob))
                    if is_model:
                        pyro.sample(f"y_{t}", dist.Bernoulli(capture * alive), obs=seen[:, t])
                marked = marked | (seen[:, t] > 0)

    total = 0.0
    for row in seen.tolist():
        dead, living = 0.0, 1.0
        for y in row[row.index(1.0) + 1 :]:
            dead, living = dead + (1 - survive) * living, survive * living
            dead, living = (0.0, living * capture) if y else (dead, living * (1 - capture))
        total += math.log(dead + living)
    return lambda: walk(True), lambda: walk(False), total


def presence():
    """Attend, infer, repeat: each object is there only if the one before it is."""
    x = torch.tensor([0.2, 1.7, 1.0, 0.4])

    def walk(is_model):
        with pyro.plate("data", 4):
            there, total = torch.ones(4), torch.zeros(4)
            for t in range(2):
                prob = 0.6 if is_model else 0.5
                there = pyro.sample(f"there_{t}", dist.Bernoulli(prob * there))
                with poutine.mask(mask=there > 0):
                    loc = 1.0 if is_model else 0.5
                    what = pyro.sample(f"what_{t}", dist.Normal(loc, 1.0))
                total = total + there * what
            if is_model:
                pyro.sample("x", dist.Normal(total, 0.5), obs=x)

    parts = [
        math.log(p) + dist.Normal(float(n), (0.25 + n) ** 0.5).log_prob(x)
        for n, p in enumerate((0.4, 0.24, 0.36))
    ]
    exact = float(torch.stack(parts).logsumexp(0).sum())
    return lambda: walk(True), lambda: walk(False), exact


def topics():
    """Latent Dirichlet allocation of ragged documents, with the words' topics summed."""
    words, lengths = torch.tensor([[0, 2, 1], [0, 1, 2], [0, 2, 2], [1, 1, 0]]), (4, 2, 3)
    mask = torch.arange(4)[:, None] < torch.tensor(lengths)
    prior, weight = torch.full((2, 3), 2.0), torch.full((2,), 1.5)
    counts = torch.tensor([[5.0, 2.0, 3.0], [2.0, 4.0, 4.0]])

    def model():
        with pyro.plate("topics", 2):
            topic = pyro.sample("topic", dist.Dirichlet(prior))
        with pyro.plate("documents", 3):
            fraction = pyro.sample("share", dist.Dirichlet(weight))
            with pyro.plate("words", 4), poutine.mask(mask=mask):
                topic = topic.unsqueeze(-3) if topic.dim() > 2 else topic
                probs = (fraction.unsqueeze(-1) * topic).sum(-2)
                pyro.sample("word", dist.Categorical(probs), obs=words)

    def guide():
        with pyro.plate("topics", 2):
            pyro.sample("topic", dist.Dirichlet(counts))
        with pyro.plate("documents", 3):
            pyro.sample("share", dist.Dirichlet(weight))

    def collapsed(counts, prior):
        beta = (counts + prior).lgamma().sum(-1) - (counts + prior).sum(-1).lgamma()
        return beta + math.lgamma(prior * counts.shape[-1]) - counts.shape[-1] * math.lgamma(prior)

    places = [(w, d) for d in range(3) for w in range(lengths[d])]
    of = torch.tensor(list(itertools.product(range(2), repeat=len(places))))
    which = torch.nn.functional.one_hot(of, 2).double()
    document = torch.tensor([d for _, d in places])
    word = torch.tensor([int(words[place]) for place in places])
    log_joint = sum(collapsed(which[:, document == d].sum(1), 1.5) for d in range(3))
    for t in range(2):
        result = torch.stack([which[:, word == v, t].sum(1) for v in range(3)], -1)
        log_joint = log_joint + collapsed(result, 2.0)
    return model, guide, float(log_joint.logsumexp(0))


def angles():
    """Directions, whose draws have no gradient."""
    x = torch.tensor([0.3, 2.9, -3.0])
    grid = torch.linspace(-math.pi, math.pi, 4001)[:-1]
    prior = dist.VonMises(torch.zeros(()), torch.ones(()))

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.VonMises(z, torch.tensor(4.0)), obs=x)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.VonMises(0.8 * x, torch.full((3,), 3.0)))

    log_joint = prior.log_prob(grid)[:, None] + dist.VonMises(grid[:, None], 4.0).log_prob(x)
    return model, guide, float((log_joint.logsumexp(0) + math.log(2 * math.pi / 4000)).sum())


PROGRAMS = {"captures": captures, "presence": presence, "topics": topics, "angles": angles}
OBJECTIVES = {
    "sgvb": lambda **k: TraceSGVB_ELBO(num_particles=5, **k),
    "iwae": lambda **k: TraceIWAE_ELBO(5, **k),
    "joint": lambda **k: TraceIWAE_ELBO(5, joint=True, **k),
    "rb": lambda **k: TraceRaoBlackwell_ELBO(2, num_particles=3, **k),
}


def bounds(elbo, model, guide, count):
    result = torch.tensor([-elbo.loss(model, guide) for _ in range(count)])
    return result.mean(), result.std() / count**0.5


@pytest.mark.parametrize(
    ("name", "objective", "vectorize"),
    # Each program with each objective, looped or vectorised.
    [(n, o, v) for i, n in enumerate(PROGRAMS) for j, o in enumerate(OBJECTIVES)
     for v in (False, True) if (i + j) % 2 == v],
)  # fmt: skip
def test_bounds_lie_below_the_evidence(name, objective, vectorize):
    model, guide, exact = PROGRAMS[name]()
    mean, error = bounds(OBJECTIVES[objective](vectorize_particles=vectorize), model, guide, 8)
    assert mean < exact + 4.5 * error + 1e-9


@pytest.mark.parametrize("name", PROGRAMS)
def test_many_particles_come_close_to_the_evidence(name):
    model, guide, exact = PROGRAMS[name]()
    elbo = TraceIWAE_ELBO(3000, joint=name == "topics", vectorize_particles=True)
    mean, error = bounds(elbo, model, guide, 10)
    assert abs(mean - exact) < 4.5 * error + 0.05
