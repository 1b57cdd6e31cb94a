"""Probe runs: densities at given latents, with constants instead of other random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_mcvae.programs.distributions import unvalidated
from pyro_mcvae.programs.messengers import ALONE, Leading, Minibatch, SampleFn, Substitutes
from pyro_mcvae.programs.run import Programs, run_pair
from pyro_mcvae.programs.terms import Term, guide_term, model_term, possible_terms, scored
from pyro_mcvae.programs.types import FactorKey, Message

# Constants instead of the random numbers that programs draw outside sample sites.


class FixedNoise(Messenger):
    """
    Replaces random numbers that programs draw outside sample sites by constants.

    Runs of different shapes draw different dropout masks, and cannot be compared. With constants
    they can: no unit is dropped, and noise has one value everywhere. Draws from a generator that
    the program passes are not replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at_site = False

    @contextmanager
    def active(self) -> Iterator[FixedNoise]:
        """Return a context for runs of the programs; enter it before all of their handlers."""
        with self, _Draws(self):
            yield self

    def replace(self, func: Any, args: tuple[Any, ...], drawn: Any) -> object:
        """Return the constant that replaces a draw."""
        if self._at_site:
            return drawn
        return _constant(func._schema.name.split("::")[-1].rstrip("_"), args, drawn)

    # This handler is the outermost one: only Pyro's own code runs between these two methods.
    def _process_message(self, msg: Message) -> None:
        self._at_site = True

    def _postprocess_message(self, msg: Message) -> None:
        self._at_site = False


class _Draws(TorchDispatchMode):
    """Intercepts random numbers below ``vmap``, where they have the dims of all particles."""

    def __init__(self, noise: FixedNoise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        has_generator = kwargs is not None and kwargs.get("generator") is not None
        if torch.Tag.nondeterministic_seeded in func.tags and not has_generator:
            return self._noise.replace(func, args, result)
        return result


def _constant(name: str, args: tuple[Any, ...], drawn: Any) -> object:
    """Return constants in the shape of an operation's draw; unknown operations keep the draw."""
    if name == "native_dropout":
        return args[0] / (1 - args[1]), drawn[1].fill_(True)
    if name == "bernoulli":
        return drawn.fill_(1)
    if name in ("rand", "rand_like", "uniform"):
        low, high = args[1:3] if name == "uniform" and len(args) > 2 else (0.0, 1.0)
        return drawn.fill_(low + 0.3 * (high - low))
    if name in ("randn", "randn_like"):
        return drawn.fill_(0.3)
    if name in ("normal", "normal_functional"):
        # The in-place form, or the form with means and standard deviations.
        mean, std = args[1:3] if len(args) > 2 else args if len(args) == 2 else (0.0, 1.0)
        return drawn.copy_(torch.as_tensor(mean + 0.3 * std))
    if name == "randperm":
        return drawn.copy_(torch.arange(len(drawn)))
    if name in ("randint", "randint_like", "random"):
        return drawn.fill_(drawn.min())
    if name in ("exponential", "geometric", "log_normal", "cauchy"):
        return drawn.fill_(1)
    return args[0].clone() if name == "_standard_gamma" else drawn


# Probe runs: the densities of programs at given latents.


class ProgramError(Exception):
    """The programs failed in a probe run; ``__cause__`` is their error."""


class Probe(NamedTuple):
    """One probe run, and its minibatch."""

    guide_trace: Trace
    model_trace: Trace
    terms: dict[FactorKey, Term]
    subsamples: Minibatch

    @property
    def log_probs(self) -> dict[FactorKey, Tensor]:
        return {key: torch.as_tensor(t.log_prob).detach() for key, t in self.terms.items()}


@contextmanager
def probing(programs: Programs) -> Iterator[None]:
    """
    Turn off Pyro's validation and warnings for probe runs, and restore all state afterwards.

    The gradient mode stays that of the step, because programs may depend on it. Every block begins
    with the random state of the step. Random numbers outside sample sites are constants.
    """
    with (
        programs.isolated(),
        pyro.validation_enabled(False),
        warnings.catch_warnings(),
        FixedNoise().active(),
    ):
        warnings.simplefilter("ignore")
        yield


def probe(
    programs: Programs,
    subsamples: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    sample_fn: SampleFn | None = None,
    leading: Leading = ALONE,
) -> Probe:
    """
    Run the programs, within :func:`probing`.

    Factors whose density cannot be computed (a flow without an inverse) are left out.

    :param subsamples: the minibatch.
    :param values: values of guide sites, by name.
    :param sample_fn: returns values of the other random sites.
    :param leading: the leading dims, with the particles' plates.
    :raises ProgramError: from the programs' error.
    """
    substitutes = Substitutes(Minibatch(subsamples), values or {}, sample_fn)
    try:
        guide_trace, model_trace = run_pair(programs, substitutes, leading)
        with _taking_any_value(guide_trace, model_trace):
            terms = [*possible_terms(model_term, model_trace)]
            terms += possible_terms(guide_term, guide_trace)
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error
    return Probe(guide_trace, model_trace, {t.key: t for t in terms}, substitutes.subsamples)


def _taking_any_value(*traces: Trace) -> AbstractContextManager[None]:
    """Turn off the validation of distributions made outside the programs, so they accept NaN."""
    return unvalidated([s["fn"] for trace in traces for s in scored(trace)])
