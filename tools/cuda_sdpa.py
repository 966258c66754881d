#!/usr/bin/env python3
"""Times PyTorch's BF16 attention of one decoded token, to compare `oscar bench attention --device cuda` with.

    python3 tools/cuda_sdpa.py --batch 1,32 --contexts 32768 [--json]

Every backend that takes the shape is timed (cuDNN, flash attention, memory-efficient); keys and values are contiguous,
without pages. As many layers as it takes to leave no cache warm are replayed from one graph, as in `oscar`; a row is the
median over replays, divided by layers. Needs PyTorch and a GPU.
"""
import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure(backend, batch, context, options):
    """Seconds per layer, or None if the backend does not take the shape."""
    kv_heads, q_heads, d = options.kv_heads, options.q_heads, options.head_dim
    layer = 2 * 2 * batch * kv_heads * context * d
    layers = max(1, -(-options.pool_mb * 2**20 // layer))
    shape = (layers, batch, kv_heads, context, d)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(batch, q_heads, 1, d, device="cuda", dtype=torch.bfloat16)

    def attend():
        for index in range(layers):
            torch.nn.functional.scaled_dot_product_attention(queries, keys[index], values[index], enable_gqa=True)

    try:
        with sdpa_kernel(BACKENDS[backend]):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                attend()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attend()
    except RuntimeError as error:
        print(f"# {backend} {batch} x {context}: {str(error).splitlines()[0]}")
        return None
    times = []
    for _ in range(options.repeat + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / layers)
    return statistics.median(times[2:]), layers


def main():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--contexts", type=numbers, default=[32768])
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pool-mb", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for batch in options.batch:
        for context in options.contexts:
            for backend in BACKENDS:
                measured = measure(backend, batch, context, options)
                if measured is None:
                    continue
                seconds, layers = measured
                size = 2 * 2 * batch * options.kv_heads * context * options.head_dim
                row = {"backend": backend, "batch": batch, "context": context, "layers": layers,
                       "us_per_layer": round(seconds * 1e6, 2), "gb_per_s": round(size / seconds / 1e9, 1)}
                print(json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
