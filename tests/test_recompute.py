"""What is saved and what is computed again, by a count of bytes and operations."""

from __future__ import annotations

import pytest

from fuser.autodiff.recompute import (
    BYTES_PER_OPERATION,
    Sizes,
    choose_saved,
    cost_of_application,
    estimate_instructions,
)
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder


@pytest.mark.parametrize(
    ("text", "operations"),
    [
        ("template <typename T> T f(T x) { return x; }", 0),
        ("template <typename T> T f(T x) { return x * x + T(1); }", 2),
        ("template <typename T> T f(T x) { return x / T(2); }", 10),
        ("template <typename T> T f(T x) { return std::exp(-x); }", 11),
        ("template <typename T> T f(T x) { return expf(x) + sqrtf (x); }", 21),
        ("template <typename T> T f(T x) { return erf(x) + erff(x); }", 51),
        ("template <typename T> T f(T x) { return x; /* exp(x) / 2 */ } // 1 / x", 0),
        (
            "template <typename T> T root(T x) { return sqrt(x); } template <typename T> T f(T x) { return root(x); }",
            10,
        ),
    ],
)
def test_operations_are_counted(text: str, operations: int) -> None:
    assert estimate_instructions(text) == operations


def chain(*texts: str) -> FusionGroup:
    """Two inputs, and functors of the last value and the second input in turn."""
    builder = GroupBuilder()
    x, y = builder.add_input("x"), builder.add_input("y")
    for text in texts:
        (x,) = builder.apply(Function(parse_functor(text)), [x, y])
    return builder.build([x])


ADD = "template <typename T> T add(T x, T y) { return x + y; }"
POW = "template <typename T> T power(T x, T y) { return pow(x, y); }"


def test_the_price_of_operations_decides() -> None:
    group = chain(ADD, POW, ADD)
    sizes = Sizes((4, 4, 4, 4, 4), 1)
    # The last functor reads the power, value 3, and y.
    read = {1, 3}
    assert choose_saved(group, read, sizes, price=0) == frozenset()
    # 63 operations take as long as 7.9 bytes; 8 are written and read, but x is not read any more.
    assert cost_of_application(group.applications[1], sizes) == 63 * BYTES_PER_OPERATION
    assert choose_saved(group, read, sizes, price=1) == {3}
    assert choose_saved(group, read, Sizes((16,) * 5, 1), price=1) == frozenset()
    assert choose_saved(group, read, Sizes((16,) * 5, 1), price=4) == {3}


def test_few_bytes_are_saved_at_any_price() -> None:
    group = chain(ADD, ADD)
    # A sum that is smaller than what it is made of (as where an input is expanded) is worth to be written and read.
    assert choose_saved(group, {2}, Sizes((4, 4, 1, 4), 1), price=0) == {2}
    assert choose_saved(group, {0, 1}, Sizes((4, 4, 1, 4), 1), price=4) == frozenset()
