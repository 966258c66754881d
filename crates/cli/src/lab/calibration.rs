//! Calibrates a model by the arguments of a command, and writes rotations and certificate to files.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;
use oscar_codec::{Composition, Windows};
use oscar_kernels::Inspect;
use oscar_kernels::backend::RopeLayout;
use oscar_lab::calibrate::checkpoint::Checkpoint;
use oscar_lab::calibrate::{CalibrateError, Calibration, Corpus, CorpusSource, ValueTarget, calibrate};
use oscar_lab::eval::bit_allocation::{BitAllocation, allocate_bits};
use oscar_lab::eval::probe::probe_rotations;
use oscar_model::source::Settings;
use oscar_rotations::find::CERTIFICATE_ENDING;
use oscar_rotations::{Certificate, RotationFiles, RotationHeader, RotationSource, interleaved, safetensors};

use crate::arguments::positive;
use crate::failure::Failure;
use crate::interrupt::Watch;
use crate::named_model::NamedModel;
use crate::progress::Steps;
use crate::windows::WindowArguments;

/// Tokens to calibrate on when nothing is said.
const TOKENS: usize = 8192;

/// What rotations are made from, and how.
#[derive(Debug, Args)]
pub(crate) struct Recipe {
    /// Text or JSONL files.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,

    /// Render records with the model's chat template.
    #[arg(long, requires = "data")]
    chat_template: bool,

    /// Tokens the moments are summed over; 8192 to 32768 make sense.
    #[arg(long, default_value_t = TOKENS, value_name = "N", value_parser = positive)]
    tokens: usize,

    /// Seed of the text the model makes without --data.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// How eigenvectors (r), Hadamard (h) and bit reversal (pbr) are multiplied.
    #[arg(long, default_value_t = Composition::RHPbr, value_name = "NAME")]
    composition: Composition,

    /// What value rotations are fitted to: `attention` (the paper) or `proxy` (the published code).
    #[arg(long, default_value = "attention", value_name = "TARGET", value_parser = value_target)]
    value_target: ValueTarget,

    #[command(flatten)]
    windows: WindowArguments,

    /// Choose the bits of each layer's keys too. Takes longer than everything else: a text is read once for each layer.
    #[arg(long)]
    layer_bits: bool,

    /// Do not measure whether the model still copies what it read long ago.
    #[arg(long)]
    no_probe: bool,
}

fn value_target(text: &str) -> Result<ValueTarget, String> {
    match text {
        "attention" | "cs" => Ok(ValueTarget::Attention),
        "proxy" | "sst" => Ok(ValueTarget::Proxy),
        _ => Err("must be attention or proxy".into()),
    }
}

impl Recipe {
    /// The recipe of those who name none: text that the model draws itself.
    pub(super) fn unasked() -> Recipe {
        Recipe {
            data: Vec::new(),
            chat_template: false,
            tokens: TOKENS,
            seed: 1,
            composition: Composition::RHPbr,
            value_target: ValueTarget::default(),
            windows: WindowArguments::default(),
            layer_bits: false,
            no_probe: false,
        }
    }

    pub(crate) fn corpus<B: Inspect>(&self, named: &NamedModel<B>) -> Result<Corpus, Failure> {
        let source = if self.data.is_empty() {
            CorpusSource::Model { seed: self.seed }
        } else {
            CorpusSource::Files { paths: self.data.clone(), chat: self.chat_template }
        };
        let label = if self.data.is_empty() { "drawing text from the model" } else { "reading text" };
        let mut steps: Option<Steps> = None;
        let corpus = Corpus::collect(&named.model, &source, self.tokens, |done, total| {
            steps.get_or_insert_with(|| Steps::new(label, total)).set(done);
        })?;
        if let Some(steps) = steps {
            steps.finish();
        }
        Ok(corpus)
    }

    pub(crate) fn calibrate<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        corpus: &Corpus,
        output: &Path,
    ) -> Result<Certificate, Failure> {
        let certificate = self.fit(named, corpus, output)?;
        // What was fitted is on disk by now, whatever becomes of the rest.
        if self.layer_bits {
            self.allocate(named, corpus, output)?;
        }
        if self.no_probe { Ok(certificate) } else { certify(named, output) }
    }

    /// Chooses the bits of each layer's keys for rotations that were made before, and writes them into their file. They are chosen
    /// on text that the rotations were not made from, and compared with the default on the first that they were.
    pub(crate) fn allocate<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        corpus: &Corpus,
        path: &Path,
    ) -> Result<(), Failure> {
        let windows = self.windows.windows();
        let source = RotationSource { files: RotationFiles::Own(path.to_owned()), force: false };
        let Some(found) = source.find(&named.model, &named.identity)? else { return Ok(()) };
        let checking = corpus.sequences.first().map(Vec::as_slice).unwrap_or_default();
        let mut steps: Option<Steps> = None;
        let allocation = allocate_bits(
            &named.model,
            &found.file,
            [&corpus.held_out, checking],
            windows,
            |done, total| {
                steps.get_or_insert_with(|| Steps::new("choosing the bits of layers", total)).set(done);
            },
        )?;
        if let Some(steps) = steps {
            steps.finish();
        }
        let Some(BitAllocation { widths, default, chosen }) = allocation else {
            eprintln!(
                "the bits of layers were not chosen: that takes bands of keys, heads of a multiple of 64 channels and a \
                 text longer than the windows"
            );
            return Ok(());
        };
        safetensors::write_widths(path, &widths)?;
        if widths.is_empty() {
            eprintln!("the keys of all layers have the same bits");
        } else {
            let [text, copy] =
                [0, 1].map(|part| format!("{:.4} instead of {:.4}", chosen[part], default[part]));
            eprintln!(
                "the keys of each layer have bits of their own: KL {text} on other text, {copy} where it copies itself"
            );
        }
        Ok(())
    }

    /// Makes and writes rotations and their certificate, without a probe.
    fn fit<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        corpus: &Corpus,
        output: &Path,
    ) -> Result<Certificate, Failure> {
        let config = named.model.config();
        let calibration = Calibration {
            composition: self.composition,
            value_target: self.value_target,
            windows: self.windows.windows(),
            ..Calibration::new(RotationHeader {
                model: named.name().to_owned(),
                model_fingerprint: Some(named.identity.model_fingerprint.clone()),
                weight_fingerprint: Some(named.identity.weight_fingerprint.clone()),
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                seed: self.data.is_empty().then_some(self.seed),
                ..RotationHeader::default()
            })
        };
        let checkpoint = Checkpoint::beside(output, &calibration, corpus);
        let (steps, watch) = (Steps::new("calibrating, layer by layer", config.layers), Watch::new());
        let result = calibrate(&named.model, corpus, &calibration, Some(&checkpoint), |layers| {
            steps.set(layers);
            if watch.caught() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        steps.finish();
        let (file, certificate) = result.map_err(|error| match error {
            CalibrateError::Interrupted => {
                Failure::Interrupted("interrupted; the same command goes on where it stopped".into())
            }
            error => error.into(),
        })?;
        let file = match config.rope.layout {
            RopeLayout::Halves => file,
            RopeLayout::Interleaved => interleaved::from_interleaved(&file, config.rope.rotary_dim),
        };
        safetensors::write(output, &file)?;
        write_certificate(output, &certificate)?;
        checkpoint.remove();
        Ok(certificate)
    }
}

/// Probes rotations that were made before, and judges them again in the certificate beside them.
pub(crate) fn certify<B: Inspect>(named: &NamedModel<B>, path: &Path) -> Result<Certificate, Failure> {
    let source = RotationSource { files: RotationFiles::Own(path.to_owned()), force: false };
    let found = source.find(&named.model, &named.identity)?;
    let (file, certificate) = found.map(|found| (found.file, found.certificate)).unzip();
    let (Some(file), Some(mut certificate)) = (file, certificate.flatten()) else {
        return Err(Failure::new(format!(
            "{}: there is no certificate beside the rotations",
            path.display()
        ))
        .with_fix("make both with `oscar calibrate MODEL`"));
    };
    let windows = Windows { sink: certificate.sink, recent: certificate.recent };
    let mut steps: Option<Steps> = None;
    let probe = probe_rotations(&named.model, &file, windows, |done, total| {
        steps.get_or_insert_with(|| Steps::new("copying from far back", total)).set(done);
    })?;
    if let Some(steps) = steps {
        steps.finish();
    }
    certificate.set_probe(probe);
    write_certificate(path, &certificate)?;
    Ok(certificate)
}

/// Writes the certificate of the rotations at `rotations`.
fn write_certificate(rotations: &Path, certificate: &Certificate) -> Result<(), Failure> {
    let path = rotations.with_extension(CERTIFICATE_ENDING);
    let text = serde_json::to_string_pretty(certificate).map_err(Failure::new)?;
    fs::write(&path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

/// A file in the cache, named after the model and a part of its fingerprint.
pub(crate) fn cached_path<B: Inspect>(named: &NamedModel<B>) -> Result<PathBuf, Failure> {
    let folder = Settings::from_environment()?.rotation_folder();
    fs::create_dir_all(&folder).map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    let name = named.name().rsplit(['/', '\\']).next().unwrap_or_default();
    let name: String = name
        .trim_end_matches(".gguf")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' })
        .collect();
    let fingerprint = named.identity.model_fingerprint.get(..12).unwrap_or(&named.identity.model_fingerprint);
    Ok(folder.join(format!("{name}-{fingerprint}.safetensors")))
}
