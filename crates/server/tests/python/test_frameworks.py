"""Chats, streams, tools and structured answers by libraries on top of the official client, and what they send."""

import asyncio
import json
import os
import pathlib
from typing import Literal

# It would ask the internet for prices of models.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import instructor  # noqa: E402
import litellm  # noqa: E402
import openai  # noqa: E402
import pydantic_ai  # noqa: E402
import pytest  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.output import NativeOutput  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from conftest import KEY  # noqa: E402
from recording import Recorder  # noqa: E402

# Fields at the top level of what each library sends, by path. A version that sends others fails here, so that the server
# is asked about them before its users are.
FIELDS = pathlib.Path(__file__).with_name("client_fields.json")

QUESTION = "What is the capital of France? Answer in one word."
MESSAGES = [{"role": "user", "content": QUESTION}]
# The answers of a small model are as long as they may be.
DRAWN = {"temperature": 0, "max_tokens": 120}


class Place(BaseModel):
    """A city and its country."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)
    country: Literal["France", "Italy"]


def weather(place: Literal["Rome", "Paris"]) -> str:
    """The weather in a place.

    Args:
        place: Name of the place.
    """
    return f"sunny in {place}"


WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather in a place", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "enum": ["Rome", "Paris"]}}, "required": ["place"],
    "additionalProperties": False}}}


@pytest.fixture
def sent(request, server):
    """An address in front of the server; what is sent there is compared with the list at the end of the test."""
    recorder = Recorder(server.url)
    yield recorder
    recorder.close()
    library = request.node.name.removeprefix("test_").split("_")[0]
    known = json.loads(FIELDS.read_text())[library]
    assert recorder.bodies, "nothing was sent"
    for path, body in recorder.bodies:
        unknown = sorted(set(body) - set(known[path]))
        assert not unknown, f"{library} sends {unknown} to {path}: add them to {FIELDS.name}"


def the_place(place):
    assert isinstance(place, Place) and place.country in ("France", "Italy")


# litellm

@pytest.fixture
def lite(sent, model):
    settings = {"model": f"openai/{model}", "api_base": sent.url + "/v1", "api_key": KEY, "num_retries": 0, **DRAWN}
    return lambda **change: litellm.completion(**{**settings, "messages": MESSAGES, **change})


def test_litellm_chat_and_stream(lite):
    answer = lite(seed=1, stop=["\n\n"])
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(lite(seed=1, stop=["\n\n"], stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content


def test_litellm_tools(lite):
    choice = lite(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"place"}


def test_litellm_structured(lite):
    the_place(Place.model_validate_json(lite(response_format=Place).choices[0].message.content))


def test_litellm_wrong_key(lite):
    with pytest.raises(litellm.AuthenticationError):
        lite(api_key="wrong")


# langchain

@pytest.fixture
def chain(sent, model):
    settings = {"model": model, "base_url": sent.url + "/v1", "api_key": KEY, "max_retries": 0, **DRAWN}
    return lambda **change: ChatOpenAI(**{**settings, **change})


def test_langchain_chat_and_stream(chain):
    chat = chain(seed=1, stop=["\n\n"])
    answer = chat.invoke([("system", "You answer in one word."), ("human", QUESTION)])
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    pieces = [piece.content for piece in chat.stream([("system", "You answer in one word."), ("human", QUESTION)])]
    assert "".join(pieces) == answer.content and len(pieces) > 1


def test_langchain_tools(chain):
    call = chain().bind_tools([weather], tool_choice="weather").invoke("How is the weather in Rome?").tool_calls[0]
    assert call["name"] == "weather" and set(call["args"]) == {"place"}


def test_langchain_structured(chain):
    for method in ("json_schema", "function_calling"):
        the_place(chain().with_structured_output(Place, method=method).invoke(QUESTION))


def test_langchain_wrong_key(chain):
    with pytest.raises(openai.AuthenticationError):
        chain(api_key="wrong").invoke(QUESTION)


# instructor

@pytest.fixture
def instructed(sent, model):
    def ask(mode, api_key=KEY, **change):
        client = openai.OpenAI(base_url=sent.url + "/v1", api_key=api_key, max_retries=0, timeout=120)
        client = instructor.from_openai(client, mode=mode)
        settings = {"model": model, "messages": MESSAGES, "response_model": Place, "max_retries": 0, **DRAWN}
        return client.chat.completions.create(**{**settings, **change})

    return ask


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_instructor_structured(instructed, mode):
    the_place(instructed(mode))


def test_instructor_chat_and_stream(instructed):
    # Without a model of the answer it is the official client.
    answer = instructed(instructor.Mode.TOOLS, response_model=None)
    assert "Paris" in answer.choices[0].message.content
    parts = list(instructed(instructor.Mode.TOOLS, response_model=instructor.Partial[Place], stream=True))
    the_place(Place.model_validate(parts[-1].model_dump()))


def test_instructor_wrong_key(instructed):
    with pytest.raises(Exception) as caught:
        instructed(instructor.Mode.TOOLS, api_key="wrong")
    assert "401" in str(caught.value)


# pydantic-ai

@pytest.fixture
def agent(sent, model):
    def make(api_key=KEY, **options):
        provider = OpenAIProvider(base_url=sent.url + "/v1", api_key=api_key)
        return pydantic_ai.Agent(
            OpenAIChatModel(model, provider=provider), model_settings={**DRAWN, "seed": 1}, retries=0, **options)

    return make


def test_pydantic_chat_and_stream(agent):
    answer = agent(instructions="You answer in one word.").run_sync(QUESTION)
    assert answer.output

    async def stream():
        async with agent(instructions="You answer in one word.").run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(stream())
    assert "".join(pieces) == answer.output


def test_pydantic_structured(agent):
    # By a call of a tool, which is demanded, and by a schema.
    the_place(agent(output_type=Place).run_sync(QUESTION).output)
    the_place(agent(output_type=NativeOutput(Place)).run_sync(QUESTION).output)


def test_pydantic_tools(agent, sent):
    helper = agent(output_type=Place, tools=[weather])
    the_place(helper.run_sync(QUESTION).output)
    assert {tool["function"]["name"] for tool in sent.bodies[0][1]["tools"]} == {"weather", "final_result"}


def test_pydantic_wrong_key(agent):
    with pytest.raises(ModelHTTPError) as caught:
        agent(api_key="wrong").run_sync(QUESTION)
    assert caught.value.status_code == 401
