"""What a router from its package does with our servers, from registration to the death of one of them."""

import contextlib
import threading
import time

import pytest
from processes import call, events, open_request

PAGE = 64
TOPICS = ["rivers", "bridges", "gardens", "winters", "lanterns", "quarries"]


def chat(text, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, **fields}


def document(topic):
    """About 500 tokens that no other topic begins with."""
    return f"{topic} are what this long text is about, and nothing else. " * 10


def answer_text(answer):
    return answer["choices"][0]["message"]["content"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask(url, body):
    status, answer = call(url, "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


@contextlib.contextmanager
def held(fleet, router, text):
    """A long answer in progress, whose worker is busier than the other."""
    connection, response = open_request(
        router.url, "/v1/chat/completions", chat(text, max_tokens=7000, stream=True))
    with contextlib.closing(connection), contextlib.closing(response):
        assert response.read(100).startswith(b"data: ")
        router.wait_for(lambda: fleet.running() == 1)
        yield
    router.wait_for(lambda: fleet.running() == 0)


def test_workers_are_registered_with_what_they_say_of_themselves(fleet, router):
    workers = router.registered()
    assert sorted(worker["url"] for worker in workers) == sorted(worker.url for worker in fleet.workers)
    for worker in workers:
        assert worker["is_healthy"], worker
        assert worker["model_id"] == "tiny" or any(model["id"] == "tiny" for model in worker["models"]), worker
    assert "tiny" in [model["id"] for model in call(router.url, "/v1/models")[1]["data"]]
    status, info = call(router.url, "/get_model_info")
    assert (status, info["served_model_name"], info["is_generation"]) == (200, "tiny", True)


def test_answers_are_the_same_as_without_the_router(fleet, router):
    body = chat("Once upon a time", max_tokens=24)
    direct = [answer_text(ask(worker.url, body)) for worker in fleet.workers]
    assert direct[0] and direct[0] == direct[1], "the workers disagree: comparing would show nothing"
    assert answer_text(ask(router.url, body)) == direct[0]
    native = {"text": "Once upon", "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    expected = call(fleet.workers[0].url, "/generate", native)[1]
    routed = call(router.url, "/generate", native)[1]
    assert (routed["text"], routed["output_ids"]) == (expected["text"], expected["output_ids"])
    assert routed["meta_info"]["completion_tokens"] == 12
    plain = {"model": "tiny", "prompt": "Once upon", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer = call(router.url, "/v1/completions", plain)
    assert (status, answer["choices"][0]["text"]) == (200, expected["text"])


def test_streams_pass_event_by_event(router):
    body = chat("Once upon a time", max_tokens=24)
    whole = ask(router.url, body)
    parts = events(router.url, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    choices = [part["choices"][0] for part in parts if part["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == answer_text(whole)
    assert choices[-1]["finish_reason"] == "length" and len(choices) > 12
    assert parts[-1]["usage"]["completion_tokens"] == 24
    native = {"text": "Once upon", "sampling_params": {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True}}
    texts = [part["text"] for part in events(router.url, "/generate", native)]
    assert texts[-1] == call(router.url, "/generate", native)[1]["text"]
    # Texts are whole so far, and those that are ready together come as one.
    assert len(texts) > 1 and all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))


def test_a_client_that_goes_away_frees_its_worker(fleet, router):
    with held(fleet, router, "Go on and on"):
        pass
    tokens = sum(worker.cache()["generated_tokens"] for worker in fleet.workers)
    time.sleep(0.5)
    assert sum(worker.cache()["generated_tokens"] for worker in fleet.workers) == tokens


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"max_tokens": "many"}])
def test_a_bad_request_stays_a_bad_request(router, fields):
    status, answer = call(router.url, "/v1/chat/completions", chat("Hello", **fields))
    assert status in (400, 422) and "error" in str(answer).lower(), (status, answer)


def test_a_prefix_goes_where_it_is_cached(fleet, router):
    assert call(router.url, "/flush_cache", {})[0] == 200
    seen = {topic: [] for topic in TOPICS}

    def visit(topic):
        answer, worker = fleet.ask(router.url, chat(f"{document(topic)} Question {len(seen[topic])}."))
        seen[topic].append((worker, cached(answer), answer["usage"]["prompt_tokens"]))

    for topic in TOPICS[:3]:
        visit(topic)
    # What is new goes to the worker with less to do.
    with held(fleet, router, document(TOPICS[0])):
        for topic in TOPICS[3:]:
            visit(topic)
    # What is known goes where it is known, in whatever order it comes.
    for topic in TOPICS * 2 + TOPICS[::-1]:
        visit(topic)
    for topic, requests in seen.items():
        assert len({worker for worker, _, _ in requests}) == 1, f"{topic} moved about: {seen}"
        assert requests[0][1] < PAGE, f"{topic} was known before: {seen}"
        for _, found, prompt in requests[1:]:
            assert found >= prompt - 2 * PAGE, f"{topic}: {found} of {prompt}"
    assert len({requests[0][0] for requests in seen.values()}) == 2, f"one worker does nothing: {seen}"


def test_without_cache_awareness_prefixes_move_about(fleet):
    """Shows that the test before can fail: another policy does."""
    other = fleet.start_router("round_robin")
    seen = []
    for _ in range(4):
        seen.append(fleet.ask(other.url, chat(document("rivers")))[1])
    assert len(set(seen)) == 2, seen
    other.kill()


def test_flushing_reaches_all_workers(fleet, router):
    # The tests before have taught the router where each topic is.
    for topic in TOPICS:
        ask(router.url, chat(document(topic)))
    router.wait_for(lambda: all(worker.cache()["tree"]["pages"] > 0 for worker in fleet.workers))
    status, answer = call(router.url, "/flush_cache", {})
    assert status == 200, answer
    router.wait_for(lambda: all(worker.cache()["tree"]["pages"] == 0 for worker in fleet.workers))
    assert cached(ask(router.url, chat(document("rivers")))) == 0
    assert cached(ask(router.url, chat(document("rivers")))) >= PAGE


class Load:
    """Clients that ask without pause, streams and whole answers in turn, and note what came of it."""

    def __init__(self, url, clients, expected):
        self.url = url
        self.expected = expected
        self.results = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(clients)]

    def client(self, number):
        turn = number
        while not self.stopping.is_set():
            topic = TOPICS[turn % len(TOPICS)]
            begun, turn = time.monotonic(), turn + 1
            try:
                if turn % 2:
                    parts = events(self.url, "/v1/chat/completions", chat(document(topic)))
                    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
                else:
                    text = answer_text(ask(self.url, chat(document(topic))))
                error = None if text == self.expected[topic] else f"wrong: {text!r}"
            except Exception as failure:  # noqa: BLE001: whatever went wrong is what is looked at
                error = repr(failure)
            self.results.append((begun, error))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.go_on(6)
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a request has hung"

    def go_on(self, requests):
        """Waits for so many more results."""
        wanted, deadline = len(self.results) + requests, time.monotonic() + 60
        while len(self.results) < wanted:
            assert time.monotonic() < deadline, "no request comes back"
            time.sleep(0.05)

    def errors(self, since):
        return [error for begun, error in self.results if error and begun >= since]


@pytest.fixture(scope="module")
def expected(fleet):
    return {topic: answer_text(ask(fleet.workers[1].url, chat(document(topic)))) for topic in TOPICS}


def test_when_a_worker_dies_the_other_serves(fleet, router, expected):
    with Load(router.url, 6, expected) as load:
        begun = time.monotonic()
        fleet.workers[0].kill()
        router.wait_for(lambda: router.healthy() == [fleet.workers[1].url])
        noticed = time.monotonic()
        load.go_on(30)
    assert load.errors(since=noticed) == []
    # What was under way on the dead one may be lost, and nothing else: each client has one request at a time.
    lost = load.errors(since=0)
    assert len(lost) <= 6 * 3, lost
    assert not any("wrong" in error for error in lost), lost
    print(f"noticed after {noticed - begun:.1f} s, {len(lost)} of {len(load.results)} requests lost")


def test_a_worker_that_comes_back_is_used_again(fleet, router, expected):
    port = fleet.workers[0].port
    fleet.workers[0] = fleet.start_worker(port)
    router.wait_for(lambda: len(router.healthy()) == 2)

    def used():
        number = time.monotonic_ns()
        with held(fleet, router, f"{number} is a number that nobody has asked about yet. " * 4):
            ask(router.url, chat(f"{number + 1} is another one, and nobody has asked about it either. " * 4))
        return all(worker.cache()["prompt_tokens"] > 0 for worker in fleet.workers)

    router.wait_for(used)


def test_a_worker_can_be_stopped_without_a_lost_request(fleet, router, expected):
    with Load(router.url, 6, expected) as load:
        fleet.workers[0].stop(seconds=40)
        router.wait_for(lambda: router.healthy() == [fleet.workers[1].url])
        load.go_on(20)
    assert load.errors(since=0) == []
