//! `oscar zoo pull|import|export`: rotations into the cache, and between our format and the published one.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use oscar_model::source::{HubId, Settings, SourceError};
use oscar_rotations::pt::{self, PtFormat};
use oscar_rotations::{Scope, import, safetensors, shipped};
use serde::Serialize;

use super::{objective_line, refuse_pt};
use crate::failure::Failure;
use crate::output::{print_json, print_text};

/// Put the rotations of a catalogue model into the cache.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo pull smollm2\n\n\
    For rotations published on the hub: `hf download ORG/NAME --include '*.pt' --local-dir DIR`, then \
    `oscar zoo import`.")]
pub(super) struct ZooPullArguments {
    /// Catalogue name (`oscar models`).
    #[arg(value_name = "NAME")]
    name: String,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Written {
    path: String,
    bytes: u64,
}

fn written(paths: &[PathBuf], json: bool) -> Result<(), Failure> {
    if !json {
        return paths.iter().try_for_each(|path| print_text(&path.display().to_string()));
    }
    print_json(paths.iter().map(|path| Written {
        path: path.display().to_string(),
        bytes: path.metadata().map_or(0, |metadata| metadata.len()),
    }))
}

impl ZooPullArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        let settings = Settings::from_environment()?;
        let Some(entry) = settings.catalogue.find(&self.name) else {
            if let Some(id) = HubId::parse(&self.name) {
                let repository = format!("{}/{}", id.organisation, id.name);
                let fix = format!(
                    "run `hf download {repository} --include '*.pt' --local-dir DIR`, then `oscar zoo import K.pt \
                     V.pt -o FILE`"
                );
                let message =
                    format!("{repository}: only rotations of catalogue models ship with the program");
                return Err(Failure::new(message).with_fix(fix));
            }
            let names =
                settings.catalogue.entries().iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>();
            return Err(SourceError::UnknownModel {
                name: self.name.clone(),
                names: names.join(", "),
                nearest: settings.catalogue.nearest(&self.name).map(str::to_owned),
            }
            .into());
        };
        let Some(shipped) = shipped::find(&entry.name) else {
            let fix = format!("make them with `oscar calibrate {}`", entry.name);
            return Err(
                Failure::new(format!("no rotations of {} ship with the program", entry.name)).with_fix(fix)
            );
        };
        let folder = settings.rotation_folder();
        fs::create_dir_all(&folder).map_err(|error| cannot_make(&folder, &error))?;
        let path = folder.join(format!("{}.safetensors", entry.name));
        shipped::write(shipped, &path)?;
        written(&[path], self.json)
    }
}

fn cannot_make(folder: &std::path::Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: the folder cannot be made: {error}", folder.display()))
}

/// Make one rotation file of a published pair.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo import k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt -o qwen3-8b.safetensors\n\n\
    The files are read as data: nothing in them is run. They carry no fingerprint of their model and no mean of its \
    keys.")]
pub(super) struct ImportArguments {
    /// Rotations of keys (.pt).
    #[arg(value_name = "K_FILE")]
    keys: PathBuf,

    /// Rotations of values (.pt).
    #[arg(value_name = "V_FILE")]
    values: PathBuf,

    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Name of the model, for people; the folder of the key file by default.
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ImportArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (keys, values) = (pt::read(&self.keys)?, pt::read(&self.values)?);
        let folder = || Some(self.keys.parent()?.file_name()?.to_string_lossy().into_owned());
        let name = self.model_name.clone().or_else(folder).unwrap_or_else(|| "unknown".to_owned());
        let file = import::from_pt(&keys, &values, &name)?;
        safetensors::write_exact(&self.output, &file)?;
        tracing::info!("{} layers, {}", keys.layers.len(), objective_line(&file.header));
        written(&[self.output], self.json)
    }
}

/// Write rotations as a published pair that PyTorch reads.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo export rotations.safetensors --output-dir published\n  \
    oscar zoo export rotations.safetensors --output-dir published --format 2\n\n\
    Format 1 has one rotation a layer, which the published servers read; format 2 one for each KV head. Means, \
    metrics and rules have no place in these files.")]
pub(super) struct ExportArguments {
    /// The rotations (.safetensors).
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Folder for the two files; made if need be.
    #[arg(long, value_name = "DIR")]
    output_dir: PathBuf,

    /// 1: one rotation a layer; 2: one for each KV head.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=2))]
    format: u8,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ExportArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        refuse_pt(&self.file)?;
        let file = safetensors::read(&self.file)?;
        let (format, scope) = match self.format {
            1 => (PtFormat::PerLayer, Scope::Layer),
            _ => (PtFormat::PerHead, Scope::Head),
        };
        let pair = import::to_pt(&self.file, &file, format)?;
        let centred = file.set(scope).is_some_and(|set| set.values().any(|layer| layer.keys.means.is_some()));
        if centred {
            tracing::warn!(
                "the means of keys are not in the exported files: without them keys are not centred"
            );
        }
        fs::create_dir_all(&self.output_dir).map_err(|error| cannot_make(&self.output_dir, &error))?;
        let mut paths = Vec::new();
        for half in &pair {
            let path = self.output_dir.join(&half.path);
            pt::write(&path, half)?;
            paths.push(path);
        }
        written(&paths, self.json)
    }
}
