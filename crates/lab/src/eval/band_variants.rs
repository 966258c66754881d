//! Variants of the banded codec that no cache stores, for measuring what its parts are worth.

use oscar_codec::band::{half_range, scale, scale_code};
use oscar_codec::{
    BandLayout, Bf16Layout, CacheCodec, CodecError, HeadEncoder, HeadIndex, KvGeometry, PageCodec,
    RowEncoder, Side, page_parts,
};

/// Rows as the windows of a cache hold them: transformed as for `codec`, rounded to bf16, and nothing else.
pub(super) fn windows_of(name: &str, codec: &PageCodec) -> Result<PageCodec, CodecError> {
    let geometry = codec.geometry();
    let rows = RowEncoder::Bf16(Bf16Layout::new(geometry.head_dim));
    let encoders = |side| -> Result<Vec<HeadEncoder>, CodecError> {
        let transform =
            |head| Ok(HeadEncoder { rows, page_means: None, ..codec.encoder(head, side)?.clone() });
        heads(geometry).map(transform).collect()
    };
    PageCodec::new(name, geometry, encoders(Side::Key)?, encoders(Side::Value)?)
}

fn heads(geometry: KvGeometry) -> impl Iterator<Item = HeadIndex> {
    (0..geometry.layers)
        .flat_map(move |layer| (0..geometry.kv_heads).map(move |head| HeadIndex { layer, head }))
}

/// Banded keys whose scales have the least squared error instead of no bias.
pub(super) struct LeastSquaresBands {
    codec: PageCodec,
    bands: BandLayout,
}

impl LeastSquaresBands {
    /// The variant of a banded codec.
    pub(super) fn new(codec: PageCodec, bands: BandLayout) -> LeastSquaresBands {
        LeastSquaresBands { codec, bands }
    }

    /// Shortens every band of the decoded row `stored` to where it is nearest to the row `wanted`.
    fn shorten(&self, wanted: &[f32], stored: &mut [f32]) {
        for band in self.bands.bands() {
            let (wanted, stored) = (&wanted[band.range()], &mut stored[band.range()]);
            let along: f32 = wanted.iter().zip(&*stored).map(|(a, b)| a * b).sum();
            let squares: f32 = stored.iter().map(|value| value * value).sum();
            if squares > 0.0 {
                stored.iter_mut().for_each(|value| *value *= along / squares);
            }
        }
    }
}

impl CacheCodec for LeastSquaresBands {
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
        if side == Side::Value {
            return self.codec.round_trip(head, side, first, rows);
        }
        let dim = self.codec.geometry().head_dim;
        let (transform, layout) = (self.codec.transform(head, side)?, self.codec.layout(head.layer));
        let mut page = vec![0; self.codec.head_bytes(head.layer)];
        let (mut wanted, mut stored) = (vec![0.0; dim], vec![0.0; dim]);
        for (number, tokens) in page_parts(first, rows.len() / dim) {
            let rows = &mut rows[tokens.start * dim..tokens.end * dim];
            let mean = self.codec.stored_page_mean(head, side, number)?.unwrap_or_else(|| vec![0.0; dim]);
            self.codec.encode_rows(head, side, number, rows, &mut page)?;
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                transform.apply(row, &mut wanted);
                wanted.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
                layout.decode_token(&page, side, token, &mut stored)?;
                self.shorten(&wanted, &mut stored);
                stored.iter_mut().zip(&mean).for_each(|(x, mean)| *x += mean);
                transform.undo(&stored, row);
            }
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}

/// Keys in the bands of `high` with codes of any bits, and its values: what a page would hold, without the page.
pub(super) struct BandsOfBits {
    codec: PageCodec,
    bands: BandLayout,
    /// The bits that a code of each band has.
    bits: Vec<u32>,
}

impl BandsOfBits {
    pub(super) fn new(codec: PageCodec, bands: BandLayout, bits: Vec<u32>) -> BandsOfBits {
        BandsOfBits { codec, bands, bits }
    }

    /// The band as a reader would get it: levels at equal steps, chosen and scaled as in [`oscar_codec::band`].
    fn round_band(band: &mut [f32], bits: u32) {
        let squares: f32 = band.iter().map(|x| x * x).sum();
        let deviation = (squares / band.len() as f32).sqrt();
        if squares <= 0.0 {
            return;
        }
        let (levels, half) = ((1_u32 << bits) as f32, half_range(bits));
        let mut best = (f32::NEG_INFINITY, 0.0, Vec::new());
        for step in [0.7, 0.85, 1.0, 1.15, 1.35].map(|part| part * GAUSSIAN_STEPS[bits as usize - 1]) {
            let level =
                |x: f32| (x / (step * deviation) + 0.5 * levels).floor().clamp(0.0, levels - 1.0) - half;
            let tried: Vec<f32> = band.iter().map(|&x| level(x)).collect();
            let along: f32 = band.iter().zip(&tried).map(|(x, level)| x * level).sum();
            let fit = along * along / tried.iter().map(|level| level * level).sum::<f32>();
            if fit > best.0 {
                best = (fit, along, tried);
            }
        }
        let scale = scale(scale_code(squares / best.1));
        band.iter_mut().zip(best.2).for_each(|(x, level)| *x = level * scale);
    }
}

/// The best steps for a Gaussian with codes of 1 to 8 bits, in standard deviations.
const GAUSSIAN_STEPS: [f32; 8] = [1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308];

impl CacheCodec for BandsOfBits {
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
        if side == Side::Value {
            return self.codec.round_trip(head, side, first, rows);
        }
        let (dim, transform) = (self.codec.geometry().head_dim, self.codec.transform(head, side)?);
        let mut stored = vec![0.0; dim];
        for (number, tokens) in page_parts(first, rows.len() / dim) {
            let mean = self.codec.stored_page_mean(head, side, number)?.unwrap_or_else(|| vec![0.0; dim]);
            for row in rows[tokens.start * dim..tokens.end * dim].chunks_exact_mut(dim) {
                transform.apply(row, &mut stored);
                stored.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
                for (band, &bits) in self.bands.bands().iter().zip(&self.bits) {
                    BandsOfBits::round_band(&mut stored[band.range()], bits);
                }
                stored.iter_mut().zip(&mean).for_each(|(x, mean)| *x += mean);
                transform.undo(&stored, row);
            }
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        let of = |bits: &dyn Fn(usize) -> u32| -> f64 {
            let codes =
                self.bands.bands().iter().enumerate().map(|(index, band)| band.channels as u32 * bits(index));
            f64::from(codes.sum::<u32>()) / 8.0
        };
        self.codec.token_bytes(head_dim) + of(&|index| self.bits[index]) - of(&|_| 4)
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::{BandRows, HeadTransform, Rule, SquareMatrix};

    use super::*;

    const DIM: usize = 64;
    const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

    fn banded() -> (PageCodec, BandLayout) {
        let bands = BandLayout::int2(DIM).unwrap();
        // Bands of very different length, as real ones have.
        let matrix =
            SquareMatrix::from_fn(DIM, |i, j| f64::from(u8::from(i == j)) * 10f64.powi(j as i32 / 16));
        let transform = HeadTransform::general(Some(vec![0.25; DIM]), &matrix).unwrap();
        let rows = RowEncoder::Banded(BandRows { layout: bands, value_rule: Rule::Search });
        let encoder = HeadEncoder { transform, rows, page_means: None };
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: DIM };
        (PageCodec::new("int2", geometry, vec![encoder.clone()], vec![encoder]).unwrap(), bands)
    }

    fn rows() -> Vec<f32> {
        (0..100 * DIM).map(|i| ((i * 7919 + i / DIM * 31) % 1009) as f32 / 500.0 - 1.0).collect()
    }

    fn error(codec: &dyn CacheCodec, side: Side) -> f32 {
        let (wanted, mut rows) = (rows(), rows());
        codec.round_trip(HEAD, side, 0, &mut rows).unwrap();
        wanted.iter().zip(&rows).map(|(a, b)| (a - b).powi(2)).sum()
    }

    #[test]
    fn windows_round_to_bf16_alone() {
        let codec = windows_of("bf16:basis", &banded().0).unwrap();
        let (wanted, mut got) = (rows(), rows());
        codec.round_trip(HEAD, Side::Key, 0, &mut got).unwrap();
        assert_ne!(wanted, got);
        assert!(wanted.iter().zip(&got).all(|(a, b)| (a - b).abs() <= (a - 0.25).abs() / 250.0 + 1e-6));
        assert_eq!(codec.bits_per_element(DIM), 16.0);
    }

    #[test]
    fn bits_are_those_of_the_pages_where_there_are_pages() {
        let high = banded().0.high().unwrap();
        let bands = BandLayout::high(DIM).unwrap();
        let of = |bits: [u32; 4]| BandsOfBits::new(high.clone(), bands, bits.to_vec());
        // Other steps are tried, so codes differ a little.
        let (stored, computed) = (error(&high, Side::Key), error(&of([4; 4]), Side::Key));
        assert!((stored / computed - 1.0).abs() < 0.1, "{stored} {computed}");
        assert_eq!(of([4; 4]).token_bytes(DIM), high.token_bytes(DIM));
        assert_eq!(of([8, 4, 2, 2]).bits_per_element(DIM), 4.5);
        // With 8 bits the rounding of the scale is most of what is left.
        assert!(error(&of([8; 4]), Side::Key) < computed / 20.0);
        assert!(error(&of([2; 4]), Side::Key) > computed);
    }

    #[test]
    fn least_squares_are_nearer_and_values_stay() {
        let (codec, bands) = banded();
        let variant = LeastSquaresBands::new(codec.clone(), bands);
        assert!(error(&variant, Side::Key) < error(&codec, Side::Key));
        assert_eq!(error(&variant, Side::Value), error(&codec, Side::Value));
    }
}
