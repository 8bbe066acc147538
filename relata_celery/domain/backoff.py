"""How long a failed job waits before its next attempt."""

from __future__ import annotations

BASE_S = 2.0
MAX_DOUBLINGS = 6
MAX_S = 300.0


def backoff_s(attempt: int, random_fraction: float) -> float:
    """Seconds to wait after ``attempt`` attempts were made.

    ``d = min(2 * 2**min(attempt, 6), 300)``, of which half is fixed and half is jitter:
    ``random_fraction``, from 0 to 1, says how much of it. So a fleet that failed together does not
    come back together, and nobody comes back at once.
    """
    doublings = min(max(attempt, 0), MAX_DOUBLINGS)
    longest = min(BASE_S * 2.0**doublings, MAX_S)
    return longest / 2 + min(max(random_fraction, 0.0), 1.0) * longest / 2


def lost_delay_s(attempt: int, random_fraction: float) -> float:
    """Seconds to wait after attempt number ``attempt`` was lost with its worker.

    The first loss is rerun at once; a job that goes on losing its workers waits longer and longer.
    """
    return 0.0 if attempt <= 1 else backoff_s(attempt - 1, random_fraction)
