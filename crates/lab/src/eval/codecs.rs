//! From a name on the command line to a codec.
//!
//! `NAME` or `NAME:OPTION+OPTION…`. Options are for `int2`, whose parts can be exchanged one by one; everything else
//! is one definition under one name.

use oscar_codec::baselines::{self, KeyMeans};
use oscar_codec::{
    CacheCodec, CodecError, HeadEncoder, HeadIndex, HeadTransform, Int2Codec, KvGeometry, Rule, ScaleType,
    Side, SquareMatrix,
};
use oscar_kernels::cpu::encode::FastInt2;
use oscar_kernels::cpu::isa::Isa;

use super::EvalError;
use crate::calibrate::run::PAPER_RULES;
use crate::zoo::{RotationFile, Scope, SideRotations};

/// What can be asked for, for help texts and errors.
pub const HELP: &str = "bf16, fp8, int4, int3, int2, saw-int4, turboquant, kitty, kivi2, quarot-int2, naive-int2; \
    int2 takes options: int2:paper (int2:auto), int2:layer (head), int2:uncentred (centred), int2:clip=0.96/0.92, int2:rule=search, \
    int2:group=64, int2:scales=bf16, int2:keys-only, int2:values-only, joined with +; int4, int3, saw-int4, \
    quarot-int2 and naive-int2 take :centred or :uncentred";

/// Formats of our own cache besides `int2`; their keys are centred when the means are known.
const OWN_TIERS: [&str; 2] = ["int4", "int3"];

/// A codec and what it needs to know about the model.
#[derive(Clone, Copy)]
pub struct CodecSource<'a> {
    /// Shape of the cache.
    pub geometry: KvGeometry,
    /// Rotations with key channels in the model's own order.
    pub rotations: Option<&'a RotationFile>,
    /// Kernel path for encoding.
    pub isa: Isa,
}

impl CodecSource<'_> {
    /// Builds the codec that `spec` names.
    pub fn build(&self, spec: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let (name, options) = spec.split_once(':').unwrap_or((spec, ""));
        if name == "int2" {
            return self.int2(spec, &Int2Options::parse(spec, options)?);
        }
        self.baseline(spec, name, options)
    }

    /// A codec of one definition. Those that treat rows alone can be centred; the tiers of our own cache are.
    fn baseline(&self, spec: &str, name: &str, options: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let wrong = |problem: String| EvalError::Codec { spec: spec.to_owned(), problem };
        let means = self.rotations.and_then(|file| key_means(file, self.geometry));
        let means = match options {
            "" if OWN_TIERS.contains(&name) => means,
            "" | "uncentred" => None,
            "centred" => Some(means.ok_or_else(|| EvalError::NoRotations { spec: spec.to_owned() })?),
            _ => return Err(wrong(format!("`{options}` is not an option; known are {HELP}"))),
        };
        let codec = baselines::by_name(name, self.geometry.head_dim, means);
        let codec = codec.map_err(|error| match error {
            CodecError::UnknownName { .. } => wrong(format!("known are {HELP}")),
            error => EvalError::Encode(error),
        })?;
        Ok(Box::new(Named { codec, name: spec.to_owned() }))
    }

    fn int2(&self, spec: &str, options: &Int2Options) -> Result<Box<dyn CacheCodec>, EvalError> {
        let Some(file) = self.rotations else {
            return Err(EvalError::NoRotations { spec: spec.to_owned() });
        };
        let codec = int2_codec(spec, file, self.geometry, options)?;
        let codec = FastInt2::new(self.isa, codec);
        Ok(match options.side {
            None => Box::new(codec),
            Some(side) => Box::new(OneSide { codec, side }),
        })
    }
}

/// The parts of an `int2` codec.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Int2Options {
    /// The published encoder: per layer, not centred, fixed clip, codes from unrounded scales.
    pub paper: bool,
    /// One rotation per head or per layer; the encoder's own by default.
    pub scope: Option<Scope>,
    /// Subtract the mean key; the encoder's own choice by default.
    pub centred: Option<bool>,
    /// One rule for keys and one for values instead of those in the file.
    pub rules: Option<(Rule, Rule)>,
    /// Channels that share a scale; all of them by default.
    pub group: Option<usize>,
    /// Type of the scales.
    pub scales: ScaleType,
    /// Encode only one side.
    pub side: Option<Side>,
}

impl Int2Options {
    /// Reads options joined with `+`.
    pub fn parse(spec: &str, options: &str) -> Result<Int2Options, EvalError> {
        let mut parsed = Int2Options::default();
        for option in options.split('+').filter(|option| !option.is_empty()) {
            let wrong = || EvalError::Codec {
                spec: spec.to_owned(),
                problem: format!("`{option}` is not an option; {HELP}"),
            };
            match option.split_once('=').unwrap_or((option, "")) {
                ("auto", "") => parsed.paper = false,
                ("paper", "") => parsed.paper = true,
                ("head", "") => parsed.scope = Some(Scope::Head),
                ("layer", "") => parsed.scope = Some(Scope::Layer),
                ("centred", "") => parsed.centred = Some(true),
                ("uncentred", "") => parsed.centred = Some(false),
                ("keys-only", "") => parsed.side = Some(Side::Key),
                ("values-only", "") => parsed.side = Some(Side::Value),
                ("group", size) => parsed.group = Some(size.parse().map_err(|_| wrong())?),
                ("scales", kind) => parsed.scales = kind.parse().map_err(|_| wrong())?,
                ("rule", rule) => {
                    let rule: Rule = rule.parse().map_err(|_| wrong())?;
                    parsed.rules = Some((rule, rule));
                }
                ("clip", ratios) => {
                    let (keys, values) = ratios.split_once('/').unwrap_or((ratios, ratios));
                    let rule = |ratio: &str| format!("clip={ratio}").parse::<Rule>().map_err(|_| wrong());
                    parsed.rules = Some((rule(keys)?, rule(values)?));
                }
                _ => return Err(wrong()),
            }
        }
        Ok(parsed)
    }
}

/// The `int2` codec of a rotation file.
pub fn int2_codec(
    name: &str,
    file: &RotationFile,
    geometry: KvGeometry,
    options: &Int2Options,
) -> Result<Int2Codec, EvalError> {
    let wrong = |problem: String| EvalError::Codec { spec: name.to_owned(), problem };
    let scope = options.scope.unwrap_or(if options.paper { Scope::Layer } else { Scope::Head });
    // A published file has one rotation per layer only; `auto` makes the best of it.
    let scope = match options.scope {
        None if file.set(scope).is_none() && !options.paper => Scope::Layer,
        _ => scope,
    };
    let set =
        file.set(scope).ok_or_else(|| wrong(format!("the rotation file has no rotations per {scope}")))?;
    let centred = options.centred.unwrap_or(!options.paper);
    let rules = options.rules.or(options.paper.then_some(PAPER_RULES));
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for layer in 0..geometry.layers {
        let rotations =
            set.get(&layer).ok_or_else(|| wrong(format!("the rotation file has no layer {layer}")))?;
        if centred && rotations.keys.means.is_none() && layer == 0 {
            tracing::warn!("{name}: the rotation file has no key means, so keys are not centred");
        }
        for head in 0..geometry.kv_heads {
            let encoder = |side: &SideRotations, centred: bool, rule: Option<Rule>| {
                side_encoder(side, head, centred, rule, options.paper)
            };
            keys.push(encoder(&rotations.keys, centred, rules.map(|rules| rules.0))?);
            // Values are never centred: their mean would have to be added to every output.
            values.push(encoder(&rotations.values, false, rules.map(|rules| rules.1))?);
        }
    }
    let group = options.group.unwrap_or(geometry.head_dim);
    if group == 0 || !geometry.head_dim.is_multiple_of(group) {
        return Err(wrong(format!("groups of {group} do not divide a head of {}", geometry.head_dim)));
    }
    let groups = geometry.head_dim / group;
    let KvGeometry { kv_heads, head_dim, .. } = geometry;
    Ok(Int2Codec::new(name, head_dim, kv_heads, groups, options.scales, options.paper, keys, values)?)
}

fn side_encoder(
    side: &SideRotations,
    head: usize,
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
    Ok(HeadEncoder::new(transform, rule))
}

fn key_means(file: &RotationFile, geometry: KvGeometry) -> Option<KeyMeans> {
    KeyMeans::new(geometry.kv_heads, mean_keys(file, geometry)?).ok()
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

/// A codec under the name it was asked for by.
struct Named {
    codec: Box<dyn CacheCodec>,
    name: String,
}

impl CacheCodec for Named {
    fn name(&self) -> &str {
        &self.name
    }

    fn token_group(&self) -> usize {
        self.codec.token_group()
    }

    fn round_trip(&self, head: HeadIndex, side: Side, rows: &mut [f32]) -> Result<(), CodecError> {
        self.codec.round_trip(head, side, rows)
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}

/// A codec for one side; the other stays exact.
struct OneSide<C> {
    codec: C,
    side: Side,
}

impl<C: CacheCodec> CacheCodec for OneSide<C> {
    fn name(&self) -> &str {
        self.codec.name()
    }

    fn token_group(&self) -> usize {
        self.codec.token_group()
    }

    fn round_trip(&self, head: HeadIndex, side: Side, rows: &mut [f32]) -> Result<(), CodecError> {
        if side == self.side { self.codec.round_trip(head, side, rows) } else { Ok(()) }
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        (self.codec.token_bytes(head_dim) + (4 * head_dim) as f64) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_or_refused_with_the_list() {
        let parsed = Int2Options::parse("int2", "paper+group=32+clip=0.9/0.8+scales=bf16+keys-only").unwrap();
        assert!(parsed.paper);
        assert_eq!(parsed.group, Some(32));
        assert_eq!(parsed.rules, Some((Rule::Clip(0.9), Rule::Clip(0.8))));
        assert_eq!(parsed.scales, ScaleType::Bf16);
        assert_eq!(parsed.side, Some(Side::Key));
        for bad in ["papers", "group=", "group=x", "clip=2", "rule=best", "paper=1"] {
            let error = Int2Options::parse("int2", bad).unwrap_err();
            assert!(error.to_string().contains("int2:paper"), "{error}");
        }
    }

    #[test]
    fn without_rotations_int2_says_what_to_do() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
        let source = CodecSource { geometry, rotations: None, isa: Isa::Scalar };
        let error = |spec| source.build(spec).map(|_| ()).unwrap_err().to_string();
        assert!(error("int2").contains("oscar calibrate"));
        assert!(error("int5").contains("quarot-int2"));
        assert!(error("int4:paper").contains("`paper` is not an option"));
        assert!(error("fp8:centred").contains("rotations"));
        assert!(source.build("int4").is_ok());
    }
}
