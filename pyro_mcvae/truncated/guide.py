"""TruncatedPosterior: the guide that keeps the best states of each datum."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_mcvae.ops import distributed as ranks
from pyro_mcvae.ops.checks import FixedOptions, check_count, check_flag
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program
from pyro_mcvae.truncated.evolution import EvolutionaryUpdate
from pyro_mcvae.truncated.joint import GuideDraws, JointRuns, Layouts, find_layouts, run_guide
from pyro_mcvae.truncated.layout import DataIndex, StateLayout, StatesError
from pyro_mcvae.truncated.posterior import StatePosterior, apart, sample_states
from pyro_mcvae.truncated.search import Population, PriorDraws, Proposals, evaluate, evolve, propose
from pyro_mcvae.truncated.states import StateSpace, distinct_states

# For which observations the states of a datum were searched, to tell other data in its place.

# Two sums over the same observations differ by rounding, where a minibatch is computed otherwise.
_TOLERANCE = 1e-6
_GOLDEN = (math.sqrt(5) - 1) / 2


class DataRecord:
    """The fingerprint of each datum's observations at its last search; NaN before any."""

    def __init__(self) -> None:
        self._searched: Tensor | None = None
        self._warned = False

    def compare(self, runs: JointRuns, sample: WeightedParticles, searched: bool) -> Tensor | None:
        """
        Compare the observations of a minibatch with those that its states were searched for.

        :param searched: whether states are now searched for these: then others are only told of.
        :returns: their fingerprints; None where no observation is decided by the data alone.
        :raises StatesError: where states were searched for others.
        """
        found, known = _fingerprints(runs.layouts, sample), self._searched
        if found is None or known is None or not is_validation_enabled():
            return found
        if known.device != found.device or (searched and self._warned):
            return found
        index, layout = runs.data.index, runs.layouts.layout
        before = known.index_select(0, index.to(found.device))
        # Of what is not known a comparison is False.
        scale = torch.maximum(before[:, 1], found[:, 1])
        other = (before[:, 0] - found[:, 0]).abs() > _TOLERANCE * scale
        if not bool(other.any()):
            return found
        names, many = sorted(map(repr, runs.layouts.given)), len(runs.layouts.given) > 1
        message = (
            f"site{'s' * many} {', '.join(names)} {'are' if many else 'is'} observed with other "
            f"values than before at datum {int(index[other.to(index.device)][0])} of plate "
            f"'{layout.plates[-1].name}': states belong to a datum by its index, and these were "
            f"searched for other observations. For minibatches pass their indices, "
            f"pyro.plate(..., N, subsample=index); for held-out data make their "
            f"guide by guide.for_data(...); for data that are drawn anew in the same places pass "
            f"fixed_data=False"
        )
        if not searched:
            raise StatesError(message)
        self._warned = True
        warnings.warn(message, stacklevel=4)
        return found

    def keep(self, runs: JointRuns, found: Tensor) -> None:
        """Record the observations that states were searched for."""
        known = self._searched
        if known is None or known.device != found.device:
            known = found.new_full((runs.layouts.layout.num_data, 2), torch.nan)
        self._searched = known.index_copy(0, runs.data.index.to(found.device), found)


def _fingerprints(layouts: Layouts, sample: WeightedParticles) -> Tensor | None:
    """
    A sum over the observations of each datum, with weights that no permutation keeps.

    :returns: the sum and the scale of its summands, float64, shape ``[E, 2]``; None where nothing
        is observed that the data alone decide.
    """
    run, dims = sample.runs[0], sample.blocks[0].dims
    sizes = sample.shapes[0]
    parts: list[Tensor] = []
    for term in run.terms:
        if term.in_guide or term.key.name not in layouts.given or not sample.is_local(term):
            continue
        value, depth = term.site["value"].detach(), term.site["fn"].event_dim + run.nesting
        value = value.reshape((1,) * (depth - value.dim()) + value.shape)
        value = value.movedim([run.nesting + d for d in dims], list(range(len(dims))))
        value = value.expand(*sizes, *value.shape[len(dims) :]).reshape(math.prod(sizes), -1)
        value = value.double().nan_to_num()
        at = torch.arange(value.shape[1], dtype=value.dtype, device=value.device)
        place = 1 + (_GOLDEN * (at + 1) * (len(parts) + 1)) % 1
        parts.append(torch.stack([value @ place, value.abs() @ place], dim=-1))
    return torch.stack(parts).sum(0) if parts else None


# Truncated posteriors: a set of discrete states for every datum, as a Pyro guide.

Args = tuple[object, ...]
Kwargs = dict[str, object]

_SETTINGS = "evolution guide proposals exchange fixed_data vectorize max_plate_nesting"
# The layouts of so many programs are kept: an objective's, and one's own questions.
_KEPT = 4
# The data of a chunk of the first states, so that unpacked ones never fill the memory.
_CHUNK = 1 << 24


class TruncatedPosterior(FixedOptions, nn.Module):
    r"""
    A guide for the discrete latents of a data plate: for each datum a set
    :math:`\Phi_n` of S distinct states and, on it, the exact posterior's proportions [1, 2],

    .. math::
        q_n(z) = \frac{p(x_n, z)}{\sum_{z' \in \Phi_n} p(x_n, z')}, \quad z \in \Phi_n, \qquad
        F = \sum_n \log \sum_{z \in \Phi_n} p(x_n, z) \le \sum_n \log p(x_n) .

    No encoder, no relaxation and no sampling: :class:`TraceTruncated_ELBO` improves the sets by
    evolutionary search, and the model by the gradient of F. With :math:`S = \prod_d K_d` states,
    all that there are, F is the exact log evidence.

    The guide finds the discrete sites and their plates by running the model, like an AutoGuide:
    one or several sites in one plate, and sites in plates nested inside the data plate (their
    values belong to the datum's state). Bernoulli, categorical, one-hot and count sites are
    searched (counts without an upper bound: below 65,536). Which data a minibatch holds is read
    from the plate: give it indices, ``pyro.plate("data", N, subsample=index)``, or let it draw them
    by ``subsample_size``. States that make the data impossible (fewer animals than a Binomial has
    counted) have density zero. Every other latent is drawn by ``guide``, once per step, and enters
    as in the plain ELBO; one draw of a datum's latents serves all of its states, so that they may
    not depend on its discrete ones.

    States belong to a datum by its index, and were searched for its observations. A search that
    meets other observations there warns, once; whatever else is asked of the guide is refused for
    them: :meth:`for_data` makes the guide of other data. What was searched for is not saved
    with the states, and not compared where all states are kept or Pyro's validation is off.

    As a function of the model's arguments it is a Pyro guide like others, which draws from q_n,
    for :class:`~pyro.infer.Predictive` say; :meth:`posterior` answers what is asked of a posterior.

    The states are buffers, eight Bernoulli entries to the byte: they move with ``.to``, and are
    saved and loaded by ``state_dict``. In training mode a step of :class:`TraceTruncated_ELBO`
    searches; ``guide.eval()`` keeps the states as they are. In a distributed run each rank searches
    for its own minibatch, and the ranks exchange what they found at every training step: all of
    them have all states, so that any assignment of data to ranks will do, and a checkpoint loads
    on any number of them.

    With ``exchange=False`` nothing is exchanged: each rank has a model of its own data, and the
    states of these only.

    :param model: the model.
    :param int num_states: S, the same for all data.
    :param EvolutionaryUpdate evolution: the search of one step.
    :param guide: a guide for the latents that are not searched, called with the model's
        arguments: a function, or an AutoGuide of the model with the discrete sites hidden.
    :param proposals: further candidates of each step: :class:`PriorDraws`, or a function of the
        model's arguments (an encoder, say) that returns values ``[C, *batch, *event]`` of each
        discrete site.
    :param bool exchange: whether the ranks of a distributed run have the same data and states.
    :param bool fixed_data: whether a datum's observations are the same at every call, so that
        others in its place are refused; False for data that are drawn again (by a binarisation,
        say). What the model itself draws or computes from parameters is never compared.
    :param vectorize: run the model once for all states; None where that has a loop's numbers, as
        ``vectorize_particles`` of :class:`MonteCarloELBO`.
    :param max_plate_nesting: how many batch dims the programs' plates occupy; found out if left
        out.
    :raises ValueError: if ``num_states`` is not an int of at least 1. On the first call: for a
        model without discrete sites or with continuous ones that ``guide`` does not draw, for
        discrete sites that no data plate encloses, that are masked or lie in data plates side by
        side, and if ``num_states`` exceeds the number of states. On any call: for a changed number
        of data, other observations than those that were searched for, and indices that are out of
        range.

    [1] Lücke, Forster (2019), *k-means as a variational EM approximation of Gaussian mixture
    models*; Lücke (2019), *Truncated Variational Expectation Maximization*.
    [2] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
    with Binary Latents*.

    Example::

        >>> weight = torch.nn.Parameter(torch.randn(4, 6))
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(4)).to_event(1))
        ...         pyro.sample("x", dist.Normal(z @ weight, 0.5).to_event(1), obs=x)
        >>> x = torch.randn(10, 6)
        >>> guide = TruncatedPosterior(model, num_states=16)  # 2^4: exact inference
        >>> elbo = TraceTruncated_ELBO()(model, guide)
        >>> optimizer = torch.optim.Adam([weight], lr=0.05)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = elbo(x)
        ...     loss.backward()
        ...     optimizer.step()
        >>> guide.posterior(x).marginals()["z"].shape
        torch.Size([10, 4])
    """

    _assignable = frozenset({"evolution", "proposals"})

    def __init__(
        self,
        model: Program,
        num_states: int = 64,
        evolution: EvolutionaryUpdate | None = None,
        guide: Program | None = None,
        proposals: PriorDraws | Proposals | None = None,
        *,
        exchange: bool = True,
        fixed_data: bool = True,
        vectorize: bool | None = None,
        max_plate_nesting: float = math.inf,
    ) -> None:
        super().__init__()
        self.num_states = check_count("num_states", num_states)
        if evolution is not None and not isinstance(evolution, EvolutionaryUpdate):
            raise ValueError(f"evolution must be an EvolutionaryUpdate, got {evolution!r}")
        _check_functions(guide=guide, proposals=proposals)
        check_flag("vectorize", vectorize, or_none=True)
        check_flag("exchange", exchange)
        check_flag("fixed_data", fixed_data)
        # In tuples: a model that is a module would become a part of this one.
        self._model = (model,)
        self.evolution = EvolutionaryUpdate() if evolution is None else evolution
        self.guide, self.proposals, self.exchange = guide, proposals, exchange
        self.vectorize, self.max_plate_nesting = vectorize, max_plate_nesting
        # Of the programs that it was called with, the latest first.
        self._found: list[tuple[object, Layouts]] = []
        self._agreed = False
        self.fixed_data = fixed_data
        self._record = DataRecord()
        self._own = ParticleSampler(2, vectorize, max_plate_nesting)

    def __getstate__(self) -> dict[str, object]:
        # Of a copy the layouts are found again.
        return {**self.__dict__, "_found": []}

    @property
    def has_states(self) -> bool:
        """Whether there are states: since the first call, or since they were loaded."""
        return any(name.startswith("states_") for name in self._buffers)

    @property
    def model(self) -> Program:
        return self._model[0]

    def fit(self, *args: object, num_steps: int = 1, **kwargs: object) -> Tensor:
        """
        E-steps alone: the states improve, the parameters stay.

        :param args: the model's arguments.
        :param int num_steps: how many.
        :returns: the free energy of each datum, shape ``[*plates]``, in nats.
        """
        for _ in range(check_count("num_steps", num_steps, 0)):
            with apart(), torch.no_grad():
                step = EStep(self, Programs(self.model, self, args, kwargs), self._own)
                population, _ = step.evaluate(searched=True)
                step.keep(step.search(population))
        return self.posterior(*args, **kwargs).free_energy

    def for_data(self, *args: object, num_steps: int = 50, **kwargs: object) -> TruncatedPosterior:
        """
        The truncated posterior of other data, held out say, under the same model as it is now: with
        states of its own, searched for ``num_steps`` E-steps and kept as they then are
        (evaluation mode). Modules are in evaluation mode meanwhile, and this guide stays as it is.

        :param args: the model's arguments on these data.
        :param int num_steps: how many.
        :raises ValueError: as at a first call; and if ``guide`` cannot be called with other data,
            as an AutoGuide of latents inside the data's plates.

        Example::

            >>> def model(x):
            ...     with pyro.plate("data", len(x)):
            ...         k = pyro.sample("k", dist.Categorical(torch.ones(5) / 5))
            ...         pyro.sample("x", dist.Normal(k, 1.0), obs=x)
            >>> guide, x_test = TruncatedPosterior(model, num_states=2), torch.tensor([0.5, 3.0])
            >>> log_evidence(model, guide.for_data(x_test), x_test).log_evidence.shape
            torch.Size([2])
        """
        num_steps = check_count("num_steps", num_steps, 0)
        other = new_posterior(self, self.model)
        with evaluation_modules(find_modules(self.model, other)):
            other.fit(*args, num_steps=num_steps, **kwargs)
        return other.eval()

    def posterior(self, *args: object, **kwargs: object) -> StatePosterior:
        """
        The truncated posterior of the data of one call, under the present parameters and, where
        ``guide`` draws other latents, given one new draw of them.

        :param args: the model's arguments.
        """
        return self._posterior(args, kwargs)

    def _posterior(
        self, args: Args, kwargs: Kwargs, given: GuideDraws | None = None
    ) -> StatePosterior:
        with apart(), torch.no_grad():
            step = EStep(self, Programs(self.model, self, args, kwargs), self._own, given)
            return StatePosterior(step.runs, *step.evaluate())

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """
        Draw from the truncated posterior, as a guide: what ``guide`` draws; given that, an
        auxiliary site for the index of the state in each data plate, and a point mass at each
        discrete site.

        :returns: the values of the discrete sites.
        """
        guide_trace = run_guide(self.guide, args, kwargs)
        with apart(), torch.no_grad():
            nesting = self._layouts(self.model, self._own, args, kwargs).nesting
        return sample_states(partial(self._posterior, args, kwargs), guide_trace, nesting)

    def forget(self) -> None:
        """Drop all states, as if the guide had never been called; the next call makes others."""
        for name in [n for n in self._buffers if n.startswith("states_")]:
            del self._buffers[name]
        self._agreed, self._found, self._record = False, [], DataRecord()

    def _layouts(
        self, model: Program, sampler: ParticleSampler, args: Args, kwargs: Kwargs
    ) -> Layouts:
        """What the model was found to be; at its first call the first states are made."""
        key = model, self.guide, sampler
        for known, layouts in self._found:
            if known == key:
                return layouts
        layouts = find_layouts(sampler, model, self.guide, args, kwargs)
        self._prepare(layouts.layout, layouts.bank)
        self._found = [(key, layouts), *self._found[: _KEPT - 1]]
        return layouts

    # Not as tensors of the inference mode, in which no later step could write.
    @torch.inference_mode(False)
    def _prepare(self, layout: StateLayout, bank: Tensor) -> None:
        """Make the first states, or check those that were loaded."""
        name, space = f"states_{layout.name}", layout.space
        if self.num_states > space.cardinality:
            raise ValueError(
                f"num_states={self.num_states}, but {', '.join(map(repr, layout.sites))} of plate "
                f"'{layout.plates[-1].name}' have {space.cardinality} states in all: pass "
                f"num_states={space.cardinality}, which is exact inference"
            )
        if name in self._buffers:
            self._check(layout, tuple(self.get_buffer(name).shape))
            # Loaded before there were states of its own, which would have been where draws are.
            self._buffers[name] = self.get_buffer(name).to(bank.device)
        else:
            made = _first_states(space, bank, layout.num_data, self.num_states)
            self.register_buffer(name, made)

    def _check(self, layout: StateLayout, found: tuple[int, ...]) -> None:
        wanted = (layout.num_data, self.num_states, layout.space.num_bytes)
        if found[1:] == wanted[1:] and found != wanted:
            raise ValueError(
                f"plate '{layout.plates[-1].name}' has {wanted[0]} data, and states are kept "
                f"for {found[0]}. For minibatches pass their indices, pyro.plate("
                f"'{layout.plates[-1].name}', {found[0]}, subsample=index); for other data "
                f"(held out, say) make their guide by guide.for_data(...)"
            )
        if found != wanted:
            raise ValueError(
                f"the states of plate {layout.name!r} have shape {found} (data, states, "
                f"bytes), and the model needs {wanted}: they were made for other data or "
                f"another num_states; make a new TruncatedPosterior"
            )

    @torch.inference_mode(False)
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._record = DataRecord()
        # States are made at the first call, which a loaded guide may not have had.
        for key, value in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix + "states_") and "." not in name:
                kept = self._buffers.get(name)
                if kept is None or kept.shape != value.shape:
                    self.register_buffer(name, torch.empty_like(value))
                    self._found = []
        super()._load_from_state_dict(state_dict, prefix, *rest)


class EStep:
    """
    The states of a truncated posterior for one minibatch: evaluated, searched and kept.

    The first call finds the structure and makes the first states.

    :param programs: the model, which others may have wrapped, and its arguments; their guide may
        be this one in wrappers.
    :param sampler: runs the model.
    :param given: draws of the guide's own ``guide`` that are made already.
    """

    def __init__(
        self,
        guide: TruncatedPosterior,
        programs: Programs,
        sampler: ParticleSampler,
        given: GuideDraws | None = None,
    ) -> None:
        model, args, kwargs = programs.model, programs.args, dict(programs.kwargs)
        layouts = guide._layouts(model, sampler, args, kwargs)
        self._guide, self._layout = guide, layouts.layout
        self._states = guide.get_buffer(f"states_{layouts.layout.name}")
        self._observed: Tensor | None = None
        self.runs = JointRuns(sampler, layouts, model, guide.guide, args, kwargs, given)

    def agree(self) -> None:
        """Take the first states of rank 0: each rank of a distributed run has drawn others."""
        if self._guide.exchange and not self._guide._agreed:
            self._guide._agreed = True
            ranks.from_first_rank(self._states)

    def evaluate(self, searched: bool = False) -> tuple[Population, WeightedParticles]:
        """
        The states as they are, with their log joint.

        :param searched: whether states will be searched for these data, and kept.
        :raises ValueError: where states are kept for other data, and are not searched for these.
        """
        count = self._guide.num_states
        population, sample = evaluate(self.runs, self._minibatch, count)
        # All states that there are serve whatever data.
        if self._guide.fixed_data and count < self._layout.space.cardinality:
            self._observed = self._guide._record.compare(self.runs, sample, searched)
        return population, sample

    def search(self, population: Population) -> Population:
        """Better states, which are not kept yet."""
        if self._guide.proposals is not None:
            population = propose(self.runs, population, self._guide.proposals)
        return evolve(self.runs, population, self._guide.evolution)

    def keep(self, population: Population, shared: bool = False) -> None:
        """
        Keep the states of the minibatch.

        :param bool shared: keep also those of the other ranks' minibatches, and let them have
            these, where the ranks exchange states.
        """
        kept = self._states
        index = self.runs.data.index.to(kept.device)
        # Where the model gave NaN nothing was learned about the states.
        usable = ~population.log_joint.isnan().any(1).to(kept.device)
        before = kept.index_select(0, index)
        packed = torch.where(usable[:, None, None], population.packed.to(kept), before)
        if shared and self._guide.exchange:
            index, packed = map(ranks.concat_over_ranks, (index, packed))
        index, packed = _settle(index, packed)
        with torch.no_grad():
            kept.index_copy_(0, index, packed)
        if self._observed is not None:
            self._guide._record.keep(self.runs, self._observed)

    def _minibatch(self, data: DataIndex) -> Tensor:
        """The packed states of a minibatch, ``[E, S, bytes]``."""
        return self._states.index_select(0, data.index.to(self._states.device))


def new_posterior(guide: TruncatedPosterior, model: Program) -> TruncatedPosterior:
    """One with the same settings for another model, which has no states yet."""
    settings: dict[str, Any] = {name: getattr(guide, name) for name in _SETTINGS.split()}
    return TruncatedPosterior(model, guide.num_states, **settings)


def _check_functions(**given: object) -> None:
    for name, value in given.items():
        if isinstance(value, type) or not (callable(value) or isinstance(value, PriorDraws | None)):
            raise ValueError(
                f"{name} must be a function of the model's arguments"
                f"{', or PriorDraws()' if name == 'proposals' else ''}, or None, got {value!r}"
            )


def _first_states(space: StateSpace, bank: Tensor, num_data: int, count: int) -> Tensor:
    """Distinct states for each datum, drawn from the model's, packed."""
    step = max(1, _CHUNK // max(1, 2 * count * len(space)))
    parts = [torch.empty(0, count, space.num_bytes, dtype=torch.uint8, device=bank.device)]
    for begin in range(0, num_data, step):
        pick = torch.randint(len(bank), (min(step, num_data - begin), count), device=bank.device)
        parts.append(space.pack(distinct_states(space, bank[pick], count)))
    return torch.cat(parts)


def _settle(index: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """A datum that stands twice in a minibatch gets the states of its first place."""
    ordered, order = index.sort(stable=True)
    position = torch.arange(len(index), device=index.device)
    again = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 0))
    first = position.masked_fill(again, 0).cummax(0).values
    return ordered, packed.index_select(0, order[first])
