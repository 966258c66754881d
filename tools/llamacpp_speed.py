#!/usr/bin/env python3
"""Prefill and decode speed of llama.cpp on one GGUF file, as one JSON object of the form our own bench prints.

    python tools/llamacpp_speed.py MODEL.gguf --prompt-tokens 512 --gen-tokens 64 --threads 2 --flash-attention on

One process measures one setting, so that nothing of an earlier setting (thread pool, repacked weights, peak memory)
is left over. A full warm-up pass comes first: the file is mapped and repacked before the clock starts.
"""

import argparse
import json
import os
import resource
import time

import llamacpp_logits as llamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--flash-attention", choices=("on", "off"), default="on")
    arguments = parser.parse_args()

    prompt, generated = arguments.prompt_tokens, arguments.gen_tokens
    session = llamacpp.Session(
        arguments.model,
        context=prompt + generated,
        batch=prompt,
        threads=arguments.threads,
        flash_attention=arguments.flash_attention,
    )
    # Which tokens does not change the work; spread them so that the embedding rows are not all one.
    ids = [(index * 7919 + 11) % min(session.vocabulary_size, 32000) for index in range(prompt + generated)]

    session.decode(ids[:prompt])
    session.decode(ids[prompt : prompt + 1])
    session.clear()

    start, start_cpu = time.perf_counter(), time.process_time()
    session.decode(ids[:prompt])
    prefilled, prefilled_cpu = time.perf_counter(), time.process_time()
    # The tokens are given, not sampled: reading the logits back is left out, to the peer's advantage.
    for token in ids[prompt:]:
        session.decode([token])
    finished, finished_cpu = time.perf_counter(), time.process_time()
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
            "decode_tokens_per_s": generated / (finished - prefilled),
            "ttft_ms": (prefilled - start) * 1e3,
            # With one thread, what a machine without other load would show.
            "cpu_prefill_tokens_per_s": prompt / (prefilled_cpu - start_cpu) if arguments.threads == 1 else None,
            "cpu_decode_tokens_per_s": generated / (finished_cpu - prefilled_cpu) if arguments.threads == 1 else None,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }],
    }))


if __name__ == "__main__":
    main()
