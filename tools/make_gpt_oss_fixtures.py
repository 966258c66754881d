#!/usr/bin/env python3
"""Write the tiny checkpoints of GPT-OSS with the logits that `transformers` gives them.

    fixtures-venv/bin/python tools/make_gpt_oss_fixtures.py crates/model/tests/fixtures/models

Cases, files and environment are those of `make_moe_fixtures.py`. Experts are bf16 as `transformers` writes them, MXFP4 as the
published files have them (logits are those of the dequantised weights), and MXFP4 in a GGUF file.
"""

import importlib.metadata
import json
import math
import shutil

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

import make_model_fixtures as base
import make_moe_fixtures as moe

BLOCK = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def yarn(**changes):
    return {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 64, **changes}


def configuration(**changes):
    settings = dict(
        **base.common(num_hidden_layers=3, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=64),
        num_local_experts=6, num_experts_per_tok=4, sliding_window=40, tie_word_embeddings=False, attention_bias=True,
        rope_parameters=yarn(),
    )
    return GptOssConfig(**{**settings, **changes})


# name: (configuration, style of config.json, how experts are stored, what the case is for)
CASES = {
    "gpt-oss": (
        configuration, "new", "bf16",
        "learned sinks, a window that is less than a page in every second layer, biases, YaRN that is not truncated, the"
        " softmax of those chosen, clamped activations",
    ),
    "gpt-oss-mxfp4": (
        lambda: configuration(
            num_attention_heads=8, num_key_value_heads=2, head_dim=32, sliding_window=70,
            intermediate_size=64, num_experts_per_tok=2, swiglu_limit=2.5, swiglu_alpha=1.3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters=yarn(attention_factor=1.1),
        ),
        "old", "mxfp4", "experts in MXFP4 as published, layers by `layer_types`, another activation",
    ),
    "gguf-gpt-oss-mxfp4": (configuration, None, "gguf", "GGUF form of gpt-oss, experts in MXFP4, other matrices in BF16"),
}

GGUF_LAYER_NAMES = {
    **base.GGUF_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}


def build(make, seed, change=lambda name, tensor: tensor):
    """A model as a file has it; `change` is what the stored type makes of experts."""
    model = AutoModelForCausalLM.from_config(make(), attn_implementation="eager").float().eval()
    moe.round_cache(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.7)
            elif name.endswith("sinks"):
                parameter.copy_(noise * 1.5 + 2.0)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.35 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise * 0.35)
            elif "experts" in name:
                # Inputs come first; gates large enough that some are clamped.
                size = 4.0 if name.endswith("gate_up_proj") else 0.3
                parameter.copy_(noise * size / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(noise * 1.6 / math.sqrt(parameter.shape[-1]))
            parameter.copy_(change(name, parameter.bfloat16().float()))
    return model


def mxfp4(weight):
    """Nibbles and exponents of rows of whole blocks, and what they stand for."""
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    exponent = torch.where(largest > 0, largest.clamp(min=1e-30).log2().floor() - 2, torch.full_like(largest, -127.0))
    scale = torch.exp2(exponent)
    codes = (blocks[..., None] / scale[..., None] - E2M1).abs().argmin(dim=-1)
    exact = (E2M1[codes] * scale).reshape(weight.shape)
    pairs = codes.reshape(*codes.shape[:-1], BLOCK // 2, 2).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent[..., 0] + 127).to(torch.uint8), exact


def through_mxfp4(name, tensor):
    """What MXFP4 makes of experts, whose inputs are the second dimension."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return tensor
    return mxfp4(tensor.transpose(1, 2).contiguous())[2].transpose(1, 2)


def clear_seed(make, change):
    best = (-1.0, None)
    for seed in range(3000, 3000 + moe.SEEDS):
        closest = clearest(build(make, seed, change), base.token_ids(seed))[1]
        best = max(best, (closest, seed))
        if closest > moe.CLEAR:
            break
    return best[1]


def clearest(model, ids):
    """Logits, and the closest decision of any router."""
    seen = []
    hooks = [layer.mlp.router.register_forward_hook(lambda _, __, output: seen.append(output[0].float()))
             for layer in model.model.layers]
    logits = base.logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    count = model.config.num_experts_per_tok
    gaps = []
    for scores in seen:
        ordered = scores.sort(dim=-1, descending=True)[0]
        gaps.append(float((ordered[:, count - 1] - ordered[:, count]).min() / scores.std()))
    return logits, min(gaps)


def assert_worth_testing(name, make, model, ids, logits):
    """Each feature is felt."""
    assert torch.isfinite(logits).all() and logits.std() > 1.0, (name, logits.std())

    def distance(other):
        return float((base.logits_of(other, ids) - logits).abs().mean() / logits.std())

    def moved(kind, value):
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        found = False
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                if key.endswith(kind):
                    tensor.fill_(value)
                    found = True
        assert found, (name, kind)
        difference = distance(model)
        model.load_state_dict(before)
        assert difference > 0.05, (name, kind, difference)

    def moved_by(least=0.05, **changes):
        settings = {key: value for key, value in make().to_dict().items() if key not in ("transformers_version",)}
        other = AutoModelForCausalLM.from_config(GptOssConfig(**{**settings, **changes}), attn_implementation="eager")
        other = other.float().eval()
        other.load_state_dict(model.state_dict())
        difference = distance(other)
        assert difference > least, (name, changes, difference)

    moved("layernorm.weight", 1.0)
    moved("router.weight", 0.0)
    for part in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "router.bias", "gate_up_proj_bias",
                 "down_proj_bias"):
        moved(part, 0.0)
    moved("sinks", -1e4)
    config = model.config
    moved_by(sliding_window=4096)
    moved_by(sliding_window=config.sliding_window - 8)
    other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    moved_by(layer_types=[other[kind] for kind in config.layer_types])
    moved_by(swiglu_limit=config.swiglu_limit * 2)
    moved_by(least=0.02, swiglu_alpha=1.0)
    # Far above what rounding does.
    moved_by(least=0.01, rope_parameters={**config.rope_parameters, "truncate": True})
    moved_by(rope_parameters=base.rope(config.rope_parameters["rope_theta"]))


def write_folder(folder, make, style, stored, seed, purpose):
    change = through_mxfp4 if stored == "mxfp4" else lambda name, tensor: tensor
    model = build(make, seed, change)
    model.bfloat16().save_pretrained(folder)
    moe.write_config(folder, style)
    # From the folder, not from memory: what a reader of these files gets. MXFP4 numbers are bf16 numbers too.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = base.token_ids(seed)
    logits, closest = clearest(model, ids)
    assert_worth_testing(folder.name, make, model, ids, logits)
    if stored == "mxfp4":
        file = folder / "model.safetensors"
        tensors = {}
        for key, tensor in load_file(file).items():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[key] = tensor
                continue
            weight = tensor.float().transpose(1, 2).contiguous()
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"], exact = mxfp4(weight)
            assert torch.equal(exact, weight), key
        save_file(tensors, file, metadata={"format": "pt"})
        written = json.loads((folder / "config.json").read_text())
        written["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
        }
        base.write_json(folder / "config.json", written)
    kind = "bfloat16" if stored == "bf16" else "MXFP4 experts, bfloat16"
    base.write_expected(folder, model, ids, logits, moe.notes_of(model, purpose, kind, seed, closest))


def gguf_tensors(model):
    """Parameters under their GGUF names: outputs before inputs, gates apart from what they are multiplied with."""
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy().astype(np.float32)
        if key in base.GGUF_NAMES:
            yield base.GGUF_NAMES[key], weight
            continue
        _, _, layer, rest = key.split(".", 3)
        block = f"blk.{layer}."
        if rest == "self_attn.sinks":
            yield f"{block}attn_sinks.weight", weight
        elif rest.startswith("mlp.experts."):
            kind = "bias" if rest.endswith("_bias") else "weight"
            if kind == "weight":
                weight = weight.swapaxes(1, 2)
            if "down_proj" in rest:
                yield f"{block}ffn_down_exps.{kind}", np.ascontiguousarray(weight)
            else:
                yield f"{block}ffn_gate_exps.{kind}", np.ascontiguousarray(weight[:, ::2])
                yield f"{block}ffn_up_exps.{kind}", np.ascontiguousarray(weight[:, 1::2])
        else:
            module, kind = rest.rsplit(".", 1)
            yield f"{block}{GGUF_LAYER_NAMES[module]}.{kind}", weight


def write_gguf(folder, make, seed, purpose):
    folder.mkdir(parents=True)
    model = build(make, seed, through_mxfp4)
    config = model.config
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "gpt-oss")
    head_dimension, _ = base.write_metadata(writer, folder.name, config, gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    writer.add_key_length(head_dimension)
    writer.add_value_length(head_dimension)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    kinds = gguf.GGMLQuantizationType
    for name, weight in gguf_tensors(model):
        if name.endswith(("exps.weight",)):
            kind = kinds.MXFP4
        elif weight.ndim == 1 or name.endswith("bias") or "ffn_gate_inp" in name:
            kind = kinds.F32
        else:
            kind = kinds.BF16
        packed = weight if kind == kinds.F32 else gguf.quants.quantize(weight, kind)
        if kind != kinds.F32:
            assert np.array_equal(gguf.quants.dequantize(packed, kind), weight), name
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = base.token_ids(seed)
    logits, closest = clearest(model, ids)
    assert_worth_testing(folder.name, make, model, ids, logits)
    notes = moe.notes_of(model, purpose, "MXFP4 experts, BF16 matrices, F32 routers and vectors", seed, closest)
    base.write_expected(folder, model, ids, logits, {**notes, "gguf": importlib.metadata.version("gguf")})


def write_case(output, name):
    make, style, stored, purpose = CASES[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    seed = clear_seed(make, through_mxfp4 if stored != "bf16" else lambda name, tensor: tensor)
    if stored == "gguf":
        write_gguf(folder, make, seed, purpose)
    else:
        write_folder(folder, make, style, stored, seed, purpose)


def main():
    base.write_cases(__doc__, ((CASES, write_case),))


if __name__ == "__main__":
    main()
