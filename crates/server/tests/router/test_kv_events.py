"""Cache events as routers read them: ZeroMQ's own library, and msgpack structs with SGLang's fields."""

import concurrent.futures
import hashlib
import os
import time
from typing import Optional, Union

import msgspec
import pytest
import zmq

from processes import Server, call, tiny_model

PAGE = 64


class Stored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str] = None


class Removed(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: Optional[str] = None


class Cleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Union[Stored, Removed, Cleared]]
    attn_dp_rank: Optional[int] = None


def chain(token_ids, parent=b""):
    """Numbers of the full pages of a prompt: SHA-256 over the page before and the tokens, its first eight bytes."""
    numbers = []
    for start in range(0, len(token_ids) - PAGE + 1, PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in token_ids[start:start + PAGE])
        parent = hashlib.sha256(parent + page).digest()
        numbers.append(int.from_bytes(parent[:8], "big", signed=True))
    return numbers


class View:
    """What a router knows of a server."""

    def __init__(self):
        self.blocks = {}
        self.next = None
        self.removed = self.cleared = self.gaps = 0

    def hear(self, number, payload):
        number = int.from_bytes(number, "big")
        self.gaps += self.next is not None and number != self.next
        self.next = number + 1
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert abs(batch.ts - time.time()) < 600 and batch.attn_dp_rank == 0
        for event in batch.events:
            if isinstance(event, Stored):
                assert event.block_size == PAGE and event.lora_id is None
                assert len(event.token_ids) == PAGE * len(event.block_hashes)
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                for index, block in enumerate(event.block_hashes):
                    assert block not in self.blocks
                    self.blocks[block] = (parent, event.token_ids[PAGE * index:PAGE * (index + 1)])
                    parent = block
            elif isinstance(event, Removed):
                self.removed += len(event.block_hashes)
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self.cleared += 1
                self.blocks.clear()


class Subscriber:
    """A SUB socket, and a DEALER for what came before it was there."""

    def __init__(self, server, context):
        info = call(server.url, "/server_info")[1]["kv_events"]
        assert info["publisher"] == "zmq" and info["block_size"] == PAGE and info["dp_size"] == 1
        self.server = server
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(info["topic"])
        self.socket.connect(f"tcp://{info['endpoint_host']}:{info['endpoint_port_base']}")
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(f"tcp://{info['endpoint_host']}:{info['replay_port_base']}")
        self.view = View()

    def catch_up(self, start=0):
        """Asks for everything from a number on."""
        self.replay.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            assert self.replay.poll(20_000), "no replay"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return
            self.view.hear(number, payload)

    def follow(self, holds, seconds=30):
        """Hears events until something holds."""
        deadline = time.monotonic() + seconds
        quiet = 0
        # What the server says of itself is up to a tenth of a second old, so it must hold for longer.
        while quiet < 3 or not holds():
            assert time.monotonic() < deadline, f"{len(self.view.blocks)} blocks, {self.server.cache()['tree']}"
            quiet += 1
            if self.socket.poll(100):
                quiet = 0
                topic, number, payload = self.socket.recv_multipart()
                # A replay may have told this already.
                if self.view.next is None or int.from_bytes(number, "big") >= self.view.next:
                    self.view.hear(number, payload)

    def agrees(self):
        return len(self.view.blocks) == self.server.cache()["tree"]["pages"]


@pytest.fixture(scope="module")
def context():
    with zmq.Context() as context:
        context.linger = 0
        yield context
        context.destroy(linger=0)


@pytest.fixture
def server(tmp_path):
    model = tiny_model(tmp_path / "tiny", 4096)
    # So little memory that prompts push each other out.
    server = Server(os.environ.get("OSCAR_BINARY", "target/release/oscar"), model, [
        "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "2MiB", "--context-length", "2048",
        "--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"])
    yield server
    server.stop()


def complete(server, token_ids, **fields):
    status, answer = call(server.url, "/generate", {
        "input_ids": token_ids, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}, **fields})
    assert status == 200, answer
    return answer


def prompt(seed, length):
    return [3 + (index * index * (seed % 11 + 1) + seed * 7) % 101 for index in range(length)]


def test_a_router_knows_what_is_cached(server, context):
    subscriber = Subscriber(server, context)
    subscriber.catch_up()
    view = subscriber.view
    first = prompt(1, 300)
    complete(server, first)
    subscriber.follow(subscriber.agrees)
    assert view.blocks.keys() == set(chain(first)), "names are what a router computes from the prompt"
    # Chats, whose history comes back.
    messages = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why? " * 20})
        answer = call(server.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 40})[1]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    subscriber.follow(subscriber.agrees)
    # Tenants share nothing, so the same prompt has other names.
    before = set(view.blocks)
    salted = prompt(2, 200)
    complete(server, salted, cache_salt="tenant")
    subscriber.follow(lambda: subscriber.agrees() and set(view.blocks) != before)
    new = set(view.blocks) - before
    assert len(new) == 3 and not new & set(chain(salted))
    assert [view.blocks[block][1] for block in new if view.blocks[block][0] is None] == [salted[:PAGE]]
    # Prompts that push others out, many at a time.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: complete(server, prompt(seed, 100 + 37 * seed % 900)), range(10, 90)))
    subscriber.follow(subscriber.agrees)
    assert view.removed > 20, "nothing was pushed out: this test shows too little"
    assert call(server.url, "/flush_cache", {})[0] == 200
    subscriber.follow(lambda: not view.blocks)
    assert view.cleared == 2 and view.gaps == 0
    # Whoever comes late and asks for all of it knows the same.
    complete(server, prompt(5, 500))
    subscriber.follow(lambda: subscriber.agrees() and len(view.blocks) > 0)
    late = Subscriber(server, context)
    late.catch_up()
    assert late.view.blocks == view.blocks
    assert late.view.next == view.next
