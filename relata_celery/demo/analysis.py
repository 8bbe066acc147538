"""Asks an OpenAI-compatible endpoint about a piece of text, and checks the answer.

Errors are raised as httpx raises them (status codes, timeouts, connections): the queue classifies
them. Only an answer of the wrong structure is named here, as InvalidOutputError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from relata_celery.domain.errors import InvalidOutputError

INSTRUCTIONS = (
    "You describe a piece of a document. Answer with one JSON object and nothing else: "
    '{"summary": one sentence, "keywords": up to six lower-case words, "language": ISO 639-1 code}.'
)
REAL_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the model is, and how long to wait for it. The key is never shown."""

    base_url: str
    model: str
    api_key: str | None
    timeout_s: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Endpoint | None:
        """RELATA_DEMO_OPENAI_BASE_URL, else OPENAI_BASE_URL; None when neither is set."""
        base = environment.get("RELATA_DEMO_OPENAI_BASE_URL") or environment.get("OPENAI_BASE_URL")
        if not base:
            return None
        return cls(
            base_url=base,
            model=environment.get("RELATA_DEMO_MODEL") or "gpt-4o-mini",
            api_key=environment.get("OPENAI_API_KEY") or None,
            timeout_s=float(environment.get("RELATA_DEMO_REQUEST_TIMEOUT") or REAL_TIMEOUT_S),
        )

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, model={self.model!r})"

    @property
    def url(self) -> str:
        base = self.base_url.rstrip("/")
        return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Analysis:
    """What the model said of one piece of text."""

    summary: str
    keywords: tuple[str, ...]
    language: str


def ask(endpoint: Endpoint, text: str) -> Analysis:
    """One request. Raises httpx's errors as they are, and InvalidOutputError for a wrong structure."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    body = {
        "model": endpoint.model,
        "temperature": 0,
        "response_format": {"type": "json_object"},
        "messages": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}],
    }
    response = httpx.post(endpoint.url, json=body, headers=headers, timeout=endpoint.timeout_s)
    response.raise_for_status()
    return parse(response.text)


def parse(body: str) -> Analysis:
    """The analysis in a chat completion; InvalidOutputError names what is wrong, not what was said."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidOutputError("the answer is not a chat completion") from None
    try:
        answer = json.loads(_without_fence(str(content)))
    except ValueError:
        raise InvalidOutputError("the model's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise InvalidOutputError(f"the model's answer is a JSON {type(answer).__name__}, not an object")
    return Analysis(_text(answer, "summary"), _keywords(answer), _text(answer, "language").lower())


def _without_fence(content: str) -> str:
    content = content.strip()
    if content.startswith("```"):
        content = content.strip("`").removeprefix("json").strip()
    return content


def _text(answer: dict[str, Any], field: str) -> str:
    value = answer.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InvalidOutputError(f"the model's answer has no text in {field!r}")
    return " ".join(value.split())


def _keywords(answer: dict[str, Any]) -> tuple[str, ...]:
    value = answer.get("keywords")
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InvalidOutputError("the model's answer has no list of words in 'keywords'")
    return tuple(value[:6])


def combine(analyses: Sequence[Analysis]) -> Analysis | None:
    """A document's analysis from its pieces': first summary, commonest keywords and language."""
    if not analyses:
        return None
    keywords = Counter(word for analysis in analyses for word in analysis.keywords)
    language = Counter(analysis.language for analysis in analyses).most_common(1)[0][0]
    return Analysis(analyses[0].summary, tuple(word for word, _ in keywords.most_common(6)), language)
