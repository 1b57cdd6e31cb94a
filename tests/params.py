"""Parameters of tests."""

import pytest


def in_turn(slow=(), /, **axes):
    """
    Give a test every value of every axis, and not their product.

    The longest axis comes once. The others count beside it, as the digits of a number do. The cases
    with the numbers ``slow`` are marked so.
    """
    count, columns, pace = max(map(len, axes.values())), [], 1
    for values in map(list, axes.values()):
        own = 1 if len(values) == count else pace
        columns.append([values[i // own % len(values)] for i in range(count)])
        pace *= 1 if len(values) == count else len(values)
    cases = [
        pytest.param(*values, marks=pytest.mark.slow if i in slow else ())
        for i, values in enumerate(zip(*columns, strict=True))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)
