"""Checks of lists of token ids in Rust: the answers of Python, and no exception left behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo._core import all_ints, first_outside

VALUES = st.one_of(
    st.integers(-5, 40),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**200, -(2**63) - 1, True, None, 3.0, "1", np.int64(2)]),
)


@given(st.lists(VALUES, max_size=8))
def test_nothing_but_ints_are_ints(values: list[object]) -> None:
    assert all_ints(values) == all(type(value) is int for value in values)


@given(st.lists(VALUES, max_size=8), st.sampled_from([0, 1, 30, 2**32 - 1]))
def test_the_first_that_is_no_token_is_found(values: list[object], vocab_size: int) -> None:
    outside = [i for i, value in enumerate(values) if type(value) is not int or not 0 <= value < vocab_size]
    assert first_outside(values, vocab_size) == (outside[0] if outside else None)  # type: ignore[arg-type]


def test_other_things_than_lists_are_refused() -> None:
    with pytest.raises(TypeError):
        all_ints((1, 2))  # type: ignore[arg-type]
