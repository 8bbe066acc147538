"""The indexes: built once, few, partial where it matters, and never taken from whoever built another."""

from __future__ import annotations

from relata_celery.store.client import Database
from relata_celery.store.codec import COLLECTION
from relata_celery.store.indexes import CLAIM, EXPIRE, INDEXES, LEASE, UNIQUE, check_indexes, ensure_indexes
from relata_celery.store.jobs import Jobs
from tests.store.builders import claim_one, new_job


def test_a_new_database_lacks_them_all_and_building_them_twice_changes_nothing(store: Database) -> None:
    assert len(check_indexes(store)) == len(INDEXES)
    assert ensure_indexes(store) == []
    assert check_indexes(store) == []
    before = store.collection(COLLECTION).index_information()
    assert ensure_indexes(store) == []
    assert store.collection(COLLECTION).index_information() == before
    assert len(before) == len(INDEXES) + 1


def test_pruning_is_by_an_absolute_date_on_a_field_of_its_own(store: Database) -> None:
    ensure_indexes(store)
    information = store.collection(COLLECTION).index_information()
    assert information[EXPIRE]["key"] == [("expire_at", 1)]
    assert information[EXPIRE]["expireAfterSeconds"] == 0
    assert information[CLAIM]["partialFilterExpression"] == {"state": "queued"}
    assert information[LEASE]["partialFilterExpression"] == {"state": "running"}
    assert information[UNIQUE]["unique"]


def test_an_index_built_by_hand_is_reported_and_kept(store: Database) -> None:
    collection = store.collection(COLLECTION)
    collection.create_index([("expire_at", 1)], name="by_hand", sparse=True)
    collection.create_index([("item_id", 1)], name=CLAIM)
    problems = ensure_indexes(store)
    assert len(problems) == 2
    assert {"by_hand", CLAIM} <= set(collection.index_information())
    reported = check_indexes(store)
    assert len(reported) == 2
    assert "by_hand" in " ".join(reported)
    assert "expireAfterSeconds" in " ".join(reported)


def test_jobs_are_claimed_and_the_index_rebuilt_when_somebody_dropped_it(store: Database, jobs: Jobs) -> None:
    jobs.enqueue([new_job("a")])
    store.collection(COLLECTION).drop_index(CLAIM)
    assert claim_one(jobs).claim.id == "a"
    assert check_indexes(store) == []


def test_the_first_publisher_builds_them(store: Database, jobs: Jobs) -> None:
    jobs.enqueue([new_job()])
    assert check_indexes(store) == []
