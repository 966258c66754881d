//! Scales and offsets of a page as numbers.

use oscar_codec::ScaleType;

use crate::cpu::simd::{Kernel, Vector};

/// Widens numbers of 16 bits to `f32`; there are as many as fill registers.
pub(super) struct Widen<'a> {
    pub(super) stored: &'a [u8],
    pub(super) scale_type: ScaleType,
    pub(super) out: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Widen { stored, scale_type, out } = self;
        assert!(stored.len() == 2 * out.len() && out.len().is_multiple_of(V::WIDTH));
        for first in (0..out.len()).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions; a register of numbers from `first` on, see the lengths above.
            unsafe {
                let at = stored.as_ptr().add(2 * first);
                let wide = match scale_type {
                    ScaleType::F16 => V::load_f16(at),
                    ScaleType::Bf16 => V::load_bf16(at),
                };
                wide.store(out.as_mut_ptr().add(first));
            }
        }
    }
}
