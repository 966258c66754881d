"""Two servers and a router between them and the tests."""

import os
import pathlib
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from processes import Process, Server, call, free_port, tiny_model  # noqa: E402

WORKER_ARGUMENTS = ["--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB", "--deterministic"]
LAUNCHERS = {
    "sglang-router": [sys.executable, "-m", "sglang_router.launch_router"],
    "smg": [str(pathlib.Path(sys.executable).parent / "smg"), "launch"],
}


class Fleet:
    """Servers of one model, and routers in front of them."""

    def __init__(self, folder):
        self.model = tiny_model(folder / "tiny", 8192)
        self.workers = [self.start_worker(), self.start_worker()]
        self.routers = []

    def start_worker(self, port=0):
        binary = os.environ.get("OSCAR_BINARY", "target/release/oscar")
        return Server(binary, self.model, WORKER_ARGUMENTS, port)

    def start_router(self, policy):
        """An unmodified router; it is impatient, so that tests need not wait."""
        port = free_port()
        command = [
            *LAUNCHERS[os.environ.get("OSCAR_ROUTER", "sglang-router")],
            "--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port", free_port(),
            "--worker-urls", *[worker.url for worker in self.workers], "--policy", policy,
            "--health-check-interval-secs", 1, "--health-failure-threshold", 2, "--health-success-threshold", 1,
            "--worker-startup-check-interval", 1, "--cb-timeout-duration-secs", 2,
        ]
        router = Router(command, port)
        self.routers.append(router)
        router.wait_for(lambda: router.healthy() == sorted(worker.url for worker in self.workers))
        return router

    def running(self):
        return sum(worker.cache()["running"] for worker in self.workers)

    def ask(self, url, body):
        """The answer to a chat, and the number of the worker that gave it: its count of prompt tokens grows."""
        before = [worker.cache()["prompt_tokens"] for worker in self.workers]
        status, answer = call(url, "/v1/chat/completions", body)
        assert status == 200, answer
        tokens = answer["usage"]["prompt_tokens"]
        deadline = time.monotonic() + 10
        while True:
            # Counts are a step of the engine late.
            grown = [worker.cache()["prompt_tokens"] - count for worker, count in zip(self.workers, before)]
            if sum(grown) == tokens:
                return answer, grown.index(tokens)
            assert time.monotonic() < deadline, f"{tokens} prompt tokens, but the counts grew by {grown}"
            time.sleep(0.02)


class Router(Process):
    def __init__(self, command, port):
        super().__init__(command, "(?!)")
        self.url = f"http://127.0.0.1:{port}"

    def registered(self):
        status, answer = call(self.url, "/workers", seconds=5)
        assert status == 200, answer
        return answer["workers"]

    def healthy(self):
        return sorted(worker["url"] for worker in self.registered() if worker["is_healthy"])

    def wait_for(self, holds, seconds=40):
        deadline = time.monotonic() + seconds
        while True:
            try:
                if holds():
                    return
            except OSError:
                assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    for router in fleet.routers:
        router.kill()
    for worker in fleet.workers:
        worker.stop()


@pytest.fixture(scope="module")
def router(fleet):
    return fleet.start_router("cache_aware")
