"""In which way the particles of a pair of programs are run, found out once."""

from __future__ import annotations

import logging

from pyro import poutine

from pyro_mcvae.checks.leading_dims import LeadingDimsName
from pyro_mcvae.checks.run_checks import RunChecks
from pyro_mcvae.checks.vectorization import LeadingRun
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.execution import Programs, is_messenger
from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analyses

__all__ = ["Ways"]

_logger = logging.getLogger(__name__)


class Ways:
    """
    In which way the particles of a pair of programs are run: the fastest with a loop's numbers.

    Tried with a few particles before there are many: programs that broadcast them against each
    other may need memory for the square of their number. What was chosen stays, until other sizes
    show that it is not right for them.

    :param RunChecks checks: compare a way with a loop.
    :param analyses: what is known of the programs.
    :param vectorize: True to refuse a loop, None to take it where nothing else is right.
    :param bool declared: whether the place of the leading dim is known without a run. Where a loop
        is refused too, programs are run at once with all of their particles, and only so: they may
        rely on it.
    """

    def __init__(
        self, checks: RunChecks, analyses: Analyses, vectorize: bool | None, declared: bool
    ) -> None:
        self._checks, self._analyses, self._vectorize = checks, analyses, vectorize
        self._at_once = declared and self.refuses_loops

    @property
    def refuses_loops(self) -> bool:
        """Whether programs that have to be looped over are refused."""
        return self._vectorize is True

    def of(self, programs: Programs) -> Way | None:
        """The way of a pair, or None before it was found out."""
        if self._vectorize is False:
            return Way.LOOPED
        way: Way | None = self._analyses.of(programs).get(_KEY)
        # Plain steps come before one that is recorded, and a look would be recorded.
        return Way.BATCHED if way is None and (self._at_once or is_recording()) else way

    def choose(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        name: LeadingDimsName,
        error: LeadingDimsError | None = None,
    ) -> Way:
        """
        Find the way out.

        :param run: shows the programs' plates and sizes.
        :param shared: the guide's and the model's sites that all particles share.
        :param name: what stands in the leading dims.
        :param error: what is wrong with the present way, if it is known.
        :raises LeadingDimsError: if only a loop is right, and is refused.
        """
        analysis = self._analyses.of(programs)
        # What a fresh analysis looks at first is the way that the last one chose.
        before: Way | None = analysis.get(_KEY) or analysis.before(_KEY)
        errors = {} if error is None else {before or Way.BATCHED: error}
        ways = [Way.BATCHED] if is_messenger(programs) else [*_AT_ONCE]
        if before is not None:
            ways = [] if before is Way.LOOPED else ways[ways.index(before) + len(errors) :]
        for way in ways:
            try:
                self._checks.check_leading_dims(
                    LeadingRun(programs, run, shared, way, name, False, self.refuses_loops)
                )
            except LeadingDimsError as found:
                errors[way] = found
                continue
            break
        else:
            way = Way.LOOPED
            if self.refuses_loops and errors:
                raise next(iter(errors.values()))
        self._checks.forget(programs)
        analysis.compared(_KEY, lambda: way)
        analysis.put(_KEY, way)
        if way is not before:
            _tell(programs, way, name, errors)
        return way


_KEY = ("way",)
_AT_ONCE = Way.BATCHED, Way.MAPPED, Way.BOTH_MAPPED
_IN_WORDS = {
    Way.BATCHED: "in a leading dim",
    Way.MAPPED: "under vmap",
    Way.BOTH_MAPPED: "under vmap, the guide too",
}


def _tell(
    programs: Programs, way: Way, name: LeadingDimsName, errors: dict[Way, LeadingDimsError]
) -> None:
    model = poutine.unwrap(programs.model)
    # Of the two under vmap the first says what the user may mend.
    told = [w for w in errors if w is not Way.BOTH_MAPPED or Way.MAPPED not in errors]
    why = "; ".join(f"{_IN_WORDS[w]}: {errors[w].reason}" for w in told)
    _logger.log(
        logging.WARNING if way is Way.LOOPED else logging.INFO,
        "%s of %s are run %s (%s)",
        name.name,
        getattr(model, "__qualname__", type(model).__qualname__),
        way.value,
        why or "with the densities of a loop",
    )
    for error in errors.values():
        _logger.debug("%s", error)
