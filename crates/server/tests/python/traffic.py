"""What the clients of the soak send: questions whose answers are known, mistakes, and requests that mean harm."""

import asyncio
import json

# Encoded on threads of its own, of which the allocator keeps what the worst moment took.
LONG = json.dumps({"prompt": "too long " * 2000}).encode()

JSON = "application/json"

PATHS = ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"]
# Interfaces that have these fields.
WITH_IGNORE_EOS = {"/generate", "/v1/completions", "/v1/chat/completions", "/completion"}
WITH_REGEX = {"/generate", "/v1/completions", "/v1/chat/completions"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yes", "no"]}}, "required": ["a"], "additionalProperties": False}
FORMATS = {
    "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "/completion": {"json_schema": SCHEMA},
}


def body_of(path, text, tokens, seed, shape):
    """A request for an answer of at most so many tokens: greedy without a seed, and free, by a schema, by an expression
    or up to one."""
    messages = [{"role": "user", "content": text}]
    drawn = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    if shape == "schema" and path in FORMATS:
        drawn |= FORMATS[path]
    elif shape in {"regex", "stop_regex"} and path in WITH_REGEX:
        drawn[shape] = "[a-z ]{20,30}" if shape == "regex" else "[a-z][0-9]"
    elif path in WITH_IGNORE_EOS:
        drawn["ignore_eos"] = True
    match path:
        case "/generate":
            return {"text": text, "sampling_params": {"max_new_tokens": tokens, **drawn}}
        case "/v1/completions":
            return {"prompt": text, "max_tokens": tokens, **drawn}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": tokens, **drawn}
        case "/completion":
            return {"prompt": text, "n_predict": tokens, **drawn}
        case _:
            return {"messages": messages, "max_tokens": tokens, **drawn}


def cases(random_numbers):
    """Requests whose answers are compared: every interface, greedy and seeded, short and long, alike and not."""
    prefixes = [
        f"{name} wrote this long letter, and everybody had to read it again and again. " * 6
        for name in ["Ada", "Bob", "Cleo", "Dan"]
    ]
    made = []
    for number in range(10):
        for path in PATHS:
            text = f"{random_numbers.choice(prefixes)[: random_numbers.randrange(40, 440)]} Question {number}?"
            tokens = random_numbers.choice([8, 40, 120])
            shape = random_numbers.choice(["free", "free", "schema", "regex", "stop_regex"])
            body = body_of(path, text, tokens, None if number % 2 else number, shape)
            made.append((path, {**body, "stream": number % 3 > 0}))
    return made


def questions(random_numbers):
    """Requests that draw no tokens, whose answers are compared as a whole."""
    made = []
    for number in range(4):
        texts = [f"Text {number}, line {line}: " + "on and on " * random_numbers.randrange(2, 12) for line in range(3)]
        made.append(("/v1/embeddings", {"input": texts}))
        made.append(("/v1/score", {"text_1": texts[0], "text_2": texts[1:]}))
        made.append(("/tokenize", {"content": texts[0]}))
        made.append(("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": texts[0]}]}))
    return made


def batches(random_numbers):
    """Several prompts in one request, whose answers are compared too."""
    made = []
    for number in range(4):
        texts = [f"Batch {number}, line {line}: " + "on and on " * random_numbers.randrange(4, 30) for line in range(3)]
        made.append(("/generate", {"text": texts, "stream": False, "sampling_params": {
            "max_new_tokens": 24, "ignore_eos": True, "temperature": 0}}))
        made.append(("/v1/completions", {"prompt": texts, "stream": False, "max_tokens": 24, "ignore_eos": True,
                                         "temperature": 0}))
    return made


def text_of(path, body, data):
    """What the model said; the texts of a batch are joined. Of requests that draw no tokens, what they ask for."""
    if "stream" not in body:
        answer = json.loads(data)
        return json.dumps(answer.get("data", answer))
    if not body["stream"]:
        return "\0".join(whole_texts(path, json.loads(data)))
    parts = events(path, data)
    match path:
        case "/generate":
            return parts[-1]["text"]
        case "/completion":
            return "".join(part["content"] for part in parts)
        case "/v1/messages":
            deltas = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
            return "".join(delta["text"] for delta in deltas)
        case "/v1/responses":
            return "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta")
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return "".join((choice["delta"].get("content") or "") if "chat" in path else choice["text"] for choice in choices)


def whole_texts(path, answer):
    match path:
        case "/generate":
            return [one["text"] for one in (answer if isinstance(answer, list) else [answer])]
        case "/completion":
            return [answer["content"]]
        case "/v1/messages":
            return [block["text"] for block in answer["content"]]
        case "/v1/responses":
            return [part["text"] for item in answer["output"] for part in item["content"]]
    return [choice["message"]["content"] if "chat" in path else choice["text"] for choice in answer["choices"]]


def events(path, data):
    """The events of a stream, which has ended as streams of its interface do."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == "", f"a stream ends with {blocks[-3:]}"
    lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    if path.startswith("/v1/") and "completions" in path or path == "/generate":
        assert lines.pop() == "data: [DONE]", f"a stream ends with {blocks[-3:]}"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    last = {"/completion": ("stop", [True]), "/v1/messages": ("type", ["message_stop"]),
            "/v1/responses": ("type", ["response.completed", "response.incomplete"])}.get(path)
    assert last is None or parts[-1][last[0]] in last[1], f"a stream ends with {blocks[-3:]}"
    assert not any(part.get("error") for part in parts), parts[-1]
    return parts


BAD = [
    # path, body, statuses that are right
    ("/v1/chat/completions", b'{"messages": [', {400}),
    ("/v1/chat/completions", b'{"messages": "hello"}', {400, 422}),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', {400}),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "model": "no-such"}', {404}),
    ("/v1/chat/completions", b"\xff\xfe{}", {400}),
    ("/v1/completions", LONG, {400}),
    ("/v1/completions", b'{"prompt": [99999999], "max_tokens": 4}', {400}),
    ("/v1/completions", b'{"prompt": "x", "regex": "(["}', {400}),
    ("/generate", b'{"sampling_params": {"max_new_tokens": 4}}', {400}),
    ("/no/such/path", b"{}", {404}),
]


def hostile():
    """Requests that mean harm: path, body, headers, the status that is right."""
    abort = b'{"abort_all": true}'
    message = b'{"role": "user", "content": "a"},'

    def messages(count):
        return b"[" + message * (count - 1) + message[:-1] + b"]"

    def chat(**fields):
        return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **fields}).encode()

    # Some 16 MB.
    most = messages(480_000)
    words = "w " * (7 << 20)
    ids = b"[" + b"3," * 2_000_000 + b"3]"
    texts = b"[" + b'"a",' * 4_000_000 + b'"a"]'
    nothing = {"anyOf": [{"$ref": "#/$defs/a"}] * 100}
    bodies = [
        # Lists that grow in memory.
        ("/generate", b'{"text": [' + b'"a",' * 60_000 + b'"a"]}'),
        ("/generate", b'{"text": ' + texts + b"}"),
        ("/generate", b'{"input_ids": ' + ids + b"}"),
        ("/v1/completions", b'{"prompt": [' + b'"a",' * 200_000 + b'"a"]}'),
        ("/v1/completions", b'{"prompt": ' + ids + b"}"),
        ("/v1/embeddings", b'{"input": ' + texts + b"}"),
        ("/v1/score", b'{"text_1": "a", "text_2": ' + texts + b"}"),
        ("/detokenize", b'{"tokens": ' + ids + b"}"),
        ("/v1/chat/completions", b'{"messages": ' + messages(20_000) + b"}"),
        ("/v1/chat/completions", b'{"messages": ' + messages(120_000) + b"}"),
        ("/v1/chat/completions", b'{"messages": ' + most + b"}"),
        ("/v1/messages", b'{"max_tokens": 4, "messages": ' + most + b"}"),
        ("/v1/messages/count_tokens", b'{"messages": ' + most + b"}"),
        ("/v1/responses", b'{"input": ' + most + b"}"),
        ("/apply-template", b'{"messages": ' + most + b"}"),
        ("/oscar/cache", b'{"messages": ' + most + b"}"),
        ("/v1/chat/completions", chat(tools=[{"type": "function", "function": {"name": "f"}}] * 100_000)),
        ("/v1/chat/completions", chat(**{f"x{index}": 0 for index in range(300_000)})),
        ("/v1/chat/completions", json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]}).encode()),
        # Long texts.
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": words}]}).encode()),
        ("/completion", json.dumps({"prompt": words}).encode()),
        ("/tokenize", json.dumps({"content": words}).encode()),
        ("/v1/chat/completions", chat(rid="a" * (1 << 20))),
        # Work that grows.
        ("/v1/completions", json.dumps({"prompt": ["a"] * 64, "n": 64, "max_tokens": 4}).encode()),
        ("/v1/chat/completions", chat(n=100_000)),
        ("/v1/chat/completions", chat(stop=[f"a{index}" for index in range(100_000)])),
        ("/v1/chat/completions", chat(logit_bias={str(index): 1 for index in range(60_000)})),
        ("/v1/chat/completions", chat(bad_words=[f"w{index}" for index in range(100_000)])),
        ("/v1/chat/completions", chat(allowed_token_ids=list(range(300_000)))),
        ("/v1/chat/completions", chat(stop_regex="(((((a{1,99}){1,99}){1,99}){1,99}){1,99})")),
        ("/v1/chat/completions", chat(json_schema={"$ref": "#/$defs/a", "$defs": {"a": nothing}})),
        ("/v1/chat/completions", chat(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000)),
        ("/v1/chat/completions", b'{"messages": ' + b"[" * 100_000),
        ("/v1/chat/completions", chat(chat_template_kwargs={"messages": []})),
    ]
    return [
        # From web pages of others.
        ("/abort_request", abort, {"content-type": "text/plain"}, 415),
        ("/abort_request", abort, {"content-type": JSON, "origin": "http://evil.example"}, 403),
        ("/flush_cache", b"{}", {"content-type": JSON, "sec-fetch-site": "cross-site"}, 403),
        ("/flush_cache", None, {}, 415),
        ("/v1/models", None, {"host": "rebound.example"}, 403),
        ("/v1/completions", b'{"prompt": "a"}', {"content-type": JSON, "origin": "http://evil.example"}, 403),
        # Headers beyond the limits, in number and in bytes.
        ("/v1/completions", b'{"prompt": "a"}', {"content-type": JSON, **{f"x-{index}": "a" for index in range(200)}}, 431),
        ("/v1/completions", b'{"prompt": "a"}', {"content-type": JSON, "x-long": "a" * 300_000}, 431),
        *((path, body, {"content-type": JSON}, 400) for path, body in bodies),
    ]


async def exchange(port, path, body, leave_after=None, headers=None, pause=0):
    """Status, headers and body of one request; a client that leaves early gets `None`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        method = "GET" if body is None else "POST"
        fields = {"host": "localhost", "connection": "close"}
        if body is not None:
            fields |= {"content-length": len(body)} | ({"content-type": JSON} if headers is None else {})
        lines = [f"{name}: {value}\r\n" for name, value in (fields | (headers or {})).items()]
        head = f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()
        if leave_after == "half":
            writer.write(head + (body or b"")[: len(body or b"") // 2])
            await writer.drain()
            await asyncio.sleep(pause)
            return None
        writer.write(head + (body or b""))
        await writer.drain()
        if leave_after is not None:
            # Some leave at once, some while they are served. Half of them say nothing, and the rest reset.
            await asyncio.wait_for(reader.read(leave_after), 60) if leave_after else None
            if leave_after % 2:
                writer.transport.abort()
            return None
        data = await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    if fields.get("transfer-encoding") == "chunked":
        whole, rest = rest, b""
        while whole:
            size, _, whole = whole.partition(b"\r\n")
            rest += whole[: int(size, 16)]
            whole = whole[int(size, 16) + 2:]
    return int(lines[0].split()[1]), fields, rest
