//! Codecs and pages, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod baselines;
mod golden_pages;
mod page_codec;
mod pages;
mod quantiser;
mod quartered;
mod support;
