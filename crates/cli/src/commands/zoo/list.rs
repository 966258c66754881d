//! `oscar zoo list`: rotations that are there to be used.

use clap::Args;
use oscar_model::source::Settings;
use oscar_rotations::find::{RotationOrigin, available};
use oscar_rotations::{RetrievalProbe, Verdict};
use serde::Serialize;

use super::objective_line;
use crate::failure::Failure;
use crate::output::{decimal_bytes, print_json, print_table, print_text};

/// List the rotations in the cache and those that ship with the program.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo list\n  \
    oscar zoo list --json\n\n\
    Rotations are kept in the folder `rotations` of OSCAR_CACHE. VERDICT is that of their certificate, PROBE what a token\n\
    that is copied from far back loses, in nats.")]
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
    /// The verdict of the certificate.
    verdict: Option<Verdict>,
    /// What a token that is copied from far back loses, in nats; not there if it was not measured or says nothing.
    probe_loss: Option<f64>,
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
                    let certificate = found.certificate();
                    let probe = certificate.as_ref().and_then(|certificate| certificate.probe.as_ref());
                    rows.push(RotationsRow {
                        verdict: certificate.as_ref().map(|certificate| certificate.verdict),
                        probe_loss: probe.filter(|probe| probe.verdict().is_some()).map(RetrievalProbe::loss),
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
                let verdict = row.verdict.map_or("-".to_owned(), |verdict| verdict.to_string());
                let probe = row.probe_loss.map_or("-".to_owned(), |loss| format!("{loss:.3}"));
                let size = decimal_bytes(row.bytes);
                let origin = row.origin.to_owned();
                vec![row.name, printable(&row.model), tokens, row.objective, verdict, probe, size, origin]
            })
            .collect();
        print_table(
            &["NAME", "MODEL", "TOKENS", "OBJECTIVE", "VERDICT", "PROBE", "SIZE", "WHERE"],
            &cells,
            &["TOKENS", "PROBE", "SIZE"],
        )
    }
}

/// Names come from files: a terminal's escape sequence must not act.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
