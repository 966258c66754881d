"""`lm_eval` against a running server, and its numbers once more from plain requests to the same server.

Run by tools/check-lm-eval. The tasks are our own and the model is tiny, so scores mean nothing; they must be the same.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from processes import Server, call, tiny_model  # noqa: E402

TASKS = HERE / "tasks"


def documents(name):
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


def harness(server, model, folder):
    """Runs lm_eval; its results and, for each task, its samples."""
    settings = ",".join([
        f"model=tiny,base_url={server.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface",
        "tokenized_requests=True,num_concurrent=4,max_length=1024"])
    command = [
        str(pathlib.Path(sys.executable).parent / "lm_eval"), "--model", "local-completions", "--model_args", settings,
        "--tasks", "oscar_choice,oscar_copy", "--include_path", str(TASKS), "--output_path", str(folder / "out"),
        "--log_samples", "--batch_size", "1", "--seed", "0"]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in (folder / "out").rglob("results_*.json")]
    assert len(results) == 1, done.stdout + done.stderr
    samples = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
    return results[0]["results"], samples


def ask(server, body):
    status, answer = call(server.url, "/v1/completions", {"model": "tiny", "temperature": 0, **body})
    assert status == 200, answer
    return answer["choices"][0]


def ids(server, text):
    return call(server.url, "/tokenize", {"prompt": text})[1]["tokens"]


def score(server, context, ending):
    """Log-probability of an ending, and whether it is what the model would say."""
    everything, before = ids(server, context + ending), len(ids(server, context))
    echoed = ask(server, {"prompt": everything, "max_tokens": 0, "echo": True, "logprobs": 1})["logprobs"]
    own = echoed["token_logprobs"][before:]
    best = [max(top.values()) for top in echoed["top_logprobs"][before:]]
    return sum(own), own == best


def check_choice(server, results, samples):
    right = right_by_length = 0
    rows = documents("choice")
    assert len(rows) == len(samples)
    for row, sample in zip(rows, samples):
        context = f"{row['question']}\nAnswer:"
        ours = [score(server, context, " " + ending) for ending in row["endings"]]
        theirs = [(float(value), greedy in (True, "True")) for ((value, greedy),) in sample["resps"]]
        for (one, one_greedy), (other, other_greedy) in zip(ours, theirs, strict=True):
            assert math.isclose(one, other, rel_tol=0, abs_tol=1e-4), (row, ours, theirs)
            assert one_greedy == other_greedy, (row, ours, theirs)
        values = [value for value, _ in ours]
        lengths = [value / len(ending) for value, ending in zip(values, row["endings"])]
        right += values.index(max(values)) == row["answer"]
        right_by_length += lengths.index(max(lengths)) == row["answer"]
    expected = {"acc,none": right / len(rows), "acc_norm,none": right_by_length / len(rows)}
    found = {name: results[name] for name in expected}
    assert all(math.isclose(found[name], expected[name], abs_tol=1e-9) for name in expected), (found, expected)
    print(f"oscar_choice: {4 * len(rows)} endings scored alike, {found}")


def check_copy(server, results, samples):
    rows = documents("copy")
    assert len(rows) == len(samples)
    said = []
    for row, sample in zip(rows, samples):
        body = {"prompt": row["question"], "max_tokens": 24, "stop": ["e", "\n"], "seed": 1234}
        said.append(ask(server, body)["text"])
        assert sample["resps"][0][0] == said[-1], (row, sample["resps"], said[-1])
    assert len(set(said)) > 3, said
    right = sum(text == row["answer"] for text, row in zip(said, rows)) / len(rows)
    assert math.isclose(results["exact_match,none"], right, abs_tol=1e-9), (results, said)
    print(f"oscar_copy: {len(rows)} texts alike, exact_match {right}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = tiny_model(folder / "tiny", 2048)
        server = Server(os.environ["OSCAR_BINARY"], model, [
            "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB", "--deterministic"])
        try:
            results, samples = harness(server, model, folder)
            check_choice(server, results["oscar_choice"], samples["oscar_choice"])
            check_copy(server, results["oscar_copy"], samples["oscar_copy"])
        finally:
            server.stop()


main()
