"""Properties of Pyro's sample sites: scales, masks, precision, densities."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import reduce
from itertools import takewhile
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import mask_of
from pyro_mcvae.ops.tensors import guard, recordings
from pyro_mcvae.programs.log_values import at_logs, logs_of, with_logs
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.types import (
    Constraint,
    Distribution,
    Message,
    Site,
    SiteError,
    noted,
    subsampling_scale,
)

# Densities in full precision, also for networks in half precision.

_DISTRIBUTION = torch.distributions.Distribution
_NOTHING = nullcontext()
_HALF = (torch.bfloat16, torch.float16)


def full_precision(fn: Distribution) -> Distribution:
    """
    Cast half-precision parameters of a distribution, as from autocast, to single precision.

    Other distributions are returned unchanged. bfloat16 has 8 bits: a log density of -500 nats
    summed in it has an error of a nat. (A Categorical has then already rounded its normalized
    logits; cast a network's output to avoid this.)

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
    Draw and score a site in single precision if its distribution has half precision.

    The program receives the draw in the distribution's precision, because networks in bfloat16
    accept no other. Densities and the trace have the draw in single precision.
    """
    fn = msg["fn"]
    msg["fn"] = full_precision(fn)
    if msg["fn"] is not fn and not msg["is_observed"]:
        _keep_precision(msg, fn)


def _keep_precision(msg: Message, fn: Distribution) -> None:
    dtypes = set(_float_dtypes(fn))
    if len(dtypes) == 1:
        # Handlers have already stored the value when this is called.
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
    """Copy a distribution with other parameters."""
    if isinstance(fn, torch.distributions.Categorical):
        # The distribution has normalized its parameters in half precision. Without another
        # normalization the probabilities would not sum to one.
        if "logits" in changed:
            changed["logits"] = changed["logits"].log_softmax(-1)
        if "probs" in changed:
            changed["probs"] = changed["probs"] / changed["probs"].sum(-1, keepdim=True)
        changed[compat.CATEGORICAL_PARAMETERS] = changed.get("logits", changed.get("probs"))
    wide = copy.copy(fn)
    vars(wide).update(changed)
    return wide


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# Autocast casts weights at each use. An older PyTorch caches cast weights also without gradients,
# for example during a search: they would have no gradient in the rest of the step.
casts_with_gradients = _without_cast_cache if compat.CACHES_CASTS_WITHOUT_GRADIENTS else nullcontext


def without_autocast() -> AbstractContextManager[object]:
    """Turn autocast off if it is on, because it would round the products of a density."""
    return _switched_off() if compat.is_autocast_enabled() else _NOTHING


def _switched_off() -> ExitStack:
    stack = ExitStack()
    for device in compat.devices():
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# Masks around a site, around its event, or inside the event.

# Wrappers whose density is a sum over entries, so that masks inside them remove entries.
_WRAPPERS = torch.distributions.Independent, ExpandedDistribution, MaskedDistribution


def is_wrapper(fn: Distribution) -> bool:
    """Return whether a distribution is ``to_event``, ``mask`` or ``expand`` of another one."""
    return has_methods_of(fn, *_WRAPPERS)


def counted_values(site: Site) -> Tensor | None:
    """
    Return the entries of a site's value that its masks leave in the density.

    The mask of ``Normal(...).mask(m).to_event(1)`` has an entry for each entry of the event. A mask
    around the event has one entry for the whole event.

    :returns: a boolean tensor that broadcasts to the value's shape, with its last dims for the
        event; None without a mask.
    """
    masks = [(_as_mask(site, mask), event_dim) for mask, event_dim in site_masks(site)]
    event_masks = [mask.reshape(mask.shape + (1,) * event_dim) for mask, event_dim in masks]
    return reduce(torch.logical_and, event_masks) if event_masks else None


def own_mask(site: Site) -> Tensor | None:
    """Return the entries that a program's own masks leave in the density; None without masks."""
    return site["own_mask"] if "own_mask" in site else counted_values(site)


def certain_entries(site: Site) -> Tensor | bool:
    """Return which entries have a single possible value, whose probability is one."""
    fn = bare(site["fn"])
    if has_methods_of(fn, torch.distributions.Categorical):
        return (fn.probs > 0).sum(-1) == 1
    try:
        certain = fn.variance == 0
    except NotImplementedError:
        return False
    for dim in range(-fn.event_dim, 0):
        certain = certain.all(dim, keepdim=True)
    return certain if known_support(site["fn"]).is_discrete else False


def hides_masks(fn: Distribution) -> bool:
    """Return whether a mask inside a transform or a mixture removes only part of the density."""
    if is_wrapper(fn):
        return hides_masks(fn.base_dist)
    inside = [part for part in vars(fn).values() if isinstance(part, _DISTRIBUTION)]
    return any(isinstance(part, MaskedDistribution) or hides_masks(part) for part in inside)


def is_flat(fn: Distribution) -> bool:
    """Return whether a distribution has ``.mask(False)``: only its support is used."""
    is_masked_out = isinstance(fn, MaskedDistribution) and mask_of(fn) is False
    return is_masked_out or (is_wrapper(fn) and is_flat(fn.base_dist))


def with_mask(fn: Distribution, counted: Tensor | None) -> Distribution | None:
    """
    Replace the masks of a distribution.

    :param counted: as from :func:`counted_values`; None for no mask.
    :returns: None if the mask would split an event whose entries have one joint density.
    """
    if isinstance(fn, MaskedDistribution):
        return with_mask(fn.base_dist, counted)
    if has_methods_of(fn, torch.distributions.Independent):
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


def site_masks(site: Site) -> list[tuple[bool | Tensor, int]]:
    """Return the masks, each with the number of event dims below it; outermost first, not True."""
    wrappers = takewhile(is_wrapper, layers(site["fn"]))
    inner = [(mask_of(fn), fn.event_dim) for fn in wrappers if isinstance(fn, MaskedDistribution)]
    masks = [(site["mask"], site["fn"].event_dim), *inner]
    return [(mask, dim) for mask, dim in masks if mask is not None and mask is not True]


def _as_mask(site: Site, mask: bool | Tensor) -> Tensor:
    # A message that is not drawn yet has no value.
    return torch.as_tensor(mask, device=getattr(site["value"], "device", None))


def masks_of(site: Site) -> list[bool | Tensor]:
    """Return the masks of a site and of its distribution, outermost first, but none in events."""
    return [mask for mask, event_dim in site_masks(site) if event_dim == site["fn"].event_dim]


def masked_entries(site: Site) -> Tensor | None:
    """Return the batch entries of a site that its masks leave in the density; None for all."""
    masks = [_as_mask(site, mask) for mask in masks_of(site)]
    return reduce(torch.logical_and, masks) if masks else None


# Properties of one site of a Pyro trace: kind, plates, scale, log density.


def is_scored(site: Site) -> bool:
    """Return whether a site carries a log density: a sample statement, not a plate's subsample."""
    return site["type"] == "sample" and not (site_is_subsample(site) or is_record(site))


def is_record(site: Site) -> bool:
    """Return whether a sample site only records a computed value (``pyro.deterministic``)."""
    fn = site["fn"]
    masked = site["is_observed"] and isinstance(fn, MaskedDistribution) and mask_of(fn) is False
    return (masked and is_delta(fn)) or bool(site["infer"].get(compat.DETERMINISTIC))


def is_latent(site: Site) -> bool:
    """Return whether a site is a sample statement that is not observed."""
    return is_scored(site) and not site["is_observed"]


def layers(fn: Distribution | None) -> Iterator[Distribution]:
    """Yield a distribution and the nested ``base_dist`` of each, outermost first."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "base_dist", None)


def bare(fn: Distribution) -> Distribution:
    """Return a distribution without its ``to_event``, ``mask`` and ``expand`` wrappers."""
    while is_wrapper(fn):
        fn = fn.base_dist
    return fn


def is_delta(fn: Distribution) -> bool:
    """Return whether a distribution is a point mass, possibly wrapped."""
    return any(has_methods_of(layer, dist.Delta) for layer in layers(fn))


def is_factor(fn: Distribution) -> bool:
    """Return whether a distribution is a ``Unit``: a factor without a draw."""
    return any(has_methods_of(layer, dist.Unit) for layer in layers(fn))


def observes_data(site: Site) -> bool:
    """
    Return whether a scored site of a guide is the density of an observation.

    A factor, or a point mass with a density, is explicitly a part of log q instead.
    """
    return site["is_observed"] and not is_factor(site["fn"]) and not is_delta(site["fn"])


def is_masked(fn: Distribution) -> bool:
    """Return whether a distribution has a mask, which its site does not record."""
    return any(isinstance(layer, MaskedDistribution) for layer in layers(fn))


def is_straight_through(fn: Distribution) -> bool:
    """Return whether draws have their relaxed value in an attribute, which copies lose."""
    return any(isinstance(layer, _STRAIGHT_THROUGH) for layer in layers(fn))


def changed_draw(change: Callable[..., Tensor], *draws: Tensor) -> Tensor:
    """
    Apply a function to draws, keeping their attributes.

    These are the relaxed values of straight-through draws, and logarithms.
    """
    result = change(*draws)
    logs = [known for d in draws if (known := logs_of(d)) is not None]
    if len(logs) == len(draws):
        with_logs(result, logs[0].changed(change, *logs[1:]))
    relaxed = [getattr(d, compat.RELAXED, None) for d in draws]
    if all(r is not None for r in relaxed):
        setattr(result, compat.RELAXED, change(*relaxed))
    return result


_STRAIGHT_THROUGH = (
    dist.RelaxedBernoulliStraightThrough,
    dist.RelaxedOneHotCategoricalStraightThrough,
)


def known_support(fn: Distribution) -> Constraint:
    """Return the support of a distribution; the real numbers if it does not define one."""
    try:
        return fn.support
    except NotImplementedError:
        return constraints.real


def elementwise(constraint: Constraint) -> Constraint:
    """Return the constraint of each element of a vector's constraint."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return constraint


def tensors_of(constraint: Constraint) -> Iterator[Tensor]:
    """Yield the tensors in a constraint."""
    if isinstance(constraint, Tensor):
        yield constraint
    elif isinstance(constraint, list | tuple):
        for part in constraint:
            yield from tensors_of(part)
    elif isinstance(constraint, constraints.Constraint):
        for part in vars(constraint).values():
            yield from tensors_of(part)


def is_random(site: Site) -> bool:
    """Return whether a guide site is random: latent and not a point mass."""
    return is_latent(site) and not is_delta(site["fn"])


def reparameterized(site: Site) -> bool:
    """Return whether a guide site has gradients through its draw."""
    return bool(getattr(site["fn"], "has_rsample", False)) and not noted(site, "scored")


def inner_scale(site: Site) -> float | Tensor:
    """Return the user's ``poutine.scale``: the site's scale without that of its plates."""
    scale, plates = site["scale"], subsampling_scale(site["cond_indep_stack"])
    if isinstance(scale, Tensor):
        return scale / plates if plates != 1.0 else scale
    ratio = scale / plates
    # Pyro multiplies N/B in another order: a rounding error is not a scale of the user.
    return 1.0 if abs(ratio - 1.0) < 1e-9 else ratio


def masked(site: Site, log_prob: Tensor) -> Tensor:
    """Apply the user's scale and mask to a site's log density, without the plates' N/B."""
    return scale_and_mask(log_prob, inner_scale(site), site["mask"])


def unscaled_masked(site: Site, log_prob: Tensor) -> Tensor:
    """Apply only the user's mask to a site's log density."""
    return scale_and_mask(log_prob, 1.0, site["mask"])


def unscaled_log_prob(site: Site, program: str, value: Tensor | None = None) -> Tensor:
    """
    Return ``fn.log_prob`` of a site's value (or of ``value``), without scale and mask.

    :raises ValueError: naming the site, if the distribution rejects the value.
    """
    value = site["value"] if value is None else value
    if recordings and recordings[-1].supports and program == "model":
        check_support(site)
    with naming_site(site, program):
        return at_logs(site["fn"], value).log_prob(value, *site["args"], **site["kwargs"])


@contextmanager
def naming_site(site: Site, program: str) -> Iterator[None]:
    """Add the site's name to errors of its density."""
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
        f"has a density only at its own draws, and no longer once these are detached or moved. "
        f"Use an invertible flow, or a loss that does not move them (TraceSGVB_ELBO, "
        f"TraceIWAE_ELBO), or, for chains, coordinates='noise' with the full gradient."
    )


def check_support(site: Site) -> None:
    """
    Check a latent's value that its distribution does not; :func:`guard` it while recording.

    :raises SiteError: if the value is outside the support.
    """
    support, value = known_support(site["fn"]), site["value"]
    anywhere = constraints.is_dependent(support) or elementwise(support) is constraints.real
    if value is None or anywhere or not is_latent(site):
        return
    if not guard(support.check(value).all()):
        raise _density_error(site, "model", SiteError(f"it is not within the support ({support})"))


def _density_error(site: Site, program: str, error: Exception) -> Exception:
    shape = tuple(getattr(site["value"], "shape", ()))
    kind, outside = type(error), "within the support" in str(error)
    if outside and program == "model" and is_latent(site):
        remedy = (
            "The guide's draw lies outside the support of the model's distribution: give the guide "
            "a distribution with that support (or an AutoGuide, which transforms to it)."
        )
        if all(t.numel() == 1 for t in tensors_of(known_support(site["fn"]))):
            kind = SiteError  # for any dims of the distribution
    elif outside and program == "model" and isinstance(site["value"], Tensor):
        remedy = (
            "If a latent decides where the support ends, as the total of a Binomial does, give its "
            "impossible values density zero: observe Binomial(torch.maximum(total, obs), ...), and "
            "add pyro.factor('possible', torch.where(obs > total, -torch.inf, 0.0)) in the same "
            "plates. Otherwise check the value."
        )
    else:
        remedy = "Check the value, the distribution's shape and the plates around the site."
    return kind(
        f"cannot compute log_prob at site '{site['name']}' of the {program} "
        f"({type(site['fn']).__name__}, value of shape {shape}): {error}\n{remedy}"
    )


def nonfinite_report(site: Site, program: str, log_prob: Tensor) -> str | None:
    """Return a line with the number of NaN and infinite log densities of a site, else None."""
    nans, infs = int(torch.isnan(log_prob).sum()), int(torch.isinf(log_prob).sum())
    if not nans and not infs:
        return None
    return (
        f"site '{site['name']}' of the {program} ({type(site['fn']).__name__}): "
        f"{nans} NaN and {infs} infinite of {log_prob.numel()} log_prob entries"
    )
