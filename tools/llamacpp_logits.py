#!/usr/bin/env python3
"""Reference logits from llama.cpp: teacher-force a text and store every position's full logits.

    python tools/llamacpp_logits.py MODEL.gguf --text FILE --output REFERENCE.safetensors

The output holds `input_ids` (I32 [tokens]) and `logits` (F32 [tokens, vocabulary]); row i predicts token i + 1.
`--against OTHER.safetensors` prints how far this run is from an earlier one (mean KL divergence, top-1 agreement):
with another attention kernel or cache type this is the distance of llama.cpp from itself, the floor below which a
comparison of two engines says nothing.
The safetensors metadata records the build and its settings, so that a comparison can say what it compared with.
Needs: pip install llama-cpp-python safetensors numpy
(`tools/compare-llamacpp --setup` builds llama-cpp-python with the vector instructions spelled out.)
"""

import argparse
import ctypes
import json
import os
import sys

import llama_cpp
import numpy as np

FLASH_ATTENTION = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
KEY_VALUE_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32, "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
}

# ctypes keeps no reference of its own, and llama.cpp calls this until the process ends.
_quiet_log = llama_cpp.llama_log_callback(lambda level, text, user_data: None)


class Session:
    """One model, one context, one sequence, through the C interface that the Python package wraps."""

    def __init__(self, path, context, batch, threads, flash_attention="auto", key_value_type="f16", verbose=False):
        if not os.path.isfile(path):
            raise SystemExit(f"{path}: no such GGUF file")
        if not verbose:
            llama_cpp.llama_log_set(_quiet_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp could not load the file (run with --verbose for its own log)")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context
        # One physical batch: splitting 512 tokens into smaller ones would only slow the peer down.
        parameters.n_batch = parameters.n_ubatch = batch
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = FLASH_ATTENTION[flash_attention]
        parameters.type_k = parameters.type_v = KEY_VALUE_TYPES[key_value_type]
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise SystemExit(f"{path}: llama.cpp could not create a context of {context} tokens")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self.batch = llama_cpp.llama_batch_init(batch, 0, 1)
        self.position = 0

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text, add_special=True):
        encoded = text.encode("utf-8")
        capacity = len(encoded) + 8
        ids = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(
            self.vocabulary, encoded, len(encoded), ids, capacity, add_special, False
        )
        if count < 0:
            raise SystemExit("llama.cpp could not tokenise the text")
        return list(ids[:count])

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.position = 0

    def forget_from(self, position):
        """Go back to just before a position."""
        memory = llama_cpp.llama_get_memory(self.context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, position, -1):
            raise SystemExit(f"llama.cpp could not forget the tokens from {position} on")
        self.position = position

    def decode(self, ids, every_logit=False):
        """Run the tokens after those already seen, and wait until they are done."""
        self.batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            self.batch.token[index] = token
            self.batch.pos[index] = self.position + index
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = 0
            self.batch.logits[index] = every_logit or index + 1 == len(ids)
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status} at position {self.position}")
        llama_cpp.llama_synchronize(self.context)
        self.position += len(ids)

    def logits(self, rows):
        """The logits of the last `rows` outputs of the latest decode, copied out."""
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.vocabulary_size)).copy()


def system_info():
    return llama_cpp.llama_print_system_info().decode().strip()


def package_version():
    return llama_cpp.__version__


def log_probabilities(logits):
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def distance(reference, logits):
    """KL(reference || logits) in nats. The first position is named apart: without a beginning-of-text token it is
    an attention sink whose huge activations suffer most from 8-bit rounding, and it can outweigh all the others."""
    p, q = log_probabilities(reference), log_probabilities(logits)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "kl_first": float(kl[0]),
        "kl_rest": float(kl[1:].mean()),
        "top1_agreement": float((p.argmax(axis=1) == q.argmax(axis=1)).mean()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--text", required=True, help="UTF-8 text file; its first tokens are used")
    parser.add_argument("--output", help="where to write the .safetensors file")
    parser.add_argument("--against", help="an earlier output: print the distance from it as JSON")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--flash-attention", choices=list(FLASH_ATTENTION), default="off")
    parser.add_argument("--key-value-type", choices=list(KEY_VALUE_TYPES), default="f16")
    parser.add_argument("--verbose", action="store_true", help="let llama.cpp log")
    arguments = parser.parse_args()

    from safetensors.numpy import load_file, save_file

    with open(arguments.text, encoding="utf-8") as file:
        text = file.read()
    session = Session(
        arguments.model,
        context=arguments.tokens,
        batch=arguments.tokens,
        threads=arguments.threads,
        flash_attention=arguments.flash_attention,
        key_value_type=arguments.key_value_type,
        verbose=arguments.verbose,
    )
    # No beginning-of-text token is added by hand: the model file says whether it wants one.
    ids = session.tokenize(text)
    if len(ids) < arguments.tokens:
        raise SystemExit(f"{arguments.text}: {len(ids)} tokens, {arguments.tokens} wanted")
    ids = ids[: arguments.tokens]
    session.decode(ids, every_logit=True)
    logits = session.logits(len(ids))
    session.close()

    likelihood = log_probabilities(logits[:-1])[np.arange(len(ids) - 1), ids[1:]]
    print(
        f"{len(ids)} tokens, vocabulary {logits.shape[1]}, perplexity {np.exp(-likelihood.mean()):.3f}",
        file=sys.stderr,
    )
    if arguments.against:
        earlier = load_file(arguments.against)
        if earlier["input_ids"].tolist() != ids:
            raise SystemExit(f"{arguments.against}: made from other tokens")
        print(json.dumps({"rows": [distance(earlier["logits"], logits)]}))
    if not arguments.output:
        return
    save_file(
        {"input_ids": np.asarray(ids, dtype=np.int32), "logits": logits.astype(np.float32)},
        arguments.output,
        metadata={
            "llama_cpp_python": package_version(),
            "system_info": system_info(),
            "model": os.path.basename(arguments.model),
            "flash_attention": arguments.flash_attention,
            "key_value_type": arguments.key_value_type,
        },
    )


if __name__ == "__main__":
    main()
