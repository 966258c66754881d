//! `oscar bench model`: a whole model, or the slice of one that a card of several has.

use clap::Args;
use oscar_bench::{Capacity, ModelBench, ResidentBench, sequence_bytes};
use oscar_codec::PAGE_TOKENS;
use oscar_engine::EngineOptions;
use oscar_kernels::Inspect;
use oscar_model::{Shard, Slice};
use oscar_report::Report;

use super::tokens;
use crate::arguments::{MeasuredModel, WeightArguments, byte_size, positive};
use crate::device::{DeviceArguments, OnDevice, worker_threads};
use crate::failure::Failure;
use crate::kv::{ChosenCache, KvArguments};
use crate::loading::{EngineArguments, start};
use crate::named_model::NamedModel;
use crate::output::{decimal_bytes, print_text};

/// Prefill and decode speed, time to first token and peak memory of a model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench model smollm2\n  \
    oscar bench model smollm2 --prompt-tokens 512 --gen-tokens 64 --context 4096\n  \
    oscar bench model ./model.gguf --threads 8 --repeat 5 --json\n  \
    oscar bench model --device cuda --random-weights qwen3-8b --kv-cache-dtype int2 --context 32768\n  \
    oscar bench model --device cuda --random-weights qwen3-8b --kv-cache-dtype int2 --context 32k --batch 64\n  \
    oscar bench model --device cuda --random-weights glm-4.7-fp8 --shard 0/8 --kv-cache-dtype int2 --context 32768\n\n\
    --context is the number of tokens in the cache when decoding starts; the prompt alone by default.\n\n\
    --batch N measures decode steps of N sequences without the scheduler. Their pages are copies of those of one short\n\
    prompt, each in memory of its own, so that no long prompt has to be computed.\n\n\
    --shard R/N measures what rank R of N tensor-parallel cards has of a shape: an Nth of the heads, of the columns of\n\
    dense layers, of the experts and of the vocabulary. All-reduces are left out, so a step is what a card computes\n\
    between them. Then come the tokens that N such cards hold beside the weights.")]
pub(super) struct ModelBenchArguments {
    #[command(flatten)]
    model: MeasuredModel,

    /// Measure the slice that rank R of N tensor-parallel cards has of a random-weights shape; ranks count from 0.
    #[arg(long, value_name = "R/N", requires = "random_weights", conflicts_with = "model")]
    shard: Option<Shard>,

    /// With --shard or --batch max: memory of a card; what is free on the device by default, if it has memory of its own.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    card_memory: Option<u64>,

    /// Measure decode steps of so many resident sequences of --context tokens instead; `max` is as many as the memory holds.
    #[arg(long, value_name = "N", value_parser = batch)]
    batch: Option<BatchSize>,

    /// Prompt tokens of the prefill measurement; 8k is 8192.
    #[arg(long, default_value = "512", value_name = "TOKENS", value_parser = tokens)]
    prompt_tokens: usize,

    /// Tokens to generate in the decode measurement.
    #[arg(long, default_value = "64", value_name = "TOKENS", value_parser = positive)]
    gen_tokens: usize,

    /// Tokens in the cache when decoding starts; 8k is 8192.
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    context: Option<usize>,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    weights: WeightArguments,

    /// How often everything is measured.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,

    #[command(flatten)]
    kv: KvArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ModelBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.device.clone().run(self.kv.cache.deterministic, self)
    }
}

impl OnDevice for ModelBenchArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let context = self.context.unwrap_or(0).max(self.prompt_tokens);
        let needed = context.saturating_add(self.gen_tokens).saturating_add(1);
        // Before there are weights on it.
        let card_memory = self.card_memory.or(backend.free_memory().map(|bytes| bytes as u64));
        let arguments = EngineArguments {
            context: Some(needed),
            device: self.device.clone(),
            weights: self.weights,
            kv: self.kv.clone(),
        };
        let mut model = self.model.arguments();
        model.shard = self.shard;
        let named = arguments.load_model(&model, backend)?;
        let chosen = arguments.kv.settle(&named)?;
        if let Some(batch) = self.batch {
            let size = ResidentSize { batch, context, card_memory };
            return size.measure(&named, &chosen, self.gen_tokens, self.repeat, self.json);
        }
        let options = EngineOptions { max_running: 1, ..arguments.options(&chosen) };
        let engine = start(&named, &options, &chosen)?;
        // Heads that are no whole number of bands have no 2-bit cache to count.
        let capacity = Capacity::of(named.model.config(), chosen.options.windows, context).ok();
        let cards = named.slice.as_ref().map(|slice| Cards::new(slice, card_memory, capacity.as_ref()));
        let bench = ModelBench {
            prompt_tokens: self.prompt_tokens,
            gen_tokens: self.gen_tokens,
            context: self.context,
            repeat: self.repeat,
        };
        let mut report = Report::here();
        oscar_bench::model(&engine, &bench, worker_threads(self.device.threads), |mut row| {
            row["model"] = model.model.clone().into();
            if let Some(capacity) = &capacity {
                row["int2_tokens_per_gb"] = capacity.int2_tokens_per_gb.into();
                row["bf16_tokens_per_gb"] = capacity.bf16_tokens_per_gb.into();
                row["int2_over_bf16"] = capacity.int2_over_bf16().into();
            }
            if let Some(cards) = &cards {
                cards.add_to(&mut row);
            }
            tracing::info!("{row}");
            report.push(row);
        })?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "kv",
            "threads",
            "prompt_tokens",
            "prefill_tokens_per_s",
            "ttft_ms",
            "context",
            "gen_tokens",
            "decode_tokens_per_s",
            "step_ms",
            "peak_rss_bytes",
        ];
        print_text(report.table(&columns).trim_end())?;
        if let Some(cards) = &cards {
            print_text(&format!("\n{}", cards.text()))?;
        }
        match capacity {
            Some(capacity) => print_text(&format!("\n{}", density(&capacity))),
            None => Ok(()),
        }
    }
}

/// Sequences of a decode step.
#[derive(Clone, Copy, Debug)]
enum BatchSize {
    /// The number that was requested.
    Of(usize),
    /// As many sequences as the memory holds beside the weights.
    Max,
}

fn batch(text: &str) -> Result<BatchSize, String> {
    if text == "max" { Ok(BatchSize::Max) } else { positive(text).map(BatchSize::Of) }
}

/// How many sequences of which length are resident.
struct ResidentSize {
    batch: BatchSize,
    context: usize,
    card_memory: Option<u64>,
}

/// Memory beside weights and pages, for activations and the tables of a step.
const BESIDE_PAGES: u64 = 2 << 30;

impl ResidentSize {
    fn measure<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        chosen: &ChosenCache,
        steps: usize,
        repeat: usize,
        json: bool,
    ) -> Result<(), Failure> {
        let config = named.model.config();
        if config.sliding.is_some() {
            return Err(Failure::new("--batch measures models without sliding windows")
                .with_fix("leave --batch away, or use `oscar bench serve`"));
        }
        let (codec, windows) = (chosen.options.codec.as_ref(), chosen.options.windows);
        // Pages of the steps, and those that are both sealed and in bf16 while they leave the window.
        let each = sequence_bytes(config, codec, windows, self.context + steps + 4 * PAGE_TOKENS) as u64;
        let batch = match (self.batch, self.card_memory) {
            (BatchSize::Of(batch), _) => batch,
            (BatchSize::Max, Some(memory)) => {
                (memory.saturating_sub(named.weight_bytes + BESIDE_PAGES) / each.max(1)) as usize
            }
            (BatchSize::Max, None) => {
                return Err(Failure::new("the device has no memory of its own to be filled")
                    .with_fix("give --card-memory, or a number"));
            }
        };
        if batch == 0 {
            return Err(Failure::new(format!(
                "no sequence of {} tokens fits beside the weights",
                self.context
            ))
            .with_fix("give a smaller --context, or more --card-memory"));
        }
        let bench = ResidentBench { batch, context: self.context, steps, repeat };
        let row = oscar_bench::resident(named.model.model(), codec, windows, &bench)?;
        let mut report = Report::here();
        let mut row = serde_json::to_value(row).expect("a row holds plain values only");
        row["model"] = named.name().into();
        report.push(row);
        if json {
            return print_text(&report.json());
        }
        let columns =
            ["kv", "batch", "context", "resident_tokens", "kv_bytes", "step_ms", "decode_tokens_per_s"];
        print_text(report.table(&columns).trim_end())
    }
}

/// How many tokens the same memory holds in either format.
fn density(capacity: &Capacity) -> String {
    let Capacity { sequence_tokens, int2_tokens_per_gb, bf16_tokens_per_gb, .. } = capacity;
    format!(
        "tokens per GB, int2 over bf16: {:.2} ({int2_tokens_per_gb} and {bf16_tokens_per_gb} in sequences of \
         {sequence_tokens}, windows included)",
        capacity.int2_over_bf16()
    )
}

/// What as many cards as a model is divided among hold beside its weights.
struct Cards<'a> {
    slice: &'a Slice,
    /// Memory of one card in bytes, if it is known.
    memory: Option<u64>,
    /// Tokens of a 2-bit cache and of a bf16 cache, of sequences of a length.
    tokens: Option<([u64; 2], usize)>,
}

impl Cards<'_> {
    fn new<'a>(slice: &'a Slice, memory: Option<u64>, capacity: Option<&Capacity>) -> Cards<'a> {
        // Every card has its heads of all tokens, so that all of them hold as many as one does of its slice.
        let room = memory.map(|memory| memory.saturating_sub(slice.weight_bytes as u64));
        let tokens =
            room.zip(capacity).map(|(room, capacity)| (capacity.tokens_in(room), capacity.sequence_tokens));
        Cards { slice, memory, tokens }
    }

    fn add_to(&self, row: &mut serde_json::Value) {
        row["shard"] = self.slice.shard.to_string().into();
        row["cards"] = self.slice.shard.count().into();
        row["all_reduces"] = "left out".into();
        row["slice_weight_bytes"] = self.slice.weight_bytes.into();
        row["model_weight_bytes"] = self.slice.whole_bytes.into();
        row["card_memory_bytes"] = self.memory.into();
        row["cards_int2_tokens"] = self.tokens.map(|(tokens, _)| tokens[0]).into();
        row["cards_bf16_tokens"] = self.tokens.map(|(tokens, _)| tokens[1]).into();
    }

    fn text(&self) -> String {
        let slice = self.slice;
        let (count, weights) = (slice.shard.count(), decimal_bytes(slice.weight_bytes as u64));
        let whole = decimal_bytes(slice.whole_bytes as u64);
        let held = match (self.memory, self.tokens) {
            (None, _) => "give --card-memory to see how many tokens such cards hold".to_owned(),
            (Some(memory), _) if memory <= slice.weight_bytes as u64 => {
                format!("the slice does not fit a card of {}", decimal_bytes(memory))
            }
            (Some(memory), Some(([int2, bf16], length))) => format!(
                "{count} cards of {} hold {int2} tokens of int2 or {bf16} of bf16 beside them, in sequences of {length}; \
                 activations are not counted",
                decimal_bytes(memory)
            ),
            (Some(_), None) => "heads of this size have no 2-bit cache".to_owned(),
        };
        format!("{slice}\nweights: {weights} a card, of {whole} in all; {held}")
    }
}
