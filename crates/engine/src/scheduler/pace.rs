//! How much of a long prompt is computed between two tokens of running answers.
//!
//! A long prompt is computed in pieces: chunks of it through one layer or a few. Between two decode steps come as many layers as
//! take about as long as such a step, and at least one: answers are at most some two times slower while a prompt is read, and
//! prompts are read at half speed or more. A device may still be busy with pieces when a turn ends, so it is turns that are
//! timed, not pieces.

use std::time::Instant;

/// Turns after which the time of a decode step alone is measured again: answers come, go and grow.
const MEASURED_AGAIN: usize = 256;
/// Weight of a new measurement.
const NEW: f64 = 0.25;

/// What is known of the times of turns.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// When the last turn began.
    began: Option<Instant>,
    /// Rows times layers of long prompts in the last two turns, the latest first; `None` for a turn without running answers.
    done: [Option<usize>; 2],
    /// Seconds of a turn without any.
    idle: Option<f64>,
    /// Seconds that a row of a layer adds.
    row: Option<f64>,
    /// Turns since `idle` was measured.
    age: usize,
}

impl Pace {
    /// A turn begins at `now`, beside running answers or not; in the one before, `done` rows times layers of long prompts were
    /// computed. Returns how many may be computed in this one, in pieces of `chunk_rows`.
    pub(crate) fn turn(&mut self, now: Instant, running: bool, done: usize, chunk_rows: usize) -> usize {
        let seconds = self.began.replace(now).map(|began| (now - began).as_secs_f64());
        self.done[0] = self.done[0].map(|_| done);
        self.age += 1;
        match (seconds, self.done) {
            (Some(seconds), [Some(0), Some(0)]) => {
                self.idle = Some(mixed(self.idle, seconds));
                self.age = 0;
            }
            (Some(seconds), [Some(last), Some(before)]) if last == before => {
                let added = (seconds - self.idle.unwrap_or(0.0)).max(0.0) / last as f64;
                self.row = Some(mixed(self.row, added));
            }
            _ => {}
        }
        self.done = [running.then_some(0), self.done[0]];
        if !running {
            return usize::MAX;
        }
        let waits = self.age > MEASURED_AGAIN;
        let (Some(idle), Some(row)) = (self.idle, self.row) else {
            return if waits { 0 } else { 1 };
        };
        // A piece that takes a little longer than what is left of the time is welcome.
        let pieces = idle / (row.max(1e-12) * chunk_rows.max(1) as f64) + 0.1;
        match (waits, pieces as usize) {
            (true, _) => 0,
            (false, 0 | 1) => 1,
            // The last piece begins with something left.
            (false, pieces) => (pieces - 1) * chunk_rows + 1,
        }
    }
}

fn mixed(old: Option<f64>, new: f64) -> f64 {
    old.map_or(new, |old| old + NEW * (new - old))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A device whose decode steps take `decode` ms and whose pieces of 512 rows take `piece` ms.
    struct Device {
        decode: u64,
        piece: u64,
        now: Instant,
        pending: usize,
    }

    impl Device {
        /// Pieces of one turn. Pieces of the turn before are waited for in this one.
        fn turn(&mut self, pace: &mut Pace, wanted: bool) -> usize {
            let allowed = pace.turn(self.now, true, self.pending * 512, 512);
            self.now += Duration::from_millis(self.decode + self.piece * self.pending as u64);
            self.pending = if wanted { allowed.div_ceil(512).min(30) } else { 0 };
            self.pending
        }
    }

    #[test]
    fn pieces_take_as_long_as_a_decode_step() {
        for (decode, piece, expected) in [(40, 10, 4), (40, 15, 2), (40, 35, 1), (10, 100, 1), (100, 1, 30)] {
            let mut pace = Pace::default();
            let mut device = Device { decode, piece, now: Instant::now(), pending: 0 };
            for _ in 0..20 {
                assert_eq!(device.turn(&mut pace, false), 0);
            }
            let pieces: Vec<usize> = (0..60).map(|_| device.turn(&mut pace, true)).collect();
            assert_eq!(pieces[0], 1);
            assert_eq!(*pieces.last().unwrap(), expected, "{decode} {piece}: {pieces:?}");
            assert!(pieces.iter().all(|&pieces| pieces >= 1));
        }
    }

    #[test]
    fn a_prompt_that_was_there_first_makes_room_for_a_measurement() {
        let mut pace = Pace::default();
        let mut device = Device { decode: 40, piece: 10, now: Instant::now(), pending: 0 };
        let pieces: Vec<usize> = (0..400).map(|_| device.turn(&mut pace, true)).collect();
        assert!(
            pieces.contains(&0) && pieces.iter().filter(|&&pieces| pieces == 0).count() < 6,
            "{pieces:?}"
        );
        assert_eq!(*pieces.last().unwrap(), 4);
    }

    #[test]
    fn nobody_waits_where_no_answer_runs() {
        let mut pace = Pace::default();
        let now = Instant::now();
        for turn in 0..10 {
            assert_eq!(pace.turn(now + Duration::from_millis(turn), false, 512, 512), usize::MAX);
        }
    }
}
