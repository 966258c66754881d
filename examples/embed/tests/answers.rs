//! The example answers with a 2-bit cache, and stays short enough to read at a glance.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use oscar_model::source::{FetchPolicy, Silent, resolve};

#[test]
fn the_example_has_at_most_forty_lines() {
    assert!(include_str!("../src/main.rs").lines().count() <= 40);
}

#[test]
fn a_question_is_answered_from_a_2_bit_cache() {
    if resolve("smollm2", FetchPolicy::Never, &Silent).is_err() {
        oscar_testing::skipped("smollm2 is not in the cache directory; `oscar pull smollm2` fetches it");
        return;
    }
    let run = Command::new(env!("CARGO_BIN_EXE_embed"))
        .args(["smollm2", "What is the capital of France? Answer in one word."])
        .output()
        .unwrap();
    let (answer, log) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{log}");
    assert!(log.contains("cache: int2, encoder band, rotations smollm2"), "{log}");
    assert!(answer.contains("Paris"), "{answer}");
}
