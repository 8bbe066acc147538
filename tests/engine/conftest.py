"""Engines that are stopped at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.bench import Bench


@pytest.fixture
def running(database_uri: str) -> Iterator[Callable[..., Bench]]:
    """Start an engine, of this kind of bench, on the test's database; it consumes queue ``q``."""
    benches: list[Bench] = []

    def start(kind: type[Bench], **times: Any) -> Bench:
        bench = kind(database_uri, **times)
        benches.append(bench)
        bench.service.start()
        bench.service.claimer.consume("q")
        return bench

    yield start
    for bench in benches:
        bench.service.stop(1.0)
