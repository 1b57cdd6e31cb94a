"""The values and weights of one discrete site's slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pyro_mcvae.discrete.site_options import SITE_OPTIONS, SiteOptions, SlotError
from pyro_mcvae.programs.joined_support import JoinedSupport
from pyro_mcvae.programs.precision import site_in_full_precision
from pyro_mcvae.programs.relaxed import relaxed_sample
from pyro_mcvae.programs.sites import RELAXED, is_random, known_support, reparameterized
from pyro_mcvae.programs.support import Choice, Support
from pyro_mcvae.programs.supports import Categories, support_of
from pyro_mcvae.programs.types import Message

__all__ = ["Chosen", "choose", "is_discrete", "single"]

_PLAINLY = "{'mcvae': {'num_categories': 0, 'num_samples': 1}}"


class Chosen(NamedTuple):
    """
    The slots of a site.

    :ivar support: its values; None where they cannot be listed.
    :ivar slots: without weights where there is one slot.
    :ivar extra: whether the last slot is an independent draw.
    :ivar exact: whether the slots are all values.
    """

    options: SiteOptions
    support: Support | None
    slots: Choice
    extra: bool = False
    exact: bool = False


def is_discrete(msg: Message) -> bool:
    """Whether a site of the guide draws a discrete value, with the score as its gradient."""
    return is_random(msg) and not reparameterized(msg) and known_support(msg["fn"]).is_discrete


def choose(
    msg: Message,
    options: SiteOptions,
    tell: Callable[[str], object],
    joined: tuple[int, ...] = (),
) -> Chosen | None:
    """
    Choose the slots of a site of the guide; None for a site that has none.

    :param options: for all sites that do not say otherwise.
    :param tell: called with a message for sites that are sampled though slots were asked for.
    :param joined: batch dims of plates whose elements are one variable together.
    :raises SlotError: naming the site.
    """
    asked = bool(msg["infer"].get("mcvae", {}).keys() & SITE_OPTIONS)
    _check_kind(msg)
    if not is_random(msg):
        return None
    site_in_full_precision(msg)
    if not is_discrete(msg):
        if asked:
            raise SlotError(
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is continuous, so "
                f"it has no categories to sum: remove infer['mcvae'] = {msg['infer']['mcvae']}"
            )
        return None
    options = options.of(msg)
    if getattr(options.baseline, "relaxed", False):
        return _relaxed(msg, options)
    if options.plain:
        return single(msg, options)
    support = _support(msg, joined)
    if support is None:
        message = (
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has a support that "
            f"cannot be listed"
        )
        if asked:
            raise SlotError(f"{message}: pass infer={_PLAINLY}")
        tell(f"{message}, so it is sampled, with the score function as its gradient")
        return None
    return _slots(msg, options, support)


def _check_kind(msg: Message) -> None:
    kind = msg["infer"].get("enumerate")
    if kind == "sequential" or (kind == "parallel" and "num_samples" in msg["infer"]):
        raise SlotError(
            f"guide site '{msg['name']}' is marked for enumeration ({kind}, num_samples="
            f"{msg['infer'].get('num_samples')}), of which this objective does the exact sum "
            f"in parallel: mark it infer={{'mcvae': {{'num_categories': math.inf}}}} for "
            f"that, or infer={{'mcvae': {{'num_samples': n}}}} for draws"
        )


def _support(msg: Message, joined: tuple[int, ...]) -> Support | None:
    support = support_of(msg["fn"])
    if not joined:
        return support
    return JoinedSupport(support, joined) if isinstance(support, Categories) else None


def _relaxed(msg: Message, options: SiteOptions) -> Chosen:
    value = relaxed_sample(msg["fn"], options.baseline.temperature, options.baseline.hard)
    if value is None:
        raise SlotError(
            f"{type(options.baseline).__name__} relaxes OneHotCategorical and Bernoulli sites, "
            f"but guide site '{msg['name']}' is a {type(msg['fn']).__name__}: use "
            f"OneHotCategorical in both programs, or another baseline"
        )
    msg["infer"] = {**msg["infer"], RELAXED: True}
    nothing = value.new_empty(0)
    return Chosen(options, support_of(msg["fn"]), Choice(value.unsqueeze(0), nothing, nothing))


def single(msg: Message, options: SiteOptions) -> Chosen:
    """One draw."""
    with torch.no_grad():
        value = msg["fn"].sample().unsqueeze(0)
    nothing = value.new_empty(0)
    return Chosen(options, support_of(msg["fn"]), Choice(value, nothing, nothing))


def _slots(msg: Message, options: SiteOptions, support: Support) -> Chosen:
    with torch.no_grad():
        if options.budget is not None and options.budget < support.size:
            choice = support.budget(options.budget, options.min_samples)
        elif options.budget is not None or options.num_categories >= support.size:
            if support.size == math.inf:
                raise SlotError(
                    f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has too "
                    f"many values to list, got num_categories={options.num_categories}: "
                    f"pass a finite one and num_samples >= 1"
                )
            return Chosen(options, support, support.all_values(), exact=True)
        else:
            if options.num_samples == 0:
                raise SlotError(
                    f"guide site '{msg['name']}' has {support.size} values, of which "
                    f"num_categories={options.num_categories} are summed, and num_samples=0 "
                    f"leaves the others out: pass num_samples >= 1, or num_categories=math.inf"
                )
            choice = support.top_k(int(options.num_categories), options.num_samples)
        if not options.extra_draw:
            return Chosen(options, support, choice)
        none = torch.zeros_like(choice.weight[:1])
        wider = Choice(
            torch.cat([choice.value, support.draw().to(choice.value)]),
            torch.cat([choice.weight, none]),
            torch.cat([choice.sampled, none.bool()]),
        )
        return Chosen(options, support, wider, extra=True)
