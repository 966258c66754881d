//! Makes the codec of a cache from a rotation file.

use std::sync::Arc;

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, HeadEncoder, HeadTransform, KeyTurning, KeyWidths,
    KvGeometry, PageCodec, PageMeans, RowEncoder, Rule, ScaleType, SquareMatrix, hadamard,
};
use oscar_kernels::Backend;
use oscar_model::LoadedModel;
use rayon::prelude::*;

use crate::error::RotationError;
use crate::rotation::{RotationFile, RotationSet, Scope, SideRotations};

/// The published clip ratios for keys and values.
pub const PAPER_RULES: (Rule, Rule) = (Rule::Clip(0.96), Rule::Clip(0.92));

/// How 2-bit codes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Int2Encoder {
    /// Bands if the file has what they need and no option speaks against them, else scalar codes.
    #[default]
    Auto,
    /// Keys in bands of channels by strength, with the widths that the file has for each layer.
    Band,
    /// Codes of 2 bits for all channels, per head, centred, with the rules that calibration chose.
    Scalar,
    /// As published: per layer, not centred, fixed clips, codes from unrounded scales.
    Paper,
}

impl Int2Encoder {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Int2Encoder::Auto => "auto",
            Int2Encoder::Band => "band",
            Int2Encoder::Scalar => "scalar",
            Int2Encoder::Paper => "paper",
        }
    }
}

/// The parts of an `int2` codec that can be exchanged one by one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Int2Options {
    /// How codes are chosen.
    pub encoder: Int2Encoder,
    /// Whether heads share a rotation; as the encoder has it by default.
    pub scope: Option<Scope>,
    /// Whether mean keys and values are subtracted; as the encoder has it by default.
    pub centred: Option<bool>,
    /// One rule for keys and one for values instead of those in the file.
    pub rules: Option<(Rule, Rule)>,
    /// Channels that share a scale; all of them by default.
    pub group: Option<usize>,
    /// Type of the scales.
    pub scales: ScaleType,
    /// Bits of the bands of keys in every layer instead of those in the file.
    pub widths: Option<KeyWidths>,
    /// How the keys of each layer turn with their position, which files need whose keys are centred page by page.
    pub turnings: Vec<Arc<KeyTurning>>,
}

impl Int2Options {
    /// The default for a model.
    pub fn of<B: Backend>(model: &LoadedModel<B>) -> Int2Options {
        Int2Options { turnings: model.config().key_turnings(), ..Int2Options::default() }
    }

    /// The encoder that is used for a file: never [`Int2Encoder::Auto`].
    pub fn encoder_for(&self, file: &RotationFile) -> Int2Encoder {
        let has_bands = |set: &RotationSet| set.values().all(|layer| layer.keys.bands.is_some());
        // These describe scalar codes.
        let scalar_options = self.scope.is_some()
            || self.centred == Some(false)
            || self.rules.is_some()
            || self.group.is_some()
            || self.scales != ScaleType::default();
        match self.encoder {
            Int2Encoder::Auto if !scalar_options && file.heads.as_ref().is_some_and(has_bands) => {
                Int2Encoder::Band
            }
            Int2Encoder::Auto => Int2Encoder::Scalar,
            encoder => encoder,
        }
    }
}

/// The `int2` codec of a rotation file whose key channels are in the model's own order.
pub fn int2_codec(
    name: &str,
    file: &RotationFile,
    geometry: KvGeometry,
    options: &Int2Options,
) -> Result<PageCodec, RotationError> {
    match options.encoder_for(file) {
        Int2Encoder::Band => {
            let of_layer = |layer: usize| file.widths.get(&layer).copied().unwrap_or_default();
            let layout = |layer| {
                BandLayout::of_widths(geometry.head_dim, options.widths.unwrap_or_else(|| of_layer(layer)))
            };
            let layouts = (0..geometry.layers).map(layout).collect::<Result<Vec<_>, _>>()?;
            // Widths are of bands that all layers have.
            let mixing = band_mixing(&BandLayout::int2(geometry.head_dim)?);
            let value_rule = options.rules.map(|rules| rules.1);
            BandCodec { name, file, geometry, turnings: &options.turnings }
                .build(&mixing, &layouts, value_rule)
        }
        encoder => scalar_codec(name, file, geometry, encoder == Int2Encoder::Paper, options),
    }
}

/// The `int1.5` codec of a rotation file whose key channels are in the model's own order: the stronger half of the directions
/// of keys in bands. Directions are those of `int2`, so a file that has bands serves both. `turnings` as in [`Int2Options`].
pub fn int15_codec(
    name: &str,
    file: &RotationFile,
    geometry: KvGeometry,
    turnings: &[Arc<KeyTurning>],
) -> Result<PageCodec, RotationError> {
    let layout = BandLayout::int15(geometry.head_dim)?;
    BandCodec { name, file, geometry, turnings }.build(
        &band_mixing(&layout),
        &vec![layout; geometry.layers],
        None,
    )
}

/// What codecs with keys in bands are made from.
struct BandCodec<'a> {
    name: &'a str,
    file: &'a RotationFile,
    geometry: KvGeometry,
    turnings: &'a [Arc<KeyTurning>],
}

impl BandCodec<'_> {
    /// Keys in bands that `mixing` mixes, with a layout for each layer; values as centred 2-bit codes.
    fn build(
        &self,
        mixing: &SquareMatrix,
        layouts: &[BandLayout],
        value_rule: Option<Rule>,
    ) -> Result<PageCodec, RotationError> {
        let geometry = self.geometry;
        let no_bands = || {
            let problem = "the rotation file has no bands; `oscar calibrate` makes a file that has them";
            self.unfit(problem.to_owned())
        };
        let set = self.file.heads.as_ref().ok_or_else(no_bands)?;
        let encoders = |index: usize| -> Result<(HeadEncoder, HeadEncoder), RotationError> {
            let (layer, head) = (index / geometry.kv_heads, index % geometry.kv_heads);
            let rotations = set
                .get(&layer)
                .ok_or_else(|| self.unfit(format!("the rotation file has no layer {layer}")))?;
            let mean = |side: &SideRotations| side.means.as_ref().map(|means| means[head].clone());
            let bands = rotations.keys.bands.as_ref().ok_or_else(no_bands)?;
            let page_means = match &rotations.keys.unturned_means {
                Some(means) => Some(PageMeans::new(&means[head], self.turning(layer)?)?),
                None => None,
            };
            let keys = HeadTransform::general(mean(&rotations.keys), &bands[head].multiply(mixing))?;
            let values = HeadTransform::new(mean(&rotations.values), &rotations.values.rotations[head])?;
            let rule = value_rule.unwrap_or(rotations.values.rules[head]);
            let rows = RowEncoder::Banded(BandRows { layout: layouts[layer], value_rule: rule });
            Ok((
                HeadEncoder { transform: keys, rows, page_means },
                HeadEncoder { transform: values, rows, page_means: None },
            ))
        };
        // Every head has a matrix to invert.
        let heads: Vec<usize> = (0..geometry.layers * geometry.kv_heads).collect();
        let encoders: Vec<_> = heads.into_par_iter().map(encoders).collect::<Result<_, _>>()?;
        let (keys, values) = encoders.into_iter().unzip();
        Ok(PageCodec::new(self.name, geometry, keys, values)?)
    }

    /// How the keys of a layer turn, which their means need.
    fn turning(&self, layer: usize) -> Result<Arc<KeyTurning>, RotationError> {
        let problem = "the keys of its pages have means that turn, and it is not known how";
        self.turnings.get(layer).cloned().ok_or_else(|| self.unfit(problem.to_owned()))
    }

    fn unfit(&self, problem: String) -> RotationError {
        RotationError::Unfit { codec: self.name.to_owned(), problem }
    }
}

/// The Hadamard matrices of all bands. Channels without a band stay as they are, because windows hold them too.
pub fn band_mixing(layout: &BandLayout) -> SquareMatrix {
    let dim = layout.head_dim();
    let mut values = vec![0.0; dim * dim];
    let stored = layout.bands().last().map_or(0, |band| band.range().end);
    for channel in stored..dim {
        values[channel * dim + channel] = 1.0;
    }
    for band in layout.bands() {
        let inside = hadamard::matrix(band.channels);
        for i in 0..band.channels {
            for j in 0..band.channels {
                values[(band.first + i) * dim + band.first + j] = inside.get(i, j);
            }
        }
    }
    SquareMatrix::new(dim, values).expect("dim · dim values")
}

/// Codes of 2 bits for all channels.
fn scalar_codec(
    name: &str,
    file: &RotationFile,
    geometry: KvGeometry,
    paper: bool,
    options: &Int2Options,
) -> Result<PageCodec, RotationError> {
    let unfit = |problem: String| RotationError::Unfit { codec: name.to_owned(), problem };
    let scope = options.scope.unwrap_or(if paper { Scope::Layer } else { Scope::Head });
    // A published file has one rotation per layer only; we make the best of it.
    let scope = match options.scope {
        None if file.set(scope).is_none() && !paper => Scope::Layer,
        _ => scope,
    };
    let set =
        file.set(scope).ok_or_else(|| unfit(format!("the rotation file has no rotations per {scope}")))?;
    let centred = options.centred.unwrap_or(!paper);
    let rules = options.rules.or(paper.then_some(PAPER_RULES));
    let group = options.group.unwrap_or(geometry.head_dim);
    if group == 0 || !geometry.head_dim.is_multiple_of(group) {
        return Err(unfit(format!("groups of {group} do not divide a head of {}", geometry.head_dim)));
    }
    let layout =
        CodeLayout::new(2, geometry.head_dim, geometry.head_dim / group)?.with_scales(options.scales);
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for layer in 0..geometry.layers {
        let rotations =
            set.get(&layer).ok_or_else(|| unfit(format!("the rotation file has no layer {layer}")))?;
        if centred && rotations.keys.means.is_none() && layer == 0 {
            tracing::warn!("{name}: the rotation file has no key means, so keys are not centred");
        }
        for head in 0..geometry.kv_heads {
            let encoder = |side: &SideRotations, centred: bool, rule: Option<Rule>| {
                head_encoder(side, head, layout, centred, rule, paper)
            };
            keys.push(encoder(&rotations.keys, centred, rules.map(|rules| rules.0))?);
            // The published recipe with centred keys is a yardstick: its values stay as published.
            values.push(encoder(&rotations.values, centred && !paper, rules.map(|rules| rules.1))?);
        }
    }
    Ok(PageCodec::new(name, geometry, keys, values)?)
}

fn head_encoder(
    side: &SideRotations,
    head: usize,
    layout: CodeLayout,
    centred: bool,
    rule: Option<Rule>,
    published: bool,
) -> Result<HeadEncoder, CodecError> {
    let shared = |count: usize| if count == 1 { 0 } else { head };
    let rotation: &SquareMatrix = &side.rotations[shared(side.rotations.len())];
    let mean = side.means.as_ref().filter(|_| centred).map(|means| means[shared(means.len())].clone());
    let transform = match (published, &mean) {
        (true, None) => HeadTransform::published(rotation)?,
        _ => HeadTransform::new(mean, rotation)?,
    };
    let rule = rule.unwrap_or_else(|| side.rules[shared(side.rules.len())]);
    Ok(HeadEncoder::codes(transform, layout, rule, published))
}

/// The mean keys of all heads, by `layer * kv_heads + head`, if the file has them.
pub fn mean_keys(file: &RotationFile, geometry: KvGeometry) -> Option<Vec<Vec<f32>>> {
    let set = file.heads.as_ref().or(file.layers.as_ref())?;
    let mut all = Vec::with_capacity(geometry.layers * geometry.kv_heads);
    for layer in 0..geometry.layers {
        let means = set.get(&layer)?.keys.means.as_ref()?;
        if means.len() != geometry.kv_heads {
            return None;
        }
        all.extend(means.iter().cloned());
    }
    Some(all)
}
