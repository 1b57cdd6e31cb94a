"""
Annealed chains on the models of the literature on chains that train, by its protocol.

    python -m tests.benchmarks.frontier --data-root DATA --out frontier.csv --figure frontier.png
    python -m tests.benchmarks.frontier --models brownian seeds --methods default mass --steps 8 32

A diagonal normal guide is trained by the ELBO first. Then guide and chain train together for 10,000
steps, with 5 chains a step; of two learning rates the better one counts [1]. A row has the mean of
4,000 chains after training and its standard error. The file grows by a row for each run, and a call
goes on with what the file lacks. --data-root has ionosphere.npz and sonar.npz: x as published, y
0 or 1.

[1] Geffner, Domke (2023), Langevin Diffusion Variational Inference.
[2] Vargas, Padhy, Blessing, Nuesken (2024), Transport meets Variational Inference: Controlled Monte
Carlo Diffusions.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, init_to_feasible
from torch import Tensor
from tqdm import tqdm

from pyro_mcvae import (
    ULA,
    AdaptiveStepSize,
    CompiledELBO,
    LearnedSchedule,
    LearnedStepSize,
    ScoreNetwork,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.kernels import Kernel, Proposal, State, Target, log_momentum_ratio
from tests.benchmarks.growing import GrowingFile

Model = Callable[[], None]


def logistic(path: Path) -> Model:
    """Logistic regression with a standard normal prior on standardised columns."""
    data = np.load(path)
    x, scale = data["x"] - data["x"].mean(0), data["x"].std(0)
    x = x / np.where(scale == 0, 1, scale)
    inputs = torch.tensor(np.hstack([np.ones((len(x), 1)), x]), dtype=torch.float32)
    y = torch.tensor(data["y"], dtype=torch.float32)

    def model() -> None:
        prior = dist.Normal(torch.zeros(inputs.shape[1]), 1.0).to_event(1)
        w = pyro.sample("w", prior)
        with pyro.plate("rows", len(y)):
            logits = (inputs @ w.unsqueeze(-1)).squeeze(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    return model


# The first and the last ten of thirty positions, which TensorFlow Probability's inference gym drew.
FIRST = [0.21592641, 0.118771404, -0.07945447, 0.037677474, -0.27885845]
FIRST += [-0.1484156, -0.3250906, -0.22957903, -0.44110894, -0.09830782]
LAST = [-0.8786016, -0.83736074, -0.7384849, -0.8939254, -0.7774566]
LAST += [-0.70238715, -0.87771565, -0.51853573, -0.6948214, -0.6202789]


def brownian(_: Path) -> Model:
    """Brownian motion with unknown scales, and no observations in the middle."""
    first, last = torch.tensor(FIRST), torch.tensor(LAST)

    def model() -> None:
        innovation = pyro.sample("innovation", dist.LogNormal(0.0, 2.0))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 2.0)).unsqueeze(-1)
        factor = innovation[..., None, None] * torch.ones(30, 30).tril()
        z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(30), scale_tril=factor))
        pyro.sample("first", dist.Normal(z[..., :10], noise).to_event(1), obs=first)
        pyro.sample("last", dist.Normal(z[..., 20:], noise).to_event(1), obs=last)

    return model


# Crowder (1978), Beta-binomial Anova for Proportions: germinated of all seeds on 21 plates.
GERMINATED = [10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3]
SEEDS = [39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7]
KIND = [0.0] * 11 + [1.0] * 10
EXTRACT = [0.0] * 5 + [1.0] * 6 + [0.0] * 5 + [1.0] * 5


def seeds(_: Path) -> Model:
    """Logistic regression with a random effect for each plate."""
    germinated, total = torch.tensor(GERMINATED).float(), torch.tensor(SEEDS).float()
    kind, extract = torch.tensor(KIND), torch.tensor(EXTRACT)
    design = torch.stack([torch.ones(21), kind, extract, kind * extract])

    def model() -> None:
        precision = pyro.sample("precision", dist.Gamma(0.01, 0.01)).unsqueeze(-1)
        a = pyro.sample("a", dist.Normal(torch.zeros(4), 10.0).to_event(1))
        effect = dist.Normal(torch.zeros(21), precision.rsqrt()).to_event(1)
        logits = (a.unsqueeze(-2) @ design).squeeze(-2) + pyro.sample("b", effect)
        plates = dist.Binomial(total, logits=logits).to_event(1)
        pyro.sample("germinated", plates, obs=germinated)

    return model


# The first and the last ten of thirty convections of a Lorenz system, from the inference gym too.
CONVECTION = [-0.2761459, 0.18631345, 0.1467675, -1.3148443, -1.2150469]
CONVECTION += [-0.44544014, -0.5505127, -0.9422926, -1.9986963, 0.13876402]
CONVECTION += [-16.095385, -18.901144, -21.515736, -22.736586, -23.451488]
CONVECTION += [-21.417793, -15.236895, -7.6766376, -0.19389218, 6.26647]


class LorenzPath(dist.TorchDistribution):
    """Thirty states of a Lorenz system that noise drives, by steps of 0.02: shape [30, 3]."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = dist.constraints.independent(dist.constraints.real, 2)

    def __init__(self) -> None:
        super().__init__(event_shape=torch.Size((30, 3)), validate_args=False)

    def following(self, state: Tensor) -> Any:
        x, y, z = state.unbind(-1)
        slope = torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)
        return dist.Normal(state + 0.02 * slope, 0.1 * 0.02**0.5)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        states = [torch.randn(*sample_shape, 3)]
        while len(states) < 30:
            states.append(self.following(states[-1]).sample())
        return torch.stack(states, -2)

    def log_prob(self, value: Tensor) -> Tensor:
        start = dist.Normal(0.0, 1.0).log_prob(value[..., 0, :]).sum(-1)
        steps = self.following(value[..., :-1, :]).log_prob(value[..., 1:, :])
        return start + steps.sum((-1, -2))


def convection(_: Path) -> Model:
    """A Lorenz system, of which one coordinate is observed with noise, but not in the middle."""
    observed = torch.tensor(CONVECTION)

    def model() -> None:
        x = pyro.sample("path", LorenzPath())[..., 0]
        seen = torch.cat([x[..., :10], x[..., 20:]], -1)
        pyro.sample("seen", dist.Normal(seen, 1.0).to_event(1), obs=observed)

    return model


MODELS: dict[str, Callable[[Path], Model]] = {
    "ionosphere": lambda root: logistic(root / "ionosphere.npz"),
    "sonar": lambda root: logistic(root / "sonar.npz"),
    "brownian": brownian,
    "seeds": seeds,
    "convection": convection,
}


class Controlled(Kernel):
    """
    A controlled Langevin diffusion [2]: a learned drift u moves the chain forward, and is
    subtracted in the reversal.

    Forward N(z + eta (grad log gamma(z) + u(z)), 2 eta), reversed N(z' + eta (grad log gamma(z') -
    u(z')), 2 eta).
    """

    initial_step_size, step_size_power, target_acceptance = 0.01, 2.0, 0.9

    def __init__(self, steps: int) -> None:
        super().__init__(LearnedStepSize(AdaptiveStepSize(), steps))
        self.network = ScoreNetwork(steps)

    def drift(self, z: Tensor, target: Target) -> Tensor:
        return self.network(z, torch.zeros_like(z), target.transition)

    def propose(self, state: State, target: Target) -> Proposal:
        z, noise, eta = state.position, target.noise(state), self.step_size(target.transition)
        slope = target.gradient(state) + self.drift(z, target)
        new = target.evaluate(z + eta * slope + (2 * eta).sqrt() * noise)
        back = target.gradient(new) - self.drift(new.position, target)
        reverse = (z - new.position - eta * back) / (2 * eta).sqrt()
        return Proposal(new, log_momentum_ratio(reverse, noise))


def chain(kernel: Any, steps: int) -> TraceSIS_ELBO:
    return TraceSIS_ELBO(kernel=kernel, schedule=LearnedSchedule(steps), defensive=0.01)


def ula(steps: int) -> TraceSIS_ELBO:
    return chain(ULA(LearnedStepSize(AdaptiveStepSize(), steps)), steps)


def underdamped(steps: int, mass: bool = False, network: bool = False) -> TraceSIS_ELBO:
    reverse = ScoreNetwork(steps) if network else None
    kernel = UnderdampedLangevin.trained(steps, full_mass=mass, reverse=reverse)
    return chain(kernel, steps)


METHODS: dict[str, Callable[[int], Any]] = {
    "ELBO": lambda _: TraceSGVB_ELBO(),
    "full-rank ELBO": lambda _: TraceSGVB_ELBO(),
    "full-rank default": TraceSIS_ELBO,
    "ULA": ula,
    "controlled": lambda steps: chain(Controlled(steps), steps),
    "default": TraceSIS_ELBO,
    "network": lambda steps: underdamped(steps, network=True),
    "mass": lambda steps: underdamped(steps, mass=True),
    "mass and network": lambda steps: underdamped(steps, mass=True, network=True),
}
# The guides that the ELBO has trained in this process.
TRAINED: dict[tuple[str, type], dict[str, Tensor]] = {}
WITHOUT_CHAIN = ("ELBO", "full-rank ELBO")


@dataclass(frozen=True)
class Row:
    """
    :ivar steps: K, the number of transitions; 0 without a chain.
    :ivar rate: the learning rate.
    :ivar milliseconds: CPU time of a training step, compilations left out.
    """

    model: str
    method: str
    steps: int
    rate: float
    training: int
    seed: int
    bound: float
    error: float
    milliseconds: float

    @property
    def cell(self) -> tuple[str, str, int]:
        return self.model, self.method, self.steps


def run(args: argparse.Namespace, model_name: str, method: str, steps: int, rate: float) -> Row:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = MODELS[model_name](args.data_root)
    kind = AutoMultivariateNormal if method.startswith("full-rank") else AutoDiagonalNormal
    guide = kind(model, init_loc_fn=init_to_feasible, init_scale=0.1)
    guide()  # which creates its parameters
    if (model_name, kind) not in TRAINED:
        first = CompiledELBO(TraceSGVB_ELBO(num_particles=5), backend="eager")
        train(SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), first), args.guide_training, "guide")
        TRAINED[model_name, kind] = copy.deepcopy(guide.state_dict())
    guide.load_state_dict(TRAINED[model_name, kind])
    loss = METHODS[method](steps)
    loss.num_particles = 5
    svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), CompiledELBO(loss, args.backend))
    label = f"{model_name}, {method}, K = {steps}, rate {rate:g}"
    milliseconds = train(svi, args.training, label)
    weights = evaluate(loss, model, guide)
    bound, error = float(weights.mean()), float(weights.std() / len(weights) ** 0.5)
    key = (model_name, method, steps, rate, args.training, args.seed)
    return Row(*key, bound, error, milliseconds)


def train(svi: SVI, count: int, label: str) -> float:
    """Train, and return the CPU milliseconds of a step of the last half."""
    begin = 0.0
    for step in tqdm(range(count), label, unit="step"):
        if step == count // 2:
            begin = time.process_time()
        svi.step()
    return 1e3 * (time.process_time() - begin) / (count - count // 2)


@torch.no_grad()
def evaluate(loss: Any, model: Model, guide: Any) -> Tensor:
    """The log weights of 4,000 chains, or draws."""
    if not isinstance(loss, TraceSIS_ELBO):
        loss.num_particles = 1
        return -torch.tensor([loss.loss(model, guide) for _ in range(4000)])
    loss.num_particles, found = 1000, []
    loss.eval()
    for _ in range(4):
        loss.loss(model, guide)
        found.append(loss.last_step.log_weight)
    return torch.cat(found)


def best(rows: list[Row]) -> dict[tuple[str, str, int], Row]:
    """Of each cell the better learning rate."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        if row.cell not in found or row.bound > found[row.cell].bound:
            found[row.cell] = row
    return found


def table(rows: list[Row]) -> str:
    """Markdown; cells without a run are empty."""
    found = best(rows)
    methods = [m for m in METHODS if any(row.method == m for row in rows)]
    lines = [["model", "K", *methods], ["---", "---:", *["---:"] * len(methods)]]
    for model, steps in sorted({(r.model, r.steps) for r in rows}):
        cells = [found.get((model, m, steps)) for m in methods]
        shown = [f"{row.bound:.2f} ± {row.error:.2f}" if row else "" for row in cells]
        lines.append([model, str(steps) if steps else "no chain", *shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(rows: list[Row], path: Path) -> None:
    """Bound over K, one panel for each model and one line for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = best(rows)
    models = [m for m in MODELS if any(row.model == m for row in rows)]
    drawn, axes = pyplot.subplots(1, len(models), figsize=(3.0 * len(models), 3), squeeze=False)
    for panel, model in zip(axes[0], models, strict=True):
        for i, method in enumerate(METHODS):
            line = sorted(
                (k, r.bound) for (m, n, k), r in found.items() if (m, n) == (model, method)
            )
            if line and method in WITHOUT_CHAIN:
                panel.axhline(line[0][1], color=f"C{i}", linestyle="--", label=method)
            elif line:
                panel.plot(*zip(*line, strict=True), "o-", color=f"C{i}", label=method)
        panel.set(xscale="log", xlim=(6, 160), title=model, xlabel="K")
        panel.set_xticks([8, 16, 32, 64, 128], map(str, [8, 16, 32, 64, 128]))
        panel.minorticks_off()
    axes[0][0].set_ylabel("bound, nats")
    shown = [panel.get_legend_handles_labels() for panel in axes[0]]
    legend = {label: handle for pair in shown for handle, label in zip(*pair, strict=True)}
    drawn.tight_layout(rect=(0, 0.08, 1, 1))
    drawn.legend(legend.values(), legend, loc="lower center", ncols=8, fontsize=8)
    drawn.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("frontier.csv"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.001, 0.003])
    parser.add_argument("--training", type=int, default=10_000, help="steps of each run")
    parser.add_argument("--guide-training", type=int, default=5_000, help="steps before it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor", help="of CompiledELBO")
    parser.add_argument("--table", action="store_true", help="print what the file has, run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    file = GrowingFile(args.out, Row)
    known = {(*row.cell, row.rate, row.training, row.seed) for row in file.all}
    for steps in [] if args.table else args.steps:
        for model in args.models:
            for method in args.methods:
                count = 0 if method in WITHOUT_CHAIN else steps
                for rate in args.rates:
                    key = (model, method, count, rate, args.training, args.seed)
                    if key not in known:
                        known.add(key)
                        file.add(run(args, model, method, count, rate))
    print(table(file.all))
    if args.figure is not None:
        figure(file.all, args.figure)


if __name__ == "__main__":
    main()
