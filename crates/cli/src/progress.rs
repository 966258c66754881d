//! Progress bars on a terminal, lines in a log.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oscar_model::source::Progress;

use crate::interrupt::Watch;
use crate::output::decimal_bytes;

/// Shows a download on stderr and stops it at the first Ctrl-C.
pub(crate) struct DownloadProgress {
    bar: ProgressBar,
    total: AtomicU64,
    terminal: bool,
    watch: Watch,
}

impl DownloadProgress {
    /// Shows nothing until a download starts.
    pub(crate) fn new() -> DownloadProgress {
        DownloadProgress {
            bar: ProgressBar::hidden(),
            total: AtomicU64::new(0),
            terminal: std::io::stderr().is_terminal(),
            watch: Watch::new(),
        }
    }
}

impl Progress for DownloadProgress {
    fn start(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        if self.terminal {
            let style = ProgressStyle::with_template(
                "{msg}  {wide_bar}  {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta}",
            );
            self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar.set_length(total);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn message(&self, text: &str) {
        let started = self.total.load(Ordering::Relaxed) > 0;
        if self.terminal && started {
            self.bar.set_message(text.to_owned());
        } else {
            eprintln!("{text}");
        }
    }

    fn finish(&self) {
        if self.terminal {
            self.bar.finish_and_clear();
        } else {
            eprintln!(
                "fetched {} of {}",
                decimal_bytes(self.bar.position()),
                decimal_bytes(self.total.load(Ordering::Relaxed))
            );
        }
    }

    fn cancelled(&self) -> bool {
        self.watch.caught()
    }
}

/// The progress of work in steps: a bar on a terminal, a line for each label in a log.
pub(crate) struct Steps {
    bar: ProgressBar,
    terminal: bool,
    label: String,
}

impl Steps {
    /// Shows `label` and how many of `total` steps are done.
    pub(crate) fn new(label: &str, total: usize) -> Steps {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(
            Some(total as u64),
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
        );
        let style = ProgressStyle::with_template("{msg}  {wide_bar}  {pos}/{len}  {elapsed}  {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(label.to_owned());
        if !terminal {
            eprintln!("{label}");
        }
        Steps { bar, terminal, label: label.to_owned() }
    }

    /// Shows that `done` steps are done.
    pub(crate) fn set(&self, done: usize) {
        self.bar.set_position(done as u64);
    }

    /// Shows another label; the same label again shows nothing.
    pub(crate) fn say(&mut self, label: &str) {
        if label == self.label {
            return;
        }
        self.label = label.to_owned();
        if self.terminal {
            self.bar.set_message(label.to_owned());
        } else {
            eprintln!("{label}");
        }
    }

    /// Removes the bar from the terminal.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// The progress of work that is over at once as a rule: nothing is shown before it has taken a while.
pub(crate) struct LateSteps {
    label: String,
    total: usize,
    begun: Instant,
    shown: Option<Steps>,
}

/// How long work goes on before its progress is shown.
const LATE: Duration = Duration::from_secs(1);

impl LateSteps {
    /// Begins to count `total` steps.
    pub(crate) fn new(label: &str, total: usize) -> LateSteps {
        LateSteps { label: label.to_owned(), total, begun: Instant::now(), shown: None }
    }

    /// Shows that `done` of all steps are done.
    pub(crate) fn set(&mut self, done: usize) {
        if self.shown.is_none() && done < self.total && self.begun.elapsed() >= LATE {
            self.shown = Some(Steps::new(&self.label, self.total));
        }
        if let Some(steps) = &self.shown {
            steps.set(done);
        }
    }

    /// Removes what is shown.
    pub(crate) fn finish(self) {
        if let Some(steps) = self.shown {
            steps.finish();
        }
    }
}
