//! Attention over bf16 pages.
