#!/usr/bin/env python3
"""Write the tiny random checkpoints that the model tests run, with the logits that `transformers` gives them.

    python -m venv fixtures-venv
    fixtures-venv/bin/pip install torch==2.15.0 transformers==5.22.2 gguf==0.19.0 safetensors numpy
    fixtures-venv/bin/python tools/make_model_fixtures.py crates/model/tests/fixtures/models

Each folder under the output directory is one case:
  config.json + *.safetensors   a Hugging Face-style checkpoint, or
  model.gguf                    the same geometry as a GGUF file;
  tokenizer.json                one small byte-level BPE shared by all (GGUF cases carry it in their metadata);
  expected.safetensors          `input_ids` I32 [tokens], `logits` F32 [tokens, vocabulary];
  fixture.json                  how the case was made and what is special about it; how far `transformers` itself is off
                                from these logits when it computes in bf16, which a card may be at most.

The logits are computed in float32 with eager attention from the weights as stored (rounded to the stored type, or
quantised and dequantised), so that the only difference left to a correct engine is its own arithmetic.
Norm weights, biases and projections are drawn wide: attention is far from uniform, a forgotten bias or norm moves
the logits by much more than the tolerance, and the script refuses to write a case where it would not.
"""

import argparse
import copy
import importlib.metadata
import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

TOKENS = 136  # two page edges of 64 tokens, and a third page that is not full
VOCABULARY = 120  # no multiple of a vector width: the last logits are a remainder
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def common(**overrides):
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
    )
    settings.update(overrides)
    return settings


def gemma3_text(**overrides):
    return Gemma3TextConfig(**{
        **common(num_attention_heads=2, num_key_value_heads=1),
        "rope_theta": 2000.0,
        "rope_local_base_freq": 30.0,
        **overrides,
    })


# name: (configuration, stored type, style of config.json, shard size, what the case is for)
CHECKPOINTS = {
    "llama-tied": (
        lambda: LlamaConfig(
            **common(hidden_size=96, num_attention_heads=6, num_key_value_heads=2),
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters=rope(100000.0),
        ),
        torch.bfloat16, "old", None, "three query heads per key head as in SmolLM2, tied embeddings",
    ),
    "llama3-rope": (
        lambda: LlamaConfig(
            **common(hidden_size=32, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1),
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters=dict(LLAMA3_SCALING),
        ),
        torch.float32, "new", "60KB", "Llama-3 RoPE scaling, untied, float32, several shards with an index",
    ),
    "llama-head48": (
        lambda: LlamaConfig(
            **common(num_attention_heads=2, num_key_value_heads=1, head_dim=48),
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters=rope(10000.0),
        ),
        torch.float16, "new", None, "a head dimension that is no power of two, float16",
    ),
    "qwen2-tied": (
        lambda: Qwen2Config(
            **common(num_attention_heads=4, num_key_value_heads=2),
            tie_word_embeddings=True,
            rope_parameters=rope(1000000.0),
        ),
        torch.bfloat16, "new", None, "query, key and value biases, drawn large; tied embeddings",
    ),
    "qwen2-yarn": (
        lambda: Qwen2Config(
            **common(num_attention_heads=4, num_key_value_heads=2),
            tie_word_embeddings=False,
            rope_parameters=dict(YARN_SCALING),
        ),
        torch.bfloat16, "old", None, "YaRN with the `type` key of older files, untied embeddings",
    ),
    "qwen3": (
        lambda: Qwen3Config(
            **common(num_attention_heads=4, num_key_value_heads=2, head_dim=32),
            tie_word_embeddings=False,
            rope_parameters=rope(1000000.0),
        ),
        torch.bfloat16, "new", None, "query and key norms, head dimension that is not hidden size / heads, untied",
    ),
    "qwen3-tied": (
        lambda: Qwen3Config(
            **common(
                num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=1, head_dim=16,
            ),
            tie_word_embeddings=True,
            rope_parameters=rope(1000000.0),
        ),
        torch.bfloat16, "old", None, "query and key norms, one key head, three layers, tied",
    ),
    "gemma3": (
        lambda: gemma3_text(
            num_hidden_layers=4, head_dim=32, query_pre_attn_scalar=32, sliding_window=40, sliding_window_pattern=3,
        ),
        torch.bfloat16, "old", None,
        "layers with a sliding window that is less than a page, a global one by the pattern, two RoPE bases",
    ),
    "gemma3-images": (
        lambda: Gemma3Config(
            text_config=gemma3_text(
                num_hidden_layers=3, head_dim=24, query_pre_attn_scalar=10, sliding_window=70,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                    "sliding_attention": rope(50.0),
                },
            ).to_dict(),
            vision_config=dict(
                model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                num_attention_heads=1, image_size=28, patch_size=14,
            ),
            mm_tokens_per_image=1,
            image_token_index=VOCABULARY - 1, boi_token_index=VOCABULARY - 2, eoi_token_index=VOCABULARY - 3,
        ),
        torch.bfloat16, "new", None,
        "the text model of a checkpoint with images, layers by `layer_types`, linear RoPE scaling of the global one",
    ),
    "gemma3-wide": (
        lambda: gemma3_text(
            num_hidden_layers=3, head_dim=256, query_pre_attn_scalar=256, sliding_window=40,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        torch.bfloat16, "new", None, "heads of 256 channels as the published files have them",
    ),
    "qwen3-wide": (
        lambda: Qwen3Config(
            **common(num_attention_heads=4, num_key_value_heads=2, head_dim=128),
            tie_word_embeddings=False,
            rope_parameters=rope(1000000.0),
        ),
        torch.bfloat16, "new", None, "heads of 128 channels",
    ),
    "qwen2-wide": (
        lambda: Qwen2Config(
            **common(hidden_size=128, num_attention_heads=2, num_key_value_heads=1),
            tie_word_embeddings=True,
            rope_parameters=rope(1000000.0),
        ),
        torch.bfloat16, "new", None, "biases with heads of 64 channels",
    ),
}

# name: (checkpoint it is converted from, type of the matrices, type of the embedding and output tables)
GGUF_FILES = {
    "gguf-llama-f16": ("llama-tied", gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F16),
    "gguf-llama3-rope-f16": ("llama3-rope", gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F16),
    "gguf-qwen2-q8_0": ("qwen2-tied", gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16),
    "gguf-qwen2-yarn-f16": ("qwen2-yarn", gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0),
    "gguf-gemma3-f16": ("gemma3", gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0),
    "gguf-qwen3-bf16": ("qwen3", gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.BF16),
}

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def is_gemma(model):
    return model.config.model_type.startswith("gemma")


def causal_model(configuration):
    kind = AutoModelForImageTextToText if configuration.model_type == "gemma3" else AutoModelForCausalLM
    return kind.from_config(configuration, attn_implementation="eager").float().eval()


def randomise(model, seed):
    """Every parameter from its own wide distribution, the same on each run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 1.5)
            elif "norm" in name:
                # Gemma stores how far a gain is from one.
                parameter.copy_((0.0 if is_gemma(model) else 1.0) + 0.35 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise * 0.35)
            else:
                parameter.copy_(noise * 1.6 / math.sqrt(math.prod(parameter.shape[1:])))


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().contiguous()


def token_ids(seed):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, VOCABULARY, TOKENS)
    # A repeated stretch: with it, attention to far positions matters and not only to near ones.
    ids[100:112] = ids[4:16]
    return [int(token) for token in ids]


def build(name):
    configuration = CHECKPOINTS[name][0]()
    seed = 1000 + list(CHECKPOINTS).index(name)
    model = causal_model(configuration)
    randomise(model, seed)
    model.tie_weights()
    return model, seed


def assert_worth_testing(name, model, ids, logits):
    """A fixture that passes whatever the engine does is worse than none: prove that each feature is felt."""
    assert torch.isfinite(logits).all(), name
    assert logits.std() > 1.0, (name, logits.std())

    def moved(change):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            change()
        difference = (logits_of(model, ids) - logits).abs().mean() / logits.std()
        model.load_state_dict(before)
        assert difference > 0.1, (name, change.__name__, difference)

    def forget(kind, value):
        def change():
            found = False
            for key, parameter in model.named_parameters():
                if kind in key:
                    parameter.fill_(value)
                    found = True
            assert found, (name, kind)

        change.__name__ = f"forget_{kind}"
        return change

    def moved_by(least=0.1, **changes):
        before = model.config.to_dict()
        text = {**before.get("text_config", before), **changes}
        changed = type(model.config)(**({**before, "text_config": text} if "text_config" in before else text))
        other = causal_model(changed)
        other.load_state_dict(model.state_dict())
        difference = (logits_of(other, ids) - logits).abs().mean() / logits.std()
        assert difference > least, (name, changes, difference)

    if is_gemma(model):
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            moved(forget(f"{part}_layernorm", 0.0))
        moved(forget("q_norm", 0.0))
        moved(forget("k_norm", 0.0))
        text = model.config.get_text_config()
        parameters = text.rope_parameters
        # Only positions beyond the window change.
        moved_by(sliding_window=4096, least=0.04)
        moved_by(sliding_window=text.sliding_window - 8, least=0.04)
        moved_by(layer_types=["sliding_attention"] * text.num_hidden_layers)
        # The two activations are alike; the difference is still far above what rounding does.
        moved_by(hidden_activation="silu", least=0.04)
        scale = model.get_input_embeddings().embed_scale
        before = scale.clone()
        scale.fill_(1.0)
        unscaled = logits_of(model, ids)
        scale.copy_(before)
        assert (unscaled - logits).abs().mean() / logits.std() > 0.1, (name, "embedding scale")
        moved_by(query_pre_attn_scalar=text.query_pre_attn_scalar * 4)
        moved_by(rope_parameters={**parameters, "sliding_attention": parameters["full_attention"]})
        if parameters["full_attention"]["rope_type"] != "default":
            moved_by(rope_parameters={**parameters, "full_attention": rope(parameters["full_attention"]["rope_theta"])})
        return
    moved(forget("layernorm", 1.0))
    if name.startswith("qwen2"):
        for projection in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
            moved(forget(projection, 0.0))
    if name.startswith("qwen3"):
        moved(forget("q_norm", 1.0))
        moved(forget("k_norm", 1.0))
    if model.config.rope_parameters["rope_type"] != "default":
        plain = type(model.config)(**{**model.config.to_dict(), "rope_parameters": rope(10000.0)})
        unscaled = causal_model(plain)
        unscaled.load_state_dict(model.state_dict())
        difference = (logits_of(unscaled, ids) - logits).abs().mean() / logits.std()
        assert difference > 0.1, (name, "rope scaling", difference)


def old_style(configuration):
    """config.json as transformers 4 wrote it: `rope_theta` and `rope_scaling` side by side, `torch_dtype`."""
    parameters = configuration.pop("rope_parameters")
    if "sliding_attention" in parameters:
        configuration["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        # The pattern says it; files of the first release have no list.
        types = configuration.pop("layer_types")
        configuration["sliding_window_pattern"] = types.index("full_attention") + 1
        parameters = parameters["full_attention"]
    configuration["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    configuration["rope_scaling"] = None if kind == "default" else {**parameters, "type": kind}
    configuration["torch_dtype"] = configuration.pop("dtype")
    return configuration


def tokenizer_parts():
    """A byte-level BPE over printable ASCII with a few merges, exactly VOCABULARY entries."""
    alphabet = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    merges = [
        ("\u0120", "t"), ("h", "e"), ("i", "n"), ("\u0120", "a"), ("r", "e"), ("o", "n"), ("\u0120t", "he"),
        ("e", "r"), ("a", "t"), ("\u0120", "s"), ("o", "r"), ("\u0120", "w"), ("l", "l"), ("o", "u"), ("n", "d"),
        ("\u0120a", "nd"), ("in", "g"), ("e", "s"), ("\u0120", "o"), ("i", "s"), ("e", "n"),
    ]
    tokens = SPECIAL_TOKENS + alphabet + [left + right for left, right in merges]
    assert len(tokens) == VOCABULARY == len(set(tokens)), len(tokens)
    return tokens, merges


def tokenizer_json():
    tokens, merges = tokenizer_parts()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def bf16_distance(model, ids, logits):
    """How far the library itself is off when it computes in bf16: the mean over positions, or a tenth of the largest."""
    rounded = logits_of(copy.deepcopy(model).bfloat16(), ids)
    each = (rounded - logits).norm(dim=-1) / logits.norm(dim=-1)
    return max(float(each.mean()), float(each.max()) / 10)


def write_expected(folder, model, ids, logits, notes):
    save_file({"input_ids": torch.tensor(ids, dtype=torch.int32), "logits": logits}, folder / "expected.safetensors")
    notes = {
        **notes,
        "tokens": len(ids),
        "logits_standard_deviation": round(float(logits.std()), 4),
        "bf16_distance": float(f"{bf16_distance(model, ids, logits):.2e}"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    write_json(folder / "fixture.json", notes)


def write_checkpoint(output, name):
    _, stored, style, shard_size, purpose = CHECKPOINTS[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    model, seed = build(name)
    model.to(stored).save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    configuration = json.loads((folder / "config.json").read_text())
    if style == "old":
        configuration = old_style(configuration)
    write_json(folder / "config.json", configuration)
    write_json(folder / "tokenizer.json", tokenizer_json())

    # From the folder, not from memory: what a reader of these files gets, including the rewritten config.json.
    kind = AutoModelForImageTextToText if configuration["model_type"] == "gemma3" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = token_ids(seed)
    logits = logits_of(model, ids)
    assert_worth_testing(name, model, ids, logits)
    write_expected(folder, model, ids, logits, {
        "family": model.config.model_type,
        "purpose": purpose,
        "stored_type": str(stored).removeprefix("torch."),
        "config_style": f"{style}: " + ("rope_theta + rope_scaling" if style == "old" else "rope_parameters"),
        "seed": seed,
    })


def interleave_heads(weight, heads):
    """Rows reordered from (first halves, second halves) to pairs: GGUF's llama files rotate neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def separate_heads(weight, heads):
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name, architecture):
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    names = {**GGUF_LAYER_NAMES, **(GEMMA_LAYER_NAMES if architecture == "gemma3" else {})}
    return f"blk.{layer}.{names[module]}.{kind}"


def llama3_frequency_divisors(parameters, head_dimension):
    """What each rotation frequency is divided by: 1 for short waves, `factor` for long ones, a blend between."""
    original = parameters["original_max_position_embeddings"]
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    divisors = []
    for index in range(0, head_dimension, 2):
        wavelength = 2.0 * math.pi * parameters["rope_theta"] ** (index / head_dimension)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            blend = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return np.asarray(divisors, dtype=np.float32)


def write_metadata(writer, name, configuration, file_type):
    head_dimension = getattr(configuration, "head_dim", None)
    head_dimension = head_dimension or configuration.hidden_size // configuration.num_attention_heads
    parameters = configuration.rope_parameters
    if "full_attention" in parameters:
        writer.add_sliding_window(configuration.sliding_window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", configuration.layer_types.index("full_attention") + 1)
        writer.add_float32("gemma3.rope.freq_base_swa", parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_context_length(configuration.max_position_embeddings)
    writer.add_embedding_length(configuration.hidden_size)
    writer.add_block_count(configuration.num_hidden_layers)
    writer.add_feed_forward_length(configuration.intermediate_size)
    writer.add_head_count(configuration.num_attention_heads)
    writer.add_head_count_kv(configuration.num_key_value_heads)
    writer.add_layer_norm_rms_eps(configuration.rms_norm_eps)
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_vocab_size(configuration.vocab_size)
    if configuration.model_type == "llama":
        writer.add_rope_dimension_count(head_dimension)
    if configuration.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(head_dimension)
        writer.add_value_length(head_dimension)
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])

    tokens, merges = tokenizer_parts()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if configuration.model_type == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([
        gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens
    ])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    return head_dimension, parameters


def write_gguf(output, name):
    source, matrix_type, table_type = GGUF_FILES[name]
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, seed = build(source)
    configuration = model.config
    architecture = configuration.model_type.removesuffix("_text")
    file_types = {"F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16,
                  "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), architecture)
    head_dimension, parameters = write_metadata(writer, name, configuration, file_types[matrix_type.name])
    if parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_frequency_divisors(parameters, head_dimension))

    heads_of = {"q_proj": configuration.num_attention_heads, "k_proj": configuration.num_key_value_heads}
    stored_weights = {}
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy().astype(np.float32)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(key, architecture), weight + 1.0 if is_gemma(model) else weight)
            stored_weights[key] = torch.from_numpy(weight)
            continue
        heads = next((count for part, count in heads_of.items() if part in key), None)
        if architecture != "llama":
            heads = None
        if heads:
            weight = interleave_heads(weight, heads)
        kind = table_type if "embed_tokens" in key or "lm_head" in key else matrix_type
        packed = gguf.quants.quantize(weight, kind)
        writer.add_tensor(gguf_name(key, architecture), packed, raw_dtype=kind)
        weight = gguf.quants.dequantize(packed, kind)
        if heads:
            weight = separate_heads(weight, heads)
        stored_weights[key] = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    missing, unexpected = model.load_state_dict(stored_weights, strict=False)
    assert not unexpected and all(key == "lm_head.weight" for key in missing), (name, missing, unexpected)
    model.tie_weights()
    ids = token_ids(seed)
    logits = logits_of(model, ids)
    write_expected(folder, model, ids, logits, {
        "family": architecture,
        "purpose": f"GGUF form of {source}",
        "stored_type": f"{matrix_type.name} matrices, {table_type.name} embedding and output, F32 vectors",
        "gguf": importlib.metadata.version("gguf"),
        "seed": seed,
    })


def write_cases(description, groups):
    """Writes the cases that the command line names, or all: groups of names, each with what writes one into a folder."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("output", type=Path, help="folder that holds one folder per case")
    parser.add_argument("--only", action="append", help="write this case only (may be repeated)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same bytes on each run
    for names, write in groups:
        for name in names:
            if arguments.only and name not in arguments.only:
                continue
            write(arguments.output, name)
            folder = arguments.output / name
            size = sum(file.stat().st_size for file in folder.iterdir())
            closest = json.loads((folder / "fixture.json").read_text()).get("closest_decision")
            print(f"{name}: {size / 1024:.0f} KiB" + (f", closest decision {closest}" if closest else ""), flush=True)


def main():
    write_cases(__doc__, ((CHECKPOINTS, write_checkpoint), (GGUF_FILES, write_gguf)))


if __name__ == "__main__":
    main()
