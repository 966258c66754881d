//! Which rotations: arguments that name files, or leave it to the search.

use std::path::PathBuf;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_rotations::{FoundRotations, RotationFiles, RotationSource};

use crate::failure::Failure;
use crate::named_model::NamedModel;
use crate::sglang_variables::SglangVariables;

/// The rotations that a command uses.
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

    /// What was named on the command line.
    pub(crate) fn source(&self) -> RotationSource {
        self.source_or(None, None)
    }

    /// [`Self::source`], with the files of the environment variables where the command line names none.
    pub(crate) fn source_or_variables(&self, variables: &SglangVariables) -> RotationSource {
        self.source_or(variables.key_rotations.clone(), variables.value_rotations.clone())
    }

    fn source_or(&self, keys: Option<PathBuf>, values: Option<PathBuf>) -> RotationSource {
        let named = (&self.rotations, self.k_rotation_path.clone(), self.v_rotation_path.clone());
        let files = match named {
            (Some(path), _, _) => RotationFiles::Own(path.clone()),
            (None, Some(keys), Some(values)) => RotationFiles::Published { keys, values },
            _ => match (keys, values) {
                (Some(keys), Some(values)) => RotationFiles::Published { keys, values },
                _ => RotationFiles::Search,
            },
        };
        RotationSource { files, force: self.force_rotations }
    }

    /// The rotations for a model; warnings about them go to the log.
    pub(crate) fn find<B: Inspect>(&self, named: &NamedModel<B>) -> Result<Option<FoundRotations>, Failure> {
        let found = self.source().find(&named.model, &named.identity)?;
        if let Some(found) = &found {
            tracing::info!("rotations: {}", found.name);
            found.notices.iter().for_each(|notice| tracing::warn!("{notice}"));
        }
        Ok(found)
    }
}
