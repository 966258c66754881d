//! The built program, from the outside.

mod bad_models;
mod bench;
mod bench_serve;
mod eval_report;
mod eval_served;
mod generate;
mod kv;
mod lab;
#[cfg(unix)]
mod pull;
mod serve;
mod support;
mod usage;
mod zoo;
