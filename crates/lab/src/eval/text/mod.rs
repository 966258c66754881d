//! Built-in text: seeded English-like prose for measurements when the user gives no text of their own.
//!
//! A haystack must be long, must not repeat, and must hold no number that could be mistaken for a needle; text for
//! distances between distributions must be predictable in part (names and things that come back) and surprising in
//! part. A small grammar gives both, and a measurement can be repeated from its seed alone.

mod prose;
mod seed;
mod words;

pub use prose::{Prose, prose};
pub use seed::mix;
