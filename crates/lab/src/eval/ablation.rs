//! The paper's ablations: take one part of the published recipe away and measure what it was worth.

use oscar_codec::{
    BandLayout, CodeLayout, Composition, HeadEncoder, HeadTransform, KvGeometry, PageCodec, Rule,
    SquareMatrix, Windows,
};
use oscar_kernels::Inspect;
use oscar_kernels::cpu::encode::FastCodec;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::LoadedModel;
use oscar_rotations::PAPER_RULES;
use rayon::prelude::*;

use super::EvalError;
use crate::calibrate::Corpus;
use crate::calibrate::fit::{mean, rotation};
use crate::calibrate::observe::Observer;
use crate::calibrate::observed::observe_layer;

/// The matrices that rotations are fitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationTargets {
    /// Queries for key rotations, weighted values for value rotations: the published recipe.
    Published,
    /// Keys for key rotations, values for value rotations.
    Plain,
    /// No matrix: rows are not rotated.
    None,
}

/// One line of the table: the published recipe with something changed.
#[derive(Clone, Debug, PartialEq)]
pub struct AblationSetting {
    /// The study: what is varied.
    pub study: &'static str,
    /// How it is varied, for people.
    pub name: String,
    /// How the rotation is composed of its factors.
    pub composition: Composition,
    /// The matrices that the rotation is fitted to.
    pub targets: RotationTargets,
    /// Channels that share a scale; all of a head when `None`.
    pub group: Option<usize>,
    /// Rules for keys and values.
    pub rules: (Rule, Rule),
    /// The windows that stay exact.
    pub windows: Windows,
    /// Sequences of calibration text; all when `None`.
    pub sequences: Option<usize>,
}

impl AblationSetting {
    fn published(study: &'static str, name: impl Into<String>) -> AblationSetting {
        AblationSetting {
            study,
            name: name.into(),
            composition: Composition::RHPbr,
            targets: RotationTargets::Published,
            group: None,
            rules: PAPER_RULES,
            windows: Windows::default(),
            sequences: None,
        }
    }
}

impl AblationSetting {
    /// Whether both are the same recipe under other names; `all` is the number of sequences there are.
    pub fn same_recipe(&self, other: &AblationSetting, all: usize) -> bool {
        let plain = |setting: &AblationSetting| AblationSetting {
            study: "",
            name: String::new(),
            sequences: Some(setting.sequences.unwrap_or(all)),
            ..setting.clone()
        };
        plain(self) == plain(other)
    }
}

/// All settings for heads of `head_dim` channels and a corpus of so many sequences of `sequence` tokens.
pub fn settings(head_dim: usize, sequences: usize, sequence: usize) -> Vec<AblationSetting> {
    let mut all = Vec::new();
    let groups: Vec<Option<usize>> = [None, Some(64), Some(32)]
        .into_iter()
        .filter(|group| group.is_none_or(|group| group < head_dim && head_dim.is_multiple_of(group)))
        .collect();
    for group in groups {
        let suffix = group.map_or(String::new(), |group| format!(", groups of {group}"));
        for (name, composition, targets) in [
            ("U·H·P", Composition::RHPbr, RotationTargets::Published),
            ("without P", Composition::RH, RotationTargets::Published),
            ("without H", Composition::Br, RotationTargets::Published),
            ("without U", Composition::HPbr, RotationTargets::Published),
            ("no rotation", Composition::Plain, RotationTargets::None),
        ] {
            // A part is worth the same for every group size, but P is worth nothing without groups.
            if group.is_none() || matches!(composition, Composition::RHPbr | Composition::RH) {
                let setting = AblationSetting::published("rotation", format!("{name}{suffix}"));
                all.push(AblationSetting { composition, targets, group, ..setting });
            }
        }
    }
    let plain = AblationSetting::published("target", "KᵀK and VᵀV");
    all.push(AblationSetting { targets: RotationTargets::Plain, ..plain });
    for (sink, recent) in [(0, 0), (32, 128), (64, 256), (128, 512), (256, 1024)] {
        let setting = AblationSetting::published("windows", format!("sink {sink}, recent {recent}"));
        all.push(AblationSetting { windows: Windows { sink, recent }, ..setting });
    }
    let mut count = 1;
    while count <= sequences {
        let setting = AblationSetting::published("calibration", format!("{} tokens", count * sequence));
        all.push(AblationSetting { sequences: Some(count), ..setting });
        count *= 2;
    }
    for ratio in [0.88, 0.92, 0.96, 1.0] {
        for (side, rules) in
            [("keys", (Rule::Clip(ratio), PAPER_RULES.1)), ("values", (PAPER_RULES.0, Rule::Clip(ratio)))]
        {
            let setting = AblationSetting::published("clip", format!("{side} {ratio}"));
            all.push(AblationSetting { rules, ..setting });
        }
    }
    all
}

/// The study of our own codec.
pub const BANDS: &str = "bands";

/// Names and codecs of the study of our own codec, for heads of `head_dim` channels; none if they have no bands.
pub fn band_settings(head_dim: usize) -> &'static [(&'static str, &'static str)] {
    const ALL: [(&str, &str); 9] = [
        ("bands", "int2"),
        ("scales of least squared error", "int2:least-squares"),
        ("scalar codes", "int2:scalar"),
        ("published codes, centred", "int2:paper+centred"),
        ("bands, keys only", "int2:keys-only"),
        ("scalar codes, keys only", "int2:scalar+keys-only"),
        ("values only", "int2:values-only"),
        ("half of the directions (int1.5)", "int1.5"),
        ("no codes: bf16 in the new basis", "bf16:basis"),
    ];
    if BandLayout::int2(head_dim).is_ok() { &ALL } else { &[] }
}

/// The second moments of one head that rotations can be fitted to.
struct HeadTargets {
    queries: SquareMatrix,
    weighted_values: SquareMatrix,
    keys: SquareMatrix,
    values: SquareMatrix,
    key_mean: Vec<f32>,
}

/// Targets of all layers from some calibration text.
pub struct TargetSet {
    layers: Vec<Vec<HeadTargets>>,
    geometry: KvGeometry,
}

impl TargetSet {
    /// Runs the first `sequences` sequences of a corpus through a model. `progress` gets the number of layers done.
    pub fn collect<B: Inspect>(
        model: &LoadedModel<B>,
        corpus: &Corpus,
        sequences: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<TargetSet, EvalError> {
        let part = Corpus { sequences: corpus.sequences[..sequences].to_vec(), ..corpus.clone() };
        let ids: Vec<&[u32]> = part.sequences.iter().chain([&part.held_out]).map(Vec::as_slice).collect();
        let mut observer = Observer::new(model, &ids)?;
        let mut layers = Vec::new();
        for layer in 0..model.config().layers {
            let observed = observe_layer(&mut observer, layer, &part)?;
            let targets = observed.moments.iter().map(|head| HeadTargets {
                queries: head.queries.mean(),
                weighted_values: head.weighted_values.mean(),
                keys: head.keys.mean(),
                values: head.values.mean(),
                key_mean: head.key_mean(),
            });
            layers.push(targets.collect());
            progress(layer + 1);
        }
        Ok(TargetSet { layers, geometry: model.config().kv_geometry() })
    }

    /// The codec of a setting: one rotation per layer, as published, or centred where a model needs it.
    pub fn codec(&self, setting: &AblationSetting, centred: bool) -> Result<PageCodec, EvalError> {
        let head_dim = self.geometry.head_dim;
        let layout = CodeLayout::new(2, head_dim, head_dim / setting.group.unwrap_or(head_dim))?;
        let fitted: Vec<(SquareMatrix, SquareMatrix)> = self
            .layers
            .par_iter()
            .map(|heads| {
                let fit = |target: &dyn Fn(&HeadTargets) -> &SquareMatrix| {
                    let all: Vec<SquareMatrix> = heads.iter().map(|head| target(head).clone()).collect();
                    Ok::<_, EvalError>(rotation(&mean(&all), setting.composition)?.0)
                };
                match setting.targets {
                    RotationTargets::Published => {
                        Ok((fit(&|head| &head.queries)?, fit(&|head| &head.weighted_values)?))
                    }
                    RotationTargets::Plain => Ok((fit(&|head| &head.keys)?, fit(&|head| &head.values)?)),
                    RotationTargets::None => {
                        Ok((SquareMatrix::identity(head_dim), SquareMatrix::identity(head_dim)))
                    }
                }
            })
            .collect::<Result<_, EvalError>>()?;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (heads, (key, value)) in self.layers.iter().zip(&fitted) {
            for head in heads {
                let transform = if centred {
                    HeadTransform::new(Some(head.key_mean.clone()), key)?
                } else {
                    HeadTransform::published(key)?
                };
                keys.push(HeadEncoder::codes(transform, layout, setting.rules.0, true));
                let transform = HeadTransform::published(value)?;
                values.push(HeadEncoder::codes(transform, layout, setting.rules.1, true));
            }
        }
        let name = format!("{}: {}", setting.study, setting.name);
        Ok(PageCodec::new(name, self.geometry, keys, values)?)
    }

    /// Makes the same codec as [`Self::codec`] with the kernels of this machine.
    pub fn fast_codec(&self, setting: &AblationSetting, centred: bool) -> Result<FastCodec, EvalError> {
        Ok(FastCodec::new(Isa::detect(), self.codec(setting, centred)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_vary_one_thing_at_a_time() {
        let published = AblationSetting::published("", "");
        for setting in settings(128, 16, 2048) {
            let mut differences = 0;
            differences += usize::from(setting.composition != published.composition);
            differences += usize::from(setting.targets == RotationTargets::Plain);
            differences += usize::from(setting.windows != published.windows);
            differences += usize::from(setting.sequences.is_some());
            differences += usize::from(setting.rules != published.rules);
            assert!(differences <= 1, "{setting:?}");
        }
        let names: Vec<String> =
            settings(64, 16, 2048).iter().map(|s| format!("{} {}", s.study, s.name)).collect();
        assert!(names.iter().any(|name| name.contains("groups of 32")));
        assert!(!names.iter().any(|name| name.contains("groups of 64")), "that is the whole head");
        assert!(names.contains(&"calibration 32768 tokens".to_owned()));
        let published: Vec<AblationSetting> = settings(64, 16, 2048)
            .into_iter()
            .filter(|setting| setting.same_recipe(&AblationSetting::published("", ""), 16))
            .collect();
        assert_eq!(published.len(), 5, "it stands in every study but the target's, and twice in clip");
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
    }
}
