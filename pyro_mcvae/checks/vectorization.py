"""
Whether vectorized particles are the particles that a loop would run.

A program that counts dims from the left (``softmax(1)``, ``h - h.mean(0)``, ``nn.BatchNorm1d`` with
as many data as features) runs with a dim more in front, and is another program. Shapes need not
change. So a few vectorized particles are run beside the same latents one at a time:

* where chosen latents of a particle are NaN, the same entries of each density must be NaN as alone,
  in no other particle, whatever the weights of the networks are;
* each entry of each density must have the value that it has alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyro_mcvae.checks.closeness import far_apart
from pyro_mcvae.checks.compared_runs import (
    Densities,
    TogetherError,
    one_of,
    probe_alone,
    probe_together,
    random_sites,
    value_of,
)
from pyro_mcvae.checks.leading_dims import LeadingDimsName, NotComparedError, not_vectorizable
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.fixed_noise import Draw
from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.probing import ProgramError, perturbed, probing
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.interventions import (
    Values,
    another,
    differing,
    intervene,
    other_draws,
    random_half,
)
from pyro_mcvae.structure.reads import Batch, Read, Reads, reads_of_latents

__all__ = ["check_count", "check_vectorization"]


def check_count(
    programs: Programs, run: Run, count: int, shared: GlobalSites, way: Way, name: LeadingDimsName
) -> None:
    """
    Check that as many particles as there are data are not taken for the data.

    ``means[group]`` takes particles in the place of groups, and where these are as many as the
    data the shapes fit all the same. With another count they do not.

    :param run: with leading dims.
    :param count: how many stand in them, the size of another dim of the run.
    :param shared: the guide's and the model's sites that all particles share.
    :param way: how these are run.
    :param name: what stands in the leading dims.
    :raises LeadingDimsError: if the programs do not run with another count.
    """
    other = next(n for n in itertools.count(count + 1) if n not in run.inner_sizes)
    error = _failure(programs, run, shared, other, way)
    if error is None:
        return
    if run.leading != count and _failure(programs, run, shared, count, way) is not None:
        return  # these programs have leading dims at some sites only
    raise LeadingDimsError(
        f"the model or the guide runs with {count} {name.name}, the size of another dim, but not "
        f"with {other}, so that one may be taken for the other. {name.remedy} make it broadcast "
        f"over leading dims: index from the right, as in means[..., group] in the place of "
        f"means[group]. The error was: {error}",
        reason=f"{count} {name.name} are taken for another dim of this size",
    ) from error


def _failure(
    programs: Programs, run: Run, shared: GlobalSites, count: int, way: Way
) -> Exception | None:
    """How the programs fail with so many particles, if they do."""
    with probing(programs):
        try:
            probe_together(programs, run, shared, count, way)
        except ProgramError as error:
            return error
    return None


@dataclass(frozen=True)
class _Particles:
    """
    A few particles, as they are and with some latents changed, together and alone.

    :ivar tested: the particles that are run alone, too; the last one never is.
    :ivar sites: the random sites.
    :ivar values: of all particles.
    :ivar others: other values.
    :ivar chosen: by site, which of one particle's entries are changed in the first particle; the
        second has the others changed, if it is tested, and the rest none.
    """

    programs: Programs
    run: Run
    shared: GlobalSites
    way: Way
    number: int
    tested: range
    sites: dict[str, Site]
    values: Values
    others: Values
    chosen: Values

    def together(self, values: Values) -> Densities:
        """The densities of all particles."""
        with probing(self.programs):
            return probe_together(
                self.programs, self.run, self.shared, self.number, self.way, values
            ).log_probs

    def alone(self, values: Values, particle: int) -> Densities:
        """The densities of one of them."""
        own = {n: self.one_of(n, v, particle) for n, v in values.items()}
        with probing(self.programs):
            return probe_alone(self.programs, self.run.subsamples, own)

    def one_of(self, name: str, value: Tensor, particle: int) -> Tensor:
        """One particle's value of a site."""
        return value_of(self.sites[name], value, particle, self.number, self.run.nesting)

    def changed(self, undefined: bool) -> Values:
        """Latents with some entries changed; those that all particles share stay."""
        where = {}
        for name, half in self.chosen.items():
            lead = self.values[name].dim() - self.sites[name]["fn"].event_dim - half.dim()
            if lead < 1:
                continue  # shared
            none = torch.zeros((), dtype=torch.bool).expand(half.shape)
            rows = [half, ~half][: len(self.tested)]
            where[name] = torch.stack(rows + [none] * (self.number - len(rows)))
        return intervene(self.sites, self.values, self.others, where, undefined)


def check_vectorization(
    programs: Programs,
    run: Run,
    shared: GlobalSites,
    way: Way,
    name: LeadingDimsName,
    ran: bool = True,
    mixes: bool = True,
    thorough: bool = True,
) -> None:
    """
    Check that a vectorized run has the densities of its particles run one by one.

    Random numbers outside sample sites, as of dropout, are constants here, and batch normalisation
    has fixed statistics.

    :param run: shows the programs' plates and sizes.
    :param shared: the guide's and the model's sites that all particles share.
    :param way: how these are run.
    :param name: what stands in the leading dims.
    :param ran: whether ``run`` was made in that way: then it is known that the programs can be.
    :param mixes: whether batch normalisation may take all particles for one batch.
    :param bool thorough: test two particles, at generic parameters, instead of one at the present.
    :raises LeadingDimsError: naming the site that has another density, or the line that draws,
        reads or normalises for all particles at once.
    """
    if thorough:
        # A layer that is zero at first hides nothing behind a comparison, or an integer.
        try:
            with perturbed(programs):
                return _check(programs, run, shared, way, name, range(2), ran, mixes)
        except ProgramError:
            pass  # programs that fail at other parameters
    try:
        _check(programs, run, shared, way, name, range(1 + thorough), ran, mixes)
    except ProgramError as error:
        if isinstance(error, TogetherError) and not ran:
            raise not_vectorizable(name, 3, run.nesting, error) from error
        # A few particles may be too few, or the step has its own error.
        raise NotComparedError(name, error) from error
    return None


def _check(
    programs: Programs,
    run: Run,
    shared: GlobalSites,
    way: Way,
    name: LeadingDimsName,
    tested: range,
    ran: bool,
    mixes: bool,
) -> None:
    # Not as many as the data: these must not be taken for each other.
    number = next(n for n in itertools.count(len(tested) + 1) if n not in run.inner_sizes)
    with probing(programs) as noise, Reads() as watch:
        first = probe_together(programs, run, shared, number, way)
    sites = random_sites(first)
    with other_draws():
        others = {n: another(s) for n, s in sites.items()}
        chosen = {n: _half(s, run.nesting) for n, s in sites.items()}
    values = {n: s["value"] for n, s in sites.items()}
    particles = _Particles(
        programs, run, shared, way, number, tested, sites, values, others, chosen
    )
    _check_reads(reads_of_latents(programs, run.subsamples, frozenset(sites), watch.reads), name)
    _check_updates(watch.batches if way is not Way.BATCHED else (), name)
    if run.leading is not None or not ran:  # slots may share what they are not values of
        one = {n: particles.one_of(n, v, 0) for n, v in values.items()}
        _check_draws(programs, run, one, noise.draws, name)
        if not mixes and watch.batches:
            _check_batches(programs, run, one, watch.batches, name)
    alone = {k: particles.alone(values, k) for k in tested}
    try:
        _compare(particles, first.log_probs, alone, name)
    except LeadingDimsError:
        # Draws that leave no trace are others where the latents are given.
        _compare(particles, particles.together(values), alone, name)


def _half(site: Site, nesting: int) -> Tensor:
    """A random half of the entries of one particle's batch, at least one of two: ``[*batch]``."""
    batch = site["fn"].batch_shape
    own = batch[max(0, len(batch) - nesting) :]
    return random_half(math.prod(own)).reshape(own)


def _compare(
    particles: _Particles, together: Densities, alone: dict[int, Densities], name: LeadingDimsName
) -> None:
    _check_values(particles, together, alone, name)
    if any(v.is_floating_point() for v in particles.values.values()):
        try:
            return _check_changes(particles, together, alone, True, name)
        except ProgramError:
            pass  # programs that refuse NaN
    return _check_changes(particles, together, alone, False, name)


def _check_values(
    particles: _Particles, together: Densities, alone: dict[int, Densities], name: LeadingDimsName
) -> None:
    """Check that each entry has the value that it has alone."""
    nesting, number = particles.run.nesting, particles.number

    def odd(particle: int, densities: Densities) -> dict[FactorKey, tuple[Tensor, Tensor]]:
        pairs = {
            key: (one_of(together[key], particle, number, nesting), densities[key])
            for key in together.keys() & densities.keys()
        }
        return {key: p for key, p in pairs.items() if bool(far_apart(*p).any())}

    found = [odd(k, densities) for k, densities in alone.items()]
    if not any(found):
        return
    # The inverse of a flow may fail at one particle.
    for k in range(len(alone), number):
        found.append(odd(k, particles.alone(particles.values, k)))
    again = particles.alone(particles.values, 0)
    for key in together:
        if sum(key in one for one in found) < 2:
            continue
        if key in again and bool(far_apart(alone[0][key], again[key]).any()):
            raise _shared_noise(key, "with a generator that is not PyTorch's", name)
        pair = next(one[key] for one in found if key in one)
        sums = f" ({float(pair[0].sum()):.4g} and {float(pair[1].sum()):.4g} in sum)"
        raise _mismatch(
            key,
            f"has another log density with a leading dim than at the same latents without{sums}",
            name,
        )


def _check_changes(
    particles: _Particles,
    together: Densities,
    alone: dict[int, Densities],
    undefined: bool,
    name: LeadingDimsName,
) -> None:
    """Check that changed latents change the same entries as alone, and no other particle's."""
    nesting, number = particles.run.nesting, particles.number
    changed = particles.changed(undefined)
    after = particles.together(changed)
    after_alone = {k: particles.alone(changed, k) for k in alone}
    for key in together.keys() & after.keys():
        met = differing(together[key], after[key], undefined)
        wrong = bool(one_of(met, number - 1, number, nesting).any())
        for k, before in alone.items():
            if key not in before or key not in after_alone[k]:
                continue
            own = differing(before[key], after_alone[k][key], undefined)
            wrong = wrong or bool((one_of(met, k, number, nesting) & ~own).any())
        if wrong:
            raise _mismatch(
                key,
                "has another log density, that of other particles or data, with a leading dim "
                "than without",
                name,
            )


def _mismatch(key: FactorKey, what: str, name: LeadingDimsName) -> LeadingDimsError:
    return LeadingDimsError(
        f"site '{key.name}' of the {key.program} {what}, so the program takes one dim for another, "
        f"as softmax(1), flatten(1), z - z.mean(0) and nn.BatchNorm1d do. The leading dim is that "
        f"of the {name.name}. {name.remedy} count dims from the right, as in softmax(-1), and put "
        f"h.reshape(-1, h.shape[-1]) and a reshape back around layers that take a batch",
        reason=f"site '{key.name}' of the {key.program} takes one dim for another",
    )


def _shared_noise(key: FactorKey, where: str, name: LeadingDimsName) -> LeadingDimsError:
    return LeadingDimsError(
        f"site '{key.name}' of the {key.program} depends on random numbers that are drawn outside "
        f"sample sites {where}, which all {name.name} would share. {name.remedy} draw them by "
        f"pyro.sample",
        reason=f"site '{key.name}' of the {key.program} has draws outside sample sites, {where}",
    )


def _check_draws(
    programs: Programs,
    run: Run,
    values: Mapping[str, Tensor],
    drawn: Sequence[Draw],
    name: LeadingDimsName,
) -> None:
    """
    Check that no density depends on numbers that are drawn outside sample sites for all particles.

    :param values: the latents of one particle.
    :param drawn: what was drawn outside of sites for several.
    """
    with probing(programs, fixes=False) as noise:
        before = _host_state()
        first = probe_alone(programs, run.subsamples, values)
        moved = _host_state() != before
    alone, shared = noise.draws, list(drawn)
    if len(alone) == len(drawn):  # else it is not known which of them are whose
        shared = [t for t, a in zip(drawn, alone, strict=True) if t.size == a.size]
    if shared:
        with probing(programs, fixes=False):
            torch.manual_seed(torch.initial_seed() + 1)
            again = probe_alone(programs, run.subsamples, values)
        _refuse_change(first, again, f"at {shared[0].line}", name)
    if moved:
        with probing(programs, fixes=False):
            same = torch.get_rng_state()
            pyro.set_rng_seed((torch.initial_seed() + 1) % 2**31)
            torch.set_rng_state(same)
            again = probe_alone(programs, run.subsamples, values)
        _refuse_change(first, again, "by NumPy or Python", name)


def _refuse_change(first: Densities, again: Densities, where: str, name: LeadingDimsName) -> None:
    for key in first.keys() & again.keys():
        if bool(differing(first[key], again[key], undefined=False).any()):
            raise _shared_noise(key, where, name)


def _host_state() -> list[object]:
    """The state of Python's and NumPy's global generators."""
    state = pyro.util.get_rng_state()
    kind, keys, *rest = state["numpy"]
    return [state["random"], kind, keys.tobytes(), *rest]


def _check_batches(
    programs: Programs,
    run: Run,
    values: Mapping[str, Tensor],
    together: Sequence[Batch],
    name: LeadingDimsName,
) -> None:
    """
    Check that each particle has the statistics of its own batch.

    :param values: the latents of one particle.
    :param together: what is normalised where there are several.
    """
    with probing(programs), Reads() as watch:
        probe_alone(programs, run.subsamples, values)
    sizes = [batch.size for batch in watch.batches] + [0] * len(together)
    for batch, size in zip(together, sizes, strict=False):
        if batch.size > size:
            raise LeadingDimsError(
                f"batch normalisation at {batch.line} takes all {name.name} for one batch. "
                f"{name.remedy} have it in the encoder, which runs once, or normalise layers",
                reason=f"all {name.name} would be one batch at {batch.line}",
            )


def _check_updates(batches: Sequence[Batch], name: LeadingDimsName) -> None:
    """Check that nothing updates running statistics under vmap, which cannot."""
    for batch in batches:
        if batch.updates:
            raise LeadingDimsError(
                f"batch normalisation at {batch.line} would update its running statistics for all "
                f"{name.name} at once. {name.remedy} have it in the encoder, which runs once, or "
                f"normalise layers",
                reason=f"running statistics are updated at {batch.line}",
            )


def _check_reads(reads: Sequence[Read], name: LeadingDimsName) -> None:
    """Check that no program decides for all particles by the values of their latents."""
    for read in reads[:1]:
        raise LeadingDimsError(
            f"the programs read a value that depends on site '{min(read.sites)}', at "
            f"{read.line}, and would decide for all {name.name} at once. {name.remedy} decide for "
            f"each by torch.where",
            reason=f"a value is read that depends on site '{min(read.sites)}', at {read.line}",
        )
