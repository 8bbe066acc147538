"""An engine on a real MongoDB, without Celery: what it delivers is at hand, and a test plays the handlers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from relata_celery.domain.events import Event
from relata_celery.domain.job import JobState, NewJob
from relata_celery.domain.outcome import ErrorInfo
from relata_celery.engine.held import HeldJob, StopReason
from relata_celery.engine.ports import AfterFailure
from relata_celery.engine.service import EngineSettings, LeaseService
from relata_celery.engine.settling import Retention
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from relata_celery.transport.envelope import followup_to_job

MESSAGE = {"body": "[[], {}, {}]", "headers": {"task": "t", "id": "x"}, "properties": {"delivery_tag": "x"}}


class Control:
    """Records what an attempt is told."""

    def __init__(self) -> None:
        self.interrupted: list[StopReason] = []
        self.killed = False
        self.lease_deadline = 0.0

    def interrupt(self, reason: StopReason) -> None:
        self.interrupted.append(reason)

    def kill(self) -> None:
        self.killed = True

    def failure_followups(self, error: ErrorInfo) -> tuple[Mapping[str, Any], ...]:
        return ()

    def patience(self) -> float:
        return 1

    def lease_extended(self, lease_deadline: float) -> None:
        self.lease_deadline = lease_deadline


class Bench:
    """An engine on a database of its own; claimed jobs come to ``delivered``."""

    def __init__(self, uri: str, after_failure: AfterFailure | None = None, **times: Any) -> None:
        self.jobs = Jobs(connect(uri))
        self.delivered: list[HeldJob] = []
        self.events: list[Event] = []
        self.slots = 2
        settings: dict[str, Any] = {
            "lease_s": 3.0,
            "heartbeat_s": 0.3,
            "poll_s": 0.1,
            "claim_ahead_s": 0.0,
            "reap_period_s": 0.3,
            "drain_s": 0.5,
            "grace_s": 0.3,
            "retention": Retention(60.0, 60.0),
            **times,
        }
        self.service = LeaseService(
            self.jobs,
            EngineSettings(**settings),
            owner="bench",
            slots=lambda: self.slots,
            deliver=self._deliver,
            followup_to_job=followup_to_job,
            after_failure=after_failure,
            emit=self.events.append,
            random=lambda: 0.5,
        )
        self._lock = threading.Lock()

    def _deliver(self, jobs: Sequence[HeldJob]) -> None:
        with self._lock:
            self.delivered.extend(jobs)

    def publish(self, *ids: str, **fields: Any) -> None:
        self.jobs.enqueue([NewJob(id=i, type="t", queue="q", message=MESSAGE, **fields) for i in ids])

    def begin(self, held: HeldJob, **limits: Any) -> Control:
        control = Control()
        self.service.adopt(held, control)
        self.service.begin(held, monotonic(), **limits)
        return control

    def state(self, job_id: str) -> JobState | None:
        job = self.jobs.get(job_id)
        return None if job is None else job.state
