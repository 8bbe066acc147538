"""The border to MongoDB: one client per process, durable whatever the URI says, no secret anywhere."""

from __future__ import annotations

import os
import pickle
from datetime import datetime, timezone
from typing import Any

import pymongo
import pytest
from pymongo import ReadPreference
from pymongo.errors import BulkWriteError, OperationFailure

from relata_celery.domain.errors import ConfigurationError, ServerTooOld, StoreError, StoreUnavailable
from relata_celery.store.client import Database, ServerInfo, connect, masked, store_error, translated
from relata_celery.store.jobs import Jobs
from tests.mongo import free_port
from tests.store.builders import LEASE_S, new_job, success


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("mongodb://user:p%40ss@h/db", "mongodb://user:***@h/db"),
        ("mongodb://user:p@s/s@h1,h2/db?a=b@c", "mongodb://user:***@h1,h2/db?a=b@c"),
        ("mongodb://user:p?ss@h/db", "mongodb://user:***@h/db"),
        ("relata+mongodb+srv://user:pass@h", "relata+mongodb+srv://user:***@h"),
        ("mongodb://h/db?appName=me@x", "mongodb://h/db?appName=me@x"),
        (
            "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:pass&w=1",
            "mongodb://h/?authMechanismProperties=***&w=1",
        ),
        ("mongodb://h/?tlsCertificateKeyFilePassword=pass", "mongodb://h/?tlsCertificateKeyFilePassword=***"),
    ],
)
def test_a_masked_uri_shows_everything_but_its_secrets(uri: str, shown: str) -> None:
    assert masked(uri) == shown
    assert "pass" not in repr(connect(uri)).replace("Password", "")


def test_an_unusable_uri_is_a_configuration_error_without_the_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        _ = connect("mongodb://user:sesame@h:notaport/db").client
    assert "sesame" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_uri_without_a_database_means_relata() -> None:
    database = connect("relata+mongodb://127.0.0.1:1/?replicaSet=r")
    assert database.name == "relata"
    database.close()


def test_reads_and_writes_are_durable_whatever_the_uri_says(database_uri: str) -> None:
    mark = "&" if "?" in database_uri else "?"
    database = connect(
        f"{database_uri}{mark}readPreference=secondary&w=0&journal=false&readConcernLevel=available"
    )
    collection = database.collection("things")
    assert collection.write_concern.document == {"w": "majority", "j": True}
    assert collection.read_preference == ReadPreference.PRIMARY
    assert collection.read_concern.level == "local"
    jobs = Jobs(database)
    assert jobs.enqueue([new_job("a")]) == [True]
    assert jobs.get("a") is not None
    database.close()


def test_what_the_uri_states_about_time_limits_is_kept() -> None:
    stated = connect("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=1234")
    default = connect("mongodb://127.0.0.1:1/")
    assert stated.client.options.server_selection_timeout == pytest.approx(1.234)
    assert default.client.options.server_selection_timeout == pytest.approx(5.0)
    assert default.client.options.pool_options.connect_timeout == pytest.approx(5.0)
    stated.close()
    default.close()


def test_databases_of_one_uri_share_one_client_until_it_is_closed(database_uri: str) -> None:
    first, second = connect(database_uri), connect(f"relata+{database_uri}")
    client = first.client
    assert second.client is client
    first.close()
    assert second.client is not client
    second.close()


def test_a_forked_child_makes_its_own_client(store: Database, jobs: Jobs) -> None:
    jobs.enqueue([new_job("from parent")])
    parents = store.client
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"nothing"
        try:
            own = store.client is not parents
            (claimed,) = jobs.claim(["default"], 1, "child", LEASE_S)
            (verdict,) = jobs.settle([success(claimed)])
            answer = f"{own} {verdict.accepted}".encode()
            store.close()
        except BaseException as exc:
            answer = repr(exc).encode()
        finally:
            os.write(writable, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(readable, 1000) == b"True True"
    os.close(readable)
    os.close(writable)
    job = jobs.get("from parent")
    assert job is not None
    assert job.history[0].worker == "child"
    assert store.client is parents


def test_a_database_travels_as_its_uri(store: Database) -> None:
    assert pickle.loads(pickle.dumps(store)).uri == store.uri


def test_a_server_that_is_not_there_is_unavailable() -> None:
    database = connect(f"mongodb://user:sesame@127.0.0.1:{free_port()}/x?serverSelectionTimeoutMS=100")
    with pytest.raises(StoreUnavailable) as caught:
        Jobs(database).claim(["default"], 1, "w", LEASE_S)
    assert "sesame" not in str(caught.value)
    database.close()


def test_a_call_that_passes_its_deadline_is_unavailable(store: Database) -> None:
    store.collection("things").insert_one({})
    with pytest.raises(StoreUnavailable), translated(timeout_s=0.2):
        store.collection("things").find_one({"$where": "sleep(2000) || true"})


def test_a_refusal_is_a_store_error_and_its_text_has_no_documents(store: Database) -> None:
    secret = {"_id": 1, "argument": "sesame"}
    with pytest.raises(StoreError) as caught, translated():
        store.collection("things").insert_many([secret, secret])
    assert not isinstance(caught.value, StoreUnavailable)
    assert isinstance(caught.value.__context__, BulkWriteError)
    assert caught.value.__suppress_context__
    assert "sesame" not in str(caught.value)


def test_an_election_is_unavailable() -> None:
    stepped_down = OperationFailure("not primary", 10107)
    assert isinstance(store_error(stepped_down), StoreUnavailable)
    assert not isinstance(store_error(OperationFailure("no", 13)), StoreUnavailable)
    in_bulk = BulkWriteError({"writeErrors": [], "writeConcernErrors": [{"code": 64, "errmsg": "waited"}]})
    assert isinstance(store_error(in_bulk), StoreUnavailable)


def test_the_server_is_named_and_supported(store: Database) -> None:
    info = store.require_supported()
    assert info.replica_set
    assert not info.standalone


def test_a_server_below_5_is_refused(store: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database, "server_info", lambda _: ServerInfo("4.4.29", "rs0", False))
    with pytest.raises(ServerTooOld, match=r"4\.4\.29.*5\.0"):
        store.require_supported()


def test_the_clock_is_never_ahead_of_the_server(store: Database) -> None:
    for _ in range(50):
        estimate = store.clock.now()
        server: datetime = store.client.admin.command("hello")["localTime"].replace(tzinfo=timezone.utc)
        assert estimate <= server
    store.clock.reset()
    assert store.clock.now() <= datetime.now(timezone.utc)


def test_a_standalone_server_runs_the_whole_queue(standalone_uri: str) -> None:
    with pymongo.MongoClient[dict[str, Any]](standalone_uri) as client:
        client.drop_database("relata_standalone")
    database = connect(standalone_uri.replace("/?", "/relata_standalone?"))
    assert database.require_supported().standalone
    jobs = Jobs(database)
    jobs.enqueue([new_job(f"{n}") for n in range(5)])
    taken = jobs.claim(["default"], 5, "w", LEASE_S)
    assert jobs.renew([job.claim for job in taken], LEASE_S) == []
    assert all(verdict.accepted for verdict in jobs.settle([success(job) for job in taken]))
    assert jobs.settle([success(taken[0])])[0].accepted
    assert {job.state.value for job in jobs.find()} == {"succeeded"}
    database.close()
