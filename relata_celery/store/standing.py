"""What a job document says about a claim: whether it shows the claim's end, and if not, who holds it.

Read back only when a conditional write matched fewer documents than were sent, so it decides between "an
earlier try of this very write had already done it" and "the lease is lost". Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from relata_celery.domain.job import Claim, JobState
from relata_celery.domain.outcome import Settlement

#: The fields that the functions here read.
STANDING_FIELDS: Mapping[str, int] = {
    "state": 1,
    "fence": 1,
    "lease": 1,
    "started_at": 1,
    "cancel_requested": 1,
    "history.fence": 1,
    "history.worker": 1,
    "history.outcome": 1,
}


def holds(document: Mapping[str, Any] | None, claim: Claim) -> bool:
    """Whether the claim is still good."""
    return (
        document is not None
        and document.get("state") == JobState.RUNNING.value
        and document.get("fence") == claim.fence
        and _owner(document) == claim.owner
    )


def cancelled(document: Mapping[str, Any] | None) -> bool:
    """Whether a person stopped the job, or asked for it."""
    if document is None:
        return False
    return document.get("state") == JobState.CANCELLED.value or document.get("cancel_requested") is True


def shows_end(document: Mapping[str, Any] | None, settlement: Settlement) -> bool:
    """Whether the document shows this settlement done.

    A removed document does if removing was the settlement. An outcome with a history entry is known by
    that entry (fence, worker, outcome), also after the job went on. One without (a release) only until the
    next claim; after that nobody can tell, and it counts as not done, which costs nothing.
    """
    claim = settlement.claim
    if document is None:
        return settlement.delete
    if settlement.delete:
        return False
    if settlement.recorded is None:
        return document.get("state") == settlement.state.value and document.get("fence") == claim.fence
    return any(
        entry.get("fence") == claim.fence
        and entry.get("worker") == claim.owner
        and entry.get("outcome") == settlement.recorded.value
        for entry in _entries(document)
    )


def why_lost(document: Mapping[str, Any] | None, claim: Claim) -> str:
    """What the document shows in place of the claim, for the log."""
    if document is None:
        return "job was removed"
    fence, state = document.get("fence"), document.get("state")
    if state == JobState.RUNNING.value:
        since = document.get("started_at")
        moment = since.isoformat(timespec="milliseconds") if isinstance(since, datetime) else "unknown"
        return f"job is held by {_owner(document)} since {moment} (fence {fence})"
    if state == JobState.CANCELLED.value:
        return "job was cancelled"
    ended = [entry for entry in _entries(document) if entry.get("fence") == claim.fence]
    if any(entry.get("outcome") == "lease_expired" for entry in ended):
        return f"job was reaped: its lease had expired (now {state}, fence {fence})"
    return f"job is {state} (fence {fence})"


def _owner(document: Mapping[str, Any]) -> Any:
    lease = document.get("lease")
    return lease.get("owner") if isinstance(lease, Mapping) else None


def _entries(document: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    history = document.get("history")
    if not isinstance(history, list):
        return []
    return [entry for entry in history if isinstance(entry, Mapping)]
