//! Who owns which page.
//!
//! Pure bookkeeping: token positions and page ids, no tensors. The bytes of a page live in a backend's pool under
//! the same slot number.

pub mod pool;
pub mod table;

pub use pool::{PageId, PagePool, PoolExhausted};
pub use table::PageTable;

/// Tokens in a page; page `p` of a sequence holds positions `[64p, 64p + 64)`.
pub const PAGE_TOKENS: usize = 64;
