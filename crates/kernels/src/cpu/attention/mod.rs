//! Attention over pages: softmax of `q · k`, weighted sum of `v`, page by page.
//!
//! Rows are (token, query head) pairs that share one KV head, so a page is read once for all of them: decoding has
//! one row per head of the group, prefill several tokens' worth. Softmax runs online, in the way of flash
//! attention, and its state can be merged with that of other pages.
//!
//! | module | job |
//! |---|---|
//! | [`page`] | order of the elements inside a bf16 page |
//! | `work` | what a call is about: rows, what they see, pages |
//! | `state` | running softmax and its merge |
//! | `scratch` | buffers of a thread |
//! | `bf16` | attention over bf16 pages: the choice of a kernel |
//! | `floats` | products and softmax in `f32` |
//! | `amx` | products in tiles of split bf16 |
//! | `scalar` | the reference |
//! | [`sealed`] | the same over sealed pages |

#[cfg(target_arch = "x86_64")]
mod amx;
mod bf16;
mod floats;
pub mod page;
mod scalar;
mod scratch;
pub mod sealed;
mod state;
#[cfg(test)]
pub(super) mod tests;
mod work;

pub use bf16::attend;
pub use page::{page_elements, prefetch_side, read_token, write_side, write_token};
pub use scratch::AttentionScratch;
pub use state::SoftmaxState;
pub use work::Span;
