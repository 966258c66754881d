//! The whole engine but its thread, on a device that hashes, with everything random: arrivals, cancellations, prefixes in
//! common, pools far below the need, faults of the device, and its loss.
//!
//! Every answer that ends must be the one that the request gets alone from an engine with memory to spare, and every answer
//! that is broken off must be the beginning of it. After every episode nothing is held by anybody.
//!
//! A failure names the seed of its episode. `OSCAR_SIMULATION_SEED=<seed>` replays that episode alone, and
//! `OSCAR_SIMULATION_STEPS=<count>` sets how many turns are run in all.

mod client;
mod episode;
mod reference;
mod workload;

use std::time::Instant;

use episode::{Episode, Totals};

/// Turns of the engine that one run of the test takes.
const STEPS: u64 = 200_000;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

#[test]
fn every_answer_is_the_one_a_request_gets_alone() {
    if let Some(seed) = variable("OSCAR_SIMULATION_SEED") {
        let totals = Episode::new(seed).run();
        println!("{totals:#?}");
        return;
    }
    let begun = Instant::now();
    let steps = variable("OSCAR_SIMULATION_STEPS").unwrap_or(STEPS);
    let mut totals = Totals::default();
    let mut seed = 0;
    while totals.turns < steps {
        let episode = std::panic::catch_unwind(|| Episode::new(seed).run());
        let Ok(one) = episode else {
            panic!("episode {seed} failed: OSCAR_SIMULATION_SEED={seed} replays it");
        };
        totals.add(&one);
        seed += 1;
    }
    println!("{seed} episodes in {:.1} s: {totals:#?}", begun.elapsed().as_secs_f64());
    // What did not happen was not tested.
    for (what, count) in totals.counts() {
        assert!(count > 0, "{what}: never in {} turns", totals.turns);
    }
}
