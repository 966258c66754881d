//! Builds a codec by its name on the command line.
//!
//! `NAME` or `NAME:OPTION+OPTION…`. Options are for `int2`, whose parts can be exchanged one by one; everything else
//! is one definition under one name.

use std::sync::Arc;

use oscar_codec::baselines::{self, KeyMeans};
use oscar_codec::{
    BandLayout, CacheCodec, CodecError, HeadIndex, KeyTurning, KvGeometry, PAGE_TOKENS, Rule, Side,
};
use oscar_kernels::Backend;
use oscar_kernels::cpu::encode::FastCodec;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::LoadedModel;
use oscar_rotations::codec::{int2_codec, int15_codec, mean_keys};
use oscar_rotations::{Int2Encoder, Int2Options, RotationFile, Scope};

use super::EvalError;
use super::band_variants::{BandsOfBits, LeastSquaresBands, windows_of};

/// The names and options of codecs, for help texts and errors.
pub const HELP: &str = "bf16, fp8, int4, int3, high, int2, int1.5, saw-int4, turboquant, kitty, kivi2, quarot-int2, naive-int2; \
    int2 takes options: int2:band, int2:scalar, int2:paper (int2:auto), int2:layer (head), int2:uncentred (centred), int2:clip=0.96/0.92, int2:rule=search, \
    int2:group=64, int2:scales=bf16, int2:widths=4/2/1/1 (of bands, in every layer), int2:begin=8192 (as if the text began at that position, a multiple of 64), int2:keys-only, int2:values-only, joined with +; int2:least-squares is int2 without \
    unbiased scales of keys; high and int1.5 take keys-only or values-only, high:bits=8/4/2/2 has other bits in its bands; bf16:basis rounds to bf16 as the windows of int2 do; int4, int3, saw-int4, \
    quarot-int2 and naive-int2 take :centred or :uncentred";

/// Formats of our own cache besides `int2`; their keys are centred when the means are known.
const OWN_TIERS: [&str; 2] = ["int4", "int3"];

/// What codecs need to know about a model.
#[derive(Clone)]
pub struct CodecSource<'a> {
    /// Layers, heads and channels of the cache.
    pub geometry: KvGeometry,
    /// Rotations with key channels in the model's own order.
    pub rotations: Option<&'a RotationFile>,
    /// What `int2` is made with when nothing is said.
    defaults: Int2Options,
}

impl<'a> CodecSource<'a> {
    /// What there is to know of a model. Key channels of rotations are in the model's own order.
    pub fn new<B: Backend>(model: &LoadedModel<B>, rotations: Option<&'a RotationFile>) -> CodecSource<'a> {
        CodecSource { geometry: model.config().kv_geometry(), rotations, defaults: Int2Options::of(model) }
    }

    /// Codecs that need no model but its shape.
    pub fn of_shape(geometry: KvGeometry) -> CodecSource<'a> {
        CodecSource { geometry, rotations: None, defaults: Int2Options::default() }
    }

    /// Builds the codec that `spec` names.
    pub fn build(&self, spec: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let (name, options) = spec.split_once(':').unwrap_or((spec, ""));
        match name {
            "int2" if options == "least-squares" => self.least_squares(spec),
            "bf16" if options == "basis" => self.windows_basis(spec),
            "int2" => self.int2(spec, &Int2Spec::parse(spec, options)?),
            "int1.5" => self.int15(spec, options),
            "high" => self.high(spec, options),
            _ => self.baseline(spec, name, options),
        }
    }

    /// Rows as the windows of `int2` hold them.
    fn windows_basis(&self, spec: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let codec = int2_codec(spec, self.file(spec)?, self.geometry, &self.defaults)?;
        Ok(Box::new(FastCodec::new(Isa::detect(), windows_of(spec, &codec)?)))
    }

    /// Bands with the scales of least squared error.
    fn least_squares(&self, spec: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let options = Int2Options { encoder: Int2Encoder::Band, ..self.defaults.clone() };
        let codec = int2_codec(spec, self.file(spec)?, self.geometry, &options)?;
        let bands = BandLayout::int2(self.geometry.head_dim)?;
        Ok(Box::new(LeastSquaresBands::new(codec, bands)))
    }

    /// The tier of four bits beside `int2`, or its bands with other bits.
    fn high(&self, spec: &str, options: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let wrong = |problem: String| EvalError::Codec { spec: spec.to_owned(), problem };
        let int2 = int2_codec("int2", self.file(spec)?, self.geometry, &self.defaults)?;
        let codec =
            int2.high().ok_or_else(|| wrong("int2 of this file has no codes of 2 bits".to_owned()))?;
        let Some(bits) = options.strip_prefix("bits=") else {
            let side = side_option(spec, options)?;
            let codec = sided(FastCodec::new(Isa::detect(), codec), side);
            return Ok(Box::new(NamedCodec { codec, name: spec.to_owned() }));
        };
        let bits: Option<Vec<u32>> =
            bits.split('/').map(|bits| bits.parse().ok().filter(|bits| (1..=8).contains(bits))).collect();
        let bands = BandLayout::high(self.geometry.head_dim)?;
        let bits = bits.filter(|bits| bits.len() == bands.bands().len());
        let bits =
            bits.ok_or_else(|| wrong(format!("{} bands need 1 to 8 bits each", bands.bands().len())))?;
        Ok(Box::new(NamedCodec {
            codec: Box::new(BandsOfBits::new(codec, bands, bits)),
            name: spec.to_owned(),
        }))
    }

    fn int15(&self, spec: &str, options: &str) -> Result<Box<dyn CacheCodec>, EvalError> {
        let side = side_option(spec, options)?;
        let codec = int15_codec(spec, self.file(spec)?, self.geometry, &self.defaults.turnings)?;
        Ok(sided(FastCodec::new(Isa::detect(), codec), side))
    }

    /// The rotations, which codecs of our own cannot do without.
    fn file(&self, spec: &str) -> Result<&RotationFile, EvalError> {
        self.rotations.ok_or_else(|| EvalError::NoRotations { spec: spec.to_owned() })
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
        Ok(Box::new(NamedCodec { codec, name: spec.to_owned() }))
    }

    fn int2(&self, spec: &str, options: &Int2Spec) -> Result<Box<dyn CacheCodec>, EvalError> {
        let parts = Int2Options { turnings: self.defaults.turnings.clone(), ..options.parts.clone() };
        let codec = int2_codec(spec, self.file(spec)?, self.geometry, &parts)?;
        let codec = sided(FastCodec::new(Isa::detect(), codec), options.side);
        Ok(match options.begin {
            0 => codec,
            begin => {
                let (turnings, head_dim) = (parts.turnings, self.geometry.head_dim);
                Box::new(LaterText { codec, turnings, head_dim, begin })
            }
        })
    }
}

/// The one side that is encoded, if an option says so.
fn side_option(spec: &str, options: &str) -> Result<Option<Side>, EvalError> {
    match options {
        "" => Ok(None),
        "keys-only" => Ok(Some(Side::Key)),
        "values-only" => Ok(Some(Side::Value)),
        _ => {
            let name = spec.split(':').next().unwrap_or_default();
            let problem = format!("`{options}` is not an option of {name}; known are {HELP}");
            Err(EvalError::Codec { spec: spec.to_owned(), problem })
        }
    }
}

/// A codec for both sides, or for one of them.
fn sided(codec: FastCodec, side: Option<Side>) -> Box<dyn CacheCodec> {
    match side {
        None => Box::new(codec),
        Some(side) => Box::new(OneSidedCodec { codec, side }),
    }
}

/// The options of `int2`: the parts of the codec, and the side that is encoded if it is only one.
#[derive(Clone, Debug, Default, PartialEq)]
struct Int2Spec {
    parts: Int2Options,
    side: Option<Side>,
    /// The position at which the text is taken to begin.
    begin: usize,
}

impl Int2Spec {
    /// Reads options joined with `+`.
    fn parse(spec: &str, options: &str) -> Result<Int2Spec, EvalError> {
        let (mut parsed, mut one_side) = (Int2Options::default(), None);
        let mut begin = 0;
        for option in options.split('+').filter(|option| !option.is_empty()) {
            let wrong = || EvalError::Codec {
                spec: spec.to_owned(),
                problem: format!("`{option}` is not an option; {HELP}"),
            };
            match option.split_once('=').unwrap_or((option, "")) {
                ("auto", "") => parsed.encoder = Int2Encoder::Auto,
                ("band", "") => parsed.encoder = Int2Encoder::Band,
                ("scalar", "") => parsed.encoder = Int2Encoder::Scalar,
                ("paper", "") => parsed.encoder = Int2Encoder::Paper,
                ("head", "") => parsed.scope = Some(Scope::Head),
                ("layer", "") => parsed.scope = Some(Scope::Layer),
                ("centred", "") => parsed.centred = Some(true),
                ("uncentred", "") => parsed.centred = Some(false),
                ("keys-only", "") => one_side = Some(Side::Key),
                ("values-only", "") => one_side = Some(Side::Value),
                ("begin", position) => {
                    let position: usize = position.parse().map_err(|_| wrong())?;
                    begin = Some(position).filter(|it| it.is_multiple_of(PAGE_TOKENS)).ok_or_else(wrong)?;
                }
                ("group", size) => parsed.group = Some(size.parse().map_err(|_| wrong())?),
                ("widths", widths) => parsed.widths = Some(widths.parse().map_err(|_| wrong())?),
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
        Ok(Int2Spec { parts: parsed, side: one_side, begin })
    }
}

fn key_means(file: &RotationFile, geometry: KvGeometry) -> Option<KeyMeans> {
    KeyMeans::new(geometry.kv_heads, mean_keys(file, geometry)?).ok()
}

/// A codec that sees a text as if it began further back in a context: keys are turned there and back.
struct LaterText {
    codec: Box<dyn CacheCodec>,
    turnings: Vec<Arc<KeyTurning>>,
    head_dim: usize,
    begin: usize,
}

impl CacheCodec for LaterText {
    fn name(&self) -> &str {
        self.codec.name()
    }

    fn token_group(&self) -> usize {
        self.codec.token_group()
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        let first = first + self.begin;
        if side == Side::Value {
            return self.codec.round_trip(head, side, first, rows);
        }
        let turning = &self.turnings[head.layer];
        let turned = |rows: &mut [f32], positions: f64| {
            let turn = turning.by(positions);
            rows.chunks_exact_mut(self.head_dim).for_each(|row| turn.apply(row));
        };
        turned(rows, self.begin as f64);
        let outcome = self.codec.round_trip(head, side, first, rows);
        turned(rows, -(self.begin as f64));
        outcome
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}

/// A codec under the name that the user typed.
struct NamedCodec {
    codec: Box<dyn CacheCodec>,
    name: String,
}

impl CacheCodec for NamedCodec {
    fn name(&self) -> &str {
        &self.name
    }

    fn token_group(&self) -> usize {
        self.codec.token_group()
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        self.codec.round_trip(head, side, first, rows)
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}

/// A codec for one side; the other stays exact.
struct OneSidedCodec<C> {
    codec: C,
    side: Side,
}

impl<C: CacheCodec> CacheCodec for OneSidedCodec<C> {
    fn name(&self) -> &str {
        self.codec.name()
    }

    fn token_group(&self) -> usize {
        self.codec.token_group()
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        if side == self.side { self.codec.round_trip(head, side, first, rows) } else { Ok(()) }
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        (self.codec.token_bytes(head_dim) + (4 * head_dim) as f64) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::ScaleType;

    use super::*;

    #[test]
    fn options_are_read_or_refused_with_the_list() {
        let Int2Spec { parts: parsed, side, begin } = Int2Spec::parse(
            "int2",
            "paper+group=32+clip=0.9/0.8+scales=bf16+keys-only+widths=4/2/2/0+begin=6400",
        )
        .unwrap();
        assert_eq!(begin, 6400);
        assert_eq!(parsed.encoder, Int2Encoder::Paper);
        assert_eq!(parsed.group, Some(32));
        assert_eq!(parsed.rules, Some((Rule::Clip(0.9), Rule::Clip(0.8))));
        assert_eq!(parsed.scales, ScaleType::Bf16);
        assert_eq!(side, Some(Side::Key));
        assert_eq!(parsed.widths, "4/2/2/0".parse().ok());
        for bad in [
            "papers",
            "group=",
            "group=x",
            "begin=100",
            "clip=2",
            "rule=best",
            "paper=1",
            "widths=4",
            "widths=1/1/2/4",
        ] {
            let error = Int2Spec::parse("int2", bad).unwrap_err();
            assert!(error.to_string().contains("int2:paper"), "{error}");
        }
    }

    #[test]
    fn without_rotations_int2_says_what_to_do() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
        let source = CodecSource::of_shape(geometry);
        let error = |spec| source.build(spec).map(|_| ()).unwrap_err().to_string();
        assert!(error("int2").contains("oscar calibrate"));
        assert!(error("int1.5").contains("oscar calibrate"));
        assert!(error("high").contains("oscar calibrate"));
        assert!(error("int1.5:paper").contains("`paper` is not an option of int1.5"));
        assert!(error("int5").contains("quarot-int2"));
        assert!(error("int4:paper").contains("`paper` is not an option"));
        assert!(error("fp8:centred").contains("rotations"));
        assert!(source.build("int4").is_ok());
    }
}
