"""Retries: asked for by the handler, by ``autoretry_for``, or by the class of error. One document always."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import MaxRetriesExceededError

from relata_celery import TransientError
from tests.celery.apps_behaviour import ImportableError
from tests.celery.behaviour import Site


def only_document(site: Site, job_id: str) -> dict[str, Any]:
    """The one document of this job: a retry makes no second."""
    documents = list(site.jobs.find({"message.headers.root_id": job_id}))
    assert [document["_id"] for document in documents] == [job_id]
    return documents[0]


def test_a_handler_asks_to_be_run_again(site: Site) -> None:
    result = site.send("retry_times", 2)
    assert site.get(result) == {
        "retries": 2,
        "id": result.id,
        "redelivered": True,
        "routing_key": "celery",
        "attempt": 3,
    }
    document = only_document(site, result.id)
    assert document["attempts"] == 3
    assert site.outcomes(result) == ["retried", "retried", "succeeded"]
    assert [entry["number"] for entry in document["history"]] == [1, 2, 3]
    assert [entry["retries"] for entry in site.journal("retry_times", id=result.id)] == [0, 1, 2]
    assert result.retries == 2


def test_a_countdown_is_kept(site: Site) -> None:
    result = site.send("retry_times", 1, 1000)
    site.wait_state(result, "queued")

    def due_in_s() -> float:
        (row,) = site.jobs.aggregate(
            [{"$match": {"_id": result.id}}, {"$set": {"ms": {"$subtract": ["$run_at", "$$NOW"]}}}]
        )
        return row["ms"] / 1000 if row["attempts"] else 0

    from tests.waiting import wait_until

    wait_until(lambda: 700 < due_in_s() <= 1001, timeout=60, message="due in 1000 s")
    site.get(result)


def test_the_given_exception_ends_the_last_attempt(site: Site) -> None:
    result = site.send("retry_exc")
    with pytest.raises(ImportableError, match="again and again"):
        site.get(result)
    assert site.outcomes(result) == ["retried", "failed"]
    assert only_document(site, result.id)["error_class"] == "transient"


def test_without_an_exception_the_limit_is_named(site: Site) -> None:
    result = site.send("retry_without_exc")
    with pytest.raises(MaxRetriesExceededError):
        site.get(result)
    assert site.outcomes(result) == ["retried", "failed"]


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_limit_stated_at_the_retry_counts(site: Site, limit: int) -> None:
    result = site.send("retry_limited_here", limit)
    with pytest.raises(ImportableError, match="no more"):
        site.get(result)
    assert len(site.journal("retry_limited_here", id=result.id)) == limit + 1
    assert site.outcomes(result) == ["retried"] * limit + ["failed"]


def test_a_retry_changes_the_arguments(site: Site) -> None:
    result = site.send("retry_changed", 1)
    assert site.get(result) == [2, 10]
    only_document(site, result.id)


def test_a_retry_keeps_what_the_call_said(site: Site) -> None:
    result = site.apply(
        "retry_keeps", headers={"colour": "green"}, item_id="item-7", tags=["a"], priority=6, queue="letters",
        unique_key="only-one", timeout=50,
    )  # fmt: skip
    site.get(result)
    first, second = site.journal("retry_keeps", id=result.id)
    assert first["seen"] == second["seen"]
    assert first["seen"][0] == "green"
    assert first["seen"][2] == "item-7"
    document = only_document(site, result.id)
    assert (document["priority"], document["queue"], document["tags"]) == (6, "letters", ["a"])
    assert document["message"]["headers"]["relata"]["timeout"] == 50


def test_a_retry_need_not_raise(site: Site) -> None:
    result = site.send("retry_quietly")
    assert site.get(result) == "the second attempt's value"
    assert site.outcomes(result) == ["retried", "succeeded"]


def test_a_task_without_a_limit_goes_on_beyond_the_default(site: Site) -> None:
    result = site.send("retry_for_ever", 8)
    assert site.get(result) == 8
    assert site.document(result)["attempts"] == 9


def test_autoretry_succeeds_within_its_limit(site: Site) -> None:
    result = site.send("autoretried", 2)
    assert site.get(result) == 2
    assert site.outcomes(result) == ["retried", "retried", "succeeded"]


def test_autoretry_ends_at_its_own_limit(site: Site) -> None:
    result = site.send("autoretried", 99)
    with pytest.raises(ImportableError, match="not yet"):
        site.get(result)
    assert site.outcomes(result) == ["retried", "retried", "failed"]
    assert len(site.journal("autoretried", id=result.id)) == 3


def test_a_transient_error_is_retried_by_itself(site: Site) -> None:
    result = site.send("transient", 2)
    assert site.get(result) == 3
    document = only_document(site, result.id)
    assert document["attempts"] == 3
    assert "error" not in document
    assert [entry.get("error") for entry in document["history"]] == ["attempt 1", "attempt 2", None]


@pytest.mark.parametrize("name", ["transient", "retry_times"])
@pytest.mark.parametrize("attempts", [1, 2, 7])
def test_the_attempts_of_a_call_count(site: Site, name: str, attempts: int) -> None:
    result = site.apply(name, 99, max_attempts=attempts)
    with pytest.raises((TransientError, MaxRetriesExceededError)):
        site.get(result)
    document = site.document(result)
    assert (document["attempts"], document["max_attempts"]) == (attempts, attempts)
    assert site.outcomes(result) == ["retried"] * (attempts - 1) + ["failed"]


def test_attempts_of_a_task_are_celerys_retries_and_one_more(site: Site) -> None:
    assert site.app.tasks["retry_without_exc"].max_attempts == 2
    assert site.app.tasks["retry_exc"].max_retries == 1
    assert site.app.tasks["transient"].max_attempts == 5
