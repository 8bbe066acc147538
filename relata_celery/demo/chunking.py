"""Text in pieces of some hundred words, cut between sentences where that is possible."""

from __future__ import annotations

import re

CHUNK_WORDS = 700
_SENTENCE_END = re.compile(r"[.!?…][^\w\s]*$")


def split(text: str, words: int = CHUNK_WORDS) -> list[str]:
    """Pieces of at most ``words`` words, in order; nothing is left out and nothing is in two of them.

    A piece ends at the last end of a sentence in its second half, else at its last word. The same
    text always gives the same pieces, so their numbers can name jobs.
    """
    tokens = text.split()
    pieces: list[str] = []
    start = 0
    while start < len(tokens):
        end = min(start + words, len(tokens))
        if end < len(tokens):
            end = next(
                (at for at in range(end, start + words // 2, -1) if _SENTENCE_END.search(tokens[at - 1])),
                end,
            )
        pieces.append(" ".join(tokens[start:end]))
        start = end
    return pieces
