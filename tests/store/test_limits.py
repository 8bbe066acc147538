"""Limits on a real server: never too many, in order, nothing leaked, whatever a document holds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from relata_celery.domain.errors import LimitTimeout
from relata_celery.domain.limits import Answer, LimitSpec, Rate
from relata_celery.engine.limiting import new_slot_id, wait_for_slot
from relata_celery.store.client import Database
from relata_celery.store.limit_queries import COLLECTION
from relata_celery.store.limits import Limits
from tests.waiting import wait_until

LEASE_S = 60.0
TWO = LimitSpec(2)


@pytest.fixture
def limits(store: Database) -> Limits:
    return Limits(store)


def ask(limits: Limits, *want: str, spec: LimitSpec = TWO, name: str = "ai", **fields: Any) -> Answer:
    return limits.ask(name, spec, want=want, **{"owner": "w1", "lease_s": LEASE_S, **fields})


def wait(
    limits: Limits, slot_id: str | None = None, spec: LimitSpec = TWO, timeout_s: float = 30.0, **fields: Any
) -> Answer:
    defaults: dict[str, Any] = {
        "slot_id": slot_id or new_slot_id(), "owner": "w1", "job_id": None, "weight": 1, "lease_s": LEASE_S,
        "timeout_s": timeout_s, "check": lambda: None, "sleep": time.sleep, "random": lambda: 0.5,
    }  # fmt: skip
    return wait_for_slot(limits, "ai", spec, **{**defaults, **fields})


def edit(store: Database, **fields: Any) -> None:
    store.collection(COLLECTION).update_one({"_id": "ai"}, {"$set": fields}, upsert=True)


def expire(store: Database, field: str) -> None:
    """Have all leases in this list run out."""
    entry = {"$mergeObjects": ["$$entry", {"until": {"$subtract": ["$$NOW", 1]}}]}
    mapped = {"$map": {"input": f"${field}", "as": "entry", "in": entry}}
    store.collection(COLLECTION).update_one({"_id": "ai"}, [{"$set": {field: mapped}}])


def held(limits: Limits) -> list[str]:
    found = limits.get("ai")
    return [] if found is None else [slot.id for slot in found.slots]


def waiting(limits: Limits) -> list[str]:
    found = limits.get("ai")
    return [] if found is None else [waiter.id for waiter in found.waiters]


# ---------------------------------------------------------------- slots


def test_no_more_slots_are_granted_than_there_are(limits: Limits) -> None:
    assert len(ask(limits, "a", "b", "c").granted) == 2
    assert ask(limits, "d").granted == ()
    assert len(held(limits)) == 2


def test_slots_are_given_back_once_and_again(limits: Limits) -> None:
    ask(limits, "a", "b")
    limits.give_back("ai", ["a"])
    limits.give_back("ai", ["a", "unknown"])
    assert held(limits) == ["b"]
    limits.give_back("no such limit", ["a"])


def test_giving_back_and_asking_are_one_update(limits: Limits) -> None:
    ask(limits, "a", "b")
    assert ask(limits, "c", give_back=["a"]).granted == ("c",)
    assert sorted(held(limits)) == ["b", "c"]


def test_the_same_ask_again_finds_what_it_was_granted(limits: Limits) -> None:
    rate = LimitSpec(2, Rate.parse("2/d"))
    assert ask(limits, "a", spec=rate).granted == ("a",)
    assert ask(limits, "a", spec=rate).granted == ("a",)
    assert held(limits) == ["a"]
    assert ask(limits, "b", spec=rate).granted == ("b",), "the second ask was charged"


def test_a_slot_that_ran_out_is_taken_by_the_next(limits: Limits, store: Database) -> None:
    ask(limits, "a", "b")
    expire(store, "slots")
    assert ask(limits, "c", "d").granted == ("c", "d")
    assert sorted(held(limits)) == ["c", "d"]


def test_renewal_moves_the_end_by_the_servers_clock_and_nothing_else(limits: Limits) -> None:
    before = ask(limits, "a", "b", lease_s=5.0).limit.slots[0]
    assert limits.renew("ai", ["a"], owner="w1", lease_s=LEASE_S) == []
    found = limits.get("ai")
    assert found is not None
    after = {slot.id: slot for slot in found.slots}
    assert (after["a"].until - found.now).total_seconds() == pytest.approx(LEASE_S, abs=3)
    assert after["a"].since == before.since
    assert (after["b"].until - found.now).total_seconds() <= 5.0


def test_a_slot_that_was_lost_is_taken_again_by_who_renews_it_and_keeps_others_out(
    limits: Limits, store: Database
) -> None:
    ask(limits, "a", "b")
    expire(store, "slots")
    ask(limits, "c", "d")
    assert limits.renew("ai", ["a"], owner="w1", lease_s=LEASE_S, job_id="job") == ["a"]
    assert sorted(held(limits)) == ["a", "c", "d"]
    assert ask(limits, "e", give_back=["c"]).granted == ()


def test_a_lower_limit_takes_no_slot_away_and_lets_nobody_in(limits: Limits) -> None:
    ask(limits, "a", "b")
    limits.set("ai", 1)
    assert ask(limits, "c", give_back=["a"]).granted == ()
    assert held(limits) == ["b"]
    assert ask(limits, "c", give_back=["b"]).granted == ("c",)


def test_names_do_not_share_slots(limits: Limits) -> None:
    ask(limits, "a", "b")
    assert ask(limits, "a", "b", name="openai").granted == ("a", "b")
    assert [limit.name for limit in limits.list()] == ["ai", "openai"]


def test_names_and_owners_that_look_like_expressions_are_texts(limits: Limits) -> None:
    assert ask(limits, "$a", "$$NOW", owner="$owner", job_id="$job", waiter="$w").granted == ("$a", "$$NOW")
    assert ask(limits, "$b", waiter="$b").granted == ()
    assert waiting(limits) == ["$b"]
    assert limits.renew("ai", ["$a"], owner="$owner", lease_s=LEASE_S) == []


@pytest.mark.parametrize("concurrency", [1, 3])
def test_many_threads_never_hold_more_than_there_are(limits: Limits, concurrency: int) -> None:
    spec = LimitSpec(concurrency)
    running, most, done = 0, 0, 0
    lock, full = threading.Lock(), threading.Event()

    def one(_number: int) -> None:
        nonlocal running, most, done
        slot_id = new_slot_id()
        wait(limits, slot_id, spec, timeout_s=60.0)
        with lock:
            running += 1
            most = max(most, running)
            if running == concurrency:
                full.set()
        full.wait(30.0)  # until all slots were in use at once, however slow the machine is
        time.sleep(0.005)
        with lock:
            running -= 1
            done += 1
        limits.give_back("ai", [slot_id])

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(36)))
    assert (most, done) == (concurrency, 36)
    assert held(limits) == waiting(limits) == []


# ---------------------------------------------------------------- waiters


def test_who_came_earlier_goes_first(limits: Limits) -> None:
    ask(limits, "a", "b")
    for name in "xyz":
        assert ask(limits, name, waiter=name).granted == ()
    limits.give_back("ai", ["a"])
    assert ask(limits, "z", waiter="z").granted == ()
    assert ask(limits, "newcomer").granted == ()
    assert ask(limits, "x", waiter="x").granted == ("x",)
    limits.give_back("ai", ["b", "x"])
    assert ask(limits, "z", waiter="z").granted == ("z",)
    assert ask(limits, "y", waiter="y").granted == ("y",)
    assert waiting(limits) == []


def test_a_waiter_that_asks_no_more_holds_nobody_up(limits: Limits, store: Database) -> None:
    ask(limits, "a", "b")
    ask(limits, "dead", waiter="dead")
    ask(limits, "alive", waiter="alive")
    expire(store, "waiters")
    ask(limits, "alive", waiter="alive", give_back=["a"])
    assert "alive" in held(limits)
    assert waiting(limits) == []


def test_waiting_threads_are_served_in_their_order(limits: Limits) -> None:
    one = LimitSpec(1)
    ask(limits, "first", spec=one)
    served: list[str] = []

    def waiter(name: str) -> None:
        wait(limits, name, one)
        served.append(name)
        limits.give_back("ai", [name])

    threads = []
    for name in "abcde":
        threads.append(threading.Thread(target=waiter, args=(name,)))
        threads[-1].start()
        wait_until(lambda: name in waiting(limits))  # noqa: B023
    limits.give_back("ai", ["first"])
    for thread in threads:
        thread.join(30)
    assert served == list("abcde")


def test_a_waiter_gives_up_in_time_and_leaves_the_queue(limits: Limits) -> None:
    ask(limits, "a", "b")
    with pytest.raises(LimitTimeout, match=r"no slot of limit 'ai' within 0.1 s: 2 slots of 2 in use, 0 waiting"):
        wait(limits, timeout_s=0.1)
    assert waiting(limits) == []
    with pytest.raises(LimitTimeout):
        wait(limits, timeout_s=0.0)


def test_a_waiter_whose_job_must_stop_leaves_the_queue(limits: Limits) -> None:
    ask(limits, "a", "b")
    checks = itertools.count()

    def check() -> None:
        if next(checks) == 2:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        wait(limits, check=check)
    assert waiting(limits) == []


def test_most_tries_of_a_waiter_write_nothing(limits: Limits, store: Database) -> None:
    ask(limits, "a", "b")
    ask(limits, "c", waiter="c", patience_s=60.0)
    before = store.collection(COLLECTION).find_one({"_id": "ai"})
    for _ in range(3):
        ask(limits, "c", waiter="c", patience_s=60.0)
        ask(limits, "d", "e")
    assert store.collection(COLLECTION).find_one({"_id": "ai"}) == before


# ---------------------------------------------------------------- rate


def permits_of(answers: Sequence[Answer]) -> int:
    return sum(len(answer.granted) for answer in answers)


def names(number: int) -> list[str]:
    return [new_slot_id() for _ in range(number)]


def test_a_rate_lets_a_full_bucket_start_and_then_the_rest_one_by_one(limits: Limits) -> None:
    spec = LimitSpec(None, Rate.parse("10/s"))
    first = ask(limits, *names(25), spec=spec)
    assert len(first.granted) == 10
    assert first.wait_s == pytest.approx(0.1, abs=0.02)
    time.sleep(0.35)
    second = ask(limits, *names(25), spec=spec)
    elapsed_s = (second.limit.now - first.limit.now).total_seconds()
    assert len(second.granted) == int(elapsed_s * 10 + 1e-6)


def test_many_threads_start_no_more_than_the_rate_allows(limits: Limits) -> None:
    spec = LimitSpec(None, Rate.parse("20/s", burst=5))
    starts: list[datetime] = []

    def one(_number: int) -> None:
        slot_id = new_slot_id()
        granted = wait(limits, slot_id, spec, timeout_s=60.0)
        (mine,) = [slot for slot in granted.limit.slots if slot.id == slot_id]
        assert mine.since is not None
        starts.append(mine.since)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(30)))
    starts.sort()
    for first, begin in enumerate(starts):
        for number, end in enumerate(starts[first:], start=1):
            assert number <= 5 + (end - begin).total_seconds() * 20 + 1e-6


def test_what_was_granted_and_not_used_goes_back_into_the_bucket(limits: Limits) -> None:
    spec = LimitSpec(None, Rate.parse("3/d"))
    assert ask(limits, "a", "b", "c", spec=spec).granted == ("a", "b", "c")
    limits.give_back("ai", ["a", "b"], unused=2)
    assert len(ask(limits, *names(5), spec=spec, give_back=["c"], unused=1).granted) == 3
    limits.give_back("ai", ["x"], unused=50)
    assert len(ask(limits, *names(5), spec=spec).granted) == 3


def test_a_permit_counts_against_the_rate_and_takes_no_slot(limits: Limits) -> None:
    spec = LimitSpec(1, Rate.parse("2/d"))
    assert ask(limits, "slot", spec=spec).granted == ("slot",)
    assert ask(limits, "permit", spec=spec, weight=0).granted == ("permit",)
    assert ask(limits, "another", spec=spec, weight=0).granted == ()
    found = limits.get("ai")
    assert found is not None
    assert found.in_use == 1


def test_another_rate_keeps_what_was_left(limits: Limits) -> None:
    assert len(ask(limits, *names(9), spec=LimitSpec(None, Rate.parse("10/d"))).granted) == 9
    limits.set("ai", None, "2/d")
    assert len(ask(limits, *names(5)).granted) == 1


# ---------------------------------------------------------------- by hand


def test_what_a_person_sets_wins_over_settings_until_it_is_reset(limits: Limits) -> None:
    assert ask(limits, spec=LimitSpec(1)).limit.concurrency == 1
    set_to = limits.set("ai", 3)
    assert (set_to.concurrency, set_to.rate, set_to.by_hand) == (3, None, True)
    assert ask(limits, spec=LimitSpec(1, Rate.parse("1/s"))).limit.concurrency == 3
    assert limits.set("ai", rate="60/m", burst=5).rate == Rate(60, 60, 5)
    found = limits.get("ai")
    assert found is not None
    assert (found.concurrency, found.rate) == (3, Rate(60, 60, 5))
    assert limits.set("ai", rate=None).rate is None
    assert limits.reset("ai")
    assert ask(limits, spec=LimitSpec(1)).limit.concurrency == 1
    assert not limits.reset("unknown")


def test_a_limit_can_be_set_before_it_is_used_and_closed_altogether(limits: Limits) -> None:
    assert limits.get("ai") is None
    assert limits.list() == []
    limits.set("ai", 0)
    assert ask(limits, "a").granted == ()
    limits.set("ai", None)
    assert len(ask(limits, *names(50)).granted) == 50


@pytest.mark.parametrize(
    "wrong",
    [
        lambda limits: limits.set("ai", -1),
        lambda limits: limits.set("ai", "4"),
        lambda limits: limits.set("ai", rate="often"),
        lambda limits: limits.set("ai", 1, burst=4),
        lambda limits: limits.set("", 1),
        lambda limits: limits.set("a\0b", 1),
        lambda limits: limits.set("x" * 201, 1),
    ],
)
def test_a_wrong_limit_is_refused_and_nothing_written(limits: Limits, wrong: Callable[[Limits], Any]) -> None:
    with pytest.raises(ValueError):
        wrong(limits)
    assert limits.list() == []


@pytest.mark.parametrize(
    ("fields", "granted"),
    [
        ({"slots": 5}, True),
        ({"slots": [1, "x", {"id": "q"}, {"id": "q", "until": 3}]}, True),
        ({"waiters": {"a": 1}}, True),
        ({"waiters": [None, {"id": 4}]}, True),
        ({"rate": "60/m"}, True),
        ({"rate": {"count": "x", "period_s": 1, "burst": 1}}, True),
        ({"rate": {"count": 0, "period_s": 0, "burst": 0}}, True),
        ({"rate": {"count": 5, "period_s": 1, "burst": 5}, "bucket": 7}, True),
        ({"rate": {"count": 5, "period_s": 1, "burst": 5}, "bucket": {"level": "x", "at": 3}}, True),
        ({"concurrency": "many"}, False),
        ({"concurrency": None}, True),
        ({"concurrency": 2.0}, True),
    ],
)
def test_a_document_edited_by_hand_breaks_no_update(
    limits: Limits, store: Database, fields: dict[str, Any], granted: bool
) -> None:
    edit(store, source="hand", concurrency=2)
    edit(store, **fields)
    assert ask(limits, "a", waiter="a").granted == (("a",) if granted else ())
    limits.renew("ai", ["a"], owner="w1", lease_s=LEASE_S)
    limits.give_back("ai", ["a"], unused=1)
    limits.set("ai", rate=None)
    assert [limit.name for limit in limits.list()] == ["ai"]
