"""The sums behind limits: rates, what an answer says, how long a waiter waits."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain.classify import retry_after_s
from relata_celery.domain.errors import LimitTimeout, RateLimited, TransientError
from relata_celery.domain.limits import (
    LONGEST_PAUSE_BEHIND_S,
    MAX_CONCURRENCY,
    Answer,
    Bucket,
    Limit,
    LimitSpec,
    Rate,
    Slot,
    Waiter,
    answer,
    as_rate,
    pause_s,
)

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def limit(**fields: object) -> Limit:
    defaults: dict[str, object] = {
        "name": "ai", "concurrency": 1, "rate": None, "by_hand": False,
        "slots": (), "waiters": (), "bucket": None, "now": NOW,
    }  # fmt: skip
    return Limit(**{**defaults, **fields})  # type: ignore[arg-type]


def slot(slot_id: str, weight: int = 1) -> Slot:
    return Slot(slot_id, "w", None, weight, NOW, NOW + timedelta(seconds=60))


def waiter(waiter_id: str) -> Waiter:
    return Waiter(waiter_id, NOW + timedelta(seconds=5))


@pytest.mark.parametrize(
    ("text", "count", "period_s"),
    [("60/m", 60, 60), ("5/s", 5, 1), (" 1.5 / h ", 1.5, 3600), ("100/d", 100, 86400)],
)
def test_a_rate_is_read_from_text(text: str, count: float, period_s: float) -> None:
    rate = Rate.parse(text)
    assert (rate.count, rate.period_s, rate.burst) == (count, period_s, count)
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize("text", ["", "60", "0/m", "-1/s", "60/w", "m/60", "1/2/s", "inf/s"])
def test_a_text_that_is_no_rate_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match='is not a rate such as "60/m"'):
        Rate.parse(text)


def test_a_rate_below_one_still_lets_one_start_at_once() -> None:
    assert Rate.parse("0.5/h").burst == 1
    with pytest.raises(ValueError, match="burst"):
        Rate.parse("5/s", burst=0.5)


@pytest.mark.parametrize("value", [5, 2.5, True, ["60/m"]])
def test_a_rate_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        as_rate(value)


@pytest.mark.parametrize("concurrency", [-1, MAX_CONCURRENCY + 1, True, 1.5, "4"])
def test_a_concurrency_out_of_range_is_refused(concurrency: object) -> None:
    with pytest.raises(ValueError, match="concurrency is"):
        LimitSpec(concurrency)  # type: ignore[arg-type]


rates = st.builds(
    Rate,
    count=st.floats(0.1, 1000),
    period_s=st.sampled_from([1.0, 60.0, 3600.0, 86400.0]),
    burst=st.floats(1, 1000),
)


@given(rates, st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 50)), max_size=40))
def test_in_no_span_of_time_start_more_than_the_burst_and_what_was_filled_in_meanwhile(
    rate: Rate, tries: list[tuple[int, int]]
) -> None:
    bucket: Bucket | None = None
    now, starts = NOW, []
    for wait_ms, wanted in tries:
        now += timedelta(milliseconds=wait_ms)
        level = rate.level(bucket, now)
        granted = min(wanted, int(level))
        if granted:
            bucket = Bucket(level - granted, now)
            starts.append((now, granted))
    for first, (begin, _) in enumerate(starts):
        started = 0
        for end, number in starts[first:]:
            started += number
            filled = (end - begin).total_seconds() * rate.count / rate.period_s
            assert started <= rate.burst + filled + 1e-6


@given(rates, st.floats(-1000, 1000), st.floats(0, 100_000))
def test_a_bucket_never_holds_more_than_its_burst_and_the_wait_is_enough(
    rate: Rate, level: float, elapsed_s: float
) -> None:
    bucket = Bucket(min(level, rate.burst), NOW)
    later = NOW + timedelta(seconds=elapsed_s)
    assert bucket.level - 1e-6 <= rate.level(bucket, later) <= rate.burst
    wait_s = rate.wait_s(rate.level(bucket, later), 1.0)
    if wait_s < 1e8:
        assert rate.level(bucket, later + timedelta(seconds=wait_s + 0.001)) >= 1.0 - 1e-6


def test_a_clock_that_steps_back_takes_no_permits_away() -> None:
    rate = Rate.parse("10/s")
    assert rate.level(Bucket(4.0, NOW), NOW - timedelta(hours=1)) == 4.0


def test_permits_are_not_counted_as_slots_in_use() -> None:
    assert limit(slots=(slot("a"), slot("b", weight=0))).in_use == 1


def test_an_answer_names_the_slots_that_the_asker_holds_and_who_goes_first() -> None:
    seen = limit(slots=(slot("other"), slot("mine")), waiters=(waiter("x"), waiter("y")))
    assert answer(seen, ["mine", "refused"], None) == Answer(("mine",), 2, None, seen)
    assert answer(seen, ["y"], "y").ahead == 1
    assert answer(seen, ["x"], "x").ahead == 0


def test_an_answer_says_when_the_rate_will_allow_it_also_for_those_behind() -> None:
    rated = limit(
        concurrency=None, rate=Rate.parse("2/s"), bucket=Bucket(0.5, NOW), waiters=(waiter("x"), waiter("y"))
    )
    assert answer(rated, ["x"], "x").wait_s == pytest.approx(0.25)
    assert answer(rated, ["y"], "y").wait_s == pytest.approx(0.75)


def test_an_answer_names_no_time_when_a_slot_is_what_lacks() -> None:
    assert answer(limit(rate=Rate.parse("2/s"), slots=(slot("other"),)), ["mine"], None).wait_s is None


@given(
    st.integers(0, 10_000), st.integers(0, 500), st.none() | st.floats(0, 1e6), st.floats(0, 1, exclude_max=True)
)
def test_a_waiter_never_pauses_for_long_and_never_spins(
    tries: int, ahead: int, wait_s: float | None, random: float
) -> None:
    pause = pause_s(tries, Answer((), ahead, wait_s, limit()), random)
    assert 0.002 <= pause <= LONGEST_PAUSE_BEHIND_S * 1.25


def test_a_waiter_of_a_rate_asks_again_when_its_permit_is_there() -> None:
    assert pause_s(0, Answer((), 0, 0.05, limit()), 0.5) == pytest.approx(0.052)


def test_a_job_that_waited_in_vain_is_put_back_without_spending_an_attempt() -> None:
    assert issubclass(LimitTimeout, (RateLimited, TransientError))
    assert retry_after_s(LimitTimeout("no slot"), 0.0) == 5.0
