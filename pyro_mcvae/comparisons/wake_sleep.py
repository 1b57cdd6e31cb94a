"""The wake-sleep algorithm, for any Pyro program that can dream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_mcvae.comparisons.dream_checks import check_factors, check_reads
from pyro_mcvae.comparisons.dreams import dream, dreamt_values, recognize
from pyro_mcvae.elbos.base import ELBOOptions, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import elbo_bounds, elbo_costs, total_cost
from pyro_mcvae.elbos.estimate import Bounds, Estimate, as_scalar
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.substitute import substitute
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Program

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Programs may show other sites in every step, as sequential minibatches do.
_MOST_CHECKS = 8

DreamArgs = Callable[..., tuple[tuple[object, ...], dict[str, Any]]]


class WakeSleep(MonteCarloELBO):
    r"""
    The wake-sleep algorithm [1], a baseline of Kingma and Welling [2].

    Two objectives side by side, each for the parameters of one program:

    .. math::
        \text{wake:} \quad & \max_\theta\; \frac{N}{B} \sum_n
            E_{q_\phi(z \mid x_n)} \log p_\theta(x_n, z) \\
        \text{sleep:} \quad & \max_\phi\; \frac{N}{B} \sum_n
            E_{p_\theta(z) p_\theta(x \mid z)} \log q_\phi(z \mid x)

    In the wake phase the guide draws latents of the data, and the model learns to make both
    likely. In the sleep phase the model dreams: it draws latents and data on the same minibatch,
    and the guide learns to recognize the latents in the dreamt data. Nothing is
    reparameterized, so latents may be discrete. Together the two are not the gradient of any
    function, and no bound of the evidence is maximised. The value reported is the plain ELBO of
    the wake phase, a bound that compares with the other objectives'.

    **How a dream reaches the guide.** The guide is called with the arguments of the step in which
    the observed tensors are replaced by dreamt ones: ``svi.step(x)`` with ``obs=x`` calls
    ``guide(x_dreamt)``. Observed tensors are found among the arguments, in nested lists and
    dictionaries as well, by identity or by shared memory (``obs=x[t]``, ``obs=x.view(-1, 784)``),
    or as copies, also of a plate's rows (``obs=x[idx]``). Entries that a mask takes out of the
    model's density keep their value. Data that are not among the arguments (a global variable, an
    attribute) cannot be replaced and are refused by name; where arguments follow from the data in
    another way, say how by ``dream_args``. A guide that reads the data from another argument than
    the model observes is refused too, since no dream would come there. Other arguments, such as
    covariates, stay as they are.

    The model must be a joint density from which latents and data can be drawn by running it: a
    ``pyro.factor`` that depends on latents is refused, and so is a model that reads the
    observed values from its arguments, as in ``Normal(x[t - 1], 1)``; take the value that
    ``pyro.sample`` returns, which is the dreamt one in a dream. Guides with auxiliary
    sites (AutoGuides) have no density of the model's latents and are refused as well.

    :param int num_particles: draws of z in the wake phase.
    :param int num_dreams: dreamt minibatches in the sleep phase.
    :param dream_args: a function ``(dream, *args, **kwargs) -> (args, kwargs)`` that makes the
        guide's arguments, where ``dream`` has the dreamt value of each observed site by name.
    :param options: ``max_plate_nesting``, ``vectorize_particles`` (of the wake phase),
        ``strict_enumeration_warning`` and ``retain_graph``, as in Pyro; see
        :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :raises ValueError: for counts below 1; at a step, for what is refused above.

    [1] Hinton, Dayan, Frey, Neal (1995), *The Wake-Sleep Algorithm for Unsupervised Neural
    Networks*.
    [2] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
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
        >>> bool(abs(pyro.param("slope") - 0.5) < 0.1)
        True
    """

    def __init__(
        self,
        num_particles: int = 1,
        num_dreams: int = 1,
        dream_args: DreamArgs | None = None,
        **options: Unpack[ELBOOptions],
    ) -> None:
        super().__init__(num_particles, **options)
        num_dreams = check_count("num_dreams", num_dreams)
        if dream_args is not None and not callable(dream_args):
            raise ValueError(
                f"dream_args must be a function (dream, *args, **kwargs) -> (args, kwargs), got "
                f"{dream_args!r}"
            )
        self.num_dreams = num_dreams
        self.dream_args = dream_args
        self._programs: tuple[Program, Program] | None = None
        self._checked: set[frozenset[str]] = set()

    def estimate(self, programs: Programs) -> Estimate:
        runs = self.sampler.independent(programs, detach_latents=True)
        value = as_scalar(sum(total_cost(elbo_costs(run.terms)) for run in runs))
        value = value / self.num_particles
        if not torch.is_grad_enabled():
            return Estimate(value, value, runs)
        wake = _total(t for run in runs for t in run.terms if not t.in_guide)
        nights = [self._sleep(programs, runs[0]) for _ in range(self.num_dreams)]
        sleep = _total(t for night in nights for t in night.terms)
        surrogate = wake / self.num_particles + sleep / self.num_dreams
        # A loss that is not finite is reported; the sleep phase's is not part of the value.
        value = torch.where(surrogate.detach().isfinite(), value, torch.nan)
        return Estimate(value, surrogate, [*runs, *nights], scored=True)

    def bounds_of(self, programs: Programs) -> Bounds:
        runs = self.sampler.independent(programs, detach_latents=True)
        sample = self.sampler.arrange(programs, runs)
        return elbo_bounds(sample, [elbo_costs(run.terms) for run in runs])

    def _sleep(self, programs: Programs, run: Run) -> Run:
        """The guide's terms of a dream on the minibatch of a wake run."""
        self._check(programs, run)
        with torch.no_grad():
            dreamt = dream(programs, run.subsamples)
            values = dreamt_values(run.model_trace, dreamt)
            dreaming = self._with_dream(programs, run, values)
        return recognize(dreaming, dreamt, run.subsamples)

    def _with_dream(self, programs: Programs, run: Run, values: dict[str, Tensor]) -> Programs:
        if self.dream_args is None:
            return substitute(programs, run.model_trace.nodes, values, run.subsamples)
        found = self.dream_args(values, *programs.args, **programs.kwargs)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise ValueError(
                f"dream_args must return the guide's arguments as a pair (args, kwargs), such as "
                f"((x,), {{}}), got {type(found).__name__}"
            )
        return replace(programs, args=tuple(found[0]), kwargs=found[1])

    def _check(self, programs: Programs, run: Run) -> None:
        """Once for each structure that the programs show, if these are not too many."""
        pair = programs.model, programs.guide
        if self._programs != pair:
            self._programs, self._checked = pair, set()
        sites = frozenset(run.model_trace.nodes)
        if sites in self._checked or len(self._checked) >= _MOST_CHECKS:
            return
        check_factors(programs, run)
        if self.dream_args is None:
            check_reads(programs, run)
        self._checked.add(sites)

    def __getstate__(self) -> dict[str, object]:
        # Programs are often local functions, which cannot be pickled; they are checked again.
        return {**self.__dict__, "_programs": None, "_checked": set()}


def _total(terms: Iterable[Term]) -> Tensor:
    return as_scalar(sum(t.log_prob.sum() * t.plate_scale for t in terms))
