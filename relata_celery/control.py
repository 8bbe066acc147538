"""Remote control, of which a revoke is also a write: it holds when no worker hears it."""

from __future__ import annotations

from typing import Any

from celery.app.control import TERM_SIGNAME
from celery.app.control import Control as CeleryControl
from kombu.utils.functional import maybe_list

from . import bootstrap


class Control(CeleryControl):
    def revoke(
        self,
        task_id: Any,
        destination: Any = None,
        terminate: bool = False,
        signal: Any = TERM_SIGNAME,
        **kwargs: Any,
    ) -> Any:
        """Cancel these jobs: those that wait at once and for good, with or without a worker.

        Those that run go on, as in Celery, unless ``terminate`` is set: then their workers are told.
        """
        reply = super().revoke(task_id, destination=destination, terminate=terminate, signal=signal, **kwargs)
        if bootstrap.has_our_broker(self.app):
            ids = [str(one) for one in maybe_list(task_id) or ()]
            retention_s = bootstrap.settings_of(self.app).retention_failed
            bootstrap.stores_of(self.app).jobs.cancel(ids, retention_s, "revoked", waiting_only=True)
        return reply
