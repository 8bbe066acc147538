"""What is installed is what was built. Only under tox, where ``RELATA_TEST_WHEEL`` is set, is there a wheel."""

from __future__ import annotations

import os
from importlib.metadata import distribution
from pathlib import Path

import pytest

import relata_celery

pytestmark = pytest.mark.skipif(
    not os.environ.get("RELATA_TEST_WHEEL"), reason="tests run on the source tree"
)


def test_the_wheel_is_tested_and_not_the_source_tree() -> None:
    assert Path(relata_celery.__file__).parent.parent == Path(
        str(distribution("relata_celery").locate_file(""))
    )


def test_types_and_entry_points_are_shipped() -> None:
    wheel = distribution("relata_celery")
    assert "relata_celery/py.typed" in {str(file) for file in wheel.files or ()}
    assert {(entry.group, entry.name, entry.value) for entry in wheel.entry_points} == {
        ("celery.commands", "relata", "relata_celery.cli:relata"),
        ("celery.result_backends", "relata", "relata_celery.backend:RelataBackend"),
    }


def test_tests_are_not_part_of_the_wheel() -> None:
    roots = {Path(str(file)).parts[0] for file in distribution("relata_celery").files or ()}
    assert not roots & {"tests", "docs"}
