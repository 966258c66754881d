"""What the clients of the soak send: questions whose answers are known, mistakes, and requests that mean harm."""

import asyncio
import json

# Encoded on threads of its own, of which the allocator keeps what the worst moment took.
LONG = json.dumps({"prompt": "too long " * 2000}).encode()

JSON = "application/json"


def cases(random_numbers):
    """Requests whose answers are compared: every interface, greedy and seeded, short and long, alike and not."""
    prefixes = [
        f"{name} wrote this long letter, and everybody had to read it again and again. " * 6
        for name in ["Ada", "Bob", "Cleo", "Dan"]
    ]
    made = []
    for number in range(32):
        text = f"{random_numbers.choice(prefixes)[: random_numbers.randrange(40, 440)]} Question {number}?"
        tokens = random_numbers.choice([8, 40, 120])
        drawn = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        stream = number % 3 > 0
        kind = number % 4
        if kind == 0:
            body = {"text": text, "stream": stream, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True,
                    "temperature": drawn["temperature"], "sampling_seed": drawn.get("seed")}}
            made.append(("/generate", body))
        elif kind == 1:
            body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "stream": stream, **drawn}
            made.append(("/v1/completions", body))
        else:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True,
                    "stream": stream, **drawn}
            made.append(("/v1/chat/completions", body))
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
    """What the model said; the texts of a batch are joined."""
    if not body["stream"]:
        answer = json.loads(data)
        if path == "/generate":
            return "\0".join(one["text"] for one in (answer if isinstance(answer, list) else [answer]))
        said = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in answer["choices"]]
        return "\0".join(said)
    blocks = data.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], f"a stream ends with {blocks[-3:]}"
    parts = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert not any("error" in part for part in parts), parts[-1]
    if path == "/generate":
        return parts[-1]["text"]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return "".join((choice["delta"].get("content") or "") if "chat" in path else choice["text"] for choice in choices)


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
    many_messages = b'{"messages": [' + message * 20_000 + message[:-1] + b"]}"
    many_values = b'{"messages": [' + message * 120_000 + message[:-1] + b"]}"
    # Some 16 MB each.
    most_messages = b'{"messages": [' + message * 480_000 + message[:-1] + b"]}"
    most_texts = b'{"text": [' + b'"a",' * 4_000_000 + b'"a"]}'
    words = json.dumps({"messages": [{"role": "user", "content": "w " * (7 << 20)}]}).encode()
    many_parts = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]}).encode()
    kwargs = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}'
    return [
        # From web pages of others.
        ("/abort_request", abort, {"content-type": "text/plain"}, 415),
        ("/abort_request", abort, {"content-type": JSON, "origin": "http://evil.example"}, 403),
        ("/flush_cache", b"{}", {"content-type": JSON, "sec-fetch-site": "cross-site"}, 403),
        ("/flush_cache", None, {}, 415),
        ("/v1/models", None, {"host": "rebound.example"}, 403),
        ("/v1/completions", b'{"prompt": "a"}', {"content-type": JSON, "origin": "http://evil.example"}, 403),
        # Bodies that grow in memory.
        ("/generate", b'{"text": [' + b'"a",' * 60_000 + b'"a"]}', {"content-type": JSON}, 400),
        ("/v1/completions", b'{"prompt": [' + b'"a",' * 200_000 + b'"a"]}', {"content-type": JSON}, 400),
        ("/v1/chat/completions", many_messages, {"content-type": JSON}, 400),
        ("/v1/chat/completions", many_values, {"content-type": JSON}, 400),
        ("/v1/chat/completions", most_messages, {"content-type": JSON}, 400),
        ("/generate", most_texts, {"content-type": JSON}, 400),
        ("/v1/chat/completions", words, {"content-type": JSON}, 400),
        ("/v1/chat/completions", many_parts, {"content-type": JSON}, 400),
        ("/v1/chat/completions", b'{"messages": ' + b"[" * 100_000, {"content-type": JSON}, 400),
        ("/v1/chat/completions", kwargs, {"content-type": JSON}, 400),
    ]


async def exchange(port, path, body, leave_after=None, headers=None):
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
