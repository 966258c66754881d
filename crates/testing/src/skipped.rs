//! What a test could not do on this machine.

use std::io::Write;

/// Says that a test, or a part of one, was left out for want of a model, a device or an instruction set.
///
/// The line goes to standard error past the test harness, which keeps what `println!` writes to itself unless the test fails.
/// `.ci/run` lists these lines at its end.
pub fn skipped(reason: &str) {
    // One write, so that lines of tests that run side by side do not mix. Who cannot write it has nobody to tell.
    let _ = std::io::stderr().write_all(format!("skipped: {reason}\n").as_bytes());
}
