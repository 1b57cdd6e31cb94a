"""
Random programs of which everything is known: trees of plates with categories and data.

Three families of discrete distributions; logits and locations depend on the categories drawn
before. Few enough are the states that sums over all of them give the evidence, the posterior, and
every objective's mean::

    model, guide, log_evidence = solved(seed=3)
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from tests.random_programs import Draws, Plate, Program, Site


@dataclass(kw_only=True)
class Choice(Site):
    """
    A category, or normal data, by a table of the categories of others.

    :ivar table: of logits, or of a location: ``[*batch, *categories of the parents, categories]``.
    """

    family: str
    parents: tuple[str, ...]
    table: Tensor
    marked: bool = False

    @property
    def size(self) -> int:
        return 1

    def cut(self, cut: Callable[[Tensor, int], Tensor]) -> "Choice":
        site = cast("Choice", super().cut(cut))
        value = None if self.value is None else cut(self.value, 0)
        return replace(site, value=value, table=cut(self.table, len(self.parents) + 1))

    def distribution(self, draws: dict[str, Tensor]) -> dist.Distribution:
        behind = range(len(self.batch) - 1, -1, -1)
        places = [
            torch.arange(n).reshape(-1, *[1] * k) for n, k in zip(self.batch, behind, strict=True)
        ]
        row = self.table[(*places, *(draws[p] for p in self.parents))]
        if self.family == "Normal":
            return dist.Normal(row.squeeze(-1), 1.0)
        if self.family == "Bernoulli":
            return dist.Bernoulli(logits=row[..., 1] - row[..., 0])
        return getattr(dist, self.family)(logits=row)

    def state(self, value: Tensor) -> Tensor:
        if self.family == "Normal":
            return value
        return value.argmax(-1) if self.family == "OneHotCategorical" else value.long()

    def value_of(self, state: Tensor) -> Tensor:
        if self.family == "OneHotCategorical":
            return torch.eye(self.table.shape[-1])[state]
        return state.double() if self.family == "Bernoulli" else state

    def run(self, draws: dict[str, Tensor]) -> None:
        """With a mark for enumeration, or without."""
        marks = {"enumerate": "parallel"} if self.marked else {}
        with poutine.infer_config(config_fn=lambda site: marks):
            super().run(draws)


class DiscreteProgram(Program):
    """One whose latents have few values."""

    def states(self) -> Tensor:
        """All of them: ``[states, draws]``."""
        counts = [s.table.shape[-1] for s in self.latents for _ in range(math.prod(s.batch))]
        return torch.tensor(list(itertools.product(*map(range, counts))))

    def log_density(self, states: Tensor) -> Tensor:
        """Of each of them, by Pyro alone, with a dim in front of all plates."""
        nesting = max(len(s.batch) for s in self.root)
        values = {}
        for s in self.latents:
            dims = (*[1] * (nesting - len(s.batch)), *s.batch)
            mine = states[:, self.index()[s.name].flatten()].reshape(-1, *dims)
            values[s.name] = s.value_of(mine)
        with pyro.validation_enabled(False):
            trace = poutine.trace(poutine.condition(self, values)).get_trace()
        trace.compute_log_prob()
        total = torch.zeros(len(states), dtype=torch.float64)
        for name in trace.observation_nodes:
            result = trace.nodes[name]["log_prob"]
            alone = result.dim() <= nesting
            total = total + (result.sum() if alone else result.reshape(len(states), -1).sum(-1))
        return total


class ChoiceDraws(Draws):
    """Sites whose tables depend on one or two earlier ones."""

    def _latent(self, plates: tuple[Plate, ...], parents: list[Site]) -> Choice:
        family = self._choose.choice(["Categorical", "Bernoulli", "OneHotCategorical"])
        return self._site("z", family, plates, parents)

    def _observed(self, plates: tuple[Plate, ...], parents: list[Site]) -> Choice:
        site = self._site("x", self._choose.choice(["Normal", "Categorical"]), plates, parents)
        count = site.table.shape[-1]
        if site.family == "Normal":
            return replace(site, value=self._normal(*site.batch))
        return replace(site, value=torch.randint(count, site.batch, generator=self._generator))

    def _site(
        self, kind: str, family: str, plates: tuple[Plate, ...], parents: list[Site]
    ) -> Choice:
        chosen = self._some(parents)
        count = {"Normal": 1, "Bernoulli": 2}.get(family) or self._choose.choice([2, 3])
        names = tuple(q.name for q in chosen)
        site = Choice(
            name=self._name(kind), plates=plates, family=family, parents=names, table=torch.ones(())
        )
        own = site.batch if self._choose.random() < 0.6 else [1] * len(site.batch)
        table = self._normal(*own, *[1] * len(chosen), count)
        for i, q in enumerate(chosen):
            behind = [1] * (len(chosen) - 1 - i)
            table = table + self._normal(q.table.shape[-1], *behind, count)
        return replace(site, table=table.expand(*site.batch, *table.shape[len(site.batch) :]))


class Solved(NamedTuple):
    """A model, the guide that is its posterior, and its log evidence."""

    model: DiscreteProgram
    guide: DiscreteProgram
    log_evidence: float

    def looped(self, seed: int) -> "Solved":
        """The same programs with some plates as loops."""
        return self._replace(model=self.model.looped(seed), guide=self.guide.looped(seed))

    def off(self, seed: int) -> "Solved":
        """With a guide between the posterior and chance, whose tables are leaves."""
        draws = torch.Generator().manual_seed(seed)

        def moved(site: Choice) -> Choice:
            noise = torch.randn(site.table.shape, generator=draws, dtype=torch.float64)
            # None so improbable that a few hundred draws would know nothing of it.
            likely = 0.8 * (site.table + 0.7 * noise).softmax(-1) + 0.2 / site.table.shape[-1]
            return replace(site, table=likely.log().requires_grad_())

        return self._replace(guide=DiscreteProgram(self.guide.root.changed(moved)))

    def tables(self) -> list[Tensor]:
        return [s.table for s in self.guide.latents]

    def log_weights(self) -> tuple[Tensor, Tensor]:
        """Of all states: the guide's log probabilities, and those of model over guide."""
        states = self.model.states()
        result = self.guide.log_density(states)
        return result, self.model.log_density(states) - result


def marked(model: DiscreteProgram) -> DiscreteProgram:
    """Every latent enumerated by the model, which needs one scale for all."""
    return DiscreteProgram(
        model.root.changed(lambda s: replace(s, scale=1.0, marked=s.value is None))
    )


def solved(seed: int, max_states: int = 500) -> Solved:
    """A random program of so many states at most, solved."""
    drawn = (DiscreteProgram(ChoiceDraws(1000 * seed + i).tree()) for i in itertools.count())
    return posterior(next(p for p in drawn if _num_states(p) <= max_states))


def posterior(model: DiscreteProgram) -> Solved:
    states = model.states()
    joint = model.log_density(states)
    exact = joint.logsumexp(0)
    sites: dict[str, Choice] = {}
    for site in model.latents:
        sites[site.name] = _conditional(
            site, list(sites.values()), model.index(), states, (joint - exact).exp()
        )
    guide = DiscreteProgram(model.root.changed(lambda s: sites.get(s.name)))
    assert torch.allclose(guide.log_density(states), joint - exact), "one depends on no ancestor"
    return Solved(model, guide, float(exact))


def _num_states(program: DiscreteProgram) -> int:
    return math.prod(s.table.shape[-1] ** math.prod(s.batch) for s in program.latents)


def _conditional(
    site: Choice, before: list[Choice], index: dict[str, Tensor], states: Tensor, weights: Tensor
) -> Choice:
    """A site's distribution given all earlier ones of its plates, its ancestors."""
    parents = [q for q in before if set(q.plates) <= set(site.plates)]
    counts = [q.table.shape[-1] for q in (*parents, site)]
    table = torch.zeros(*site.batch, *counts, dtype=torch.float64)
    columns = [index[q.name].squeeze(-1).expand(site.batch) for q in (*parents, site)]
    for place in itertools.product(*map(range, site.batch)):
        mine = tuple(states[:, c[place]] for c in columns)
        table[place].index_put_(mine, weights, accumulate=True)
    logits = (table / table.sum(-1, keepdim=True)).log()
    return Choice(
        name=site.name,
        plates=site.plates,
        family=site.family,
        parents=tuple(q.name for q in parents),
        table=logits,
    )
