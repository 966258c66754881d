//! `oscar models`: the catalogue.

use clap::Args;
use oscar_model::source::{Entry, Settings};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{count, decimal_bytes, print_json, print_table};

/// List the models known by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar models\n  \
    oscar models --json\n\n\
    A model is fetched the first time it is used, or with `oscar pull NAME`. \
    Files are kept in OSCAR_CACHE, by default the user's cache directory.")]
pub(crate) struct ModelsArguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CatalogueRow<'a> {
    name: &'a str,
    aliases: &'a [String],
    family: &'a str,
    parameters: u64,
    context: usize,
    licence: &'a str,
    bytes: u64,
    sha256: &'a str,
    hub_id: &'a str,
    cached: bool,
    path: Option<String>,
}

impl ModelsArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let settings = Settings::from_environment()?;
        let rows: Vec<CatalogueRow<'_>> =
            settings.catalogue.entries().iter().map(|entry| row(entry, &settings)).collect();
        if self.json {
            return print_json(rows);
        }
        let cells: Vec<Vec<String>> = rows
            .iter()
            .map(|row| {
                vec![
                    row.name.to_owned(),
                    row.family.to_owned(),
                    count(row.parameters),
                    row.context.to_string(),
                    row.licence.to_owned(),
                    decimal_bytes(row.bytes),
                    if row.cached { "yes" } else { "no" }.to_owned(),
                ]
            })
            .collect();
        let header = ["NAME", "FAMILY", "PARAMETERS", "CONTEXT", "LICENCE", "SIZE", "CACHED"];
        print_table(&header, &cells, &["PARAMETERS", "CONTEXT", "SIZE"])
    }
}

fn row<'a>(entry: &'a Entry, settings: &Settings) -> CatalogueRow<'a> {
    let cached = settings.cache.contains(entry);
    CatalogueRow {
        name: &entry.name,
        aliases: &entry.aliases,
        family: &entry.family,
        parameters: entry.parameters,
        context: entry.context,
        licence: &entry.licence,
        bytes: entry.size,
        sha256: &entry.sha256,
        hub_id: &entry.hub_id,
        cached,
        path: cached.then(|| settings.cache.file(entry).display().to_string()),
    }
}
