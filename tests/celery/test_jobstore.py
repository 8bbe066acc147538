"""The jobs of an app, for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, signals
from celery.result import AsyncResult
from kombu.messaging import Producer
from pymongo.database import Database

import relata_celery
from relata_celery import JobState, JobStore
from relata_celery.domain.errors import ConfigurationError
from tests.waiting import wait_until


@pytest.fixture
def app(database_uri: str) -> Iterator[Celery]:
    url = f"relata+{database_uri}"
    app = Celery("store", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)

    @app.task(name="mail", shared=False, max_attempts=3)
    def mail(address: str) -> None: ...

    yield app
    app.close()


def test_a_store_of_the_app_finds_counts_cancels_and_retries(app: Celery) -> None:
    store = JobStore.from_app(app)
    first = app.tasks["mail"].apply_async(("a",), item_id="letter-1", tags=["spam"])
    second = app.tasks["mail"].apply_async(("b",), countdown=60, priority=7)
    job = store.get(first.id)
    assert job is not None
    assert (job.type, job.state, job.max_attempts, job.item_id, job.tags) == (
        "mail", JobState.QUEUED, 3, "letter-1", ("spam",),
    )  # fmt: skip
    assert {found.id for found in store.find(state="queued", type="mail")} == {first.id, second.id}
    assert [found.id for found in store.find(tag="spam")] == [first.id]
    stats = store.stats()
    assert stats.by_state[JobState.QUEUED] == 2
    assert [(depth.queue, depth.queued) for depth in stats.queues] == [("celery", 2)]
    assert store.cancel(first.id)[first.id].changed
    assert first.state == "REVOKED"
    assert store.retry([first.id])[first.id].changed
    assert store.get("nobody") is None
    assert not store.cancel("nobody")["nobody"].changed


def test_the_same_id_published_twice_is_one_job(app: Celery) -> None:
    store = JobStore.from_app(app)
    for _ in range(2):
        app.tasks["mail"].apply_async(("a",), task_id="only-one")
    assert len(store.find(type="mail")) == 1


def test_another_broker_is_refused_with_what_is_needed() -> None:
    app = Celery("elsewhere", broker="redis://:secret@localhost", set_as_current=False)
    with pytest.raises(ConfigurationError, match=r"relata\+mongodb://") as refused:
        JobStore.from_app(app)
    assert "secret" not in str(refused.value)


def test_jobs_published_in_bulk_are_written_when_the_block_ends(app: Celery) -> None:
    store = JobStore.from_app(app)
    mail = app.tasks["mail"]
    with relata_celery.bulk(batch=10):
        results = [mail.delay(str(number)) for number in range(25)]
        wait_until(lambda: len(store.find(limit=100)) == 20, message="two batches are written")
        with pytest.raises(relata_celery.InvalidJob, match="mail"):
            mail.delay("\ud800")
    assert {job.id for job in store.find(limit=100)} == {result.id for result in results}


CALLS: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((1, 2.5, True, None), {}),
    (("text", "it's \"quoted\"", "né"), {}),
    (([1, {"a": [2]}], "x" * 3000), {"deep": {"b": (1, 2)}}),
    ((), {"key": 7}),
    (tuple(range(2000)), {}),
]


def _comparable(database: Database[dict[str, Any]], job_id: str) -> dict[str, Any]:
    """A job's document without what no two jobs share."""
    found = database["relata_jobs"].find_one({"_id": job_id})
    assert found is not None
    message = found["message"]
    assert found.pop("_id") == found.pop("root_id") == job_id
    assert message["headers"].pop("id") == message["headers"].pop("root_id") == job_id
    assert message["properties"].pop("correlation_id") == job_id
    assert message["properties"].pop("delivery_tag") != job_id
    assert found.pop("run_at") == found.pop("created_at")
    return dict(found)


@pytest.mark.parametrize("sensitive", [False, True])
def test_a_call_repeated_in_bulk_is_stored_as_if_made_alone(
    app: Celery, database: Database[dict[str, Any]], sensitive: bool
) -> None:
    @app.task(name="odd", shared=False, priority=3, queue="q", sensitive=sensitive, ignore_result=True)
    def odd(*args: object, **kwargs: object) -> None: ...

    with relata_celery.bulk():
        odd.delay("the first one")
        repeated = [odd.apply_async(*call) for call in CALLS]
    for call, again in zip(CALLS, repeated, strict=True):
        alone = odd.apply_async(*call)
        assert _comparable(database, again.id) == _comparable(database, alone.id)
        assert (type(again), again.ignored) == (type(alone), alone.ignored)


def test_calls_that_are_watched_or_differ_are_not_repeated_in_bulk(app: Celery) -> None:
    mail, seen = app.tasks["mail"], []

    def look(sender: str, headers: dict[str, Any], **_: object) -> None:
        seen.append(headers["id"])

    with relata_celery.bulk():
        ids = [mail.delay("first").id, mail.apply_async(("b",), item_id="letter").id, mail.delay("c").id]
        late = mail.apply_async(("d",), countdown=60).id
    assert [JobStore.from_app(app).get(one).item_id for one in ids] == [None, "letter", None]  # type: ignore[union-attr]
    job = JobStore.from_app(app).get(late)
    assert job is not None
    assert job.run_at > job.created_at
    signals.before_task_publish.connect(look)
    try:
        with relata_celery.bulk():
            ids = [mail.delay("first").id, mail.delay("second").id]
    finally:
        signals.before_task_publish.disconnect(look)
    assert seen == ids


def test_a_repeated_call_goes_where_the_app_and_its_task_say_now(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    mail, store, seen = app.tasks["mail"], JobStore.from_app(app), []

    def queue_of(result: AsyncResult) -> str:
        job = store.get(result.id)
        assert job is not None
        return job.queue

    first = queue_of(mail.delay("a"))
    assert queue_of(mail.delay("b")) == first
    monkeypatch.setattr(mail, "job_queue", "letters")
    assert [queue_of(mail.delay("c")), queue_of(mail.delay("d"))] == ["letters", "letters"]
    monkeypatch.undo()
    assert queue_of(mail.delay("e")) == first
    app.conf.task_always_eager = True
    mail.delay("f")
    app.conf.task_always_eager = False
    assert len(store.find(type="mail", limit=100)) == 5

    publish = Producer.publish
    monkeypatch.setattr(Producer, "publish", lambda *args, **kwargs: seen.append(1) or publish(*args, **kwargs))
    mail.delay("g")
    mail.delay("h")
    assert len(seen) == 2, "who takes the place of a function on the way sees every call"


def test_a_bad_call_in_bulk_is_refused_at_the_caller_like_any_other(app: Celery) -> None:
    mail = app.tasks["mail"]
    with relata_celery.bulk():
        mail.delay("a")
        with pytest.raises(TypeError):
            mail.delay("a", "too many")
        with pytest.raises(TypeError, match="list or tuple"):
            mail.apply_async("a")
        with pytest.raises(relata_celery.InvalidJob, match='"mail"'):
            mail.delay(object())
        mail.delay("b")
    assert len(JobStore.from_app(app).find(type="mail")) == 2


def test_a_bulk_block_that_raises_drops_what_it_had_not_written(app: Celery) -> None:
    with pytest.raises(ZeroDivisionError), relata_celery.bulk():
        app.tasks["mail"].delay("a")
        1 / 0  # noqa: B018
    assert JobStore.from_app(app).find() == []


def test_a_duplicate_in_bulk_is_told_and_costs_no_other_job(app: Celery) -> None:
    mail = app.tasks["mail"]
    mail.apply_async(("first",), unique_key="k")
    with pytest.raises(relata_celery.DuplicateJob, match="'k'"), relata_celery.bulk():
        for address in "abc":
            mail.apply_async((address,), unique_key="k" if address == "b" else None)
    assert len(JobStore.from_app(app).find()) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_attemps": 3}, "did you mean max_attempts"),
        ({"tag": ["x"]}, "did you mean tags"),
        ({"compression": "nope"}, "compression is 'nope'"),
        ({"serializer": "nope"}, "cannot be encoded"),
        ({"task_id": "one\n[2026-01-01] CRITICAL forged"}, "printable"),
        ({"task_id": "x" * 501}, "500"),
        ({"compression": 5}, "compression is 5"),
        ({"queue": "two\x00lines"}, "queue"),
        ({"queue": "q" * 5000}, "queue"),
    ],
)
def test_a_call_with_a_bad_option_is_refused_at_the_caller(app: Celery, options: dict[str, Any], said: str) -> None:
    with pytest.raises(relata_celery.InvalidJob, match=said) as refused:
        app.tasks["mail"].apply_async(("a",), **options)
    assert '"mail"' in str(refused.value)
    assert JobStore.from_app(app).find() == []
