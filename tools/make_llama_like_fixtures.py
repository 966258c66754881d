#!/usr/bin/env python3
"""Write the tiny checkpoints of families that are Llama with a difference, with the logits that `transformers` gives them.

    fixtures-venv/bin/python tools/make_llama_like_fixtures.py crates/model/tests/fixtures/models

Files and environment are those of `make_model_fixtures.py`; keys and values are rounded to bf16 as a cache does, as in
`make_moe_fixtures.py`, so that the tests can be strict.
"""

import importlib.metadata
import json
import shutil

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, MistralConfig, Phi3Config, SmolLM3Config

import make_model_fixtures as base
import make_moe_fixtures as moe

F16 = gguf.GGMLQuantizationType.F16

def factors(step, pairs=6):
    return [1.0 + step * pair for pair in range(pairs)]


SHORT, LONG = factors(0.03), factors(0.4)


def small(**overrides):
    return base.common(**{
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, **overrides,
    })


def long_rope(**changes):
    return {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, **changes}


def phi3(**changes):
    return Phi3Config(**{
        **small(hidden_size=64, original_max_position_embeddings=64), "rope_parameters": long_rope(), **changes,
    })


# name: (configuration, style of config.json, changes of the configuration that must be felt, what the case is for)
CASES = {
    "llama3.2": (
        lambda: LlamaConfig(**small(tie_word_embeddings=True, head_dim=16), rope_parameters=dict(base.LLAMA3_SCALING)),
        "new", [dict(rope_parameters=base.rope(10000.0))], "Llama-3 RoPE scaling and tied embeddings, as Llama 3.2",
    ),
    "mistral": (
        lambda: MistralConfig(**small(head_dim=24), sliding_window=40, rope_parameters=base.rope(10000.0)),
        "old", [dict(sliding_window=None), dict(sliding_window=32)],
        "a sliding window in all layers, a head dimension of its own",
    ),
    "smollm3": (
        lambda: SmolLM3Config(**small(num_hidden_layers=4, tie_word_embeddings=True), rope_parameters=base.rope(1000.0)),
        "new", [dict(no_rope_layers=[1, 1, 1, 1]), dict(no_rope_layers=[1, 1, 0, 1])], "every fourth layer does not rotate",
    ),
    "granite": (
        lambda: GraniteConfig(
            **small(), embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.22, logits_scaling=0.3,
            rope_parameters=base.rope(10000.0),
        ),
        "new",
        [dict(embedding_multiplier=1.0), dict(attention_multiplier=0.1), dict(residual_multiplier=1.0),
         dict(logits_scaling=1.0)],
        "factors on embeddings, attention logits, what blocks add, and logits",
    ),
    "phi3": (
        phi3, "new",
        [dict(rope_parameters=long_rope(long_factor=SHORT)), dict(rope_parameters=long_rope(attention_factor=1.0))],
        "fused projections, long RoPE factors, three quarters of a head rotate",
    ),
    "phi3-short": (
        lambda: phi3(sliding_window=70, original_max_position_embeddings=256,
                     rope_parameters=long_rope(original_max_position_embeddings=256)),
        "phi", [dict(sliding_window=None), dict(rope_parameters=long_rope(original_max_position_embeddings=256, short_factor=LONG))],
        "short RoPE factors as older files give them, and a sliding window in all layers",
    ),
    "llama3.2-wide": (
        lambda: LlamaConfig(**small(tie_word_embeddings=True, head_dim=64), rope_parameters=dict(base.LLAMA3_SCALING)),
        "new", [dict(rope_parameters=base.rope(10000.0))], "as llama3.2 with heads of 64 channels",
    ),
    "mistral-wide": (
        lambda: MistralConfig(**small(head_dim=128), sliding_window=70, rope_parameters=base.rope(10000.0)),
        "old", [dict(sliding_window=None), dict(sliding_window=60)], "as mistral with heads of 128 channels",
    ),
    "smollm3-wide": (
        lambda: SmolLM3Config(
            **small(num_hidden_layers=4, hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
                    tie_word_embeddings=True), rope_parameters=base.rope(1000.0),
        ),
        "new", [dict(no_rope_layers=[1, 1, 1, 1])], "as smollm3 with heads of 64 channels",
    ),
    "granite-wide": (
        lambda: GraniteConfig(
            **small(hidden_size=128, num_attention_heads=2, num_key_value_heads=1), embedding_multiplier=3.0,
            attention_multiplier=0.1, residual_multiplier=0.22, logits_scaling=0.3, rope_parameters=base.rope(10000.0),
        ),
        "new", [dict(embedding_multiplier=1.0), dict(attention_multiplier=0.02), dict(residual_multiplier=1.0)],
        "as granite with heads of 64 channels",
    ),
    "phi3-wide": (
        lambda: phi3(
            hidden_size=192, num_attention_heads=2, num_key_value_heads=1,
            rope_parameters=long_rope(short_factor=factors(0.005, 36), long_factor=factors(0.07, 36)),
        ),
        "new", [dict(rope_parameters=long_rope(short_factor=factors(0.005, 36), long_factor=factors(0.005, 36)))],
        "as phi3 with heads of 96 channels",
    ),
}

# name: checkpoint it is converted from
GGUF_FILES = {"gguf-smollm3-f16": "smollm3", "gguf-granite-f16": "granite", "gguf-phi3-f16": "phi3"}

GGUF_LAYER_NAMES = {**base.GGUF_LAYER_NAMES, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


def model_of(configuration):
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").float().eval()
    moe.round_cache(model)
    return model


def build(name, first_seed=4000):
    model, seed = model_of(CASES[name][0]()), first_seed + list(CASES).index(name)
    moe.randomise(model, seed)
    model.tie_weights()
    return model, seed


def assert_worth_testing(name, model, ids, logits):
    """Each feature is felt."""
    assert torch.isfinite(logits).all() and logits.std() > 0.5, (name, logits.std())
    make, _, changes, _ = CASES[name]
    settings = {key: value for key, value in make().to_dict().items() if key not in ("transformers_version", "layer_types")}
    for change in changes:
        other = model_of(type(make())(**{**settings, **change}))
        other.load_state_dict(model.state_dict())
        difference = float((base.logits_of(other, ids) - logits).abs().mean() / logits.std())
        assert difference > 0.04, (name, change, difference)


def older(configuration):
    """As the first files of Phi-3 were."""
    parameters = configuration.pop("rope_parameters")
    configuration["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    configuration["rope_theta"] = parameters["rope_theta"]
    configuration["rope_scaling"] = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    return configuration


def write_checkpoint(output, name):
    _, style, _, purpose = CASES[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    model, seed = build(name)
    model.to(torch.bfloat16).save_pretrained(folder)
    # From the folder, not from memory: what a reader of these files gets.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    moe.round_cache(model)
    configuration = json.loads((folder / "config.json").read_text())
    if style == "old":
        configuration = base.old_style(configuration)
    if style == "phi":
        configuration = older(configuration)
    base.write_json(folder / "config.json", configuration)
    base.write_json(folder / "tokenizer.json", base.tokenizer_json())
    ids = base.token_ids(seed)
    logits = base.logits_of(model, ids)
    assert_worth_testing(name, model, ids, logits)
    base.write_expected(folder, model, ids, logits, moe.notes_of(model, purpose, "bfloat16", seed, float("inf")))


def write_gguf(output, name):
    source = GGUF_FILES[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Rounding of keys to bf16 goes the same way in every arithmetic with these.
    model, seed = build(source, 4100)
    configuration = model.config
    architecture = configuration.model_type
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), architecture)
    head_dimension, parameters = base.write_metadata(writer, name, configuration, gguf.LlamaFileType.MOSTLY_F16)
    writer.add_rope_dimension_count(int(head_dimension * parameters.get("partial_rotary_factor", 1.0)))
    if architecture == "granite":
        writer.add_attention_scale(configuration.attention_multiplier)
        writer.add_embedding_scale(configuration.embedding_multiplier)
        writer.add_residual_scale(configuration.residual_multiplier)
        writer.add_logit_scale(configuration.logits_scaling)
    if architecture == "phi3":
        original = parameters["original_max_position_embeddings"]
        factor = configuration.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1.0 + np.log(factor) / np.log(original))))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.asarray(parameters[f"{kind}_factor"], dtype=np.float32))
    turned = {"q_proj": configuration.num_attention_heads, "k_proj": configuration.num_key_value_heads}
    stored = {}
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy().astype(np.float32)
        if key in base.GGUF_NAMES:
            target = base.GGUF_NAMES[key]
        else:
            _, _, layer, rest = key.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            target = f"blk.{layer}.{GGUF_LAYER_NAMES[module]}.{kind}"
        if weight.ndim == 1:
            writer.add_tensor(target, weight)
            stored[key] = torch.from_numpy(weight)
            continue
        heads = next((count for part, count in turned.items() if part in key), None)
        packed = gguf.quants.quantize(base.interleave_heads(weight, heads) if heads else weight, F16)
        writer.add_tensor(target, packed, raw_dtype=F16)
        stored[key] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(gguf.quants.quantize(weight, F16), F16)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(stored, strict=False)
    model.tie_weights()
    ids = base.token_ids(seed)
    logits = base.logits_of(model, ids)
    notes = moe.notes_of(model, f"GGUF form of {source}", "F16 matrices, F32 vectors", seed, float("inf"))
    base.write_expected(folder, model, ids, logits, {**notes, "gguf": importlib.metadata.version("gguf")})


def main():
    base.write_cases(__doc__, ((CASES, write_checkpoint), (GGUF_FILES, write_gguf)))


if __name__ == "__main__":
    main()
