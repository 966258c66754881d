"""Two oscar servers behind Dynamo's unmodified frontend, on this machine. Run by tools/check-dynamo."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

HERE = pathlib.Path(__file__).parent
FIXTURE = HERE / "../../crates/model/tests/fixtures/models/qwen3"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
PADDING = "hello and goodbye " * 40
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


def request(url, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(url, data=data, headers={"content-type": "application/json"}), timeout=timeout)


def ask(url, body=None):
    with request(url, body) as response:
        return json.load(response)


def stream(url, body):
    """The events of a stream."""
    with request(url, {**body, "stream": True}) as response:
        lines = [line[len(b"data: "):].strip() for line in response if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def until(what, holds, seconds=120):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny checkpoint with room for long answers; the frontend reads its tokenizer and template."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("generation_config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, folder)
    config = json.loads((FIXTURE / "config.json").read_text())
    config["max_position_embeddings"] = 65536
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


BINARY = os.environ.get("OSCAR_BINARY", "target/release/oscar")


class Cluster:
    """Two workers and a frontend."""

    def __init__(self, model, folder, stack, by_cache=False):
        self.stack, self.folder = stack, folder
        environment = {**os.environ, "DYN_FILE_KV": str(folder / "store"), "HF_HUB_OFFLINE": "1"}
        self.oscars, self.sidecars = [], []
        for number in range(2):
            events = ["--kv-events", f"tcp://127.0.0.1:{free_port()}"] if by_cache else []
            self.start(f"oscar{number}", [BINARY, "serve", str(model), "--served-model-name", "tiny", "--port", "0",
                                          "--threads", "1", "--kv-memory", "256MiB", *events])
            url = self.wait_for(f"oscar{number}", r"is ready at (http://\S+)")
            self.oscars.append(url)
            self.sidecars.append(self.start(f"sidecar{number}", [
                sys.executable, str(HERE / "sidecar.py"), "--oscar", url, "--model-path", str(model),
                "--served-model-name", "tiny"], environment))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start("frontend", [
            sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
            "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq",
            *(["--router-mode", "kv", "--kv-cache-block-size", "64"] if by_cache else [])], environment)
        until("the frontend sees no model", self.listed)
        # Both workers are known when both have answered. A prompt is asked once, lest it be sent where it is cached.
        numbers = itertools.count()
        until("only one worker gets requests", lambda: self.complete(f"{next(numbers)} {PADDING}")
              and all(self.taken(oscar) > 0 for oscar in self.oscars))

    def complete(self, prompt, url=None):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        return ask((url or self.url) + "/v1/completions", body)

    def start(self, name, command, environment=None):
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)
        self.stack.callback(self.stop, process)
        return process

    @staticmethod
    def stop(process):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def wait_for(self, name, pattern):
        log = self.folder / f"{name}.log"
        until(f"{name} is not ready", lambda: re.search(pattern, log.read_text(errors="replace")))
        return re.search(pattern, log.read_text(errors="replace")).group(1)

    def listed(self):
        try:
            return any(model["id"] == "tiny" for model in ask(self.url + "/v1/models")["data"])
        except urllib.error.URLError:
            return False

    @staticmethod
    def taken(oscar):
        """Requests that a server has taken."""
        with request(oscar + "/metrics") as response:
            text = response.read().decode()
        return int(float(re.search(r"^sglang:num_requests_total\S* (\S+)", text, re.M).group(1)))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(model, tmp_path_factory.mktemp("cluster"), stack)


def said(answer):
    return answer["choices"][0]["message"]["content"]


def test_answers_are_oscars_own(cluster):
    reasons = set()
    for limit in (4, 12):
        body = {**CHAT, "max_tokens": limit}
        through, direct = (ask(url + "/v1/chat/completions", body) for url in (cluster.url, cluster.oscars[0]))
        assert said(through) == said(direct)
        assert through["choices"][0]["finish_reason"] == direct["choices"][0]["finish_reason"]
        reasons.add(through["choices"][0]["finish_reason"])
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert through["usage"][name] == direct["usage"][name]
    assert reasons == {"length", "stop"}
    pieces = stream(cluster.url + "/v1/chat/completions", CHAT)
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == said(direct)


def test_both_workers_are_asked_and_say_how_much_was_cached(cluster):
    before = [cluster.taken(oscar) for oscar in cluster.oscars]
    answers = [ask(cluster.url + "/v1/chat/completions", CHAT) for _ in range(8)]
    assert len({said(answer) for answer in answers}) == 1
    assert [cluster.taken(oscar) - count for oscar, count in zip(cluster.oscars, before)] == [4, 4]
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_answer_keeps_to_a_schema(cluster):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["first", "second"]}}}
    answer = ask(cluster.url + "/v1/chat/completions",
                 {**CHAT, "temperature": 1, "max_tokens": 60, "response_format": schema})
    assert json.loads(said(answer)) in ("first", "second")


def test_a_client_that_goes_away_ends_its_request(cluster):
    def running():
        return sum(ask(oscar + "/get_load")[0]["num_reqs"] for oscar in cluster.oscars)

    endless = {"model": "tiny", "prompt": "hello", "max_tokens": 60000, "temperature": 1, "stream": True,
               "ignore_eos": True}
    response = request(cluster.url + "/v1/completions", endless)
    for _ in range(10):
        response.readline()
    until("the request does not run", lambda: running() == 1, 20)
    response.close()
    until("the request goes on", lambda: running() == 0, 20)


def test_the_other_worker_takes_over(cluster):
    cluster.stop(cluster.sidecars[0])
    before = cluster.taken(cluster.oscars[1])
    for _ in range(4):
        assert said(ask(cluster.url + "/v1/chat/completions", CHAT))
    assert cluster.taken(cluster.oscars[1]) == before + 4


def test_requests_go_where_their_prompt_is_cached(model, tmp_path_factory):
    """Prompts are put into one server past Dynamo, which can know of them only by that server's events."""
    if "--kv-events" not in subprocess.run([BINARY, "serve", "--help"], capture_output=True, text=True).stdout:
        pytest.skip("this oscar tells no events")
    with contextlib.ExitStack() as stack:
        cluster = Cluster(model, tmp_path_factory.mktemp("by-cache"), stack, by_cache=True)
        for number in range(8):
            prompt = f"story {number} {chr(97 + number) * 7} {PADDING}"
            holder = cluster.oscars[number % 2]
            cluster.complete(prompt, holder)
            # Events take a moment.
            time.sleep(1)
            before = cluster.taken(holder)
            usage = cluster.complete(prompt)["usage"]
            assert cluster.taken(holder) == before + 1, f"prompt {number} went to the other server"
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
