"""Starts `oscar serve` for the tests and ends it as an operator would."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

KEY = "test-key"
START_SECONDS = 300


class Server:
    """A running server and the plain requests that no client library makes."""

    def __init__(self, arguments):
        binary = os.environ.get("OSCAR_BINARY", "target/release/oscar")
        model = os.environ.get("OSCAR_TEST_MODEL", "smollm2")
        command = [binary, "serve", model, "--port", "0", "--api-key", KEY, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.url = None
        ready = threading.Event()
        threading.Thread(target=self.listen, args=(ready,), daemon=True).start()
        if not ready.wait(START_SECONDS) or self.url is None:
            self.process.kill()
            raise RuntimeError("the server did not start: " + "".join(self.lines[-20:]))

    def listen(self, ready):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"is ready at (http://\S+)", line)
            if found:
                self.url = found.group(1)
                ready.set()
        ready.set()

    def request(self, path, body=None, key=KEY):
        """Status and JSON of a plain request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def events(self, path, body):
        """The events of a stream."""
        data = json.dumps({**body, "stream": True}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        events = []
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: "):
                    events.append(line[len(b"data: "):].strip())
        assert events.pop() == b"[DONE]"
        return [json.loads(event) for event in events]

    def running(self):
        return self.request("/get_load")[1][0]["num_reqs"]

    def wait_until_idle(self):
        self.wait_until_running(0)

    def wait_until_running(self, requests):
        # Counts are published now and then, not with every token.
        deadline = time.monotonic() + 60
        while self.running() != requests:
            assert time.monotonic() < deadline, f"{self.running()} requests are running, expected {requests}"
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        assert code == 0, "".join(self.lines[-20:])
        assert "panicked" not in "".join(self.lines)


@pytest.fixture(scope="session")
def server():
    server = Server(["--context-length", "4096", "--max-running-requests", "64", "--kv-memory", "1GiB",
                     "--tool-call-parser", "hermes"])
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
