"""What clients of ``fer serve`` see: OpenAI's form, clear refusals, and an end of what nobody waits for any more."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.keeper import wait_until
from tests.support.processes import Children
from tests.support.serve_engine import CONTEXT, VOCABULARY, expected
from tests.support.serving import LIMIT_S, Service, Stream

BODY_LIMIT = 100_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests here: it has to outlive each of them."""
    children, folder = Children(), tmp_path_factory.mktemp("serve")
    made = Service(children, folder, body_limit=BODY_LIMIT, requests=16, env={"FER_RUNTIME_DIR": str(folder / "r")})
    try:
        made.until("active")
        yield made
        assert made.status()["restarts"] == 0, made.log.read_text()
        assert made.end() == 0
    finally:
        children.end()


def test_the_model_is_listed(service: Service) -> None:
    listed = service.ask("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert service.ask("/v1/models/tiny").json["object"] == "model"
    assert service.ask("/v1/models/other").json["error"]["code"] == "model_not_found"


def test_a_completion(service: Service) -> None:
    reply = service.complete("hello", 12)
    assert reply.status == 200 and reply.json["object"] == "text_completion" and reply.json["model"] == "tiny"
    assert reply.text == expected("hello", 12)
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


@pytest.mark.parametrize("prompt", [list(b"hello"), ["hello"]], ids=["token ids", "a list of one"])
def test_other_forms_of_a_prompt(service: Service, prompt: Any) -> None:
    assert service.complete(prompt, 12).text == expected("hello", 12)


def test_a_completion_without_max_tokens_has_sixteen(service: Service) -> None:
    assert service.ask("/v1/completions", {"model": "tiny", "prompt": "hello"}).text == expected("hello", 16)


def test_a_stop_text_ends_the_answer_before_it(service: Service) -> None:
    whole = expected("hello", 40)
    for given in (whole[20:23], ["never", whole[20:23]]):
        reply = service.complete("hello", 40, stop=given)
        assert reply.text == whole[: whole.index(whole[20:23])] and reply.json["choices"][0]["finish_reason"] == "stop"
    stream = service.stream("hello", 40, stop=whole[20:23]).rest()
    assert stream.text == whole[: whole.index(whole[20:23])] and stream.reason == "stop"


def test_a_chat(service: Service) -> None:
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    prompt = "system: be brief\nuser: what now?\n"
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 9}
    reply = service.ask("/v1/chat/completions", asked)
    assert reply.json["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected(prompt, 9),
        "refusal": None,
    }
    stream = Stream(service, {**asked, "stream": True}, "/v1/chat/completions")
    chunks = list(stream)
    assert stream.text == expected(prompt, 9)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_may_fill_the_context(service: Service) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (CONTEXT - 20)}]}
    usage = service.ask("/v1/chat/completions", asked).json["usage"]
    assert usage["total_tokens"] == CONTEXT


def test_the_form_of_a_stream(service: Service) -> None:
    stream = service.stream("hello", 5, stream_options={"include_usage": True})
    chunks = list(stream)
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.lines[-1] == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 5 + ["length"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("logprobs", 1),
        ("echo", True),
        ("suffix", "x"),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 1),
        ("tools", [{}]),
        ("grammar", "x"),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("prompt", ["a", "b"]),
        ("prompt", {"a": 1}),
        ("prompt", [-1]),
        ("prompt", [VOCABULARY]),
        ("prompt", ""),
        ("stream_options", {"x": 1}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(service: Service, field: str, value: Any) -> None:
    reply = service.ask("/v1/completions", {"model": "tiny", "prompt": "hello", field: value})
    error = reply.json["error"]
    assert reply.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == field and error["message"]


def test_parameters_that_ask_for_nothing_are_accepted(service: Service) -> None:
    neutral = {"temperature": 0, "top_p": 1.0, "n": 1, "echo": False, "logprobs": None, "user": "me", "seed": 3}
    assert service.complete("hello", 5, **neutral).text == expected("hello", 5)


def test_a_prompt_that_does_not_fit_is_refused(service: Service) -> None:
    reply = service.complete("x" * CONTEXT, 1)
    assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"
    assert service.complete("hello", CONTEXT).status == 400


def test_an_unknown_model_is_refused(service: Service) -> None:
    reply = service.ask("/v1/completions", {"model": "gpt-9", "prompt": "hello"})
    assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b"[" * 50_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 50_000,
        b'{"prompt": "no model"}',
    ],
    ids=["empty", "cut off", "list", "text", "bytes", "half a character", "deep", "deep prompt", "no model"],
)
def test_malformed_bodies_are_refused(service: Service, body: bytes) -> None:
    reply = service.ask("/v1/completions", body)
    assert reply.status == 400 and reply.json["error"]["message"]


def test_a_body_that_is_too_large_is_refused(service: Service) -> None:
    reply = service.ask("/v1/completions", b" " * (BODY_LIMIT + 1))
    assert reply.status == 413 and reply.json["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_say_how_large_it_is_is_bounded_too(service: Service) -> None:
    connection = http.client.HTTPConnection(*service.place, timeout=LIMIT_S)
    connection.request("POST", "/v1/completions", iter([b" " * 60_000] * 3), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_errors_of_the_server_itself_have_the_same_form(service: Service) -> None:
    assert service.ask("/v2/other").json["error"]["message"].startswith("GET /v2/other")
    assert service.ask("/v1/completions").status == 405
    assert service.ask("/v1/completions").json["error"]["type"] == "invalid_request_error"


def in_flight(service: Service) -> int:
    return int(service.status()["requests"]["in_flight"])


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_answer(service: Service, streamed: bool) -> None:
    before = made(service)
    if streamed:
        service.stream("gone", 450).read(5).close()
    else:
        body = json.dumps({"model": "tiny", "prompt": "gone", "max_tokens": 450}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(service.place, LIMIT_S) as sock:
            sock.sendall(head + body)
            wait_until(lambda: in_flight(service) == 1, "the request", LIMIT_S)
    wait_until(lambda: in_flight(service) == 0, "its end", LIMIT_S)
    assert made(service) - before < 450


def made(service: Service) -> float:
    lines = service.ask("/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("fer_generated_tokens_total "))


def test_many_clients_at_once_get_their_own_answers(service: Service) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = service.stream(f"client {number}", 20 + 9 * number).rest().text

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(LIMIT_S)
    assert found == {number: expected(f"client {number}", 20 + 9 * number) for number in range(10)}


def test_a_full_queue_says_so(service: Service) -> None:
    streams = [service.stream("full", 400) for _ in range(16)]
    reply = service.complete("hello", 5)
    for stream in streams:
        stream.close()
    assert reply.status == 429 and reply.json["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["Retry-After"]) > 0
    wait_until(lambda: in_flight(service) == 0, "all ends", LIMIT_S)
    assert service.complete("hello", 5).text == expected("hello", 5)


def test_health_status_and_metrics(service: Service) -> None:
    assert [service.ask(f"/health/{what}").status for what in ("live", "ready", "active")] == [200] * 3
    status = service.status()
    assert status["members"][0]["recovery"]["stages"]["weights"]["path"] == "attached"
    assert status["members"][0]["recovery"]["total_s"] > 0
    assert service.ask("/v1/completions", {"model": "gpt-9", "prompt": "hello"}).status == 404
    text = service.ask("/metrics").body.decode()
    for line in ('fer_state{state="active"} 1.0', 'fer_members{role="active"} 1.0', "fer_restarts_total 0.0"):
        assert line in text.splitlines()
    assert 'fer_requests_total{code="404",endpoint="completions"}' in text


def test_no_socket_of_the_service_is_open_to_others(service: Service) -> None:
    folder = next((service.log.parent / "r").glob("serve-*"))
    assert folder.stat().st_mode & 0o777 == 0o700
    sockets = list(folder.iterdir())
    assert {"admin.sock"} < {path.name for path in sockets}
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}
