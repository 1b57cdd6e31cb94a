"""Properties of Pyro's sample sites: scales, masks, precision, densities."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.known_logs import keep_logs, known_logs
from pyro_mcvae.programs.supports import relaxed_log_prob
from pyro_mcvae.programs.types import (
    Constraint,
    Distribution,
    Message,
    Site,
    noted,
    subsampling_scale,
)

# Densities in full precision, whatever precision the networks behind them compute in.

_DISTRIBUTION = torch.distributions.Distribution
_NOTHING = nullcontext()
_HALF = (torch.bfloat16, torch.float16)


def full_precision(fn: Distribution) -> Distribution:
    """
    A distribution whose half-precision parameters, as autocast networks return them, are cast to
    single precision; others are returned as they are.

    bfloat16 has 8 bits: a log density of -500 nats that is summed in it is off by a nat. (A
    Categorical has rounded its normalised logits by then; cast a network's output to avoid it.)

    Example::

        >>> fn = dist.Normal(torch.zeros(3, dtype=torch.bfloat16), 1.0).to_event(1)
        >>> full_precision(fn).log_prob(torch.zeros(3)).dtype
        torch.float32
    """
    changed = {}
    for name, value in vars(fn).items():
        if isinstance(value, Tensor) and value.dtype in _HALF:
            changed[name] = value.float()
        elif isinstance(value, _DISTRIBUTION) and (wide := full_precision(value)) is not value:
            changed[name] = wide
    return _changed(fn, changed) if changed else fn


def site_in_full_precision(msg: Message) -> None:
    """
    Draw and score a site in single precision, whatever the precision of its distribution.

    The program gets its draw in the precision that it would have drawn it in: networks in bfloat16
    throughout take no other. Densities, and the trace, have the draw as it is.
    """
    fn = msg["fn"]
    msg["fn"] = full_precision(fn)
    if msg["fn"] is not fn and not msg["is_observed"]:
        _keep_precision(msg, fn)


def _keep_precision(msg: Message, fn: Distribution) -> None:
    dtypes = set(_float_dtypes(fn))
    if len(dtypes) == 1:
        # Handlers have taken down what they keep by the time this is called.
        msg["continuation"] = functools.partial(_in_precision, dtypes.pop())


def _float_dtypes(fn: Distribution) -> Iterator[torch.dtype]:
    for value in vars(fn).values():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value.dtype
        elif isinstance(value, _DISTRIBUTION):
            yield from _float_dtypes(value)


def _in_precision(dtype: torch.dtype, msg: Message) -> None:
    if msg["value"].is_floating_point():
        msg["value"] = msg["value"].to(dtype)


def _changed(fn: Distribution, changed: dict[str, Any]) -> Distribution:
    """A copy with other parameters."""
    if isinstance(fn, torch.distributions.Categorical):
        # It has normalised them in half precision: without this it would be no density.
        if "logits" in changed:
            changed["logits"] = changed["logits"].log_softmax(-1)
        if "probs" in changed:
            changed["probs"] = changed["probs"] / changed["probs"].sum(-1, keepdim=True)
        changed["_param"] = changed["logits" if "logits" in changed else "probs"]
    wide = copy.copy(fn)
    vars(wide).update(changed)
    return wide


@contextmanager
def _casts_anew() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# Autocast casts weights at each use. An older PyTorch keeps those that it has cast, also without
# gradients, as for a search: they would have none in the rest of the step.
casts_with_gradients = _casts_anew if torch.__version__ < "2.13" else nullcontext


def without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off where it is on: a density's own products would be rounded."""
    return _switched_off() if torch._C._is_any_autocast_enabled() else _NOTHING


def _switched_off() -> ExitStack:
    stack = ExitStack()
    own = torch._C._get_privateuse1_backend_name()  # of a device that PyTorch does not ship
    for device in ("cpu", "cuda", "mps", "xpu", own):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# Masks wherever a program writes them: around a site, around its event, or inside the event.

# What a mask goes through: the density of the whole is a sum over its entries.
_SUMS = torch.distributions.Independent, ExpandedDistribution, MaskedDistribution


def counted_values(site: Site) -> Tensor | None:
    """
    Which entries of a site's value its masks leave in the density.

    A mask of ``Normal(...).mask(m).to_event(1)`` has an entry for each entry of the event; one
    around the event has one for all of them.

    :returns: a boolean tensor that broadcasts to the value's shape, with its last dims for the
        event; None without a mask.
    """
    value = site["value"]  # None in a message that is not drawn yet
    device = getattr(value, "device", None)
    found = [
        _as_event(torch.as_tensor(mask, device=device), event_dim)
        for mask, event_dim in _masks(site)
        if mask is not None and mask is not True
    ]
    return reduce(torch.logical_and, found) if found else None


def hides_masks(fn: Distribution) -> bool:
    """Whether a mask inside a transform or a mixture takes out a part of the density alone."""
    if isinstance(fn, _SUMS):
        return hides_masks(fn.base_dist)
    inside = [part for part in vars(fn).values() if _is_distribution(part)]
    return any(isinstance(part, MaskedDistribution) or hides_masks(part) for part in inside)


def is_flat(fn: Distribution) -> bool:
    """Whether a distribution says ``.mask(False)``: of it a program wants the support alone."""
    own = isinstance(fn, MaskedDistribution) and fn._mask is False
    return own or (isinstance(fn, _SUMS) and is_flat(fn.base_dist))


def with_mask(fn: Distribution, counted: Tensor | None) -> Distribution | None:
    """
    A distribution with other masks than its own.

    :param counted: as of :func:`counted_values`; None for no mask.
    :returns: None where an event whose entries have one density together is to count in parts.
    """
    if isinstance(fn, MaskedDistribution):
        return with_mask(fn.base_dist, counted)
    if isinstance(fn, torch.distributions.Independent):
        base = with_mask(fn.base_dist, counted)
        return None if base is None else dist.Independent(base, fn.reinterpreted_batch_ndims)
    if isinstance(fn, ExpandedDistribution):
        base = with_mask(fn.base_dist, None)
        fn = fn if base is None else base.expand(fn.batch_shape)
    if counted is None:
        return fn
    if fn.event_dim:
        entries = counted.flatten(max(0, counted.dim() - fn.event_dim))
        if bool((entries.any(-1) != entries.all(-1)).any()):
            return None
        counted = entries.all(-1)
    return fn.mask(counted)


def _masks(site: Site) -> Iterator[tuple[bool | Tensor | None, int]]:
    """Each mask with the number of dims that an entry of it stands for, the outermost first."""
    fn = site["fn"]
    yield site["mask"], fn.event_dim
    while isinstance(fn, _SUMS):
        if isinstance(fn, MaskedDistribution):
            yield fn._mask, fn.event_dim
        fn = fn.base_dist


def _as_event(mask: Tensor, event_dim: int) -> Tensor:
    return mask.reshape(mask.shape + (1,) * event_dim)


def _is_distribution(value: object) -> bool:
    return isinstance(value, torch.distributions.Distribution)


# Facts about one site of a Pyro trace: what it is, its plates, its scale, its log density.

# Marks sites whose value is a relaxation of a discrete one.
RELAXED = "_mcvae_relaxed"


def is_scored(site: Site) -> bool:
    """Whether a site carries a log density: a sample statement, not a plate's subsample."""
    return site["type"] == "sample" and not (site_is_subsample(site) or is_record(site))


def is_record(site: Site) -> bool:
    """Whether a sample site only records what was computed, by a reparameterizer or the user."""
    fn = site["fn"]
    masked = site["is_observed"] and isinstance(fn, MaskedDistribution) and fn._mask is False
    return (masked and is_delta(fn)) or bool(site["infer"].get("_deterministic"))


def is_latent(site: Site) -> bool:
    """Whether a site is a sample statement that is not observed."""
    return is_scored(site) and not site["is_observed"]


def layers(fn: Distribution | None) -> Iterator[Distribution]:
    """A distribution and those that it is made of, one inside the other, outermost first."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "base_dist", None)


_MASKABLE = (ExpandedDistribution, MaskedDistribution)
_WRAPPERS = (torch.distributions.Independent, *_MASKABLE)


def bare(fn: Distribution) -> Distribution:
    """A distribution without ``to_event``, ``mask`` and ``expand``, which change no density."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def is_delta(fn: Distribution) -> bool:
    """Whether a distribution is a point mass, also under ``to_event``, ``mask`` or ``expand``."""
    return any(isinstance(layer, dist.Delta) for layer in layers(fn))


def is_factor(fn: Distribution) -> bool:
    """Whether a distribution is a factor of the density that draws nothing."""
    return any(isinstance(layer, dist.Unit) for layer in layers(fn))


def observes_data(site: Site) -> bool:
    """
    Whether a scored site of a guide has the density of something that the guide did not draw.

    A factor, or a point mass with a density of its own, says by itself what it is: a part of log q.
    """
    return site["is_observed"] and not is_factor(site["fn"]) and not is_delta(site["fn"])


def is_masked(fn: Distribution) -> bool:
    """Whether a distribution masks itself, which its site does not show."""
    return any(isinstance(layer, MaskedDistribution) for layer in layers(fn))


def is_straight_through(fn: Distribution) -> bool:
    """Whether draws carry their relaxed value in an attribute, which copies of them lose."""
    return any(isinstance(layer, _STRAIGHT_THROUGH) for layer in layers(fn))


def changed_draw(change: Callable[..., Tensor], *draws: Tensor) -> Tensor:
    """
    What a function makes of draws, of what straight-through ones were before rounding, and of the
    logarithms of a draw that are known.
    """
    made = change(*draws)
    if len(draws) == 1:
        made = keep_logs(draws[0], change, made)
    relaxed = [getattr(d, "_unquantize", None) for d in draws]
    if all(r is not None for r in relaxed):
        made._unquantize = change(*relaxed)  # type: ignore[attr-defined]
    return made


_STRAIGHT_THROUGH = (
    dist.RelaxedBernoulliStraightThrough,
    dist.RelaxedOneHotCategoricalStraightThrough,
)


def known_support(fn: Distribution) -> Constraint:
    """Where values lie; of distributions that do not say, as users' own ones, the real numbers."""
    try:
        return fn.support
    except NotImplementedError:
        return constraints.real


def is_random(site: Site) -> bool:
    """Whether a guide site draws randomness: latent and no point mass."""
    return is_latent(site) and not is_delta(site["fn"])


def reparameterized(site: Site) -> bool:
    """Whether a guide site passes gradients through its draw."""
    return bool(getattr(site["fn"], "has_rsample", False)) and not noted(site, "scored")


def inner_scale(site: Site) -> float | Tensor:
    """The user's own ``poutine.scale``: what remains of the site's scale without its plates."""
    scale, plates = site["scale"], subsampling_scale(site["cond_indep_stack"])
    if isinstance(scale, Tensor):
        return scale / plates if plates != 1.0 else scale
    ratio = scale / plates
    # N/B is multiplied in another order by Pyro: a rounding error is no scale of the user's.
    return 1.0 if abs(ratio - 1.0) < 1e-9 else ratio


def masked(site: Site, log_prob: Tensor) -> Tensor:
    """A site's log density with the user's scale and mask, without the plates' N/B."""
    return scale_and_mask(log_prob, inner_scale(site), site["mask"])


def unscaled_masked(site: Site, log_prob: Tensor) -> Tensor:
    """A site's log density with the user's mask alone."""
    return scale_and_mask(log_prob, 1.0, site["mask"])


def masks_of(site: Site) -> list[bool | Tensor]:
    """The masks of a site and of its distribution, from the outermost one; maybe False."""
    masks, fn = [site["mask"]], site["fn"]
    while isinstance(fn, _MASKABLE):
        masks.append(getattr(fn, "_mask", None))
        fn = fn.base_dist
    return [m for m in masks if m is not None and m is not True]


def masked_entries(site: Site) -> Tensor | None:
    """What of a site's batch its masks leave in the density; None if all is."""
    found = masks_of(site)
    return _joined(found, site["value"]) if found else None


def _joined(masks: list[bool | Tensor], value: Tensor | None) -> Tensor:
    device = getattr(value, "device", None)  # no value in a message that is not drawn yet
    return reduce(torch.logical_and, (torch.as_tensor(m, device=device) for m in masks))


def unscaled_log_prob(site: Site, program: str, value: Tensor | None = None) -> Tensor:
    """
    ``fn.log_prob`` of a site's value (or of ``value``), without scale and mask.

    :raises ValueError: naming the site where the distribution refuses the value.
    """
    value = site["value"] if value is None else value
    if site["infer"].get(RELAXED):
        return relaxed_log_prob(site["fn"], value)
    with naming_site(site, program), known_logs(value):
        return site["fn"].log_prob(value, *site["args"], **site["kwargs"])


@contextmanager
def naming_site(site: Site, program: str) -> Iterator[None]:
    """Errors of a density name its site."""
    try:
        with without_autocast():
            yield
    except (KeyError, NotImplementedError) as error:  # the latter is a RuntimeError
        raise _no_inverse(site, program, error) from error
    except (ValueError, RuntimeError) as error:
        raise _density_error(site, program, error) from error


def _no_inverse(site: Site, program: str, error: Exception) -> Exception:
    if not any(getattr(layer, "transforms", ()) for layer in layers(site["fn"])):
        return _density_error(site, program, error)
    return ValueError(
        f"cannot compute log_prob at site '{site['name']}' of the {program} "
        f"({type(site['fn']).__name__}): {str(error) or 'no inverse'}\nA flow without an inverse "
        f"knows the density of its own draws only, and no longer once these are detached or moved: "
        f"use an invertible one, or a loss that leaves them where they are (TraceSGVB_ELBO, "
        f"TraceIWAE_ELBO), or, for chains, coordinates='noise' with the full gradient."
    )


def _density_error(site: Site, program: str, error: Exception) -> Exception:
    shape = tuple(getattr(site["value"], "shape", ()))
    remedy = (
        "The guide's draw lies outside the support of the model's distribution: give the guide "
        "a distribution with that support (or an AutoGuide, which transforms to it)."
        if "within the support" in str(error) and program == "model" and is_latent(site)
        else "Check the value, the distribution's shape and the plates around the site."
    )
    return type(error)(
        f"cannot compute log_prob at site '{site['name']}' of the {program} "
        f"({_name(site['fn'])}, value of shape {shape}): {error}\n{remedy}"
    )


def nonfinite_report(site: Site, program: str, log_prob: Tensor) -> str | None:
    """One line that counts a site's NaN and infinite log densities, or None where all is finite."""
    nans, infs = int(torch.isnan(log_prob).sum()), int(torch.isinf(log_prob).sum())
    if not nans and not infs:
        return None
    return (
        f"site '{site['name']}' of the {program} ({_name(site['fn'])}): "
        f"{nans} NaN and {infs} infinite of {log_prob.numel()} log_prob entries"
    )


def _name(fn: Distribution) -> str:
    """The name that the user knows a distribution by."""
    return type(getattr(fn, "users", fn)).__name__
