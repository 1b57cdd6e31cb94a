"""Run a program on one particle's values under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from enum import Enum
from inspect import getattr_static
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import is_validation_enabled
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_mcvae.ops.compat import is_mapped, mask_of
from pyro_mcvae.ops.vmap_dims import VmapDims
from pyro_mcvae.programs.messengers import LeadingDims, ParticlePlate
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.sites import changed_draw, check_support, site_in_full_precision
from pyro_mcvae.programs.types import Distribution, LeadingDimsError, Message

# Rebatch the distributions that a program made for one particle.

# Their densities index by values, which is impossible under vmap. They are rebatched like
# Categorical.
_BY_LOGITS = dist.Multinomial, dist.OneHotCategorical
# The depth to which the attributes of a distribution are searched for tensors.
_DEPTH = 6


def rebatched(fn: Distribution, dims: VmapDims, depth: int) -> Distribution:
    """
    Return the distribution of all particles.

    :param fn: a distribution made under vmap.
    :param depth: the number of batch dims to the right of the vmap dim.
    :returns: ``fn`` itself if none of its tensors is under vmap.
    :raises LeadingDimsError: for a distribution that cannot be rebuilt from its parameters.
    """
    if not any(is_mapped(t) for t in _tensors(fn, _DEPTH)):
        return fn
    if type(fn) in _BY_LOGITS:
        count = {"total_count": fn.total_count} if type(fn) is dist.Multinomial else {}
        return type(fn)(**count, logits=dims.rebatch(fn.logits, depth + 1), validate_args=False)
    if isinstance(fn, torch.distributions.Independent):
        events = fn.reinterpreted_batch_ndims
        plain = dist.Independent(rebatched(fn.base_dist, dims, depth + events), events)
        return plain if has_methods_of(fn, torch.distributions.Independent) else _like(fn, plain)
    if isinstance(fn, ExpandedDistribution):
        base = rebatched(fn.base_dist, dims, depth)
        lead = base.batch_shape[: len(base.batch_shape) - depth]
        pad = (1,) * (depth - len(fn.batch_shape))
        return base.expand((*lead, *pad, *fn.batch_shape))
    if isinstance(fn, MaskedDistribution):
        return rebatched(fn.base_dist, dims, depth).mask(_rebatch(mask_of(fn), dims, depth))
    if type(fn) is dist.Delta:
        value = dims.rebatch(fn.v, depth + fn.event_dim)
        return dist.Delta(value, _rebatch(fn.log_density, dims, depth), fn.event_dim)
    if type(fn) is dist.Unit:
        return dist.Unit(dims.rebatch(fn.log_factor, depth), has_rsample=fn.has_rsample)
    if isinstance(fn, torch.distributions.MixtureSameFamily):
        weights = rebatched(fn.mixture_distribution, dims, depth)
        return type(fn)(weights, rebatched(fn.component_distribution, dims, depth + 1))
    own = [value for name, value in vars(fn).items() if name != "base_dist"]
    is_transformed = isinstance(fn, torch.distributions.TransformedDistribution)
    if is_transformed and not any(map(is_mapped, _tensors(own, _DEPTH))):
        events = len(fn.event_shape) - len(fn.base_dist.event_shape)
        base = rebatched(fn.base_dist, dims, depth + events)
        plain = dist.TransformedDistribution(base, fn.transforms)
        is_plain = type(fn) is torch.distributions.TransformedDistribution
        return plain if is_plain else _like(fn, plain)
    return _by_parameters(fn, dims, depth)


def _like(fn: Distribution, plain: Distribution) -> Distribution:
    """Return a copy of a distribution, whose class may have a density of its own, with the base
    distribution and the shapes of another one."""
    new = copy(fn)
    vars(new).update(vars(plain))
    return new


def _by_parameters(fn: Distribution, dims: VmapDims, depth: int) -> Distribution:
    """Rebuild a distribution from rebatched parameters, whose event dims the constraints give."""
    if not has_methods_of(fn, type(fn)):
        raise _no_parameters(fn, "a method is an attribute of the object")
    given = [name for name in fn.arg_constraints if _is_given(fn, name)]
    parameters = {
        name: _rebatch(getattr(fn, name), dims, depth + fn.arg_constraints[name].event_dim)
        for name in given
        if name != "probs" or "logits" not in given
    }
    try:
        return type(fn)(**parameters, validate_args=False)
    except TypeError as error:
        raise _no_parameters(fn, error) from error


def _is_given(fn: Distribution, name: str) -> bool:
    """
    Return whether a distribution has a parameter: as an attribute, or in another distribution.

    The concentrations of a Beta are properties. Parameters that a distribution computes from its
    others, such as the probs from the logits, are lazy properties.
    """
    return name in vars(fn) or type(getattr_static(type(fn), name, None)) is property


def _no_parameters(fn: Distribution, why: object) -> LeadingDimsError:
    kind = type(fn).__name__
    return LeadingDimsError(
        f"a {kind} cannot be rebuilt from its parameters, as is needed for all particles: {why}",
        reason=f"{kind} is not supported under vmap",
    )


def _rebatch(value: Any, dims: VmapDims, depth: int) -> Any:
    return dims.rebatch(value, depth) if isinstance(value, Tensor) else value


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """Yield the tensors of a distribution, without the parameters of its networks."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth)
    elif isinstance(value, functools.partial):
        yield from _tensors([*value.args, *value.keywords.values()], depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for part in vars(value).values():
            yield from _tensors(part, depth - 1)


# Programs that run once for all particles under ``vmap``, so that each call has one particle.


class Mode(Enum):
    """How several particles run; the value is used in messages."""

    BATCHED = "in one batch, in a leading dim"
    MAPPED = "in one batch, the model under vmap"
    BOTH_MAPPED = "in one batch, model and guide under vmap"
    LOOPED = "one by one"


def particle_plates(
    mode: Mode,
    count: int,
    dim: int,
    shared: tuple[frozenset[str], frozenset[str]],
    state_dim: int | None = None,
) -> LeadingDims:
    """
    Return new particle plates for the guide and for the model.

    :param shared: for guide and model, the sites that all particles share.
    :param state_dim: as in :class:`~pyro_mcvae.programs.messengers.LeadingDims`.
    """
    guide = MappedPlate if mode is Mode.BOTH_MAPPED else ParticlePlate
    model = ParticlePlate if mode is Mode.BATCHED else MappedPlate
    return LeadingDims(guide(count, dim, shared[0]), model(count, dim, shared[1]), state_dim)


class MappedPlate(ParticlePlate):
    """
    The particles' plate around a program that runs under ``vmap``.

    Outer handlers receive sites with the leading dims, as from a program that broadcasts. The
    program receives its values under ``vmap``, so it may count dims from the left, multiply from
    the right, or convolve. Draws and densities are computed outside ``vmap``.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(size, dim, skip)
        self._dims = VmapDims()
        self._stack = ExitStack()
        self._hidden: dict[int, Message] = {}

    def __enter__(self) -> MappedPlate:
        self._stack.enter_context(self._dims.opened(self.size))
        # Validation reads values, which is impossible under vmap; supports are checked outside.
        self._validated = is_validation_enabled()
        self._stack.enter_context(pyro.validation_enabled(False))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not site_is_subsample(msg) and msg["name"] not in self.skip:
            self._rebatch_site(msg)
        elif msg["type"] == "param":
            # The initial value may be random, and then differs between particles.
            msg["args"] = tuple(map(self._of_first_particle, msg["args"]))
        # Handlers, draws and new parameters are outside vmap.
        self._dims.suspend()

    def _rebatch_site(self, msg: Message) -> None:
        site_in_full_precision(msg)
        self._hidden[id(msg)] = Message(**{name: msg.get(name) for name in _FIELDS})  # type: ignore[typeddict-item]
        depth, fn = -self.depth - 1, msg["fn"]
        msg["fn"] = rebatched(fn, self._dims, depth)
        msg["mask"] = _rebatch(msg["mask"], self._dims, depth)
        msg["scale"] = _rebatch(msg["scale"], self._dims, depth)
        msg["value"] = _rebatch(msg["value"], self._dims, depth + fn.event_dim)
        super()._process_message(msg)

    def _postprocess_message(self, msg: Message) -> None:
        self._dims.resume()
        hidden = self._hidden.pop(id(msg), None)
        if hidden is None:
            return
        if self._validated:
            check_support(msg)
        value, fn = msg["value"], hidden["fn"]
        if hidden["value"] is None:
            depth = -self.depth - 1 + fn.event_dim
            shape = _shape_of(value, fn.shape(), depth)
            hidden["value"] = changed_draw(lambda v: self._dims.unbatch(v, shape, depth), value)
        msg.update(hidden)

    def _of_first_particle(self, value: Any) -> Any:
        mapped = isinstance(value, Tensor) and is_mapped(value)
        return self._dims.rebatch(value, value.dim())[0] if mapped else value


_FIELDS = "fn", "value", "mask", "scale", "cond_indep_stack"


def _shape_of(value: Tensor, shape: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Return the shape of one particle's value, which may have more dims than requested."""
    value_shape = tuple(value.shape[max(0, value.dim() - depth) :])
    while len(value_shape) > len(shape) and value_shape[0] == 1:
        value_shape = value_shape[1:]
    return value_shape
