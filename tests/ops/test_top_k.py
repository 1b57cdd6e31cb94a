"""Slots against the sums that they stand for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyro_mcvae.ops.slots import budget_slots, top_k_slots

logits = st.lists(
    st.one_of(st.floats(-8, 8), st.just(-math.inf), st.just(0.0)), min_size=1, max_size=7
).filter(lambda values: any(v > -math.inf for v in values))


def log_q_of(values, batch=3):
    return torch.tensor(values).log_softmax(-1).expand(batch, -1)


@given(logits, st.integers(0, 8), st.integers(1, 3))
def test_weights_sum_to_one_and_no_slot_is_impossible(values, k, n):
    log_q = log_q_of(values)
    for slots in (top_k_slots(log_q, k, n), budget_slots(log_q, k + n)):
        torch.testing.assert_close(slots.weight.sum(0), torch.ones(3))
        assert (slots.weight >= 0).all()
        assert (log_q.gather(-1, slots.index.T) > -math.inf).all()


@given(logits, st.integers(0, 8), st.integers(1, 3))
def test_summed_slots_are_the_most_probable_and_draws_are_others(values, k, n):
    log_q = log_q_of(values)
    slots = top_k_slots(log_q, k, n)
    k = min(k, len(values))
    assert slots.sampled.sum(0).eq(0 if k == len(values) else n).all()
    top = log_q[0].sort(descending=True).values[:k].exp()
    torch.testing.assert_close(slots.weight[:k, 0], top)
    summed = {
        int(i)
        for i, s, w in zip(*(t[:, 0] for t in slots[::2]), slots[1][:, 0], strict=True)
        if not s and w > 0
    }
    drawn = {
        int(i)
        for i, s, w in zip(*(t[:, 0] for t in slots[::2]), slots[1][:, 0], strict=True)
        if s and w > 0
    }
    assert not summed & drawn


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_mean_of_the_estimate_is_the_sum(k):
    log_q = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    f = torch.tensor([1.0, -2.0, 4.0, 30.0])
    slots = top_k_slots(log_q.expand(40_000, 4), k, 2)
    result = (slots.weight * f[slots.index]).sum(0)
    assert abs(result.mean() - (log_q.exp() * f).sum()) < 5 * result.std() / 200 + 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
def test_proposition_1(k):
    log_q = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    g = torch.tensor([[1.0, -2.0], [-2.0, 0.5], [4.0, 1.0], [3.0, -6.0]])
    q = log_q.exp()
    variance = (q @ g**2 - (q @ g) ** 2).sum()
    # With one draw the estimate's variance is q(rest)^2 times that within the rest.
    inside = q[k:] / q[k:].sum()
    exact = q[k:].sum() ** 2 * (inside @ g[k:] ** 2 - (inside @ g[k:]) ** 2).sum()
    assert exact <= q[k:].sum() * variance
    slots = top_k_slots(log_q.expand(100_000, 4), k, 1)
    result = (slots.weight.unsqueeze(-1) * g[slots.index]).sum(0).var(0).sum()
    assert math.isclose(result, exact, rel_tol=0.05, abs_tol=1e-12)


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=8), st.integers(1, 8))
def test_proposition_2_divides_the_budget(values, budget):
    log_q = log_q_of(values, 1)
    slots = budget_slots(log_q, budget)
    q = log_q[0].exp().sort(descending=True).values
    if budget >= len(values):
        assert not slots.sampled.any()
        return
    criterion = [q[k:].sum() / (budget - k) for k in range(budget)]
    chosen = int((~slots.sampled).sum())
    assert criterion[chosen] <= min(criterion) * (1 + 1e-9)
    # Never worse than either extreme.
    assert criterion[chosen] <= criterion[0] * (1 + 1e-9)


def test_the_budget_is_divided_for_each_datum():
    log_q = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]).log()
    assert (~budget_slots(log_q, 2).sampled).sum(0).tolist() == [1, 0]
    assert (~budget_slots(log_q, 2, min_samples=2).sampled).sum(0).tolist() == [0, 0]


def test_mass_smaller_than_the_smallest_float_is_still_drawn_from():
    log_q = torch.tensor([0.0, -200.0, -201.0], dtype=torch.float32)
    slots = top_k_slots(log_q.expand(1000, 3), 1, 1)
    assert slots.weight[1].max() == 0
    assert (slots.index[1] == 0).all()  # no weight, so the most probable category again


def test_nothing_drawn_while_mass_is_left():
    with pytest.raises(ValueError, match=r"num_samples=0 leaves out.* 2 of 3 .*num_samples >= 1"):
        top_k_slots(torch.zeros(3).log_softmax(-1), 1, 0)
    with pytest.raises(ValueError, match="budget must be at least 2, got 1"):
        budget_slots(torch.zeros(3).log_softmax(-1), 1, min_samples=2)
