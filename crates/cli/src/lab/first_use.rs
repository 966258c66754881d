//! The one way from serving to the lab: rotations for a model that has none, made when `int2` is first wanted.

use oscar_kernels::Inspect;
use oscar_rotations::Verdict;

use super::calibration::{Recipe, cached_path};
use crate::failure::Failure;
use crate::named_model::NamedModel;

/// Calibrates a model on its own text and leaves the rotations where every command finds them.
pub(crate) fn make_rotations<B: Inspect>(named: &NamedModel<B>) -> Result<(), Failure> {
    let name = named.name();
    eprintln!("{name} has no rotations yet; calibrating once (`oscar calibrate {name} --help`)");
    calibrate(named).map_err(|failure| {
        failure.with_fix(format!(
            "give --rotations FILE, calibrate on text of your own (`oscar calibrate {name} --data FILE`), or choose \
             another --kv-cache-dtype"
        ))
    })
}

fn calibrate<B: Inspect>(named: &NamedModel<B>) -> Result<(), Failure> {
    let recipe = Recipe::unasked();
    let corpus = recipe.corpus(named)?;
    let certificate = recipe.calibrate(named, &corpus, &cached_path(named)?)?;
    if certificate.verdict != Verdict::Good {
        tracing::warn!("the certificate says {}: {}", certificate.verdict, certificate.reason);
    }
    Ok(())
}
