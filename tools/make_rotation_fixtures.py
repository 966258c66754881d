#!/usr/bin/env python3
"""Writes the `.pt` fixtures of crates/rotations/tests/rotations/pt.rs with torch, and what torch reads from them.

Well-formed files come with `expected.json`: the numbers of every tensor as the bits of float64, from
`torch.load(weights_only=True)`.
Hostile files never run anything here: their pickles are assembled by hand.

    pip install torch numpy && tools/make_rotation_fixtures.py
"""

import io
import json
import pathlib
import pickle
import struct
import zipfile

import torch

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parent / "crates" / "rotations" / "tests" / "fixtures" / "rotations"
DIM = 8
HEADS = 2


def rotation(generator, *shape):
    """Random orthogonal matrices, from the QR decomposition of Gaussian ones."""
    return torch.linalg.qr(torch.randn(*shape, DIM, DIM, generator=generator, dtype=torch.float64))[0]


def eigenvalues(generator, *shape):
    return torch.rand(*shape, DIM, generator=generator, dtype=torch.float64).sort(dim=-1)[0]


def document(layers, objective="qqt_r_h_pbr", version=1, grouping="layer"):
    return {"format_version": version, "objective": objective, "source_grouping": grouping, "layers": layers}


def layer(index, matrix, values=None):
    entry = {"layer_id": index, "rotation": matrix}
    if values is not None:
        entry["eigenvalues"] = values
    return entry


def hadamard():
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    return matrix


def well_formed():
    g = torch.Generator().manual_seed(3)
    yield "format1_k", document({i: layer(i, rotation(g).float(), eigenvalues(g).float()) for i in range(3)})
    values = {i: layer(i, rotation(g).float(), eigenvalues(g).float()) for i in range(3)}
    yield "format1_v", document(values, objective="sst_r_h_pbr")
    heads = {i: layer(i, rotation(g, HEADS).float(), eigenvalues(g, HEADS).float()) for i in range(2)}
    yield "format2_k", document(heads, version=2, grouping="head")
    shared, ones = hadamard(), torch.ones(DIM)
    yield "shared_storage", document({i: layer(i, shared, ones) for i in (3, 7, 11)}, objective="hadamard")
    # One storage for everything: every layer is a window of it, transposed or with gaps.
    whole = torch.zeros(4, DIM, 2 * DIM)
    whole[0, :, :DIM], whole[1, :, ::2], whole[2, :, DIM:] = rotation(g), rotation(g), rotation(g)
    windows = {0: whole[0, :, :DIM].t(), 1: whole[1, :, ::2], 2: whole[2, :, DIM:]}
    yield "strides", document({i: layer(i, window) for i, window in windows.items()})
    yield "string_ids", document({str(i): layer(str(i), rotation(g).float()) for i in (0, 1)}, version="identity-v1")
    yield "float64", document({0: layer(0, rotation(g), eigenvalues(g))})
    # Entries that bfloat16 and float16 hold exactly enough to stay orthogonal.
    signs = torch.kron(torch.eye(2), torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2)
    yield "bfloat16", document({0: layer(0, signs.bfloat16(), torch.ones(DIM).bfloat16())})
    yield "float16", document({0: layer(0, signs.half(), torch.ones(DIM).half())})
    ok = {i: layer(i, rotation(g).float()) for i in range(4)}
    yield "missing_layer", document({i: ok[i] for i in (0, 1, 3)})
    yield "not_orthogonal", document({0: layer(0, rotation(g).float() * 1.01)})
    # These are well-formed archives with contents that must be refused.
    yield "bad_nan", document({0: layer(0, torch.where(torch.eye(DIM) > 0, torch.nan, 0.0))})
    yield "bad_dims", document({0: layer(0, torch.zeros(DIM, DIM - 1))})
    yield "bad_four_axes", document({0: layer(0, torch.zeros(1, 1, DIM, DIM))})
    yield "bad_mixed_dims", document({0: layer(0, torch.eye(DIM)), 1: layer(1, torch.eye(4))})
    yield "bad_layer_id", document({0: layer(1, torch.eye(DIM))})
    yield "bad_twice", document({0: layer(0, torch.eye(DIM)), "0": layer(0, torch.eye(DIM))})
    yield "bad_no_layers", {"format_version": 1, "objective": "qqt_r_h_pbr"}
    yield "bad_long_storage", document({0: layer(0, torch.eye(DIM).long())})
    yield "bad_parameter", document({0: layer(0, torch.nn.Parameter(torch.eye(DIM)))})
    yield "bad_eigenvalues", document({0: layer(0, torch.eye(DIM), torch.ones(DIM + 1))})


def archive(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as out:
        for name, data in members.items():
            info = zipfile.ZipInfo(f"rotation/{name}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = method
            out.writestr(info, data)


class Call:
    """Pickled as a call of `function`; unpickling this would run it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def hostile(template):
    import os
    import subprocess

    calls = {"os_system": Call(os.system, "echo ran > /dev/null"), "popen": Call(subprocess.Popen, ["true"]),
             "eval": Call(eval, "1"), "getattr": Call(getattr, object, "__subclasses__")}
    for name, call in calls.items():
        for protocol in (2, 4):
            data = pickle.dumps(document({0: layer(0, call)}), protocol)
            archive(TARGET / f"hostile_{name}_{protocol}.pt", {"data.pkl": data, "version": "3\n"})
    whole = (TARGET / f"{template}.pt").read_bytes()
    (TARGET / "hostile_truncated.pt").write_bytes(whole[: len(whole) // 2])
    (TARGET / "hostile_not_a_zip.pt").write_bytes(pickle.dumps(document({}), 2))
    (TARGET / "hostile_empty.pt").write_bytes(b"")
    with zipfile.ZipFile(io.BytesIO(whole)) as source:
        folder = source.namelist()[0].split("/")[0]
        members = {name.removeprefix(f"{folder}/"): source.read(name) for name in source.namelist()}
    # 4 MiB of zeros where a tensor of 256 bytes should be; and the same with a size that lies.
    archive(TARGET / "hostile_bomb.pt", members | {"data/0": bytes(4 << 20)}, zipfile.ZIP_DEFLATED)
    data = bytearray((TARGET / "hostile_bomb.pt").read_bytes())
    at = 0
    while (at := data.find(struct.pack("<I", 4 << 20), at)) >= 0:
        data[at : at + 4] = struct.pack("<I", 256)
        at += 4
    (TARGET / "hostile_bomb_lies.pt").write_bytes(data)
    archive(TARGET / "hostile_short_storage.pt", members | {"data/0": members["data/0"][:-4]})
    archive(TARGET / "hostile_no_storage.pt", {k: v for k, v in members.items() if k != "data/0"})
    archive(TARGET / "hostile_big_endian.pt", members | {"byteorder": b"big"})
    archive(TARGET / "hostile_cut_pickle.pt", members | {"data.pkl": members["data.pkl"][:-40]})
    # A storage of 2^40 elements in the description, and a view that leaves its storage.
    described = members["data.pkl"].replace(b"K@tq", b"\x8a\x06\0\0\0\0\0\x01tq", 1)
    assert described != members["data.pkl"]
    archive(TARGET / "hostile_huge_storage.pt", members | {"data.pkl": described})
    described = members["data.pkl"].replace(b"QK\0K\x08", b"QK\x01K\x08", 1)
    assert described != members["data.pkl"]
    archive(TARGET / "hostile_view_outside.pt", members | {"data.pkl": described})


def read_back(path):
    loaded = torch.load(path, weights_only=True)
    tensors = {}
    for index, entry in loaded["layers"].items():
        tensors[str(index)] = {
            name: {"shape": list(entry[name].shape), "bits": entry[name].double().flatten().view(torch.int64).tolist()}
            for name in ("rotation", "eigenvalues") if name in entry
        }
    return {"format_version": str(loaded["format_version"]), "objective": loaded["objective"], "layers": tensors}


def main():
    TARGET.mkdir(parents=True, exist_ok=True)
    expected = {}
    for name, contents in well_formed():
        path = TARGET / f"{name}.pt"
        torch.save(contents, path)
        if not name.startswith("bad_"):
            expected[name] = read_back(path)
    hostile("format1_k")
    (TARGET / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
