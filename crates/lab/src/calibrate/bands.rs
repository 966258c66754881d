//! Bands of keys: which directions of a head are strong, tried in several ways on held-out text.

use oscar_codec::{BandLayout, HeadTransform, PageMeans, SquareMatrix};
use oscar_kernels::cpu::isa::Isa;
use oscar_rotations::codec::band_mixing;
use rayon::prelude::*;

use super::CalibrateError;
use super::fit::{Spectrum, spectrum};
use super::moments::HeadMoments;
use super::select::{HeldOut, KeyCodes, RuleTrial};

/// How much the moment of queries counts when directions of keys are compared: exponents that are tried. 0 would rank
/// directions by the energy of keys alone, 1 by what they add to logits on average. In between, directions that queries
/// seldom use keep some accuracy for the queries that do.
const QUERY_EXPONENTS: [f64; 3] = [0.25, 0.5, 0.75];

/// Eigenvalues of queries below this share of their mean count as that much: short texts do not reach all directions.
const QUERY_FLOOR: f64 = 1e-4;

/// The same for the strength of keys.
const KEY_FLOOR: f64 = 1e-7;

/// The matrix that takes centred keys to bands of directions by falling strength, each band of unit strength.
///
/// With `A = C_Q^(alpha/2)` and `A C_K A = W diag(l) Wᵀ`, `l` falling, it is `A W D`, where `D` divides every band by the
/// root of its mean `l`.
///
/// `queries` is the second moment of queries, `keys` the covariance of keys.
fn bands(
    queries: &SquareMatrix,
    keys: &SquareMatrix,
    alpha: f64,
    layout: &BandLayout,
) -> Result<SquareMatrix, CalibrateError> {
    let dim = keys.dim();
    let Spectrum { values, vectors } = spectrum(queries)?;
    let mean = (queries.trace() / dim as f64).max(f64::MIN_POSITIVE);
    let roots: Vec<f64> =
        values.iter().map(|value| (value / mean).max(QUERY_FLOOR).powf(0.5 * alpha)).collect();
    let weighted = SquareMatrix::from_fn(dim, |i, j| vectors.get(i, j) * roots[j]);
    let metric = weighted.multiply(&vectors.transpose());
    let product = metric.multiply(keys).multiply(&metric);
    // Symmetric but for rounding.
    let symmetric = SquareMatrix::from_fn(dim, |i, j| 0.5 * (product.get(i, j) + product.get(j, i)));
    let Spectrum { values, vectors } = spectrum(&symmetric)?;
    let floor = (KEY_FLOOR * symmetric.trace() / dim as f64).max(f64::MIN_POSITIVE);
    // Eigenvalues ascend, bands descend.
    let order: Vec<usize> = (0..dim).rev().collect();
    let mut scales = vec![1.0; dim];
    for band in layout.bands() {
        let strength = band.range().map(|channel| values[order[channel]].max(floor)).sum::<f64>();
        scales[band.range()].fill((strength / band.channels as f64).powf(-0.5));
    }
    let basis = metric.multiply(&vectors.permute_columns(&order));
    Ok(SquareMatrix::from_fn(dim, |i, j| basis.get(i, j) * scales[j]))
}

/// The bands of a head, and the transform they make.
pub struct ChosenBands {
    /// The matrix from centred keys to bands.
    pub bands: SquareMatrix,
    /// The transform of keys with it.
    pub transform: HeadTransform,
    /// What keys of sealed pages are centred by, beside the mean of the transform.
    pub page_means: PageMeans,
}

/// The bands of a head that attention on held-out text moves least with.
///
/// `failed` names the head in errors of the codec.
pub fn choose(
    isa: Isa,
    held_out: &HeldOut<'_>,
    moments: &HeadMoments,
    value_transform: &HeadTransform,
    failed: impl Fn(oscar_codec::CodecError) -> CalibrateError + Sync,
) -> Result<ChosenBands, CalibrateError> {
    let (queries, mean) = (moments.queries.mean(), moments.key_mean());
    let layout = BandLayout::int2(mean.len()).map_err(&failed)?;
    let mixing = band_mixing(&layout);
    let (covariances, page_means) = (moments.key_covariances(), moments.page_means().map_err(&failed)?);
    let ways: Vec<(&SquareMatrix, f64)> =
        covariances.iter().flat_map(|keys| QUERY_EXPONENTS.map(|alpha| (keys, alpha))).collect();
    let tried = ways.into_par_iter().map(|(keys, alpha)| {
        let bands = bands(&queries, keys, alpha, &layout)?;
        let transform =
            HeadTransform::general(Some(mean.clone()), &bands.multiply(&mixing)).map_err(&failed)?;
        let trial = RuleTrial::new(isa, held_out, &transform, value_transform).map_err(&failed)?;
        let trial = trial.with_page_means(Some(&page_means));
        Ok((trial.key_score(KeyCodes::Bands).map_err(&failed)?, bands, transform))
    });
    let tried: Vec<_> = tried.collect::<Result<_, CalibrateError>>()?;
    // Of equals the first.
    let best = tried.into_iter().reduce(|best, other| if other.0 < best.0 { other } else { best });
    let (_, bands, transform) = best.expect("there is at least one way to try");
    Ok(ChosenBands { bands, transform, page_means })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::fit::tests::{conjugate, covariance};

    #[test]
    fn bands_fall_in_strength_and_have_unit_strength_each() {
        for dim in [64, 96, 128] {
            let (queries, keys) = (covariance(dim, 5), covariance(dim, 6));
            let layout = BandLayout::int2(dim).unwrap();
            let matrix = bands(&queries, &keys, 0.5, &layout).unwrap();
            let inverse = matrix.inverse().expect("an inverse");
            let strength = conjugate(&matrix, &keys).diagonal();
            // What a channel adds to logits: strength of the key times that of the query that meets it.
            let met = conjugate(&inverse.transpose(), &queries).diagonal();
            let mut before = f64::INFINITY;
            for band in layout.bands() {
                let mean = |of: &[f64]| of[band.range()].iter().sum::<f64>() / band.channels as f64;
                // The floor lifts directions that have no strength at all.
                let unit = mean(&strength);
                assert!(unit < 1.0 + 1e-6 && (unit > 0.99 || band.first >= dim / 2), "d={dim}: {unit}");
                assert!(mean(&met) < before, "d={dim}");
                before = mean(&met);
            }
        }
    }
}
