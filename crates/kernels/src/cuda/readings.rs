//! Which kernels read the history of which layers.
//!
//! A kernel of attention reads one format of sealed pages beside bf16. A codec may keep single layers in bf16, and some
//! sequences may have sealed pages of a second codec, so a step has a plan for each tier of sequences and each format of
//! theirs: a [`Reading`]. Most caches have one. Formats that several readings share have one kernel.

use oscar_codec::{KvGeometry, PageCodec, PageLayout};

/// Sequences whose sealed pages are of the cache's own codec, and those that have none.
pub(super) const OWN: usize = 0;
/// Sequences whose sealed pages are of [`SealedSpec::high`](crate::backend::SealedSpec::high).
pub(super) const HIGH: usize = 1;

/// What a launch of attention reads: history of one format of the sequences of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// Which codec sealed the pages: [`OWN`] or [`HIGH`].
    pub(super) tier: usize,
    /// Which of the formats.
    pub(super) format: usize,
}

/// All readings of a cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Readings {
    /// Formats of history, each once.
    pub(super) formats: Vec<PageLayout>,
    /// Those of [`OWN`] come first.
    pub(super) all: Vec<Reading>,
    /// `[tier][layer]`: which of `all`.
    layers: Vec<Vec<usize>>,
}

impl Readings {
    /// The readings of a cache with these codecs, that of [`OWN`] first; without any, all pages are bf16.
    pub(super) fn new(geometry: KvGeometry, codecs: &[&PageCodec]) -> Readings {
        let mut readings = Readings { formats: Vec::new(), all: Vec::new(), layers: Vec::new() };
        for tier in 0..codecs.len().max(1) {
            // Layers without history are read by a kernel for windows; their entry is not looked at.
            let history = |layer: usize| match codecs.get(tier) {
                Some(codec) => codec.has_history(layer).then(|| codec.layout(layer)),
                None => Some(geometry.bf16()),
            };
            let first = (0..geometry.layers).find_map(history).unwrap_or(geometry.bf16());
            let layers = (0..geometry.layers).map(|layer| history(layer).unwrap_or(first));
            let layers = layers.map(|layout| readings.place(tier, layout)).collect();
            readings.layers.push(layers);
        }
        readings
    }

    /// The place of a reading, which is added if it is not there.
    fn place(&mut self, tier: usize, layout: PageLayout) -> usize {
        let format = position_or_push(&mut self.formats, layout);
        position_or_push(&mut self.all, Reading { tier, format })
    }

    /// The readings of a layer, by tier.
    pub(super) fn of_layer(&self, layer: usize) -> impl Iterator<Item = usize> {
        self.layers.iter().map(move |layers| layers[layer])
    }
}

/// Where a vector has something, at its end if it was not there.
fn position_or_push<T: PartialEq>(all: &mut Vec<T>, one: T) -> usize {
    let found = all.iter().position(|other| *other == one);
    found.unwrap_or_else(|| {
        all.push(one);
        all.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use oscar_codec::{BandLayout, BandRows, HeadEncoder, HeadTransform, RowEncoder, Rule};

    use super::*;

    const GEOMETRY: KvGeometry = KvGeometry { layers: 4, kv_heads: 1, head_dim: 64 };

    fn bands() -> PageCodec {
        let layout = BandLayout::int2(64).unwrap();
        let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search });
        let encoders =
            vec![HeadEncoder { transform: HeadTransform::identity(64), rows, page_means: None }; 4];
        PageCodec::new("bands", GEOMETRY, encoders.clone(), encoders).unwrap()
    }

    fn of_layers(readings: &Readings) -> Vec<Vec<usize>> {
        (0..GEOMETRY.layers).map(|layer| readings.of_layer(layer).collect()).collect()
    }

    #[test]
    fn most_caches_have_one_reading() {
        let codec = bands();
        for codecs in [vec![], vec![&codec]] {
            let readings = Readings::new(GEOMETRY, &codecs);
            assert_eq!(readings.all, [Reading { tier: OWN, format: 0 }]);
            assert_eq!(of_layers(&readings), vec![vec![0]; 4]);
            let expected = if codecs.is_empty() { PageLayout::bf16(64) } else { codec.layout(0) };
            assert_eq!(readings.formats, [expected]);
        }
        // Layers without history are no format of their own.
        let sliding = bands().without_history(&[0, 2]).unwrap();
        let readings = Readings::new(GEOMETRY, &[&sliding]);
        assert_eq!((readings.formats, readings.all.len()), (vec![sliding.layout(1)], 1));
        let nothing = bands().without_history(&[0, 1, 2, 3]).unwrap();
        assert_eq!(Readings::new(GEOMETRY, &[&nothing]).formats, [PageLayout::bf16(64)]);
    }

    #[test]
    fn a_tier_has_readings_of_its_own_and_shares_kernels() {
        let codec = bands().keep_bf16(&[1]).unwrap();
        let high = codec.high().unwrap();
        let readings = Readings::new(GEOMETRY, &[&codec, &high]);
        assert_eq!(readings.formats, [codec.layout(0), PageLayout::bf16(64), high.layout(0)]);
        let reading = |tier, format| Reading { tier, format };
        assert_eq!(readings.all, [reading(OWN, 0), reading(OWN, 1), reading(HIGH, 2), reading(HIGH, 1)]);
        assert_eq!(of_layers(&readings), [[0, 2], [1, 3], [0, 2], [0, 2]]);
    }
}
