//! A progress bar on a terminal, two lines in a log.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};

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
