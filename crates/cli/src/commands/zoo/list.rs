//! `oscar zoo list`: rotations that are there to be used.

use std::collections::BTreeMap;

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
    Rotations are kept in the folder `rotations` of OSCAR_CACHE. FORMAT is the version of the file. BANDS says whether its\n\
    keys have bands, or even bits for each layer (`by layer`); without them int2 has scalar codes. VERDICT is that of their certificate, PROBE what a token\n\
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
    /// Version of the file's format.
    version: u32,
    /// Whether all keys have bands.
    bands: bool,
    /// Bits of the bands in layers that have some of their own.
    key_widths: BTreeMap<usize, String>,
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
                        version: found.header.version,
                        bands: found.has_bands,
                        key_widths: found
                            .widths
                            .iter()
                            .map(|(&layer, bits)| (layer, bits.to_string()))
                            .collect(),
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
                let bands = match (row.bands, row.key_widths.is_empty()) {
                    (false, _) => "-",
                    (true, true) => "yes",
                    (true, false) => "by layer",
                };
                let size = decimal_bytes(row.bytes);
                let (format, bands, origin) =
                    (row.version.to_string(), bands.to_owned(), row.origin.to_owned());
                let model = printable(&row.model);
                vec![row.name, model, tokens, row.objective, format, bands, verdict, probe, size, origin]
            })
            .collect();
        print_table(
            &["NAME", "MODEL", "TOKENS", "OBJECTIVE", "FORMAT", "BANDS", "VERDICT", "PROBE", "SIZE", "WHERE"],
            &cells,
            &["TOKENS", "FORMAT", "PROBE", "SIZE"],
        )
    }
}

/// Names come from files: a terminal's escape sequence must not act.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
