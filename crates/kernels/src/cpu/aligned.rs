//! Growable scratch memory aligned to cache lines, which is also the row size of AMX tiles and AVX-512 registers.

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// Scratch that keeps its allocation between calls. Contents after [`Self::at_least`] are unspecified but
/// initialised.
#[derive(Default)]
pub(crate) struct AlignedScratch {
    lines: Vec<Line>,
}

impl AlignedScratch {
    /// The first `len` elements, after growing to hold them.
    pub(crate) fn at_least<T: Pod>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        if self.lines.len() < lines {
            // Replaced rather than resized: old contents need no copy.
            self.lines = vec![Line([0; 16]); lines];
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }

    /// Everything allocated so far.
    pub(crate) fn all<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_and_stays_aligned() {
        let mut scratch = AlignedScratch::default();
        for len in [0, 1, 15, 16, 17, 1000, 3] {
            let slice = scratch.at_least::<f32>(len);
            assert_eq!(slice.len(), len);
            assert!(len == 0 || slice.as_ptr().addr().is_multiple_of(64));
        }
        assert_eq!(scratch.all::<f32>().len(), 1008);
    }
}
