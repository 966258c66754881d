//! `oscar zoo diff`: how two rotation files differ.

use std::path::PathBuf;

use clap::Args;
use oscar_rotations::diff::{RotationComparison, RotationDifference, diff};
use oscar_rotations::verify::layer_list;
use oscar_rotations::{Scope, safetensors};
use serde_json::json;

use super::list::printable;
use super::refuse_pt;
use crate::failure::Failure;
use crate::output::{print_json, print_table, print_text};

/// Compare two rotation files, head by head.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo diff 8k-tokens.safetensors 32k-tokens.safetensors\n  \
    oscar zoo diff a.safetensors b.safetensors --heads\n\n\
    ALIGNMENT is the share of the space of the eight most important directions that both files have in common: 1 for \
    the same space, whatever the signs and the order of its directions. SPECTRUM is the share of the eigenvalues \
    that moved, MEAN the distance of the key means relative to their length, BANDS that of the matrices of bands. Bits of\n\
    the bands in single layers stand above the table.")]
pub(super) struct DiffArguments {
    /// The first file (.safetensors).
    #[arg(value_name = "FILE")]
    first: PathBuf,

    /// The second file.
    #[arg(value_name = "OTHER")]
    second: PathBuf,

    /// One line for each head instead of each layer.
    #[arg(long)]
    heads: bool,

    /// Print one JSON object, with every head.
    #[arg(long)]
    json: bool,
}

impl DiffArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        refuse_pt(&self.first)?;
        refuse_pt(&self.second)?;
        let comparison = diff(&safetensors::read(&self.first)?, &safetensors::read(&self.second)?);
        if self.json {
            let widths = comparison.widths.iter().map(|(layer, first, second)| {
                json!({ "layer": layer, "key_widths": [first.to_string(), second.to_string()] })
            });
            return print_json(widths.chain(comparison.differences.iter().map(|difference| {
                json!({
                    "scope": difference.name.scope.name(),
                    "layer": difference.name.layer,
                    "side": difference.name.side,
                    "head": difference.name.head,
                    "rotation": difference.rotation,
                    "alignment": difference.alignment,
                    "eigenvalues": difference.eigenvalues,
                    "mean": difference.mean,
                    "bands": difference.bands,
                    "rules": difference.rules.map(|(a, b)| [a.to_string(), b.to_string()]),
                })
            })));
        }
        if comparison.is_equal() {
            return print_text("the files hold the same rotations");
        }
        print_headers(&comparison)?;
        let rows = if self.heads {
            comparison.differences.iter().map(row).collect()
        } else {
            layer_rows(&comparison)
        };
        if !rows.is_empty() && comparison.differences.iter().all(RotationDifference::is_none) {
            return print_text("rotations, means and bands are the same");
        }
        if rows.is_empty() {
            return print_text("there is nothing that could be compared");
        }
        let numbers = ["LAYER", "HEADS", "MAX DIFFERENCE", "ALIGNMENT", "SPECTRUM", "MEAN", "BANDS"];
        let [layer, rest @ ..] = numbers;
        let header: Vec<&str> = ["SCOPE", layer, "SIDE"].into_iter().chain(rest).chain(["RULES"]).collect();
        print_table(&header, &rows, &numbers)
    }
}

fn print_headers(comparison: &RotationComparison) -> Result<(), Failure> {
    for (name, first, second) in &comparison.header {
        print_text(&format!("{name}: {} | {}", printable(first), printable(second)))?;
    }
    for (which, only) in [("first", &comparison.only_first), ("second", &comparison.only_second)] {
        for scope in Scope::ALL {
            let layers = only.iter().filter(|(other, _)| *other == scope).count();
            if layers > 0 {
                print_text(&format!(
                    "{layers} layers with rotations per {scope} are only in the {which} file"
                ))?;
            }
        }
    }
    let mut widths = comparison.widths.clone();
    widths.sort_by_key(|(layer, first, second)| (first.quarters(), second.quarters(), *layer));
    for layers in widths.chunk_by(|a, b| (a.1, a.2) == (b.1, b.2)) {
        let (first, second) = (layers[0].1, layers[0].2);
        let layers: Vec<usize> = layers.iter().map(|(layer, ..)| *layer).collect();
        print_text(&format!("bits of keys in {}: {first} | {second}", layer_list(&layers)))?;
    }
    print_text("")
}

fn row(difference: &RotationDifference) -> Vec<String> {
    let name = difference.name;
    cells(name.scope, name.layer, name.side, name.head.to_string(), std::slice::from_ref(difference))
}

/// One line for each layer and side: the heads that differ most.
fn layer_rows(comparison: &RotationComparison) -> Vec<Vec<String>> {
    let same = |a: &RotationDifference, b: &RotationDifference| {
        (a.name.scope, a.name.layer, a.name.side) == (b.name.scope, b.name.layer, b.name.side)
    };
    let layers = comparison.differences.chunk_by(same);
    layers
        .map(|heads| {
            let name = heads[0].name;
            cells(name.scope, name.layer, name.side, heads.len().to_string(), heads)
        })
        .collect()
}

fn cells(scope: Scope, layer: usize, side: &str, heads: String, all: &[RotationDifference]) -> Vec<String> {
    let worst = |value: fn(&RotationDifference) -> Option<f64>| all.iter().filter_map(value).reduce(f64::max);
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
    let alignment = all.iter().filter_map(|difference| difference.alignment).reduce(f64::min);
    let rules = all.iter().filter_map(|difference| difference.rules);
    let rules: Vec<String> = rules.map(|(a, b)| format!("{a} | {b}")).collect();
    vec![
        scope.to_string(),
        layer.to_string(),
        side.to_owned(),
        heads,
        format!("{:.1e}", worst(|difference| Some(difference.rotation)).unwrap_or(0.0)),
        number(alignment),
        number(worst(|difference| difference.eigenvalues)),
        number(worst(|difference| difference.mean)),
        number(worst(|difference| difference.bands)),
        match &rules[..] {
            [] => String::new(),
            [one] => one.clone(),
            many => format!("{} differ", many.len()),
        },
    ]
}
