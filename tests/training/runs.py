"""Small training runs of every objective, with everything that has a state."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch import nn

from pyro_mcvae import (
    HMC,
    MALA,
    NVIL,
    RELAX,
    ULA,
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedSchedule,
    LearnedStepSize,
    MonteCarloEM,
    SigmoidSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UnderdampedLangevin,
)

N, D = 12, 3
FAST = {"vectorize_particles": True, "max_plate_nesting": 1}


def data(size=N):
    made = torch.Generator().manual_seed(3)
    return torch.randn(size, D, generator=made, dtype=torch.float64).to(torch.get_default_dtype())


class Network(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(2 * dim + 1, 2 * dim)
        nn.init.uniform_(self.linear.weight, -0.01, 0.01)

    def forward(self, position, gradient, beta):
        beta = beta.expand(position.shape[:-1] + (1,))
        return self.linear(torch.cat([position.tanh(), gradient.tanh(), beta], -1)).chunk(2, -1)


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, relaxed, x):
        return self.linear(relaxed)


CONTINUOUS = {
    "sgvb": lambda: TraceSGVB_ELBO(),
    # The default's mixture of two gradients is chosen on each rank from its own data.
    "iwae": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg", **FAST),
    "sis": lambda: TraceSIS_ELBO(2),
    "sis-learned": lambda: TraceSIS_ELBO(
        kernel=ULA(LearnedStepSize(0.05)),
        schedule=LearnedSchedule(2),
    ),
    "sis-trained": lambda: TraceSIS_ELBO(
        kernel=UnderdampedLangevin(
            LearnedStepSize(AdaptiveStepSize(), 2, warmup=2), momentum=LearnedMomentum(0.9, 2)
        ),
        schedule=LearnedSchedule(2),
    ),
    "sis-latent": lambda: TraceSIS_ELBO(2, ULA(AdaptiveStepSize(0.05)), coordinates="latent"),
    "sis-underdamped": lambda: TraceSIS_ELBO(
        2, UnderdampedLangevin(), gradient_estimator="reweighted"
    ),
    "ais": lambda: TraceAIS_ELBO(kernel=MALA(), schedule=SigmoidSchedule(3), **FAST),
    "em": lambda: MonteCarloEM(2, persistent=True),
    "ais-hmc": lambda: TraceAIS_ELBO(2, HMC(num_leapfrog=2), multi_sample=True),
}
DISCRETE = {
    "rb": lambda: TraceRaoBlackwell_ELBO(1, 2),
    "rb-nvil": lambda: TraceRaoBlackwell_ELBO(1, 1, baseline=NVIL(nn.Linear(D, 1))),
    "rb-relax": lambda: TraceRaoBlackwell_ELBO(1, 1, baseline=RELAX(Score())),
}
TRUNCATED = {"truncated": lambda: TraceTruncated_ELBO()}
OBJECTIVES = {**CONTINUOUS, **DISCRETE, **TRUNCATED}


class Model(PyroModule):
    """Normal latents and a decoder, on minibatches."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(2, D)
        self.scale = PyroParam(torch.tensor(0.7), constraint=dist.constraints.positive)

    def forward(self, x, index=None, size=N):
        with pyro.plate("data", size, subsample=index):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), self.scale).to_event(1), obs=x)


class Guide(PyroModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(D, 4)

    def forward(self, x, index=None, size=N):
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", size, subsample=index):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


class Mixture(PyroModule):
    def __init__(self):
        super().__init__()
        self.locs = PyroParam(torch.randn(4, D))

    def forward(self, x, index=None, size=N):
        with pyro.plate("data", size, subsample=index):
            y = pyro.sample("y", dist.Categorical(logits=x.new_zeros(4)))
            pyro.sample("x", dist.Normal(self.locs[y], 1.0).to_event(1), obs=x)


class MixtureGuide(PyroModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(D, 4)

    def forward(self, x, index=None, size=N):
        with pyro.plate("data", size, subsample=index):
            pyro.sample("y", dist.Categorical(logits=self.encoder(x)))


class SparseCoding(PyroModule):
    """Binary latents."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, D))
        self.register_buffer("pi", torch.full((5,), 0.4))
        self.register_buffer("sigma", torch.tensor(0.8))

    def forward(self, x, index=None, size=N):
        with pyro.plate("data", size, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(self.pi).to_event(1))
            pyro.sample("x", dist.Normal(z @ self.weight, self.sigma).to_event(1), obs=x)


def programs(name):
    if name in TRUNCATED:
        model = SparseCoding()
        return model, TruncatedPosterior(model, num_states=6)
    if name in DISCRETE:
        return Mixture(), MixtureGuide()
    return Model(), Guide()


class Run:
    """One run; ``step()`` returns the loss, ``parts`` is what a checkpoint takes."""

    def __init__(self, name, interface, auto=False, wrap=lambda loss: loss):
        self.x = data()
        self.loss = wrap(OBJECTIVES[name]())
        self.model, self.guide = programs(name)
        if auto:
            self.guide = AutoNormal(self.model, create_plates=self.plates)
            self.guide(self.x)
        self.parts = {}
        if interface == "svi":
            optim = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99})
            self.svi = SVI(self.model, self.guide, optim, loss=self.loss)
            self.parts["svi"] = self.svi
            self.train = lambda x, index: self.svi.step(x, index)
        else:
            self.elbo = self.loss(self.model, self.guide)
            self.optimizer = torch.optim.Adam(self.elbo.parameters(), lr=0.05)
            self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            self.parts.update(elbo=self.elbo, optimizer=self.optimizer, rates=self.rates)
            self.train = self.torch_step

    def plates(self, x, index=None, size=N):
        return pyro.plate("data", size, subsample=index)

    def torch_step(self, x, index):
        self.optimizer.zero_grad()
        loss = self.elbo(x, index)
        loss.backward()
        self.optimizer.step()
        self.rates.step()
        return loss.item()

    def step(self):
        index = torch.randperm(N)[:4]
        x = self.x[index]
        return self.train(x, index)

    def tensors(self):
        """All that the run has learned, by name."""
        result = {f"store {n}": v.detach() for n, v in pyro.get_param_store().items()}
        for part in (self.model, self.guide, self.loss):
            if isinstance(part, nn.Module):
                result.update(
                    {f"{type(part).__name__} {n}": v for n, v in part.state_dict().items()}
                )
        return {name: v.clone() for name, v in result.items()}
