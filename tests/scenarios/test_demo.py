"""The demo command as a person runs it: real documents, a real worker, a real SIGKILL."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pymongo
import pytest

pytest.importorskip("pypdf")
pytest.importorskip("bs4")
pytest.importorskip("httpx")

pytestmark = pytest.mark.timeout(300)


def run(database_uri: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, against the server of the test run, with the stand-in endpoint."""
    given = {name: value for name, value in os.environ.items() if name != "OPENAI_BASE_URL"}
    given.pop("RELATA_DEMO_OPENAI_BASE_URL", None)
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "relata_celery", "relata", "demo", *options],
        env={**given, "RELATA_MONGODB_URI": database_uri},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def databases(client: pymongo.MongoClient[dict[str, Any]]) -> list[str]:
    return [name for name in client.list_database_names() if name.startswith("relata_demo_")]


def test_a_killed_worker_costs_nothing(
    database_uri: str, mongo_client: pymongo.MongoClient[dict[str, Any]]
) -> None:
    done = run(database_uri, "--json")
    assert "log, until the run ends well: " in done.stderr
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert (report["lost"], report["doubled"], report["timed_out"]) == ([], [], False)
    assert report["crashed"]
    assert report["interrupted_count"] >= 1
    assert report["recovered_count"] == report["interrupted_count"]
    assert 60 <= report["total"] <= 150
    assert report["by_state"]["succeeded"] >= report["total"] - 5
    assert {failure["error_class"] for failure in report["failures"]} <= {"invalid"}
    assert report["attempts"] > report["total"] - 5
    assert sum(report["endpoint_met"].values()) >= report["by_step"]["analyse"]["succeeded"]
    documents = {document["name"]: document for document in report["documents"]}
    assert documents["declaration-1789.md"]["language"] == "fr"
    assert documents["bzip2-manual.pdf"]["words"] > 10_000
    assert all(document["nearest"] for document in documents.values())
    assert databases(mongo_client) == []


def test_a_folder_of_ones_own_without_a_crash_and_the_database_kept(
    tmp_path: Path, database_uri: str, mongo_client: pymongo.MongoClient[dict[str, Any]]
) -> None:
    (tmp_path / "good.txt").write_text("Light is refracted by a prism. It is the one that we have.", "utf-8")
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "photo.jpeg").write_bytes(b"x")
    done = run(database_uri, "--documents", str(tmp_path), "--no-crash", "--keep")
    kept = databases(mongo_client)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "skipped photo.jpeg" in done.stdout
        (log,) = re.findall(r"worker 1 started \(log: (.*)\)", done.stdout)
        assert Path(log).exists()
        assert "embedded stop" not in done.stdout
        assert "the file is empty" in done.stdout
        assert "none lost, none accepted twice" in done.stdout
        assert len(kept) == 1
        assert kept[0] in done.stdout
        jobs = {job["_id"]: job for job in mongo_client[kept[0]]["relata_jobs"].find()}
        assert jobs["extract:empty.md"]["state"] == "failed"
        assert jobs["chunk:empty.md"]["state"] == "failed"
        assert jobs["chunk:empty.md"]["error"].startswith("not run, as a step before it failed")
        assert jobs["chunk:empty.md"]["attempts"] == 0
        assert jobs["embed:good.txt:0"]["state"] == "succeeded"
        shutil.rmtree(Path(log).parent)
    finally:
        for name in kept:
            mongo_client.drop_database(name)


def test_an_empty_folder_is_a_usage_error(tmp_path: Path, database_uri: str) -> None:
    done = run(database_uri, "--documents", str(tmp_path))
    assert done.returncode == 2
    assert "no file in it ends in" in done.stderr
