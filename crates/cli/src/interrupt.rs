//! Ctrl-C: stops what is running once, ends the program the second time or when nothing is running.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static CAUGHT: AtomicBool = AtomicBool::new(false);
static WATCHERS: AtomicUsize = AtomicUsize::new(0);

/// While one of these exists, the first Ctrl-C only sets a flag.
#[derive(Debug)]
pub(crate) struct Watch(());

impl Watch {
    /// Starts watching with the flag down.
    pub(crate) fn new() -> Watch {
        install();
        CAUGHT.store(false, Ordering::SeqCst);
        WATCHERS.fetch_add(1, Ordering::SeqCst);
        Watch(())
    }

    /// Whether Ctrl-C was pressed since the watch began.
    pub(crate) fn caught(&self) -> bool {
        CAUGHT.load(Ordering::SeqCst)
    }

    /// Continue, unless Ctrl-C was pressed or the output could not be written.
    pub(crate) fn go_on(&self, written: &io::Result<()>) -> ControlFlow<()> {
        if self.caught() || written.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHERS.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(unix)]
#[allow(unsafe_code)]
extern "C" fn on_interrupt(_signal: libc::c_int) {
    if WATCHERS.load(Ordering::SeqCst) > 0 && !CAUGHT.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: `_exit` is one of the few functions a signal handler may call, and it does not return.
    unsafe { libc::_exit(130) }
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn install() {
    static INSTALLED: std::sync::Once = std::sync::Once::new();
    INSTALLED.call_once(|| {
        let handler: extern "C" fn(libc::c_int) = on_interrupt;
        // SAFETY: the handler touches only atomics and `_exit`, both allowed in a signal handler.
        unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
    });
}

/// Elsewhere Ctrl-C keeps its usual meaning: the program ends.
#[cfg(not(unix))]
fn install() {}
