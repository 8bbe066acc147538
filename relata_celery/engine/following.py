"""Publishes what ended jobs asked for: links, chain steps, errbacks, the failure of steps that waited.

Each follow-up is judged by itself. One that no job can be made of, or that the queue refuses, is put on
record as a failed job under its own id, so that whoever waits for it has an answer; what its failure calls
for is written with that record and published like any other. Only then is the field cleared that asked for
it. So everything here may be done again after a crash, by any worker, and nobody meets a bad one twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relata_celery.domain.errors import MissingKey, PermanentError, RelataError, StoreError
from relata_celery.domain.job import ErrorClass, NewJob
from relata_celery.domain.outcome import ErrorInfo, never_run
from relata_celery.domain.redact import clean

from .ports import AfterFailure, JobQueue

logger = logging.getLogger("relata_celery")

#: The job that a stored follow-up stands for; raises where none can be made of it.
FollowupToJob = Callable[[Mapping[str, Any]], NewJob]

#: An ended job's id, and its follow-ups as they are stored.
Ended = tuple[str, Sequence[Mapping[str, Any]]]


class NothingFollows:
    """For engines whose messages call for nothing: plain kombu consumers."""

    def followups(self, message: Mapping[str, Any], queue: str, error: ErrorInfo) -> Sequence[Mapping[str, Any]]:
        return ()

    def tell(self, message: Mapping[str, Any], error: ErrorInfo) -> None:
        pass


class Publisher:
    """Safe from any thread. Raises StoreError, with nothing cleared, when MongoDB is away or refuses."""

    def __init__(
        self,
        queue: JobQueue,
        to_job: FollowupToJob,
        after_failure: AfterFailure,
        retention_failed_s: float | None,
    ) -> None:
        self._queue = queue
        self._to_job = to_job
        self._after_failure = after_failure
        self._retention_failed_s = retention_failed_s

    def publish(self, ended: Sequence[Ended]) -> None:
        """Insert the jobs that these ended jobs asked for, then clear their fields; safe to repeat."""
        while ended:
            refused = self._insert([followup for _id, followups in ended for followup in followups])
            recorded = [record for followup, why in refused if (record := self._record(followup, why))]
            self._queue.clear_followups([job_id for job_id, _followups in ended])
            ended = recorded

    def called_for(self, message: object, queue: str, error: ErrorInfo) -> Sequence[Mapping[str, Any]]:
        """What the failure of the job with this stored message calls for; nothing if it cannot be read.

        Raises MissingKey when it is encrypted with a key that is not here.
        """
        if not isinstance(message, Mapping):
            return ()
        try:
            return self._after_failure.followups(message, queue, error)
        except MissingKey:
            raise
        except Exception as exc:
            logger.error("what a failed job calls for cannot be read from its message: %s", type(exc).__name__)
            return ()

    def _readable(self, message: object, queue: str, error: ErrorInfo) -> Sequence[Mapping[str, Any]]:
        try:
            return self.called_for(message, queue, error)
        except MissingKey as exc:
            logger.error("what a failed job calls for cannot be read: %s", exc)
            return ()

    def tell(self, message: object, error: ErrorInfo) -> None:
        """Call what is called when a job has failed, and not published."""
        if not isinstance(message, Mapping):
            return
        try:
            self._after_failure.tell(message, error)
        except Exception as exc:
            logger.error("who waits for a job's failure cannot be told: %s", type(exc).__name__)

    def _insert(self, followups: Sequence[Any]) -> list[tuple[Any, Exception]]:
        """Insert what can be inserted; the rest, each with the reason."""
        made: list[tuple[Any, NewJob]] = []
        refused: list[tuple[Any, Exception]] = []
        for followup in followups:
            try:
                made.append((followup, self._to_job(followup)))
            except Exception as exc:
                refused.append((followup, exc))
        answers = self._queue.publish([job for _followup, job in made])
        for (followup, _job), answer in zip(made, answers, strict=True):
            if isinstance(answer, Exception):
                refused.append((followup, answer))
        return refused

    def _record(self, followup: Any, why: Exception) -> Ended | None:
        """Put a refused follow-up on record as failed; return what that calls for, if it is news."""
        error = _refusal(why)
        try:
            message, queue = followup["message"], str(followup["queue"])
            failure = never_run(
                error, self._retention_failed_s, followups=self._readable(message, queue, error), replaceable=False
            )
            job = self._to_job({**followup, "failure": failure})
        except Exception as exc:
            logger.error("a follow-up without readable id and type is dropped (%s): %s", type(exc).__name__, error.text)
            return None
        (answer,) = self._queue.publish([job])
        if isinstance(answer, Exception):  # its message is what cannot be stored
            headers = {"id": job.id, "task": job.type}
            (answer,) = self._queue.publish([replace(job, message={"body": "", "headers": headers, "properties": {}})])
        if isinstance(answer, StoreError):
            raise answer
        if isinstance(answer, Exception):
            logger.error("job %s (%s) cannot be published nor recorded as failed: %s", job.id, job.type, answer)
            return None
        logger.error("job %s (%s): %s", job.id, job.type, error.text)
        if not answer:  # it is on record, or is a job that was published by another
            return None
        self.tell(message, error)
        return job.id, failure["followups"]


def _refusal(why: Exception) -> ErrorInfo:
    # What is not ours may quote the message.
    words = f"{type(why).__name__}: {why}" if isinstance(why, RelataError) else type(why).__name__
    text = clean(f"not published: {words}")
    return ErrorInfo(ErrorClass.PERMANENT, text, "PermanentError", PermanentError.__module__)
