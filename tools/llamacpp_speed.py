#!/usr/bin/env python3
"""Prefill and decode speed of llama.cpp on one GGUF file, as one JSON object of the form our own bench prints.

    python tools/llamacpp_speed.py MODEL.gguf --prompt-tokens 512 --gen-tokens 64 --threads 2 --flash-attention on
    python tools/llamacpp_speed.py MODEL.gguf --prompt-tokens 8000 --cache-type q4_0 --repeat 3

One process measures one setting, so that nothing of an earlier setting (thread pool, repacked weights, peak memory)
is left over. A warm-up pass of up to 512 tokens comes first: the file is mapped and repacked before the clock starts.
With --repeat, decoding is measured so often after the same prompt.
"""

import argparse
import json
import os
import resource
import time

import llamacpp_logits as llamacpp

# Prompt tokens of one physical batch: the peer's own default.
BATCH = 512


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--flash-attention", choices=("on", "off"), default="on")
    parser.add_argument("--cache-type", choices=sorted(llamacpp.KEY_VALUE_TYPES), default="f16")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()

    prompt, generated = arguments.prompt_tokens, arguments.gen_tokens
    session = llamacpp.Session(
        arguments.model,
        context=prompt + generated,
        batch=min(prompt, BATCH),
        threads=arguments.threads,
        flash_attention=arguments.flash_attention,
        key_value_type=arguments.cache_type,
    )
    # Which tokens does not change the work; spread them so that the embedding rows are not all one.
    ids = [(index * 7919 + 11) % min(session.vocabulary_size, 32000) for index in range(prompt + generated)]

    session.decode(ids[: min(prompt, BATCH)])
    session.decode(ids[prompt : prompt + 1])
    session.clear()

    start, start_cpu = time.perf_counter(), time.process_time()
    for first in range(0, prompt, BATCH):
        session.decode(ids[first : min(first + BATCH, prompt)])
    prefilled, prefilled_cpu = time.perf_counter(), time.process_time()
    runs = []
    for _ in range(arguments.repeat):
        session.forget_from(prompt)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        # The tokens are given, not sampled: reading the logits back is left out, to the peer's advantage.
        for token in ids[prompt:]:
            session.decode([token])
        runs.append((time.perf_counter() - begin, time.process_time() - begin_cpu))
    decode, decode_cpu = min(runs)
    session.close()

    print(json.dumps({
        "engine": f"llama-cpp-python {llamacpp.package_version()}",
        "system_info": llamacpp.system_info(),
        "rows": [{
            "threads": arguments.threads,
            "flash_attention": arguments.flash_attention,
            "prompt_tokens": prompt,
            "gen_tokens": generated,
            "prefill_tokens_per_s": prompt / (prefilled - start),
            "decode_tokens_per_s": generated / decode,
            "decode_tokens_per_s_median": generated / sorted(runs)[len(runs) // 2][0],
            "cache_type": arguments.cache_type,
            "ttft_ms": (prefilled - start) * 1e3,
            # With one thread, what a machine without other load would show.
            "cpu_prefill_tokens_per_s": prompt / (prefilled_cpu - start_cpu) if arguments.threads == 1 else None,
            "cpu_decode_tokens_per_s": generated / decode_cpu if arguments.threads == 1 else None,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }],
    }))


if __name__ == "__main__":
    main()
