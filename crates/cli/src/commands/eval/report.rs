//! `oscar eval report`: results as one page.

use std::path::{Path, PathBuf};

use clap::Args;
use oscar_lab::eval::report::{Results, page};

use crate::arguments::non_empty;
use crate::failure::Failure;
use crate::output::print_text;

/// Render results (the JSON of `oscar eval` and `oscar bench`) as one self-contained HTML page.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval kl smollm2 --json > kl.json\n  \
    oscar eval niah smollm2 --json > niah.json\n  \
    oscar eval report kl.json niah.json -o report.html\n\n\
    The page needs no network and no script. Results of several files and machines may be mixed; each file is\n\
    named with the machine it was measured on.")]
pub(crate) struct ReportArguments {
    /// Files of results.
    #[arg(required = true, value_name = "RESULTS.json")]
    results: Vec<PathBuf>,

    /// The HTML file to write.
    #[arg(long, short, default_value = "report.html", value_name = "FILE")]
    output: PathBuf,

    /// Heading of the page.
    #[arg(long, default_value = "Results", value_name = "TEXT", value_parser = non_empty)]
    title: String,
}

impl ReportArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let files = self.results.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
        let rows: usize = files.iter().map(|file| file.rows.len()).sum();
        std::fs::write(&self.output, page(&self.title, &files))
            .map_err(|error| Failure::new(format!("{}: cannot write: {error}", self.output.display())))?;
        print_text(&format!("{}: {rows} rows of {} files", self.output.display(), files.len()))
    }
}

fn read(path: &Path) -> Result<Results, Failure> {
    Results::read(path).map_err(|error| {
        Failure::new(error)
            .with_fix("give what a command of `oscar eval` or `oscar bench` prints with --json")
    })
}
