"""Long runs stay sane: NaN is reported, state stays finite, memory does not grow."""

import itertools

import pytest

from tests.training.runs import OBJECTIVES
from tests.training.soak import KINDS, soak


def check(result, slack):
    assert all(result[kind] for kind in KINDS)
    # As many at the end as in the beginning; a torch loop may have gradients at hand or not.
    assert max(result["tensors"][-3:]) <= max(result["tensors"][:3])
    assert max(result["memory"][-3:]) <= max(result["memory"][:3]) + slack


@pytest.mark.parametrize(
    ("name", "interface"),
    [  # one of each kind; the others are slow
        pytest.param(name, interface, marks=[] if i % 5 == 2 else pytest.mark.slow)
        for i, (name, interface) in enumerate(
            zip(OBJECTIVES, itertools.cycle(["svi", "module"]), strict=False)
        )
    ],
)
def test_disturbed_runs_go_on(name, interface):
    check(soak(name, interface, 30, every=5), slack=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("interface", ["svi", "module"])
def test_long_disturbed_runs_go_on(name, interface):
    check(soak(name, interface, 20_000, every=200), slack=20)
