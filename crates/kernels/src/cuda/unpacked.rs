//! Matrices as rows of bf16, for products of many rows.
//!
//! A long prompt is computed layer by layer, all of its chunks in one layer before the next, so the matrices of a layer are
//! unpacked for its first chunk and kept for the others. A matrix takes the place of one of the same shape in the layer
//! before it.

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::device::Device;
use super::weights::{CudaWeight, WeightLoader};
use crate::backend::KernelError;

/// Matrices that are kept: those of a layer without experts.
const MOST: usize = 7;

/// Memory that stays free beside them, for whatever grows later.
const RESERVE: usize = 1 << 30;

/// Unpacked matrices, and where each of them is.
#[derive(Default)]
pub(super) struct Unpacked {
    places: Places,
    memory: Vec<CudaSlice<u8>>,
}

impl Unpacked {
    /// A matrix in bf16, unpacked if it is not there yet. Where memory is short, one matrix is kept.
    pub(super) fn matrix(
        &mut self,
        device: &Arc<Device>,
        loader: &WeightLoader,
        weight: &CudaWeight,
    ) -> Result<&CudaSlice<u8>, KernelError> {
        let shape = (weight.rows, weight.cols);
        let bytes = weight.rows * weight.cols * 2;
        let mut choice = self.places.choose(weight.id(), shape);
        if !matches!(choice, Choice::Known(_) | Choice::Same(_)) && !self.memory.is_empty() {
            let free = device.free_memory()?;
            if free < bytes.saturating_add(RESERVE) {
                (self.memory, self.places) = (Vec::new(), Places { most: 1, ..Places::default() });
                choice = Choice::New;
            }
        }
        let place = match choice {
            Choice::Known(place) => return Ok(&self.memory[place]),
            Choice::Same(place) => place,
            Choice::New => self.memory.len(),
            Choice::Instead(place) => {
                // The place has no memory until it has other memory.
                self.memory.remove(place);
                self.places.remove(place);
                self.memory.len()
            }
        };
        if place == self.memory.len() {
            self.memory.push(device.allocate(bytes, "unpacked weights")?);
        }
        // Should it fail, the place holds nothing that is known.
        self.places.set(place, Place { matrix: None, shape, used: 0 });
        loader.unpack_bf16(weight, &mut self.memory[place])?;
        self.places.set(place, Place { matrix: Some(weight.id()), shape, used: 0 });
        Ok(&self.memory[place])
    }
}

/// Which matrix is where.
struct Places {
    places: Vec<Place>,
    most: usize,
    /// The number of uses so far, to find what was used longest ago.
    clock: u64,
}

/// Memory for a matrix of a shape, and which one it holds.
#[derive(Clone, Copy)]
struct Place {
    matrix: Option<u64>,
    shape: (usize, usize),
    used: u64,
}

/// What becomes of a matrix that is about to be multiplied.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// The place holds it already.
    Known(usize),
    /// The place holds another matrix of the same shape, which it replaces.
    Same(usize),
    /// No place has been taken for it yet, and there may be one more.
    New,
    /// The place has the memory of another shape, which has to be given back first.
    Instead(usize),
}

impl Default for Places {
    fn default() -> Places {
        Places { places: Vec::new(), most: MOST, clock: 0 }
    }
}

impl Places {
    fn choose(&mut self, matrix: u64, shape: (usize, usize)) -> Choice {
        self.clock += 1;
        if let Some(place) = self.places.iter().position(|place| place.matrix == Some(matrix)) {
            self.places[place].used = self.clock;
            return Choice::Known(place);
        }
        if self.places.len() < self.most {
            return Choice::New;
        }
        let oldest = |same: bool| {
            let places = self.places.iter().enumerate().filter(|(_, place)| !same || place.shape == shape);
            places.min_by_key(|(_, place)| place.used).map(|(index, _)| index)
        };
        match (oldest(true), oldest(false)) {
            (Some(place), _) => Choice::Same(place),
            (None, Some(place)) => Choice::Instead(place),
            (None, None) => Choice::New,
        }
    }

    fn remove(&mut self, index: usize) {
        self.places.remove(index);
    }

    fn set(&mut self, index: usize, place: Place) {
        let place = Place { used: self.clock, ..place };
        match self.places.get_mut(index) {
            Some(known) => *known = place,
            None => self.places.push(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The matrices of a layer of four shapes, as they are needed.
    fn layer(places: &mut Places, layer: u64) -> Vec<Choice> {
        let shapes = [(64, 64), (16, 64), (16, 64), (64, 64), (256, 64), (256, 64), (64, 256)];
        let mut choices = Vec::new();
        for (index, shape) in shapes.into_iter().enumerate() {
            let matrix = 10 * layer + index as u64;
            let choice = places.choose(matrix, shape);
            if let Choice::Same(place) = choice {
                assert_eq!(places.places[place].shape, shape);
                places.set(place, Place { matrix: Some(matrix), shape, used: 0 });
            } else if choice == Choice::New {
                places.set(places.places.len(), Place { matrix: Some(matrix), shape, used: 0 });
            }
            choices.push(choice);
        }
        choices
    }

    #[test]
    fn the_matrices_of_a_layer_are_kept_until_the_next_one_needs_their_places() {
        let mut places = Places::default();
        assert!(layer(&mut places, 0).iter().all(|choice| *choice == Choice::New));
        for number in 1..4 {
            // The first chunk unpacks, the others find.
            assert!(layer(&mut places, number).iter().all(|choice| matches!(choice, Choice::Same(_))));
            assert!(layer(&mut places, number).iter().all(|choice| matches!(choice, Choice::Known(_))));
        }
        assert_eq!(places.places.len(), MOST);
    }

    #[test]
    fn a_matrix_of_another_shape_takes_the_place_that_was_used_longest_ago() {
        let mut places = Places::default();
        layer(&mut places, 0);
        assert_eq!(places.choose(99, (1000, 64)), Choice::Instead(0));
        places.remove(0);
        assert_eq!(places.choose(99, (1000, 64)), Choice::New);
        assert_eq!(places.choose(1, (16, 64)), Choice::Known(0));
        let mut single = Places { most: 1, ..Places::default() };
        assert_eq!(single.choose(1, (8, 8)), Choice::New);
        single.set(0, Place { matrix: Some(1), shape: (8, 8), used: 0 });
        assert_eq!(single.choose(2, (8, 8)), Choice::Same(0));
        assert_eq!(single.choose(1, (8, 8)), Choice::Known(0));
        assert_eq!(single.choose(3, (8, 4)), Choice::Instead(0));
    }
}
