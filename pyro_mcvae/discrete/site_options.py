"""How many slots a discrete site has, and which."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pyro_mcvae.ops.checks import as_int, check_count, check_flag
from pyro_mcvae.programs.annotations import SLOT_OPTIONS, options_of
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.types import Site


class SlotError(SiteError):
    """A site cannot have the slots that are asked for."""


@dataclass(frozen=True)
class SiteOptions:
    """
    How many values of one site are summed, and how many sampled.

    :ivar num_categories: k, a whole number or infinity; by default 1, without a budget.
    :ivar num_samples: n; likewise.
    :ivar budget: instead of both, k + n, divided for each datum by itself.
    :ivar baseline: what is subtracted from the cost; None for nothing.
    :ivar exact_entropy: sum the site's entropy over all of its values.
    :raises ValueError: for counts out of range or beside a budget, and for no baseline.
    """

    num_categories: float | None = None
    num_samples: int | None = None
    budget: int | None = None
    baseline: Any = None
    exact_entropy: bool = False

    def __post_init__(self) -> None:
        k, n, budget = self.num_categories, self.num_samples, self.budget
        check_flag("exact_entropy", self.exact_entropy)
        if self.baseline is not None and not hasattr(self.baseline, "surrogate"):
            raise ValueError(
                f"baseline must be a Baseline, such as IndependentDraw(), or None, got "
                f"{self.baseline!r}"
            )
        if budget is not None:
            if k is not None or n is not None:
                raise ValueError(
                    f"budget={budget!r} says how many values of a site are evaluated, and chooses "
                    f"for each datum how many of them are summed: pass it without num_categories="
                    f"{k!r} and num_samples={n!r}, or these without it"
                )
            argument, draws = "budget", check_count("budget", budget)
        else:
            k = 1 if k is None else k
            whole = k if isinstance(k, float) and k == math.inf else as_int(k)
            if whole is None or whole < 0:
                raise ValueError(
                    f"num_categories must be an int of at least 0 or math.inf, got {k!r}"
                )
            argument, draws = "num_samples", check_count("num_samples", 1 if n is None else n, 0)
            if whole == 0 and draws == 0:
                raise ValueError(
                    "num_categories=0 and num_samples=0 evaluate nothing: pass num_samples >= 1"
                )
            object.__setattr__(self, "num_categories", whole)
        object.__setattr__(self, argument, draws)
        if self.baseline is not None and draws < self.min_samples and k != math.inf:
            raise ValueError(
                f"{type(self.baseline).__name__} compares draws with each other and needs "
                f"{argument} >= {self.min_samples}, got {draws}"
            )

    @property
    def min_samples(self) -> int:
        """How many draws the baseline needs."""
        return getattr(self.baseline, "min_samples", 1)

    @property
    def plain(self) -> bool:
        """Whether one draw is all."""
        one = self.budget == 1 or (self.num_categories == 0 and self.num_samples == 1)
        return one and not self.extra_draw

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
        # A budget stands in the place of both counts, and they in its.
        if own.keys() & {"num_categories", "num_samples"}:
            own = {"budget": None, **own}
        if own.get("budget") is not None:
            own = {"num_categories": None, "num_samples": None, **own}
        try:
            return replace(self, **own)
        except ValueError as error:
            raise SlotError(f"guide site '{site['name']}', infer={infer}: {error}") from error
