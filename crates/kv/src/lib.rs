//! Who owns which page.
//!
//! Pure bookkeeping: token ids and page slots, no tensors. The bytes of a page live in a backend's pool under the same
//! slot number. A [`Ledger`] has three pools of reference-counted pages and a prefix tree; a [`Sequence`] is opened on
//! it, grows by [`Ledger::extend`] and [`Ledger::append`], gives the tree what it has computed by [`Ledger::insert`],
//! and is closed. The ledger says what is to be copied and sealed, and when; the caller has it done.
//!
//! ```
//! use oscar_kv::{HostPools, PrefillMode, Ledger, LedgerOptions, PageWindows, SealedPools, TailPolicy};
//!
//! let mut ledger = Ledger::new(LedgerOptions {
//!     windows: PageWindows { sink: 1, recent: 4 },
//!     exact_pages: 32,
//!     sealed: Some(SealedPools { pages: 64, high_pages: 0, scratch_pages: 32 }),
//!     prefix_tree: true,
//!     tail: TailPolicy::Recompute,
//!     host: HostPools::default(),
//! })?;
//! let prompt: Vec<u32> = (0..1000).collect();
//!
//! let mut sequence = ledger.open(0, &prompt);
//! let cached = sequence.cached_tokens();
//! let extension = ledger.extend(&mut sequence, &prompt[cached..], PrefillMode::Exact)?;
//! // ... copy `extension.copies`, compute the prompt, seal `extension.seal` ...
//! ledger.finish_extension(&mut sequence, extension);
//! let early = ledger.plan_insert(&mut sequence);
//! assert_eq!(early.len(), 4);
//! // ... seal `early` ...
//! ledger.insert(&sequence, false);
//!
//! let append = ledger.append(&mut sequence, 7)?;
//! // ... copy, seal, decode ...
//! ledger.finish_append(&mut sequence, append);
//!
//! // Who asks the same now computes the last, partly filled page only.
//! let second = ledger.open(0, &prompt);
//! assert_eq!(second.cached_tokens(), 960);
//! ledger.close(second);
//! ledger.close(sequence);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod audit;
mod block_hash;
mod counters;
mod demotion;
mod error;
mod extension;
mod host;
mod insertion;
mod kept;
mod key;
mod ledger;
mod pool;
mod pools;
mod restore;
mod reuse;
mod sequence;
mod stats;
mod tree;

pub use block_hash::BlockHash;
pub use error::{KvError, PoolKind, Shortage};
pub use extension::{Append, Extension, PrefillMode, SealWork};
pub use host::{HostPools, HostStats};
pub use kept::{KeptPage, KeptPrefix};
pub use key::{PrefixKey, Tier};
pub use ledger::{Ledger, LedgerOptions, PageNeed, PoolSlots, SealedPools};
pub use oscar_codec::{ExactSlot, HostCopy, HostSlot, PAGE_TOKENS, PageWindows, SealedSlot};
pub use reuse::TailPolicy;
pub use sequence::Sequence;
pub use stats::{LedgerStats, PageStates, PoolStats};
pub use tree::{CacheEvent, TreeEntry};
