"""Compare batched runs with single runs, for particles, chains, slots and states."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.programs.contract import check_batch_dims
from pyro_mcvae.programs.enumeration import is_state, support_of_state
from pyro_mcvae.programs.messengers import LeadingDims
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.programs.types import PARTICLE_PLATE, FactorKey, LeadingDimsError, Message, Site
from pyro_mcvae.programs.vmap import Mode, particle_plates
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.marked import (
    MarkedRun,
    MarkedRunError,
    last_entry,
    marked,
    marked_run,
    single_values,
)

# What the entries of the leading dims of runs are, for errors, and the remedies.


class Entries(NamedTuple):
    """
    What the entries of leading dims are, for errors.

    :ivar remedy: how to run without leading dims; another remedy follows.
    :ivar sizes: the remedy for sizes that do not match.
    """

    name: str
    remedy: str
    sizes: str = ""


_EXPAND = (
    "Where labels are joined with data, infer={'enumerate': 'parallel', 'expand': True} at the "
    "discrete site gives its values the sizes of the plates. "
)
PARTICLES = Entries("vectorized particles", "Pass vectorize_particles=False, or")
STATES = Entries("states side by side", "Pass vectorize_particles=False, or")
ENUMERATED = Entries(
    "all values of its enumerated sites",
    "Remove infer={'enumerate': 'parallel'} and draw these in the guide, or",
    _EXPAND,
)
SLOTS = Entries(
    "slots of discrete sites and vectorized particles",
    "Pass num_categories=0, num_samples=1 and vectorize_particles=False, or",
    _EXPAND,
)


def not_vectorizable(
    name: Entries, count: int | None, nesting: int, error: Exception
) -> LeadingDimsError:
    """Return the error for programs that fail only with leading dims."""
    several = f"{count} {name.name}" if count is not None else name.name
    cause = (
        str(error)
        if isinstance(error, MarkedRunError | _BatchedError)
        else f"{type(error).__name__}: {error}"
    )
    return LeadingDimsError(
        f"the model or the guide cannot be run with {several} in batch dim {-nesting - 1}, to the "
        f"left of its plates, though it runs with one. {name.remedy} make it broadcast over "
        f"leading dims: index from the right, as in z[..., 0], or means[..., group] instead of "
        f"means[group] (Vindex for tables). {name.sizes if 'must match' in cause else ''}"
        f"The error was: {cause}",
        reason=cause,
    )


class NotComparedError(LeadingDimsError):
    """Programs run with leading dims, but cannot be compared with single runs."""

    def __init__(self, name: Entries, error: Exception) -> None:
        super().__init__(
            f"the {name.name} cannot be compared with runs of one: {error}. {name.remedy} make the "
            f"model and guide run at any latents",
            reason=f"runs of one cannot be compared with: {error}",
        )


def unstable_sharing(attempts: int, shared: frozenset[str]) -> LeadingDimsError:
    """Return the error for programs whose global sites differ between runs."""
    return LeadingDimsError(
        f"the programs have different global sites in each of {attempts} runs on the same "
        f"minibatch (last {sorted(shared)}), so the particles cannot be vectorized: pass "
        f"vectorize_particles=False"
    )


# Compare batched runs with a loop.

# Runs of other shapes use other kernels, with another order of summation.
_ROUNDING, _HALF = 2**12, 4
# For programs in half precision, or with iterative solvers: relative to the spread of the entries.
_OF_SPREAD = 1e-3


def differ(log_prob: Tensor, expected: Tensor) -> Tensor:
    """
    Return which entries of two log densities differ by more than rounding.

    Rounding is relative to the entry. Errors of a solver, or of a network in half precision, are
    relative to the spread of the entries. Infinite and NaN entries are not compared, because
    rounding decides between them.
    """
    try:
        log_prob, expected = torch.broadcast_tensors(log_prob.detach(), expected.detach())
    except RuntimeError:
        return torch.ones_like(expected, dtype=torch.bool)
    both = log_prob.isfinite() & expected.isfinite()
    log_prob, expected = torch.where(both, log_prob, 0.0), torch.where(both, expected, 0.0)
    if not expected.numel():
        return torch.zeros_like(expected, dtype=torch.bool)
    spread = (expected.max() - expected.min()) * _OF_SPREAD
    # Under autocast the outputs of networks have half precision.
    shorter = torch.is_autocast_enabled(log_prob.device.type)
    precision = torch.finfo(torch.bfloat16 if shorter else log_prob.dtype).eps
    allowed = (_HALF if shorter else _ROUNDING) * precision * expected.abs().clamp(min=1.0) + spread
    return (log_prob - expected).abs() > allowed


def _in_sum(batched: Tensor, single: Tensor) -> str:
    return f" ({float(batched.sum()):.4g} and {float(single.sum()):.4g} in sum)"


@dataclass(frozen=True)
class BatchCheck:
    """
    The check of a batched run of particles, slots or states against single runs.

    :ivar run: a run with the programs' plates and sizes.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar mode: how the particles are vectorized.
    :ivar name: what the entries of the leading dims are.
    :ivar ran: whether ``run`` was vectorized in the same way, so this vectorization is possible.
    :ivar mixes: whether batch normalization may treat all particles as one batch.
    """

    programs: Programs
    run: Run
    shared: GlobalSites
    mode: Mode
    name: Entries
    ran: bool = True
    mixes: bool = True

    def check(self) -> None:
        """
        Check that a vectorized run has the densities of its particles run one by one.

        A marked run of a few particles has the factors of each particle depend on its own draws
        alone, and couples no elements of a plate that a single run does not couple. The densities
        of the last particle are those of a single run at its draws. That run repeats its random
        numbers outside sample sites (dropout).

        :raises LeadingDimsError: naming the site with another density, or the line that draws,
            reads or normalizes for all particles together.
        """
        try:
            self._check()
        except _BatchedError as error:
            if not self.ran:
                raise not_vectorizable(self.name, 3, self.run.nesting, error) from error
            if same := self.run.outer_sizes & self.run.inner_sizes:
                raise self._mistaken(min(same), error) from error
            raise NotComparedError(self.name, error) from error
        except MarkedRunError as error:
            # The programs may need more particles, or fail in the step as well.
            raise NotComparedError(self.name, error) from error

    def _mistaken(self, count: int, error: Exception) -> LeadingDimsError:
        """
        Return the error for programs that run only with as many particles as another dim has.

        ``means[group]`` indexes particles instead of groups. The shapes fit by chance if the counts
        are equal, but not with another count.
        """
        return self._error(
            f"the model or the guide runs with {count} {self.name.name}, the size of another dim, "
            f"but not with another number, so one dim may be mistaken for the other. The error "
            f"was: {error}",
            "make it broadcast over leading dims: index from the right, as in means[..., group] "
            "instead of means[group]",
            f"{count} {self.name.name} are mistaken for another dim of this size",
        )

    def _count(self, least: int) -> int:
        """Return a number of particles that is not the size of another dim."""
        return next(n for n in itertools.count(least) if n not in self.run.inner_sizes)

    def fails(self) -> bool:
        """Return whether programs fail if all particles have the draws of a single run."""
        try:
            self._batched(self._count(2), marked(self.programs, self.run), as_single=slice(None))
        except _BatchedError:
            return True
        return False

    def _batched(
        self, count: int, single: MarkedRun, as_single: slice = slice(-1, None)
    ) -> MarkedRun:
        """
        Return a marked run of some particles.

        :param as_single: the particles that have the draws of a single run; the last one.
        """
        plates = particle_plates(self.mode, count, -self.run.nesting - 1, self.shared)
        values = {n: s["value"] for n, s in _random_sites(single).items()}

        def sample_fn(msg: Message) -> Tensor | None:
            value, fn = values.get(msg["name"]), msg["fn"]
            if value is None or all(f.name != PARTICLE_PLATE for f in msg["cond_indep_stack"]):
                return value
            drawn = fn(*msg["args"], **msg["kwargs"])
            dim = drawn.dim() - fn.event_dim - self.run.nesting - 1
            return changed_draw(partial(_with_entries, dim, as_single), drawn, value)

        try:
            result = marked_run(
                self.programs,
                single.subsamples,
                sample_fn=sample_fn,
                leading=plates,
                replayed=single.marks.draws,
            )
            check_batch_dims([*result.terms.values()], self.run.nesting)
            return result
        except (MarkedRunError, ValueError) as error:
            raise _BatchedError(str(error)) from error

    def _check(self) -> None:
        single = marked(self.programs, self.run)
        if single.error_alone is not None:
            raise single.error_alone
        batched = self._batched(self._count(2), single)
        for read in batched.reads[:1]:
            raise self._error(
                f"the programs read a value that depends on site '{min(read.sites)}', at "
                f"{read.line}, and would decide for all {self.name.name} together",
                "decide for each by torch.where",
                f"a value is read that depends on site '{min(read.sites)}', at {read.line}",
            )
        if self.run.leading is not None or not self.ran:
            # Slots may share noise that does not depend on their values.
            self._check_draws(batched, single)
        by_batches = batched.by_batches
        for key in batched.mixed:
            if key not in by_batches:
                raise self._mismatch_error(key, _DEPENDS)
            if not self.mixes:
                line = batched.marks.batches[0]
                raise self._error(
                    f"batch normalization at {line} treats all {self.name.name} as one batch",
                    "use it in the encoder, which runs once, or use layer normalization",
                    f"all {self.name.name} would be one batch at {line}",
                )
        for key, plates in batched.coupled.items():
            if plates - single.coupled.get(key, frozenset()):
                raise self._mismatch_error(key, _DEPENDS)
        # The statistics of a layer in evaluation mode may be equal for all channels at present.
        channels = batched.marks.channels, single.marks.channels
        for (shape, bit), (alone, _) in zip(*channels, strict=False):
            for key in (k for k, bits in batched.bits.items() if bits & bit and shape != alone):
                raise self._mismatch_error(key, _DEPENDS)
        self._check_values(batched, single)
        if batched.marker.draws_on_host:
            self._check_host_draws(single)

    def _check_values(self, batched: MarkedRun, single: MarkedRun) -> None:
        """Check that the last particle has the densities of the single run."""
        exempt = batched.by_batches if self.mixes else frozenset()
        found = self._mismatched(batched, single, exempt)
        if not found:
            return
        # A generator of its own gives other numbers to a second run, too; the inverse of a flow may
        # fail at one particle; an evaluator may have kept a single run of earlier parameters.
        repeated, second = self._single(single), self._single(single)
        other = self._batched(self._count(2), repeated)
        again = self._mismatched(other, repeated, exempt)
        for key, densities in found.items():
            if {key} <= repeated.log_probs.keys() & second.log_probs.keys() and bool(
                differ(second.log_probs[key], repeated.log_probs[key]).any()
            ):
                raise self._noise_error(key, "with a generator that is not PyTorch's")
            if key in again:
                raise self._mismatch_error(
                    key,
                    f"has another log density with a leading dim than at the same latents without"
                    f"{_in_sum(*densities)}",
                )

    def _mismatched(
        self, batched: MarkedRun, single: MarkedRun, exempt: frozenset[FactorKey]
    ) -> dict[FactorKey, tuple[Tensor, Tensor]]:
        """Return the densities of the last particle that are not those of the single run."""
        found = {}
        after, before = batched.log_probs, single.log_probs
        for key in after.keys() & before.keys() - exempt:
            pair = last_entry(after[key], self.run.nesting), before[key]
            if bool(differ(*pair).any()):
                found[key] = pair
        return found

    def _single(self, single: MarkedRun) -> MarkedRun:
        """Repeat a single run at its draws."""
        values = {n: s["value"] for n, s in _random_sites(single).items()}
        return marked_run(
            self.programs,
            single.subsamples,
            sample_fn=lambda msg: values.get(msg["name"]),
            replayed=single.marks.draws,
        )

    def _check_draws(self, batched: MarkedRun, single: MarkedRun) -> None:
        """Check that no density depends on random numbers that all particles share."""
        shared = list(batched.marks.draws)
        if len(single.marks.draws) == len(shared):  # else they cannot be matched
            pairs = zip(shared, single.marks.draws, strict=True)
            shared = [a for a, b in pairs if a.value.numel() == b.value.numel()]
        for draw in shared:
            for key, bits in batched.bits.items():
                if bits & draw.bit:
                    raise self._noise_error(key, f"at {draw.line}")

    def _check_host_draws(self, single: MarkedRun) -> None:
        """Check that no density depends on draws of NumPy or Python, which particles share."""
        with self.programs.restored():
            state = torch.get_rng_state()
            pyro.set_rng_seed((torch.initial_seed() + 1) % 2**31)
            torch.set_rng_state(state)
            for generator in self.programs.read.generators.values():
                generator.random()
            changed = self._single(single)
        before, after = single.log_probs, changed.log_probs
        for key in before.keys() & after.keys():
            if before[key].shape != after[key].shape or bool(differ(before[key], after[key]).any()):
                raise self._noise_error(key, "by NumPy or Python")

    def _error(self, what: str, remedy: str, reason: str) -> LeadingDimsError:
        return LeadingDimsError(f"{what}. {self.name.remedy} {remedy}", reason=reason)

    def _noise_error(self, key: FactorKey, where: str) -> LeadingDimsError:
        return self._error(
            f"site '{key.name}' of the {key.program} depends on random numbers that are drawn "
            f"outside sample sites {where}, which all {self.name.name} would share",
            "draw them by pyro.sample",
            f"site '{key.name}' of the {key.program} has draws outside sample sites, {where}",
        )

    def _mismatch_error(self, key: FactorKey, what: str) -> LeadingDimsError:
        return self._error(
            f"site '{key.name}' of the {key.program} {what}, so the program confuses two dims, as "
            f"softmax(1), flatten(1), z - z.mean(0) and nn.BatchNorm1d do. The leading dim is "
            f"that of the {self.name.name}",
            "count dims from the right, as in softmax(-1), and put h.reshape(-1, h.shape[-1]) and "
            "a reshape back around layers that take a batch",
            f"site '{key.name}' of the {key.program} confuses two dims",
        )


_DEPENDS = (
    "has another log density with a leading dim than without: one that depends on other particles "
    "or data, even if its value is the same at present"
)


class _BatchedError(Exception):
    """Programs failed with leading dims in a marked run."""


def _random_sites(result: MarkedRun) -> dict[str, Site]:
    """Return the random sites of both programs; a model may have additional, enumerated ones."""
    traces = result.model_trace, result.guide_trace
    return {n: s for trace in traces for n, s in trace.nodes.items() if is_random(s)}


def _with_entries(dim: int, entries: slice, drawn: Tensor, value: Tensor) -> Tensor:
    """Replace entries of a dim by the same value."""
    result = drawn.movedim(dim, 0).clone()
    one = result[0]
    same = value.numel() == one.numel()
    result[entries] = as_shape(value, one.shape) if same else value.expand_as(one)
    return result.movedim(0, dim)


def check_states(programs: Programs, run: Run) -> None:
    """
    Check that a model has the same densities with all values of enumerated sites as with one.

    The first and the last value of each enumerated site are compared.

    :param run: a run in which the model's enumerated sites are summed.
    :raises RuntimeError: naming the site with another density, or if they cannot be compared.
    """
    try:
        _compare_states(programs, run)
    except MarkedRunError as error:
        raise RuntimeError(
            f"the values of the model's enumerated sites cannot be compared with single ones "
            f"({error}): draw these sites in the guide, or make the model run again at the same "
            f"latents"
        ) from error


def _compare_states(programs: Programs, run: Run) -> None:
    values = single_values(run)
    batched = marked_run(
        programs, run.subsamples, values=values, leading=LeadingDims(state_dim=-1 - run.nesting)
    )
    sites = [t.site for t in batched.terms.values() if is_state(t.site)]
    states = {s["name"]: support_of_state(s) for s in sites}
    for key in batched.mixed_states:
        if key.program == "model":
            raise _state_mismatch(key, "")
    singles = []
    for k in (-1, 0):

        def sample_fn(msg: Message, k: int = k) -> Tensor | None:
            state = states.get(msg["name"])
            return None if state is None else state[k].expand(msg["fn"].shape())

        single = marked_run(
            programs,
            run.subsamples,
            values=values,
            sample_fn=sample_fn,
            replayed=batched.marks.draws,
        )
        singles.append(single)
        for key, log_prob in batched.log_probs.items():
            if key.program == "model" and key in single.log_probs:
                one, expected = _state(log_prob, k, run.nesting), single.log_probs[key]
                if bool(differ(one, expected).any()):
                    raise _state_mismatch(key, _in_sum(one, expected))
    for key, plates in batched.coupled.items():
        if plates - frozenset().union(*(s.coupled.get(key, frozenset()) for s in singles)):
            raise _state_mismatch(key, "")


def _state(value: Tensor, at: int, nesting: int) -> Tensor:
    """Select one value of each enumerated site: ``[*plates]``."""
    while value.dim() > nesting:
        value = value[at]
    return value


def _state_mismatch(key: FactorKey, sums: str) -> RuntimeError:
    return RuntimeError(
        f"site '{key.name}' of the model has another log density with all values of the enumerated "
        f"sites side by side than with one of them{sums}, so the program confuses two dims. Index "
        f"and reduce from the right, as in Vindex(means)[..., y] and softmax(-1), and do not use "
        f"the shape of an enumerated value. Or draw these sites in the guide"
    )


# Compare runs once for each structure and size of an analysis.

_logger = logging.getLogger(__name__)


def compare_leading_dims(analysis: Analysis, batch: BatchCheck, trusted: bool) -> None:
    """
    Check that a batched run has the densities of a loop.

    :param bool trusted: whether the user declares that the programs broadcast over leading dims;
        then programs that cannot be compared with single runs only cause a warning.
    :raises LeadingDimsError: as in :class:`BatchCheck`.
    """
    # The key is without the number of particles, because the comparison uses another number.
    key = "compared", batch.run.signature, batch.shared, batch.mode

    def compare() -> bool:
        try:
            batch.check()
        except NotComparedError as error:
            if not (trusted and batch.ran):
                raise
            _logger.warning("%s (vectorize_particles=True is trusted)", error)
        return True

    analysis.cached(key, compare)


def compare_states(analysis: Analysis, programs: Programs, run: Run) -> None:
    """Check that a run whose states are summed has the densities of single states."""
    analysis.cached(("compared states", run.signature), lambda: check_states(programs, run))
