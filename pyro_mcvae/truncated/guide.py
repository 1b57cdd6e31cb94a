"""TruncatedPosterior: a guide that stores the best states of each datum."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_mcvae.ops import distributed as ranks
from pyro_mcvae.ops.checks import FixedOptions, check_count, check_flag
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.isolation import evaluation_modules, find_modules
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program
from pyro_mcvae.truncated.data_record import DataRecord, fingerprints
from pyro_mcvae.truncated.joint import (
    GuideDraws,
    JointRuns,
    ModelLayout,
    find_model_layout,
    run_guide,
    searching,
)
from pyro_mcvae.truncated.posterior import StatePosterior, hidden_from_handlers, sample_states
from pyro_mcvae.truncated.search import EvolutionaryUpdate, Population, evolve, propose
from pyro_mcvae.truncated.states import (
    StateLayout,
    StatesError,
    StateSpace,
    distinct_states,
    other_number_of_data,
)

# Truncated posteriors: a set of discrete states of each datum, as a Pyro guide.

Args = tuple[object, ...]
Kwargs = dict[str, object]

_SETTINGS = "evolution guide prior_draws exchange fixed_data vectorize max_plate_nesting"
# The number of cached layouts: those of objectives, and of direct calls.
_MAX_LAYOUTS = 4
# The size of a chunk of the initial states, to limit the memory of unpacked states.
_CHUNK = 1 << 24


class TruncatedPosterior(FixedOptions, nn.Module):
    r"""
    A guide for the discrete latents of a data plate. Each datum has a set :math:`\Phi_n` of S
    distinct states, with probabilities proportional to the exact posterior [1, 2]:

    .. math::
        q_n(z) = \frac{p(x_n, z)}{\sum_{z' \in \Phi_n} p(x_n, z')}, \quad z \in \Phi_n, \qquad
        F = \sum_n \log \sum_{z \in \Phi_n} p(x_n, z) \le \sum_n \log p(x_n) .

    It needs no encoder, relaxation or sampling. :class:`TraceTruncated_ELBO` improves the sets by
    evolutionary search, and trains the model with the gradient of F. With all
    :math:`S = \prod_d K_d` states, F is the exact log evidence.

    Like an AutoGuide, the guide finds the discrete sites and their plates by running the model.
    There may be one or several sites in the data plate, and sites in plates inside it, whose values
    are part of the datum's state. Bernoulli, categorical, one-hot and count sites are supported
    (counts without an upper bound: below 65,536). The plate determines the data of a minibatch:
    pass indices, ``pyro.plate("data", N, subsample=index)``, or let it draw them with
    ``subsample_size``. The data must have a density at every state: the error at a Binomial whose
    total may be less than its data has the way to give such states density zero. All other latents
    are drawn by ``guide``, once per step, and contribute the plain ELBO. All states of a datum
    share one draw of its other latents, so these must not depend on the discrete latents.

    Each datum is identified by its index, and its states were searched for its observations. A use
    of the guide with other observations raises an error. Use :meth:`for_data` to create a guide for
    other data. The observations are not saved with the states. They are not compared if all states
    are stored, or if Pyro's validation is off.

    If called with the arguments of the model, it is an ordinary Pyro guide, which draws from q_n
    (for :class:`~pyro.infer.Predictive`). :meth:`posterior` returns expectations and marginals.

    The states are buffers, with eight Bernoulli entries per byte: they move with ``.to``, and are
    saved and loaded by ``state_dict``. In training mode a step of :class:`TraceTruncated_ELBO`
    searches; after ``guide.eval()`` the states do not change. In a distributed run each rank
    searches for its minibatch, and the ranks exchange their results at every training step. All
    ranks have all states, so any assignment of data to ranks works, and a checkpoint loads on any
    number of ranks.

    With ``exchange=False`` nothing is exchanged: each rank has the model and states of its data.

    :param model: the model.
    :param int num_states: S, the same for all data.
    :param EvolutionaryUpdate evolution: the search of one step.
    :param guide: a guide for the latents that are not searched. It is a function of the model's
        arguments, or an AutoGuide of the model with the discrete sites hidden. The states depend on
        its draws, so ``Predictive`` and other losses draw one after the other (``parallel=False``,
        ``vectorize_particles=False``).
    :param int prior_draws: the number of states of each datum that a step also draws from the
        model, as candidates that single moves may not reach.
    :param bool exchange: whether the ranks of a distributed run have the same data and states.
    :param bool fixed_data: whether the observations of a datum are the same in every call. Pass
        False for data that change (by binarization). Values that the model draws or computes from
        parameters are never compared.
    :param vectorize: run the model once for all states; None to do so only if it has the densities
        of a loop, as ``vectorize_particles`` of :class:`MonteCarloELBO`.
    :param max_plate_nesting: the number of batch dims of the programs' plates; inferred by default.
    :raises ValueError: if ``num_states`` is not an int of at least 1. In the first call: for a
        model without discrete sites, or with continuous sites that ``guide`` does not draw. Also
        for discrete sites that are outside data plates, masked, or in several separate data plates,
        and if ``num_states`` exceeds the number of states. In any call: for a changed number of
        data, other observations, and indices out of range.

    [1] Lücke, Forster (2019), *k-means as a variational EM approximation of Gaussian mixture
    models*; Lücke (2019), *Truncated Variational Expectation Maximization*.
    [2] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
    with Binary Latents*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior
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

    _assignable = frozenset({"evolution", "prior_draws"})

    def __init__(
        self,
        model: Program,
        num_states: int = 64,
        *,
        evolution: EvolutionaryUpdate | None = None,
        guide: Program | None = None,
        prior_draws: int = 0,
        exchange: bool = True,
        fixed_data: bool = True,
        vectorize: bool | None = None,
        max_plate_nesting: float = math.inf,
    ) -> None:
        super().__init__()
        self.num_states = check_count("num_states", num_states)
        if evolution is not None and not isinstance(evolution, EvolutionaryUpdate):
            raise ValueError(f"evolution must be an EvolutionaryUpdate, got {evolution!r}")
        if isinstance(guide, type) or not (callable(guide) or guide is None):
            raise ValueError(
                f"guide must be a function of the model's arguments, or None, got {guide!r}"
            )
        check_flag("vectorize", vectorize, or_none=True)
        check_flag("exchange", exchange)
        check_flag("fixed_data", fixed_data)
        # In a tuple, because a model that is a module would become a submodule.
        self._model = (model,)
        self.evolution = EvolutionaryUpdate() if evolution is None else evolution
        self.guide, self.exchange = guide, exchange
        self.prior_draws = check_count("prior_draws", prior_draws, 0)
        self.vectorize, self.max_plate_nesting = vectorize, max_plate_nesting
        # The layouts of the models of recent calls, the latest first.
        self._layout_cache: list[tuple[object, ModelLayout]] = []
        self._synchronized = False
        self.fixed_data = fixed_data
        self._record = DataRecord()
        self._sampler = ParticleSampler(2, vectorize, max_plate_nesting)

    def __getstate__(self) -> dict[str, object]:
        # A copy finds its layouts again.
        return {**self.__dict__, "_layout_cache": []}

    @property
    def model(self) -> Program:
        return self._model[0]

    def fit(self, *args: object, num_steps: int = 1, **kwargs: object) -> Tensor:
        """
        Improve the states by E-steps, without changing parameters.

        :param args: the model's arguments.
        :param int num_steps: the number of E-steps.
        :returns: the free energy of each datum, shape ``[*plates]``, in nats.
        """
        for _ in range(check_count("num_steps", num_steps, 0)):
            with hidden_from_handlers(), torch.no_grad():
                step = EStep(self, Programs(self.model, self, args, kwargs), self._sampler)
                population, _ = step.evaluate()
                step.keep(step.search(population))
        return self.posterior(*args, **kwargs).free_energy

    def for_data(self, *args: object, num_steps: int = 50, **kwargs: object) -> TruncatedPosterior:
        """
        Return a truncated posterior of other (held-out) data under the current model.

        It has new states, searched by ``num_steps`` E-steps, and is in evaluation mode. Modules are
        in evaluation mode during the search, and this guide does not change.

        :param args: the model's arguments on these data.
        :param int num_steps: the number of E-steps.
        :raises ValueError: as in a first call; and if ``guide`` cannot be called with other data,
            such as an AutoGuide of latents inside the data's plates.

        Example::

            >>> import pyro, torch
            >>> import pyro.distributions as dist
            >>> from pyro_mcvae import TruncatedPosterior
            >>> def model(x):
            ...     with pyro.plate("data", len(x)):
            ...         k = pyro.sample("k", dist.Categorical(torch.ones(5) / 5))
            ...         pyro.sample("x", dist.Normal(k, 1.0), obs=x)
            >>> guide, x_test = TruncatedPosterior(model, num_states=2), torch.tensor([0.5, 3.0])
            >>> guide.for_data(x_test).posterior(x_test).free_energy.shape
            torch.Size([2])
        """
        num_steps = check_count("num_steps", num_steps, 0)
        settings: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS.split()}
        posterior = TruncatedPosterior(self.model, self.num_states, **settings)
        with evaluation_modules(find_modules(self.model, posterior)):
            posterior.fit(*args, num_steps=num_steps, **kwargs)
        return posterior.eval()

    def posterior(self, *args: object, **kwargs: object) -> StatePosterior:
        """
        Return the truncated posterior of the data of one call, under the current parameters.

        If ``guide`` draws other latents, the posterior is conditional on one new draw of them.

        :param args: the model's arguments.
        """
        return self._posterior(args, kwargs)

    def _posterior(
        self, args: Args, kwargs: Kwargs, draws: GuideDraws | None = None
    ) -> StatePosterior:
        with hidden_from_handlers(), torch.no_grad():
            step = EStep(self, Programs(self.model, self, args, kwargs), self._sampler, draws)
            return StatePosterior(step.runs, *step.evaluate())

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """
        Draw from the truncated posterior, as a guide.

        It draws the sites of ``guide``. Given these, it draws an auxiliary site for the index of
        the state in each data plate, and a point mass at each discrete site.

        :returns: the values of the discrete sites.
        """
        guide_trace = run_guide(self.guide, args, kwargs)
        with hidden_from_handlers(), torch.no_grad():
            programs = Programs(self.model, self, args, kwargs)
            nesting = self._model_layout(programs, self._sampler).nesting
        return sample_states(partial(self._posterior, args, kwargs), guide_trace, nesting)

    def forget(self) -> None:
        """Delete all states. The next call creates new states."""
        for name in [n for n, _ in self.named_buffers(recurse=False) if n.startswith("states_")]:
            delattr(self, name)
        self._synchronized, self._layout_cache, self._record = False, [], DataRecord()

    def _model_layout(self, programs: Programs, sampler: ParticleSampler) -> ModelLayout:
        """Return the layout of the model, and make the initial states at its first call."""
        key = programs.model, self.guide, sampler
        for cached_key, model_layout in self._layout_cache:
            if cached_key == key:
                return model_layout
        model_layout = find_model_layout(sampler, searching(programs, self.guide))
        self._prepare(model_layout.layout, model_layout.prior_draws)
        self._layout_cache = [(key, model_layout), *self._layout_cache[: _MAX_LAYOUTS - 1]]
        return model_layout

    # Not as inference tensors, which later steps could not modify.
    @torch.inference_mode(False)
    def _prepare(self, layout: StateLayout, prior_draws: Tensor) -> None:
        """Make the initial states, or check loaded ones."""
        name, space = f"states_{layout.name}", layout.space
        if self.num_states > space.cardinality:
            raise ValueError(
                f"num_states={self.num_states}, but {', '.join(map(repr, layout.sites))} of plate "
                f"'{layout.plates[-1].name}' have {space.cardinality} states in all: pass "
                f"num_states={space.cardinality}, which is exact inference"
            )
        if not hasattr(self, name):
            states = _first_states(space, prior_draws, layout.num_data, self.num_states)
            self.register_buffer(name, states)
            return
        # Loaded before the first call; new states would be on the device of draws.
        setattr(self, name, self.get_buffer(name).to(prior_draws.device))
        shape = tuple(self.get_buffer(name).shape)
        expected = (layout.num_data, self.num_states, space.num_bytes)
        if shape[1:] == expected[1:] and shape != expected:
            raise other_number_of_data(layout.plates[-1].name, expected[0], shape[0])
        if shape != expected:
            raise ValueError(
                f"the states of plate {layout.name!r} have shape {shape} (data, states, "
                f"bytes), but the model needs {expected}: they belong to other data or another "
                f"num_states; create a new TruncatedPosterior"
            )

    @torch.inference_mode(False)
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._record = DataRecord()
        # States are made at the first call, which may follow the loading.
        for key, value in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix + "states_") and "." not in name:
                buffer = getattr(self, name, None)
                if buffer is None or buffer.shape != value.shape:
                    self.register_buffer(name, torch.empty_like(value))
                    self._layout_cache = []
        super()._load_from_state_dict(state_dict, prefix, *args)


class EStep:
    """
    Evaluates, searches and stores the states of a truncated posterior for one minibatch.

    The first call finds the structure and makes the initial states.

    :param programs: the (possibly wrapped) model and its arguments; the guide may be this one in
        wrappers.
    :param sampler: runs the model.
    :param draws: existing draws of the guide's ``guide``.
    """

    def __init__(
        self,
        guide: TruncatedPosterior,
        programs: Programs,
        sampler: ParticleSampler,
        draws: GuideDraws | None = None,
    ) -> None:
        model_layout = guide._model_layout(programs, sampler)
        self._guide = guide
        self._states = guide.get_buffer(f"states_{model_layout.layout.name}")
        self._observed: Tensor | None = None
        self.runs = JointRuns(sampler, model_layout, searching(programs, guide.guide), draws)

    def synchronize(self) -> None:
        """Use the initial states of rank 0 on all ranks of a distributed run."""
        if self._guide.exchange and not self._guide._synchronized:
            self._guide._synchronized = True
            ranks.from_first_rank(self._states)

    def evaluate(self) -> tuple[Population, WeightedParticles]:
        """
        Evaluate the log joint of the stored states.

        :raises ValueError: if states are stored for other data.
        """
        count, space = self._guide.num_states, self.runs.model_layout.layout.space
        packed: list[Tensor] = []

        def load() -> Tensor:
            index = self.runs.data.index.to(self._states.device)
            packed.append(self._states.index_select(0, index))
            return space.unpack(packed[0])

        sample = self.runs.run(load, count)
        joint = self.runs.log_joint_rows(sample)
        # If all states are stored, they are valid for any data.
        if self._guide.fixed_data and count < space.cardinality:
            self._observed = fingerprints(sample, self.runs.model_layout.fixed_data)
            changed = self._guide._record.find_changed(self.runs.data.index, self._observed)
            if changed is not None:
                raise _other_data(self.runs.model_layout, changed)
        return Population(space, packed[0], space.keys(packed[0]), joint), sample

    def search(self, population: Population) -> Population:
        """Return better states, without storing them."""
        if self._guide.prior_draws:
            population = propose(self.runs, population, self._guide.prior_draws)
        return evolve(self.runs, population, self._guide.evolution)

    def keep(self, population: Population, shared: bool = False) -> None:
        """
        Store the states of the minibatch.

        :param bool shared: exchange states with other ranks, if enabled, and store also theirs.
        """
        states = self._states
        index = self.runs.data.index.to(states.device)
        # If the log joint is NaN, keep the old states.
        usable = ~population.log_joint.isnan().any(1).to(states.device)
        before = states.index_select(0, index)
        packed = torch.where(usable[:, None, None], population.packed.to(states), before)
        if shared and self._guide.exchange:
            index, packed = map(ranks.concat_over_ranks, (index, packed))
        index, packed = _deduplicated(index, packed)
        with torch.no_grad():
            states.index_copy_(0, index, packed)
        if self._observed is not None:
            num_data = self.runs.model_layout.layout.num_data
            self._guide._record.keep(self.runs.data.index, self._observed, num_data)


def _other_data(found: ModelLayout, datum: int) -> StatesError:
    return StatesError(
        f"datum {datum} of plate '{found.layout.plates[-1].name}' has other values than before "
        f"at the observed sites {', '.join(map(repr, sorted(found.fixed_data)))}: states belong "
        f"to a datum by its index, and these were searched for other observations. For minibatches "
        f"pass their indices, pyro.plate(..., N, subsample=index); for held-out data create a "
        f"guide by guide.for_data(...); for data that are drawn again at every step pass "
        f"fixed_data=False"
    )


def _first_states(space: StateSpace, prior: Tensor, num_data: int, count: int) -> Tensor:
    """Return distinct packed states for each datum, drawn from prior draws."""
    step = max(1, _CHUNK // max(1, 2 * count * len(space)))
    parts = [torch.empty(0, count, space.num_bytes, dtype=torch.uint8, device=prior.device)]
    for begin in range(0, num_data, step):
        pick = torch.randint(len(prior), (min(step, num_data - begin), count), device=prior.device)
        parts.append(space.pack(distinct_states(space, prior[pick], count)))
    return torch.cat(parts)


def _deduplicated(index: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Give repeated data of a minibatch the states of their first occurrence."""
    ordered, order = index.sort(stable=True)
    position = torch.arange(len(index), device=index.device)
    repeated = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 0))
    first = position.masked_fill(repeated, 0).cummax(0).values
    return ordered, packed.index_select(0, order[first])
