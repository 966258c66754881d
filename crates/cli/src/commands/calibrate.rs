//! `oscar calibrate`: rotations for a model.

use std::path::PathBuf;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_rotations::Certificate;

use crate::device::OnDevice;
use crate::failure::Failure;
use crate::lab::calibration::{Recipe, cached_path, certify};
use crate::named_model::NamedModelArguments;
use crate::output::print_text;

/// Make the rotations, means and rounding rules of the 2-bit cache for a model, and a certificate of what to expect.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar calibrate smollm2 --layer-bits\n  \
    oscar calibrate ./model.gguf --data corpus.txt --tokens 16384 -o model.safetensors\n  \
    oscar calibrate qwen15 --data chats.jsonl --chat-template\n  \
    oscar calibrate smollm2 --certify model.safetensors\n  \
    oscar calibrate smollm2 --allocate model.safetensors\n\n\
    Without --data the model talks to itself, seeded. JSONL records have `text`, `prompt` and `response`, or\n\
    `messages`. Do not calibrate on what you will evaluate on. Interrupted work is kept beside the output and taken\n\
    up again by the same command. Without -o the file goes to the cache, where every command finds it.")]
pub(crate) struct CalibrateArguments {
    #[command(flatten)]
    named: NamedModelArguments,

    #[command(flatten)]
    recipe: Recipe,

    /// Where the rotations go; the certificate lies beside them.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Make no rotations: probe those in FILE and judge them again in the certificate beside them.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "tokens", "seed", "composition", "value_target",
          "sink_tokens", "recent_tokens", "output", "no_probe", "layer_bits"])]
    certify: Option<PathBuf>,

    /// Make no rotations: choose the bits of each layer's keys for those in FILE, on text as they are made from; then as
    /// --certify.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["certify", "composition", "value_target", "output", "no_probe",
          "layer_bits"])]
    allocate: Option<PathBuf>,

    /// Print the certificate as JSON.
    #[arg(long)]
    json: bool,
}

impl CalibrateArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let Some(folder) = self.output.as_deref().and_then(|output| output.parent())
            && !folder.as_os_str().is_empty()
            && !folder.is_dir()
        {
            return Err(Failure::new(format!("{}: no such folder", folder.display()))
                .with_fix("create it, or choose another --output"));
        }
        self.named.device.clone().run(false, self)
    }
}

impl OnDevice for CalibrateArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let named = self.named.load(backend)?;
        let (output, certificate) = match (&self.certify, &self.allocate, &self.output) {
            (Some(path), ..) => (path.clone(), certify(&named, path)?),
            (None, Some(path), _) => {
                let corpus = self.recipe.corpus(&named)?;
                self.recipe.allocate(&named, &corpus, path)?;
                (path.clone(), certify(&named, path)?)
            }
            (None, None, output) => {
                let output = output.clone().map_or_else(|| cached_path(&named), Ok)?;
                let corpus = self.recipe.corpus(&named)?;
                let certificate = self.recipe.calibrate(&named, &corpus, &output)?;
                (output, certificate)
            }
        };
        if self.json {
            let text = serde_json::to_string(&certificate).map_err(Failure::new)?;
            return print_text(&text);
        }
        print_text(&summary(&certificate))?;
        print_text(&format!("written to {}", output.display()))
    }
}

/// The certificate for people.
fn summary(certificate: &Certificate) -> String {
    let mut lines = vec![
        format!(
            "{} for {} at {:.2} bits: {}",
            certificate.verdict, certificate.model, certificate.bits_per_element, certificate.reason
        ),
        format!(
            "mean output error {:.4}, with the published encoder {:.4} ({} calibration tokens, {} held out)",
            certificate.mean_output_error,
            certificate.mean_paper_output_error,
            certificate.tokens,
            certificate.held_out_tokens
        ),
        certificate
            .probe
            .as_ref()
            .map_or("copying from far back was not measured".to_owned(), ToString::to_string),
        "worst heads:  layer  head  output error  logit error  keys  values".to_owned(),
    ];
    for [layer, head] in &certificate.worst {
        let found = certificate.heads.iter().find(|entry| entry.layer == *layer && entry.head == *head);
        if let Some(entry) = found {
            lines.push(format!(
                "              {layer:>5}  {head:>4}  {:>12.4}  {:>11.3}  {}  {}",
                entry.output_error, entry.logit_error, entry.key_rule, entry.value_rule
            ));
        }
    }
    lines.join("\n")
}
