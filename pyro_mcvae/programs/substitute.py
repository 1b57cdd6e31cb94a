"""Replace the observed data in the arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pyro_mcvae.ops.compat import tree_leaves, tree_map_only
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Site

_DREAM_ARGS = "pass dream_args, a function that computes the guide's arguments from the dream"


def substitute(
    programs: Programs,
    sites: Mapping[str, Site],
    values: Mapping[str, Tensor],
    subsamples: Mapping[str, Tensor],
    remedy: str = _DREAM_ARGS,
) -> Programs:
    """
    Return the same call with other data in its arguments.

    An argument has the data of a site if it is the observed tensor, or shares its memory (rows,
    columns, another shape). It also has them if the observed tensor is a copy of it, or of the rows
    that the site's plates have drawn from it. Arguments are copied, never written to.

    :param sites: the model's observed sites, by name.
    :param values: the new value for each of them.
    :param subsamples: the indices of each plate.
    :param remedy: the remedy in errors, if it is not clear which arguments have the data.
    :raises ValueError: naming a site whose data are in no argument or in more than one, or that
        observes fewer values than the model draws.
    """
    call = (programs.args, programs.kwargs)
    tensors = (t for t in tree_leaves(call) if isinstance(t, Tensor) and _is_strided(t))
    leaves = list({id(t): t for t in tensors}.values())
    shared: dict[str, Tensor] = {}
    new: dict[int, Tensor] = {}
    _check_distinct(sites, values, remedy)
    for name, value in values.items():
        old = torch.as_tensor(sites[name]["value"])
        if old.numel() != value.numel():
            raise ValueError(
                f"site '{name}' observes data of shape {tuple(old.shape)}, which its plates "
                f"broadcast, but the model draws a value of shape {tuple(value.shape)} there: pass "
                f"data in the shape of the plates (.expand(...).clone()), or {remedy}"
            )
        if any(_overlap(old, leaf) for leaf in leaves):
            shared[name] = value
            continue
        leaf, selection = _copied_from(name, sites[name], leaves, subsamples, remedy)
        new[id(leaf)] = _replaced(new.get(id(leaf), leaf.detach()), selection, value)
    new.update(_rewritten(leaves, sites, shared, remedy))
    args, kwargs = tree_map_only(Tensor, lambda t: new.get(id(t), t), call)
    return replace(programs, args=args, kwargs=kwargs)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    return start, start + 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _memory(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not _is_strided(a) or _memory(a) != _memory(b):
        return False
    (begin, end), (other_begin, other_end) = _span(a), _span(b)
    return begin < other_end and other_begin < end


def _rewritten(
    leaves: list[Tensor], sites: Mapping[str, Site], values: Mapping[str, Tensor], remedy: str
) -> dict[int, Tensor]:
    """Copy the leaves that share memory with observed tensors, with the new values there."""
    copies: dict[int, Tensor] = {}
    observed = {name: sites[name]["value"] for name in values}
    for memory in {_memory(old) for old in observed.values()}:
        inside = [t for t in (*leaves, *observed.values()) if _memory(t) == memory]
        begin = min(_span(t)[0] for t in inside)
        end = max(_span(t)[1] for t in inside)
        # Copy the memory once, so that the copies are views of one tensor too.
        flat = inside[0].detach().as_strided((end - begin,), (1,), begin).clone()

        def view(like: Tensor, flat: Tensor = flat, begin: int = begin) -> Tensor:
            return flat.as_strided(like.shape, like.stride(), like.storage_offset() - begin)

        for name, old in observed.items():
            if _memory(old) == memory:
                _check_not_expanded(name, old, remedy)
                view(old).copy_(values[name].reshape(old.shape))
        copies |= {id(t): view(t) for t in inside}
    return copies


# Indices along some dims of a tensor; empty for the whole tensor.
Selection = list[tuple[int, Tensor]]


def _copied_from(
    name: str, site: Site, leaves: list[Tensor], subsamples: Mapping[str, Tensor], remedy: str
) -> tuple[Tensor, Selection]:
    """Return the argument that an observed tensor was copied from, and the copied part."""
    sources = []
    for leaf in leaves:
        for selection in _selections(leaf, site, subsamples):
            if _same(_select(leaf, selection), site["value"]):
                sources.append((leaf, selection))
                break
    if len(sources) != 1:
        where = f"may come from {len(sources)} of them" if sources else "are in none of them"
        raise ValueError(
            f"the guide must receive simulated data for site '{name}', whose data are "
            f"searched in the arguments of model and guide, but {where}: pass the observed tensor "
            f"itself to model and guide as an argument, or {remedy}"
        )
    return sources[0]


def _selections(leaf: Tensor, site: Site, subsamples: Mapping[str, Tensor]) -> Iterator[Selection]:
    """Yield the selections of a leaf that an observed tensor may be copied from."""
    yield []
    frames = [f for f in site["cond_indep_stack"] if f.name in subsamples and f.dim is not None]
    frames.sort(key=lambda f: f.dim)
    axes = [[d for d in range(leaf.dim()) if leaf.shape[d] == f.full_size] for f in frames]
    for dims in itertools.product(*axes) if frames else ():
        if list(dims) == sorted(set(dims)):
            pairs = zip(dims, frames, strict=True)
            yield [(d, subsamples[f.name].to(leaf.device)) for d, f in pairs]


def _select(leaf: Tensor, selection: Selection) -> Tensor:
    for d, index in selection:
        leaf = leaf.index_select(d, index)
    return leaf


def _replaced(leaf: Tensor, selection: Selection, value: Tensor) -> Tensor:
    """Copy a leaf with other values in a part of it."""
    if not selection:
        return value.to(leaf.dtype).reshape(leaf.shape)
    (d, index), *inner_selection = selection
    return leaf.index_copy(d, index, _replaced(leaf.index_select(d, index), inner_selection, value))


def _same(part: Tensor, value: Tensor) -> bool:
    value = torch.as_tensor(value)
    if part.numel() != value.numel():
        return False
    part, value = part.to(value).reshape(-1), value.reshape(-1)
    equal = part == value
    if value.is_floating_point():
        equal = equal | (part.isnan() & value.isnan())
    return bool(equal.all())


def _check_distinct(sites: Mapping[str, Site], values: Mapping[str, Tensor], remedy: str) -> None:
    seen: dict[object, str] = {}
    for name in values:
        old = torch.as_tensor(sites[name]["value"])
        place = old.data_ptr(), old.shape, old.stride(), old.dtype
        if place in seen and old.numel():
            raise ValueError(
                f"sites '{seen[place]}' and '{name}' observe the same tensor, for which the model "
                f"draws two values: pass each its own tensor, or {remedy}"
            )
        seen[place] = name


def _check_not_expanded(name: str, old: Tensor, remedy: str) -> None:
    if any(step == 0 and size > 1 for size, step in zip(old.shape, old.stride(), strict=True)):
        raise ValueError(
            f"site '{name}' observes an expanded tensor of shape {tuple(old.shape)}, whose entries "
            f"share memory, but the model draws a value for each: pass a tensor that is not "
            f"expanded (.contiguous()), or {remedy}"
        )
