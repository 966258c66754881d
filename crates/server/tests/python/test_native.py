"""SGLang's own interface, as its clients and routers call it."""

PROMPT = "The capital of France is"
PARAMS = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_text_and_ids(server):
    status, answer = server.request("/generate", {"text": PROMPT, "sampling_params": PARAMS, "model": None})
    assert status == 200 and "Paris" in answer["text"]
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == 8 and meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["e2e_latency"] > 0 and meta["prompt_tokens"] > 0
    ids = server.request("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    same = server.request("/generate", {"input_ids": ids, "sampling_params": PARAMS})[1]
    assert same["output_ids"] == answer["output_ids"]


def test_batches(server):
    status, answers = server.request("/generate", {"text": [PROMPT, "Hello"], "sampling_params": PARAMS})
    assert status == 200 and len(answers) == 2 and "Paris" in answers[0]["text"]


def test_streams_are_cumulative(server):
    whole = server.request("/generate", {"text": PROMPT, "sampling_params": PARAMS})[1]
    events = server.events("/generate", {"text": PROMPT, "sampling_params": PARAMS})
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    assert texts[-1] == whole["text"] and events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_logprobs(server):
    body = {"text": PROMPT, "sampling_params": PARAMS, "return_logprob": True, "logprob_start_len": 0,
            "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = server.request("/generate", body)[1]["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] and meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == 8
    for (value, token, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"]):
        assert value == max(entry[0] for entry in top) and isinstance(token, int) and isinstance(text, str)


def test_operators_find_their_way(server):
    for path in ("/health", "/health_generate", "/metrics"):
        if path != "/metrics":
            assert server.request(path, key=None)[0] == 200
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/loads", "/version"):
        assert server.request(path)[0] == 200, path
        assert server.request(path, key=None)[0] == 401, path
    assert server.request("/oscar/cache")[1]["bits_per_element"] > 0
    assert server.request("/flush_cache", {})[1]["success"]
    status, answer = server.request("/nowhere")
    assert status == 404 and set(answer["error"]) == {"message", "type", "param", "code"}
