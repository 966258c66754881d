"""Starts and ends the processes that tests talk to, and asks them with nothing but the standard library."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[4]
FIXTURE = ROOT / "crates/model/tests/fixtures/models/qwen3"
START_SECONDS = 120

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(folder, context):
    """A checkpoint of random numbers with room for `context` tokens; one letter is about one token."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ["generation_config.json", "tokenizer.json", "model.safetensors"]:
        shutil.copy(FIXTURE / name, folder / name)
    config = json.loads((FIXTURE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Process:
    """A child whose lines are kept; `ready` is looked for in them."""

    def __init__(self, command, ready):
        environment = {**os.environ, "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment)
        self.lines = []
        self.found = None
        self.seen = threading.Event()
        self.reader = threading.Thread(target=self.listen, args=(re.compile(ready),), daemon=True)
        self.reader.start()

    def listen(self, ready):
        for line in self.process.stdout:
            self.lines.append(line)
            found = ready.search(line)
            if found and self.found is None:
                self.found = found
                self.seen.set()
        self.seen.set()

    def wait_until_ready(self):
        if not self.seen.wait(START_SECONDS) or self.found is None:
            self.kill()
            raise RuntimeError(f"{self.process.args[0]} did not start:\n{self.tail()}")
        return self.found

    def tail(self):
        return "".join(self.lines[-30:])

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self, seconds):
        """SIGTERM, as an operator would; whoever takes longer than `seconds` is killed, which is an error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still there {seconds} s after SIGTERM:\n{self.tail()}") from None
        self.reader.join(timeout=10)
        return code


class Server(Process):
    """`oscar serve` on loopback."""

    def __init__(self, binary, model, arguments, port=0, command=("serve",)):
        command = [binary, *command, model, "--offline", "--host", "127.0.0.1", "--port", port, *arguments]
        super().__init__(command, r"is ready at (http://\S+)")
        self.url = self.wait_until_ready().group(1)
        self.port = urllib.parse.urlsplit(self.url).port

    def cache(self):
        return call(self.url, "/oscar/cache")[1]

    def stop(self, seconds=60):
        code = self.end(seconds)
        assert code == 0, f"ended with {code}:\n{self.tail()}"
        assert "panicked" not in "".join(self.lines), self.tail()


def open_request(url, path, body=None, seconds=60):
    """Sends a request; POST if it has a body. The connection is the caller's to close."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
    return connection, connection.getresponse()


def call(url, path, body=None, seconds=60):
    """Status and JSON of a request."""
    connection, response = open_request(url, path, body, seconds)
    with contextlib.closing(connection):
        text = response.read()
    try:
        return response.status, json.loads(text or b"null")
    except ValueError:
        return response.status, text.decode(errors="replace")


def events(url, path, body, seconds=60):
    """The events of a stream, which must end as streams end."""
    connection, response = open_request(url, path, {**body, "stream": True}, seconds)
    with contextlib.closing(connection):
        assert response.status == 200, response.read()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        blocks = response.read().decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
