//! From a rotation file to the codec of a cache.

use oscar_codec::{
    CodeLayout, CodecError, HeadEncoder, HeadTransform, KvGeometry, PageCodec, Rule, ScaleType, SquareMatrix,
};

use crate::error::RotationError;
use crate::rotation::{RotationFile, Scope, SideRotations};

/// The published clip ratios for keys and values.
pub const PAPER_RULES: (Rule, Rule) = (Rule::Clip(0.96), Rule::Clip(0.92));

/// The parts of an `int2` codec that can be exchanged one by one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Int2Options {
    /// The published encoder: per layer, not centred, fixed clip, codes from unrounded scales.
    pub paper: bool,
    /// Whether heads share a rotation; as the encoder has it by default.
    pub scope: Option<Scope>,
    /// Whether the mean key is subtracted; as the encoder has it by default.
    pub centred: Option<bool>,
    /// One rule for keys and one for values instead of those in the file.
    pub rules: Option<(Rule, Rule)>,
    /// Channels that share a scale; all of them by default.
    pub group: Option<usize>,
    /// Type of the scales.
    pub scales: ScaleType,
}

/// The `int2` codec of a rotation file whose key channels are in the model's own order.
pub fn int2_codec(
    name: &str,
    file: &RotationFile,
    geometry: KvGeometry,
    options: &Int2Options,
) -> Result<PageCodec, RotationError> {
    let unfit = |problem: String| RotationError::Unfit { codec: name.to_owned(), problem };
    let scope = options.scope.unwrap_or(if options.paper { Scope::Layer } else { Scope::Head });
    // A published file has one rotation per layer only; `auto` makes the best of it.
    let scope = match options.scope {
        None if file.set(scope).is_none() && !options.paper => Scope::Layer,
        _ => scope,
    };
    let set =
        file.set(scope).ok_or_else(|| unfit(format!("the rotation file has no rotations per {scope}")))?;
    let centred = options.centred.unwrap_or(!options.paper);
    let rules = options.rules.or(options.paper.then_some(PAPER_RULES));
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
                head_encoder(side, head, layout, centred, rule, options.paper)
            };
            keys.push(encoder(&rotations.keys, centred, rules.map(|rules| rules.0))?);
            // Values are never centred: their mean would have to be added to every output.
            values.push(encoder(&rotations.values, false, rules.map(|rules| rules.1))?);
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
