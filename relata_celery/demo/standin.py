"""A stand-in for a model: an OpenAI-compatible endpoint on loopback that misbehaves on purpose.

It answers ``POST /v1/chat/completions`` with computed JSON (keywords by frequency, the first
sentence as summary, the language by its stop words), after a fraction of a second. Some requests,
drawn from a seed and the request's number, are refused with 429 and ``Retry-After: 1``, fail with
500, get an answer that is not JSON, or hang for longer than a client waits. The same seed gives
the same misbehaviour for the same request number.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "stand-in"
NO_HEADERS: Mapping[str, str] = {}
#: With this seed each misbehaviour comes at least once in the first 50 requests.
SEED = 0
_STOP_WORDS = {
    "en": "the and of to in is that it for are with this be as on by not or from which you have will can an"
    " at but we all if may any when one there they has was so these their no more than its",
    "fr": "le la les des et de du en un une est que qui dans pour pas ne sont par au aux sur leur tous ou ces"
    " être il elle nul tout",
    "de": "der die das und ist ein eine nicht in dem den mit du ich es er zu auf an mich mein dir wie sich so"
    " von des im sie",
    "es": "el la los las de y que en un una es por con para no se del al lo su como más o sus",
    "it": "il lo la gli le di e che in un una è per con non si del al della sono come più i da nel",
}
STOP_WORDS: Mapping[str, frozenset[str]] = {
    code: frozenset(words.split()) for code, words in _STOP_WORDS.items()
}


class Behaviour(str, Enum):
    """What a request meets."""

    ANSWER = "answer"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    GARBAGE = "garbage"
    HANG = "hang"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Rates:
    """How many of a hundred requests meet each misbehaviour; the rest are answered."""

    rate_limited: float = 4.0
    server_error: float = 3.0
    garbage: float = 1.5
    hang: float = 1.5

    def draw(self, seed: int, request: int) -> Behaviour:
        """The fate of a request, by its number from 0."""
        point = random.Random(f"{seed}:{request}").uniform(0, 100)
        for behaviour, share in (
            (Behaviour.RATE_LIMITED, self.rate_limited),
            (Behaviour.SERVER_ERROR, self.server_error),
            (Behaviour.GARBAGE, self.garbage),
            (Behaviour.HANG, self.hang),
        ):
            if point < share:
                return behaviour
            point -= share
        return Behaviour.ANSWER


def describe(text: str) -> dict[str, object]:
    """What the stand-in says of a text: summary, keywords, language."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    language = guess_language(words)
    every_stop_word = frozenset().union(*STOP_WORDS.values())
    counts = Counter(word for word in words if len(word) > 3 and word not in every_stop_word)
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()), maxsplit=1)
    summary = sentences[0] if len(sentences[0]) <= 160 else sentences[0][:159].rstrip() + "…"
    keywords = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:6]]
    return {"summary": summary, "keywords": keywords, "language": language}


def guess_language(words: list[str]) -> str:
    """The language most of whose stop words are among ``words``; English when none is."""
    counts = Counter(words)
    scores = {code: sum(counts[word] for word in stops) for code, stops in STOP_WORDS.items()}
    return max(scores, key=lambda code: scores[code])


class StandIn:
    """The server. ``start()`` returns when it listens; ``stop()`` may be called twice or before it.

    Answers take ``latency_s`` on average; a hanging request is held for ``hang_s`` or until stop.
    """

    def __init__(
        self,
        seed: int = SEED,
        rates: Rates | None = None,
        latency_s: float = 0.4,
        hang_s: float = 5.0,
    ) -> None:
        self.seed = seed
        self.rates = rates or Rates()
        self.latency_s = latency_s
        self.hang_s = hang_s
        self._lock = threading.Lock()
        self._met: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    @property
    def base_url(self) -> str:
        """The address to give to a client, without ``/v1``."""
        if self._server is None:
            raise RuntimeError("the stand-in endpoint has not been started")
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        # Held requests are abandoned at stop, not waited for.
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, name="stand-in", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def met(self) -> dict[str, int]:
        """How many requests met what, so far."""
        with self._lock:
            return dict(self._met)

    def next_behaviour(self) -> tuple[int, Behaviour]:
        """Number the next request and draw its fate."""
        with self._lock:
            number = sum(self._met.values())
            behaviour = self.rates.draw(self.seed, number)
            self._met[str(behaviour)] += 1
            return number, behaviour

    def wait(self, seconds: float) -> None:
        """Pass time, but not beyond stop."""
        self._stopping.wait(seconds)


def _handler_of(standin: StandIn) -> type[BaseHTTPRequestHandler]:
    """A request handler class for this server; http.server takes a class, so it is made here."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/v1/chat/completions":
                self._send(404, _error("there is only /v1/chat/completions here"))
                return
            try:
                text = str(json.loads(body)["messages"][-1]["content"])
            except (ValueError, KeyError, IndexError, TypeError):
                self._send(400, _error("not a chat completion request"))
                return
            number, behaviour = standin.next_behaviour()
            if behaviour is Behaviour.RATE_LIMITED:
                self._send(429, _error("too many requests"), {"Retry-After": "1"})
                return
            standin.wait(standin.hang_s if behaviour is Behaviour.HANG else self._latency(number))
            if behaviour is Behaviour.SERVER_ERROR:
                self._send(500, _error("the model fell over"))
            elif behaviour is Behaviour.GARBAGE:
                self._send(200, _completion(number, "Sure! Here is your summary: {summary: oops"))
            else:
                self._send(200, _completion(number, json.dumps(describe(text))))

        def _latency(self, number: int) -> float:
            return random.Random(f"{standin.seed}:latency:{number}").uniform(0.5, 1.5) * standin.latency_s

        def _send(self, status: int, answer: dict[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> None:
            payload = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)
            except OSError:
                # The client has hung up: it was killed, or has waited long enough.
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: the terminal belongs to the demo."""

    return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "stand_in"}}


def _completion(number: int, content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": f"standin-{number}",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 0, "completion_tokens": len(content.split()), "total_tokens": 0},
    }
