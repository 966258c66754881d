//! Sealed pages with what they say as plain rows, and attention over those in f64.

use half::bf16;
use oscar_codec::{BandLayout, Bf16Layout, CodeLayout, Fp8Layout, PAGE_TOKENS, ScaleType, Side};
use oscar_random::Random;

use super::super::*;
use crate::cpu::attention::write_token;

/// Relative to the largest value a row sees.
pub(super) const TOLERANCE: f64 = 8e-4;

/// A sequence of one KV head: sealed pages, and what they say as plain rows.
pub(super) struct Sealed {
    pub(super) layout: PageLayout,
    pub(super) d: usize,
    pub(super) pages: Vec<Vec<u8>>,
    /// What the stored keys of each page are less of; empty if that is nothing.
    pub(super) means: Vec<Vec<u16>>,
    pub(super) keys: Vec<f64>,
    pub(super) values: Vec<f64>,
}

/// Scale and offset of a token's group.
pub(super) type Grid<'a> = &'a mut dyn FnMut(Side, usize, usize) -> (f32, f32);

impl Sealed {
    pub(super) fn codes(
        layout: CodeLayout,
        scale_type: ScaleType,
        pages: usize,
        random: &mut Random,
        grid: Grid<'_>,
    ) -> Sealed {
        let codes = f32::from(layout.largest_code()) + 1.0;
        Sealed::with_codes(
            layout,
            scale_type,
            pages,
            &mut || ((random.signed() + 1.0) * 0.5 * codes) as u8,
            grid,
        )
    }

    /// The codes that `next` gives.
    pub(super) fn with_codes(
        layout: CodeLayout,
        scale_type: ScaleType,
        pages: usize,
        next: &mut dyn FnMut() -> u8,
        grid: Grid<'_>,
    ) -> Sealed {
        let (d, groups) = (layout.head_dim(), layout.groups());
        let mut sealed = Sealed::empty(PageLayout::Codes(layout.with_scales(scale_type)), d, pages);
        for position in 0..pages * PAGE_TOKENS {
            for side in [Side::Key, Side::Value] {
                let codes: Vec<u8> = (0..d).map(|_| next()).collect();
                let scales: Vec<(u16, u16)> = (0..groups)
                    .map(|group| grid(side, position, group))
                    .map(|(scale, offset)| (scale_type.to_bits(scale), scale_type.to_bits(offset)))
                    .collect();
                let page = &mut sealed.pages[position / PAGE_TOKENS];
                layout.write_token(page, side, position % PAGE_TOKENS, &codes, &scales).unwrap();
                let numbers = codes.iter().enumerate().map(|(channel, code)| {
                    let (scale, offset) = scales[channel / (d / groups)];
                    f64::from(*code) * f64::from(scale_type.to_f32(scale))
                        - f64::from(scale_type.to_f32(offset))
                });
                sealed.side(side).extend(numbers);
            }
        }
        sealed
    }

    /// Codes with grids as real rows have them.
    pub(super) fn usual(
        layout: CodeLayout,
        scale_type: ScaleType,
        pages: usize,
        random: &mut Random,
    ) -> Sealed {
        let (mut noise, half) = (Random::new(random.next_u64()), f32::from(layout.largest_code()) / 2.0);
        Sealed::codes(layout, scale_type, pages, random, &mut |side, _, _| {
            let size = if side == Side::Key { 3.0 } else { 1.0 };
            let scale = size * (1.2 + noise.signed()) / half;
            (scale, scale * half + 0.2 * size * noise.signed())
        })
    }

    /// Random codes in all bands, scales that differ by orders of magnitude, and some that are zero.
    pub(super) fn banded(layout: BandLayout, pages: usize, random: &mut Random) -> Sealed {
        let d = layout.head_dim();
        let mut sealed = Sealed::empty(PageLayout::Banded(layout), d, pages);
        let f16 = |value: f32| ScaleType::F16.to_bits(value);
        for position in 0..pages * PAGE_TOKENS {
            let (page, token) = (&mut sealed.pages[position / PAGE_TOKENS], position % PAGE_TOKENS);
            let mut codes = |most: usize| (0..d).map(|_| random.below(most) as u8).collect::<Vec<u8>>();
            let levels = 1 << layout.value_bits();
            let (key, value) = (codes(16), codes(levels));
            let half = (levels - 1) as f32 / 2.0;
            let scale = |band: usize, random: &mut Random| match random.below(40) {
                0 => 0,
                _ => (128 - 16 * band + random.below(40)) as u8,
            };
            let scales: Vec<u8> = (0..layout.bands().len()).map(|band| scale(band, random)).collect();
            let size = (1.2 + random.signed()) * 1.5 / half;
            layout.write_key(page, token, &key, &scales).unwrap();
            layout
                .write_value(page, token, &value, (f16(size), f16(half * size + 0.2 * random.signed())))
                .unwrap();
            for side in [Side::Key, Side::Value] {
                let mut decoded = vec![0.0; d];
                let page = &sealed.pages[position / PAGE_TOKENS];
                layout.decode_token(page, side, token, &mut decoded).unwrap();
                sealed.side(side).extend(decoded.into_iter().map(f64::from));
            }
        }
        sealed
    }

    /// The same keys and values with a mean for each page, which is as large as its keys.
    pub(super) fn with_means(mut self, random: &mut Random) -> Sealed {
        let d = self.d;
        for keys in self.keys.chunks_exact_mut(PAGE_TOKENS * d) {
            let mean: Vec<bf16> = random.signed_vec(d).iter().map(|x| bf16::from_f32(3.0 * x)).collect();
            for key in keys.chunks_exact_mut(d) {
                key.iter_mut().zip(&mean).for_each(|(x, mean)| *x += mean.to_f64());
            }
            self.means.push(mean.into_iter().map(bf16::to_bits).collect());
        }
        self
    }

    pub(super) fn fp8(d: usize, pages: usize, random: &mut Random) -> Sealed {
        let layout = Fp8Layout::new(d).unwrap();
        let mut sealed = Sealed::empty(PageLayout::Fp8(layout), d, pages);
        for position in 0..pages * PAGE_TOKENS {
            for side in [Side::Key, Side::Value] {
                let size = 3.0 * (1.2 + random.signed());
                let row: Vec<f32> = random.signed_vec(d).iter().map(|x| x * x * x * size).collect();
                let (page, token) = (&mut sealed.pages[position / PAGE_TOKENS], position % PAGE_TOKENS);
                layout.write_token(page, side, token, &row).unwrap();
                let mut decoded = vec![0.0; d];
                layout.decode_token(page, side, token, &mut decoded).unwrap();
                sealed.side(side).extend(decoded.into_iter().map(f64::from));
            }
        }
        sealed
    }

    pub(super) fn bf16(d: usize, pages: usize, random: &mut Random) -> Sealed {
        let mut sealed = Sealed::empty(PageLayout::bf16(d), d, pages);
        for page in 0..pages {
            let mut elements = vec![0u16; Bf16Layout::new(d).elements()];
            for token in 0..PAGE_TOKENS {
                let mut rows = [random.signed_vec(d), random.signed_vec(d)];
                rows.iter_mut().flatten().for_each(|x| *x = bf16::from_f32(*x).to_f32());
                write_token(&mut elements, d, token, &rows[0], &rows[1]);
                sealed.keys.extend(rows[0].iter().copied().map(f64::from));
                sealed.values.extend(rows[1].iter().copied().map(f64::from));
            }
            sealed.pages[page].copy_from_slice(bytemuck::cast_slice(&elements));
        }
        sealed
    }

    pub(super) fn empty(layout: PageLayout, d: usize, pages: usize) -> Sealed {
        let pages = vec![vec![0; layout.page_bytes()]; pages];
        Sealed { layout, d, pages, means: Vec::new(), keys: Vec::new(), values: Vec::new() }
    }

    pub(super) fn side(&mut self, side: Side) -> &mut Vec<f64> {
        match side {
            Side::Key => &mut self.keys,
            Side::Value => &mut self.values,
        }
    }

    pub(super) fn tokens(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// Softmax attention in `f64`, straight from the definition, and the largest value seen.
    pub(super) fn exact(&self, q: &[f32], scale: f32, span: Span) -> (Vec<f64>, f64) {
        let d = self.d;
        let seen = span.from..span.to.max(span.from);
        let row = |t: usize| t * d..(t + 1) * d;
        let logit = |t: usize| -> f64 {
            let dot: f64 = q.iter().zip(&self.keys[row(t)]).map(|(q, k)| f64::from(*q) * k).sum();
            dot * f64::from(scale)
        };
        let logits: Vec<f64> = seen.clone().map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let (mut out, mut largest) = (vec![0.0; d], 0.0_f64);
        for (t, weight) in seen.zip(&weights) {
            for (out, value) in out.iter_mut().zip(&self.values[row(t)]) {
                *out += weight / sum * value;
                largest = largest.max(value.abs());
            }
        }
        (out, largest)
    }

    /// All rows, with the pages cut into ranges that are merged.
    pub(super) fn attend(
        &self,
        isa: Isa,
        q: &[f32],
        scale: f32,
        spans: &[Span],
        ranges: &[usize],
    ) -> Vec<f32> {
        self.attend_with(&mut AttentionScratch::default(), isa, q, scale, spans, ranges)
    }

    /// [`Self::attend`] with buffers that others may have used.
    pub(super) fn attend_with(
        &self,
        scratch: &mut AttentionScratch,
        isa: Isa,
        q: &[f32],
        scale: f32,
        spans: &[Span],
        ranges: &[usize],
    ) -> Vec<f32> {
        let bytes: Vec<&[u8]> = self.pages.iter().map(Vec::as_slice).collect();
        let means: Vec<&[u16]> = self.means.iter().map(Vec::as_slice).collect();
        let (mut parts, mut first) = (Vec::new(), 0);
        for &end in ranges.iter().chain([&bytes.len()]) {
            let mut state = SoftmaxState::default();
            state.reset(spans.len(), self.d);
            let means = means.get(first..end).unwrap_or_default();
            let pages = SealedPages { layout: &self.layout, first, bytes: &bytes[first..end], means };
            attend_sealed(isa, pages, q, scale, spans, scratch, &mut state);
            parts.push(state);
            first = end;
        }
        finish(&parts.iter().collect::<Vec<_>>())
    }

    /// Compares all rows with the definition and returns the largest error relative to the largest value.
    pub(super) fn check(
        &self,
        isa: Isa,
        q: &[f32],
        scale: f32,
        spans: &[Span],
        ranges: &[usize],
        tolerance: f64,
    ) -> f64 {
        let d = self.d;
        let out = self.attend(isa, q, scale, spans, ranges);
        let mut worst = 0.0_f64;
        for (row, &span) in spans.iter().enumerate() {
            let (exact, size) = self.exact(&q[row * d..][..d], scale, span);
            for c in 0..d {
                let got = f64::from(out[row * d + c]);
                let error = (got - exact[c]).abs();
                assert!(
                    error <= tolerance * size,
                    "{isa} {:?} row {row} of {} {span:?} channel {c}: {got} for {}, ranges {ranges:?}",
                    self.layout,
                    spans.len(),
                    exact[c]
                );
                worst = worst.max(error / size.max(f64::MIN_POSITIVE));
            }
        }
        worst
    }
}

pub(super) fn finish(parts: &[&SoftmaxState]) -> Vec<f32> {
    let d = parts[0].head_dim();
    let mut out = vec![f32::NAN; parts[0].rows() * d];
    for (row, out) in out.chunks_exact_mut(d).enumerate() {
        SoftmaxState::finish_parts(parts, row, out);
    }
    out
}

pub(super) fn layouts(bits: u32) -> impl Iterator<Item = CodeLayout> {
    let usual = [32, 48, 64, 80, 96, 128, 256].map(|d| (d, [1, 2, 4]));
    // Channels and groups that fill no register.
    let odd = [20, 50, 100].map(|d| (d, [1, 2, 5]));
    let shapes = usual.into_iter().chain(odd).flat_map(|(d, groups)| groups.map(|groups| (d, groups)));
    shapes.map(move |(d, groups)| CodeLayout::new(bits, d, groups).unwrap())
}

pub(super) const SCALE_TYPES: [ScaleType; 2] = [ScaleType::F16, ScaleType::Bf16];
