"""Compare batched runs with single runs, for particles, chains, slots and states."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.programs.contract import check_batch_dims
from pyro_mcvae.programs.enumeration import is_state, support_of_state
from pyro_mcvae.programs.messengers import Leading
from pyro_mcvae.programs.probing import (
    Draw,
    Probe,
    ProgramError,
    perturbed,
    probe,
    probe_model,
    probing,
)
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import changed_draw, is_latent, is_random
from pyro_mcvae.programs.terms import scored
from pyro_mcvae.programs.types import FactorKey, LeadingDimsError, Message, Site
from pyro_mcvae.programs.vmap import Mode, particle_plates
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.interventions import (
    Values,
    differing,
    intervene,
    other_value,
    random_half,
    reseeded,
)
from pyro_mcvae.structure.provenance import Batch, ReadRecorder, reads_of_latents

# The contents of the leading dims of runs, for errors, and the remedies.


class LeadingDimsName(NamedTuple):
    """
    The contents of leading dims, for errors.

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
PARTICLES = LeadingDimsName("vectorized particles", "Pass vectorize_particles=False, or")
STATES = LeadingDimsName("states side by side", "Pass vectorize_particles=False, or")
ENUMERATED = LeadingDimsName(
    "all values of its enumerated sites",
    "Remove infer={'enumerate': 'parallel'} and draw these in the guide, or",
    _EXPAND,
)
SLOTS = LeadingDimsName(
    "slots of discrete sites and vectorized particles",
    "Pass num_categories=0, num_samples=1 and vectorize_particles=False, or",
    _EXPAND,
)


def not_vectorizable(
    name: LeadingDimsName, count: int | None, nesting: int, error: Exception
) -> LeadingDimsError:
    """Return the error for programs that fail only with leading dims."""
    several = f"{count} {name.name}" if count is not None else name.name
    cause = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
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

    def __init__(self, name: LeadingDimsName, error: Exception) -> None:
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

Densities = dict[FactorKey, Tensor]

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


class _Entry(NamedTuple):
    """
    One entry of the leading dims.

    :ivar select: selects the entry from a batched density.
    :ivar alone: returns the entry's densities in a single run, at batched latents.
    """

    select: Callable[[Tensor], Tensor]
    single: Callable[[Values], Densities]


def _mismatched(
    batched: Densities, entry: _Entry, single: Densities
) -> dict[FactorKey, tuple[Tensor, Tensor]]:
    """Return the batched and single densities of an entry that differ."""
    keys = [key for key in batched if key in single]
    pairs = {key: (entry.select(batched[key]), single[key]) for key in keys}
    return {key: pair for key, pair in pairs.items() if bool(differ(*pair).any())}


def _in_sum(batched: Tensor, single: Tensor) -> str:
    return f" ({float(batched.sum()):.4g} and {float(single.sum()):.4g} in sum)"


def _extra_change(
    before: Densities,
    batched: Callable[[Values], Densities],
    entries: Sequence[tuple[_Entry, Densities]],
    change: Callable[[bool], Values],
    smooth: bool,
) -> FactorKey | None:
    """
    Return a density that changes with the latents in a batched run, but not in single runs.

    :param before: the batched densities at the unchanged latents.
    :param entries: the compared entries, each with its single densities there.
    :param change: returns the changed latents: NaN, or, for programs that reject NaN, other values.
    :param smooth: whether some latents may be NaN.
    """
    for undefined in (True, False) if smooth else (False,):
        changed = change(undefined)
        try:
            after = batched(changed)
            singles = [entry.single(changed) for entry, _ in entries]
        except ProgramError:
            if undefined:
                continue
            raise
        for key in (k for k in before if k in after):
            mask = differing(before[key], after[key], undefined)
            for (entry, old), new in zip(entries, singles, strict=True):
                if key in old and key in new:
                    allowed = differing(old[key], new[key], undefined)
                    if bool((entry.select(mask) & ~allowed).any()):
                        return key
        break
    return None


@dataclass(frozen=True)
class LeadingRun:
    """
    A batched run of particles, slots or states.

    :ivar run: a run with the programs' plates and sizes.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar mode: how the particles are vectorized.
    :ivar name: the contents of the leading dims.
    :ivar ran: whether ``run`` was vectorized in the same way, so this vectorization is possible.
    :ivar mixes: whether batch normalization may treat all particles as one batch.
    """

    programs: Programs
    run: Run
    shared: GlobalSites
    mode: Mode
    name: LeadingDimsName
    ran: bool = True
    mixes: bool = True

    def check(self, thorough: bool = True) -> None:
        """
        Check that a vectorized run has the densities of its particles run one by one.

        Random numbers outside sample sites (dropout) are constants here, and batch normalization
        has fixed statistics.

        :param bool thorough: test two particles at generic parameters, instead of one at the
            present parameters.
        :raises LeadingDimsError: naming the site with another density, or the line that draws,
            reads or normalizes for all particles together.
        """
        if thorough:
            # With generic parameters, a zero-initialized layer does not hide a difference.
            try:
                with perturbed(self.programs):
                    return self._check(2)
            except ProgramError:
                pass  # programs that fail at other parameters
        try:
            self._check(1 + thorough)
        except ProgramError as error:
            if isinstance(error, _BatchedError):
                if not self.ran:
                    raise not_vectorizable(self.name, 3, self.run.nesting, error) from error
                if same := self.run.outer_sizes & self.run.inner_sizes:
                    raise self._mistaken(min(same), error) from error
            # The programs may need more particles, or fail in the step as well.
            raise NotComparedError(self.name, error) from error
        return None

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

    def _batched(self, count: int, values: Values | None = None) -> Probe:
        """Probe ``count`` particles, drawing their latents if ``values`` is None."""
        plates = particle_plates(self.mode, count, -self.run.nesting - 1, self.shared)
        sample_fn = None if values is None else lambda msg: values.get(msg["name"])
        try:
            result = probe(self.programs, self.run.subsamples, sample_fn=sample_fn, leading=plates)
            check_batch_dims([*result.terms.values()], self.run.nesting)
            return result
        except (ProgramError, ValueError) as error:
            raise _BatchedError(str(error)) from error

    def _single(self, values: Mapping[str, Tensor]) -> Densities:
        """Return the densities of one particle at its latents."""

        def sample_fn(msg: Message) -> Tensor:
            # A KeyError for a latent that particles do not have ends the comparison.
            return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

        return probe(self.programs, self.run.subsamples, sample_fn=sample_fn).log_probs

    def _check(self, tested: int) -> None:
        """Compare with single runs of the first ``tested`` particles, never of the last one."""
        nesting, number = self.run.nesting, self._count(tested + 1)
        with probing(self.programs) as noise, ReadRecorder() as watch:
            before = _host_state()
            first = self._batched(number)
            moved = _host_state() != before
        sites = _random_sites(first)
        with reseeded():
            other_values = {n: other_value(s) for n, s in sites.items()}
            halves = {n: _half(s, nesting) for n, s in sites.items()}
        values = {n: s["value"] for n, s in sites.items()}

        def of(at: dict[str, Tensor], k: int) -> dict[str, Tensor]:
            return {n: _value_of(sites[n], v, k, number, nesting) for n, v in at.items()}

        def batched(at: Values) -> Densities:
            with probing(self.programs):
                return self._batched(number, at).log_probs

        def single(k: int, at: Values) -> Densities:
            with probing(self.programs):
                return self._single(of(at, k))

        def changed(undefined: bool) -> Values:
            """Change half of the first particle's latents, and the other half of the second's."""
            where = {}
            for name, half in halves.items():
                if values[name].dim() - sites[name]["fn"].event_dim > half.dim():  # not shared
                    rows = [half, ~half][:tested]
                    where[name] = torch.stack(rows + [half & ~half] * (number - tested))
            return intervene(sites, values, other_values, where, undefined)

        reads = reads_of_latents(self.programs, self.run.subsamples, frozenset(sites), watch.reads)
        for read in reads[:1]:
            raise self._error(
                f"the programs read a value that depends on site '{min(read.sites)}', at "
                f"{read.line}, and would decide for all {self.name.name} together",
                "decide for each by torch.where",
                f"a value is read that depends on site '{min(read.sites)}', at {read.line}",
            )
        if self.run.leading is not None or not self.ran:
            # Slots may share noise that does not depend on their values.
            if noise.draws or moved:
                self._check_draws(of(values, 0), noise.draws, moved)
            if not self.mixes and watch.batches:
                self._check_batches(of(values, 0), watch.batches)
        every = [
            _Entry(partial(_one_of, particle=k, count=number, inner=nesting), partial(single, k))
            for k in range(number)
        ]
        singles = [entry.single(values) for entry in every[:tested]]

        # The last particle is not changed.
        unchanged = _Entry(every[-1].select, lambda _: singles[0])
        entries = [*zip(every, singles, strict=False), (unchanged, singles[0])]
        smooth = any(v.is_floating_point() for v in values.values())

        def compare(densities: Densities) -> None:
            self._check_values(densities, every, singles, values)
            key = _extra_change(densities, batched, entries, changed, smooth)
            if key is not None:
                raise self._mismatch_error(
                    key,
                    "has another log density, that of other particles or data, with a leading dim "
                    "than without",
                )

        try:
            compare(first.log_probs)
        except LeadingDimsError:
            # Untraced draws differ once the latents are fixed.
            compare(batched(values))

    def _check_values(
        self, batched: Densities, every: list[_Entry], single: list[Densities], values: Values
    ) -> None:
        """Check that each entry has the same value as in a single run."""
        mismatches = [_mismatched(batched, *pair) for pair in zip(every, single, strict=False)]
        if not any(mismatches):
            return
        # The inverse of a flow may fail at one particle.
        mismatches += [_mismatched(batched, e, e.single(values)) for e in every[len(single) :]]
        repeated = every[0].single(values)
        for key in batched:
            pairs = [mismatch[key] for mismatch in mismatches if key in mismatch]
            if len(pairs) < 2:
                continue
            if key in repeated and bool(differ(single[0][key], repeated[key]).any()):
                raise self._noise_error(key, "with a generator that is not PyTorch's")
            raise self._mismatch_error(
                key,
                f"has another log density with a leading dim than at the same latents without"
                f"{_in_sum(*pairs[0])}",
            )

    def _check_draws(
        self, values: Mapping[str, Tensor], drawn: Sequence[Draw], moved: bool
    ) -> None:
        """
        Check that no density depends on random numbers outside sample sites that particles share.

        :param values: the latents of one particle.
        :param drawn: the draws outside sample sites in the batched run.
        :param bool moved: whether that run drew from the generators of NumPy or Python.
        """
        with probing(self.programs, fixes=False) as noise:
            first = self._single(values)
        single, shared = noise.draws, list(drawn)
        if len(single) == len(drawn):  # else they cannot be matched
            shared = [t for t, a in zip(drawn, single, strict=True) if t.size == a.size]
        places = [(True, f"at {draw.line}") for draw in shared[:1]]
        for of_torch, place in [*places, *[(False, "by NumPy or Python")] * moved]:
            with probing(self.programs, fixes=False):
                state = torch.get_rng_state()
                pyro.set_rng_seed((torch.initial_seed() + 1) % 2**31)
                if not of_torch:
                    torch.set_rng_state(state)
                changed = self._single(values)
            for key in first.keys() & changed.keys():
                if bool(differing(first[key], changed[key], undefined=False).any()):
                    raise self._noise_error(key, place)

    def _check_batches(self, values: Mapping[str, Tensor], batched: Sequence[Batch]) -> None:
        """
        Check that each particle has the statistics of its own batch.

        :param values: the latents of one particle.
        :param batched: the normalized tensors of the batched run.
        """
        with probing(self.programs), ReadRecorder() as recorder:
            self._single(values)
        sizes = [batch.size for batch in recorder.batches] + [0] * len(batched)
        for batch, size in zip(batched, sizes, strict=False):
            if batch.size > size:
                raise self._error(
                    f"batch normalization at {batch.line} treats all {self.name.name} as one batch",
                    "use it in the encoder, which runs once, or use layer normalization",
                    f"all {self.name.name} would be one batch at {batch.line}",
                )

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


class _BatchedError(ProgramError):
    """Programs failed with leading dims in a probe run."""


def _random_sites(result: Probe) -> dict[str, Site]:
    """Return the random sites of both programs; a model may have additional, enumerated ones."""
    traces = result.model_trace, result.guide_trace
    return {n: s for trace in traces for n, s in trace.nodes.items() if is_random(s)}


def _half(site: Site, nesting: int) -> Tensor:
    """Return a random half of the entries of one particle's batch, at least one: ``[*batch]``."""
    batch = site["fn"].batch_shape
    return random_half(batch[max(0, len(batch) - nesting) :])


def _one_of(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """Select one particle of a tensor whose last ``inner`` dims belong to each particle."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)


def _value_of(site: Site, value: Tensor, particle: int, count: int, nesting: int) -> Tensor:
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: _one_of(v, particle, count, inner), value)


def _host_state() -> list[object]:
    """Return the state of Python's and NumPy's global generators."""
    state = pyro.util.get_rng_state()
    kind, keys, *position = state["numpy"]
    return [state["random"], kind, keys.tobytes(), *position]


def check_states(programs: Programs, run: Run) -> None:
    """
    Check that a model has the same densities with all values of enumerated sites as with one.

    The first and the last value of each enumerated site are compared.

    :param run: a run in which the model's enumerated sites are summed.
    :raises RuntimeError: naming the site with another density, or if they cannot be compared.
    """
    try:
        for generic in (True, False):
            try:
                with perturbed(programs) if generic else nullcontext():
                    _compare_states(programs, run)
            except ProgramError:
                if not generic:
                    raise
    except ProgramError as error:
        raise RuntimeError(
            f"the values of the model's enumerated sites cannot be compared with single ones "
            f"({error}): draw these sites in the guide, or make the model run at any latents"
        ) from error


def _compare_states(programs: Programs, run: Run) -> None:
    with probing(programs):
        guide_trace = probe(programs, run.subsamples).guide_trace
    latents = {s["name"]: s for s in scored(guide_trace) if is_random(s)}
    values = {s["name"]: s["value"] for s in scored(guide_trace) if is_latent(s)}
    with reseeded():
        other_values = {n: other_value(s) for n, s in latents.items()}
        halves = {n: random_half(s["fn"].batch_shape) for n, s in latents.items()}
    states: dict[str, Tensor] = {}

    def batched(at: Values) -> Densities:
        leading = Leading(state_dim=-1 - run.nesting)
        with probing(programs):
            terms = probe_model(programs, guide_trace, run.subsamples, at, leading).values()
        states.update({t.key.name: support_of_state(t.site) for t in terms if is_state(t.site)})
        return {t.key: t.log_prob.detach() for t in terms}

    def single(k: int, at: Values) -> Densities:
        def sample_fn(msg: Message) -> Tensor | None:
            state = states.get(msg["name"])
            return None if state is None else state[k].expand(msg["fn"].shape())

        with probing(programs):
            densities = probe(programs, run.subsamples, at, sample_fn).log_probs
        return {key: d for key, d in densities.items() if key.program == "model"}

    before = batched(values)
    entries = [
        _Entry(partial(_state, at=k, nesting=run.nesting), partial(single, k)) for k in (-1, 0)
    ]
    singles = [entry.single(values) for entry in entries]
    for pair in zip(entries, singles, strict=True):
        for key, densities in _mismatched(before, *pair).items():
            raise _state_mismatch(key, _in_sum(*densities))
    smooth = any(values[n].is_floating_point() for n in latents)
    for chosen in halves, {n: ~half for n, half in halves.items()}:
        change = partial(intervene, latents, values, other_values, chosen)
        pairs = [*zip(entries, singles, strict=True)]
        extra = _extra_change(before, batched, pairs, change, smooth)
        if extra is not None:
            raise _state_mismatch(extra, "")


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


def compare_leading_dims(analysis: Analysis, leading: LeadingRun, trusted: bool) -> None:
    """
    Check that a batched run has the densities of a loop.

    :param bool trusted: whether the user declares that the programs broadcast over leading dims;
        then programs that cannot be compared with single runs only cause a warning.
    :raises LeadingDimsError: as in :class:`LeadingRun`.
    """
    # The key is without the number of particles, because the comparison uses another number.
    key = "compared", leading.run.signature, leading.shared, leading.mode

    def compare() -> bool:
        try:
            leading.check(thorough=not analysis.before(key))
        except NotComparedError as error:
            if not (trusted and leading.ran):
                raise
            _logger.warning("%s (vectorize_particles=True is trusted)", error)
        return True

    analysis.cached(key, compare)


def compare_states(analysis: Analysis, programs: Programs, run: Run) -> None:
    """Check that a run whose states are summed has the densities of single states."""
    analysis.cached(("compared states", run.signature), lambda: check_states(programs, run))
