#!/usr/bin/env python3
"""Writes the golden 2-bit pages of crates/codec/tests/fixtures.

An implementation of the page format of its own, in numpy, from the written rules (crates/codec/src/quantise.rs,
band.rs, layout/codes.rs and layout/banded.rs): the Rust tests encode the same numbers and must give the same bytes. Needs numpy only.

    python3 tools/make_codec_fixtures.py crates/codec/tests/fixtures
"""

import pathlib
import sys

import numpy as np

TOKENS = 64
STEPS = [0.7, 0.8, 0.9, 0.9957, 1.1, 1.2, 1.35]
f32, f64 = np.float32, np.float64


def fma(a, b, c):
    """f32 fused multiply-add: exact product in f64, sum rounded to odd, then to f32, so no double rounding."""
    product = np.asarray(a, f64) * np.asarray(b, f64)
    c = np.broadcast_to(np.asarray(c, f64), product.shape)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even, odd, total).astype(f32)


def to_bf16(x):
    bits = np.asarray(x, f32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(f32)


def stored(x, kind):
    """(bits, value) of a number rounded to a 16-bit type."""
    if kind == "f16":
        half = np.clip(np.asarray(x, f32), f32(-65504), f32(65504)).astype(np.float16)
        return half.view(np.uint16), half.astype(f32)
    value = to_bf16(x)
    return (value.view(np.uint32) >> 16).astype(np.uint16), value


def numbers(seed, count):
    """The generator the Rust test repeats: multiples of 2^-20 within +-8, every 97th eight times larger."""
    state, out = seed, []
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        value = ((state >> 40) - 2**23) / 2**20
        out.append(value * 8 if i % 97 == 96 else value)
    return np.array(out, f32)


def matrix(seed, dim):
    """Not a rotation, on purpose: any square matrix must be applied the same way."""
    return (numbers(seed, dim * dim) / f32(64)).reshape(dim, dim)


def rotate(rows, rotation, mean, published):
    if published:
        rows, rotation = to_bf16(rows), to_bf16(rotation)
    if mean is not None:
        rows = rows - mean
    out = np.zeros_like(rows)
    for i in range(rows.shape[1]):
        out = fma(rows[:, i : i + 1], rotation[i : i + 1], out)
    return to_bf16(out)


def clip(rows, ratio):
    if ratio <= 0:
        return rows
    dim = rows.shape[1]
    index = min(int(ratio * dim), dim - 1)
    limit = np.sort(np.abs(rows), axis=1)[:, index : index + 1]
    return np.minimum(np.maximum(rows, -limit), limit)


def codes_on_grid(group, step, low, kind, published, top=3):
    """Codes and the two stored numbers of a group (tokens x channels) for a grid per token."""
    offset = f32(0) - low
    if published:
        scale_bits, scale = stored(step, kind)
        offset_bits, stored_offset = stored(offset, kind)
        position = group / step + offset / step + f32(0.5)
    else:
        smallest = f32(2**-24) if kind == "f16" else np.finfo(f32).tiny
        scale_bits, scale = stored(np.maximum(step, smallest), kind)
        offset_bits, stored_offset = stored(offset, kind)
        position = fma(group + stored_offset, f32(1) / scale, f32(0.5))
    codes = np.trunc(np.clip(position, f32(0), f32(top))).astype(np.uint8)
    return codes, scale_bits, offset_bits, scale, stored_offset


def quantise(group, rule, kind, published, bits=2):
    top, ratio = 2**bits - 1, f32(0.3352) / f32(0.9957) if bits == 4 else f32(1)
    if rule[0] == "clip":
        low, high = group.min(axis=1, keepdims=True), group.max(axis=1, keepdims=True)
        step = np.maximum(high - low, f32(1e-8)) / f32(top)
        return codes_on_grid(group, step, low, kind, published, top)[:3]
    count = f32(group.shape[1])
    mean = np.zeros((len(group), 1), f32)
    for i in range(group.shape[1]):
        mean = mean + group[:, i : i + 1]
    mean = mean / count
    variance = np.zeros_like(mean)
    for i in range(group.shape[1]):
        difference = group[:, i : i + 1] - mean
        variance = fma(difference, difference, variance)
    deviation = np.sqrt(variance / count) + f32(1e-8)
    best = None
    for steps in [0.9957] if rule[0] == "gaussian" else STEPS:
        step = f32(steps) * ratio * deviation
        low = mean - f32(top / 2) * step
        codes, scale_bits, offset_bits, scale, offset = codes_on_grid(group, step, low, kind, published, top)
        error = np.zeros_like(mean)
        for i in range(group.shape[1]):
            difference = fma(codes[:, i : i + 1].astype(f32), scale, -offset) - group[:, i : i + 1]
            error = fma(difference, difference, error)
        if best is None:
            best = [error, codes, scale_bits, offset_bits, scale, offset]
        else:
            better = error < best[0]
            new = [error, codes, scale_bits, offset_bits, scale, offset]
            best = [np.where(better, new, old) for new, old in zip(new, best)]
    _, codes, scale_bits, offset_bits, scale, offset = best
    if published:
        return codes, scale_bits, offset_bits
    along = np.zeros_like(mean)
    for i in range(group.shape[1]):
        decoded = fma(codes[:, i : i + 1].astype(f32), scale, -offset)
        along = fma(group[:, i : i + 1] - mean, decoded - mean, along)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = variance / along
    gain = np.where((gain > f32(0.5)) & (gain < f32(2)), gain, f32(1))
    smallest = f32(2**-24) if kind == "f16" else np.finfo(f32).tiny
    scale_bits, _ = stored(np.maximum(gain * scale, smallest), kind)
    offset_bits, _ = stored(fma(gain, offset, (gain - f32(1)) * mean), kind)
    return codes, scale_bits, offset_bits


def pack(codes, scales):
    """codes[side]: 64 x d; scales[side]: groups of (scale bits, offset bits), each 64."""
    page = bytearray()
    dim = codes[0].shape[1]
    for block in range(dim // 16):
        for token in range(TOKENS):
            for b in range(4):
                page.append(sum(int(codes[0][token, 16 * block + 4 * p + b]) << (2 * p) for p in range(4)))
    for block in range(TOKENS // 16):
        for channel in range(dim):
            for b in range(4):
                page.append(sum(int(codes[1][16 * block + 4 * p + b, channel]) << (2 * p) for p in range(4)))
    for side in scales:
        for pair in side:
            for bits in pair:
                page += bits.reshape(TOKENS).astype("<u2").tobytes()
    return bytes(page)


def band_widths(dim, kind):
    """(channels, bits) of every band of a key: two bits a channel on average, of all channels or of the first half, the
    same bands with four bits, or quarters with the bits that are given as `4/2/2/0`."""
    if "/" in kind:
        return [(dim // 4, int(bits)) for bits in kind.split("/") if bits != "0"]
    units = -(-(dim // 16) // 2) if kind == "int15" else dim // 16
    strong = 0 if units < 3 else max(1, units // 4)
    bands = [(strong, 4), (units - 3 * strong, 2), (strong, 1), (strong, 1)]
    return [(16 * count, 4 if kind == "high" else bits) for count, bits in bands if count]


def band_scale_code(value):
    """8-bit logarithm of a scale: steps of 2^(1/16) from 2^-8 on, 0 below."""
    bounds = [f32(2.0 ** ((n + 0.5) / 16)) for n in range(16)]
    mantissa, exponent = np.frexp(value)
    octave, within = int(exponent) - 1 + 8, f32(mantissa * 2)
    return min(max(16 * octave + sum(within >= bound for bound in bounds), 0), 255)


BAND_STEPS = {1: [1.596], 2: [0.7, 0.85, 0.9957, 1.15, 1.35], 4: [0.235, 0.285, 0.3352, 0.385, 0.45]}


def quantise_band(band, bits):
    """Codes of a band (tokens x channels) and the code of each token's scale."""
    levels, count = 2**bits, band.shape[1]
    half = f32((levels - 1) / 2)
    squares = np.zeros((len(band), 1), f32)
    for i in range(count):
        squares = fma(band[:, i : i + 1], band[:, i : i + 1], squares)
    deviation = np.sqrt(squares / f32(count))
    best = None
    for step in BAND_STEPS[bits]:
        reciprocal = f32(1) / (f32(step) * deviation)
        position = fma(band, reciprocal, f32(levels / 2))
        codes = np.trunc(np.clip(position, f32(0), f32(levels - 1))).astype(np.uint8)
        along, length = np.zeros_like(squares), np.zeros_like(squares)
        for i in range(count):
            level = codes[:, i : i + 1].astype(f32) - half
            along = fma(band[:, i : i + 1], level, along)
            length = fma(level, level, length)
        matched = along * along / length
        if best is None:
            best = [matched, codes, along]
        else:
            better = matched > best[0]
            best = [np.where(better, new, old) for new, old in zip([matched, codes, along], best)]
    _, codes, along = best
    return codes, [band_scale_code(value) for value in (squares / along)[:, 0]]


def make_banded(dim, rule, seed, kind="int2"):
    """Keys in bands, values as centred codes of 2 or 4 bits in one group. Channels after the last band are left out."""
    rows = [
        rotate(
            numbers(seed + 10 * side, TOKENS * dim).reshape(TOKENS, dim),
            matrix(seed + 10 * side + 2, dim),
            numbers(seed + 10 * side + 1, dim),
            False,
        )
        for side in range(2)
    ]
    regions, scales, first = {4: [], 2: [], 1: []}, bytearray(), 0
    for channels, bits in band_widths(dim, kind):
        codes, codes_of_scales = quantise_band(rows[0][:, first : first + channels], bits)
        regions[bits].append(codes)
        scales += bytes(codes_of_scales)
        first += channels
    page = bytearray()
    for bits, parts in regions.items():
        if not parts:
            continue
        codes, per_word = np.concatenate(parts, axis=1), 32 // bits
        for word in range(codes.shape[1] // per_word):
            for token in range(TOKENS):
                for b in range(4):
                    places = range(per_word // 4)
                    page.append(sum(int(codes[token, per_word * word + 4 * p + b]) << (bits * p) for p in places))
    bits = 4 if kind == "high" else 2
    per_word = 32 // bits
    codes, scale_bits, offset_bits = quantise(rows[1], (rule,), "f16", False, bits)
    codes = np.pad(codes, ((0, 0), (0, -dim % 32)))
    for block in range(TOKENS // per_word):
        for channel in range(codes.shape[1]):
            for b in range(4):
                places = range(per_word // 4)
                page.append(sum(int(codes[per_word * block + 4 * p + b, channel]) << (bits * p) for p in places))
    if "/" in kind:
        # Room for the scales of four bands.
        scales += bytes(4 * TOKENS - len(scales))
    page += scales
    for bits in (scale_bits, offset_bits):
        page += bits.reshape(TOKENS).astype("<u2").tobytes()
    return bytes(page)


def make(dim, groups, kind, published, rules, centred, seed):
    codes, scales = [], []
    for side in range(2):
        rows = numbers(seed + 10 * side, TOKENS * dim).reshape(TOKENS, dim)
        mean = numbers(seed + 10 * side + 1, dim) if centred else None
        rows = rotate(rows, matrix(seed + 10 * side + 2, dim), mean, published)
        rule = rules[side]
        if rule[0] == "clip":
            rows = clip(rows, rule[1])
        parts = [quantise(group, rule, kind, published) for group in np.split(rows, groups, axis=1)]
        side_codes = np.concatenate([part[0] for part in parts], axis=1)
        padded = -(-dim // 32) * 32
        codes.append(np.pad(side_codes, ((0, 0), (0, padded - dim))))
        scales.append([(part[1], part[2]) for part in parts])
    return pack(codes, scales)


CASES = {
    "paper_d64": (64, 1, "f16", True, [("clip", 0.96), ("clip", 0.92)], False, 1),
    "paper_d32_groups_bf16": (32, 2, "bf16", True, [("clip", 0.0), ("clip", 0.9)], False, 2),
    "auto_d64_search": (64, 1, "f16", False, [("search",), ("clip", 0.92)], True, 3),
    "auto_d128_groups_bf16": (128, 2, "bf16", False, [("gaussian",), ("search",)], True, 4),
    "auto_d48_padded": (48, 3, "f16", False, [("clip", 0.9), ("gaussian",)], True, 5),
    "auto_d96": (96, 1, "f16", False, [("gaussian",), ("clip", 0.0)], False, 6),
    "auto_d80_padded": (80, 1, "f16", False, [("search",), ("gaussian",)], True, 7),
    "auto_d256": (256, 1, "f16", False, [("search",), ("clip", 0.92)], True, 8),
}


BANDED_CASES = {
    "banded_d48": (48, "gaussian", 21),
    "banded_d64": (64, "search", 22),
    "banded_d96": (96, "search", 23),
    "banded_d128": (128, "search", 24),
    "banded_d80": (80, "search", 25),
    "banded_d256": (256, "gaussian", 26),
    "int15_d48": (48, "gaussian", 31, "int15"),
    "int15_d64": (64, "search", 32, "int15"),
    "int15_d96": (96, "search", 33, "int15"),
    "int15_d128": (128, "search", 34, "int15"),
    "int15_d80": (80, "gaussian", 35, "int15"),
    "int15_d256": (256, "search", 36, "int15"),
    "high_d48": (48, "gaussian", 41, "high"),
    "high_d64": (64, "search", 42, "high"),
    "high_d96": (96, "clip", 43, "high"),
    "high_d128": (128, "search", 44, "high"),
    "high_d80": (80, "search", 45, "high"),
    "high_d256": (256, "gaussian", 46, "high"),
    "widths_4000_d64": (64, "search", 51, "4/0/0/0"),
    "widths_4220_d64": (64, "gaussian", 52, "4/2/2/0"),
    "widths_4422_d64": (64, "search", 53, "4/4/2/2"),
    "widths_4200_d128": (128, "search", 54, "4/2/0/0"),
    "widths_4222_d128": (128, "gaussian", 55, "4/2/2/2"),
    "widths_4222_d64": (64, "search", 56, "4/2/2/2"),
    "widths_4422_d256": (256, "search", 57, "4/4/2/2"),
}


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, page in [
        *((name, make(*case)) for name, case in CASES.items()),
        *((name, make_banded(*case)) for name, case in BANDED_CASES.items()),
    ]:
        (out / f"{name}.page").write_bytes(page)
        print(name, (out / f"{name}.page").stat().st_size)


if __name__ == "__main__":
    main()
