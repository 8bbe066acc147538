"""What people type and what they are shown, without a server."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import click
import pytest

from relata_celery.cli import render
from relata_celery.cli.options import Moment, moment, several, when
from relata_celery.cli.payload import payload_of

CONTEXT = click.Context(click.Command("x"))
OPTION = click.Option(["--since"])
NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def read(text: str) -> Moment | None:
    return when(CONTEXT, OPTION, text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("1.5 h", NOW - timedelta(minutes=90)),
        ("3D ago", NOW - timedelta(days=3)),
        ("2w", NOW - timedelta(weeks=2)),
        ("2026-02-28", datetime(2026, 2, 28, tzinfo=timezone.utc)),
        ("2026-02-28T10:00:00Z", datetime(2026, 2, 28, 10, tzinfo=timezone.utc)),
        ("2026-02-28 10:00+02:00", datetime(2026, 2, 28, 8, tzinfo=timezone.utc)),
        ("999999999d", datetime.min.replace(tzinfo=timezone.utc)),
    ],
)
def test_times_are_read_as_written(text: str, meant: datetime) -> None:
    assert moment(read(text), lambda: NOW) == meant


@pytest.mark.parametrize(
    "text", ["", "h", "-2h", "2 years", "2026-13-01", "٣h", "9999999999w", "0001-01-01T00:00+09:00"]
)
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 30m, 2h or 3d"):
        read(text)


def test_several_values_come_by_commas_and_by_repeating() -> None:
    assert several(CONTEXT, OPTION, ("a, b", "", "c,")) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("message", "unread"),
    [
        ({}, "the message has no body"),
        ({"body": "x", "content-type": "application/json"}, "cannot be read as such"),
        ({"body": "[" * 100_000, "content-type": "application/json"}, "cannot be read as such"),
        ({"body": "[1]", "content-type": "application/json"}, "not a Celery call"),
        ({"body": "!", "content-type": "application/x-yaml"}, "application/x-yaml"),
        ({"body": "x", "headers": {"compression": "zlib"}, "content-type": "application/json"}, "compressed"),
        ({"body": 7, "headers": None, "properties": 3, "content-type": "application/json"}, "cannot be read"),
    ],
)
def test_a_body_that_is_not_a_json_call_is_described(message: dict[str, Any], unread: str) -> None:
    assert unread in (payload_of(message).unread or "")


def test_a_json_call_is_read_also_when_it_travels_as_base64() -> None:
    plain = '[[1, "x"], {"k": null}, {}]'
    encoded = base64.b64encode(plain.encode()).decode()
    for body, properties in ((plain, {}), (encoded, {"body_encoding": "base64"})):
        payload = payload_of({"body": body, "properties": properties, "content-type": "application/json"})
        assert (payload.args, payload.kwargs, payload.unread) == ([1, "x"], {"k": None}, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "4 ms"),
        (1.25, "1.2 s"),
        (60, "1 m"),
        (200, "3 m 20 s"),
        (3700, "1 h 1 m"),
        (187_200, "2 d 4 h"),
    ],
)
def test_lengths_of_time_are_short(seconds: float, text: str) -> None:
    assert render.span(seconds) == text


def test_a_narrow_table_cuts_only_what_may_be_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = [["an-id-of-20-characters", "a long note that is cut"], ["短い", "字" * 30]]
    render.print_table(["ID", "NOTE"], rows, narrow=["NOTE"])
    assert capsys.readouterr().out.splitlines() == [
        "ID                      NOTE",
        "an-id-of-20-characters  a lon…",
        "短い                    字字 …",
    ]


def test_long_listings_in_json_are_one_array(capsys: pytest.CaptureFixture[str]) -> None:
    for values in ([], [1], list(range(1200))):
        render.print_json_array(iter(values))
        assert json.loads(capsys.readouterr().out) == values
