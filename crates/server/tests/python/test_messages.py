"""`/v1/messages` by the official Anthropic client."""

import json

import anthropic
import pytest

from conftest import KEY

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {"name": "weather", "description": "The weather of a place",
           "input_schema": {"type": "object", "properties": {"place": {"enum": ["Rome", "Paris"]}},
                            "required": ["place"], "additionalProperties": False}}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)


def test_a_question_is_answered(claude, model):
    answer = claude.messages.create(model=model, messages=QUESTION, max_tokens=24, extra_body=GREEDY)
    assert answer.type == "message" and answer.role == "assistant" and answer.model == model
    assert [block.type for block in answer.content] == ["text"]
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0 and answer.usage.cache_creation_input_tokens == 0
    counted = claude.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_the_same_words_as_by_the_other_interface(claude, client, model):
    chat = client.chat.completions.create(
        model=model, temperature=0, max_tokens=24,
        messages=[{"role": "system", "content": "You answer in one word."}, *QUESTION])
    answer = claude.messages.create(model=model, system="You answer in one word.", messages=QUESTION, max_tokens=24,
                                    extra_body=GREEDY)
    assert answer.content[0].text == chat.choices[0].message.content


def test_a_stream_says_the_same(claude, model):
    settings = dict(model=model, messages=QUESTION, max_tokens=24, extra_body=GREEDY)
    whole = claude.messages.create(**settings)
    with claude.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in claude.messages.create(**settings, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert "content_block_start" in kinds and "content_block_delta" in kinds and "content_block_stop" in kinds


def test_a_tool_is_called_and_its_result_read(claude, model):
    settings = dict(model=model, tools=[WEATHER], max_tokens=200, extra_body=GREEDY)
    question = {"role": "user", "content": "How is the weather in Rome?"}
    choice = {"type": "tool", "name": "weather"}
    answer = claude.messages.create(**settings, messages=[question], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert (call.type, call.name) == ("tool_use", "weather") and call.input["place"] in ("Rome", "Paris")
    with claude.messages.stream(**settings, messages=[question], tool_choice=choice) as stream:
        pieces = [event.delta.partial_json for event in stream
                  if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]
        streamed = stream.get_final_message().content[-1]
    assert json.loads("".join(pieces)) == streamed.input == call.input
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}]}
    blocks = [block.model_dump() for block in answer.content]
    after = claude.messages.create(**settings, messages=[question, {"role": "assistant", "content": blocks}, result],
                                   tool_choice={"type": "none"})
    assert after.content
    # Neither tools nor the call and its result are missing from the prompt.
    alone = claude.messages.create(**{**settings, "max_tokens": 1}, messages=[question], tool_choice={"type": "none"})
    prompts = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in (alone, answer, after)]
    assert prompts[0] + 20 < min(prompts[1:]), prompts


def test_stop_sequences_limits_and_beginnings(claude, model):
    settings = dict(model=model, messages=[{"role": "user", "content": "Count from one to ten, with digits."}],
                    extra_body=GREEDY)
    short = claude.messages.create(**settings, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    whole = claude.messages.create(**settings, max_tokens=60)
    word = whole.content[0].text[5:7]
    stopped = claude.messages.create(**settings, max_tokens=60, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == whole.content[0].text.split(word)[0]
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    answer = claude.messages.create(model=model, messages=begun, max_tokens=8, extra_body=GREEDY)
    assert "Paris" in answer.content[0].text


def test_errors_are_the_clients_own(claude, server, model):
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=model, messages=[], max_tokens=5)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-none", messages=QUESTION, max_tokens=5)
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=model, messages=QUESTION, max_tokens=5)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        claude.messages.create(model=model, messages=[{"role": "user", "content": [image]}], max_tokens=5)


def test_a_stream_that_is_closed_is_given_up(claude, server, model):
    story = [{"role": "user", "content": "Tell me a very long story."}]
    with claude.messages.stream(model=model, messages=story, max_tokens=3000) as stream:
        next(iter(stream.text_stream))
        assert server.running() >= 0
    server.wait_until_idle()
