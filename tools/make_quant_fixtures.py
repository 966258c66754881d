#!/usr/bin/env python3
"""Writes the fixtures of crates/kernels/tests/cpu/quant_oracle.rs.

Each file holds blocks of random bits and the values the `gguf` package reads from them:
u32 number of bytes, u32 number of elements, the bytes, the elements as f32 (all little-endian).

    pip install gguf numpy && tools/make_quant_fixtures.py
"""

import pathlib
import struct

import gguf
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parent / "crates" / "kernels" / "tests" / "fixtures"

# Byte offsets of the half-precision numbers of a block; random bits there may be infinite or not a number.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
}

# Zeros, the smallest and largest subnormal and normal numbers, of both signs.
EXTREMES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00]

EXPONENTS = [0, 1, 2, 3, 126, 127, 128, 251]


def finite_halves(rng, count):
    bits = rng.integers(0, 1 << 16, size=count, dtype=np.uint16)
    return np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)


def blocks(rng, name, count, size):
    data = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for position, at in enumerate(HALVES.get(name, [])):
        halves = finite_halves(rng, count)
        for i, bits in enumerate(EXTREMES[:count]):
            halves[(i * (position + 1)) % count] = bits
        data[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        # Exponents of both ends; of the very largest some elements would be infinite.
        data[:, 0] = rng.integers(0, 252, size=count)
        data[: len(EXPONENTS), 0] = EXPONENTS
    if name == "F16":
        data = finite_halves(rng, data.size // 2).view(np.uint8).reshape(data.shape)
    if name in ("F32", "BF16"):
        # The exponent's top bit cleared keeps every number finite.
        data.reshape(-1, 4 if name == "F32" else 2)[:, -1] &= 0xBF
    return data


def main():
    TARGET.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20261115)
    for name in ["F32", "F16", "BF16", *HALVES]:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if elements == 1:
            count, size = 1, 256 * size
        else:
            count = 16 if elements == 32 else 4
        data = blocks(rng, name, count, size).reshape(-1)
        values = np.ascontiguousarray(gguf.quants.dequantize(data, kind), dtype=np.float32).reshape(-1)
        assert np.isfinite(values).all()
        header = struct.pack("<II", data.size, values.size)
        path = TARGET / f"{name.lower()}.bin"
        path.write_bytes(header + data.tobytes() + values.tobytes())
        print(path.name, data.size, values.size)


if __name__ == "__main__":
    main()
