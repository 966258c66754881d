#!/usr/bin/env python3
"""Write the tiny checkpoints of mixtures of experts, and of FP8 weights, with the logits that `transformers` gives them.

    fixtures-venv/bin/python tools/make_moe_fixtures.py crates/model/tests/fixtures/models

Cases, files and environment are those of `make_model_fixtures.py`, with two differences:
  * a router makes steps out of small errors: two experts that are nearly as good change places. So keys and values are
    rounded to bf16 as a cache does (`"cache": "bf16"` in fixture.json, and the tests are as strict as for equal
    arithmetic), and of many seeds the one is taken whose closest decision is clearest;
  * FP8 cases are quantised here, and the logits are those of the dequantised weights.
"""

import importlib.metadata
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MiniMaxM2Config, Qwen3Config, Qwen3MoeConfig

import make_model_fixtures as base

SEEDS = 400
# The closest decision of a router, in standard deviations of its scores.
CLEAR = 0.012
FP8_LARGEST = 448.0

SMALL = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
# Heads as published files have them: cards have no others.
WIDE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=128)

CHECKPOINTS = {
    "qwen3-moe": (
        lambda: Qwen3MoeConfig(
            **base.common(num_hidden_layers=3, **SMALL), moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
            norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False, rope_parameters=base.rope(1000000.0),
        ),
        "new", None, "softmax router, three of eight experts, normalised; a dense layer between two with experts",
    ),
    "qwen3-moe-shards": (
        lambda: Qwen3MoeConfig(
            **base.common(**SMALL), moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
            norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True, rope_parameters=base.rope(10000.0),
        ),
        "old", "20KB", "weights of experts that are not normalised, every second layer, experts in several shards",
    ),
    "glm4-moe": (
        lambda: Glm4MoeConfig(
            **base.common(num_hidden_layers=3, hidden_size=32, num_attention_heads=12, num_key_value_heads=1, head_dim=16),
            moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4,
            topk_group=2, routed_scaling_factor=1.7, norm_topk_prob=True, first_k_dense_replace=1, attention_bias=True,
            use_qk_norm=True, tie_word_embeddings=False, num_mtp_layers=1,
            rope_parameters={**base.rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        "new", None, "sigmoid router with a correction and groups, shared expert, first layer dense, biases, norms, half"
        " of a head rotates, twelve query heads per key head, a layer that predicts further tokens",
    ),
    "glm4-moe-air": (
        lambda: Glm4MoeConfig(
            **base.common(**SMALL), moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2,
            n_shared_experts=2, routed_scaling_factor=1.0, norm_topk_prob=False, first_k_dense_replace=1,
            attention_bias=True, use_qk_norm=False, tie_word_embeddings=True, num_mtp_layers=0,
            rope_parameters={**base.rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        "old", None, "no norms of queries and keys, two shared experts, weights that are not normalised, one group",
    ),
    "minimax-m2": (
        lambda: MiniMaxM2Config(
            **base.common(**{**SMALL, "intermediate_size": 24}), num_local_experts=12, num_experts_per_tok=3,
            tie_word_embeddings=False, rope_parameters={**base.rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        "minimax", None, "queries and keys normed over all heads of a layer, `rotary_dim`, sigmoid router with a correction",
    ),
    "qwen3-moe-wide": (
        lambda: Qwen3MoeConfig(
            **base.common(**WIDE), moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            tie_word_embeddings=False, rope_parameters=base.rope(1000000.0),
        ),
        "new", None, "as qwen3-moe with heads of 128 channels, two of eight experts in all layers",
    ),
    "glm4-moe-wide": (
        lambda: Glm4MoeConfig(
            **base.common(**{**WIDE, "num_attention_heads": 12, "num_key_value_heads": 1}), moe_intermediate_size=48,
            n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=1.7,
            norm_topk_prob=True, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True,
            tie_word_embeddings=False, rope_parameters={**base.rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        "new", None, "as glm4-moe with heads of 128 channels and one group",
    ),
    "minimax-m2-wide": (
        lambda: MiniMaxM2Config(
            **base.common(**{**WIDE, "intermediate_size": 48}), num_local_experts=8, num_experts_per_tok=2,
            tie_word_embeddings=False, rope_parameters={**base.rope(10000.0), "partial_rotary_factor": 0.5},
        ),
        "minimax", None, "as minimax-m2 with heads of 128 channels",
    ),
}

# name: (checkpoint it is converted from, type of the matrices)
GGUF_FILES = {
    "gguf-qwen3-moe-q8_0": ("qwen3-moe", gguf.GGMLQuantizationType.Q8_0),
    "gguf-glm4-moe-f16": ("glm4-moe", gguf.GGMLQuantizationType.F16),
    "gguf-minimax-m2-bf16": ("minimax-m2", gguf.GGMLQuantizationType.BF16),
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2"}

# name: (configuration, how weights are scaled, modules that stay as they are, what the case is for)
FP8_CHECKPOINTS = {
    "qwen3-fp8-blocks": (
        lambda: Qwen3Config(
            **base.common(hidden_size=160, intermediate_size=136, num_attention_heads=4, num_key_value_heads=1,
                          head_dim=16),
            tie_word_embeddings=True, rope_parameters=base.rope(1000000.0),
        ),
        "block", ["lm_head"], "FP8 with a scale per 128x128 block, in sizes that are no multiples of 128",
    ),
    "qwen3-moe-fp8-blocks": (
        CHECKPOINTS["qwen3-moe"][0], "block", ["lm_head", "mlp.gate"], "experts in FP8 with block scales",
    ),
    "glm4-moe-fp8-channels": (
        CHECKPOINTS["glm4-moe"][0], "channel", ["lm_head", "mlp.gate"],
        "experts in FP8 with a scale per output channel, as compressed-tensors writes them",
    ),
    "minimax-m2-fp8-tensors": (
        CHECKPOINTS["minimax-m2"][0], "tensor", ["lm_head", "gate"], "experts in FP8 with a scale per tensor",
    ),
    "qwen3-moe-wide-fp8": (
        CHECKPOINTS["qwen3-moe-wide"][0], "block", ["lm_head", "mlp.gate"], "FP8 with block scales, heads of 128 channels",
    ),
    "glm4-moe-wide-fp8": (
        CHECKPOINTS["glm4-moe-wide"][0], "channel", ["lm_head", "mlp.gate"], "FP8 with a scale per output channel, heads of 128 channels",
    ),
    "minimax-m2-wide-fp8": (
        CHECKPOINTS["minimax-m2-wide"][0], "tensor", ["lm_head", "gate"], "FP8 with a scale per tensor, heads of 128 channels",
    ),
}

GGUF_LAYER_NAMES = {
    **base.GGUF_LAYER_NAMES,
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate": "ffn_gate_inp",
}


def round_cache(model):
    """Keys and values rounded to bf16 where a cache would store them."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "exact_attention"):
        module.exact_attention = module.eager_attention_forward

        def rounded(layer, query, key, value, *arguments, **named):
            key, value = key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)
            return module.exact_attention(layer, query, key, value, *arguments, **named)

        module.eager_attention_forward = rounded


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.7)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.35 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise * 0.35)
            else:
                parameter.copy_(noise * 1.6 / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                noise = torch.randn(buffer.shape, generator=generator) * 0.4
                buffer.copy_(noise.bfloat16())


def routers(model):
    """Every router with the correction of its scores."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            yield gate, getattr(gate, "e_score_correction_bias", getattr(layer.mlp, "e_score_correction_bias", None))


def clearest(model, ids):
    """Logits, and the closest decision of any router."""
    seen = []
    hooks = [
        gate.register_forward_hook(lambda _, __, output, correction=correction: seen.append((output[0], correction)))
        for gate, correction in routers(model)
    ]
    logits = base.logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    closest = math.inf
    groups, chosen_groups = getattr(model.config, "n_group", 1), getattr(model.config, "topk_group", 1)
    for scores, correction in seen:
        scores = scores.float()
        if correction is not None:
            scores = scores.sigmoid() + correction
        spread = scores.std()
        if groups > 1:
            of_groups = scores.view(len(scores), groups, -1)
            best = of_groups.topk(2, dim=-1)[0].sum(dim=-1)
            ordered = best.sort(dim=-1, descending=True)[0]
            closest = min(closest, float((ordered[:, chosen_groups - 1] - ordered[:, chosen_groups]).min() / spread))
            mask = torch.zeros_like(best).scatter(1, best.topk(chosen_groups, dim=-1)[1], 1.0)[:, :, None]
            scores = of_groups.masked_fill(mask == 0, -math.inf).view(len(scores), -1)
        ordered = scores.sort(dim=-1, descending=True)[0]
        count = model.config.num_experts_per_tok
        gap = ordered[:, count - 1] - ordered[:, count]
        closest = min(closest, float(gap.min() / spread))
    return logits, closest


def build(configuration, seed):
    """A model as a file of bf16 has it."""
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").float().eval()
    round_cache(model)
    randomise(model, seed)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def clear_seed(configuration, change=lambda model: model):
    """How clearly, and the seed whose routers decide most clearly, in the weights that `change` stores."""
    best = (-1.0, None)
    for seed in range(2000, 2000 + SEEDS):
        model = change(build(configuration, seed))
        _, closest = clearest(model, base.token_ids(seed))
        best = max(best, (closest, seed))
        if closest > CLEAR or math.isinf(closest):
            break
    return best


def assert_worth_testing(name, model, ids, logits):
    """Each feature is felt."""
    assert torch.isfinite(logits).all(), name
    assert logits.std() > 1.0, (name, logits.std())

    def moved(kind, value):
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        found = False
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if kind in key:
                    tensor.fill_(value)
                    found = True
        assert found, (name, kind)
        difference = (base.logits_of(model, ids) - logits).abs().mean() / logits.std()
        model.load_state_dict(before)
        assert difference > 0.1, (name, kind, difference)

    moved("layernorm", 1.0)
    if hasattr(model.model.layers[-1].mlp, "gate"):
        moved("mlp.gate.weight", 0.0)
    if name.startswith(("glm4", "minimax")):
        moved("e_score_correction_bias", 0.0)
    if name.startswith("glm4"):
        moved("shared_experts.down_proj", 0.0)
        moved("q_proj.bias", 0.0)
    if not name.startswith("glm4-moe-air"):
        moved("q_norm", 1.0)
        moved("k_norm", 1.0)


def write_config(folder, style):
    configuration = json.loads((folder / "config.json").read_text())
    if style == "old":
        rotary = configuration["rope_parameters"].pop("partial_rotary_factor", None)
        configuration = base.old_style(configuration)
        if rotary is not None:
            configuration["partial_rotary_factor"] = rotary
        if configuration["model_type"] == "qwen3_moe":
            configuration["num_experts"] = configuration.pop("num_local_experts")
    if style == "minimax":
        # As the published file has it.
        share = configuration["rope_parameters"].pop("partial_rotary_factor")
        configuration = base.old_style(configuration)
        configuration.update(rotary_dim=int(configuration["head_dim"] * share), scoring_func="sigmoid",
                             use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
    base.write_json(folder / "config.json", configuration)
    base.write_json(folder / "tokenizer.json", base.tokenizer_json())


def further_layer(folder, configuration):
    """A layer after the last one, as files of GLM have it; only its names matter."""
    layer = configuration.num_hidden_layers
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "input_layernorm"):
        tensors[f"model.layers.{layer}.{part}.weight"] = torch.full((4,), torch.nan, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})


def notes_of(model, purpose, stored, seed, closest):
    notes = {"family": model.config.model_type, "purpose": purpose, "stored_type": stored, "cache": "bf16", "seed": seed}
    if math.isfinite(closest):
        notes["closest_decision"] = round(closest, 4)
    return notes


def save(model, folder, **arguments):
    """As published files are: matrices in bf16, corrections in f32."""
    model = model.bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    model.save_pretrained(folder, **arguments)


def write_checkpoint(output, name):
    configuration, style, shard_size, purpose = CHECKPOINTS[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    closest, seed = clear_seed(configuration())
    ids = base.token_ids(seed)
    save(build(configuration(), seed), folder, **({"max_shard_size": shard_size} if shard_size else {}))
    write_config(folder, style)
    # From the folder, not from memory: what a reader of these files gets.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits, closest = clearest(model, ids)
    assert_worth_testing(name, model, ids, logits)
    base.write_expected(folder, model, ids, logits, notes_of(model, purpose, "bfloat16", seed, closest))
    if getattr(model.config, "num_mtp_layers", 0):
        further_layer(folder, model.config)


def is_quantised(key, tensor, kept):
    module = key.removesuffix(".weight")
    if tensor.ndim != 2 or any(module == name or module.endswith(f".{name}") for name in kept):
        return False
    return module.endswith(("_proj", ".w1", ".w2", ".w3"))


def quantise(weight, strategy):
    """FP8 numbers and their scales."""
    rows, columns = weight.shape
    blocks = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[strategy]
    counts = [math.ceil(size / block) for size, block in zip(weight.shape, blocks)]
    scales = torch.ones(counts)
    wide = torch.ones_like(weight)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = (slice(i * blocks[0], (i + 1) * blocks[0]), slice(j * blocks[1], (j + 1) * blocks[1]))
            scales[i, j] = weight[part].abs().max() / FP8_LARGEST
            wide[part] = scales[i, j]
    codes = (weight / wide).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def quantization_config(strategy, kept):
    if strategy == "block":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
                "modules_to_not_convert": kept}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
            "ignore": kept}


def quantise_file(file, strategy, kept):
    """The tensors of a checkpoint in FP8, and what they stand for."""
    stored, exact = {}, {}
    for key, tensor in load_file(file).items():
        stored[key], exact[key] = tensor, tensor.float()
        if is_quantised(key, tensor, kept):
            stored[key], scales, exact[key] = quantise(tensor.float(), strategy)
            name = key + ("_scale_inv" if strategy == "block" else "_scale")
            stored[name] = scales.reshape(1) if strategy == "tensor" else scales
    return stored, exact


def write_fp8(output, name):
    configuration, strategy, kept, purpose = FP8_CHECKPOINTS[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    style = next((style for make, style, *_ in CHECKPOINTS.values() if make is configuration), "new")

    best = (-1.0, None)
    for seed in range(2000, 2000 + SEEDS // 4):
        with tempfile.TemporaryDirectory() as place:
            place = Path(place)
            save(build(configuration(), seed), place)
            stored, exact = quantise_file(place / "model.safetensors", strategy, kept)
            save_file(exact, place / "model.safetensors", metadata={"format": "pt"})
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
            round_cache(model)
        ids = base.token_ids(seed)
        logits, closest = clearest(model, ids)
        if closest > best[0]:
            best = (closest, seed, model, ids, logits, stored)
        if closest > CLEAR:
            break
    closest, seed, model, ids, logits, stored = best
    save(build(configuration(), seed), folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, style)
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = quantization_config(strategy, kept)
    base.write_json(folder / "config.json", written)
    assert_worth_testing(name, model, ids, logits)
    base.write_expected(folder, model, ids, logits, notes_of(model, purpose, f"FP8 E4M3, a scale per {strategy}", seed, closest))


def gguf_tensors(model):
    """Parameters and corrections under their GGUF names; experts as one tensor per projection."""
    for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
        weight = parameter.detach().numpy().astype(np.float32)
        if key in base.GGUF_NAMES:
            yield base.GGUF_NAMES[key], weight, [key]
            continue
        if not key.startswith("model.layers."):
            continue
        _, _, layer, rest = key.split(".", 3)
        if rest.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", weight, [key]
        elif rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(weight, 2, axis=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate), [key, 0]
            yield f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up), [key, 1]
        elif rest == "mlp.experts.down_proj":
            yield f"blk.{layer}.ffn_down_exps.weight", weight, [key]
        else:
            module, kind = rest.rsplit(".", 1)
            part = GGUF_LAYER_NAMES[module]
            if part == "ffn_norm" and model.config.model_type == "glm4_moe":
                part = "post_attention_norm"
            yield f"blk.{layer}.{part}.{kind}", weight, [key]


def through_gguf(model, kind, writer=None):
    """Replaces the weights of a model by what a GGUF file of this type holds, and writes them if there is a writer."""
    state = model.state_dict()
    for name, weight, (key, *half) in gguf_tensors(model):
        one_type = weight.ndim == 1 or "ffn_gate_inp" in name
        chosen = gguf.GGMLQuantizationType.F32 if one_type else kind
        packed = weight if one_type else gguf.quants.quantize(weight, chosen)
        if writer:
            writer.add_tensor(name, packed, raw_dtype=chosen)
        exact = torch.from_numpy(np.ascontiguousarray(weight if one_type else gguf.quants.dequantize(packed, chosen)))
        if half:
            inner = exact.shape[1]
            state[key][:, half[0] * inner:(half[0] + 1) * inner] = exact
        else:
            state[key].copy_(exact)
    return model


def write_gguf(output, name):
    source, kind = GGUF_FILES[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    configuration = CHECKPOINTS[source][0]()
    closest, seed = clear_seed(configuration, lambda model: through_gguf(model, kind))
    model = build(configuration, seed)
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), ARCHITECTURES[configuration.model_type])
    file_types = {"F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16,
                  "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    further = getattr(configuration, "num_mtp_layers", 0)
    configuration.num_hidden_layers += further
    head_dimension, parameters = base.write_metadata(writer, name, configuration, file_types[kind.name])
    configuration.num_hidden_layers -= further
    writer.add_key_length(head_dimension)
    writer.add_value_length(head_dimension)
    writer.add_expert_count(configuration.num_local_experts)
    writer.add_expert_used_count(configuration.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(configuration, "moe_intermediate_size", configuration.intermediate_size))
    if configuration.model_type != "qwen3_moe":
        writer.add_rope_dimension_count(int(head_dimension * parameters["partial_rotary_factor"]))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if configuration.model_type == "glm4_moe":
        writer.add_expert_group_count(configuration.n_group)
        writer.add_expert_group_used_count(configuration.topk_group)
        writer.add_expert_shared_count(configuration.n_shared_experts)
        writer.add_leading_dense_block_count(configuration.first_k_dense_replace)
        writer.add_expert_weights_scale(configuration.routed_scaling_factor)
        writer.add_expert_weights_norm(configuration.norm_topk_prob)
    if further:
        writer.add_nextn_predict_layers(further)
        layer = configuration.num_hidden_layers
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.full((4, 4), np.nan, dtype=np.float32))
    model = through_gguf(model, kind, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = base.token_ids(seed)
    logits, closest = clearest(model, ids)
    stored = f"{kind.name} matrices, F32 routers and vectors"
    notes = notes_of(model, f"GGUF form of {source}", stored, seed, closest)
    base.write_expected(folder, model, ids, logits, {**notes, "gguf": importlib.metadata.version("gguf")})


def main():
    groups = ((CHECKPOINTS, write_checkpoint), (GGUF_FILES, write_gguf), (FP8_CHECKPOINTS, write_fp8))
    base.write_cases(__doc__, groups)


if __name__ == "__main__":
    main()
