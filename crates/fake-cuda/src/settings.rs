//! The card that there is, and faults that a test asks for.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Bytes of the card: `OSCAR_FAKE_CUDA_MEMORY` in megabytes, or 4 GB.
pub(crate) fn memory_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let megabytes = variable("OSCAR_FAKE_CUDA_MEMORY").and_then(|text| text.parse::<usize>().ok());
        megabytes.unwrap_or(4096).saturating_mul(1 << 20)
    })
}

/// Major and minor compute capability: `OSCAR_FAKE_CUDA_CAPABILITY`, such as `8.0`, or 9.0.
pub(crate) fn capability() -> (i32, i32) {
    static CAPABILITY: OnceLock<(i32, i32)> = OnceLock::new();
    *CAPABILITY.get_or_init(|| {
        let text = variable("OSCAR_FAKE_CUDA_CAPABILITY").unwrap_or_default();
        let parsed =
            text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        parsed.unwrap_or((9, 0))
    })
}

/// A launch that fails: `OSCAR_FAKE_CUDA_FAIL` is `KERNEL:COUNT`. The launch of that number, counted from one, ends with
/// `CUDA_ERROR_LAUNCH_FAILED` when it runs, and so does everything after it on its stream.
struct AskedFault {
    kernel: String,
    left: AtomicUsize,
}

/// Whether this run of a kernel has to fail.
pub(crate) fn must_fail(kernel: &str) -> bool {
    static ASKED: OnceLock<Option<AskedFault>> = OnceLock::new();
    let asked = ASKED.get_or_init(|| {
        let text = variable("OSCAR_FAKE_CUDA_FAIL")?;
        let (kernel, count) = text.split_once(':')?;
        Some(AskedFault { kernel: kernel.to_owned(), left: AtomicUsize::new(count.parse().ok()?) })
    });
    let fault = asked.as_ref().filter(|fault| fault.kernel == kernel);
    fault.is_some_and(|fault| fault.left.fetch_sub(1, Ordering::Relaxed) == 1)
}
