//! Norms, activations and rotary embedding: small loops over one row.
//!
//! The bodies are plain Rust that the compiler vectorises; each is compiled once per instruction set, because a
//! build for a generic x86 machine would otherwise stay at SSE2.

use super::isa::Isa;
use crate::backend::{Activation, RopeLayout};

/// Compiles a body for each x86 level and picks one at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? => $body:ident) => {
        $(#[$doc])*
        $visibility fn $name(isa: Isa, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    $body($($argument),*)
                }
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    $body($($argument),*)
                }
                match isa {
                    // SAFETY: the backend, the only caller, checks that its path is available when it is made.
                    Isa::Avx2 => return unsafe { avx2($($argument),*) },
                    // SAFETY: as above.
                    Isa::Avx512 | Isa::Amx => return unsafe { avx512($($argument),*) },
                    Isa::Scalar | Isa::Neon => {}
                }
            }
            let _ = isa;
            $body($($argument),*)
        }
    };
}

/// Partial sums kept apart so that the additions of a reduction can run side by side.
const LANES: usize = 32;

per_isa! {
    /// `out = x / sqrt(mean(x²) + eps) * weight`.
    pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) => rms_norm_body
}

#[inline(always)]
fn rms_norm_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let inverse = inverse_rms(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse * weight;
    }
}

per_isa! {
    /// [`rms_norm`] of a row onto itself.
    pub(super) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) => rms_norm_in_place_body
}

#[inline(always)]
fn rms_norm_in_place_body(x: &mut [f32], weight: &[f32], eps: f32) {
    let inverse = inverse_rms(x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x *= inverse * weight;
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    let tail: f32 = chunks.remainder().iter().map(|value| value * value).sum();
    let sum = lanes.iter().sum::<f32>() + tail;
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

per_isa! {
    /// `out = silu(gate) * up`.
    fn silu_multiply(gate: &[f32], up: &[f32], out: &mut [f32]) => silu_multiply_body
}

#[inline(always)]
fn silu_multiply_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((gate, up), out) in gate.iter().zip(up).zip(out) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

per_isa! {
    /// `out = gelu(gate) * up`, by the tanh approximation of GELU.
    fn gelu_multiply(gate: &[f32], up: &[f32], out: &mut [f32]) => gelu_multiply_body
}

#[inline(always)]
fn gelu_multiply_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // (1 + tanh u) / 2 is the logistic function of 2u.
    const TWICE_ROOT: f32 = 1.595_769_2;
    for ((gate, up), out) in gate.iter().zip(up).zip(out) {
        let twice = TWICE_ROOT * gate * (0.044_715 * gate).mul_add(*gate, 1.0);
        *out = gate / (1.0 + exp(-twice)) * up;
    }
}

per_isa! {
    /// `out = gate · sigmoid(alpha · gate) · (up + 1)` with the gate at most `limit` and `up` between that and its negative.
    fn clamped_swiglu(gate: &[f32], up: &[f32], alpha: f32, limit: f32, out: &mut [f32]) => clamped_swiglu_body
}

#[inline(always)]
fn clamped_swiglu_body(gate: &[f32], up: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
    for ((&gate, &up), out) in gate.iter().zip(up).zip(out) {
        // Not `min`, which would make a number of NaN.
        let gate = if gate > limit { limit } else { gate };
        let up = if up > limit { limit } else { up };
        let up = if up < -limit { -limit } else { up };
        *out = gate / (1.0 + exp(-alpha * gate)) * (up + 1.0);
    }
}

/// What comes of a gate and what it is multiplied with.
pub(super) fn activate(isa: Isa, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => silu_multiply(isa, gate, up, out),
        Activation::GeluTanh => gelu_multiply(isa, gate, up, out),
        Activation::ClampedSwiglu { alpha, limit } => clamped_swiglu(isa, gate, up, alpha, limit, out),
    }
}

/// 1.5 · 2²³: added to a number below 2²², it rounds it to an integer, which then is the low bits of the sum. A conversion
/// to integers would have to check its range, and loops with it do not vectorise well.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// `e^x` by a range reduction and a polynomial, to about 2 ulp; branch-free so that it vectorises.
/// Below -87.3 the result is the smallest normal number or less, above 88.7 it is infinite, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // ln 2 in two parts: the first has few enough bits that its product with an exponent is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-104.0, 89.0);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let exponent = shifted - ROUND;
    let r = (-exponent).mul_add(LN2_LOW, (-exponent).mul_add(LN2_HIGH, clamped));
    // Taylor coefficients to r⁷/7!; |r| <= ln2/2, so the rest is below 1e-8.
    let mut polynomial = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        polynomial = r.mul_add(polynomial, coefficient);
    }
    // Two factors, because 2^exponent alone can leave the range of normal numbers.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = exponent >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) << 23) as u32);
    polynomial * power(half) * power(exponent.wrapping_sub(half))
}

per_isa! {
    /// Rotates the first `2 * cos.len()` channels of a head by the angles whose cosines and sines are given.
    pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], layout: RopeLayout) => rotate_body
}

#[inline(always)]
fn rotate_body(head: &mut [f32], cos: &[f32], sin: &[f32], layout: RopeLayout) {
    let pairs = cos.len();
    let head = &mut head[..2 * pairs];
    match layout {
        RopeLayout::Halves => {
            let (first, second) = head.split_at_mut(pairs);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        RopeLayout::Interleaved => {
            for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;

    use super::*;

    fn values(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..len).map(|_| 4.0 * random.signed()).collect()
    }

    #[test]
    fn exp_is_close_over_the_whole_range() {
        for step in -1040..=887 {
            let x = step as f32 * 0.1;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs();
            assert!(error <= exact * 3e-7 + 1e-44, "exp({x}) = {} not {exact}", exp(x));
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), exp(-104.0));
        assert!(exp(f32::NEG_INFINITY) < 1e-44);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn every_path_norms_like_f64() {
        for isa in Isa::available() {
            for len in [1, 16, 31, 32, 33, 576, 1000] {
                let (x, weight) = (values(len, 1), values(len, 2));
                let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / len as f64;
                let mut out = vec![0.0; len];
                rms_norm(isa, &x, &weight, 1e-5, &mut out);
                let mut in_place = x.clone();
                rms_norm_in_place(isa, &mut in_place, &weight, 1e-5);
                for i in 0..len {
                    let exact = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                    assert!((f64::from(out[i]) - exact).abs() <= 1e-5 * exact.abs().max(1.0), "{isa} {len}");
                    assert!(
                        (f64::from(in_place[i]) - exact).abs() <= 1e-5 * exact.abs().max(1.0),
                        "{isa} {len}"
                    );
                }
            }
            let mut zeros = [0.0f32; 40];
            rms_norm_in_place(isa, &mut zeros, &[1.0; 40], 1e-5);
            assert_eq!(zeros, [0.0; 40]);
        }
    }

    #[test]
    fn every_path_activates_like_f64() {
        for isa in Isa::available() {
            let mut gate = values(77, 3);
            gate.extend([0.0, -100.0, 100.0, 1e30, -1e30, f32::MIN_POSITIVE]);
            let up = values(gate.len(), 4);
            let mut out = vec![0.0; gate.len()];
            silu_multiply(isa, &gate, &up, &mut out);
            for i in 0..gate.len() {
                let x = f64::from(gate[i]);
                let exact = x / (1.0 + (-x).exp()) * f64::from(up[i]);
                assert!((f64::from(out[i]) - exact).abs() <= 1e-5 * exact.abs().max(1e-5), "{isa} silu({x})");
            }
        }
    }

    #[test]
    fn every_path_has_gelu_like_f64() {
        for isa in Isa::available() {
            let mut gate = values(77, 6);
            gate.extend([0.0, -0.5, -3.0, 5.0, 100.0, 1e12, -30.0, -1e12, f32::MIN_POSITIVE]);
            let up = values(gate.len(), 7);
            let mut out = vec![0.0; gate.len()];
            gelu_multiply(isa, &gate, &up, &mut out);
            for i in 0..gate.len() {
                let x = f64::from(gate[i]);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                let exact = 0.5 * x * (1.0 + inner.tanh()) * f64::from(up[i]);
                assert!((f64::from(out[i]) - exact).abs() <= 1e-5 * exact.abs().max(1e-5), "{isa} gelu({x})");
            }
        }
    }

    #[test]
    fn every_path_clamps_like_f64() {
        let (alpha, limit) = (1.702, 7.0);
        for isa in Isa::available() {
            let mut gate = values(77, 8);
            gate.extend([0.0, 7.0, 7.5, 1e30, -7.5, -1e30, -100.0, 3.0, 3.0, f32::MIN_POSITIVE]);
            let mut up = values(gate.len(), 9);
            let edges = gate.len() - 3;
            (up[edges], up[edges + 1]) = (1e30, -1e30);
            let mut out = vec![0.0; gate.len()];
            activate(isa, Activation::ClampedSwiglu { alpha, limit }, &gate, &up, &mut out);
            for i in 0..gate.len() {
                let (x, up) = (f64::from(gate[i]).min(7.0), f64::from(up[i]).clamp(-7.0, 7.0));
                let exact = x / (1.0 + (-f64::from(alpha) * x).exp()) * (up + 1.0);
                assert!(
                    (f64::from(out[i]) - exact).abs() <= 1e-5 * exact.abs().max(1e-5),
                    "{isa} ({x}, {up})"
                );
            }
            let mut out = [0.0; 2];
            let activation = Activation::ClampedSwiglu { alpha, limit };
            activate(isa, activation, &[f32::NAN, 1.0], &[1.0, f32::NAN], &mut out);
            assert!(out.iter().all(|value| value.is_nan()), "{isa} {out:?}");
        }
    }

    #[test]
    fn rotation_keeps_length_and_leaves_the_rest() {
        for isa in Isa::available() {
            for layout in [RopeLayout::Halves, RopeLayout::Interleaved] {
                let before = values(48, 5);
                let mut head = before.clone();
                let angles: Vec<f32> = (0..16).map(|i| i as f32 * 0.3).collect();
                let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
                let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
                rotate(isa, &mut head, &cos, &sin, layout);
                assert_eq!(head[32..], before[32..]);
                for pair in 0..16 {
                    let (i, j) = match layout {
                        RopeLayout::Halves => (pair, pair + 16),
                        RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let real = before[i] * cos[pair] - before[j] * sin[pair];
                    let imaginary = before[i] * sin[pair] + before[j] * cos[pair];
                    assert!((head[i] - real).abs() < 1e-6 && (head[j] - imaginary).abs() < 1e-6, "{isa}");
                }
            }
        }
    }
}
