"""What Prometheus gets from a worker."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until
from tests.workers import running_worker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, tuple(sorted(sample.labels.values()))): sample.value
            for family in families
            for sample in family.samples
        }


def test_a_scrape_tells_outcomes_durations_and_depths(database_uri: str, tmp_path: Path) -> None:
    port = free_port()
    url = f"relata+{database_uri}"
    app = Celery("caller", broker=url, backend=url, set_as_current=False)
    with running_worker(
        "tests.celery.apps_behaviour", database_uri, tmp_path, "-c", "2", env={"RELATA_METRICS_PORT": str(port)}
    ):
        for number in range(3):
            app.send_task("add", (number, 1))
        app.send_task("fail_as", ("permanent",))
        app.send_task("no.such.type")
        app.send_task("add", (1, 1), countdown=3600)
        wait_until(
            lambda: scrape(port).get(("relata_jobs_processed_total", ("add", "succeeded"))) == 3
            and scrape(port).get(("relata_jobs_processed_total", ("failed", "unknown"))) == 1,
            timeout=40,
            message="the outcomes are counted",
        )
        seen = scrape(port)
    assert seen[("relata_job_duration_seconds_count", ("add",))] == 3
    assert seen[("relata_queue_depth", ("celery", "queued"))] >= 1
    assert seen[("relata_leases_expired_total", ())] == 0
    assert seen[("relata_oldest_expired_lease_seconds", ())] == 0


def test_a_taken_port_does_not_keep_the_worker_from_working(database_uri: str, tmp_path: Path) -> None:
    url = f"relata+{database_uri}"
    app = Celery("caller", broker=url, backend=url, set_as_current=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with running_worker(
            "tests.celery.apps_behaviour", database_uri, tmp_path, "-c", "1", env={"RELATA_METRICS_PORT": port}
        ) as worker:
            assert app.send_task("add", (1, 1)).get(timeout=30) == 2
            assert "metrics cannot be served" in worker.log
