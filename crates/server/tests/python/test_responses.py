"""`/v1/responses` by the official OpenAI client."""

import json

import openai
import pytest

QUESTION = "What is the capital of France? Answer in one word."
WEATHER = {"type": "function", "name": "weather", "description": "The weather of a place", "strict": True,
           "parameters": {"type": "object", "properties": {"place": {"enum": ["Rome", "Paris"]}},
                          "required": ["place"], "additionalProperties": False}}


def test_a_question_is_answered(client, model):
    answer = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=24)
    assert answer.object == "response" and answer.model == model and answer.error is None
    assert answer.status in ("completed", "incomplete")
    assert "Paris" in answer.output_text
    assert [item.type for item in answer.output] == ["message"]
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24)
    assert answer.output_text == chat.choices[0].message.content


def test_a_stream_says_the_same(client, model):
    settings = dict(model=model, input=QUESTION, temperature=0, max_output_tokens=24)
    whole = client.responses.create(**settings)
    events = list(client.responses.create(**settings, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].type == f"response.{whole.status}"
    with client.responses.stream(**settings) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text
        # The client keeps a picture of its own; it takes only what ended by itself for final.
        if whole.status == "completed":
            assert stream.get_final_response().output_text == whole.output_text


def test_items_are_sent_back(client, model):
    items = [{"role": "user", "content": "My name is Ada. Say hello."}]
    settings = dict(model=model, instructions="You are brief.", temperature=0, max_output_tokens=40)
    first = client.responses.create(**settings, input=items)
    items += first.output
    items.append({"role": "user", "content": "What is my name?"})
    second = client.responses.create(**settings, input=items)
    chat = client.chat.completions.create(model=model, temperature=0, max_tokens=40, messages=[
        {"role": "system", "content": "You are brief."}, items[0],
        {"role": "assistant", "content": first.output_text}, items[-1]])
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens > first.usage.total_tokens


def test_a_function_is_called_and_its_output_read(client, model):
    items = [{"role": "user", "content": "How is the weather in Rome?"}]
    settings = dict(model=model, tools=[WEATHER], temperature=0, max_output_tokens=200)
    choice = {"type": "function", "name": "weather"}
    answer = client.responses.create(**settings, input=items, tool_choice=choice)
    call = answer.output[-1]
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["place"] in ("Rome", "Paris")
    events = list(client.responses.create(**settings, input=items, tool_choice=choice, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == json.loads(call.arguments)
    items += answer.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"})
    after = client.responses.create(**settings, input=items, tool_choice="none")
    assert after.output_text
    # Neither tools nor the call and its output are missing from the prompt.
    alone = client.responses.create(**{**settings, "max_output_tokens": 1}, input=items[:1], tool_choice="none")
    assert alone.usage.input_tokens + 20 < min(answer.usage.input_tokens, after.usage.input_tokens)


def test_an_answer_keeps_to_a_schema(client, model):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"],
              "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
    answer = client.responses.create(model=model, input=QUESTION, text=text, temperature=0, max_output_tokens=200)
    assert json.loads(answer.output_text)["city"] in ("Paris", "London")


def test_limits_and_refusals(client, model):
    short = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=3)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    for name, value in [("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("store", True),
                        ("background", True)]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=model, input="Hello", **{name: value})
        assert refused.value.param == name and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-none", input="Hello")
