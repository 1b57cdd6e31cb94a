"""Truncated posteriors: a set of discrete states for every datum, as a Pyro guide."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.modules import evaluation_modules, find_modules
from pyro_mcvae.programs.types import Program
from pyro_mcvae.truncated.buffers import StateBuffers
from pyro_mcvae.truncated.data_record import DataRecord
from pyro_mcvae.truncated.draws import apart, sample_states
from pyro_mcvae.truncated.e_step import EStep
from pyro_mcvae.truncated.evaluated_states import EvaluatedStates
from pyro_mcvae.truncated.evolution import EvolutionaryUpdate
from pyro_mcvae.truncated.found_layouts import FoundLayouts
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.proposals import PriorDraws, Proposals
from pyro_mcvae.truncated.searched_sites import GuideDraws, Layouts, run_guide
from pyro_mcvae.truncated.shards import check_names

__all__ = ["TruncatedPosterior", "e_step_of", "new_posterior"]

Args = tuple[object, ...]
Kwargs = dict[str, object]

_SETTINGS = "evolution guide proposals shard fixed_data vectorize max_plate_nesting"


class TruncatedPosterior(StateBuffers):
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
    one or several sites in one plate, sites in plates nested inside of the data plate (their
    values belong to the datum's state), several data plates side by side. Bernoulli, categorical,
    one-hot and count sites are searched (counts without an upper bound: below 65,536). Which data a
    minibatch holds is read from the plate: give it indices, ``pyro.plate("data", N,
    subsample=index)``, or let it draw them by ``subsample_size``. Entries that are masked out have
    no density and keep the value zero. States that make the data impossible (fewer animals than a
    Binomial has counted) have density zero. Every other latent is drawn by ``guide``, once per
    step, and enters as in the plain ELBO; one draw of a datum's latents serves all of its states,
    so that they may not depend on its discrete ones.

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

    With ``shard="data"`` each of R ranks keeps the states of its own data of that plate only, the
    indices r, r + R, r + 2R, ...: 1/R of the memory, and nothing to exchange. All calls on a rank,
    :meth:`posterior` and :meth:`fit` too, must then be for these data, as ``RankBatches(N,
    batch_size, fixed=True)`` deals them out; others are refused. :func:`save_checkpoint` gathers
    the states in one file, which loads on any number of ranks; a ``state_dict`` has those of its
    rank alone, and other ranks refuse it. In a single process nothing is different.

    :param model: the model.
    :param int num_states: S, the same for all data.
    :param EvolutionaryUpdate evolution: the search of one step.
    :param guide: a guide for the latents that are not searched, called with the model's
        arguments: a function, or an AutoGuide of the model with the discrete sites hidden.
    :param proposals: further candidates of each step: :class:`PriorDraws`, or a function of the
        model's arguments (an encoder, say) that returns values ``[C, *batch, *event]`` of each
        discrete site.
    :param shard: the name of the data plate (or several names, of plates side by side) whose states
        are dealt out over the ranks of a distributed run; by default each rank has all states.
    :param bool fixed_data: whether a datum's observations are the same at every call, so that
        others in its place are refused; False for data that are drawn anew (by a binarisation,
        say). What the model itself draws or computes from parameters is never compared.
    :param vectorize: run the model once for all states; None where that has a loop's numbers, as
        ``vectorize_particles`` of :class:`MonteCarloELBO`.
    :param max_plate_nesting: how many batch dims the programs' plates occupy; found out if left
        out.
    :raises ValueError: if ``num_states`` is not an int of at least 1. On the first call: for a
        model without discrete sites or with continuous ones that ``guide`` does not draw, for
        discrete sites that no data plate encloses, if ``num_states`` exceeds the number of states,
        and for a ``shard`` that is no data plate. On any call: for a changed number of data, other
        observations than those that were searched for, and indices that are out of range or, with
        ``shard``, another rank's.

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
        shard: str | Iterable[str] | None = None,
        fixed_data: bool = True,
        vectorize: bool | None = None,
        max_plate_nesting: float = math.inf,
    ) -> None:
        super().__init__(num_states, shard)
        if evolution is not None and not isinstance(evolution, EvolutionaryUpdate):
            raise ValueError(f"evolution must be an EvolutionaryUpdate, got {evolution!r}")
        _check_functions(guide=guide, proposals=proposals)
        check_flag("vectorize", vectorize, or_none=True)
        check_flag("fixed_data", fixed_data)
        # In tuples: a model that is a module would become a part of this one.
        self._model = (model,)
        self.evolution = EvolutionaryUpdate() if evolution is None else evolution
        self.guide, self.proposals = guide, proposals
        self.vectorize, self.max_plate_nesting = vectorize, max_plate_nesting
        self._found = FoundLayouts()
        self.fixed_data = fixed_data
        self._record = DataRecord()
        self._own = ParticleSampler(2, vectorize, max_plate_nesting)

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
                step = e_step_of(self, Programs(self.model, self, args, kwargs), self._own)
                populations, _ = step.evaluate(searched=True)
                step.keep(step.search(populations))
        return self.posterior(*args, **kwargs).free_energy

    def for_data(self, *args: object, num_steps: int = 50, **kwargs: object) -> TruncatedPosterior:
        """
        The truncated posterior of other data, held out say, under the same model as it is now: with
        states of its own, searched for ``num_steps`` E-steps and kept as they then are
        (evaluation mode). Modules are in evaluation mode meanwhile, and this guide stays as it is.

        :param args: the model's arguments on these data.
        :param int num_steps: how many.
        :raises ValueError: as at a first call; and if ``guide`` cannot be called with other data,
            as an AutoGuide of latents inside of the data's plates.

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
            programs = Programs(self.model, self, args, kwargs)
            step = e_step_of(self, programs, self._own, given)
            return StatePosterior(EvaluatedStates(step.runs, *step.evaluate()))

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

    def _layouts(
        self, model: Program, sampler: ParticleSampler, args: Args, kwargs: Kwargs
    ) -> Layouts:
        def prepare(layouts: Layouts) -> None:
            check_names(self.shard, [layout for _, layout in layouts.searched])
            for b, layout in layouts.searched:
                self._prepare(layout, layouts.bank[b])

        return self._found.of(model, self.guide, sampler, (args, kwargs), bool(self.shard), prepare)

    def forget(self) -> None:
        """Drop all states, as if the guide had never been called; the next call makes others."""
        super().forget()
        self._found.forget()
        self._record.forget()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        before = self._shapes()
        self._record.forget()
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if before != self._shapes():
            self._found.forget()


def e_step_of(
    guide: TruncatedPosterior,
    programs: Programs,
    sampler: ParticleSampler,
    given: GuideDraws | None = None,
) -> EStep:
    """
    The states of a truncated posterior for one minibatch. The first call finds the structure and
    makes the first states.

    :param programs: the model, which others may have wrapped, and its arguments; their guide may
        be this one in wrappers.
    :param sampler: runs the model.
    :param given: draws of the guide's own ``guide`` that are made already.
    """
    model, args, kwargs = programs.model, programs.args, dict(programs.kwargs)
    layouts = guide._layouts(model, sampler, args, kwargs)
    runs = JointRuns(sampler, layouts, model, guide.guide, args, kwargs, given)
    record = guide._record if guide.fixed_data else None
    return EStep(runs, guide, record, guide.evolution, guide.proposals)


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
