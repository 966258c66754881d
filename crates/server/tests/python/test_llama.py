"""llama.cpp's own interface, as editors and scripts call it."""

import json
import urllib.request

from conftest import KEY

PROMPT = "The capital of France is"
SETTINGS = {"n_predict": 8, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "id_slot": -1}


def stream(server, body):
    """The events of a stream, which ends without a mark."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + "/completion", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return [json.loads(line[len(b"data: "):]) for line in response if line.startswith(b"data: ")]


def test_a_prompt_is_continued(server):
    status, answer = server.request("/completion", {"prompt": PROMPT, **SETTINGS})
    assert status == 200 and "Paris" in answer["content"] and answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 8 and answer["timings"]["predicted_n"] == 8
    events = stream(server, {"prompt": PROMPT, **SETTINGS})
    assert "".join(event["content"] for event in events) == answer["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    body = {"prompt": PROMPT, **SETTINGS, "ignore_eos": False, "grammar": 'root ::= " Rome" | " Oslo"', "n_predict": 20}
    assert server.request("/completion", body)[1]["content"] in (" Rome", " Oslo")
    status, error = server.request("/completion", {"prompt": PROMPT, **SETTINGS, "mirostat": 2})
    assert status == 400 and error["error"]["param"] == "mirostat"


def test_text_and_tokens(server):
    tokens = server.request("/tokenize", {"content": PROMPT})[1]["tokens"]
    pieces = server.request("/tokenize", {"content": PROMPT, "with_pieces": True})[1]["tokens"]
    assert [piece["id"] for piece in pieces] == tokens and "".join(piece["piece"] for piece in pieces) == PROMPT
    assert server.request("/detokenize", {"tokens": tokens})[1]["content"] == PROMPT


def test_what_clients_ask_about(server):
    props = server.request("/props")[1]
    assert props["default_generation_settings"]["n_ctx"] == 4096 and "<|im_start|>" in props["chat_template"]
    assert len(server.request("/slots")[1]) == props["total_slots"] == 64
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    assert "Hello" in server.request("/apply-template", chat)[1]["prompt"]
