"""Masks and the entries of a value that they leave in its density."""

import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae.programs.sites import counted_values, hides_masks, with_mask

EACH = torch.tensor([[True, False], [True, True], [False, False]])
ROWS = torch.tensor([True, True, False])
BASE = dist.Normal(torch.zeros(3, 2), torch.tensor([1.0, 2.0]))


def site(fn, mask=None):
    return {"fn": fn, "mask": mask, "value": fn.sample()}


@pytest.mark.parametrize(
    ("fn", "mask", "expected"),
    [
        (BASE.to_event(1), None, None),
        (BASE.to_event(1), True, None),
        (BASE.mask(EACH).to_event(1), None, EACH),
        (BASE.to_event(1).mask(ROWS), None, ROWS[:, None]),
        (BASE.mask(EACH).to_event(1), torch.tensor([False, True, True]), EACH & EACH[[2, 1, 1]]),
        (BASE.mask(EACH).to_event(2), None, EACH),
        (BASE.mask(False).to_event(1), None, torch.zeros(3, 2, dtype=torch.bool)),
        (BASE.mask(EACH).to_event(1).expand([4, 3]), None, EACH),
    ],
)
def test_an_entry_counts_where_every_mask_leaves_it(fn, mask, expected):
    result = counted_values(site(fn, mask))
    if expected is None:
        assert result is None
    else:
        assert torch.equal(*torch.broadcast_tensors(result, expected.expand(3, 2)))


@pytest.mark.parametrize("events", [0, 1, 2])
def test_the_density_under_another_mask_is_the_sum_of_the_entries_that_it_leaves(events):
    masked = BASE.mask(~EACH).to_event(events).mask(torch.tensor(False))
    value, dims = BASE.sample(), tuple(range(2 - events, 2))
    counted, result = BASE.log_prob(value) * EACH, with_mask(masked, EACH).log_prob(value)
    assert torch.allclose(result, counted.sum(dims) if events else counted)
    total = with_mask(masked, None).log_prob(value).sum()
    assert torch.allclose(total, BASE.log_prob(value).sum())


def test_an_event_with_one_density_has_one_mask():
    fn = dist.MultivariateNormal(torch.zeros(3, 2), torch.eye(2))
    assert with_mask(fn, EACH) is None
    result = with_mask(fn, ROWS[:, None].expand(3, 2))
    assert torch.equal(result.log_prob(torch.zeros(3, 2)) != 0, ROWS)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (BASE.mask(EACH).to_event(1).mask(ROWS), False),
        (dist.TransformedDistribution(BASE, [dist.transforms.ExpTransform()]).mask(EACH), False),
        (dist.TransformedDistribution(BASE.mask(EACH), [dist.transforms.ExpTransform()]), True),
        (dist.MixtureSameFamily(dist.Categorical(torch.ones(3, 2)), BASE.mask(EACH)), True),
        (dist.MixtureSameFamily(dist.Categorical(torch.ones(3, 2)), BASE).mask(ROWS), False),
    ],
)
def test_masks_of_a_part_of_the_density_are_hidden(fn, expected):
    assert hides_masks(fn) is expected
