//! `oscar zoo`: rotation files, where they are, whether they can be trusted, and between formats.

mod diff;
mod list;
mod transfer;
mod verify;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use clap::{Args, Subcommand};
use oscar_rotations::{RotationFile, RotationHeader};

use crate::failure::Failure;

/// List, check and convert rotation files.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo list\n  \
    oscar zoo verify rotations.safetensors --model qwen2.5-coder-1.5b\n  \
    oscar zoo import k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt -o qwen3-8b.safetensors\n  \
    oscar zoo export rotations.safetensors --output-dir published --format 1\n\n\
    Published .pt files are read as data: nothing in them is run. `oscar calibrate MODEL` makes rotations for any \
    model.")]
pub(crate) struct ZooArguments {
    #[command(subcommand)]
    command: ZooCommand,
}

#[derive(Debug, Subcommand)]
enum ZooCommand {
    List(list::ListArguments),
    Pull(transfer::ZooPullArguments),
    Verify(verify::VerifyArguments),
    Import(transfer::ImportArguments),
    Export(transfer::ExportArguments),
    Diff(diff::DiffArguments),
}

impl ZooArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.command {
            ZooCommand::List(arguments) => arguments.run(),
            ZooCommand::Pull(arguments) => arguments.run(),
            ZooCommand::Verify(arguments) => arguments.run(),
            ZooCommand::Import(arguments) => arguments.run(),
            ZooCommand::Export(arguments) => arguments.run(),
            ZooCommand::Diff(arguments) => arguments.run(),
        }
    }
}

/// Whether a file is a PyTorch archive: by its first bytes, or by its name if it is too short to tell.
fn is_pt(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    let named = path.extension().is_some_and(|ending| ending == "pt" || ending == "pth");
    named || read.is_ok() && &magic == b"PK\x03\x04"
}

/// A file of ours; half of a published pair is not one.
fn refuse_pt(path: &Path) -> Result<(), Failure> {
    if !is_pt(path) {
        return Ok(());
    }
    let message = format!("{} is one half of a published pair", path.display());
    Err(Failure::new(message).with_fix("make one file of both with `oscar zoo import K.pt V.pt -o FILE`"))
}

/// `qqt / sst, r_h_pbr`.
fn objective_line(header: &RotationHeader) -> String {
    let (keys, values) = (&header.key_objective, &header.value_objective);
    let objectives = if keys == values { keys.clone() } else { format!("{keys} / {values}") };
    header.composition.map_or(objectives.clone(), |composition| format!("{objectives}, {composition}"))
}

/// `per head and per layer`.
fn scope_line(file: &RotationFile) -> String {
    file.sets().map(|(scope, _)| format!("per {scope}")).collect::<Vec<_>>().join(" and ")
}
