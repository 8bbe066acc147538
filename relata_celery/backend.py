"""The result backend ``relata+mongodb://``: a leased job's result is read from its document.

There is no second copy: what the settle wrote is what ``AsyncResult`` shows. So for a leased job the
backend's own writes do nothing, but for states of the handler's invention (``update_state``). The
results of plain Celery tasks, which keep no document, are stored in a collection of their own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any

from celery import states
from celery.backends.base import BaseBackend
from celery.exceptions import TimeoutError as CeleryTimeoutError
from kombu.serialization import dumps, loads

from . import bootstrap
from .domain.errors import JobError, StoreUnavailable
from .domain.job import JobState
from .domain.outcome import Encoded
from .domain.privacy import ENCRYPTED, SEALED_TYPE
from .following import is_encrypted
from .interrupt import REQUEST_KEY
from .private import privacy_of_task
from .sealing import opened_result, sealed_result
from .store.client import CALL_TIMEOUT_S, connect, masked, translated
from .store.ends import ends_of
from .store.results import Results, StoredResult
from .transport import capture

#: Between two looks at a result that is waited for, in seconds: from quick to patient.
FIRST_LOOK_S = 0.005
#: The same while a change stream tells what has ended.
STREAM_LOOK_S = 2.0
#: What the last look may take when no time is left, in seconds.
LEAST_LOOK_S = 0.1

_PENDING, _RETRY = str(states.PENDING), str(states.RETRY)
_CELERY_STATES: dict[JobState, str] = {
    JobState.QUEUED: _PENDING,
    JobState.RUNNING: states.STARTED,
    JobState.SUCCEEDED: states.SUCCESS,
    JobState.FAILED: states.FAILURE,
    JobState.CANCELLED: states.REVOKED,
}


class RelataBackend(BaseBackend):
    supports_autoexpire = True
    supports_native_join = True
    persistent = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        super().__init__(app, url=url, **kwargs)
        self._uri = (url or bootstrap.mongodb_uri(app)).removeprefix(bootstrap.URL_PREFIX)
        self._results: Results | None = None

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})

    def as_uri(self, include_password: bool = False) -> str:
        uri = f"{bootstrap.URL_PREFIX}{self._uri}"
        return uri if include_password else masked(uri)

    @property
    def results(self) -> Results:
        if self._results is None:
            self._results = Results(connect(self._uri))
        return self._results

    # -- writing --------------------------------------------------------------------------------

    def encode_outcome(self, value: Any) -> tuple[str, str, Any]:
        """A return value as it is stored: content type, content encoding, body."""
        content_type, content_encoding, body = dumps(value, serializer=self.serializer)
        return content_type, content_encoding, body

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        attempt = getattr(request, REQUEST_KEY, None) if request is not None else None
        if attempt is None:
            encoded = self._stored(task_id, result, request)
            self.results.store_plain(task_id, state, encoded, self._text(traceback), self._expires_s())
        elif state not in states.READY_STATES and state not in (states.STARTED, states.RETRY):
            self.results.set_custom_state(task_id, state, self._stored(task_id, result, request))
        return result

    def _stored(self, task_id: str, value: Any, request: Any) -> Encoded:
        """A value as it is stored for this task: encrypted if its job is."""
        encoded = Encoded(*self.encode_outcome(value))
        task = self.app.tasks.get(getattr(request, "task", None))
        if is_encrypted(request) or privacy_of_task(task) == ENCRYPTED:
            return sealed_result(encoded, task_id)
        return encoded

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        if state in self.EXCEPTION_STATES and isinstance(result, BaseException):
            result = self.prepare_exception(result, "json")
        return self._store_result(task_id, result, state, traceback, request=request, **kwargs)

    def _expires_s(self) -> float | None:
        return float(self.expires) if self.expires else None

    @staticmethod
    def _text(traceback: Any) -> str | None:
        return None if traceback is None else str(traceback)[:10_000]

    def _forget(self, task_id: str) -> None:
        self.results.forget(task_id)

    # -- reading --------------------------------------------------------------------------------

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        stored = self.results.get(task_id)
        if stored is None:
            return {"status": states.PENDING, "result": None, "task_id": task_id}
        return self._meta(task_id, stored)

    def _meta(self, task_id: str, stored: StoredResult) -> dict[str, Any]:
        status = stored.custom_state or self._status(stored)
        meta: dict[str, Any] = {
            "task_id": task_id,
            "status": status,
            "result": self._value(task_id, stored, status),
            "traceback": stored.traceback,
            "children": [],
            "date_done": stored.finished_at,
        }
        if stored.type is not None:
            meta.update(name=stored.type, retries=max(stored.attempts - 1, 0), queue=stored.queue)
        return meta

    def _status(self, stored: StoredResult) -> str:
        if stored.state is JobState.QUEUED and stored.attempts:
            return _RETRY
        return _CELERY_STATES[stored.state] if stored.state is not None else _PENDING

    def _value(self, task_id: str, stored: StoredResult, status: str) -> Any:
        if status in self.EXCEPTION_STATES or (status == states.RETRY and stored.exception):
            return self._exception(task_id, stored)
        return None if stored.result is None else self._decoded(task_id, stored.result)

    def _decoded(self, task_id: str, encoded: Encoded) -> Any:
        """A stored value. An attempt that reads an encrypted one publishes and returns nothing in the open any more.

        Raises MissingKey, which names the key, when it cannot be decrypted here.
        """
        if encoded.content_type == SEALED_TYPE:
            encoded = opened_result(encoded, task_id)
            captured = capture.current.get()
            if captured is not None:
                captured.encrypted = True
        return loads(encoded.body, encoded.content_type, encoded.content_encoding, accept=self.accept)

    def _exception(self, task_id: str, stored: StoredResult) -> Any:
        exception: Mapping[str, Any] = stored.exception or {}
        if stored.result is not None and not exception:
            return self.exception_to_python(self._decoded(task_id, stored.result))
        if stored.state is JobState.CANCELLED:
            described = {
                "exc_type": "TaskRevokedError",
                "exc_message": [stored.error or "revoked"],
                "exc_module": "celery.exceptions",
            }
        else:
            described = {
                "exc_type": exception.get("type") or "JobError",
                "exc_message": _arguments(exception.get("args_json"), stored.error),
                "exc_module": exception.get("module") or "relata_celery.domain.errors",
            }
        made = self.exception_to_python(described)
        if not isinstance(made, Exception):
            # A SystemExit of the worker's handler must not end the process that asks for the result.
            made = JobError(f"{described['exc_type']}: {stored.error or 'no text'}")
        return made

    def get_task_meta(self, task_id: str, cache: bool = True) -> Any:
        return super().get_task_meta(task_id, cache=cache)

    def wait_for(
        self, task_id: str, timeout: float | None = None, interval: float = 0.5, no_ack: bool = True,
        on_interval: Any = None,
    ) -> Any:
        """Wait until the job has ended; woken by the change stream that all waiters of the process share.

        Raises Celery's TimeoutError after ``timeout`` seconds, also when MongoDB cannot be reached meanwhile: then
        it says so. Without a timeout, StoreUnavailable when MongoDB has not answered for eight seconds.
        """
        for _id, meta in self.get_many([task_id], timeout, interval, on_interval=on_interval):
            return meta

    def get_many(
        self, task_ids: Iterable[str], timeout: float | None = None, interval: float | None = 0.5,
        no_ack: bool = True, on_message: Any = None, on_interval: Any = None, max_iterations: int | None = None,
        READY_STATES: Collection[str] = states.READY_STATES,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each of these and its meta, as soon as it has ended; time and errors as in :meth:`wait_for`.

        With ``max_iterations`` it ends without error after so many looks.
        """
        self._ensure_not_eager()
        waiting = dict.fromkeys(task_ids)
        deadline = None if timeout is None else monotonic() + timeout
        left, look_s = timeout, FIRST_LOOK_S
        heard: Collection[str] | None = None
        with ends_of(self.results.database).waiting_for(waiting) as waiter:
            for turn in count(1):
                away: StoreUnavailable | None = None
                ended: dict[str, Any] = {}
                try:
                    with translated(CALL_TIMEOUT_S if left is None else max(left, LEAST_LOOK_S)):
                        ended = self._ended([i for i in waiting if heard is None or i in heard], READY_STATES)
                except StoreUnavailable as exc:
                    if deadline is None:
                        raise
                    away = exc
                for task_id, meta in ended.items():
                    del waiting[task_id]
                    if on_message is not None:
                        on_message(meta)
                    yield task_id, meta
                if not waiting or turn == max_iterations:
                    return
                if on_interval:
                    on_interval()
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise CeleryTimeoutError(f"The operation timed out{f': {away}' if away else '.'}") from away
                look_s = _pause_s(look_s, interval or 0.5, waiter.streaming and on_interval is None and not away)
                heard = waiter.wait(look_s if left is None else min(look_s, left))

    def _ended(self, task_ids: Sequence[str], ready: Collection[str]) -> dict[str, dict[str, Any]]:
        """The metas of those of these that have ended."""
        if len(task_ids) == 1:  # through Celery's own way, with its retries
            metas = {task_ids[0]: self.get_task_meta(task_ids[0])}
        else:
            metas = {task_id: self._cache[task_id] for task_id in task_ids if task_id in self._cache}
            stored = self.results.get_many([task_id for task_id in task_ids if task_id not in metas])
            for task_id, one in stored.items():
                metas[task_id] = meta = self._meta(task_id, one)
                if meta["status"] == states.SUCCESS:
                    self._cache[task_id] = meta
        return {task_id: meta for task_id, meta in metas.items() if meta["status"] in ready}

    # -- groups ---------------------------------------------------------------------------------

    def _save_group(self, group_id: str, result: Any) -> Any:
        self.results.save_group(group_id, json.dumps([r.id for r in result]), self._expires_s())
        return result

    def _restore_group(self, group_id: str) -> Any:
        ids = self.results.restore_group(group_id)
        if ids is None:
            return None
        return {"result": self.app.GroupResult(group_id, [self.app.AsyncResult(i) for i in json.loads(ids)])}

    def _delete_group(self, group_id: str) -> None:
        self.results.delete_group(group_id)

    def cleanup(self) -> None:
        """Nothing to do: a TTL index removes what has expired."""


def _pause_s(last_s: float, interval_s: float, streaming: bool) -> float:
    """Until the next look that nothing calls for; ``last_s`` was the pause before."""
    if streaming:
        return max(interval_s, STREAM_LOOK_S)
    return min(last_s * 1.5, interval_s)


def _arguments(args_json: Any, text: str | None) -> Any:
    if isinstance(args_json, str):
        try:
            return json.loads(args_json)
        except ValueError:
            pass
    return [text or ""]
