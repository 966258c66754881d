use half::{bf16, f16};

use super::*;

/// A function of one register, on 16 numbers.
struct Map<F>(F, [f32; 16]);

/// What a [`Map`] computes.
trait Function {
    /// # Safety
    /// The CPU has the instructions of `V`.
    unsafe fn apply<V: Vector>(&self, x: V) -> V;
}

impl<F: Function> Kernel for Map<F> {
    type Output = [f32; 16];

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> [f32; 16] {
        let mut out = [0.0; 16];
        for first in (0..16).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions; registers cover both arrays.
            unsafe { self.0.apply(V::load(self.1.as_ptr().add(first))).store(out.as_mut_ptr().add(first)) };
        }
        out
    }
}

/// Every instruction set, and plain Rust.
fn all() -> impl Iterator<Item = Simd> {
    Isa::available().map(Simd::new).chain([Simd::portable()])
}

struct Exp2;

impl Function for Exp2 {
    #[inline(always)]
    unsafe fn apply<V: Vector>(&self, x: V) -> V {
        // SAFETY: passed on.
        unsafe { exp2(x) }
    }
}

#[test]
fn powers_of_two_are_good_to_one_in_a_million() {
    for simd in all() {
        let exp2 = |x: [f32; 16]| simd.run(Map(Exp2, x));
        for step in 0..100_000 {
            let x: [f32; 16] = std::array::from_fn(|i| 1.0 - (step * 16 + i) as f32 * (126.9 / 1.6e6));
            for (x, got) in x.iter().zip(exp2(x)) {
                let exact = f64::from(*x).exp2();
                assert!((f64::from(got) / exact - 1.0).abs() < 1e-6, "{simd:?} 2^{x} = {got}");
            }
        }
        assert_eq!(exp2([f32::NEG_INFINITY; 16]), [0.0; 16], "{simd:?}");
        assert!(exp2([f32::NAN; 16]).iter().all(|x| x.is_nan()), "{simd:?}");
        assert_eq!(exp2([0.0; 16]), [1.0; 16], "{simd:?}");
        assert_eq!(exp2([-1e30; 16]), [0.0; 16], "{simd:?}");
    }
}

/// Numbers that instruction sets could treat differently.
const NASTY: [f32; 16] = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    -2.5,
    2.5,
    1e-40,
    -1e30,
    65504.0,
    255.0,
    3.999,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -7.25,
];

/// One method of a vector with another operand.
struct Method(usize, f32);

impl Function for Method {
    #[inline(always)]
    unsafe fn apply<V: Vector>(&self, x: V) -> V {
        // SAFETY: passed on.
        unsafe {
            let other = V::splat(self.1);
            match self.0 {
                0 => x.add(other),
                1 => x.subtract(other),
                2 => x.multiply(other),
                3 => x.divide(other),
                4 => x.maximum(other),
                5 => x.minimum(other),
                6 => other.maximum(x),
                7 => other.minimum(x),
                8 => x.magnitude(),
                9 => x.truncate(),
                10 => x.round(),
                11 => x.where_less(other, V::splat(1.0), x),
                12 => x.multiply_add(other, V::splat(0.1)),
                _ => x.magnitude().square_root(),
            }
        }
    }
}

/// [`Method`] as the language defines it.
fn expected(method: usize, other: f32, x: f32) -> f32 {
    match method {
        0 => x + other,
        1 => x - other,
        2 => x * other,
        3 => x / other,
        4 => {
            if x > other {
                x
            } else {
                other
            }
        }
        5 => {
            if x < other {
                x
            } else {
                other
            }
        }
        6 => {
            if other > x {
                other
            } else {
                x
            }
        }
        7 => {
            if other < x {
                other
            } else {
                x
            }
        }
        8 => x.abs(),
        9 => x.trunc(),
        10 => x.round_ties_even(),
        11 => {
            if x < other {
                1.0
            } else {
                x
            }
        }
        12 => x.mul_add(other, 0.1),
        _ => x.abs().sqrt(),
    }
}

#[test]
fn every_method_is_that_of_the_language() {
    for simd in all() {
        for method in 0..=13 {
            for other in NASTY {
                let got = simd.run(Map(Method(method, other), NASTY));
                for (x, got) in NASTY.into_iter().zip(got) {
                    let expected = expected(method, other, x);
                    let same = got.to_bits() == expected.to_bits()
                        || got.is_nan() && expected.is_nan()
                        // Of two zeros any is the larger.
                        || (4..8).contains(&method) && got == expected;
                    assert!(same, "{simd:?} method {method} of {x} and {other}: {got} for {expected}");
                }
            }
        }
    }
}

/// Conversions and sums over lanes, on 16 numbers that f16 and bf16 hold.
struct Convert<'a>(&'a [f32; 16]);

/// What was stored as f16 and as bytes, what was read as f16, bf16 and pairs, and the sum and the largest of all.
type Converted = ([u16; 16], [u8; 16], [[f32; 16]; 4], [f32; 2]);

impl Kernel for Convert<'_> {
    type Output = Converted;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> Converted {
        let (mut halves, mut bytes, mut read, mut reduced) =
            ([0; 16], [0; 16], [[0.0; 16]; 4], [0.0, f32::MIN]);
        let stored = self.0.map(f16::from_f32);
        let short = self.0.map(bf16::from_f32);
        let pairs: [[u16; 2]; 16] =
            self.0.map(|x| [bf16::from_f32(x).to_bits(), bf16::from_f32(-x).to_bits()]);
        for first in (0..16).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions; registers cover all arrays.
            unsafe {
                let x = V::load(self.0.as_ptr().add(first));
                x.store_f16(halves.as_mut_ptr().add(first));
                x.magnitude().store_bytes(bytes.as_mut_ptr().add(first));
                V::load_f16(stored.as_ptr().add(first).cast()).store(read[0].as_mut_ptr().add(first));
                V::load_bf16(short.as_ptr().add(first).cast()).store(read[1].as_mut_ptr().add(first));
                let [even, odd] = V::load_bf16_pairs(pairs.as_ptr().add(first).cast());
                even.store(read[2].as_mut_ptr().add(first));
                odd.store(read[3].as_mut_ptr().add(first));
                reduced = [reduced[0] + x.sum(), reduced[1].max(x.largest())];
            }
        }
        (halves, bytes, read, reduced)
    }
}

#[test]
fn numbers_are_converted_exactly() {
    let x: [f32; 16] = std::array::from_fn(|i| (i * 37 % 16) as f32 * if i % 3 == 0 { -1.0 } else { 1.0 });
    for simd in all() {
        let (halves, bytes, read, reduced) = simd.run(Convert(&x));
        assert_eq!(halves, x.map(|x| f16::from_f32(x).to_bits()), "{simd:?}");
        assert_eq!(bytes, x.map(|x| x.abs() as u8), "{simd:?}");
        assert_eq!(read, [x, x, x, x.map(|x| -x)], "{simd:?}");
        assert_eq!(reduced, [x.iter().sum(), x.iter().copied().fold(f32::MIN, f32::max)], "{simd:?}");
    }
}

struct LoadFp8([u8; 256]);

impl Kernel for LoadFp8 {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> Vec<f32> {
        let mut out = vec![0.0; 256];
        for first in (0..256).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions; registers cover both arrays.
            unsafe { V::load_e4m3(self.0.as_ptr().add(first)).store(out.as_mut_ptr().add(first)) };
        }
        out
    }
}

#[test]
fn every_fp8_number_is_loaded_as_it_is() {
    for simd in all() {
        let loaded = simd.run(LoadFp8(std::array::from_fn(|byte| byte as u8)));
        for (byte, got) in loaded.into_iter().enumerate() {
            let exact = crate::quant::fp8::e4m3(byte as u8);
            assert!(
                got.to_bits() == exact.to_bits() || got.is_nan() && exact.is_nan(),
                "{simd:?} {byte:#x}: {got}"
            );
        }
    }
}

struct BandScales<'a>(&'a [u8; 256]);

impl Kernel for BandScales<'_> {
    type Output = [f32; 256];

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> [f32; 256] {
        let mut out = [0.0; 256];
        for first in (0..256).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions; registers cover both arrays.
            unsafe { V::load_band_scales(self.0.as_ptr().add(first)).store(out.as_mut_ptr().add(first)) };
        }
        out
    }
}

#[test]
fn every_scale_of_a_band_is_what_the_codec_says() {
    let mut codes: Vec<u8> = (0..=255).collect();
    // Every code in every lane.
    for _ in 0..16 {
        codes.rotate_left(1);
        for simd in all() {
            for (&code, found) in codes.iter().zip(simd.run(BandScales(codes.as_slice().try_into().unwrap())))
            {
                assert_eq!(found.to_bits(), oscar_codec::band::scale(code).to_bits(), "{simd:?} {code}");
            }
        }
    }
}
