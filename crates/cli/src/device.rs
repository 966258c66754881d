//! The one place that chooses a device. Everything else is generic over `Backend`, or takes [`Device`].

use oscar_kernels::KernelError;
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;

/// The device that commands run on.
pub(crate) type Device = CpuBackend;

/// Opens the device with as many worker threads as were asked for, or as many as there are cores. `deterministic` gives
/// a row the same bits in batches of every size.
pub(crate) fn open(threads: Option<usize>, deterministic: bool) -> Result<Device, KernelError> {
    let used = worker_threads(threads);
    if let Some(threads) = threads.filter(|&threads| threads > used) {
        tracing::warn!("--threads {threads}: using {used}, as many as this machine has");
    }
    let backend = CpuBackend::new(used)?;
    Ok(if deterministic { backend.deterministic() } else { backend })
}

/// Worker threads that are used when so many were asked for. They wait for each other by spinning, so more of them than
/// cores would only take turns.
pub(crate) fn worker_threads(asked: Option<usize>) -> usize {
    let most = Pool::default_threads();
    asked.unwrap_or(most).min(most)
}
