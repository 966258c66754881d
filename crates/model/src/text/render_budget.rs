//! The memory that one render of a template may create.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Bytes of one list entry, generously.
pub(super) const ENTRY_BYTES: u64 = 32;

/// Bytes that one render may still create.
pub(super) struct RenderBudget {
    left: AtomicU64,
    spent: AtomicBool,
}

impl RenderBudget {
    pub(super) fn new(input_bytes: usize) -> Arc<Self> {
        let left = (256_u64 << 20).saturating_add(64 * input_bytes as u64);
        Arc::new(Self { left: AtomicU64::new(left), spent: AtomicBool::new(false) })
    }

    pub(super) fn is_spent(&self) -> bool {
        self.spent.load(Ordering::Relaxed)
    }

    pub(super) fn charge(&self, bytes: u64) -> Result<(), Error> {
        let take = |left: u64| left.checked_sub(bytes);
        if self.left.try_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            self.spent.store(true, Ordering::Relaxed);
            return Err(Error::new(ErrorKind::InvalidOperation, "the template builds too much text"));
        }
        Ok(())
    }
}

/// Bytes in a value, nested containers included down to a small depth.
pub(super) fn deep_size(value: &Value, depth: usize) -> u64 {
    if let Some(text) = value.as_str() {
        return ENTRY_BYTES + text.len() as u64;
    }
    let Some(entries) = value.len() else { return ENTRY_BYTES };
    let mut size = ENTRY_BYTES * (1 + entries as u64);
    if depth < 4
        && entries <= 100_000
        && let Ok(items) = value.try_iter()
    {
        let is_map = value.kind() == ValueKind::Map;
        for item in items {
            size = size.saturating_add(deep_size(&item, depth + 1));
            if is_map && let Ok(entry) = value.get_item(&item) {
                size = size.saturating_add(deep_size(&entry, depth + 1));
            }
        }
    }
    size
}
