//! `oscar lab`: codecs that exist for comparison, behind the same doors as the product.

use std::sync::Arc;

use clap::{Args, Subcommand};
use oscar_engine::{Engine, EngineOptions, KvOptions};
use oscar_kernels::Inspect;
use oscar_lab::eval::codec_attention::CodecAttention;
use oscar_lab::eval::codecs::HELP;

use crate::arguments::positive;
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::http::HttpArguments;
use crate::lab::{ReadingArguments, check_context};
use crate::named_model::NamedModelArguments;

/// Serve any codec of the lab, for evaluation harnesses.
#[derive(Debug, Args)]
pub(crate) struct LabArguments {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    Serve(Box<LabServeArguments>),
}

/// Serve a model whose history goes through a codec of the lab.
///
/// One request runs at a time and no prefix is shared. Prompts are computed exactly; the last token of a prompt and the
/// answer read the history as the codec gives it back. Everything is kept in bf16 twice, so this measures quality, not
/// speed or memory. A row gets the same bits in batches of every size.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar lab serve smollm2 --kv kivi2\n  \
    oscar lab serve qwen2.5-coder-1.5b --kv int2:paper --port 8000 --context 8192\n\n\
    Then point a harness at it: lm_eval --model local-chat-completions --model_args \
    base_url=http://127.0.0.1:30000/v1/chat/completions,model=smollm2")]
struct LabServeArguments {
    #[command(flatten)]
    named: NamedModelArguments,

    #[arg(long, value_name = "CODEC", help = format!("Codec of the lab: {HELP}"))]
    kv: String,

    /// Tokens the sequence may have, prompt and answer together; the model's own limit, up to 32768, by default.
    #[arg(long, alias = "context-length", value_name = "TOKENS", value_parser = positive)]
    context: Option<usize>,

    #[command(flatten)]
    reading: ReadingArguments,

    #[command(flatten)]
    http: HttpArguments,
}

impl LabArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.command {
            LabCommand::Serve(arguments) => arguments.run(),
        }
    }
}

impl LabServeArguments {
    fn run(self) -> Result<(), Failure> {
        self.named.device.clone().run(true, self)
    }
}

impl OnDevice for LabServeArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let listener = self.http.open()?;
        let named = self.named.load(backend)?;
        if let Some(context) = self.context {
            check_context(&named, context)?;
        }
        let codec = self.reading.codec(&named, &self.kv)?;
        let bits = codec.bits_per_element(named.model.config().head_dim);
        let options = EngineOptions {
            context: self.context,
            max_running: 1,
            kv: KvOptions { prefix_tree: false, ..KvOptions::default() },
            ..EngineOptions::default()
        };
        let windows = self.reading.windows();
        let model = Arc::clone(&named.model);
        let engine = Engine::with_attention(Arc::clone(&model), &options, |slots| {
            CodecAttention::new(&model, codec, windows, slots)
        })?;
        eprintln!(
            "{} would take {bits:.2} bits per element of history; here it is simulated over bf16 pages, which take twice \
             the memory of bf16. One request at a time, no prefix sharing.",
            self.kv
        );
        self.http.serve(listener, &named, Arc::new(engine), None)
    }
}
