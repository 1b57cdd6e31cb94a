"""Monte Carlo EM: train on posterior draws of chains, which may persist for each datum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import Chain
from pyro_mcvae.chains.kernels import HMC, Kernel, State, Target
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.elbos.base import ELBOOptions, Estimate, as_scalar
from pyro_mcvae.elbos.chain import ChainCoordinates, ChainELBO, ChainRecord
from pyro_mcvae.elbos.elbo_terms import local_estimate
from pyro_mcvae.elbos.rao_blackwell import OneSlot
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.ops.compat import tree_leaves
from pyro_mcvae.ops.distributed import concat_over_ranks
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.truncated.data_record import DataRecord, fingerprints
from pyro_mcvae.truncated.joint import constant_observations

# The position of the chain of each datum between steps.


class ChainStates(nn.Module):
    """
    The states of one chain per datum, identified by the indices of the plates.

    The buffers are created in the first step, and are part of ``state_dict()``.

    :ivar positions: shape ``[K, *full plates, D]``.
    :ivar visited: a mask of the data that have a chain, shape ``[*full plates]``.
    :param bool fixed_data: whether the observations of a datum are the same in every step.
    """

    positions: Tensor | None
    visited: Tensor | None

    def __init__(self, fixed_data: bool = True) -> None:
        super().__init__()
        self._fixed_data, self._record = fixed_data, DataRecord()
        # The observed sites whose values are data; None before the first step.
        self._observed: frozenset[str] | None = None
        self.register_buffer("positions", None)
        self.register_buffer("visited", None)

    def forget(self) -> None:
        """Delete all positions."""
        self.positions = self.visited = None
        self._record = DataRecord()

    def resume(self, programs: Programs, sample: WeightedParticles, drawn: Tensor) -> Tensor:
        """
        Return the stored positions of the minibatch's chains; new data start at ``drawn``.

        :param drawn: positions, shape ``[K, *plates, D]``.
        :raises ValueError: if the chains belong to other data.
        """
        index = _index(sample)
        if self.positions is None or self.visited is None:
            sizes = _full_sizes(sample)
            self.positions = drawn.new_zeros((drawn.shape[0], *sizes, drawn.shape[-1]))
            self.visited = torch.zeros(sizes, dtype=torch.bool, device=drawn.device)
        self._check(sample, drawn)
        if self._fixed_data:
            self._check_data(programs, sample)
        known = self.visited[index] if index else self.visited
        of_all_chains: tuple[slice | Tensor, ...] = (slice(None), *index)
        stored = self.positions[of_all_chains]
        return torch.where(known[..., None], stored.to(drawn), drawn)

    @torch.no_grad()
    def keep(self, sample: WeightedParticles, positions: Tensor) -> None:
        """
        Store the positions of the minibatch's chains.

        :param positions: shape ``[K, *plates, D]``.
        """
        assert self.positions is not None
        assert self.visited is not None
        at = self._rows(sample)
        new = fingerprints(sample, self._observed or frozenset())
        if new is not None:
            self._record.keep(at, new, self.visited.numel())
        chains, numbers = positions.shape[0], positions.shape[-1]
        rows = positions.detach().to(self.positions).reshape(chains, -1, numbers).transpose(0, 1)
        # In a distributed run every rank keeps the chains of all data.
        at, rows = concat_over_ranks(at), concat_over_ranks(rows)
        self.positions.view(chains, -1, numbers)[:, at] = rows.transpose(0, 1)
        self.visited.view(-1)[at] = True

    def _rows(self, sample: WeightedParticles) -> Tensor:
        """Return the numbers of the minibatch's data, shape ``[E]``."""
        assert self.visited is not None
        at = torch.zeros((), dtype=torch.long, device=self.visited.device)
        for index, size in zip(_index(sample), self.visited.shape, strict=True):
            at = at * size + index.to(at.device)
        return at.flatten()

    def _check_data(self, programs: Programs, sample: WeightedParticles) -> None:
        """Check that the chains of a minibatch belong to its observations."""
        if self._observed is None:
            self._observed = frozenset(
                t.key.name
                for t in sample.runs[0].terms
                if not t.in_guide and t.site["is_observed"] and not t.site["value"].requires_grad
            )
        rows = self._rows(sample)
        datum = self._record.find_changed(rows, fingerprints(sample, self._observed))
        if datum is None:
            return
        # The model may draw an observation, such as the pixels of a gray image.
        with programs.isolated(), torch.no_grad():
            fixed = constant_observations(programs, sample.runs[0]) & self._observed
        if fixed != self._observed:
            self._observed, self._record = fixed, DataRecord()
            return
        raise ValueError(
            f"datum {datum} of {_names(sample)} has other values than before at the observed sites "
            f"{', '.join(map(repr, sorted(fixed)))}: with persistent=True a chain belongs to a "
            f"datum by its index, and this one belongs to other observations. For minibatches pass "
            f"their indices, pyro.plate(..., N, subsample=index); for other data create a new "
            f"MonteCarloEM; for data that are drawn again at every step pass fixed_data=False"
        )

    def _check(self, sample: WeightedParticles, drawn: Tensor) -> None:
        assert self.positions is not None
        shape = drawn.shape[0], *_full_sizes(sample), drawn.shape[-1]
        if self.positions.shape != shape:
            raise ValueError(
                f"the chains of an earlier step have shape {tuple(self.positions.shape)} "
                f"[particles, *data, numbers per datum], but {shape} is needed: create a new "
                f"MonteCarloEM for other data, or pass persistent=False"
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        # The saved chains may belong to data that this object has not used.
        for name in ("positions", "visited"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _index(sample: WeightedParticles) -> tuple[Tensor, ...]:
    """Return the indices of the minibatch in each plate, broadcast against each other."""
    if len(sample.blocks) != 1 or len(sample.blocks[0].dims) != len(sample.blocks[0].plates):
        raise ValueError(
            "persistent=True identifies the chains of a datum by the indices of its plates, but "
            "there are several separate plates of data, or sequential ones: use one vectorized "
            "plate, pyro.plate('data', N, dim=-1), or persistent=False"
        )
    frames = sample.frames[0]
    count = len(frames)
    return tuple(
        sample.subsamples[f.name].reshape((-1,) + (1,) * (count - 1 - i))
        for i, f in enumerate(frames)
    )


def _names(sample: WeightedParticles) -> str:
    names = ", ".join(f"'{f.name}'" for f in sample.frames[0])
    return f"plate {names}" if names else "the model"


def _full_sizes(sample: WeightedParticles) -> tuple[int, ...]:
    return tuple(f.full_size or f.size for f in sample.frames[0])


# Monte Carlo EM by Hamiltonian Monte Carlo per datum, for programs with continuous latents.


@dataclass
class _Draw:
    """
    Posterior draws of a minibatch for several updates.

    :ivar programs: the model, the guide and the data that they were drawn for.
    :ivar executed: the functions that the step has executed.
    :ivar num_left: the number of further updates.
    """

    sample: WeightedParticles
    programs: Programs
    executed: ExecutedCode
    num_left: int

    def __post_init__(self) -> None:
        self._leaves: list[object] = tree_leaves((self.programs.args, self.programs.kwargs))
        roots = (*self.programs.pair, *self._leaves)
        self._read = Dependencies.of(*roots, executed=self.executed, contents=True)

    def serves(self, programs: Programs) -> bool:
        """Return whether a step has the same programs and unchanged data."""
        if self._read.unsupported or programs.pair != self.programs.pair or not self.num_left:
            return False
        leaves = tree_leaves((programs.args, programs.kwargs))
        same = len(leaves) == len(self._leaves) and all(map(_same_leaf, leaves, self._leaves))
        return same and self._read.changed() is None


def _same_leaf(a: object, b: object) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b


class MonteCarloEM(ChainELBO):
    r"""
    Monte Carlo expectation maximization [1], a baseline of Kingma and Welling [2, appendix E].

    The gradient of the model is that of the complete-data likelihood at posterior draws:

    .. math::
        \nabla_\theta \log p_\theta(x_n)
            = E_{p_\theta(z \mid x_n)} \nabla_\theta \log p_\theta(x_n, z)
            \approx \frac{1}{K} \sum_k \nabla_\theta \log p_\theta(x_n, z_{nk}),

    The draws come from ``num_steps`` transitions of a Markov kernel that leaves the posterior
    invariant. Moves are accepted or rejected per datum. The gradient is exact in expectation if the
    chains have reached the posterior, and biased otherwise.

    * **Start.** A chain starts from a draw of the guide and moves the guide's noise. The guide is
      trained with the plain ELBO, so that the starting points improve during training. With a guide
      without parameters, such as the prior, this is the classic algorithm. With ``persistent=True``
      the chain of each datum continues from its last position, and only the first starting point is
      a draw of the guide. This stores a state for each datum. The indices of the plates must then
      identify the data. Use ``pyro.plate("data", N, subsample=indices)`` for minibatches from a
      loader, or ``subsample_size=``. Other observations at the same indices raise an error. The
      chains are saved and loaded with ``state_dict()``. In a distributed run each
      rank has separate chains.
    * **Several updates per draw.** A draw is much more expensive than an update. With
      ``updates_per_draw=5``, as in [2], five steps use the same draw: call ``svi.step`` five times
      with the same arguments. If a plate draws a minibatch, this minibatch is reused. If the
      arguments change (other tensors, or changed in place), new draws are made.
    * **Global latents** are drawn from the guide and trained with the ELBO. With ``joint=True``
      they move together with the local latents.

    The reported value is the plain ELBO of the guide, before the draws are moved. It is a lower
    bound that is comparable with other objectives, although it is not maximized. With a poor guide
    (such as the prior) it is loose, so evaluate the model by its evidence.

    :param int num_steps: the number of transitions per draw.
    :param Kernel kernel: an adjusted kernel; by default ``HMC`` with 10 leapfrog steps and a jitter
        of 0.3, whose step size adapts to an acceptance of 0.9.
    :param int num_particles: the number of independent chains per datum, which are averaged.
    :param int updates_per_draw: the number of steps that use a draw.
    :param bool persistent: continue the chain of each datum from its last position.
    :param bool fixed_data: whether the observations of a datum are the same in every step. Pass
        False for persistent chains of data that are drawn again, such as by augmentation.
    :param str coordinates: ``"noise"`` of the guide, or ``"latent"``, the (unconstrained) latents.
        The default is ``"noise"``. For persistent chains it is ``"latent"``, so that training the
        guide does not move them.
    :param bool joint: move global latents together with local ones. Plates must not be subsampled.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :ivar last_step: acceptance and step size of the last draw, a
        :class:`~pyro_mcvae.elbos.chain.ChainRecord`; its ``log_weight`` is that of the guide.
    :ivar states: the states of persistent chains; None otherwise.
    :raises ValueError: for counts below 1 and an unadjusted kernel. In the first step for discrete
        latents, and for models and guides in which no latent has a separate weight. With
        ``persistent`` also for several separate plates of data or sequential plates, and for other
        observations of a datum than before.

    [1] Wei, Tanner (1990), *A Monte Carlo Implementation of the EM Algorithm*.
    [2] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import MonteCarloEM
        >>> def model(x):
        ...     loc = pyro.param("loc", torch.tensor(0.0))
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(loc, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def prior(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> elbo = MonteCarloEM(persistent=True)
        >>> svi = SVI(model, prior, pyro.optim.Adam({"lr": 0.2}), loss=elbo)
        >>> losses = [svi.step(torch.tensor([1.0, 2.0, 3.0])) for _ in range(40)]
        >>> pyro.param("loc").item()  # near the mean of the data
        2.
    """

    _adjusted = True
    _has_slots = False  # a posterior draw has one value for each

    def __init__(
        self,
        num_steps: int = 1,
        kernel: Kernel | None = None,
        *,
        num_particles: int = 1,
        updates_per_draw: int = 1,
        persistent: bool = False,
        fixed_data: bool = True,
        coordinates: ChainCoordinates | None = None,
        joint: bool = False,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options)
        num_steps = check_count("num_steps", num_steps)
        updates_per_draw = check_count("updates_per_draw", updates_per_draw)
        check_flag("persistent", persistent)
        check_flag("fixed_data", fixed_data)
        check_flag("joint", joint)
        if kernel is None:
            kernel = HMC(AdaptiveStepSize(target_acceptance=0.9), num_leapfrog=10, jitter=0.3)
        if coordinates is None:
            coordinates = "latent" if persistent else "noise"
        super().__init__(
            num_steps,
            kernel,
            None,
            num_particles,
            False,
            coordinates,
            "reweighted",  # chains without a graph; the weights are all equal here
            joint,
            **options,
        )
        self.updates_per_draw = updates_per_draw
        self.persistent = persistent
        self.fixed_data = fixed_data
        self.states = ChainStates(fixed_data) if persistent else None
        self._draw: _Draw | None = None
        self._executed: ExecutedCode | None = None

    def __getstate__(self) -> dict[str, object]:
        # A copy makes new draws, because these have the graph of the last step.
        return {**self.__dict__, "_draw": None, "_executed": None}

    def _load_from_state_dict(self, *args: object) -> None:
        self._draw = None  # drawn with another state
        super()._load_from_state_dict(*args)

    def estimate(self, programs: Programs) -> Estimate:
        draw = self._draw
        if torch.is_grad_enabled() and draw is not None and draw.serves(programs):
            sample = self.sampler.replay_detached(programs, draw.sample)
            if sample is not None:
                return self._update_again(programs, draw, sample)
        if self.updates_per_draw == 1:
            return super().estimate(programs)
        with ExecutedCode() as self._executed:
            return super().estimate(programs)

    def _update_again(self, programs: Programs, draw: _Draw, sample: WeightedParticles) -> Estimate:
        """Take a step with earlier draws. The value is the ELBO of the guide on this minibatch."""
        with torch.no_grad():
            fresh = self.sampler.resample(programs, draw.sample, sample.num_particles)
            bound = fresh.log_weight.mean(0)
            estimate = local_estimate(fresh, bound, bound)
        local = (sample.scale * sample.model_log_prob.mean(0)).sum()
        shared = sum(t.log_prob.sum() * t.plate_scale for t in sample.global_terms())

        def finish() -> None:
            # Compare the next step with the values that the programs have written now.
            self._draw = replace(draw, programs=programs, num_left=draw.num_left - 1)

        surrogate = as_scalar(local + shared)
        return replace(
            estimate, surrogate=surrogate, runs=[*fresh.runs, *sample.runs], finish=finish
        )

    def _surrogate(
        self, density: ChainDensity, chain: Chain, slots: OneSlot, bound: Tensor
    ) -> Tensor:
        sample = density.log_weight.detached(chain.state.position)
        self._latest = sample, density.log_weight
        return density.log_weight.guide_elbo().mean(0) + sample.model_log_prob.mean(0)

    def _run(self, density: ChainDensity, slots: OneSlot) -> Chain:
        first = density.log_weight.first
        log_weight = first.log_weight.detach()
        if not density.gradient.keeps_graph:
            state = State(density.log_weight.coordinates, first.log_base, log_weight)
            return Chain(log_weight, state, state, [], [])
        start = density.start()
        if self.states is not None:
            programs = density.log_weight.programs
            start = density(self.states.resume(programs, first.sample, start.position))
        movable = density.log_weight.movable
        target = Target(density, log_weight.new_ones(()), movable)
        state, infos = start, []
        with torch.no_grad():
            for _ in range(self.num_steps if start.position.shape[-1] else 0):
                state, info = self.kernel.step(state, target)
                infos.append(info)
        chain = Chain(log_weight, start, state, infos, [], movable=movable)
        step_size = self.kernel.step_size().detach().clone()
        self.last_step = ChainRecord.of(chain, step_size, target.beta, slots)
        return chain

    def _adapt(self, programs: Programs, chain: Chain) -> None:
        """Adapt the step size and store the positions of the chains after a successful step."""
        super()._adapt(programs, chain)
        sample, log_weight = self._latest
        del self._latest
        if self.states is not None and chain.infos:
            self.states.keep(sample, chain.state.position)
        self._draw = None
        if self.updates_per_draw > 1 and self._executed is not None:
            left = self.updates_per_draw - 1
            self._draw = _Draw(sample, log_weight.programs, self._executed, left)

    def _wrong_kernel(self, name: str) -> str:
        return (
            f"MonteCarloEM needs a kernel that leaves the posterior invariant, which {name} does "
            f"not: use HMC, MALA or RandomWalk"
        )

    def _refuse_learned_parts(self) -> None:
        learned = [name for name, p in self.named_parameters() if p.requires_grad]
        if learned:
            raise ValueError(
                f"MonteCarloEM runs its chains without a graph, so {', '.join(learned)} would get "
                f"no gradient: use a fixed step size, or AdaptiveStepSize"
            )
