//! `oscar inspect`: the shape of a model and what its cache costs.

use clap::Args;
use oscar_codec::{BandLayout, CodecError, KvGeometry, PAGE_TOKENS, PageLayout};
use oscar_model::files::TensorSummary;
use oscar_model::source::ModelPath;
use oscar_model::{ModelConfig, ModelFiles, QkNorm};
use oscar_model::{RopeConfig, RopeScaling};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::arguments::{ModelArguments, byte_size};
use crate::failure::Failure;
use crate::output::{binary_bytes, count, decimal_bytes, print_fields, print_json, print_table, print_text};

/// Show a model's shape and how many tokens of KV cache fit in memory.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar inspect smollm2\n  \
    oscar inspect ./model.gguf --memory 24GiB\n  \
    oscar inspect ./folder --json\n\n\
    Weights are not loaded. high is the tier of 4 bits that a server may offer beside int2 (--kv-tiers). Bytes per token\n\
    count scales and padding; of all but bf16 the most recent pages and \
    the first one stay in bf16, a fixed cost per sequence that is not counted here, and neither are layers with a \
    sliding window.")]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    model: ModelArguments,

    /// Memory for the KV cache.
    #[arg(long, default_value = "8GiB", value_name = "SIZE", value_parser = byte_size)]
    memory: u64,

    /// Print one JSON object, with one row per KV format.
    #[arg(long)]
    json: bool,
}

/// What the cache costs in one format.
#[derive(Debug, Serialize)]
struct CacheCost {
    kv: &'static str,
    bytes_per_token: usize,
    bits_per_element: f64,
    memory_bytes: u64,
    tokens: u64,
}

impl InspectArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let path = self.model.resolve()?;
        let files = ModelFiles::open(&path)?;
        let config = files.config();
        let summary = files.tensors().summary();
        let layouts = layouts(config.head_dim).map_err(Failure::new)?;
        let cost = |(kv, layout)| cache_cost(config, kv, layout, self.memory);
        let costs: Vec<CacheCost> = layouts.into_iter().map(cost).collect();
        if self.json {
            let model = description(&self.model.model, &path, &files, &summary);
            return print_json(costs.iter().map(|cost| {
                let mut row = json!(cost);
                if let Value::Object(row) = &mut row {
                    row.extend(model.clone());
                }
                row
            }));
        }
        print_fields(&fields(&path, &files, &summary))?;
        print_text("")?;
        let types: Vec<Vec<String>> = summary
            .types
            .iter()
            .map(|(name, totals)| {
                vec![
                    name.clone(),
                    totals.tensors.to_string(),
                    count(totals.elements),
                    decimal_bytes(totals.bytes),
                ]
            })
            .collect();
        print_table(&["DTYPE", "TENSORS", "ELEMENTS", "SIZE"], &types, &["TENSORS", "ELEMENTS", "SIZE"])?;
        print_text("")?;
        let fit = format!("TOKENS IN {}", binary_bytes(self.memory));
        let header = ["KV CACHE", "BYTES PER TOKEN", "BITS PER ELEMENT", fit.as_str()];
        let rows: Vec<Vec<String>> = costs
            .iter()
            .map(|cost| {
                vec![
                    cost.kv.to_owned(),
                    cost.bytes_per_token.to_string(),
                    format!("{:.2}", cost.bits_per_element),
                    cost.tokens.to_string(),
                ]
            })
            .collect();
        print_table(&header, &rows, &header[1..])
    }
}

/// The formats of a cache, by the names they have on the command line; `high` is the tier beside `int2`.
fn layouts(head_dim: usize) -> Result<Vec<(&'static str, PageLayout)>, CodecError> {
    // Bands are multiples of 16 channels; heads that are not have scalar codes, and no `int1.5`.
    let (high, int2) = match (BandLayout::high(head_dim), BandLayout::int2(head_dim)) {
        (Ok(high), Ok(int2)) => (PageLayout::Banded(high), PageLayout::Banded(int2)),
        _ => (PageLayout::int4(head_dim, 1)?, PageLayout::int2(head_dim, 1)?),
    };
    let mut all = vec![
        ("bf16", PageLayout::bf16(head_dim)),
        ("fp8", PageLayout::fp8(head_dim)?),
        ("int4", PageLayout::int4(head_dim, 1)?),
        ("high", high),
        ("int2", int2),
    ];
    all.extend(PageLayout::int15(head_dim).ok().map(|layout| ("int1.5", layout)));
    Ok(all)
}

fn cache_cost(config: &ModelConfig, kv: &'static str, layout: PageLayout, memory: u64) -> CacheCost {
    // Layers with a window hold as much however long a sequence is.
    let layers = config.layers - config.sliding_layers().len();
    let geometry = KvGeometry { layers, ..config.kv_geometry() };
    let pages = memory / geometry.page_bytes(layout).max(1) as u64;
    CacheCost {
        kv,
        bytes_per_token: geometry.bytes_per_token(layout),
        bits_per_element: layout.bits_per_element(),
        memory_bytes: memory,
        tokens: pages * PAGE_TOKENS as u64,
    }
}

fn fields(path: &ModelPath, files: &ModelFiles, summary: &TensorSummary) -> Vec<(&'static str, String)> {
    let config = files.config();
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    let mut fields = vec![
        ("path", path.path().display().to_string()),
        ("format", container(path).to_owned()),
        ("family", config.family.to_owned()),
        ("parameters", format!("{} ({})", count(summary.total.elements), decimal_bytes(summary.total.bytes))),
        ("layers", config.layers.to_string()),
        ("hidden size", config.hidden_size.to_string()),
        ("feed-forward size", config.intermediate_size.to_string()),
        ("experts", experts_line(config)),
        ("heads", format!("{} query, {} KV", config.q_heads, config.kv_heads)),
        ("head dim", config.head_dim.to_string()),
        ("vocabulary", config.vocab_size.to_string()),
        ("context", config.max_context.to_string()),
        ("RoPE", rope_line(&config.rope)),
        ("QKV bias", yes(config.qkv_bias)),
        ("QK norm", yes(config.head_norms != QkNorm::None)),
        ("chat template", yes(files.chat_template().is_ok())),
    ];
    if let Some(sliding) = &config.sliding {
        let (some, all) = (config.sliding_layers().len(), config.layers);
        let theta = sliding.rope.as_ref().unwrap_or(&config.rope).theta;
        let line = format!("{} tokens in {some} of {all} layers, RoPE theta {theta}", sliding.window);
        fields.push(("sliding window", line));
    }
    if files.skipped_tensors() > 0 {
        fields.push(("skipped", format!("{} tensors of parts that see images", files.skipped_tensors())));
    }
    fields
}

/// The model's part of every JSON row.
fn description(
    model: &str,
    path: &ModelPath,
    files: &ModelFiles,
    summary: &TensorSummary,
) -> Map<String, Value> {
    let config = files.config();
    let dtypes: Map<String, Value> = summary
        .types
        .iter()
        .map(|(name, totals)| {
            let totals =
                json!({"tensors": totals.tensors, "elements": totals.elements, "bytes": totals.bytes});
            (name.clone(), totals)
        })
        .collect();
    let description = json!({
        "model": model,
        "path": path.path().display().to_string(),
        "format": container(path),
        "family": config.family,
        "parameters": summary.total.elements,
        "weight_bytes": summary.total.bytes,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "experts": config.experts.as_ref().map(|experts| {
            json!({"count": experts.count(), "top_k": experts.top_k(), "intermediate_size": experts.inner})
        }),
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_context,
        "rope_theta": config.rope.theta,
        "rotary_dim": config.rope.rotary_dim,
        "rope_scaling": scaling_name(&config.rope.scaling),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.head_norms != QkNorm::None,
        "sliding_window": config.sliding.as_ref().map(|sliding| sliding.window),
        "sliding_layers": config.sliding_layers(),
        "skipped_tensors": files.skipped_tensors(),
        "tied_embeddings": config.tied_embeddings,
        "chat_template": files.chat_template().is_ok(),
        "dtypes": dtypes,
    });
    match description {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn container(path: &ModelPath) -> &'static str {
    match path {
        ModelPath::Gguf(_) => "gguf",
        ModelPath::Folder(_) => "safetensors",
    }
}

fn experts_line(config: &ModelConfig) -> String {
    match &config.experts {
        None => "none".to_owned(),
        Some(experts) => format!("{} of {}, size {}", experts.top_k(), experts.count(), experts.inner),
    }
}

fn rope_line(rope: &RopeConfig) -> String {
    let scaling = match &rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear scaling by {factor}"),
        RopeScaling::Yarn { factor, original_context, .. } => {
            format!(", YaRN by {factor} from {original_context} tokens")
        }
        RopeScaling::Llama3 { factor, original_context, .. } => {
            format!(", Llama 3 scaling by {factor} from {original_context} tokens")
        }
        RopeScaling::Divisors { .. } => ", a divisor per frequency from the file".to_owned(),
    };
    format!("theta {}, {} channels{scaling}", rope.theta, rope.rotary_dim)
}

fn scaling_name(scaling: &RopeScaling) -> &'static str {
    match scaling {
        RopeScaling::None => "none",
        RopeScaling::Linear { .. } => "linear",
        RopeScaling::Yarn { .. } => "yarn",
        RopeScaling::Llama3 { .. } => "llama3",
        RopeScaling::Divisors { .. } => "divisors",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a key and a value in one head, by hand: banded keys are not padded, values are to a multiple of 32 channels.
    #[test]
    fn bytes_are_those_of_the_formats_that_are_served() {
        for (head_dim, high, int2) in [
            // Codes and scales of a key, codes and scales of a value.
            (24, 16 + 4 + 16 + 4, 8 + 4 + 8 + 4),
            (48, 24 + 3 + 32 + 4, (8 + 4) + 3 + 16 + 4),
            (80, 40 + 4 + 48 + 4, (8 + 8 + 4) + 4 + 24 + 4),
            (128, 64 + 4 + 64 + 4, 32 + 4 + 32 + 4),
        ] {
            let layouts = layouts(head_dim).expect("layouts");
            let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim };
            let bytes = |name: &str| {
                let found = layouts.iter().find(|(kv, _)| *kv == name).expect(name);
                geometry.bytes_per_token(found.1)
            };
            assert_eq!((bytes("high"), bytes("int2")), (high, int2), "{head_dim} channels");
        }
    }
}
