"""The real client libraries against a real HTTP server: what their own exceptions are taken for."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from relata_celery.domain.classify import classify, http_status, retry_after_s
from relata_celery.domain.job import ErrorClass

NOW_S = 1_700_000_000.0
#: Nothing listens on the port of discard.
NOBODY = "http://127.0.0.1:9"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Provider(ThreadingHTTPServer):
    """Answers every request with one status, these headers and this body."""

    status, body = 200, b"{}"
    answer_headers: dict[str, str]

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answers(self, status: int, body: Any = None, **headers: str) -> None:
        self.status, self.body = status, json.dumps(body if body is not None else {}).encode()
        self.answer_headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.server.status)
        for name, value in {"content-type": "application/json", **self.server.answer_headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider(("127.0.0.1", 0), _Handler) as server:
        server.answer_headers = {}
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def with_openai(url: str) -> None:
    with importlib.import_module("openai").OpenAI(api_key="k", base_url=url, max_retries=0, timeout=20) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


def with_anthropic(url: str) -> None:
    with importlib.import_module("anthropic").Anthropic(api_key="k", base_url=url, max_retries=0, timeout=20) as client:
        client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}])


def with_google(url: str) -> None:
    genai = importlib.import_module("google.genai")
    client = genai.Client(api_key="k", http_options={"base_url": url})
    try:
        client.models.generate_content(model="m", contents="x")
    finally:
        client.close()


def with_ollama(url: str) -> None:
    ollama = importlib.import_module("ollama")
    client = ollama.Client(host=url)
    try:
        client.chat(model="m", messages=[{"role": "user", "content": "x"}])
    finally:
        client._client.close()


def with_httpx(url: str) -> None:
    httpx = importlib.import_module("httpx")
    httpx.post(url, json={}, timeout=20).raise_for_status()


def with_requests(url: str) -> None:
    requests = importlib.import_module("requests")
    with requests.post(url, json={}, timeout=20) as answer:
        answer.raise_for_status()


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "google.genai": with_google,
    "ollama": with_ollama,
    "httpx": with_httpx,
    "requests": with_requests,
}


@pytest.fixture(params=CLIENTS)
def failure(request: pytest.FixtureRequest) -> Callable[[str], BaseException]:
    """Call this URL with one of the clients; what it raised."""
    pytest.importorskip(request.param)

    def failing(url: str) -> BaseException:
        with pytest.raises(Exception) as caught:
            CLIENTS[request.param](url)
        return caught.value

    return failing


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_no_repetition_mends_is_permanent(provider: Provider, failure: Any, status: int) -> None:
    provider.answers(status, {"error": {"message": "no", "code": status}})
    exc = failure(provider.url())
    assert (http_status(exc), classify(exc)) == (status, ErrorClass.PERMANENT)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 529])
def test_what_passes_is_transient(provider: Provider, failure: Any, status: int) -> None:
    provider.answers(status, {"error": {"message": "no", "code": status}})
    exc = failure(provider.url())
    assert (http_status(exc), classify(exc)) == (status, ErrorClass.TRANSIENT)


def test_a_server_that_is_not_there_is_transient(failure: Any) -> None:
    assert classify(failure(NOBODY)) is ErrorClass.TRANSIENT


def test_how_long_to_wait_is_read_from_the_answer(provider: Provider, failure: Any) -> None:
    provider.answers(429, {"error": {"message": "slow down", "code": 429}}, Retry_After="7")
    exc = failure(provider.url())
    if type(exc).__module__.startswith("ollama"):
        pytest.skip("the exceptions of ollama keep no headers")
    assert retry_after_s(exc, NOW_S) == 7.0


@pytest.mark.parametrize(
    ("client", "body"),
    [
        ("openai", {"error": {"message": "no credit", "type": "insufficient_quota", "code": "insufficient_quota"}}),
        ("httpx", {"error": {"message": "no credit", "type": "insufficient_quota", "code": "insufficient_quota"}}),
        ("requests", {"error": {"message": "no credit", "type": "insufficient_quota", "code": None}}),
    ],
)
def test_a_spent_quota_is_permanent(provider: Provider, client: str, body: Any) -> None:
    pytest.importorskip(client)
    provider.answers(429, body, Retry_After="7")
    with pytest.raises(Exception) as caught:
        CLIENTS[client](provider.url())
    assert classify(caught.value) is ErrorClass.PERMANENT
    assert retry_after_s(caught.value, NOW_S) is None
