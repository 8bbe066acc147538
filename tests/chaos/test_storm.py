"""Faults under load; the checker must have nothing to say.

Short by default (a minute of faults). ``RELATA_CHAOS_SECONDS`` makes it longer, ``RELATA_CHAOS_SEED`` repeats one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.small_disk import SmallDisk, small_disk
from tests.chaos.storm import storm
from tests.mongo import ReplicaSet, start_replica_set

SECONDS = float(os.environ.get("RELATA_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("RELATA_CHAOS_SEED", "0")) or secrets.randbelow(10**6)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk | None]:
    """Of the last member; None, and no such fault, where this user may not mount one."""
    with small_disk(tmp_path / "cluster" / "member2") as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path, disk: SmallDisk | None) -> Iterator[ReplicaSet]:
    made = start_replica_set(tmp_path / "cluster", members=3)
    yield made
    made.stop()


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_is_lost_or_doubled_in_a_storm(
    cluster: ReplicaSet, disk: SmallDisk | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "storm"
    folder.mkdir()
    with storm(cluster, folder, "chaos", SEED, disk) as made:
        made.start()
        made.produce(SECONDS)
        made.rage(SECONDS)
        report = made.judge()
    with capsys.disabled():
        print(f"\n{report}")
    assert not report.findings.wrong, str(report)
    assert report.findings.counted["acknowledged"] > SECONDS
    assert sum(report.faults.values()) >= 5
