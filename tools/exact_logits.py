#!/usr/bin/env python3
"""Logits in float32 arithmetic, by `transformers` on the dequantised weights of a GGUF file.

    python tools/exact_logits.py MODEL.gguf LLAMACPP.safetensors EXACT.safetensors [--fixture FIXTURE.json]
    python tools/exact_logits.py MODEL.gguf TEXT.txt EXACT.safetensors [--tokens 1024]

The token ids come from the output of `llamacpp_logits.py`, or are those of the first tokens of a text. `--fixture` also
writes the short form that the tests of `oscar-model` read: for the last 128 of the first tokens the most likely ones and
their log-probabilities, exact and by llama.cpp. Needs torch, transformers, gguf, safetensors and numpy.
"""

import argparse
import json
import os

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

POSITIONS = 128
TOP = 4


def log_probabilities(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def top_tokens(logits):
    rows = []
    for row in log_probabilities(logits[-POSITIONS:]):
        best = np.argsort(-row, kind="stable")[:TOP]
        rows.append([[int(token), round(float(row[token]), 5)] for token in best])
    return rows


GEMMA_NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def gemma3(reader):
    """The model of a GGUF file of Gemma 3. Put together here, because the conversion that `transformers` has leaves out
    the window and the second RoPE base."""
    field = lambda name: reader.fields[f"gemma3.{name}"].contents()
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    configuration = Gemma3TextConfig(
        vocab_size=int(embedding.shape[1]), hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"), num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"), num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"), query_pre_attn_scalar=field("attention.key_length"),
        sliding_window=field("attention.sliding_window"), rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base"), max_position_embeddings=field("context_length"),
    )
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").float().eval()
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{GEMMA_NAMES[part]}.weight"
        state[name] = values - 1.0 if "norm" in name else values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def token_ids(arguments, place):
    if arguments.reference.endswith(".safetensors"):
        reference = load_file(arguments.reference)
        return reference["input_ids"], reference["logits"]
    tokenizer = AutoTokenizer.from_pretrained(place["path"], gguf_file=place["gguf_file"])
    ids = tokenizer(open(arguments.reference, encoding="utf-8").read())["input_ids"]
    if tokenizer.bos_token_id is not None and ids[0] != tokenizer.bos_token_id:
        ids = [tokenizer.bos_token_id, *ids]
    return np.array(ids[: arguments.tokens], dtype=np.int32), None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("reference")
    parser.add_argument("output")
    parser.add_argument("--fixture")
    parser.add_argument("--fixture-tokens", type=int, default=POSITIONS, help="tokens whose last 128 are in the fixture")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text")
    arguments = parser.parse_args()

    path = os.path.abspath(arguments.model)
    place = {"path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
    ids, peer = token_ids(arguments, place)
    reader = gguf.GGUFReader(arguments.model)
    if reader.fields["general.architecture"].contents() == "gemma3":
        model = gemma3(reader)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            place["path"], gguf_file=place["gguf_file"], dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        exact = model(torch.tensor(ids.astype(np.int64))[None]).logits[0].numpy()
    save_file({"input_ids": ids, "logits": exact}, arguments.output)
    if arguments.fixture:
        end = arguments.fixture_tokens
        fixture = {
            "model": os.path.basename(arguments.model),
            "input_ids": ids[:end].tolist(),
            "exact": top_tokens(exact[:end]),
        }
        if peer is not None:
            fixture["llamacpp"] = top_tokens(peer[:end])
        with open(arguments.fixture, "w") as file:
            json.dump(fixture, file, separators=(",", ":"))
            file.write("\n")


if __name__ == "__main__":
    main()
