"""Jobs as people see them: a line in a listing, or a page of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from relata_celery.domain.job import Attempt, Job, JobState

from . import render
from .payload import payload_of, plain_json

#: Fields of a document that a page shows in its own words, beside those of ``Job``.
_TOLD = frozenset({"root_id", "parent_id", "group_id", "leased", "exception"})


def listing(jobs: Sequence[Job]) -> None:
    """Print one line for each job; in fewer than 140 columns the less telling ones are left out."""
    columns = ["ID", "TYPE", "QUEUE", "STATE", "+TRIES", "CREATED (UTC)", "+TOOK", "ITEM", "NOTE"]
    left_out = set() if any(job.item_id for job in jobs) else {"ITEM"}
    width = render.width()
    if width < 140:
        left_out |= {"+TOOK", "ITEM"}
    if width < 110:
        left_out |= {"QUEUE", "CREATED (UTC)"}
    rows = [
        [value for name, value in zip(columns, _line(job), strict=True) if name not in left_out]
        for job in jobs
    ]
    kept = [name for name in columns if name not in left_out]
    render.print_table(kept, rows, narrow=["TYPE", "QUEUE", "ITEM", "NOTE"])


def _line(job: Job) -> list[render.Cell | str]:
    return [
        render.cell(job.id, limit=200),
        render.cell(job.type, limit=80),
        render.cell(job.queue, limit=40),
        render.state_cell(job.state),
        f"{job.attempts}/{job.max_attempts}",
        render.clock(job.created_at),
        _took(job),
        render.cell(job.item_id or "", limit=40),
        render.cell(note(job), limit=120),
    ]


def note(job: Job) -> str:
    """What a person wants to know of a job in its state, in a few words."""
    if job.state is JobState.RUNNING and job.progress:
        return _progress(job)
    if job.state is JobState.QUEUED and (job.attempts or job.run_at > job.created_at):
        reason = f": {job.error}" if job.error else ""
        return f"due {render.clock(job.run_at)}{reason}"
    if job.error or job.error_class:
        return ": ".join(str(part) for part in (job.error_class, job.error) if part)
    return ""


def show(job: Job) -> None:
    """Print everything about one job."""
    render.print_fields(_fields(job))
    if job.history:
        render.say()
        _history(job.history)
        if job.history_skipped:
            skipped = render.count(job.history_skipped, "attempt")
            render.say(f"{skipped} between the first and the newest: counted, not kept")


def _fields(job: Job) -> Iterator[tuple[str, str | render.Cell]]:
    """What is known, in the order of a job's life; what is not there is left out."""
    shown, clock = render.shown, render.clock
    payload = payload_of(job.message)
    yield "id", shown(job.id, 1000)
    yield "type", shown(job.type, 1000)
    yield "queue", shown(job.queue)
    yield "state", render.state_cell(job.state)
    yield (
        "attempts",
        f"{job.attempts} of {job.max_attempts}" + (f", {job.snoozes} snoozed" if job.snoozes else ""),
    )
    yield "priority", str(job.priority)
    if job.item_id:
        yield "item", shown(job.item_id)
    if job.tags:
        yield "tags", ", ".join(shown(tag) for tag in job.tags)
    if job.unique_key:
        yield "unique key", shown(job.unique_key)
    yield "created", f"{clock(job.created_at)} UTC"
    moments = (
        ("due" if job.state is JobState.QUEUED else "was due", job.run_at),
        ("started", job.started_at),
        ("finished", job.finished_at),
        ("not after", job.expires_at),
        ("kept until", job.expire_at),
    )
    for name, moment in moments:
        if moment is not None:
            yield name, f"{clock(moment)} UTC"
    if took := _took(job):
        yield "took", took
    if job.lease:
        yield "lease", f"held by {shown(job.lease.owner)} until {clock(job.lease.until)} UTC"
    yield "fence", str(job.fence)
    if job.progress:
        yield "progress", shown(f"{_progress(job)} (at {clock(job.progress.at)} UTC)")
    if job.cancel_requested:
        yield "cancel", "requested"
    for name in ("root_id", "parent_id", "group_id"):
        if value := job.extra.get(name):
            yield name.removesuffix("_id"), shown(value)
    if payload.unread:
        yield "arguments", shown(payload.unread)
    else:
        yield "args", _pretty(payload.args)
        yield "kwargs", _pretty(payload.kwargs)
    if job.error_class:
        yield "error class", str(job.error_class)
    if job.error:
        yield "error", job.error
    exception = job.extra.get("exception")
    if isinstance(exception, Mapping):
        yield (
            "exception",
            ".".join(shown(exception[part]) for part in ("module", "type") if part in exception),
        )
        if exception.get("traceback"):
            yield "traceback", str(exception["traceback"])
    yield from _rest(job)


def _rest(job: Job) -> Iterator[tuple[str, str]]:
    """The result, follow-ups, and fields that no other line tells."""
    plain = plain_json(job)
    if job.state is JobState.SUCCEEDED:
        yield "result", _pretty(plain["result"])
    if job.followups:
        yield "follow-ups", f"{len(job.followups)} to be published"
    if job.extra.get("leased") is False:
        yield "kind", "a plain Celery task: removed when it is acknowledged"
    for name in job.extra:
        if name not in _TOLD:
            yield render.shown(name, 40), _pretty(plain.get(name))


def _pretty(value: Any) -> str:
    """JSON, on one line while it is short."""
    short = json.dumps(value, ensure_ascii=False, default=str)
    return short if len(short) <= 100 else json.dumps(value, ensure_ascii=False, default=str, indent=2)


def _history(attempts: Iterable[Attempt]) -> None:
    rows: list[list[render.Cell | str]] = [
        [
            str(attempt.number),
            render.clock(attempt.started_at),
            render.span(attempt.duration_ms / 1000),
            render.cell(attempt.outcome, "green" if attempt.outcome == "succeeded" else "yellow"),
            str(attempt.error_class or ""),
            render.cell(attempt.worker, limit=60),
            render.cell(attempt.error or "", limit=200),
        ]
        for attempt in attempts
    ]
    columns = ["+ATTEMPT", "STARTED (UTC)", "+TOOK", "OUTCOME", "CLASS", "WORKER", "ERROR"]
    render.print_table(columns, rows, narrow=["WORKER", "ERROR"])


def _progress(job: Job) -> str:
    if job.progress is None:
        return ""
    percent = "" if job.progress.fraction is None else f"{job.progress.fraction:.0%}"
    return " ".join(part for part in (percent, job.progress.note) if part)


def _took(job: Job) -> str:
    """How long the newest attempt took, once the job has ended."""
    if job.started_at is None or job.finished_at is None or job.finished_at < job.started_at:
        return ""
    return render.span((job.finished_at - job.started_at).total_seconds())
