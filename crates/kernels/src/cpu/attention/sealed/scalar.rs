//! The reference: pages decoded by the definition of their format, then plain loops in `f64`.

use oscar_codec::{CodecError, PAGE_TOKENS, Side};

use crate::cpu::attention::scalar::attend_row;
use crate::cpu::attention::state::SoftmaxState;
use crate::cpu::attention::work::Work;
use crate::cpu::page_means::widen;

/// Attends all rows to all pages; `decode` reads one token of one side of a page.
pub(super) fn attend(
    work: &Work<'_, u8>,
    decode: impl Fn(&[u8], Side, usize, &mut [f32]) -> Result<(), CodecError>,
    state: &mut SoftmaxState,
) {
    let d = work.d;
    let (mut keys, mut values) = (vec![0.0; PAGE_TOKENS * d], vec![0.0; PAGE_TOKENS * d]);
    for (page, start) in work.visible_pages() {
        let mean = work.means.get(start / PAGE_TOKENS - work.first_page);
        for (side, rows) in [(Side::Key, &mut keys), (Side::Value, &mut values)] {
            for (token, row) in rows.chunks_exact_mut(d).enumerate() {
                decode(page, side, token, row).expect("pages have the size of their layout");
                if let Some(mean) = mean.filter(|_| side == Side::Key) {
                    row.iter_mut().zip(*mean).for_each(|(x, mean)| *x += widen(*mean));
                }
            }
        }
        for (row, span) in work.spans.iter().enumerate() {
            let key = |token: usize, channel: usize| f64::from(keys[token * d + channel]);
            let value = |token: usize, channel: usize| f64::from(values[token * d + channel]);
            attend_row(&work.q[row * d..][..d], span.in_page(start), key, value, row, state);
        }
    }
}
