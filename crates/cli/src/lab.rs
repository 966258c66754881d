//! What the commands of the lab share: a loaded model that knows who it is, rotations that fit it, a progress bar.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oscar_codec::{CacheCodec, Windows};
use oscar_kernels::backend::RopeLayout;
use oscar_kernels::cpu::CpuBackend;
use oscar_lab::calibrate::Certificate;
use oscar_lab::calibrate::means::{MEAN_TOKENS, estimate_key_means};
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::zoo::{self, RotationFile};
use oscar_model::source::Settings;
use oscar_model::{LoadedModel, ModelFiles};

use crate::arguments::{ModelArguments, WeightArguments, positive};
use crate::failure::Failure;
use crate::kv::{GivenWindows, check_whole_pages};
use crate::loading::worker_threads;
use crate::published::Published;

/// Which model, on how many threads.
#[derive(Debug, Args)]
pub(crate) struct LabArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    pub(crate) threads: Option<usize>,

    #[command(flatten)]
    weights: WeightArguments,
}

/// A loaded model and its identity.
pub(crate) struct Subject {
    /// The model.
    pub(crate) model: Arc<LoadedModel<CpuBackend>>,
    /// As the user named it.
    pub(crate) name: String,
    /// Equal for all quantisations of a checkpoint.
    pub(crate) model_fingerprint: String,
    /// Of these very weights.
    pub(crate) weight_fingerprint: String,
}

impl LabArguments {
    /// Finds, fetches and loads the model.
    pub(crate) fn load(&self) -> Result<Subject, Failure> {
        self.load_on(false)
    }

    /// [`Self::load`], on one numeric path for batches of every size if that is asked for.
    pub(crate) fn load_on(&self, deterministic: bool) -> Result<Subject, Failure> {
        let backend = CpuBackend::new(worker_threads(self.threads))?;
        let backend = if deterministic { backend.deterministic() } else { backend };
        Subject::load(&self.model, backend, self.weights)
    }
}

impl Subject {
    /// Finds, fetches and loads a model on a backend.
    pub(crate) fn load(
        arguments: &ModelArguments,
        backend: CpuBackend,
        weights: WeightArguments,
    ) -> Result<Subject, Failure> {
        let threads = backend.threads();
        // Encoding and statistics run on a pool of their own; it can only be sized once, before its first use.
        if rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().is_err() {
            tracing::debug!("the thread pool was sized before");
        }
        let path = arguments.resolve()?;
        tracing::info!("loading {}", path.path().display());
        let files = ModelFiles::open_in(&path, weights.weights.into())?;
        let model_fingerprint = zoo::fingerprint::model_fingerprint(&files)?;
        let weight_fingerprint = zoo::fingerprint::weight_fingerprint(&files)?;
        let model = Arc::new(files.load(Arc::new(backend))?);
        Ok(Subject { model, name: arguments.model.clone(), model_fingerprint, weight_fingerprint })
    }
}

/// Rotations that fit a model.
#[derive(Clone, Debug)]
pub(crate) struct FoundRotations {
    /// With key channels in the order of the model's own file.
    pub(crate) file: RotationFile,
    /// Where they come from.
    pub(crate) name: String,
    /// What calibration said of them, if that is known.
    pub(crate) certificate: Option<Certificate>,
}

/// Which rotations.
#[derive(Clone, Debug, Args)]
pub(crate) struct RotationArguments {
    /// Rotation file; by default the one that ships with the program or that `oscar calibrate` has made.
    #[arg(long, value_name = "FILE")]
    rotations: Option<PathBuf>,

    /// Published key rotations (.pt), together with --v-rotation-path.
    #[arg(long, value_name = "FILE", requires = "v_rotation_path", conflicts_with = "rotations")]
    k_rotation_path: Option<PathBuf>,

    /// Published value rotations (.pt).
    #[arg(long, value_name = "FILE", requires = "k_rotation_path")]
    v_rotation_path: Option<PathBuf>,

    /// Use rotations that were made for another model.
    #[arg(long)]
    force_rotations: bool,
}

impl RotationArguments {
    /// The same arguments, with the published environment variables where nothing was given.
    pub(crate) fn or_published(&self, published: Published) -> RotationArguments {
        if self.rotations.is_some() || self.k_rotation_path.is_some() {
            return self.clone();
        }
        let Published { key_rotations, value_rotations, .. } = published;
        RotationArguments { k_rotation_path: key_rotations, v_rotation_path: value_rotations, ..self.clone() }
    }

    /// Whether a file of our own was named.
    pub(crate) fn names_a_file(&self) -> bool {
        self.rotations.is_some()
    }

    /// Whether published files were named.
    pub(crate) fn names_published(&self) -> bool {
        self.k_rotation_path.is_some()
    }

    /// Whether rotations of another model would be taken.
    pub(crate) fn is_forced(&self) -> bool {
        self.force_rotations
    }

    /// The rotations for a model, with key channels in the order of its own file; `None` if there are none.
    pub(crate) fn resolve(&self, subject: &Subject) -> Result<Option<FoundRotations>, Failure> {
        let (name, file, certificate) = match (&self.rotations, &self.k_rotation_path, &self.v_rotation_path)
        {
            (Some(path), _, _) => {
                let file = zoo::safetensors::read(path)?;
                (path.display().to_string(), file, zoo::resolve::certificate_beside(path))
            }
            (None, Some(keys), Some(values)) => {
                let (keys_file, values_file) = (zoo::pt::read(keys)?, zoo::pt::read(values)?);
                let file = zoo::import::from_pt(&keys_file, &values_file, &subject.name)?;
                (keys.display().to_string(), file, None)
            }
            _ => match zoo::resolve::find(&rotation_folder()?, &subject.model_fingerprint) {
                Some(found) => (found.name.clone(), found.load()?, found.certificate()),
                None => return Ok(None),
            },
        };
        let config = subject.model.config();
        let warning = zoo::resolve::check_model(
            &file,
            &subject.model_fingerprint,
            config.kv_geometry(),
            self.force_rotations,
        )?;
        if let Some(warning) = warning {
            tracing::warn!("{warning}");
        }
        tracing::info!("rotations: {name}");
        let mut file = match config.rope.layout {
            RopeLayout::Halves => file,
            RopeLayout::Interleaved => zoo::interleaved::to_interleaved(&file, config.rope.rotary_dim),
        };
        if file.sets().any(|(_, set)| set.values().any(|layer| layer.keys.means.is_none())) {
            tracing::warn!(
                "{name} has no mean keys; they are estimated from {MEAN_TOKENS} tokens of generated prose"
            );
            estimate_key_means(&subject.model, &mut file)?;
        }
        Ok(Some(FoundRotations { file, name, certificate }))
    }
}

impl RotationArguments {
    /// The lab's codecs of a list of names.
    pub(crate) fn codecs(
        &self,
        subject: &Subject,
        specs: &[String],
    ) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
        let found = self.resolve(subject)?;
        let source = CodecSource {
            geometry: subject.model.config().kv_geometry(),
            rotations: found.as_ref().map(|found| &found.file),
            isa: subject.model.model().backend().isa(),
        };
        specs.iter().map(|spec| Ok(source.build(spec)?)).collect()
    }
}

/// How a measurement reads the cache: what codecs need, and what stays exact.
#[derive(Debug, Args)]
pub(crate) struct ReadingArguments {
    #[command(flatten)]
    rotations: RotationArguments,

    #[command(flatten)]
    windows: WindowArguments,
}

impl ReadingArguments {
    /// The codecs of a list of names.
    pub(crate) fn codecs(
        &self,
        subject: &Subject,
        specs: &[String],
    ) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
        self.rotations.codecs(subject, specs)
    }

    /// What stays exact.
    pub(crate) fn windows(&self) -> Windows {
        self.windows.windows()
    }
}

/// Where the rotations of this user are.
pub(crate) fn rotation_folder() -> Result<PathBuf, Failure> {
    Ok(zoo::resolve::cache_folder(&Settings::from_environment()?))
}

/// A prefix must leave something to measure.
pub(crate) fn check_prefix(prefix: usize, tokens: usize) -> Result<(), Failure> {
    if prefix < tokens {
        return Ok(());
    }
    Err(Failure::new(format!("--prefix {prefix} leaves nothing of --tokens {tokens} to measure"))
        .with_fix("give a smaller --prefix or more --tokens"))
}

/// A sequence must fit the model.
pub(crate) fn check_context(subject: &Subject, tokens: usize) -> Result<(), Failure> {
    let most = subject.model.config().max_context;
    if tokens <= most {
        return Ok(());
    }
    Err(Failure::new(format!("{tokens} tokens are more than the {most} of this model"))
        .with_fix(format!("ask for {most} or less")))
}

/// What stays exact.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct WindowArguments {
    /// Tokens at the start that are read exactly [default: 64].
    #[arg(long, value_name = "TOKENS")]
    sink_tokens: Option<usize>,

    /// Tokens before a query, itself included, that are read exactly [default: 256].
    #[arg(long, value_name = "TOKENS")]
    recent_tokens: Option<usize>,
}

impl WindowArguments {
    /// As the lab wants them.
    pub(crate) fn windows(&self) -> Windows {
        let Windows { sink, recent } = Windows::default();
        Windows { sink: self.sink_tokens.unwrap_or(sink), recent: self.recent_tokens.unwrap_or(recent) }
    }

    /// As a served cache wants them: whole pages only.
    pub(crate) fn whole_pages(&self) -> Result<GivenWindows, Failure> {
        for (name, given) in [("--sink-tokens", self.sink_tokens), ("--recent-tokens", self.recent_tokens)] {
            if let Some(tokens) = given {
                check_whole_pages(tokens).map_err(|problem| {
                    Failure::new(format!("{name} {tokens} with --kv-cache-dtype: {problem}"))
                })?;
            }
        }
        Ok(GivenWindows { sink: self.sink_tokens, recent: self.recent_tokens })
    }
}

/// A bar on a terminal, a line now and then in a log.
pub(crate) struct Steps {
    bar: ProgressBar,
    terminal: bool,
    label: String,
}

impl Steps {
    /// Shows `label` and how many of `total` are done.
    pub(crate) fn new(label: &str, total: usize) -> Steps {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(
            Some(total as u64),
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
        );
        let style = ProgressStyle::with_template("{msg}  {wide_bar}  {pos}/{len}  {elapsed}  {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(label.to_owned());
        if !terminal {
            eprintln!("{label}");
        }
        Steps { bar, terminal, label: label.to_owned() }
    }

    /// So many are done.
    pub(crate) fn set(&self, done: usize) {
        self.bar.set_position(done as u64);
    }

    /// Something else is being done now.
    pub(crate) fn say(&mut self, label: &str) {
        if label == self.label {
            return;
        }
        self.label = label.to_owned();
        if self.terminal {
            self.bar.set_message(label.to_owned());
        } else {
            eprintln!("{label}");
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
