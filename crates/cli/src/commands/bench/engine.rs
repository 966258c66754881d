//! `oscar bench engine`: long contexts and shared prefixes, cache type against cache type.

use std::time::Duration;

use clap::Args;
use oscar_bench::{
    LongContext, LongContextStage, SharedPrefix, host_prefix, long_context, shared_prefix, stream_tokens,
    streams,
};
use oscar_engine::{Budget, Engine, EngineError, EngineOptions};
use oscar_kernels::Inspect;
use oscar_report::Report;
use serde::Serialize;

use super::tokens;
use crate::arguments::{MeasuredModel, WeightArguments, byte_size, positive};
use crate::device::{DeviceArguments, OnDevice};
use crate::failure::Failure;
use crate::kv::{CacheSpec, ChosenCache, KvArguments, type_names, warn_without_effect};
use crate::loading::{EngineArguments, start};
use crate::named_model::NamedModel;
use crate::output::print_text;
use crate::progress::Steps;

/// Decode speed and memory at long contexts, and requests with a common prefix, for several cache types.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench engine smollm2\n  \
    oscar bench engine qwen2.5-coder-1.5b --kv bf16,int2 --contexts 8k,16k --gen-tokens 32\n  \
    oscar bench engine smollm2 --kv int2:scalar,int2 --contexts 8k --requests 0 --repeat 9\n  \
    oscar bench engine smollm2 --contexts 2k --requests 8 --prefix-tokens 2048 --json\n  \
    oscar bench engine --device cuda --random-weights qwen3-4b --contexts 30k,60k,100k --requests 0\n  \
    oscar bench engine --device cuda --random-weights qwen3-8b --kv int2 --contexts 100k --requests 0 \
    --host-kv-memory 16GiB\n\n\
    ratio is decode speed over the first cache type, limit what the bytes of a step (weights and pages) allow for it.\n\
    rss_delta_bytes is what the prompt has added to the resident size. Shared prefixes are measured\n\
    with the prefix cache and without, arriving together and one after the other. With --host-kv-memory a prompt of each\n\
    context comes back after another one took its place on the card, against computing it. With --streams so many answers\n\
    are in progress while a prompt of each context is read; ratio is how much longer 99 of 100 tokens take then.")]
pub(super) struct EngineBenchArguments {
    #[command(flatten)]
    model: MeasuredModel,

    /// Cache types, int2 also with its encoder (int2:scalar); the first is what the others are compared with.
    #[arg(long, default_value = "bf16,int2", value_name = "LIST", value_delimiter = ',')]
    kv: Vec<CacheSpec>,

    /// Tokens in the cache when decoding starts; 8k is 8192.
    #[arg(long, default_value = "2k,7k", value_name = "LIST", value_delimiter = ',', value_parser = tokens)]
    contexts: Vec<usize>,

    /// Tokens to decode.
    #[arg(long, default_value = "64", value_name = "TOKENS", value_parser = positive)]
    gen_tokens: usize,

    /// How often decoding is measured; the best counts, the median is in the JSON.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,

    /// Requests with a common prefix; 0 leaves them out.
    #[arg(long, default_value = "8", value_name = "N")]
    requests: usize,

    /// Tokens they have in common.
    #[arg(long, default_value = "2048", value_name = "TOKENS", value_parser = positive)]
    prefix_tokens: usize,

    /// Tokens of their own.
    #[arg(long, default_value = "32", value_name = "TOKENS", value_parser = positive)]
    suffix_tokens: usize,

    /// Tokens of each answer.
    #[arg(long, default_value = "32", value_name = "TOKENS", value_parser = positive)]
    output_tokens: usize,

    /// Milliseconds between arrivals when they do not come together.
    #[arg(long, default_value = "100", value_name = "MS")]
    interval_ms: u64,

    /// Memory of the host for evicted pages, for two prompts at least; a card only.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    host_kv_memory: Option<u64>,

    /// Answers in progress while a prompt of each context is read: how much longer they wait for a token; 0 leaves it out.
    #[arg(long, default_value = "0", value_name = "N")]
    streams: usize,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    weights: WeightArguments,

    #[command(flatten)]
    cache: KvArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Shows what is being done, with a bar for each part.
fn show(steps: &mut Option<(String, Steps)>, stage: LongContextStage<'_>) {
    let (label, done, total) = match stage {
        LongContextStage::Filling { kv, done, total } => {
            (format!("{kv}: reading {total} tokens"), done, total)
        }
        LongContextStage::Decoding { done, total } => {
            (format!("decoding {total} times in turn"), done, total)
        }
    };
    if steps.as_ref().is_none_or(|(shown, _)| *shown != label) {
        if let Some((_, steps)) = steps.take() {
            steps.finish();
        }
        *steps = Some((label.clone(), Steps::new(&label, total)));
    }
    if let Some((_, steps)) = steps {
        steps.set(done);
    }
}

impl EngineBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.device.clone().run(self.cache.cache.deterministic, self)
    }
}

impl OnDevice for EngineBenchArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let arguments = EngineArguments {
            context: None,
            device: self.device.clone(),
            weights: self.weights,
            kv: self.cache.clone(),
        };
        warn_without_effect(self.cache.without_effect_on_any(&self.kv), &type_names(&self.kv));
        let named = arguments.load_model(&self.model.arguments(), backend)?;
        let weight_bytes = named.weight_bytes;
        let [mut long, mut shared, mut host, mut beside] = [(); 4].map(|()| Report::here());
        for &context in &self.contexts {
            let needed = context + self.gen_tokens + 1;
            for &spec in self.kv.iter().filter(|_| self.host_kv_memory.is_some()) {
                let (mut options, chosen) = self.options(&named, spec, needed, 1, true)?;
                options.kv.host_memory = self.host_kv_memory.map_or(0, |bytes| bytes as usize);
                let engine = start(&named, &options, &chosen)?;
                let row = host_prefix(&engine, context, self.repeat)?;
                self.push(&mut host, &self.label(spec, &chosen), &row)?;
            }
            for &spec in self.kv.iter().filter(|_| self.streams > 0) {
                let (mut options, chosen) = self.options(&named, spec, needed, 1, true)?;
                let each = EngineOptions { context: Some(stream_tokens(context)), ..options.clone() };
                let bytes =
                    |options| Ok::<_, EngineError>(Budget::of(named.model.config(), options)?.total_bytes());
                options.kv.memory.get_or_insert(bytes(&options)? + self.streams * bytes(&each)?);
                options.max_running = self.streams + 1;
                let engine = start(&named, &options, &chosen)?;
                let row = streams(&engine, self.streams, context)?;
                self.push(&mut beside, &self.label(spec, &chosen), &row)?;
            }
            let engine = |&spec| self.engine(&named, spec, needed, 1, true);
            let engines = self.kv.iter().map(engine).collect::<Result<Vec<_>, _>>()?;
            let bench =
                LongContext { context, gen_tokens: self.gen_tokens, repeat: self.repeat, weight_bytes };
            let mut steps = None;
            let rows = long_context(&engines, &bench, |stage| show(&mut steps, stage))?;
            if let Some((_, steps)) = steps {
                steps.finish();
            }
            for row in rows {
                self.push(&mut long, &row.kv, &row)?;
            }
        }
        if self.requests > 0 {
            for &spec in &self.kv {
                self.shared_prefixes(&named, spec, &mut shared)?;
            }
        }
        if self.json {
            long.rows.extend(shared.rows);
            long.rows.extend(host.rows);
            long.rows.extend(beside.rows);
            return print_text(&long.json());
        }
        let columns = [
            "kv",
            "context",
            "prefill_tokens_per_s",
            "decode_tokens_per_s",
            "ratio",
            "limit",
            "kv_bytes",
            "bits_per_element",
            "rss_delta_bytes",
        ];
        print_text(long.table(&columns).trim_end())?;
        if self.requests > 0 {
            let columns = [
                "kv",
                "prefix_cache",
                "requests",
                "interval_ms",
                "seconds",
                "output_tokens_per_s",
                "ttft_ms",
                "cached",
            ];
            print_text(shared.table(&columns).trim_end())?;
        }
        if self.host_kv_memory.is_some() {
            let columns =
                ["kv", "context", "restored_bytes", "cached", "computed_ms", "restored_ms", "ratio"];
            print_text(host.table(&columns).trim_end())?;
        }
        if self.streams > 0 {
            let columns = [
                "kv",
                "streams",
                "context",
                "idle_p50_ms",
                "idle_p99_ms",
                "busy_p50_ms",
                "busy_p99_ms",
                "ratio",
                "prefill_tokens_per_s",
                "preempted",
            ];
            print_text(beside.table(&columns).trim_end())?;
        }
        Ok(())
    }
}

impl EngineBenchArguments {
    fn shared_prefixes<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        spec: CacheSpec,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let context = self.prefix_tokens + self.suffix_tokens + self.output_tokens;
        for prefix_tree in [true, false] {
            let (name, engine) = self.engine(named, spec, context, self.requests, prefix_tree)?;
            for interval in [0, self.interval_ms] {
                let bench = SharedPrefix {
                    requests: self.requests,
                    prefix_tokens: self.prefix_tokens,
                    suffix_tokens: self.suffix_tokens,
                    output_tokens: self.output_tokens,
                    interval: Duration::from_millis(interval),
                };
                let row = shared_prefix(&engine, &bench)?;
                self.push(report, &name, &row)?;
            }
        }
        Ok(())
    }

    /// An engine with room for `running` sequences of `context` tokens, and the name of its cache in tables.
    fn engine<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        spec: CacheSpec,
        context: usize,
        running: usize,
        prefix_tree: bool,
    ) -> Result<(String, Engine<B>), Failure> {
        let (options, chosen) = self.options(named, spec, context, running, prefix_tree)?;
        Ok((self.label(spec, &chosen), start(named, &options, &chosen)?))
    }

    /// The name of a cache in tables.
    fn label(&self, spec: CacheSpec, chosen: &ChosenCache) -> String {
        self.cache.cache.of_spec(spec).label(chosen.kind)
    }

    fn options<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        spec: CacheSpec,
        context: usize,
        running: usize,
        prefix_tree: bool,
    ) -> Result<(EngineOptions, ChosenCache), Failure> {
        let chosen = self.cache.of_spec(spec).settle_quietly(named)?;
        let mut kv = chosen.options.clone();
        kv.prefix_tree = kv.prefix_tree && prefix_tree;
        let mut options = EngineOptions {
            context: Some(context),
            max_running: running,
            kv,
            prefill_chunk: self.device.device.prefill_chunk(),
            deterministic: self.cache.cache.deterministic,
            ..EngineOptions::default()
        };
        if running > 1 && options.kv.memory.is_none() {
            // Room for all of them at once: what one needs, so many times.
            let alone = Budget::of(named.model.config(), &options)?.total_bytes();
            options.kv.memory = Some(alone * running);
        }
        Ok((options, chosen))
    }

    fn push(&self, report: &mut Report, kv: &str, row: &impl Serialize) -> Result<(), Failure> {
        let mut row = serde_json::to_value(row).map_err(Failure::new)?;
        row["kv"] = kv.into();
        row["model"] = self.model.arguments().model.into();
        tracing::info!("{row}");
        report.push(row);
        Ok(())
    }
}
