//! Bits where they matter: the widths of each layer's keys, chosen by what they do to the model's output.
//!
//! What attention of a layer loses says little about what the model loses: some layers move the output up to forty times as
//! much as others with the same error. So it is measured. A text is read with the keys of one layer in 2 bits and everything else
//! exact, for each layer in turn; and with the keys of all layers in each of the [widths](KeyWidths::MENU). The first says how
//! much a layer counts, the second how much other widths cost or save:
//!
//! ```text
//!   KL of a plan = sum over layers of  KL(this layer alone) · KL(all layers in its widths) / KL(all layers in 4/2/1/1)
//! ```
//!
//! The text ends with a copy of its beginning, because layers that find what was said long ago do not show in text that never
//! asks for it. Both parts count alike, each by how much it is of what 4/2/1/1 loses there. Of all plans that take no more bits
//! than 4/2/1/1 in every layer the best is taken, if it is better on another text too.

use std::collections::BTreeMap;
use std::sync::Arc;

use oscar_codec::{CacheCodec, CodecError, HeadIndex, KeyWidths, Side, Windows};
use oscar_kernels::Inspect;
use oscar_kernels::cpu::encode::FastCodec;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::LoadedModel;
use oscar_rotations::codec::int2_codec;
use oscar_rotations::{Int2Encoder, Int2Options, RotationFile};

use super::EvalError;
use super::divergence::CodecComparison;
use super::history::Reading;

/// Most tokens of a text before the copy.
const TEXT_TOKENS: usize = 2048;

/// How many times longer a text is than the copy at its end.
const COPY_RATIO: usize = 4;

/// Fewer tokens than this behind the windows say nothing.
const LEAST_HISTORY: usize = 128;

/// Mean KL divergence on a text, and on the copy at its end.
pub type Divergences = [f64; 2];

/// What was chosen, and what it is worth.
#[derive(Clone, Debug, PartialEq)]
pub struct BitAllocation {
    /// The widths of layers whose keys are sealed; empty if the default in every layer is best.
    pub widths: BTreeMap<usize, KeyWidths>,
    /// Divergence on a text that the choice was not made on, with the default widths in every layer.
    pub default: Divergences,
    /// The same with these widths.
    pub chosen: Divergences,
}

/// Chooses widths on the text `choosing` and compares them with the default on the text `checking`, both of which should be
/// like what the model is used for. `None` where there is nothing to choose: rotations without bands, heads whose size has
/// the default widths alone, texts too short to have a history behind the windows. Key channels of the file are in the order of
/// the model's own file. `progress` gets the number of runs that are done and of those to do.
pub fn allocate_bits<B: Inspect>(
    model: &Arc<LoadedModel<B>>,
    rotations: &RotationFile,
    [choosing, checking]: [&[u32]; 2],
    windows: Windows,
    mut progress: impl FnMut(usize, usize),
) -> Result<Option<BitAllocation>, EvalError> {
    let menu: Vec<KeyWidths> = KeyWidths::menu(model.config().head_dim).collect();
    let layers = sealed_layers(model);
    let [choosing, checking] =
        [choosing, checking].map(|text| Text::new(text, windows.sink, model.config().max_context));
    let exact = windows.sink.saturating_add(windows.recent);
    let has_bands = Int2Options::default().encoder_for(rotations) == Int2Encoder::Band;
    let is_short = |text: &Text| text.copy < exact.saturating_add(LEAST_HISTORY);
    if !has_bands || menu.len() < 2 || layers.len() < 2 || is_short(&choosing) || is_short(&checking) {
        return Ok(None);
    }
    let runs = menu.len() + layers.len() + 2;
    let mut measured = 0;
    let mut done = || {
        measured += 1;
        progress(measured, runs);
    };

    let mut measure = TextRuns::new(model, &choosing, windows)?;
    let mut of_all = Vec::new();
    for &widths in &menu {
        let codec = codec(model, rotations, Some(widths))?;
        of_all.push(measure.divergences(&KeysAlone { codec, layer: None })?);
        done();
    }
    let mut of_layers = Vec::new();
    let mut keys = KeysAlone { codec: codec(model, rotations, Some(KeyWidths::default()))?, layer: None };
    for &layer in &layers {
        keys.layer = Some(layer);
        of_layers.push(measure.divergences(&keys)?);
        done();
    }
    let plan: BTreeMap<usize, KeyWidths> =
        layers.into_iter().zip(least_divergence(&menu, &of_all, &of_layers)).collect();

    let mut measure = TextRuns::new(model, &checking, windows)?;
    let default = measure.divergences(&codec(model, rotations, Some(KeyWidths::default()))?)?;
    done();
    let planned = RotationFile { widths: plan.clone(), ..rotations.clone() };
    let chosen = measure.divergences(&codec(model, &planned, None)?)?;
    done();
    Ok(Some(match relative(chosen, default) < relative(default, default) {
        true => BitAllocation { widths: plan, default, chosen },
        false => BitAllocation { widths: BTreeMap::new(), default, chosen: default },
    }))
}

/// The layers whose keys are sealed: those without a sliding window, in their order.
fn sealed_layers<B: Inspect>(model: &LoadedModel<B>) -> Vec<usize> {
    let sliding = model.config().sliding_layers();
    (0..model.config().layers).filter(|layer| !sliding.contains(layer)).collect()
}

/// The codec of a file with given widths in every layer, or with its own.
fn codec<B: Inspect>(
    model: &LoadedModel<B>,
    rotations: &RotationFile,
    widths: Option<KeyWidths>,
) -> Result<FastCodec, EvalError> {
    let options = Int2Options { encoder: Int2Encoder::Band, widths, ..Int2Options::of(model) };
    let codec = int2_codec("int2", rotations, model.config().kv_geometry(), &options)?;
    Ok(FastCodec::new(Isa::detect(), codec))
}

/// A text that ends with a copy of what follows its sink.
struct Text {
    ids: Vec<u32>,
    /// The position of the first token of the copy, which is also the length of the text before it.
    copy: usize,
}

impl Text {
    /// Takes as much of `text` as is read and puts the copy behind it, `most` tokens in all at most.
    fn new(text: &[u32], sink: usize, most: usize) -> Text {
        let own = &text[..text.len().min(TEXT_TOKENS).min(most * COPY_RATIO / (COPY_RATIO + 1))];
        let copy = own.iter().skip(sink).take(own.len() / COPY_RATIO);
        Text { ids: own.iter().chain(copy).copied().collect(), copy: own.len() }
    }
}

/// Runs of one text with a codec, compared with an exact one.
struct TextRuns<B: Inspect> {
    comparison: CodecComparison<B>,
    windows: Windows,
    /// Positions after the prefix that come before the copy.
    before_copy: usize,
}

impl<B: Inspect> TextRuns<B> {
    fn new(model: &Arc<LoadedModel<B>>, text: &Text, windows: Windows) -> Result<TextRuns<B>, EvalError> {
        let prefix = windows.sink + windows.recent;
        let mut comparison = CodecComparison::new(model.clone(), text.ids.len())?;
        comparison.set_text(&text.ids, prefix, 0, |_| ())?;
        Ok(TextRuns { comparison, windows, before_copy: text.copy - prefix })
    }

    fn divergences(&mut self, codec: &dyn CacheCodec) -> Result<Divergences, EvalError> {
        let reading = Reading { codec, windows: self.windows, chunk: None };
        let parts = self.comparison.measure_parts(reading, self.before_copy, |_| ())?;
        Ok(parts.map(|part| part.mean_kl()))
    }
}

/// The keys of one layer or of all; everything else stays exact.
struct KeysAlone {
    codec: FastCodec,
    layer: Option<usize>,
}

impl CacheCodec for KeysAlone {
    fn name(&self) -> &str {
        self.codec.name()
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        match side == Side::Key && self.layer.is_none_or(|layer| layer == head.layer) {
            true => self.codec.round_trip(head, side, first, rows),
            false => Ok(()),
        }
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}

/// The sum of both divergences, each as a share of the same one in `of`.
fn relative(divergences: Divergences, of: Divergences) -> f64 {
    divergences.iter().zip(of).map(|(one, of)| one / of.max(f64::MIN_POSITIVE)).sum()
}

/// The widths of each layer with the least divergence in all, taking no more bits than the default would.
///
/// `of_all` is the divergence with all layers in the widths of each entry of the menu, `of_layers` that of each layer alone in
/// the default. The best for the first layers with so many bits is the best of all ways to end with one more layer, so all
/// plans are compared in steps of the layers.
fn least_divergence(menu: &[KeyWidths], of_all: &[Divergences], of_layers: &[Divergences]) -> Vec<KeyWidths> {
    let default = KeyWidths::default();
    let of_default = menu.iter().zip(of_all).find(|(widths, _)| **widths == default);
    let of_default = of_default.map_or([1.0; 2], |(_, divergences)| *divergences);
    let cost = |of_layer: &Divergences, of_widths: &Divergences| {
        let shares = [0, 1].map(|part| of_widths[part] / of_default[part].max(f64::MIN_POSITIVE));
        relative([0, 1].map(|part| of_layer[part] * shares[part]), of_default)
    };
    let most = default.sum() as usize * of_layers.len();
    // By bits in all: the least cost, and the menu entries of the layers so far.
    let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; most + 1];
    best[0] = Some((0.0, Vec::new()));
    for of_layer in of_layers {
        let mut next: Vec<Option<(f64, Vec<usize>)>> = vec![None; most + 1];
        for (bits, plan) in best.iter().enumerate() {
            let Some((sum, chosen)) = plan else { continue };
            for (entry, (widths, of_widths)) in menu.iter().zip(of_all).enumerate() {
                let sum = sum + cost(of_layer, of_widths);
                if let Some(place) = next.get_mut(bits + widths.sum() as usize)
                    && place.as_ref().is_none_or(|(least, _)| sum < *least)
                {
                    *place = Some((sum, [chosen.as_slice(), &[entry]].concat()));
                }
            }
        }
        best = next;
    }
    let best = best.into_iter().flatten().min_by(|one, other| one.0.total_cmp(&other.0));
    let (_, chosen) = best.expect("the default in every layer is a plan");
    chosen.into_iter().map(|entry| menu[entry]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Invented divergences of the menu that fall with the bits, more steeply where the text copies itself.
    const OF_ALL: [Divergences; 6] =
        [[0.12, 0.9], [0.034, 0.3], [0.0167, 0.05], [0.0145, 0.06], [0.0054, 0.02], [0.0027, 0.01]];

    #[test]
    fn no_plan_of_the_same_bits_is_better() {
        let menu = KeyWidths::MENU;
        let of_layers = [[0.001, 0.002], [0.03, 0.01], [0.0002, 0.0001], [0.004, 0.03]];
        let bits = |plan: &[KeyWidths]| plan.iter().map(|widths| widths.sum()).sum::<u32>();
        let cost = |plan: &[KeyWidths]| -> f64 {
            let of = |(widths, [text, copy]): (&KeyWidths, &Divergences)| {
                let of_widths = OF_ALL[menu.iter().position(|other| other == widths).unwrap()];
                text * of_widths[0] / 0.0167 / 0.0167 + copy * of_widths[1] / 0.05 / 0.05
            };
            plan.iter().zip(&of_layers).map(of).sum()
        };
        let plan = least_divergence(&menu, &OF_ALL, &of_layers);
        assert!(bits(&plan) <= 32);
        assert!(plan[1].sum() > 8 && plan[2].sum() < 8, "{plan:?}");
        let entry = |index: usize, layer: u32| menu[index / menu.len().pow(layer) % menu.len()];
        for index in 0..menu.len().pow(4) {
            let other: Vec<KeyWidths> = (0..4).map(|layer| entry(index, layer)).collect();
            assert!(bits(&other) > 32 || cost(&plan) <= cost(&other) * (1.0 + 1e-12), "{other:?}");
        }
    }

    #[test]
    fn layers_that_count_alike_have_the_better_of_what_takes_as_many_bits() {
        let plan = |of_widths: f64| {
            let of_all = [1.0, 0.9, 0.4, of_widths, 0.3, 0.3].map(|of| [of, of]);
            least_divergence(&KeyWidths::MENU, &of_all, &[[0.1, 0.1]; 5])
        };
        assert!(plan(0.39).iter().all(|widths| widths.to_string() == "4/2/2/0"));
        assert!(plan(0.41).iter().all(|widths| *widths == KeyWidths::default()));
    }

    #[test]
    fn texts_end_with_a_copy_of_their_beginning() {
        let text: Vec<u32> = (0..5000).collect();
        let Text { ids, copy } = Text::new(&text, 64, 8192);
        assert_eq!((ids.len(), copy), (2560, 2048));
        assert_eq!((ids[2047], ids[2048], ids[2559]), (2047, 64, 575));
        let Text { ids, copy } = Text::new(&text, 64, 300);
        assert_eq!((ids.len(), copy), (300, 240));
        assert!(Text::new(&[], 64, 300).ids.is_empty());
    }
}
