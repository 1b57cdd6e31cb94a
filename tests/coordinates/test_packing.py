"""Packing is a bijection, and keeps each datum's numbers together."""

import math

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from pyro_mcvae.coordinates.packing import Packing, SiteShape

DTYPES = [torch.float32, torch.float64, torch.int64]


@st.composite
def packings(draw):
    """Sites and dims of one to three blocks, each with plates of its own."""
    nesting = draw(st.integers(0, 3))
    dims, sites = [], {}
    for b in range(draw(st.integers(1, 3))):
        plates = {d: draw(st.integers(1, 3)) for d in range(-nesting, 0)}
        own = tuple(sorted(draw(st.sets(st.sampled_from(sorted(plates)))))) if plates else ()
        dims.append(own)
        for s in range(draw(st.integers(1, 3))):
            # A site lies in all of its block's plates and in any of the others.
            batch = tuple(
                size if d in own or draw(st.booleans()) else 1 for d, size in plates.items()
            )
            event = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
            sites[f"z{b}{s}"] = SiteShape(b, batch, event, draw(st.sampled_from(DTYPES)))
    return sites, dims


def values_of(sites, leading):
    """All numbers different, so that no two of them can be exchanged."""
    values, start = {}, 0
    for name, site in sites.items():
        shape = (leading, *site.batch_shape, *site.event_shape)
        count = math.prod(shape)
        values[name] = torch.arange(start, start + count).reshape(shape).to(site.dtype)
        start += count
    return values


def plate_sizes(sites, block, dims):
    site = next(s for s in sites.values() if s.block == block)
    return tuple(site.batch_shape[d] for d in dims)


@given(packings(), st.integers(1, 3))
@settings(max_examples=150)
def test_round_trip_by_site(described, leading):
    sites, dims = described
    packing = Packing(sites, dims)
    values = values_of(sites, leading)
    back = packing.unpack(packing.pack(values))
    assert set(back) == set(sites)
    for name, value in values.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert torch.equal(back[name], value)


@given(packings(), st.integers(1, 3))
@settings(max_examples=150)
def test_shape_and_content(described, leading):
    sites, dims = described
    packed = Packing(sites, dims).pack(values_of(sites, leading))
    widths = [
        sum(
            math.prod(s.batch_shape) * math.prod(s.event_shape)
            for s in sites.values()
            if s.block == b
        )
        // math.prod(plate_sizes(sites, b, own))
        for b, own in enumerate(dims)
    ]
    sizes = [plate_sizes(sites, b, own) for b, own in enumerate(dims)]
    if len(dims) == 1:
        assert packed.shape == (leading, *sizes[0], widths[0])
        real = packed.flatten()
    else:
        assert packed.shape == (leading, sum(map(math.prod, sizes)), max(widths))
        parts = packed.split([math.prod(s) for s in sizes], dim=1)
        real = torch.cat([p[..., :w].flatten() for p, w in zip(parts, widths, strict=True)])
        padding = [p[..., w:].flatten() for p, w in zip(parts, widths, strict=True)]
        assert not torch.cat(padding).any()
    count = sum(
        leading * math.prod(s.batch_shape) * math.prod(s.event_shape) for s in sites.values()
    )
    assert torch.equal(real.sort().values.long(), torch.arange(count))


def test_empty_events_take_no_place():
    # Those of dist.Unit; their leading size cannot be derived from their number of entries.
    kind = torch.float64
    sites = {
        "u": SiteShape(0, (3,), (0,), kind),
        "a": SiteShape(0, (3,), (2,), kind),
        "v": SiteShape(1, (3,), (0,), kind),
    }
    values = values_of(sites, 2)
    packing = Packing(sites, [(-1,), ()])
    for result in (values, {n: v[:1].squeeze(0) for n, v in values.items()}):
        packed = packing.pack(result)
        leading = 2 if result is values else 1
        assert packed.shape == (leading, 4, 2)
        back = packing.unpack(packed)
        for name, value in result.items():
            assert torch.equal(back[name], value.reshape(back[name].shape))
            assert back[name].shape == (leading, *values[name].shape[1:])
