//! Chooses the codec of a cache by what a user asks for, and says why it is that one.

use std::sync::Arc;

use oscar_codec::{KvGeometry, PageCodec, Rule};
use oscar_kernels::Inspect;
use oscar_model::LoadedModel;

use crate::cache_type::CacheType;
use crate::codec::{Int2Encoder, Int2Options, PAPER_RULES, int2_codec, int15_codec, mean_keys};
use crate::error::RotationError;
use crate::find::{FoundRotations, RotationSource};
use crate::identity::ModelIdentity;
use crate::means::estimate_mean_keys;
use crate::notice::Notice;
use crate::verdict::Verdict;

/// The cache that a user asks for. The default is the best that is possible for a model.
#[derive(Clone, Debug, Default)]
pub struct CacheOptions {
    /// The page format in which history is stored.
    pub dtype: CacheType,
    /// How codes are chosen, and which layers stay bf16.
    pub encoder: EncoderOptions,
    /// Where rotations come from.
    pub rotations: RotationSource,
}

/// How codes are chosen, and which layers stay bf16.
#[derive(Clone, Debug, Default)]
pub struct EncoderOptions {
    /// How 2-bit codes are chosen.
    pub encoder: Int2Encoder,
    /// Clip ratio of the keys instead of the rule in the file.
    pub key_clip: Option<f32>,
    /// Clip ratio of the values instead of the rule in the file.
    pub value_clip: Option<f32>,
    /// Channels that share a scale; a whole head by default.
    pub group: Option<usize>,
    /// Layers that stay bf16.
    pub bf16_layers: Vec<usize>,
}

/// The cache of a model: what was decided, and what the user should know about it.
#[derive(Clone, Debug)]
pub struct CachePlan {
    /// The codec of sealed pages; `None` if nothing is sealed. This is `KvOptions::codec` of an engine.
    pub codec: Option<Arc<PageCodec>>,
    /// The cache type that was chosen; never `auto`.
    pub kind: CacheType,
    /// The encoder and where its numbers come from, for people; empty if there is nothing to say.
    pub source: String,
    /// What the user should know about the choice.
    pub notices: Vec<Notice>,
}

impl CachePlan {
    /// Finds the rotations of a model and settles its cache.
    ///
    /// `int2` without rotations is [`RotationError::NoRotations`]: making them takes minutes and is the caller's choice.
    pub fn settle<B: Inspect>(
        model: &LoadedModel<B>,
        identity: &ModelIdentity,
        options: &CacheOptions,
    ) -> Result<CachePlan, RotationError> {
        let found = match options.dtype {
            CacheType::Bf16 => None,
            _ => options.rotations.find(model, identity)?,
        };
        CachePlan::settle_with(model, identity, found.as_ref(), options)
    }

    /// Settles the cache of a model with rotations that were found before.
    pub fn settle_with<B: Inspect>(
        model: &LoadedModel<B>,
        identity: &ModelIdentity,
        found: Option<&FoundRotations>,
        options: &CacheOptions,
    ) -> Result<CachePlan, RotationError> {
        let mut notices = found.map(|found| found.notices.clone()).unwrap_or_default();
        let kind = decide(options.dtype, found, &identity.name, &mut notices);
        // Other types of cache have no bands, and whoever names an encoder does not ask for them.
        let bands_wanted = match kind {
            CacheType::Int2 => options.encoder.encoder == Int2Encoder::Auto,
            kind => kind == CacheType::Int15,
        };
        notices.retain(|notice| bands_wanted || !matches!(notice, Notice::OldRotations { .. }));
        let geometry = model.config().kv_geometry();
        let turnings = Int2Options::of(model).turnings;
        let codec = match (kind, found) {
            (CacheType::Bf16 | CacheType::Auto, _) => None,
            (CacheType::Int2 | CacheType::Int15, None) => {
                return Err(RotationError::NoRotations { model: identity.name.clone() });
            }
            (CacheType::Int2, Some(found)) => {
                let options = Int2Options { turnings, ..int2_options(&options.encoder) };
                Some(int2_codec("int2", &found.file, geometry, &options)?)
            }
            (CacheType::Int15, Some(found)) => Some(int15_codec("int1.5", &found.file, geometry, &turnings)?),
            (CacheType::Int4 | CacheType::Fp8, _) => {
                let means = match found.and_then(|found| mean_keys(&found.file, geometry)) {
                    Some(means) => means,
                    // Some models collapse even in 4 bits when their keys are not centred.
                    None => {
                        let of = format!("no rotations for {}", identity.name);
                        notices.push(Notice::MeansEstimated { of });
                        estimate_mean_keys(model)?.concat()
                    }
                };
                Some(centred_codec(kind, geometry, means)?)
            }
        };
        let codec = match codec {
            Some(codec) => {
                let codec = codec.keep_bf16(&options.encoder.bf16_layers)?;
                Some(Arc::new(codec.without_history(&model.config().sliding_layers())?))
            }
            None => None,
        };
        let source = source(kind, found, &options.encoder);
        Ok(CachePlan { codec, kind, source, notices })
    }
}

/// Chooses a type by what was asked for and by the certificate.
fn decide(
    asked: CacheType,
    found: Option<&FoundRotations>,
    model: &str,
    notices: &mut Vec<Notice>,
) -> CacheType {
    let Some(found) = found else {
        if asked != CacheType::Auto {
            return asked;
        }
        notices.push(Notice::NoRotations { model: model.to_owned() });
        return CacheType::Bf16;
    };
    let refused = found.certificate.as_ref().filter(|certificate| certificate.verdict == Verdict::Bad);
    let kind = match (asked, refused) {
        (CacheType::Auto, None) => CacheType::Int2,
        (CacheType::Auto, Some(_)) => CacheType::Int4,
        (asked, _) => asked,
    };
    let asked_for_bits = matches!(asked, CacheType::Auto | CacheType::Int2 | CacheType::Int15);
    if let Some(certificate) = refused.filter(|_| asked_for_bits) {
        let (rotations, reason) = (found.name.clone(), certificate.reason.clone());
        notices.push(Notice::Certificate { rotations, reason, used: kind });
    }
    kind
}

/// A codec that needs mean keys alone.
fn centred_codec(
    kind: CacheType,
    geometry: KvGeometry,
    means: Vec<Vec<f32>>,
) -> Result<PageCodec, RotationError> {
    Ok(match kind {
        CacheType::Fp8 => PageCodec::fp8(geometry, Some(means))?,
        _ => PageCodec::int4(geometry, Some(means))?,
    })
}

fn int2_options(options: &EncoderOptions) -> Int2Options {
    let EncoderOptions { encoder, key_clip, value_clip, group, .. } = *options;
    // A clip on one side replaces the rules of the file on both: rules per head do not mix with one for all.
    let rules = (key_clip.is_some() || value_clip.is_some()).then(|| {
        let rule = |clip: Option<f32>, published: Rule| clip.map_or(published, Rule::Clip);
        (rule(key_clip, PAPER_RULES.0), rule(value_clip, PAPER_RULES.1))
    });
    Int2Options { encoder, rules, group, ..Int2Options::default() }
}

fn source(kind: CacheType, found: Option<&FoundRotations>, encoder: &EncoderOptions) -> String {
    match (kind, found) {
        (CacheType::Int2, Some(found)) => {
            let encoder = int2_options(encoder).encoder_for(&found.file);
            format!("encoder {}, rotations {}", encoder.name(), found.name)
        }
        (CacheType::Int15, Some(found)) => format!("encoder band, rotations {}", found.name),
        (CacheType::Fp8 | CacheType::Int4, Some(found)) => format!("mean keys of {}", found.name),
        (CacheType::Fp8 | CacheType::Int4, None) => "mean keys estimated".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rotation::RotationFile;
    use crate::shipped;

    fn found(verdict: Verdict) -> FoundRotations {
        let mut certificate = shipped::SHIPPED[0].certificate().expect("a certificate");
        (certificate.verdict, certificate.reason) = (verdict, "heads move".to_owned());
        FoundRotations {
            file: RotationFile::default(),
            name: "file".to_owned(),
            certificate: Some(certificate),
            notices: Vec::new(),
        }
    }

    fn decided(asked: CacheType, found: Option<&FoundRotations>) -> (CacheType, Vec<String>) {
        let mut notices = Vec::new();
        let kind = decide(asked, found, "model", &mut notices);
        (kind, notices.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn auto_needs_rotations_and_hears_the_certificate() {
        let (kind, notices) = decided(CacheType::Auto, None);
        assert_eq!(kind, CacheType::Bf16);
        assert!(notices[0].contains("oscar calibrate model"), "{notices:?}");
        let good = found(Verdict::Good);
        assert_eq!(decided(CacheType::Auto, Some(&good)), (CacheType::Int2, Vec::new()));
        let bad = found(Verdict::Bad);
        let (kind, notices) = decided(CacheType::Auto, Some(&bad));
        assert_eq!(kind, CacheType::Int4);
        assert!(notices[0].contains("so the cache is int4: heads move"), "{notices:?}");
        for asked in [CacheType::Int2, CacheType::Int15] {
            let (kind, notices) = decided(asked, Some(&bad));
            assert_eq!(kind, asked);
            assert!(notices[0].contains("advises against int2: heads move"), "{notices:?}");
        }
        for asked in [CacheType::Bf16, CacheType::Fp8, CacheType::Int4] {
            assert_eq!(decided(asked, Some(&bad)), (asked, Vec::new()));
            assert_eq!(decided(asked, None), (asked, Vec::new()));
        }
    }

    #[test]
    fn one_clip_replaces_the_rules_of_both_sides() {
        let options = |key_clip, value_clip| {
            int2_options(&EncoderOptions { key_clip, value_clip, ..EncoderOptions::default() }).rules
        };
        assert_eq!(options(None, None), None);
        assert_eq!(options(Some(0.9), None), Some((Rule::Clip(0.9), PAPER_RULES.1)));
        assert_eq!(options(None, Some(0.8)), Some((PAPER_RULES.0, Rule::Clip(0.8))));
    }
}
