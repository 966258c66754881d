#!/usr/bin/env python3
"""Logits in float32 arithmetic, by `transformers` on the dequantised weights of a GGUF file.

    python tools/exact_logits.py MODEL.gguf LLAMACPP.safetensors EXACT.safetensors [--fixture FIXTURE.json]

The token ids come from the output of `llamacpp_logits.py`. `--fixture` also writes the short form that the tests of
`oscar-model` read: for the first 128 positions the most likely tokens and their log-probabilities, exact and by
llama.cpp. Needs torch, transformers, gguf, safetensors and numpy.
"""

import argparse
import json
import os

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

POSITIONS = 128
TOP = 4


def log_probabilities(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def top_tokens(logits):
    rows = []
    for row in log_probabilities(logits[:POSITIONS]):
        best = np.argsort(-row, kind="stable")[:TOP]
        rows.append([[int(token), round(float(row[token]), 5)] for token in best])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("reference")
    parser.add_argument("output")
    parser.add_argument("--fixture")
    arguments = parser.parse_args()

    reference = load_file(arguments.reference)
    ids = reference["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        os.path.dirname(os.path.abspath(arguments.model)),
        gguf_file=os.path.basename(arguments.model),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        exact = model(torch.tensor(ids.astype(np.int64))[None]).logits[0].numpy()
    save_file({"input_ids": ids, "logits": exact}, arguments.output)
    if arguments.fixture:
        fixture = {
            "model": os.path.basename(arguments.model),
            "input_ids": ids[:POSITIONS].tolist(),
            "exact": top_tokens(exact),
            "llamacpp": top_tokens(reference["logits"]),
        }
        with open(arguments.fixture, "w") as file:
            json.dump(fixture, file, separators=(",", ":"))
            file.write("\n")


if __name__ == "__main__":
    main()
