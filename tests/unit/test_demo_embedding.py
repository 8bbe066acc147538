"""Hashed bags of words."""

from __future__ import annotations

import math

from relata_celery.demo import embedding


def test_a_vector_is_of_length_one_and_always_the_same() -> None:
    vector = embedding.embed("the quick brown fox jumps over the lazy dog")
    assert len(vector) == embedding.DIMENSIONS
    assert math.isclose(embedding.similarity(vector, vector), 1.0)
    assert vector == embedding.embed("the quick brown fox jumps over the lazy dog")


def test_shared_words_are_likeness() -> None:
    rays = embedding.embed("refraction of light and rays through a prism")
    prism = embedding.embed("a prism and its rays of light")
    queue = embedding.embed("goroutines write memory under a mutex")
    assert embedding.similarity(rays, prism) > embedding.similarity(rays, queue)


def test_a_text_without_words_is_like_nothing() -> None:
    assert embedding.similarity(embedding.embed("1 2 3"), embedding.embed("light")) == 0.0


def test_the_nearest_of_each_is_never_itself() -> None:
    vectors = {name: embedding.embed(text) for name, text in TEXTS.items()}
    nearest = embedding.nearest(vectors)
    assert nearest["a"][0] == "b"
    assert all(name != other for name, (other, _) in nearest.items())
    assert embedding.nearest({"a": vectors["a"]}) == {}


TEXTS = {"a": "light and prisms", "b": "prisms bend light", "c": "memory and goroutines"}
