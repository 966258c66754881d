"""Chats by the official client."""

import asyncio
import json

import openai
import pytest

from conftest import KEY

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def text(answer):
    return answer.choices[0].message.content


def test_a_question_is_answered(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in text(answer)
    assert answer.object == "chat.completion" and answer.model == model
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.system_fingerprint


def test_a_stream_says_the_same(client, model):
    settings = dict(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**settings)
    stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text(whole)
    assert sum(bool(piece) for piece in pieces) > 1 or whole.usage.completion_tokens <= 2
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finished = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert finished[-1] == whole.choices[0].finish_reason and set(finished[:-1]) == {None}


def test_messages_come_in_parts_and_roles(client, model):
    messages = [
        {"role": "developer", "content": "You answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "And of Italy?"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_completion_tokens=16)
    assert text(answer)


def test_choices_and_seeds(client, model):
    messages = [{"role": "user", "content": "Tell me a story."}]
    settings = dict(model=model, messages=messages, temperature=1.0, max_tokens=20, n=3, seed=11)

    def ask(tenant, **change):
        # A prompt from the cache differs in the last bit from a computed one, so each answer starts without.
        return client.chat.completions.create(**{**settings, **change}, extra_body={"cache_salt": tenant})

    first = ask("one")
    second = ask("two")
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    other = ask("three", seed=12)
    assert texts != [choice.message.content for choice in other.choices]
    streamed = ["", "", ""]
    for chunk in ask("four", stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        # Greedy: the token that was drawn is the likeliest.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace").startswith(text(answer)[:4])


def test_stop_and_bias(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    stopped = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=24, stop=["Paris"])
    assert text(stopped) == text(whole).split("Paris")[0] and stopped.choices[0].finish_reason == "stop"
    first = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=1, logprobs=True).choices[0].logprobs.content[0]
    token = client.post("/tokenize", body={"prompt": first.token, "add_special_tokens": False}, cast_to=dict)["tokens"]
    banned = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=1, logprobs=True,
        logit_bias={str(token[0]): -100}).choices[0].logprobs.content[0]
    assert banned.token != first.token


def test_a_conversation_is_cached(client, model):
    messages = [{"role": "user", "content": "Count slowly. " * 60}]
    for turn in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        if turn > 0:
            assert cached > 0.8 * answer.usage.prompt_tokens, (cached, answer.usage)
        messages += [{"role": "assistant", "content": text(answer)}, {"role": "user", "content": "Go on."}]


def test_tools_are_taken(client, model):
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather in a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "How is the weather in Rome?"}], tools=[tool],
        temperature=0, max_tokens=40)
    message = answer.choices[0].message
    assert message.content is not None or message.tool_calls
    for call in message.tool_calls or []:
        assert call.type == "function" and call.function.name == "weather"


def test_a_call_can_be_demanded(client, model):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"place": {"type": "string", "maxLength": 20}}, "required": ["place"],
        "additionalProperties": False}}}
    settings = dict(
        model=model, messages=[{"role": "user", "content": "How is the weather in Rome?"}], tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}}, temperature=0, max_tokens=120)
    choice = client.chat.completions.create(**settings).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"place"}
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**settings, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert name == "weather" and json.loads(arguments) == json.loads(call.function.arguments)


def test_answers_fit_a_schema(client, model):
    schema = {"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "enum": ["France", "Italy"]}},
        "required": ["city", "country"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, response_format=form, temperature=0, max_tokens=120)
    place = json.loads(text(answer))
    assert set(place) == {"city", "country"} and place["country"] in ("France", "Italy")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=QUESTION, response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert caught.value.param == "response_format.json_schema.schema"


def test_closing_a_stream_gives_the_request_up(server, client, model):
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Write a very long story."}], stream=True,
        max_tokens=3000, extra_body={"ignore_eos": True})
    for _, _chunk in zip(range(3), stream):
        pass
    server.wait_until_running(1)
    stream.close()
    server.wait_until_idle()


def test_many_at_a_time(server, model):
    async def ask(client, number):
        messages = [{"role": "user", "content": f"Write about the number {number}."}]
        settings = dict(model=model, messages=messages, max_tokens=12, extra_body={"ignore_eos": True})
        if number % 2:
            answer = await client.chat.completions.create(**settings)
            return answer.usage.completion_tokens
        stream = await client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
        return [chunk.usage.completion_tokens async for chunk in stream if chunk.usage][-1]

    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(main()) == [12] * 64
    server.wait_until_idle()


@pytest.mark.parametrize("change, error, param", [
    ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     openai.BadRequestError, "messages[0].content[0]"),
    ({"n": 1000}, openai.BadRequestError, "n"),
    ({"extra_body": {"kv_precision": "nothing"}}, openai.BadRequestError, "kv_precision"),
])
def test_errors_have_their_type(client, model, change, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, "max_tokens": 4, **change})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.response.headers["x-request-id"]


def test_a_prompt_that_does_not_fit(client, model):
    messages = [{"role": "user", "content": "word " * 6000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=messages)
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key(server, model):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_client_of_a_broken_stream_is_told(server, client, model):
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, max_tokens=3000,
        extra_body={"ignore_eos": True, "rid": "to-be-aborted"})
    reasons = []
    for chunk in stream:
        if len(reasons) == 3:
            assert server.request("/abort_request", {"rid": "to-be-aborted"})[1]["aborted"] == 1
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "abort"
