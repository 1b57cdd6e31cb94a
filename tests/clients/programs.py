"""Pyro's examples in small: for each a model, a guide, data, and the bound of an evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.distributions import constraints

NUM_DATA = 12


class Example(NamedTuple):
    """
    :ivar data: arguments of both programs.
    :ivar batch_size: their further argument, if they take minibatches.
    :ivar enumerated: whether the model sums discrete sites, as Trace_ELBO does not.
    """

    model: Callable[..., object]
    guide: Callable[..., object]
    data: tuple[object, ...]
    batch_size: int | None = None
    enumerated: bool = False


def networks(*sizes: tuple[int, int]) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)) for a, b in sizes]


def normal(parameters: Tensor) -> dist.Distribution:
    loc, scale = parameters.chunk(2, -1)
    return dist.Normal(loc, nn.functional.softplus(scale) + 0.01).to_event(1)


def images() -> tuple[Tensor, Tensor]:
    """Two kinds of noisy binary images of six pixels, and their labels."""
    labels = torch.arange(NUM_DATA) % 2
    probs = torch.where(labels[:, None] == torch.arange(6) // 3, 0.85, 0.15)
    return torch.bernoulli(probs), labels


def standard(x: Tensor, size: int) -> dist.Distribution:
    return dist.Normal(x.new_zeros(size), x.new_ones(size)).to_event(1)


def vae() -> Example:
    """vae.py: minibatches of binary images."""
    (encoder, decoder), (data, _) = networks((6, 4), (2, 6)), images()

    def model(x: Tensor, batch_size: int | None = None) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x), batch_size) as index:
            z = pyro.sample("z", standard(x, 2))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x[index])

    def guide(x: Tensor, batch_size: int | None = None) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x), batch_size) as index:
            pyro.sample("z", normal(encoder(x[index])))

    return Example(model, guide, (data,), batch_size=8)


def ss_vae() -> Example:
    """ss_vae_M2.py: the label is a one-hot latent of guide and model, the style depends on it."""
    (classifier, encoder, decoder), (data, _) = networks((6, 2), (8, 4), (4, 6)), images()

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", standard(x, 2))
            y = pyro.sample("y", dist.OneHotCategorical(x.new_ones(2)))
            both = torch.cat(torch.broadcast_tensors(z, y.to(z)), -1)
            pyro.sample("x", dist.Bernoulli(logits=decoder(both)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("encoder", nn.ModuleList([classifier, encoder]))
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.OneHotCategorical(logits=classifier(x)))
            h = torch.cat([x.expand(*y.shape[:-1], 6), y.to(x)], -1)
            pyro.sample("z", normal(encoder(h)))

    return Example(model, guide, (data,))


def dmm() -> Example:
    """dmm.py: a Markov chain of latents, a guide that runs backwards, lengths, and annealing."""
    transition, emitter, combiner = networks((2, 4), (2, 3), (6, 4))
    rnn = nn.RNN(3, 4, batch_first=True)
    lengths = torch.tensor([4, 4, 3, 3, 2, 4])
    data = torch.bernoulli(torch.full((len(lengths), 4, 3), 0.3))
    steps = torch.arange(4)

    def model(x: Tensor, annealing: float) -> None:
        pyro.module("dmm", nn.ModuleList([transition, emitter]))
        z = x.new_zeros(len(x), 2)
        with pyro.plate("data", len(x)):
            for t in pyro.markov(steps.tolist()):
                with poutine.mask(mask=t < lengths):
                    with poutine.scale(scale=annealing):
                        z = pyro.sample(f"z_{t}", normal(transition(z)))
                    px = dist.Bernoulli(logits=emitter(z)).to_event(1)
                    pyro.sample(f"x_{t}", px, obs=x[:, t])

    def guide(x: Tensor, annealing: float) -> None:
        pyro.module("dmm_guide", nn.ModuleList([combiner, rnn]))
        h = rnn(x.flip(1))[0].flip(1)
        z = x.new_zeros(len(x), 2)
        with pyro.plate("data", len(x)):
            for t in pyro.markov(steps.tolist()):
                with poutine.mask(mask=t < lengths), poutine.scale(scale=annealing):
                    state = torch.cat([z, h[:, t].expand(*z.shape[:-1], 4)], -1)
                    z = pyro.sample(f"z_{t}", normal(combiner(state)))

    return Example(model, guide, (data, 1.0))


def cvae() -> Example:
    """cvae.py: a prior network, and a plate without a size, which the data gives."""
    (prior, recognition, decoder), (data, _) = networks((6, 4), (6, 4), (2, 3)), images()

    def model(x: Tensor, y: Tensor) -> None:
        pyro.module("cvae", nn.ModuleList([prior, decoder]))
        with pyro.plate("data"):
            z = pyro.sample("z", normal(prior(torch.cat([x, torch.zeros_like(y)], -1))))
            pyro.sample("y", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=y)

    def guide(x: Tensor, y: Tensor) -> None:
        pyro.module("recognition", recognition)
        with pyro.plate("data"):
            pyro.sample("z", normal(recognition(torch.cat([x, y], -1))))

    return Example(model, guide, (data[:, :3], data[:, 3:]))


def sparse_gamma_def() -> Example:
    """sparse_gamma_def.py: two layers of gamma variables, with weights that all data share."""
    data = torch.poisson(torch.full((6, 4), 2.0))

    def layer(z: Tensor, name: str, above: int, below: int) -> Tensor:
        with pyro.plate(f"{name}_plate", above * below):
            w = pyro.sample(name, dist.Gamma(1.0, 0.6))
        return torch.matmul(z, w.reshape(-1, above, below)) + 0.01

    def model(x: Tensor) -> None:
        plate = pyro.plate("data", len(x))
        with plate:
            z_top = pyro.sample("z_top", dist.Gamma(0.8, 0.8).expand([3]).to_event(1))
        mean = layer(z_top, "w_top", 3, 2)
        with plate:
            z_bottom = pyro.sample("z_bottom", dist.Gamma(0.8, 0.8 / mean).to_event(1))
        mean = layer(z_bottom, "w_bottom", 2, 4)
        with plate:
            pyro.sample("x", dist.Poisson(mean).to_event(1), obs=x)

    def gamma(name: str, *shape: int) -> dist.Distribution:
        positive = {"constraint": constraints.positive}
        alpha = pyro.param(f"alpha_{name}", lambda: torch.full(shape, 2.0), **positive)
        mean = pyro.param(f"mean_{name}", lambda: torch.full(shape, 1.0), **positive)
        return dist.Gamma(alpha, alpha / mean)

    def guide(x: Tensor) -> None:
        for name, size in (("w_top", 6), ("w_bottom", 8)):
            with pyro.plate(f"{name}_plate", size):
                pyro.sample(name, gamma(name, size))
        with pyro.plate("data", len(x)):
            for name, width in (("z_top", 3), ("z_bottom", 2)):
                pyro.sample(name, gamma(name, len(x), width).to_event(1))

    return Example(model, guide, (data,))


def baseball() -> Example:
    """baseball.py: partial pooling, by a uniform and a Pareto variable above beta variables."""
    at_bats, hits = torch.full((8,), 45.0), torch.tensor([18.0, 17, 16, 15, 14, 11, 10, 7])

    def model(at_bats: Tensor, hits: Tensor) -> None:
        m = pyro.sample("m", dist.Uniform(0.0, 1.0))
        kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
        with pyro.plate("num_players", len(at_bats)):
            phi = pyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
            pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)

    return Example(model, AutoNormal(model), (at_bats, hits))


def lda() -> Example:
    """lda.py: the words' topics summed, and documents subsampled, whose topics are a Delta."""
    (predictor,), words, num_docs = networks((5, 2)), 5, 8
    data = torch.randint(words, (6, num_docs))

    def model(data: Tensor, batch_size: int | None = None) -> None:
        with pyro.plate("topics", 2):
            topic_weights = pyro.sample("topic_weights", dist.Gamma(0.5, 1.0))
            topic_words = pyro.sample("topic_words", dist.Dirichlet(torch.full((words,), 0.5)))
        with pyro.plate("documents", num_docs, batch_size) as index:
            doc_topics = pyro.sample("doc_topics", dist.Dirichlet(topic_weights))
            with pyro.plate("words", len(data)):
                infer = {"enumerate": "parallel"}
                topics = pyro.sample("word_topics", dist.Categorical(doc_topics), infer=infer)
                word = dist.Categorical(topic_words[topics])
                pyro.sample("doc_words", word, obs=data[:, index])

    def guide(data: Tensor, batch_size: int | None = None) -> None:
        pyro.module("predictor", predictor)
        positive = {"constraint": constraints.positive}
        weights = pyro.param("weights", torch.ones(2), **positive)
        concentration = pyro.param("concentration", torch.ones(2, words), **positive)
        with pyro.plate("topics", 2):
            pyro.sample("topic_weights", dist.Gamma(weights, 1.0))
            pyro.sample("topic_words", dist.Dirichlet(concentration))
        with pyro.plate("documents", num_docs, batch_size) as index:
            counts = nn.functional.one_hot(data[:, index], words).sum(0).to(weights)
            topics = predictor(counts).softmax(-1)
            pyro.sample("doc_topics", dist.Delta(topics, event_dim=1))

    return Example(model, guide, (data,), batch_size=4, enumerated=True)


def hmm() -> Example:
    """hmm.py, model 1: hidden states of masked, subsampled sequences, summed."""
    sequences, lengths = torch.bernoulli(torch.full((6, 4, 2), 0.4)), torch.tensor([4, 3, 2] * 2)

    def model(sequences: Tensor, lengths: Tensor, batch_size: int | None = None) -> None:
        stay = 0.9 * torch.eye(2) + 0.1
        probs_x = pyro.sample("probs_x", dist.Dirichlet(stay).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2]).to_event(2))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), batch_size, dim=-2) as batch:
            x = 0
            for t in pyro.markov(range(4)):
                with poutine.mask(mask=(t < lengths[batch]).unsqueeze(-1)):
                    state = dist.Categorical(probs_x[x])
                    x = pyro.sample(f"x_{t}", state, infer={"enumerate": "parallel"})
                    with tones:
                        y = dist.Bernoulli(probs_y[x.squeeze(-1)])
                        pyro.sample(f"y_{t}", y, obs=sequences[batch, t])

    exposed = poutine.block(model, expose=["probs_x", "probs_y"])
    return Example(model, AutoNormal(exposed), (sequences, lengths), 4, enumerated=True)


EXAMPLES = {f.__name__: f for f in (vae, ss_vae, dmm, cvae, sparse_gamma_def, baseball, lda, hmm)}
