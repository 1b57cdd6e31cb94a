"""How many slots a discrete site has, and which."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pyro_mcvae.ops.checks import as_int, check_count, check_flag
from pyro_mcvae.programs.annotations import SLOT_OPTIONS, options_of
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.types import Site

__all__ = ["SiteOptions", "SlotError"]


class SlotError(SiteError):
    """A site cannot have the slots that are asked for."""


@dataclass(frozen=True)
class SiteOptions:
    """
    How many values of one site are summed, and how many sampled.

    :ivar num_categories: k, a whole number or infinity.
    :ivar num_samples: n.
    :ivar budget: instead of both, k + n, divided for each datum by itself.
    :ivar baseline: what is subtracted from the cost; None for nothing.
    :ivar exact_entropy: sum the site's entropy over all of its values.
    """

    num_categories: float = 1
    num_samples: int = 1
    budget: int | None = None
    baseline: Any = None
    exact_entropy: bool = False

    @classmethod
    def of_arguments(
        cls,
        num_categories: float | None,
        num_samples: int | None,
        budget: int | None,
        baseline: Any,
        exact_entropy: bool = False,
    ) -> SiteOptions:
        """
        An objective's arguments, one value and one draw where these are left out.

        :raises ValueError: for counts out of range or beside a budget, and for no baseline.
        """
        if budget is not None and (num_categories is not None or num_samples is not None):
            raise ValueError(
                f"budget={budget!r} says how many values of a site are evaluated, and chooses for "
                f"each datum how many of them are summed: pass it without num_categories="
                f"{num_categories!r} and num_samples={num_samples!r}, or these without it"
            )
        k = 1 if num_categories is None else num_categories
        n = 1 if num_samples is None else num_samples
        return cls(k, n, budget, baseline, exact_entropy)

    def __post_init__(self) -> None:
        k, n, budget = self.num_categories, self.num_samples, self.budget
        check_flag("exact_entropy", self.exact_entropy)
        if self.baseline is not None and not hasattr(self.baseline, "surrogate"):
            raise ValueError(
                f"baseline must be a Baseline, such as IndependentDraw(), or None, got "
                f"{self.baseline!r}"
            )
        whole = k if isinstance(k, float) and k == math.inf else as_int(k)
        if whole is None or whole < 0:
            raise ValueError(f"num_categories must be an int of at least 0 or math.inf, got {k!r}")
        k, n = whole, check_count("num_samples", n, 0)
        if budget is not None:
            budget = check_count("budget", budget)
        for name, value in (("num_categories", k), ("num_samples", n), ("budget", budget)):
            object.__setattr__(self, name, value)
        if k == 0 and n == 0 and budget is None:
            raise ValueError(
                "num_categories=0 and num_samples=0 evaluate nothing: pass num_samples >= 1"
            )
        needed, draws = self.min_samples, n if budget is None else budget
        if self.baseline is not None and draws < needed and k != math.inf:
            argument = "num_samples" if budget is None else "budget"
            raise ValueError(
                f"{type(self.baseline).__name__} compares draws with each other and needs "
                f"{argument} >= {needed}, got {draws}"
            )

    @property
    def min_samples(self) -> int:
        """How many draws the baseline needs."""
        return getattr(self.baseline, "min_samples", 1)

    @property
    def plain(self) -> bool:
        """Whether one draw is all."""
        counts = self.num_categories == 0 and self.num_samples == 1
        return (self.budget == 1 or (counts and self.budget is None)) and not self.extra_draw

    @property
    def extra_draw(self) -> bool:
        """Whether the baseline needs an independent draw of its own."""
        return getattr(self.baseline, "extra_draw", False)

    def of(self, site: Site) -> SiteOptions:
        """
        These options, with a site's own in ``infer={"mcvae": {...}}`` put over them, or what Pyro's
        marks for enumeration say: all values, or so many draws.
        """
        infer = site["infer"]
        own = {k: v for k, v in options_of(site).items() if k in SLOT_OPTIONS}
        if infer.get("enumerate") and not own:
            if infer.get("num_samples") is None:
                return SiteOptions(math.inf, 0, exact_entropy=self.exact_entropy)
            own = {"num_categories": 0, "num_samples": infer["num_samples"]}
        if not own:
            return self
        counts = own.keys() & {"num_categories", "num_samples"}
        if counts and own.get("budget") is not None:
            raise SlotError(
                f"guide site '{site['name']}', infer['mcvae']: budget stands for num_categories "
                f"and num_samples, so that {', '.join(sorted(counts))} has no effect beside it: "
                f"pass one or the other"
            )
        if "budget" not in own and counts:
            own["budget"] = None
        try:
            return replace(self, **own)
        except ValueError as error:
            raise SlotError(f"guide site '{site['name']}', infer={infer}: {error}") from error
