"""Wake-sleep: train the guide on data simulated from the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import Bounds, ELBOOptions, Estimate, MonteCarloELBO, as_scalar
from pyro_mcvae.elbos.elbo_terms import elbo_bounds, elbo_costs, total_cost
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.compat import tree_leaves, tree_map_only
from pyro_mcvae.ops.marks import Marks
from pyro_mcvae.programs.contract import nesting_of
from pyro_mcvae.programs.messengers import Minibatch, Recorder, Substitutes, Unconditioned
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import (
    counted_values,
    is_delta,
    is_factor,
    is_latent,
    is_random,
    is_scored,
)
from pyro_mcvae.programs.substitute import substitute
from pyro_mcvae.programs.terms import Term, guide_terms
from pyro_mcvae.programs.types import FactorKey, Site
from pyro_mcvae.structure.marked import dependencies_of

# Simulated data ("dreams"): drawn from the joint density of the model, and scored by the guide.


def dream(
    programs: Programs, subsamples: Minibatch, fixed: Mapping[str, Tensor] | None = None
) -> Trace:
    """
    Draw latents and data from the model's joint density, on a given minibatch.

    :param subsamples: the indices of each plate.
    :param fixed: latents that are not drawn, by site.
    :raises ValueError: if no data can be drawn from the model.
    """
    try:
        with Recorder(Substitutes(Minibatch(subsamples), fixed or {})) as recorder, Unconditioned():
            programs.model(*programs.args, **programs.kwargs)
    except NotImplementedError as error:
        raise ValueError(
            f"no data can be simulated from the model, because a distribution has no draws "
            f"({type(error).__name__}: {error}): give each site a proper distribution with sample()"
        ) from error
    return recorder.trace


def dreamt_values(model_trace: Trace, dreamt: Trace) -> dict[str, Tensor]:
    """
    Return the simulated data by site, with the real data where they are masked.

    :param model_trace: a run of the model on the data.
    :raises ValueError: naming a site that was not simulated, or with another shape than its data.
    """
    values = {}
    for name, site in model_trace.nodes.items():
        if not is_scored(site) or not site["is_observed"] or is_factor(site["fn"]):
            continue
        value = site["value"]
        new = dreamt.nodes[name]["value"] if name in dreamt else None
        if new is None or new.shape != torch.as_tensor(value).shape:
            what = "nothing" if new is None else f"a value of shape {tuple(new.shape)}"
            raise ValueError(
                f"the model observes site '{name}' in shape {tuple(torch.as_tensor(value).shape)}, "
                f"but simulates {what} for it: its plates and its expanded distribution must have "
                f"the shape of the data, for any latents"
            )
        counted = counted_values(site)
        if counted is not None:
            new = torch.where(counted, new, value)
        values[name] = new.detach()
    return values


def recognize(programs: Programs, dreamt: Trace, subsamples: Minibatch) -> Run:
    """
    Run the guide on simulated data. Its terms are log q of the simulated latents.

    :param programs: model and guide, with the simulated data as arguments.
    :raises ValueError: naming a site of the guide without a density.
    """
    with Recorder(Substitutes(Minibatch(subsamples)), dreamt) as recorder:
        programs.guide(*programs.args, **programs.kwargs)
    guide_trace = recorder.trace
    _check(guide_trace, dreamt)
    terms = tuple(guide_terms(guide_trace))
    return Run(guide_trace, dreamt, terms, nesting_of(guide_trace, dreamt), None)


def _check(guide_trace: Trace, dreamt: Trace) -> None:
    for name, site in guide_trace.nodes.items():
        if not is_latent(site):
            continue
        if name not in dreamt:
            raise ValueError(
                f"the guide draws site '{name}', for which the model simulates no value, so the "
                f"density of the guide is not known: the sleep phase needs guides whose sites are "
                f"in the model (without auxiliary sites, as in AutoGuides and EasyGuide)"
            )
        if is_delta(site["fn"]):
            raise ValueError(
                f"site '{name}' of the guide is a point mass, which has no density for a simulated "
                f"value: give it a distribution with a density"
            )


# Checks whether data can be simulated: factors, and data that the model reads from its arguments.


def check_factors(programs: Programs, run: Run) -> None:
    """
    Check that no factor of the model depends on a latent, because simulations would ignore it.

    :raises ValueError: naming the factor.
    """
    scored = {n: s for n, s in run.model_trace.nodes.items() if is_scored(s)}
    factors = [n for n, s in scored.items() if s["is_observed"] and is_factor(s["fn"])]
    if not factors:
        return
    tracked = frozenset(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    parents_of = dependencies_of(programs, tracked, run).factors
    for name in factors:
        parents = parents_of.get(FactorKey("model", name), tracked)
        if parents:
            raise ValueError(
                f"the model's factor '{name}' depends on {', '.join(map(repr, sorted(parents)))}, "
                f"so the model does not draw from its density, and no data can be simulated: write "
                f"the factor as a distribution of an observed site, or train with another "
                f"objective, such as TraceSGVB_ELBO"
            )


def check_reads(programs: Programs, run: Run, dreamt: Trace, values: Mapping[str, Tensor]) -> None:
    """
    Check that the guide reads the observed values from the arguments, and the model does not.

    Simulated data would mix with the real ones in a model that reads them outside ``obs=``. A guide
    that does not read them from the arguments would not get the simulated data. One more run of
    both tracks the observed tensors among the arguments.

    :param dreamt: a simulation, with the data ``values``.
    :raises ValueError: naming a site of the model whose distribution depends on observed values, or
        if the guide's distributions do not.
    """
    if not values:
        return
    with programs.isolated(), torch.no_grad():
        changed = substitute(programs, run.model_trace.nodes, values, run.subsamples)
        marked = _Marked(programs, changed)
        run_model = partial(dream, subsamples=run.subsamples)
        read = marked.readers(run_model)
        if read is None:
            read = _differing_sites(run_model, programs, changed)

        def run_guide(programs: Programs) -> Trace:
            return recognize(programs, dreamt, run.subsamples).guide_trace

        readers = marked.readers(run_guide)
        if readers is None:
            readers = _differing_sites(run_guide, programs, changed)
    if read:
        raise ValueError(
            f"the distribution of site '{read[0]}' of the model depends on observed values that "
            f"the model reads from its arguments, so simulated data would mix with real data. "
            f"Use the values that pyro.sample returns, pass covariates as other tensors than the "
            f"observed ones, or compute the guide's arguments with dream_args"
        )
    if readers == []:
        raise ValueError(
            f"the guide reads the data of {', '.join(map(repr, sorted(values)))} from none of the "
            f"arguments in which the model observes them, so it would not get simulated data: read "
            f"them there, or pass dream_args, which computes the guide's arguments"
        )


def _differing_sites(
    run: Callable[[Programs], Trace], programs: Programs, changed: Programs
) -> list[str]:
    """
    Return the sites with another distribution at changed data, under the same random numbers.

    This serves programs that cannot be tracked, such as those that reject subclasses of tensors.
    """
    state, traces = pyro.util.get_rng_state(), []
    for call in (programs, changed):
        pyro.util.set_rng_state(state)
        traces.append(run(call))
    before, after = (t.nodes for t in traces)
    scored = [n for n, s in before.items() if is_scored(s) and not is_factor(s["fn"])]
    return [n for n in scored if n not in after or not _same_density(before[n], after[n])]


def _same_density(before: Site, after: Site) -> bool:
    value = before["value"]
    if after["fn"].shape() != before["fn"].shape():
        return False
    pair = [site["fn"].log_prob(value) for site in (before, after)]
    return torch.equal(*(p.nan_to_num() for p in pair))


class _Marked:
    """The arguments of a call, with marked copies of the tensors that a simulation changes."""

    def __init__(self, programs: Programs, changed: Programs) -> None:
        old, new = (tree_leaves((p.args, p.kwargs)) for p in (programs, changed))
        pairs = zip(old, new, strict=True)
        copies = {id(a): a.detach().clone() for a, b in pairs if a is not b}
        call = (programs.args, programs.kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: copies.get(id(t), t), call)
        self._copies = [*copies.values()]
        self._programs = replace(programs, args=args, kwargs=kwargs)

    def readers(self, run: Callable[[Programs], Trace]) -> list[str] | None:
        """Return the sites whose distribution was computed from marked tensors; None if unknown."""
        marks = Marks(lambda: "")
        bit = marks.new_bits()
        with pyro.validation_enabled(False), marks:
            for copy in self._copies:
                marks.write(copy, bit)
            trace = run(self._programs)
            names = [n for n, s in trace.nodes.items() if self._reads(s, marks) & bit]
        # Data that were converted to Python numbers decide about an unknown part of the program.
        return names if names or not marks.control & bit else None

    def _reads(self, site: Site, marks: Marks) -> int:
        """Return the marks of a site's distribution."""
        if not is_scored(site) or is_factor(site["fn"]):
            return 0
        value = site["value"].detach().clone()
        marks.clear(value)
        return marks.bits(site["fn"].log_prob(value))


# The wake-sleep algorithm, for any model from which data can be simulated.

DreamArgs = Callable[..., tuple[tuple[object, ...], dict[str, Any]]]


class WakeSleep(MonteCarloELBO):
    r"""
    The wake-sleep algorithm [1], a baseline of Kingma and Welling [2].

    There are two objectives, for the parameters of the model and of the guide:

    .. math::
        \text{wake:} \quad & \max_\theta\; \frac{N}{B} \sum_n
            E_{q_\phi(z \mid x_n)} \log p_\theta(x_n, z) \\
        \text{sleep:} \quad & \max_\phi\; \frac{N}{B} \sum_n
            E_{p_\theta(z) p_\theta(x \mid z)} \log q_\phi(z \mid x)

    In the wake phase the guide draws latents for the data, and the likelihood of the model is
    maximized. In the sleep phase the model simulates latents and data for the same minibatch, and
    the guide is trained to infer the latents. Draws need no reparameterization, so latents may be
    discrete. The two gradients together are not the gradient of any function, so no bound on the
    evidence is maximized. The reported value is the plain ELBO of the wake phase, a bound that is
    comparable with other objectives.

    **Arguments of the guide.** In the sleep phase the observed tensors among the arguments are
    replaced by simulated ones: ``svi.step(x)`` with ``obs=x`` calls ``guide(x_simulated)``.
    Observed tensors are found by identity, by shared memory (``obs=x[t]``,
    ``obs=x.view(-1, 784)``), or as copies. Copies may be rows of a plate (``obs=x[idx]``). The
    search includes nested lists and dictionaries. Masked entries keep their value. Data outside the
    arguments (a global variable, an attribute) raise an error. A guide that reads the data from
    another argument than the model raises an error, too. If arguments are other functions of the
    data, pass ``dream_args``. Other arguments, such as covariates, are not changed.

    Running the model must draw latents and data from their joint density. A ``pyro.factor`` that
    depends on latents raises an error. So does a model that reads the observed values from its
    arguments, as in ``Normal(x[t - 1], 1)``. Use the value that ``pyro.sample`` returns instead; in
    the sleep phase this is the simulated value. Guides with auxiliary sites (AutoGuides) have no
    density of the model's latents, and raise an error, too.

    :param int num_particles: the number of draws of z in the wake phase.
    :param int num_dreams: the number of simulated minibatches in the sleep phase.
    :param dream_args: a function ``(dream, *args, **kwargs) -> (args, kwargs)`` that returns the
        guide's arguments, where ``dream`` has the simulated value of each observed site by name.
    :param options: ``max_plate_nesting``, ``vectorize_particles`` (of the wake phase),
        ``strict_enumeration_warning`` and ``retain_graph``, as in Pyro; see
        :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :raises ValueError: for counts below 1, and at a step in the cases above.

    [1] Hinton, Dayan, Frey, Neal (1995), *The Wake-Sleep Algorithm for Unsupervised Neural
    Networks*.
    [2] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import WakeSleep
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(slope * x, 0.7))
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=WakeSleep())
        >>> losses = [svi.step(torch.zeros(100)) for _ in range(100)]
        >>> round(pyro.param("slope").item(), 1)  # of the posterior mean: 0.5
        0.5
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        num_dreams: int = 1,
        dream_args: DreamArgs | None = None,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options)
        super().__init__(num_particles, **options)
        num_dreams = check_count("num_dreams", num_dreams)
        if dream_args is not None and not callable(dream_args):
            raise ValueError(
                f"dream_args must be a function (dream, *args, **kwargs) -> (args, kwargs), got "
                f"{dream_args!r}"
            )
        self.num_dreams = num_dreams
        self.dream_args = dream_args

    def estimate(self, programs: Programs) -> Estimate:
        runs = self.sampler.independent(programs, detach_latents=True)
        value = as_scalar(sum(total_cost(elbo_costs(run.terms)) for run in runs))
        value = value / self.num_particles
        if not torch.is_grad_enabled():
            return Estimate(value, value, runs, bounds=partial(self._bounds, programs, runs))
        wake = _total(t for run in runs for t in run.terms if not t.in_guide)
        nights = [self._sleep(programs, runs[0]) for _ in range(self.num_dreams)]
        sleep = _total(t for night in nights for t in night.terms)
        surrogate = wake / self.num_particles + sleep / self.num_dreams
        # A non-finite loss is reported; the loss of the sleep phase is not part of the value.
        value = torch.where(surrogate.detach().isfinite(), value, torch.nan)
        return Estimate(value, surrogate, [*runs, *nights], scored=True)

    def _bounds(self, programs: Programs, runs: list[Run]) -> Bounds:
        sample = self.sampler.arrange(programs, runs)
        return elbo_bounds(sample, [elbo_costs(run.terms) for run in runs])

    def _sleep(self, programs: Programs, run: Run) -> Run:
        """Return the terms of the guide on simulated data, for the minibatch of the wake step."""
        analysis, about = self.sampler.analyses.of(programs), run.signature
        analysis.cached(("no factor", about), lambda: check_factors(programs, run))
        with torch.no_grad():
            dreamt = dream(programs, run.subsamples)
            values = dreamt_values(run.model_trace, dreamt)
            # The same operations read the same arguments, so that this needs one run for all.
            key = "data can be simulated", about, analysis.fingerprint
            if self.dream_args is None and not analysis.get(key):
                if not analysis.before(key):
                    check_reads(programs, run, dreamt, values)
                analysis.put(key, True)
            dreaming = self._with_dream(programs, run, values)
        return recognize(dreaming, dreamt, run.subsamples)

    def _with_dream(self, programs: Programs, run: Run, values: dict[str, Tensor]) -> Programs:
        if self.dream_args is None:
            return substitute(programs, run.model_trace.nodes, values, run.subsamples)
        arguments = self.dream_args(values, *programs.args, **programs.kwargs)
        if not (
            isinstance(arguments, tuple) and len(arguments) == 2 and isinstance(arguments[1], dict)
        ):
            raise ValueError(
                f"dream_args must return the guide's arguments as a pair (args, kwargs), such as "
                f"((x,), {{}}), got {type(arguments).__name__}"
            )
        return replace(programs, args=tuple(arguments[0]), kwargs=arguments[1])


def _total(terms: Iterable[Term]) -> Tensor:
    return as_scalar(sum(t.log_prob.sum() * t.plate_scale for t in terms))
