//! Numbers of pages in the pools of a device.
//!
//! The pools of a cache have pages of different sizes, so their slots are different types. Slot 0 of every pool is a
//! dummy that padded rows name. It is no page, so a slot is never 0, and a table of `Option`s has the bits of a table
//! of `u32` in which 0 is the dummy.

use std::fmt;
use std::num::NonZeroU32;

macro_rules! slot {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(NonZeroU32);

        impl $name {
            /// The slot of this number; `None` for 0, the dummy.
            #[inline]
            pub const fn new(number: u32) -> Option<Self> {
                match NonZeroU32::new(number) {
                    Some(number) => Some($name(number)),
                    None => None,
                }
            }

            /// Its number, at least 1.
            #[inline]
            pub const fn number(self) -> u32 {
                self.0.get()
            }

            /// Its number as an index into a pool that begins with the dummy.
            #[inline]
            pub const fn index(self) -> usize {
                self.number() as usize
            }

            /// What the table that a kernel reads says for an entry: the number of the slot, or 0 (the dummy) for none.
            #[inline]
            pub const fn table_entry(slot: Option<Self>) -> u32 {
                match slot {
                    Some(slot) => slot.number(),
                    None => 0,
                }
            }

            /// A page table with these numbers, where 0 is no slot.
            pub fn table(numbers: impl IntoIterator<Item = u32>) -> Vec<Option<Self>> {
                numbers.into_iter().map(Self::new).collect()
            }

            /// A page table with the first `pages` slots of a pool: 1, 2, 3 and so on.
            pub fn first(pages: usize) -> Vec<Option<Self>> {
                Self::table((1..=u32::MAX).take(pages))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }
    };
}

slot! {
    /// A bf16 page in a device's pool. Scratch slots, whose pages hold one layer only, follow the bf16 slots in number.
    ExactSlot
}
slot! {
    /// A sealed page in a device's pool.
    SealedSlot
}

slot! {
    /// A page in the host's memory, of those for bf16 pages or of those for sealed ones.
    HostSlot
}

/// A page in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPage {
    /// A slot of the pool for bf16 pages.
    Exact(HostSlot),
    /// A slot of the pool for sealed pages.
    Sealed(HostSlot),
}

/// A copy of one page, with all its layers, from a device to the host's memory or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostCopy {
    /// Copies a bf16 page to the host.
    ExactOut {
        /// The slot on the device.
        from: ExactSlot,
        /// The slot in the host's memory.
        to: HostSlot,
    },
    /// Copies a sealed page to the host.
    SealedOut {
        /// The slot on the device.
        from: SealedSlot,
        /// The slot in the host's memory.
        to: HostSlot,
    },
    /// Copies a bf16 page to the device.
    ExactIn {
        /// The slot in the host's memory.
        from: HostSlot,
        /// The slot on the device.
        to: ExactSlot,
    },
    /// Copies a sealed page to the device.
    SealedIn {
        /// The slot in the host's memory.
        from: HostSlot,
        /// The slot on the device.
        to: SealedSlot,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dummy_is_no_slot() {
        assert_eq!(ExactSlot::new(0), None);
        assert_eq!(SealedSlot::new(0), None);
        let last = SealedSlot::new(u32::MAX).unwrap();
        assert_eq!((last.number(), last.index()), (u32::MAX, u32::MAX as usize));
    }

    /// Entries cost no more than bare numbers.
    #[test]
    fn an_entry_of_a_table_is_as_large_as_its_number() {
        const { assert!(size_of::<Option<ExactSlot>>() == 4 && align_of::<Option<ExactSlot>>() == 4) };
        const { assert!(size_of::<Option<SealedSlot>>() == 4 && align_of::<Option<SealedSlot>>() == 4) };
        for number in [0, 1, 2, 0x0102_0304, u32::MAX] {
            assert_eq!(ExactSlot::table_entry(ExactSlot::new(number)), number);
            assert_eq!(SealedSlot::table_entry(SealedSlot::new(number)), number);
        }
    }

    #[test]
    fn tables_are_made_of_numbers() {
        let numbers = |table: &[Option<ExactSlot>]| -> Vec<u32> {
            table.iter().map(|&slot| ExactSlot::table_entry(slot)).collect()
        };
        let table = ExactSlot::table([4, 2, 0, 1]);
        assert_eq!(numbers(&table), [4, 2, 0, 1]);
        assert!(table[2].is_none());
        assert_eq!(numbers(&ExactSlot::first(3)), [1, 2, 3]);
        assert!(ExactSlot::first(0).is_empty());
    }
}
