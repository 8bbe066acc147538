"""Claims whose answer was lost: MongoDB may have granted them, and nobody knows that it holds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from relata_celery.domain.errors import StoreUnavailable


@dataclass(frozen=True, slots=True)
class Unheard:
    """One claim: who asked, the ticket that marks what it got, and the jobs that it asked for."""

    owner: str
    ticket: str
    ids: tuple[str, ...]


class UnheardClaims:
    """Those of one process, oldest first. Safe from any thread."""

    def __init__(self) -> None:
        self._claims: deque[Unheard] = deque()

    @contextmanager
    def noted(self, owner: str, ticket: str, ids: Sequence[str]) -> Iterator[None]:
        """Remember this claim if the block ends without an answer."""
        try:
            yield
        except StoreUnavailable:
            self._claims.append(Unheard(owner, ticket, tuple(ids)))
            raise

    def oldest(self) -> Unheard | None:
        return self._claims[0] if self._claims else None

    def answered(self, claim: Unheard) -> None:
        with suppress(ValueError):
            self._claims.remove(claim)
