"""The group behind ``relata``: commands loaded when they are asked for, errors told in one line.

Whatever a person can get wrong (an option, the broker, the connection, a right) ends here as one
message on standard error that says what was seen and what to do, without a traceback and without
a password. Exit status 2 is a wrong command line, 1 everything else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

#: The driver goes on for pages about every server it knows.
_DRIVER_DETAILS = re.compile(
    r"\s*\(configured timeouts: [^)]*\)|, Timeout: [\d.]+s, Topology Description: .*", re.S
)
#: The server repeats the whole command that it refuses; its name is enough.
_REFUSED_COMMAND = re.compile(r"execute command \{ (\w+):.*", re.S)
_MENDING: tuple[tuple[str, str], ...] = (
    (r"\(code (?:18|8000)\)", "check the user and the password in the broker URL"),
    (r"\(code 13\)", "give its user the role readWrite on this database"),
    (
        r"cannot be reached|cannot answer|did not answer",
        "check that MongoDB runs and that the broker URL names it",
    ),
)


class Refusal(click.ClickException):
    """Ends the command with one message: what was asked cannot be done."""


class WrongUsage(Refusal):
    """The command line cannot be understood."""

    exit_code = 2


class Commands(click.Group):
    """A group whose commands live in ``rooms`` (name to module) and are loaded at use."""

    def __init__(self, *args: Any, rooms: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rooms = rooms

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._rooms})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._rooms:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(self._rooms[cmd_name]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from relata_celery.domain.errors import RelataError

        try:
            return super().invoke(ctx)
        except RelataError as exc:
            text, mending = told(exc)
            raise Refusal(f"{text}; {mending}" if mending else text) from None
        except click.UsageError as exc:
            raise _in_one_line(exc) from None


def told(exc: Exception) -> tuple[str, str | None]:
    """An error of ours for a terminal (no control characters, no topology), and what to do about it when its
    text does not say so itself."""
    from relata_celery.domain.redact import mask_secrets, one_line

    text = _DRIVER_DETAILS.sub("", mask_secrets(str(exc)))
    text = _REFUSED_COMMAND.sub(r"execute the command \1", text)
    text = "\n".join(one_line(line) for line in text.splitlines())
    for pattern, mending in _MENDING:
        if re.search(pattern, text):
            return text.removesuffix("."), mending
    return text, None


def _in_one_line(exc: click.UsageError) -> click.ClickException:
    """Click's own errors without its usage block. The ones that print help, or Celery's advice, stay."""
    if type(exc).__name__ == "NoArgsIsHelpError" or getattr(exc, "option_name", None) in ("-A", "--app"):
        return exc
    message = " ".join(exc.format_message().split()).removesuffix(".")
    if exc.ctx is None:
        return WrongUsage(message)
    return WrongUsage(f"{message}{_nearest(message, exc.ctx)}; see {exc.ctx.command_path} --help")


def _nearest(message: str, ctx: click.Context) -> str:
    """The known command that was perhaps meant, where click does not say it."""
    found = re.match(r"No such command '([^']*)'", message)
    if found is None or "ean" in message or not isinstance(ctx.command, click.Group):
        return ""
    near = difflib.get_close_matches(found[1], ctx.command.list_commands(ctx), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
