//! AVX-512: a register-blocked product in `f32`, and 16x16 transposition.

use std::arch::x86_64::*;

use super::BLOCK_ROWS;

/// Weight rows of the micro-kernel: 12 rows x 2 registers of activations leave registers for the operands.
const ROWS: usize = 12;

/// As [`super::scalar::multiply`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
pub(super) fn multiply(w: &[f32], x: &[f32], depth: usize, sums: &mut [f32]) {
    assert_eq!(x.len(), depth * BLOCK_ROWS);
    let n = w.len() / depth;
    assert!(sums.len() >= n * BLOCK_ROWS);
    let mut row = 0;
    while row < n {
        let count = (n - row).min(ROWS);
        let (w, sums) = (&w[row * depth..], &mut sums[row * BLOCK_ROWS..]);
        match count {
            12 => rows::<12>(w, x, depth, sums),
            8.. => rows::<8>(w, x, depth, sums),
            4.. => rows::<4>(w, x, depth, sums),
            _ => rows::<1>(w, x, depth, sums),
        }
        row += match count {
            12 => 12,
            8.. => 8,
            4.. => 4,
            _ => 1,
        };
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
fn rows<const R: usize>(w: &[f32], x: &[f32], depth: usize, sums: &mut [f32]) {
    assert!(w.len() >= R * depth && x.len() >= depth * BLOCK_ROWS && sums.len() >= R * BLOCK_ROWS);
    let (w, x, sums) = (w.as_ptr(), x.as_ptr(), sums.as_mut_ptr());
    let mut totals = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: all offsets are below the lengths asserted above.
    unsafe {
        for r in 0..R {
            totals[r][0] = _mm512_loadu_ps(sums.add(r * BLOCK_ROWS));
            totals[r][1] = _mm512_loadu_ps(sums.add(r * BLOCK_ROWS + 16));
        }
        for k in 0..depth {
            let x0 = _mm512_loadu_ps(x.add(k * BLOCK_ROWS));
            let x1 = _mm512_loadu_ps(x.add(k * BLOCK_ROWS + 16));
            for r in 0..R {
                let weight = _mm512_set1_ps(*w.add(r * depth + k));
                totals[r][0] = _mm512_fmadd_ps(weight, x0, totals[r][0]);
                totals[r][1] = _mm512_fmadd_ps(weight, x1, totals[r][1]);
            }
        }
        for r in 0..R {
            _mm512_storeu_ps(sums.add(r * BLOCK_ROWS), totals[r][0]);
            _mm512_storeu_ps(sums.add(r * BLOCK_ROWS + 16), totals[r][1]);
        }
    }
}

/// Transposes 16 rows of 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut b = a;
    for i in 0..4 {
        for j in 0..2 {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        }
    }
    // b[4i + j] now holds column j of each 128-bit lane for rows 4i..4i+4.
    let mut out = r;
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]);
        let low2 = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
        let high2 = _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(low, low2);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(high, high2);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
    }
    out
}

/// As [`super::transpose_sums`]: `out[i * n + r] = sums[r * 32 + i]` for `rows` lanes `i` and `n` weight rows.
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_sums(sums: &[f32], n: usize, rows: usize, out: &mut [f32]) {
    assert!(rows <= BLOCK_ROWS && sums.len() >= n * BLOCK_ROWS && out.len() >= rows * n);
    for first_row in (0..n).step_by(16) {
        let row_count = (n - first_row).min(16);
        for first_lane in (0..rows).step_by(16) {
            let lane_count = (rows - first_lane).min(16);
            let mut block = [_mm512_setzero_si512(); 16];
            for r in 0..row_count {
                let source = &sums[(first_row + r) * BLOCK_ROWS + first_lane..][..16];
                // SAFETY: the slice has 16 elements.
                block[r] = unsafe { _mm512_loadu_si512(source.as_ptr().cast()) };
            }
            let block = transpose(block);
            let mask = ((1u32 << row_count) - 1) as u16;
            for lane in 0..lane_count {
                let target = &mut out[(first_lane + lane) * n + first_row..][..row_count];
                // SAFETY: the mask selects exactly the elements of the slice.
                unsafe { _mm512_mask_storeu_epi32(target.as_mut_ptr().cast(), mask, block[lane]) };
            }
        }
    }
}

/// Writes `[depth][32]` from 16 rows of activations: lanes `first_lane..first_lane + 16`.
#[target_feature(enable = "avx512f")]
pub(super) fn interleave(rows: &[f32], depth: usize, block: &mut [f32], first_lane: usize) {
    assert!(rows.len() >= 16 * depth && block.len() >= depth * BLOCK_ROWS && first_lane <= 16);
    for k in (0..depth).step_by(16) {
        let count = (depth - k).min(16);
        let mask = ((1u32 << count) - 1) as u16;
        let mut words = [_mm512_setzero_si512(); 16];
        for (row, word) in words.iter_mut().enumerate() {
            let source = &rows[row * depth + k..][..count];
            // SAFETY: the mask selects exactly the elements of the slice.
            *word = unsafe { _mm512_maskz_loadu_epi32(mask, source.as_ptr().cast()) };
        }
        let words = transpose(words);
        for (step, word) in words.into_iter().take(count).enumerate() {
            let target = &mut block[(k + step) * BLOCK_ROWS + first_lane..][..16];
            // SAFETY: the slice has 16 elements.
            unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), word) };
        }
    }
}
