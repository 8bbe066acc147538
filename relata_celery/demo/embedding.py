"""A text as 256 numbers, without a model: a hashed bag of words.

Each word is hashed to one of 256 places and to a sign, and the counts are scaled to length one.
Texts that share words come out alike; meaning is not seen. It is deterministic, local and real,
and enough to show what a pipeline does with embeddings.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

DIMENSIONS = 256
_WORD = re.compile(r"[^\W\d_]{3,}")


def words(text: str) -> list[str]:
    """The words of three letters or more, in lower case."""
    return _WORD.findall(text.lower())


def embed(text: str) -> list[float]:
    """``text`` as a vector of length one (all zeros when it holds no word)."""
    vector = [0.0] * DIMENSIONS
    for word, count in Counter(words(text)).items():
        digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
        place = int.from_bytes(digest[:2], "big") % DIMENSIONS
        sign = 1.0 if digest[2] & 1 else -1.0
        # Damped and weighted by length: else "the" and "and" would decide what is alike.
        vector[place] += sign * (1 + math.log(count)) * min(len(word) - 2, 6)
    return normalised(vector)


def normalised(vector: Sequence[float]) -> list[float]:
    """The vector scaled to length one; zeros stay zeros."""
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length else list(vector)


def mean(vectors: Sequence[Sequence[float]]) -> list[float]:
    """What the vectors have in common, of length one."""
    return normalised([sum(column) for column in zip(*vectors, strict=True)])


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors of length one: 1 is the same direction, 0 nothing in common."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def nearest(vectors: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, float]]:
    """For each name the other one most like it, and how much. Empty for fewer than two."""
    found: dict[str, tuple[str, float]] = {}
    for name, vector in vectors.items():
        others = [(similarity(vector, other), o) for o, other in vectors.items() if o != name]
        if others:
            score, best = max(others)
            found[name] = (best, score)
    return found
