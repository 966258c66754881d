//! Who owns which page.
//!
//! Pure bookkeeping: token ids and page slots, no tensors. The bytes of a page live in a backend's pool under the same
//! slot number. A [`Ledger`] has three pools of reference-counted pages and a prefix tree; a [`Sequence`] is opened on
//! it, grows by [`Ledger::extend`] and [`Ledger::append`], gives the tree what it has computed by [`Ledger::insert`],
//! and is closed. The ledger says what is to be copied and sealed, and when; the caller has it done.

mod audit;
pub mod block_hash;
pub mod error;
pub mod extension;
mod insertion;
pub mod ledger;
pub mod pool;
mod pools;
pub mod reuse;
pub mod sequence;
pub mod stats;
pub mod table;
pub mod tree;

pub use block_hash::BlockHash;
pub use error::{KvError, PoolKind, Shortage};
pub use extension::{Append, Extend, Extension, SealWork};
pub use ledger::{Ledger, LedgerOptions, PoolSlots, SealedPools};
pub use oscar_codec::{PAGE_TOKENS, PageWindows};
pub use pool::{ExactPage, PageId, PagePool, PageSlot, PoolExhausted, ScratchPage, SealedPage};
pub use reuse::TailPolicy;
pub use sequence::Sequence;
pub use stats::{LedgerStats, PageStates, PoolStats};
pub use table::PageTable;
pub use tree::TreeEntry;
