"""The jobs of an app, for programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

import relata_celery
from relata_celery import JobState, JobStore
from relata_celery.domain.errors import ConfigurationError


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
        assert len(store.find(limit=100)) == 20
        with pytest.raises(relata_celery.InvalidJob, match="mail"):
            mail.delay("\ud800")
    assert {job.id for job in store.find(limit=100)} == {result.id for result in results}


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
