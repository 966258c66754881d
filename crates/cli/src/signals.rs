//! Signals that stop a server.

use std::io;

use tokio::sync::watch;

/// How often the user has asked the server to stop.
pub(crate) struct Signals(watch::Receiver<usize>);

impl Signals {
    /// Watches from now on.
    pub(crate) fn new() -> io::Result<Signals> {
        let (sender, receiver) = watch::channel(0);
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                    sender.send_modify(|count| *count += 1);
                }
            });
        }
        #[cfg(not(unix))]
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Signals(receiver))
    }

    /// Done when a signal has come for the `n`-th time.
    pub(crate) fn nth(&self, n: usize) -> impl Future<Output = ()> + use<> {
        let mut count = self.0.clone();
        async move {
            if count.wait_for(|&count| count >= n).await.is_err() {
                std::future::pending::<()>().await;
            }
            if n == 1 {
                eprintln!("Stopping; answers in progress may end. Once more stops at once.");
            }
        }
    }
}
