//! Device memory: addresses that mean nothing to the host, and the memory of the host behind them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytemuck::{AnyBitPattern, NoUninit};

use crate::settings;

/// What went wrong in a kernel or a copy, in words.
pub(crate) type Fault = String;

/// Allocations begin at multiples of this, and at least as much lies between them.
const ALIGNMENT: u64 = 512;

/// Where the first allocation begins: far from the addresses of the host.
const FIRST: u64 = 0x7f00_0000_0000_0000;

/// An allocation.
struct Block {
    begin: u64,
    bytes: usize,
    data: NonNull<u8>,
    /// Done once what new memory holds has been decided: zeros that were asked for at once, or ones.
    touched: Once,
}

// SAFETY: the memory is owned; who writes where is the business of the streams, as on a card.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn layout(bytes: usize) -> Option<Layout> {
        // Sixteen bytes are aligned enough for all that kernels read, and large zeroed memory costs nothing until it is touched.
        Layout::from_size_align(bytes.max(1), 16).ok()
    }

    fn new(begin: u64, bytes: usize) -> Option<Block> {
        let layout = Block::layout(bytes)?;
        // SAFETY: the size is not zero.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Block { begin, bytes, data, touched: Once::new() })
    }

    /// Memory that nobody has written looks like nothing anybody wants.
    fn touch(&self) {
        self.touched.call_once(|| {
            // SAFETY: the block has so many bytes, and nobody has looked at them.
            unsafe { self.data.write_bytes(0xff, self.bytes) };
        });
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(layout) = Block::layout(self.bytes) {
            // SAFETY: the memory was allocated with this layout.
            unsafe { dealloc(self.data.as_ptr(), layout) };
        }
    }
}

struct Blocks {
    all: BTreeMap<u64, Arc<Block>>,
    next: u64,
    used: usize,
}

/// The memory of the card.
pub(crate) struct Memory {
    blocks: RwLock<Blocks>,
}

static MEMORY: Memory = Memory { blocks: RwLock::new(Blocks { all: BTreeMap::new(), next: FIRST, used: 0 }) };

/// The memory of the card.
pub(crate) fn memory() -> &'static Memory {
    &MEMORY
}

impl Memory {
    fn read(&self) -> RwLockReadGuard<'_, Blocks> {
        self.blocks.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Blocks> {
        self.blocks.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are free, and all of them.
    pub(crate) fn free_and_total(&self) -> (usize, usize) {
        let total = settings::memory_bytes();
        (total.saturating_sub(self.read().used), total)
    }

    /// The address of new memory; `None` if there is too little.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut blocks = self.change();
        if bytes > settings::memory_bytes().saturating_sub(blocks.used) {
            return None;
        }
        let begin = blocks.next;
        let block = Block::new(begin, bytes)?;
        // An address is never given twice, so that a stale one is known as such.
        blocks.next += (bytes as u64).next_multiple_of(ALIGNMENT) + ALIGNMENT;
        blocks.used += bytes;
        blocks.all.insert(begin, Arc::new(block));
        Some(begin)
    }

    /// Gives memory back.
    pub(crate) fn free(&self, address: u64) -> Result<(), Fault> {
        let mut blocks = self.change();
        let block = blocks.all.remove(&address);
        let block = block.ok_or_else(|| format!("{address:#x} is freed and no allocation begins there"))?;
        blocks.used -= block.bytes;
        Ok(())
    }

    /// The allocation that holds so many bytes from an address on.
    fn block(&self, address: u64, bytes: usize) -> Result<Arc<Block>, Fault> {
        let blocks = self.read();
        let before = blocks.all.range(..=address).next_back();
        let Some((_, block)) = before else {
            return Err(format!("{bytes} bytes at {address:#x}, where nothing is allocated"));
        };
        let offset = address - block.begin;
        if offset > block.bytes as u64 || bytes as u64 > block.bytes as u64 - offset {
            return Err(format!(
                "{bytes} bytes at {address:#x}: the allocation before it has {} bytes and begins {offset} bytes earlier",
                block.bytes
            ));
        }
        Ok(block.clone())
    }
}

/// The memory of the card as one launch or copy sees it: every access is checked, and what it has looked at stays while it runs.
pub(crate) struct Access {
    memory: &'static Memory,
    held: RefCell<Vec<Arc<Block>>>,
}

impl Access {
    pub(crate) fn new() -> Access {
        Access { memory: memory(), held: RefCell::default() }
    }

    /// The host's address of so many bytes, which stay for as long as this lives.
    fn pointer(&self, address: u64, bytes: usize) -> Result<NonNull<u8>, Fault> {
        let block = self.untouched(address, bytes)?;
        block.touch();
        // SAFETY: the offset is inside of the block, as was checked.
        Ok(unsafe { block.data.add((address - block.begin) as usize) })
    }

    fn untouched(&self, address: u64, bytes: usize) -> Result<Arc<Block>, Fault> {
        let mut held = self.held.borrow_mut();
        let within = |block: &Arc<Block>| {
            address >= block.begin && address - block.begin + bytes as u64 <= block.bytes as u64
        };
        if let Some(block) = held.iter().rev().find(|block| within(block)) {
            return Ok(block.clone());
        }
        let block = self.memory.block(address, bytes)?;
        held.push(block.clone());
        Ok(block)
    }

    fn place<T>(&self, address: u64, count: usize) -> Result<NonNull<T>, Fault> {
        if !address.is_multiple_of(align_of::<T>() as u64) {
            return Err(format!(
                "{address:#x} is read or written as if it were a multiple of {}",
                align_of::<T>()
            ));
        }
        let bytes = count.checked_mul(size_of::<T>()).ok_or("more bytes than there are addresses")?;
        Ok(self.pointer(address, bytes)?.cast())
    }

    /// Numbers as they lie there. Nothing may write to them while they are looked at: a kernel that changes what it reads takes
    /// [`read`](Self::read).
    pub(crate) fn view<T: AnyBitPattern>(&self, address: u64, count: usize) -> Result<&[T], Fault> {
        let place = self.place::<T>(address, count)?;
        // SAFETY: the memory is there for as long as this lives, is aligned, and holds plain numbers.
        Ok(unsafe { std::slice::from_raw_parts(place.as_ptr(), count) })
    }

    /// A copy of numbers.
    pub(crate) fn read<T: AnyBitPattern>(&self, address: u64, count: usize) -> Result<Vec<T>, Fault> {
        Ok(self.view(address, count)?.to_vec())
    }

    /// One number.
    pub(crate) fn get<T: AnyBitPattern>(&self, address: u64) -> Result<T, Fault> {
        Ok(self.view::<T>(address, 1)?[0])
    }

    /// Writes numbers.
    pub(crate) fn write<T: NoUninit>(&self, address: u64, numbers: &[T]) -> Result<(), Fault> {
        let place = self.place::<T>(address, numbers.len())?;
        // SAFETY: there is memory for so many numbers, which no slice of this thread's is in.
        unsafe { std::ptr::copy(numbers.as_ptr(), place.as_ptr(), numbers.len()) };
        Ok(())
    }

    /// Copies bytes, which may overlap.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Fault> {
        let (from, to) = (self.pointer(from, bytes)?, self.pointer(to, bytes)?);
        // SAFETY: both have so many bytes.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), bytes) };
        Ok(())
    }

    /// Makes all bytes the same.
    pub(crate) fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), Fault> {
        let block = self.untouched(address, bytes)?;
        if value == 0 && bytes == block.bytes {
            // New memory has not been looked at, and is zero.
            let mut new = false;
            block.touched.call_once(|| new = true);
            if new {
                return Ok(());
            }
        }
        let place = self.pointer(address, bytes)?;
        // SAFETY: so many bytes are there.
        unsafe { place.write_bytes(value, bytes) };
        Ok(())
    }

    /// Copies from the host.
    ///
    /// # Safety
    /// So many bytes can be read there.
    pub(crate) unsafe fn upload(&self, from: *const u8, to: u64, bytes: usize) -> Result<(), Fault> {
        let to = self.pointer(to, bytes)?;
        // SAFETY: both have so many bytes, the caller says so of the host's.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_ptr(), bytes) };
        Ok(())
    }

    /// Copies to the host.
    ///
    /// # Safety
    /// So many bytes can be written there.
    pub(crate) unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), Fault> {
        let from = self.pointer(from, bytes)?;
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, bytes) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_full_of_ones_until_it_is_written_and_gone_once_it_is_freed() {
        let address = memory().allocate(64).unwrap();
        let access = Access::new();
        assert!(access.view::<f32>(address, 16).unwrap().iter().all(|x| x.is_nan()));
        access.write(address + 8, &[1.0_f32, 2.0]).unwrap();
        assert_eq!(access.get::<f32>(address + 12).unwrap(), 2.0);
        access.fill(address, 0, 64).unwrap();
        assert_eq!(access.read::<u8>(address, 64).unwrap(), [0; 64]);
        memory().free(address).unwrap();
        assert!(memory().free(address).is_err());
        assert!(Access::new().view::<u8>(address, 1).is_err());
    }

    #[test]
    fn nothing_reaches_beyond_an_allocation() {
        let (first, second) = (memory().allocate(100).unwrap(), memory().allocate(100).unwrap());
        let access = Access::new();
        assert!(access.view::<u8>(first, 100).is_ok() && access.view::<u8>(first + 100, 0).is_ok());
        for (address, count) in [(first, 101), (first + 100, 1), (first - 1, 1), (second - 1, 2), (0, 1)] {
            assert!(access.view::<u8>(address, count).is_err(), "{count} bytes at {address:#x}");
        }
        assert!(access.view::<f32>(first + 2, 1).is_err(), "not aligned");
        assert!(access.copy(first, second + 1, 100).is_err());
        memory().free(first).unwrap();
        memory().free(second).unwrap();
    }

    #[test]
    fn zeros_that_were_asked_for_at_once_are_zeros() {
        let address = memory().allocate(1 << 20).unwrap();
        Access::new().fill(address, 0, 1 << 20).unwrap();
        assert!(Access::new().view::<u8>(address, 1 << 20).unwrap().iter().all(|&x| x == 0));
        memory().free(address).unwrap();
    }
}
