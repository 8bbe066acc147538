"""From the command line to the jobs of the app that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relata_celery.domain.errors import ConfigurationError, RelataError
from relata_celery.domain.redact import mask_secrets, one_line

if TYPE_CHECKING:
    from relata_celery.jobstore import JobStore

#: The name that Celery gives to the app it makes up when the command line names none.
_NO_APP = "default"


def app_here() -> Any:
    """The app after ``-A``. Its configuration is not looked at yet."""
    return click.get_current_context().obj.app


def job_store() -> JobStore:
    """The jobs of the app after ``-A``. Starts the embedded MongoDB when the app lives on it."""
    from relata_celery.jobstore import JobStore

    app = app_here()
    configuration(app)
    try:
        return JobStore.from_app(app)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{exc}{name_an_app(app)}") from None


def configuration(app: Any) -> Any:
    """``app.conf``, loaded now; ConfigurationError when the app's own modules fail at that."""
    try:
        # Celery reads the configuration when the first setting is asked for.
        app.conf.get("broker_url")
        return app.conf
    except RelataError:
        raise
    except Exception as exc:
        reason = one_line(mask_secrets(str(exc)), 300)
        raise ConfigurationError(
            f"the app's configuration cannot be read: {type(exc).__name__}: {reason}"
        ) from None


def name_an_app(app: Any) -> str:
    """What to add to an error about an app that nobody named."""
    return "; name your app: celery -A APP relata ..." if app.main in (None, _NO_APP) else ""
