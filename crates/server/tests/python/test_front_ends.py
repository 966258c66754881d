"""Requests that front ends send, recorded from the programs themselves.

`front_ends.json` has what each of them sent through a `Recorder` in front of `oscar serve smollm2`, cut down by `shortened`;
a request with no field that an earlier one lacks is left out, and numbers that a program made for its installation are zeros.
A request with `refused` asks for what is not there, in the field that the server names.
"""

import json
import pathlib
import urllib.error
import urllib.request

import pytest

from conftest import KEY
from recording import shortened

FRONT_ENDS = json.loads(pathlib.Path(__file__).with_name("front_ends.json").read_text())
# What limits an answer by its path; the first is the one that a request without any is given.
LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens", "n_predict"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
TOKENS = 4
# The last event of a stream.
ENDS = {b"[DONE]", "message_stop", "response.completed", "response.incomplete"}


def requests():
    for name, front_end in FRONT_ENDS.items():
        for number, request in enumerate(front_end["requests"], 1):
            yield pytest.param(request, id=f"{name} {number} {request['path']}")


def answerable(request, model):
    """The recorded body for the model that is there, with a short answer."""
    body = dict(request["body"])
    # Anthropic's clients have the names of features behind the path.
    limits = LIMITS[request["path"].partition("?")[0]]
    if "model" in body:
        body["model"] = model
    if not any(limit in body for limit in limits):
        body[limits[0]] = TOKENS
    for limit in limits:
        # Below zero is without a limit.
        if limit in body and not 0 <= body[limit] <= TOKENS:
            body[limit] = TOKENS
    return body


def ask(server, path, body):
    """Status and text of an answer, read to its end."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(server.url + path, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_what_was_recorded_is_short():
    assert shortened(FRONT_ENDS) == FRONT_ENDS


@pytest.mark.parametrize("request_", list(requests()))
def test_a_recorded_request_is_answered(request_, server, model):
    body = answerable(request_, model)
    status, answer = ask(server, request_["path"], body)
    if "refused" in request_:
        assert status == 400, "it is answered now: take `refused` out of front_ends.json"
        assert json.loads(answer)["error"]["param"] == request_["refused"]
        return
    assert status == 200, answer
    if not body.get("stream"):
        assert "error" not in json.loads(answer)
        return
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    last = events[-1] if events[-1] in ENDS else json.loads(events[-1])["type"]
    assert last in ENDS, events[-1]
    assert not any("error" in json.loads(event) for event in events if event != b"[DONE]")
