from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain.backoff import backoff_s

FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("attempt", "longest"),
    [(0, 2), (1, 4), (2, 8), (3, 16), (4, 32), (5, 64), (6, 128), (7, 128), (1000, 128)],
)
def test_it_doubles_with_each_attempt_up_to_the_sixth(attempt: int, longest: float) -> None:
    assert backoff_s(attempt, 1.0) == longest
    assert backoff_s(attempt, 0.0) == longest / 2


@given(st.integers(0, 10**6), FRACTIONS)
def test_half_is_fixed_and_half_is_jitter(attempt: int, fraction: float) -> None:
    longest = min(2 * 2 ** min(attempt, 6), 300)
    assert longest / 2 <= backoff_s(attempt, fraction) <= longest
    assert backoff_s(attempt, fraction) == pytest.approx(longest / 2 + fraction * longest / 2)


@given(st.integers(0, 100), FRACTIONS, FRACTIONS)
def test_more_chance_never_means_a_shorter_wait(attempt: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert backoff_s(attempt, low) <= backoff_s(attempt, high)


@given(st.integers(-10, 100), st.floats(allow_nan=False))
def test_a_fraction_out_of_range_cannot_break_the_bounds(attempt: int, fraction: float) -> None:
    assert 1.0 <= backoff_s(attempt, fraction) <= 300.0
