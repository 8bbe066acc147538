"""The stand-in endpoint over real HTTP, and what its client makes of each misbehaviour."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

httpx = pytest.importorskip("httpx")

from relata_celery.demo.analysis import Analysis, Endpoint, ask, combine, parse  # noqa: E402
from relata_celery.demo.standin import SEED, Behaviour, Rates, StandIn, describe  # noqa: E402
from relata_celery.domain.errors import InvalidOutputError  # noqa: E402

FRENCH = (
    "Les hommes naissent et demeurent libres et égaux en droits. Le but de toute association est la liberté."
)
Start = Callable[..., Endpoint]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a stand-in with the given rates and gives the endpoint that leads to it."""
    servers: list[StandIn] = []

    def _start(rates: Rates, timeout_s: float = 5.0, hang_s: float = 30.0) -> Endpoint:
        server = StandIn(rates=rates, latency_s=0.0, hang_s=hang_s)
        servers.append(server)
        server.start()
        return Endpoint(server.base_url, "stand-in", "secret-key", timeout_s)

    yield _start
    for server in servers:
        server.stop()
        server.stop()


def only(behaviour: str) -> Rates:
    rates = {"rate_limited": 0.0, "server_error": 0.0, "garbage": 0.0, "hang": 0.0}
    return Rates(**{**rates, behaviour: 101.0})


NONE = Rates(0, 0, 0, 0)


def test_an_answer_is_computed_from_the_text(start: Start) -> None:
    answer = ask(start(NONE), FRENCH)
    assert answer.language == "fr"
    assert answer.summary == "Les hommes naissent et demeurent libres et égaux en droits."
    assert "droits" in answer.keywords


def test_a_rate_limit_says_when_to_come_back(start: Start) -> None:
    with pytest.raises(httpx.HTTPStatusError) as raised:
        ask(start(only("rate_limited")), FRENCH)
    assert raised.value.response.status_code == 429
    assert raised.value.response.headers["Retry-After"] == "1"


def test_a_server_error_is_a_status_error(start: Start) -> None:
    with pytest.raises(httpx.HTTPStatusError) as raised:
        ask(start(only("server_error")), FRENCH)
    assert raised.value.response.status_code == 500


def test_garbage_is_an_invalid_output_that_does_not_repeat_what_was_said(start: Start) -> None:
    with pytest.raises(InvalidOutputError, match="not JSON") as raised:
        ask(start(only("garbage")), FRENCH)
    assert "oops" not in str(raised.value)


def test_a_hanging_endpoint_is_given_up_after_the_clients_timeout(start: Start) -> None:
    endpoint = start(only("hang"), timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        ask(endpoint, FRENCH)
    assert time.monotonic() - began < 5


def test_stopping_does_not_wait_for_hanging_requests() -> None:
    server = StandIn(rates=only("hang"), hang_s=60.0)
    server.start()
    with pytest.raises(httpx.TimeoutException):
        ask(Endpoint(server.base_url, "m", None, 0.1), FRENCH)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/models", {}, 404), ("/v1/chat/completions", {"messages": []}, 400)],
)
def test_what_is_no_completion_request_is_refused(
    start: Start, path: str, body: dict[str, object], status: int
) -> None:
    endpoint = start(NONE)
    assert httpx.post(endpoint.base_url + path, json=body).status_code == status


def test_the_same_seed_draws_the_same_fates_and_each_comes_within_fifty_requests() -> None:
    fates = [Rates().draw(SEED, number) for number in range(50)]
    assert fates == [Rates().draw(SEED, number) for number in range(50)]
    assert set(fates) == set(Behaviour)


def test_about_a_tenth_of_all_requests_is_met_with_misbehaviour() -> None:
    counts = Counter(Rates().draw(1, number) for number in range(5_000))
    assert 0.08 < 1 - counts[Behaviour.ANSWER] / 5_000 < 0.12


def test_met_counts_every_request(start: Start) -> None:
    server = StandIn(rates=NONE, latency_s=0.0)
    server.start()
    for _ in range(3):
        ask(Endpoint(server.base_url, "m", None, 5.0), FRENCH)
    server.stop()
    assert server.met() == {"answer": 3}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("It is the one that we have, and not the other.", "en"),
        ("Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind.", "de"),
        ("En un lugar de la Mancha, de cuyo nombre no quiero acordarme", "es"),
        ("Nel mezzo del cammin di nostra vita mi ritrovai per una selva oscura", "it"),
    ],
)
def test_the_language_is_guessed_by_stop_words(text: str, language: str) -> None:
    assert describe(text)["language"] == language


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"choices": []}',
        '{"choices": [{"message": {"content": "[1]"}}]}',
        '{"choices": [{"message": {"content": "{\\"summary\\": \\"a\\", \\"keywords\\": 3}"}}]}',
        '{"choices": [{"message": {"content": "{\\"keywords\\": [], \\"language\\": \\"en\\"}"}}]}',
        '{"choices": [{"message": {"content": null}}]}',
    ],
)
def test_an_answer_of_the_wrong_structure_is_invalid(body: str) -> None:
    with pytest.raises(InvalidOutputError):
        parse(body)


def test_a_fenced_answer_is_read() -> None:
    content = '```json\\n{\\"summary\\": \\"a\\", \\"keywords\\": [\\"b\\"], \\"language\\": \\"EN\\"}\\n```'
    assert parse(f'{{"choices": [{{"message": {{"content": "{content}"}}}}]}}') == Analysis("a", ("b",), "en")


def test_a_documents_analysis_is_made_of_its_pieces() -> None:
    pieces = [Analysis("first", ("a", "b"), "en"), Analysis("second", ("b",), "en"), Analysis("x", (), "fr")]
    assert combine(pieces) == Analysis("first", ("b", "a"), "en")
    assert combine([]) is None


@pytest.mark.parametrize("base", ["http://host", "http://host/", "http://host/v1", "http://host/v1/"])
def test_the_address_may_end_in_v1_or_not(base: str) -> None:
    endpoint = Endpoint.from_environment({"OPENAI_BASE_URL": base, "OPENAI_API_KEY": "sk-secret"})
    assert endpoint is not None
    assert endpoint.url == "http://host/v1/chat/completions"
    assert "sk-secret" not in repr(endpoint)


def test_the_demos_own_variable_wins_and_none_means_no_endpoint() -> None:
    both = {
        "OPENAI_BASE_URL": "http://a",
        "RELATA_DEMO_OPENAI_BASE_URL": "http://b",
        "RELATA_DEMO_MODEL": "m",
    }
    endpoint = Endpoint.from_environment(both)
    assert endpoint is not None
    assert (endpoint.base_url, endpoint.model) == ("http://b", "m")
    assert Endpoint.from_environment({}) is None
