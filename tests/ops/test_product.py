"""Slots of a product against the same slots of the listed product."""

import math

import pytest
import torch

from pyro_mcvae.ops.slots import SlotCount, product_slots, product_top_k, top_k_slots

VARIABLES, VALUES = 4, 3


def log_p_of(seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, VARIABLES, VALUES)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


def listed(log_p):
    """Log probabilities of all configurations, ``[batch, K ** D]``, in the order of digits."""
    joint = log_p[:, 0]
    for d in range(1, log_p.shape[1]):
        joint = (joint.unsqueeze(-1) + log_p[:, d].unsqueeze(-2)).flatten(1)
    return joint


def number(digits):
    power = torch.tensor([VALUES**d for d in reversed(range(VARIABLES))])
    return (digits * power).sum(-1)


@pytest.mark.parametrize("count", [1, 5, 40, 81])
def test_the_beam_finds_the_most_probable(count):
    for seed in range(5):
        log_p = log_p_of(seed)
        digits, log_q = product_top_k(log_p, count)
        joint = listed(log_p)
        torch.testing.assert_close(log_q, joint.topk(count).values)
        torch.testing.assert_close(joint.gather(-1, number(digits)), log_q)


@pytest.mark.parametrize("options", [(0, 1), (1, 2), (5, 3), (4, 4, 1)])
def test_draws_follow_the_law_of_the_complement(options):
    log_p = log_p_of(3, 1)
    slots = product_slots(log_p.expand(20_000, -1, -1), SlotCount(*options))
    joint = listed(log_p)[0].exp()
    torch.testing.assert_close(slots.weight.sum(0), torch.ones(20_000))
    index = number(slots.index)
    summed = index[:, 0][~slots.sampled[:, 0]]
    rest = joint.index_fill(0, summed, 0.0)
    last = index[-1]
    result = torch.bincount(last, minlength=len(rest)) / len(last)
    rest = rest / rest.sum()
    error = (rest * (1 - rest) / len(last)).sqrt()
    assert (abs(result - rest) < 5 * error + 1e-4).all()


def test_the_mean_is_that_of_the_listed_product():
    log_p = log_p_of(1, 1)
    f = torch.randn(81, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joint = listed(log_p)[0]
    many = log_p.expand(4_000, -1, -1)
    for slots in (product_slots(many, SlotCount(2, 2)), product_slots(many, SlotCount(3, 3, 1))):
        result = (slots.weight * f[number(slots.index)]).sum(0)
        error = result.std() / len(result) ** 0.5
        assert abs(result.mean() - (joint.exp() * f).sum()) < 5 * error
    same = top_k_slots(joint.expand(4_000, -1), 2, 2).weight
    torch.testing.assert_close(same[:, 0], product_slots(many, SlotCount(2, 2)).weight[:, 0])


def test_impossible_values_and_certain_variables():
    log_p = torch.tensor([[0.0, -math.inf], [0.5, 0.5]]).where(
        torch.tensor([[True, True], [False, False]]), torch.tensor(0.5).log()
    )
    slots = product_slots(log_p.expand(50, -1, -1), SlotCount(1, 2))
    assert (slots.index[..., 0] == 0).all()
    torch.testing.assert_close(slots.weight.sum(0), torch.ones(50))
    slots = product_slots(log_p.expand(50, -1, -1), SlotCount(3, 1))  # more than are possible
    assert (slots.index[..., 0] == 0).all()
    torch.testing.assert_close(slots.weight.sum(0), torch.ones(50))


def test_more_slots_than_configurations():
    log_p = log_p_of(0)
    for slots in (
        product_slots(log_p, SlotCount(100, 1)),
        product_slots(log_p, SlotCount(100, 100, 1)),
    ):
        torch.testing.assert_close(slots.weight.sum(0), torch.ones(2))


def test_thousands_of_variables():
    log_p = torch.randn(3, 1000, 2).log_softmax(-1)
    slots = product_slots(log_p, SlotCount(4, 2))
    assert slots.index.shape == (6, 3, 1000)
    assert slots.weight.isfinite().all()
