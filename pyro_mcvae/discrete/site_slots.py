"""Choose the slots of a discrete site: summed values, and drawn ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.discrete.baselines import Baseline, LearnedBaseline, SiteSignal
from pyro_mcvae.ops.checks import as_int, check_count, check_flag
from pyro_mcvae.ops.slots import SlotCount
from pyro_mcvae.ops.tensors import follow
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import (
    is_masked,
    is_random,
    known_support,
    reparameterized,
    site_in_full_precision,
)
from pyro_mcvae.programs.supports import Categories, Choice, Support, joined_plates, support_of
from pyro_mcvae.programs.types import (
    SLOT_OPTIONS,
    Distribution,
    Message,
    Site,
    SiteError,
    options_of,
)

# Options: the number of slots of a discrete site.


class SlotError(SiteError):
    """A site cannot have the requested slots."""


@dataclass(frozen=True)
class SiteOptions:
    """
    The number of summed and sampled values of one site.

    :ivar num_categories: k, an integer or infinity; 1 by default without a budget.
    :ivar num_samples: n, an integer; 1 by default without a budget.
    :ivar budget: k + n, instead of both; divided separately for each datum.
    :ivar baseline: the baseline that is subtracted from the cost; None for REINFORCE.
    :ivar exact_entropy: sum the site's entropy over all of its values.
    :raises ValueError: for counts out of range or together with a budget, and for an invalid
        baseline.
    """

    num_categories: float | None = None
    num_samples: int | None = None
    budget: int | None = None
    baseline: Any = None
    exact_entropy: bool = False

    def __post_init__(self) -> None:
        k, n, budget = self.num_categories, self.num_samples, self.budget
        check_flag("exact_entropy", self.exact_entropy)
        if self.baseline is None:
            object.__setattr__(self, "baseline", Baseline())
        if not isinstance(self.baseline, Baseline):
            raise ValueError(
                f"baseline must be a Baseline, such as IndependentDraw(), or None, got "
                f"{self.baseline!r}"
            )
        if budget is not None:
            if k is not None or n is not None:
                raise ValueError(
                    f"budget={budget!r} is the number of evaluated values of a site, and chooses "
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
        if draws < (least := self.baseline.min_samples) and least > 1 and k != math.inf:
            raise ValueError(
                f"{type(self.baseline).__name__} compares draws with each other and needs "
                f"{argument} >= {least}, got {draws}"
            )

    @property
    def plain(self) -> bool:
        """Return whether the site has only a single draw."""
        one = self.budget == 1 or (self.num_categories == 0 and self.num_samples == 1)
        return one and not self.baseline.extra_draw

    def of(self, site: Site) -> SiteOptions:
        """
        Override the options by those of a site.

        These are in ``infer={"mcvae": {...}}``. Without them, Pyro's marks for enumeration
        determine the slots: all values, or ``infer["num_samples"]`` draws.
        """
        infer = site["infer"]
        overrides = {k: v for k, v in options_of(site).items() if k in SLOT_OPTIONS}
        if infer.get("enumerate") and not overrides:
            if infer.get("num_samples") is None:
                return SiteOptions(math.inf, 0, exact_entropy=self.exact_entropy)
            overrides = {"num_categories": 0, "num_samples": infer["num_samples"]}
        if not overrides:
            return self
        # A budget replaces both counts, and they replace it.
        if overrides.keys() & {"num_categories", "num_samples"}:
            overrides = {"budget": None, **overrides}
        if overrides.get("budget") is not None:
            overrides = {"num_categories": None, "num_samples": None, **overrides}
        try:
            return replace(self, **overrides)
        except ValueError as error:
            raise SlotError(f"guide site '{site['name']}', infer={infer}: {error}") from error


# The slots of one discrete site: values, weights, and the gradient of its distribution.

# The maximal number of slots of a datum, over all sites.
_MAX_SLOTS = 10_000
_SINGLE_DRAW = "{'mcvae': {'num_categories': 0, 'num_samples': 1}}"


@dataclass(frozen=True)
class SiteSlots:
    """
    The slots of one site, in a batch dim or in rows.

    :ivar support: the site's values; None if they cannot be listed, and for single rows.
    :ivar choice: the slots' values, weights, and which are draws.
    :ivar extra: whether the last slot is an independent draw.
    :ivar exact: whether the slots are all values.
    """

    options: SiteOptions
    support: Support | None
    choice: Choice
    extra: bool = False
    exact: bool = False

    def __len__(self) -> int:
        return len(self.choice.value)

    def spread(self, fn: Distribution, joined: tuple[int, ...] = ()) -> SiteSlots:
        """Expand the slots to all batch elements; weights have size 1 in dims of joined plates."""
        (value, weight, sampled), size = self.choice, (len(self),)
        dims = range(-len(fn.batch_shape), 0)
        batch = [1 if d in joined else n for d, n in zip(dims, fn.batch_shape, strict=True)]
        value = value.expand((*size, *fn.batch_shape, *fn.event_shape))
        choice = Choice(value, weight.expand(*size, *batch), sampled.expand(*size, *batch))
        return replace(self, choice=choice)

    def possible(self) -> SiteSlots:
        """
        Replace values with weight zero by the likeliest one, except an independent draw.

        A value of probability zero has a log weight of inf - inf, whose gradient is NaN.
        """
        value, weight, _ = self.choice
        weight = weight.reshape(weight.shape + (1,) * (value.dim() - weight.dim()))
        likeliest = value.gather(0, weight.argmax(0, keepdim=True).expand_as(value[:1]))
        values = torch.where(weight > 0, value, likeliest)
        if self.extra:
            values = torch.cat([values[:-1], value[-1:]])
        return replace(self, choice=self.choice._replace(value=values))

    def padded(self, count: int) -> SiteSlots:
        """Prepend slots with weight zero up to ``count``."""
        missing = count - len(self)
        if not missing:
            return self
        value, *rest_of_choice = self.choice
        first = value[:1].expand(missing, *value.shape[1:])
        none = [torch.zeros_like(t[:1]).expand(missing, *t.shape[1:]) for t in rest_of_choice]
        padded = [torch.cat(pair) for pair in zip(none, rest_of_choice, strict=True)]
        return replace(self, choice=Choice(torch.cat([first, value]), *padded))

    def at(self, index: tuple[Tensor | int, ...]) -> SiteSlots:
        """Select some slots, one in each row."""
        return replace(self, support=None, choice=Choice(*(t[index] for t in self.choice)))

    def entropy(self, fn: Distribution) -> Tensor | None:
        """Return the exact entropy if it is requested and known, else None; batch-shaped."""
        if not self.options.exact_entropy or self.support is None or is_masked(fn):
            return None
        return self.support.entropy()

    def warn_entropy(self, name: str, why: str, warn: Callable[[str], object]) -> None:
        """Warn if an exact entropy is requested, but estimated at the slots."""
        if self.options.exact_entropy and not self.exact:
            warn(
                f"the entropy of guide site '{name}' is estimated at its slots, not summed over "
                f"all of its values as entropy='exact' requests, because {why}"
            )

    def surrogate(self, site: Site, programs: Programs, **tensors: Tensor) -> Tensor:
        """
        Return a scalar with the gradient of the site's distribution, and of learned parts.

        :param tensors: the fields of a :class:`SiteSignal`, with the slots first.
        """
        baseline: Baseline = self.options.baseline
        signal = SiteSignal(
            name=site["name"],
            support=self.support,
            exact=self.exact,
            extra=self.extra,
            input=options_of(site).get("baseline_input"),
            programs=programs,
            **tensors,
        )
        if isinstance(baseline, LearnedBaseline):
            baseline.add_to_store()
            follow(baseline, signal.cost)
        return baseline.surrogate(signal)


def is_discrete(msg: Message) -> bool:
    """
    Return whether a site of the guide draws a discrete value with a score-function gradient.

    :raises SlotError: for a discrete site with gradients through its values.
    """
    if not is_random(msg) or not known_support(msg["fn"]).is_discrete:
        return False
    if reparameterized(msg):
        raise SlotError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) passes a gradient through "
            f"its discrete values, but sums and score functions of them have none: use the "
            f"distribution without it, such as OneHotCategorical; or TraceSGVB_ELBO or "
            f"TraceIWAE_ELBO without slots, which keep the site's (biased) gradient"
        )
    return True


def check_num_slots(name: str, count: int) -> None:
    """
    Check the number of slots of a site, times those of the sites before.

    :raises SlotError: if it is too large.
    """
    if count > _MAX_SLOTS:
        raise SlotError(
            f"guide site '{name}' would take {count} slots of each datum, because every slot of "
            f"the sites before it has slots of this site. Sum the sites of a sequence exactly, "
            f"under pyro.markov (num_categories=math.inf) or in the model (infer={{'enumerate': "
            f"'parallel'}}). Or draw them in one vectorized plate, or sample some of them once by "
            f"infer={_SINGLE_DRAW}"
        )


def choose(
    msg: Message, options: SiteOptions, warn: Callable[[str], object], joined: tuple[int, ...] = ()
) -> SiteSlots | None:
    """
    Choose the slots of a site of the guide; None for a site that has none.

    :param options: the default options of all sites.
    :param warn: called with a message for sites that are sampled although slots were requested.
    :param joined: batch dims of plates whose elements form one variable.
    :raises SlotError: naming the site.
    """
    requested = bool(options_of(msg).keys() & SLOT_OPTIONS)
    if not is_random(msg):
        return None
    site_in_full_precision(msg)
    if not is_discrete(msg):
        if requested:
            raise SlotError(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is continuous, so "
                f"it has no categories to sum: remove infer['mcvae'] = {options_of(msg)}"
            )
        if (count := msg["infer"].get("num_samples")) is not None:
            warn(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is marked for {count} "
                f"draws, but is drawn once for each particle: increase num_particles"
            )
        return None
    options = options.of(msg)
    if options.plain:
        return single(msg, options)
    support = _support(msg, joined)
    if support is None:
        message = (
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has a support that "
            f"cannot be listed"
        )
        if requested:
            raise SlotError(f"{message}: pass infer={_SINGLE_DRAW}")
        warn(f"{message}, so it is sampled, with the score function as its gradient")
        return None
    return _slots(msg, options, support)


def _support(msg: Message, joined: tuple[int, ...]) -> Support | None:
    support = support_of(msg["fn"])
    if not joined:
        return support
    return joined_plates(support, joined) if isinstance(support, Categories) else None


def single(msg: Message, options: SiteOptions) -> SiteSlots:
    """Return a single draw as slots."""
    with torch.no_grad():
        value = msg["fn"].sample()
    weight = torch.ones([1] * (1 + len(msg["fn"].batch_shape)), device=value.device)
    choice = Choice(value.unsqueeze(0), weight, weight > 0)
    return SiteSlots(options, support_of(msg["fn"]), choice)


def _slots(msg: Message, options: SiteOptions, support: Support) -> SiteSlots:
    budget, k, n = options.budget, options.num_categories or 0, options.num_samples or 0
    with torch.no_grad():
        if budget is not None and budget < support.size:
            count = SlotCount(budget, budget, options.baseline.min_samples)
        elif budget is not None or k >= support.size:
            if support.size == math.inf:
                marked = " (infer={'enumerate': ...} requests all)" * bool(
                    msg["infer"].get("enumerate")
                )
                raise SlotError(
                    f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has "
                    f"{support.too_many}, got num_categories={k}{marked}: "
                    f"pass a finite one and num_samples >= 1, as in "
                    f"infer={{'mcvae': {{'num_categories': 1, 'num_samples': 1}}}}"
                )
            return SiteSlots(options, support, support.all_values(), exact=True)
        else:
            if n == 0:
                raise SlotError(
                    f"guide site '{msg['name']}' has {support.size} values, of which "
                    f"num_categories={k} are summed, and num_samples=0 "
                    f"leaves the others out: pass num_samples >= 1, or num_categories=math.inf"
                )
            count = SlotCount(int(k), n)
        choice = support.slots(count)
        if not options.baseline.extra_draw:
            return SiteSlots(options, support, choice)
        none = torch.zeros_like(choice.weight[:1])
        extended = Choice(
            torch.cat([choice.value, support.draw().to(choice.value)]),
            torch.cat([choice.weight, none]),
            torch.cat([choice.sampled, none.bool()]),
        )
        return SiteSlots(options, support, extended, extra=True)
