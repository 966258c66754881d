//! `oscar zoo list`: rotations that are there to be used.

use clap::Args;
use oscar_model::source::Settings;
use oscar_rotations::find::{RotationOrigin, available};
use serde::Serialize;

use super::objective_line;
use crate::failure::Failure;
use crate::output::{decimal_bytes, print_json, print_table, print_text};

/// List the rotations in the cache and those that ship with the program.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo list\n  \
    oscar zoo list --json\n\n\
    Rotations are kept in the folder `rotations` of OSCAR_CACHE.")]
pub(super) struct ListArguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct RotationsRow {
    name: String,
    model: String,
    model_fingerprint: Option<String>,
    tokens: usize,
    objective: String,
    bytes: u64,
    origin: &'static str,
    path: Option<String>,
}

impl ListArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        let folder = Settings::from_environment()?.rotation_folder();
        let mut rows = Vec::new();
        for found in available(&folder) {
            match found {
                Ok(found) => {
                    let (origin, path) = match &found.origin {
                        RotationOrigin::Shipped(_) => ("shipped", None),
                        RotationOrigin::Cached(path) => ("cache", Some(path.display().to_string())),
                    };
                    rows.push(RotationsRow {
                        objective: objective_line(&found.header),
                        name: found.name,
                        model: found.header.model,
                        model_fingerprint: found.header.model_fingerprint,
                        tokens: found.header.tokens,
                        bytes: found.bytes,
                        origin,
                        path,
                    });
                }
                // One damaged file must not hide the others.
                Err(error) => tracing::warn!("{error}"),
            }
        }
        if self.json {
            return print_json(rows);
        }
        if rows.is_empty() {
            return print_text(&format!("no rotations in {}", folder.display()));
        }
        let cells: Vec<Vec<String>> = rows
            .into_iter()
            .map(|row| {
                let tokens = if row.tokens == 0 { "-".to_owned() } else { row.tokens.to_string() };
                let origin = row.origin.to_owned();
                vec![row.name, printable(&row.model), tokens, row.objective, decimal_bytes(row.bytes), origin]
            })
            .collect();
        print_table(&["NAME", "MODEL", "TOKENS", "OBJECTIVE", "SIZE", "WHERE"], &cells, &["TOKENS", "SIZE"])
    }
}

/// Names come from files: a terminal's escape sequence must not act.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
