"""Many clients, some of them badly behaved, and too little memory for them: what `oscar serve` must live through.

  python3 soak.py BINARY [--seconds 60] [--clients 64] [--seed 1] [--kinds ask,leave,…]

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
from traffic import BAD, LONG, PATHS, batches, cases, exchange, hostile, questions, text_of

PAGE_BYTES = 32 << 10  # of the tiny model, bf16, all layers
PAGE_TOKENS = 64
SHUTDOWN_SECONDS = 1
# Wide of the mark for noise of the allocator, narrow for a leak: a kilobyte a request adds up to more.
GROWTH_BYTES = 8 << 20
# The first hostile requests make threads and touch pages for the first time; they leave nothing of their bodies of 16 MB.
FIRST_GROWTH_BYTES = 16 << 20
# A body of this size makes the server give memory back, within these seconds.
LARGE_BYTES = 1 << 20
TRIM_SECONDS = 4
# After a load the process is to be as large as before, within this share; of a small process the noise is more.
GROWTH_SHARE = 0.1
# Heaps that are in pieces can be larger after one load than after another. A leak grows under each of so many.
LOADS = 3
# Batches are the last of the cases.
BATCHES = 8
# How often a client does what, as weights.
KINDS = {"ask": 60, "leave": 20, "slow": 2, "bad": 12, "look": 5, "abort": 5, "batch": 6, "hostile": 4, "flush": 1}


class Soak:
    def __init__(self, server, arguments):
        self.server = server
        self.random = random.Random(arguments.seed)
        self.clients = arguments.clients
        self.kinds = {kind: KINDS[kind] for kind in arguments.kinds}
        self.streams = cases(self.random)
        self.cases = self.streams + questions(self.random) + batches(self.random)
        self.answered = collections.Counter()
        self.hostile = hostile()
        self.counts = collections.Counter()
        self.faults = []
        self.expected = {}

    async def ask(self, index):
        path, body = self.cases[index]
        status, headers, data = await exchange(self.server.port, path, json.dumps(body).encode())
        if status == 200:
            return text_of(path, body, data)
        error = json.loads(data)["error"]
        known = {429: {"queue_full", "rate_limit_error"}, 503: {"shutting_down", "overloaded_error"}}
        said = error.get("code", error["type"])
        assert said in known.get(status, ()) and "retry-after" in headers, f"{path}: {status} {error}"
        self.counts[f"refused {status}"] += 1
        return None

    async def ask_alone(self):
        """All answers of an idle server."""
        return {index: await self.ask(index) for index in range(len(self.cases))}

    async def turn(self):
        """One thing that a client does."""
        [kind] = self.random.choices(list(self.kinds), list(self.kinds.values()))
        await getattr(self, f"turn_{kind}")()

    async def turn_ask(self, chosen=None):
        index = self.random.randrange(len(self.cases) - BATCHES) if chosen is None else chosen
        path, body = self.cases[index]
        text = await self.ask(index)
        if text is None:
            await asyncio.sleep(self.random.uniform(0.05, 0.4))
            return
        assert text == self.expected[index], f"{path} {body}: {text!r} is not {self.expected[index]!r}"
        self.counts["answered" if chosen is None else "batches"] += 1
        self.answered[path] += 1

    async def turn_batch(self):
        await self.turn_ask(len(self.cases) - 1 - self.random.randrange(BATCHES))

    async def turn_leave(self):
        path, body = self.random.choice(self.streams)
        leave = self.random.choice(["half", 0, 1, 2, 301, 1000, 3001])
        await exchange(self.server.port, path, json.dumps({**body, "stream": True}).encode(), leave)
        self.counts["left"] += 1

    async def turn_slow(self):
        """Half of a large body, and nothing for a while."""
        body = json.dumps({"prompt": "a" * LARGE_BYTES}).encode()
        await exchange(self.server.port, "/v1/completions", body, "half", pause=self.random.uniform(0.5, 3))
        self.counts["slow"] += 1

    async def turn_bad(self):
        path, data, right = self.random.choice(BAD)
        status, _, answer = await exchange(self.server.port, path, data)
        assert status in right, f"{path} {data[:60]}: {status} {answer[:200]}"
        assert json.loads(answer)["error"]["message"], answer
        self.counts["bad"] += 1

    async def turn_look(self):
        path = self.random.choice(["/metrics", "/oscar/cache", "/health", "/get_load", "/v1/models", "/v1/loads"])
        status, _, answer = await exchange(self.server.port, path, None)
        assert status == 200 and answer, f"{path}: {status}"
        self.counts["looked"] += 1

    async def turn_abort(self):
        """A long answer is broken off by its id, from another connection."""
        rid = f"soak-{self.random.getrandbits(64):x}"
        body = {"prompt": "Never ending", "max_tokens": 1000, "ignore_eos": True, "stream": True, "rid": rid}
        stream = asyncio.create_task(exchange(self.server.port, "/v1/completions", json.dumps(body).encode()))
        await asyncio.sleep(self.random.uniform(0, 0.5))
        while not stream.done():
            await exchange(self.server.port, "/abort_request", json.dumps({"rid": rid}).encode())
            await asyncio.wait([stream], timeout=0.1)
        status, _, data = await stream
        if status == 200:
            assert re.search(rb'"finish_reason":"(abort|length)"', data), data[-300:]
        else:
            assert status == 429, f"{status} {data[:200]}"
        self.counts["aborted"] += 1

    async def turn_hostile(self):
        path, data, headers, right = self.random.choice(self.hostile)
        status, _, answer = await exchange(self.server.port, path, data, headers=headers)
        assert status == right, f"{path} {(data or b'')[:60]} {str(headers)[:200]}: {status} {answer[:200]}"
        # Headers that are too large are refused before anybody reads them, and nothing more is said.
        assert status == 431 or json.loads(answer)["error"]["message"], answer
        self.counts["hostile"] += 1

    async def turn_flush(self):
        status, _, answer = await exchange(self.server.port, "/flush_cache", b"{}")
        assert status == 200, f"/flush_cache: {status} {answer[:200]}"
        self.counts["flushed"] += 1

    async def client(self, until):
        while time.monotonic() < until:
            try:
                await self.turn()
            except Exception as fault:  # noqa: BLE001: whatever it is, it is a fault
                self.counts["fault"] += 1
                self.faults.append(repr(fault)[:600])
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

    async def resident_at_rest(self):
        """The resident size when what is remembered of chats is forgotten, and what large bodies took is given back."""
        await exchange(self.server.port, "/flush_cache", b"{}")
        body = json.dumps({"prompt": "a" * LARGE_BYTES, "model": "no-such"}).encode()
        status, _, _ = await exchange(self.server.port, "/v1/completions", body)
        assert status == 404, status
        await asyncio.sleep(TRIM_SECONDS)
        return resident(self.server.process.pid)

    async def run(self, seconds):
        self.expected = await self.ask_alone()
        assert len(set(self.expected.values())) > 20, "answers are too much alike to be compared"
        for _ in range(5):
            await asyncio.gather(*[exchange(self.server.port, "/v1/completions", LONG) for _ in range(self.clients)])
        fresh = warm = await self.resident_at_rest()
        for _ in range(2):
            await self.load(max(seconds / 10, 5))
            await self.idle()
            warm = max(warm, await self.resident_at_rest())
        self.counts.clear()
        assert warm < fresh + FIRST_GROWTH_BYTES, f"{fresh >> 20} MiB at first, {warm >> 20} after the first loads"
        before = warm
        for _ in range(LOADS):
            samples = await self.load(seconds)
            cache = await self.idle()
            end = await self.resident_at_rest()
            print("  ".join(f"{what} {count}" for what, count in sorted(self.counts.items())))
            quarter = max(len(samples) // 4, 1)
            early, late = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
            mebibytes = [f"{size / 2**20:.1f}" for size in (before, early, late, end)]
            print("resident MiB: {} before, {} early, {} late, {} after it".format(*mebibytes))
            assert not self.faults, "\n".join(self.faults)
            # Large bodies come and go, so that sizes in the middle of them say little.
            assert "hostile" in self.kinds or late - early < GROWTH_BYTES, "memory grows under load"
            if end < before + max(GROWTH_BYTES, GROWTH_SHARE * before):
                break
        else:
            raise AssertionError("memory does not come back")
        for name, pool in cache["pools"].items():
            assert pool["free"] + pool["tree"] == pool["pages"], f"pages of {name} are lost: {pool}"
        metrics = (await exchange(self.server.port, "/metrics", None))[2].decode()
        preempted = float(re.search(r"^oscar_preemptions_total\S* (\S+)", metrics, re.MULTILINE).group(1))
        print(f"{preempted:.0f} preemptions, {cache['tree']['evicted']} pages evicted, hit rate {cache['hit_rate']:.2f}")
        assert preempted > 0 and cache["tree"]["evicted"] > 0, "there was no pressure: this run shows nothing"
        assert self.counts["answered"] > self.clients, "too few answers: this run shows nothing"
        asked = {path for path, _ in self.cases}
        assert asked == set(self.answered) and asked > set(PATHS), f"only {sorted(self.answered)} were answered"
        done = {name for name, count in self.counts.items() if count > 0 and not name.startswith("refused")}
        assert len(done) == len(self.kinds), f"of {sorted(self.kinds)} only {sorted(done)}"
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
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS),
                        help=f"what clients do, separated by commas: {','.join(KINDS)}")
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
