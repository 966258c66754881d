"""Many clients, some of them badly behaved, and too little memory for them: what `oscar serve` must live through.

  python3 soak.py BINARY [--seconds 60] [--clients 64] [--seed 1]

Answers that come through the crowd must be those of an idle server, every refusal a documented one, memory and pages
as they were, and the end within its deadline. Standard library only.
"""

import argparse
import asyncio
import collections
import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time

from processes import Server, call, tiny_model

PAGE_BYTES = 32 << 10  # of the tiny model, bf16, all layers
PAGE_TOKENS = 64
SHUTDOWN_SECONDS = 1
# Wide of the mark for noise of the allocator, narrow for a leak: a kilobyte a request adds up to more.
GROWTH_BYTES = 8 << 20

# Encoded on threads of its own, of which the allocator keeps what the worst moment took.
LONG = json.dumps({"prompt": "too long " * 2000}).encode()


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


async def exchange(port, path, body, leave_after=None):
    """Status, headers and body of one request; a client that leaves early gets `None`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        method = "GET" if body is None else "POST"
        length = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{length}\r\n".encode()
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
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        whole, rest = rest, b""
        while whole:
            size, _, whole = whole.partition(b"\r\n")
            rest += whole[: int(size, 16)]
            whole = whole[int(size, 16) + 2:]
    return int(lines[0].split()[1]), headers, rest


def text_of(path, body, data):
    """What the model said."""
    if not body["stream"]:
        answer = json.loads(data)
        if path == "/generate":
            return answer["text"]
        choice = answer["choices"][0]
        return choice["message"]["content"] if "chat" in path else choice["text"]
    blocks = data.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], f"a stream ends with {blocks[-3:]}"
    parts = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert not any("error" in part for part in parts), parts[-1]
    if path == "/generate":
        return parts[-1]["text"]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return "".join((choice["delta"].get("content") or "") if "chat" in path else choice["text"] for choice in choices)


class Soak:
    def __init__(self, server, arguments):
        self.server = server
        self.random = random.Random(arguments.seed)
        self.clients = arguments.clients
        self.cases = cases(self.random)
        self.counts = collections.Counter()
        self.faults = []
        self.expected = {}

    async def ask(self, index):
        path, body = self.cases[index]
        status, headers, data = await exchange(self.server.port, path, json.dumps(body).encode())
        if status == 200:
            return text_of(path, body, data)
        error = json.loads(data)["error"]
        known = {429: "queue_full", 503: "shutting_down"}
        assert known.get(status) == error["code"] and "retry-after" in headers, f"{path}: {status} {error}"
        self.counts[f"refused {status}"] += 1
        return None

    async def ask_alone(self):
        """All answers of an idle server."""
        return {index: await self.ask(index) for index in range(len(self.cases))}

    async def turn(self):
        """One thing that a client does."""
        kind = self.random.random()
        index = self.random.randrange(len(self.cases))
        path, body = self.cases[index]
        if kind < 0.6:
            text = await self.ask(index)
            if text is None:
                await asyncio.sleep(self.random.uniform(0.05, 0.4))
                return
            assert text == self.expected[index], f"{path} {body}: {text!r} is not {self.expected[index]!r}"
            self.counts["answered"] += 1
        elif kind < 0.8:
            leave = self.random.choice(["half", 0, 1, 2, 301, 1000, 3001])
            await exchange(self.server.port, path, json.dumps({**body, "stream": True}).encode(), leave)
            self.counts["left"] += 1
        elif kind < 0.95:
            path, data, right = self.random.choice(BAD)
            status, _, answer = await exchange(self.server.port, path, data)
            assert status in right, f"{path} {data[:60]}: {status} {answer[:200]}"
            assert json.loads(answer)["error"]["message"], answer
            self.counts["bad"] += 1
        else:
            path = self.random.choice(["/metrics", "/oscar/cache", "/health", "/get_load", "/v1/models", "/v1/loads"])
            status, _, answer = await exchange(self.server.port, path, None)
            assert status == 200 and answer, f"{path}: {status}"
            self.counts["looked"] += 1

    async def client(self, until):
        while time.monotonic() < until:
            try:
                await self.turn()
            except Exception as fault:  # noqa: BLE001: whatever it is, it is a fault
                self.counts["fault"] += 1
                self.faults.append(repr(fault))
                if len(self.faults) > 20:
                    return

    async def watch(self, until, samples):
        while time.monotonic() < until:
            samples.append(resident(self.server.process.pid))
            await asyncio.sleep(0.5)

    async def load(self, seconds):
        """Resident sizes while all clients are at it."""
        until, samples = time.monotonic() + seconds, []
        await asyncio.gather(self.watch(until, samples), *[self.client(until) for _ in range(self.clients)])
        return samples

    async def idle(self):
        """Waits until nothing is in progress, and returns the picture of the cache."""
        deadline = time.monotonic() + 60
        while True:
            _, _, data = await exchange(self.server.port, "/oscar/cache", None)
            cache = json.loads(data)
            owned = [pool["request"] + pool["shared"] for pool in cache["pools"].values()]
            if cache["running"] + cache["prefilling"] + cache["queued"] + sum(owned) == 0:
                return cache
            assert time.monotonic() < deadline, f"requests or their pages are left: {cache}"
            await asyncio.sleep(0.1)

    async def run(self, seconds):
        self.expected = await self.ask_alone()
        assert len(set(self.expected.values())) > 20, "answers are too much alike to be compared"
        for _ in range(5):
            await asyncio.gather(*[exchange(self.server.port, "/v1/completions", LONG) for _ in range(self.clients)])
        await self.load(max(seconds / 5, 5))
        await self.idle()
        warm = resident(self.server.process.pid)
        self.counts.clear()
        samples = await self.load(seconds)
        cache = await self.idle()
        end = resident(self.server.process.pid)
        print("  ".join(f"{what} {count}" for what, count in sorted(self.counts.items())))
        quarter = max(len(samples) // 4, 1)
        early, late = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
        mebibytes = [f"{size / 2**20:.1f}" for size in (warm, early, late, end)]
        print("resident MiB: {} after warm-up, {} early, {} late, {} at the end".format(*mebibytes))
        assert not self.faults, "\n".join(self.faults)
        assert end - warm < GROWTH_BYTES and late - early < GROWTH_BYTES, "memory grows"
        for name, pool in cache["pools"].items():
            assert pool["free"] + pool["tree"] == pool["pages"], f"pages of {name} are lost: {pool}"
        metrics = (await exchange(self.server.port, "/metrics", None))[2].decode()
        preempted = float(re.search(r"^oscar_preemptions_total\S* (\S+)", metrics, re.MULTILINE).group(1))
        print(f"{preempted:.0f} preemptions, {cache['tree']['evicted']} pages evicted, hit rate {cache['hit_rate']:.2f}")
        assert preempted > 0 and cache["tree"]["evicted"] > 0, "there was no pressure: this run shows nothing"
        assert self.counts["answered"] > self.clients and self.counts["left"] > 0 and self.counts["bad"] > 0
        again = await self.ask_alone()
        assert again == self.expected, "an idle server no longer says what it said"

    async def shut_down(self):
        """SIGTERM while answers are in progress that take longer than they may."""
        body = {"prompt": "On and on", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 0}
        streams = [
            asyncio.create_task(exchange(self.server.port, "/v1/completions", json.dumps(body).encode()))
            for _ in range(8)
        ]
        while call(self.server.url, "/get_load")[1][0]["num_reqs"] < 8:
            await asyncio.sleep(0.05)
        begun = time.monotonic()
        ending = asyncio.get_running_loop().run_in_executor(None, self.server.stop, SHUTDOWN_SECONDS + 10)
        await ending
        seconds = time.monotonic() - begun
        whole = 0
        for stream in streams:
            status, _, data = await stream
            assert status == 200 and data.endswith(b"data: [DONE]\n\n"), data[-200:]
            whole += b'"finish_reason":"length"' in data
        print(f"ended {seconds:.1f} s after SIGTERM; {whole} of 8 long answers came to their end")
        assert seconds < SHUTDOWN_SECONDS + 5, "the end took too long"


def resident(pid):
    """Bytes of the process that are no mapped files."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) << 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv", default="bf16", help="cache type")
    arguments = parser.parse_args()
    # A request of this mix has 6 pages in the mean; there is room for a quarter of what all clients need.
    pages = arguments.clients * 6 // 4
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments.binary, tiny_model(pathlib.Path(folder) / "tiny", 2048), [
            "--served-model-name", "tiny", "--deterministic", "--kv-cache-dtype", arguments.kv,
            "--kv-memory", str(pages * PAGE_BYTES), "--max-running-requests", str(arguments.clients),
            "--max-queued-requests", str(arguments.clients // 2), "--shutdown-seconds", str(SHUTDOWN_SECONDS),
        ])
        soak = Soak(server, arguments)
        try:
            asyncio.run(soak.run(arguments.seconds))
            asyncio.run(soak.shut_down())
        except BaseException:
            print(server.tail(), file=sys.stderr)
            raise
        finally:
            server.kill()
    print("ok")


if __name__ == "__main__":
    main()
