"""Compare batched runs with single runs: particles, chains, slots, states."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from pyro_mcvae.programs.vmap import Way, particle_plates
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.dependencies import Batch, ReadRecorder, reads_of_latents
from pyro_mcvae.structure.independence import (
    Values,
    differing,
    intervene,
    other_draws,
    other_value,
    random_half,
)

# What stands in the leading dims of runs, for errors, and what to do without it.


class LeadingDimsName(NamedTuple):
    """
    What stands in leading dims, for errors.

    :ivar remedy: what to do without them, to be followed by another remedy.
    :ivar sizes: what to do where sizes do not match.
    """

    name: str
    remedy: str
    sizes: str = ""


_EXPAND = (
    "Where labels are joined with data, infer={'enumerate': 'parallel', 'expand': True} at the "
    "discrete site gives its values the sizes of the plates. "
)
PARTICLES = LeadingDimsName("vectorised particles", "Pass vectorize_particles=False, or")
STATES = LeadingDimsName("states side by side", "Pass vectorize_particles=False, or")
ENUMERATED = LeadingDimsName(
    "all values of its enumerated sites",
    "Remove infer={'enumerate': 'parallel'} and draw these in the guide, or",
    _EXPAND,
)
SLOTS = LeadingDimsName(
    "slots of discrete sites and vectorised particles",
    "Pass num_categories=0, num_samples=1 and vectorize_particles=False, or",
    _EXPAND,
)


def not_vectorizable(
    name: LeadingDimsName, count: int | None, nesting: int, error: Exception
) -> LeadingDimsError:
    """What is wrong with programs that fail with leading dims only."""
    several = f"{count} {name.name}" if count is not None else name.name
    cause = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
    return LeadingDimsError(
        f"the model or the guide cannot be run with {several} in batch dim {-nesting - 1}, to the "
        f"left of its plates, though it runs with one. {name.remedy} make it broadcast over "
        f"leading dims: index from the right, as in z[..., 0], or means[..., group] in the place "
        f"of means[group] (Vindex for tables). {name.sizes if 'must match' in cause else ''}"
        f"The error was: {cause}",
        reason=cause,
    )


class NotComparedError(LeadingDimsError):
    """Programs run with leading dims, and cannot be compared with runs of one."""

    def __init__(self, name: LeadingDimsName, error: Exception) -> None:
        super().__init__(
            f"the {name.name} cannot be compared with runs of one: {error}. {name.remedy} make the "
            f"model and guide run at any latents",
            reason=f"runs of one cannot be compared with: {error}",
        )


def unstable_sharing(attempts: int, shared: frozenset[str]) -> LeadingDimsError:
    """What is wrong with programs whose global sites are others in each run."""
    return LeadingDimsError(
        f"the programs show other global sites in each of {attempts} runs on the same minibatch "
        f"(now {sorted(shared)}), so the particles cannot be vectorised: pass "
        f"vectorize_particles=False"
    )


# Whether what stands in leading dims is what a loop would run.

Densities = dict[FactorKey, Tensor]

# Runs of other shapes use other kernels, which add in another order.
_ROUNDING, _HALF = 2**12, 4
# Where programs compute in half precision, or iterate to a tolerance: relative to how much the
# entries differ among themselves.
_OF_SPREAD = 1e-3


def far_apart(found: Tensor, expected: Tensor) -> Tensor:
    """
    Return which entries of two log densities differ by more than rounding.

    The scale of an entry's rounding is the entry itself; that of a solver's or a network's in half
    precision the spread of the entries. Where a density is infinite or NaN rounding decides which.
    """
    try:
        found, expected = torch.broadcast_tensors(found.detach(), expected.detach())
    except RuntimeError:
        return torch.ones_like(expected, dtype=torch.bool)
    both = found.isfinite() & expected.isfinite()
    found, expected = torch.where(both, found, 0.0), torch.where(both, expected, 0.0)
    if not expected.numel():
        return torch.zeros_like(expected, dtype=torch.bool)
    spread = (expected.max() - expected.min()) * _OF_SPREAD
    # Under autocast the networks' numbers are those of a shorter type.
    shorter = torch.is_autocast_enabled(found.device.type)
    precision = torch.finfo(torch.bfloat16 if shorter else found.dtype).eps
    allowed = (_HALF if shorter else _ROUNDING) * precision * expected.abs().clamp(min=1.0) + spread
    return (found - expected).abs() > allowed


class _Entry(NamedTuple):
    """
    One of what stands in leading dims.

    :ivar select: its part of a density of all.
    :ivar alone: the densities that it has alone, at latents of all.
    """

    select: Callable[[Tensor], Tensor]
    alone: Callable[[Values], Densities]


def _odd(
    together: Densities, entry: _Entry, alone: Densities
) -> dict[FactorKey, tuple[Tensor, Tensor]]:
    """The densities of an entry together and alone, where they are not the same."""
    keys = [key for key in together if key in alone]
    pairs = {key: (entry.select(together[key]), alone[key]) for key in keys}
    return {key: pair for key, pair in pairs.items() if bool(far_apart(*pair).any())}


def _in_sum(together: Tensor, alone: Tensor) -> str:
    return f" ({float(together.sum()):.4g} and {float(alone.sum()):.4g} in sum)"


def _spread(
    before: Densities,
    after: Densities,
    entries: Sequence[tuple[_Entry, Densities, Densities]],
    undefined: bool,
) -> Iterator[FactorKey]:
    """
    The densities that have changed with latents which do not change them alone.

    :param entries: with the densities that each has alone, before and after the change.
    """
    for key in (k for k in before if k in after):
        met = differing(before[key], after[key], undefined)
        for entry, own, own_after in entries:
            if key in own and key in own_after:
                allowed = differing(own[key], own_after[key], undefined)
                if bool((entry.select(met) & ~allowed).any()):
                    yield key


@dataclass(frozen=True)
class LeadingRun:
    """
    Particles (or slots, or states) that are to be run together.

    :ivar run: shows the programs' plates and sizes.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar way: how the particles are run.
    :ivar name: what stands in the leading dims.
    :ivar ran: whether ``run`` was made in that way: then it is known that the programs can be.
    :ivar mixes: whether batch normalisation may take all particles for one batch.
    """

    programs: Programs
    run: Run
    shared: GlobalSites
    way: Way
    name: LeadingDimsName
    ran: bool = True
    mixes: bool = True

    def check_count(self, count: int) -> None:
        """
        Check that as many particles as there are data are not taken for the data.

        ``means[group]`` takes particles in place of groups, and where these are as many as the
        data the shapes fit all the same. With another count they do not.

        :param count: how many stand in the leading dims, the size of another dim of the run.
        :raises LeadingDimsError: if the programs do not run with another count.
        """
        other = self._count(count + 1)
        error = self._failure(other)
        if error is None:
            return
        if self.run.leading != count and self._failure(count) is not None:
            return  # these programs have leading dims at some sites only
        raise LeadingDimsError(
            f"the model or the guide runs with {count} {self.name.name}, the size of another dim, "
            f"but not with {other}, so that one may be taken for the other. {self.name.remedy} "
            f"make it broadcast over leading dims: index from the right, as in means[..., group] "
            f"in the place of means[group]. The error was: {error}",
            reason=f"{count} {self.name.name} are taken for another dim of this size",
        ) from error

    def check(self, thorough: bool = True) -> None:
        """
        Check that a vectorized run has the densities of its particles run one by one.

        Random numbers outside sample sites, as of dropout, are constants here, and batch
        normalisation has fixed statistics.

        :param bool thorough: test two particles, at generic parameters, instead of one at the
            present ones.
        :raises LeadingDimsError: naming the site that has another density, or the line that draws,
            reads or normalises for all particles at once.
        """
        if thorough:
            # A layer that is zero at first hides nothing behind a comparison, or an integer.
            try:
                with perturbed(self.programs):
                    return self._check(2)
            except ProgramError:
                pass  # programs that fail at other parameters
        try:
            self._check(1 + thorough)
        except ProgramError as error:
            if isinstance(error, _TogetherError) and not self.ran:
                raise not_vectorizable(self.name, 3, self.run.nesting, error) from error
            # A few particles may be too few, or the step has its own error.
            raise NotComparedError(self.name, error) from error
        return None

    def _count(self, least: int) -> int:
        """A number of particles that must not be taken for that of the data."""
        return next(n for n in itertools.count(least) if n not in self.run.inner_sizes)

    def _failure(self, count: int) -> Exception | None:
        """How the programs fail with so many particles, if they do."""
        with probing(self.programs):
            try:
                self._together(count)
            except ProgramError as error:
                return error
        return None

    def _together(self, count: int, values: Values | None = None) -> Probe:
        """A probe of so many particles, whose latents are drawn unless they are given."""
        plates = particle_plates(self.way, count, -self.run.nesting - 1, self.shared)
        sample_fn = None if values is None else lambda msg: values.get(msg["name"])
        try:
            found = probe(self.programs, self.run.subsamples, sample_fn=sample_fn, leading=plates)
            check_batch_dims([*found.terms.values()], self.run.nesting)
            return found
        except (ProgramError, ValueError) as error:
            raise _TogetherError(str(error)) from error

    def _alone(self, values: Mapping[str, Tensor]) -> Densities:
        """The densities of one particle, whose latents these are."""

        def sample_fn(msg: Message) -> Tensor:
            # A latent that particles do not have: the error ends the comparison.
            return changed_draw(lambda v: as_shape(v, msg["fn"].shape()), values[msg["name"]])

        return probe(self.programs, self.run.subsamples, sample_fn=sample_fn).log_probs

    def _check(self, tested: int) -> None:
        """:param tested: how many particles are run alone too; the last one never is."""
        nesting, number = self.run.nesting, self._count(tested + 1)
        with probing(self.programs) as noise, ReadRecorder() as watch:
            first = self._together(number)
        sites = _random_sites(first)
        with other_draws():
            others = {n: other_value(s) for n, s in sites.items()}
            halves = {n: _half(s, nesting) for n, s in sites.items()}
        values = {n: s["value"] for n, s in sites.items()}

        def of(at: dict[str, Tensor], k: int) -> dict[str, Tensor]:
            return {n: _value_of(sites[n], v, k, number, nesting) for n, v in at.items()}

        def together(at: Values) -> Densities:
            with probing(self.programs):
                return self._together(number, at).log_probs

        def alone(k: int, at: Values) -> Densities:
            with probing(self.programs):
                return self._alone(of(at, k))

        def changed(undefined: bool) -> Values:
            """Half of the first particle's latents, the other half of the second's."""
            where = {}
            for name, half in halves.items():
                if values[name].dim() - sites[name]["fn"].event_dim > half.dim():  # not shared
                    rows = [half, ~half][:tested]
                    where[name] = torch.stack(rows + [half & ~half] * (number - tested))
            return intervene(sites, values, others, where, undefined)

        reads = reads_of_latents(self.programs, self.run.subsamples, frozenset(sites), watch.reads)
        for read in reads[:1]:
            raise self._refused(
                f"the programs read a value that depends on site '{min(read.sites)}', at "
                f"{read.line}, and would decide for all {self.name.name} at once",
                "decide for each by torch.where",
                f"a value is read that depends on site '{min(read.sites)}', at {read.line}",
            )
        if self.run.leading is not None or not self.ran:
            # Slots may share what they are not values of.
            self._check_draws(of(values, 0), noise.draws)
            if not self.mixes and watch.batches:
                self._check_batches(of(values, 0), watch.batches)
        every = [
            _Entry(partial(_one_of, particle=k, count=number, inner=nesting), partial(alone, k))
            for k in range(number)
        ]
        before = [entry.alone(values) for entry in every[:tested]]

        def compare(densities: Densities) -> None:
            self._check_values(densities, every, before, values)
            if any(v.is_floating_point() for v in values.values()):
                try:
                    return self._check_changes(densities, every, before, changed(True), together)
                except ProgramError:
                    pass  # programs that refuse NaN
            return self._check_changes(densities, every, before, changed(False), together, False)

        try:
            compare(first.log_probs)
        except LeadingDimsError:
            # Draws that leave no trace are others where the latents are given.
            compare(together(values))

    def _check_values(
        self, together: Densities, every: list[_Entry], alone: list[Densities], values: Values
    ) -> None:
        """Check that each entry has the value that it has alone."""
        odd = [_odd(together, *pair) for pair in zip(every, alone, strict=False)]
        if not any(odd):
            return
        # The inverse of a flow may fail at one particle.
        odd += [_odd(together, entry, entry.alone(values)) for entry in every[len(alone) :]]
        again = every[0].alone(values)
        for key in together:
            pairs = [found[key] for found in odd if key in found]
            if len(pairs) < 2:
                continue
            if key in again and bool(far_apart(alone[0][key], again[key]).any()):
                raise self._noise(key, "with a generator that is not PyTorch's")
            raise self._mismatch(
                key,
                f"has another log density with a leading dim than at the same latents without"
                f"{_in_sum(*pairs[0])}",
            )

    def _check_changes(
        self,
        before: Densities,
        every: list[_Entry],
        alone: list[Densities],
        changed: Values,
        together: Callable[[Values], Densities],
        undefined: bool = True,
    ) -> None:
        """Check that changed latents change the same entries as alone, and no other particle's."""
        after = together(changed)
        entries = [(e, own, e.alone(changed)) for e, own in zip(every, alone, strict=False)]
        entries.append((every[-1], alone[0], alone[0]))  # nothing of the last particle's changes
        for key in _spread(before, after, entries, undefined):
            raise self._mismatch(
                key,
                "has another log density, that of other particles or data, with a leading dim "
                "than without",
            )

    def _check_draws(self, values: Mapping[str, Tensor], drawn: Sequence[Draw]) -> None:
        """
        Check that no density depends on what is drawn outside sample sites for all particles.

        :param values: the latents of one particle.
        :param drawn: what was drawn outside sites for several.
        """
        with probing(self.programs, fixes=False) as noise:
            before = _host_state()
            first = self._alone(values)
            moved = _host_state() != before
        alone, shared = noise.draws, list(drawn)
        if len(alone) == len(drawn):  # else it is not known which of them are whose
            shared = [t for t, a in zip(drawn, alone, strict=True) if t.size == a.size]
        wheres = [(True, f"at {draw.line}") for draw in shared[:1]]
        for of_torch, where in [*wheres, *[(False, "by NumPy or Python")] * moved]:
            with probing(self.programs, fixes=False):
                state = torch.get_rng_state()
                pyro.set_rng_seed((torch.initial_seed() + 1) % 2**31)
                if not of_torch:
                    torch.set_rng_state(state)
                again = self._alone(values)
            for key in first.keys() & again.keys():
                if bool(differing(first[key], again[key], undefined=False).any()):
                    raise self._noise(key, where)

    def _check_batches(self, values: Mapping[str, Tensor], together: Sequence[Batch]) -> None:
        """
        Check that each particle has the statistics of its own batch.

        :param values: the latents of one particle.
        :param together: what is normalised where there are several.
        """
        with probing(self.programs), ReadRecorder() as watch:
            self._alone(values)
        sizes = [batch.size for batch in watch.batches] + [0] * len(together)
        for batch, size in zip(together, sizes, strict=False):
            if batch.size > size:
                raise self._refused(
                    f"batch normalisation at {batch.line} takes all {self.name.name} for one batch",
                    "have it in the encoder, which runs once, or normalise layers",
                    f"all {self.name.name} would be one batch at {batch.line}",
                )

    def _refused(self, what: str, remedy: str, reason: str) -> LeadingDimsError:
        return LeadingDimsError(f"{what}. {self.name.remedy} {remedy}", reason=reason)

    def _noise(self, key: FactorKey, where: str) -> LeadingDimsError:
        return self._refused(
            f"site '{key.name}' of the {key.program} depends on random numbers that are drawn "
            f"outside sample sites {where}, which all {self.name.name} would share",
            "draw them by pyro.sample",
            f"site '{key.name}' of the {key.program} has draws outside sample sites, {where}",
        )

    def _mismatch(self, key: FactorKey, what: str) -> LeadingDimsError:
        return self._refused(
            f"site '{key.name}' of the {key.program} {what}, so the program takes one dim for "
            f"another, as softmax(1), flatten(1), z - z.mean(0) and nn.BatchNorm1d do. The leading "
            f"dim is that of the {self.name.name}",
            "count dims from the right, as in softmax(-1), and put h.reshape(-1, h.shape[-1]) and "
            "a reshape back around layers that take a batch",
            f"site '{key.name}' of the {key.program} takes one dim for another",
        )


class _TogetherError(ProgramError):
    """Programs failed with leading dims in a probe run."""


def _random_sites(found: Probe) -> dict[str, Site]:
    """The random sites of both programs: a model may have latents of its own, to be enumerated."""
    traces = found.model_trace, found.guide_trace
    return {n: s for trace in traces for n, s in trace.nodes.items() if is_random(s)}


def _half(site: Site, nesting: int) -> Tensor:
    """A random half of the entries of one particle's batch, at least one of two: ``[*batch]``."""
    batch = site["fn"].batch_shape
    return random_half(batch[max(0, len(batch) - nesting) :])


def _one_of(value: Tensor, particle: int, count: int, inner: int) -> Tensor:
    """One particle of a tensor whose last ``inner`` dims are a particle's own."""
    if value.dim() <= inner:
        return value
    lead = value.shape[value.dim() - inner - 1]
    return value.select(value.dim() - inner - 1, particle if lead == count else 0)


def _value_of(site: Site, value: Tensor, particle: int, count: int, nesting: int) -> Tensor:
    inner = nesting + site["fn"].event_dim
    return changed_draw(lambda v: _one_of(v, particle, count, inner), value)


def _host_state() -> list[object]:
    """The state of Python's and NumPy's global generators."""
    state = pyro.util.get_rng_state()
    kind, keys, *rest = state["numpy"]
    return [state["random"], kind, keys.tobytes(), *rest]


def check_states(programs: Programs, run: Run) -> None:
    """
    Check that a model's densities do not depend on how many values of its sites there are.

    Compared are the first and the last value of each enumerated site.

    :param run: in which the model's enumerated sites are summed.
    :raises RuntimeError: naming the site that has another density, or saying that it is not known.
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
    with other_draws():
        others = {n: other_value(s) for n, s in latents.items()}
        halves = {n: random_half(s["fn"].batch_shape) for n, s in latents.items()}
    states: dict[str, Tensor] = {}

    def together(at: Values) -> Densities:
        leading = Leading(state_dim=-1 - run.nesting)
        with probing(programs):
            found = probe_model(programs, guide_trace, run.subsamples, at, leading).values()
        states.update({t.key.name: support_of_state(t.site) for t in found if is_state(t.site)})
        return {t.key: t.log_prob.detach() for t in found}

    def alone(k: int, at: Values) -> Densities:
        def sample_fn(msg: Message) -> Tensor | None:
            state = states.get(msg["name"])
            return None if state is None else state[k].expand(msg["fn"].shape())

        with probing(programs):
            found = probe(programs, run.subsamples, at, sample_fn).log_probs
        return {key: d for key, d in found.items() if key.program == "model"}

    before = together(values)
    entries = [
        _Entry(partial(_state, at=k, nesting=run.nesting), partial(alone, k)) for k in (-1, 0)
    ]
    own = [entry.alone(values) for entry in entries]
    for pair in zip(entries, own, strict=True):
        for key, found in _odd(before, *pair).items():
            raise _state_mismatch(key, _in_sum(*found))
    smooth = any(values[n].is_floating_point() for n in latents)
    for undefined, half in itertools.product((True, False) if smooth else (False,), (True, False)):
        where = {n: chosen if half else ~chosen for n, chosen in halves.items()}
        changed = intervene(latents, values, others, where, undefined)
        after = together(changed)
        compared = [(e, o, e.alone(changed)) for e, o in zip(entries, own, strict=True)]
        for key in _spread(before, after, compared, undefined):
            raise _state_mismatch(key, "")


def _state(value: Tensor, at: int, nesting: int) -> Tensor:
    """One value of each enumerated site: ``[*plates]``."""
    while value.dim() > nesting:
        value = value[at]
    return value


def _state_mismatch(key: FactorKey, sums: str) -> RuntimeError:
    return RuntimeError(
        f"site '{key.name}' of the model has another log density where all values of the "
        f"enumerated sites stand side by side than at one of them{sums}, so the program takes one "
        f"dim for another: index and reduce from the right, as in Vindex(means)[..., y] and "
        f"softmax(-1), and read no shape of an enumerated value; or draw these sites in the guide"
    )


# The comparisons of runs: once for each structure and size of an analysis.

_logger = logging.getLogger(__name__)

# Programs of stochastic structure show ever new sizes: so many are compared at once, and of those
# that follow one in so many.
_AT_ONCE, _THEN_ONE_IN = 64, 16


def compare_leading_dims(analysis: Analysis, leading: LeadingRun, trusted: bool) -> None:
    """
    Check that leading dims are what a loop would be.

    :param bool trusted: whether the user says that the programs broadcast over leading dims; then
        a warning tells if they cannot be compared with runs of one.
    :raises LeadingDimsError: as :class:`LeadingRun`.
    """
    run = leading.run
    for count in sorted(run.outer_sizes & run.inner_sizes):
        leading.check_count(count)
    # Not how many particles there are: they are compared in a number of their own.
    key = "compared", run.signature, run.sizes, leading.shared, leading.way

    def compare() -> None:
        try:
            leading.check(thorough=not analysis.before(key))
        except NotComparedError as error:
            if not (trusted and leading.ran):
                raise
            _logger.warning("%s (vectorize_particles=True is trusted)", error)

    _once_of_many(analysis, key, compare, leading.name.name)


def compare_states(analysis: Analysis, programs: Programs, run: Run) -> None:
    """Check that a run whose states are summed has the densities of single states."""
    key = "compared", "states", run.signature, run.sizes
    _once_of_many(analysis, key, lambda: check_states(programs, run), "states")


def _once_of_many(
    analysis: Analysis, key: tuple[Hashable, ...], compare: Callable[[], None], name: str
) -> None:
    if analysis.get(key) is not None:
        return
    number = analysis.count("compared")
    if number == _AT_ONCE:
        _logger.warning(
            "the programs have shown %d sets of sizes, each of which was compared with a loop "
            "over its %s; of those to come, one in %d is",
            _AT_ONCE,
            name,
            _THEN_ONE_IN,
        )
    if number < _AT_ONCE or number % _THEN_ONE_IN == 0:
        compare()
    analysis.put(key, True)
