//! `seal.cu`: full bf16 pages to sealed pages, by the codec itself.

use oscar_codec::rule::clip_index;
use oscar_codec::{BandRows, CodeRows, PAGE_TOKENS, PageLayout, RowEncoder, Rule, Side};

use crate::call::Call;
use crate::memory::Fault;
use crate::pages::widened;

const COPIED: u32 = 0;
const NO_HISTORY: u32 = 2;
const NOT_CENTRED: u32 = u32::MAX;

/// The rule that a number stands for: its kind, and from bit 8 on the rank of the magnitude to clip at.
fn rule_of(bits: u32, head_dim: usize) -> Result<Rule, Fault> {
    match bits & 255 {
        0 => Ok(Rule::MIN_MAX),
        1 => {
            // Any ratio that clips at this rank.
            let ratios = (0..=1000).map(|thousandth| thousandth as f32 / 1000.0);
            let rank = (bits >> 8) as usize;
            let mut fit =
                ratios.filter(|&ratio| ratio > 0.0 && head_dim - clip_index(ratio, head_dim) == rank);
            fit.next().map(Rule::Clip).ok_or_else(|| format!("rows clipped at rank {rank}"))
        }
        2 => Ok(Rule::Gaussian),
        3 => Ok(Rule::Search),
        other => Err(format!("rule {other}")),
    }
}

/// How the rows of a side are sealed.
fn encoder(call: &Call<'_>, layout: PageLayout, bits: u32) -> Result<RowEncoder, Fault> {
    let rule = rule_of(bits, layout.head_dim())?;
    Ok(match layout {
        PageLayout::Bf16(layout) => RowEncoder::Bf16(layout),
        PageLayout::Fp8(layout) => RowEncoder::Fp8(layout),
        PageLayout::Codes(layout) => {
            RowEncoder::Codes(CodeRows { layout, rule, published: call.number("PUBLISHED")? != 0 })
        }
        PageLayout::Banded(layout) => RowEncoder::Banded(BandRows { layout, value_rule: rule }),
    })
}

pub(super) fn seal(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory, d) = (&call.arguments, call.memory, call.number("HEAD_DIM")?);
    let (exact, sealed) = (call.exact_pages()?, call.sealed_pages()?);
    let (kv_heads, layers_here) = (a.count("kv_heads")?, a.count("layers_here")?);
    for block in 0..call.grid[0] {
        let (head, rest) = (block % kv_heads, block / kv_heads);
        let layer = a.count("first_layer")? + rest % layers_here;
        let described = memory.read::<u32>(a.pointer("layers")? + (12 * layer) as u64, 3)?;
        if described[1] == NO_HISTORY {
            continue;
        }
        let slots = memory.read::<u32>(a.pointer("pages")? + (12 * (rest / layers_here)) as u64, 3)?;
        let (slot, exact_slots) = (slots[0] as usize, a.count("exact_slots")?);
        let source = if slot < exact_slots {
            let page = (slot * a.count("all_layers")? + layer) * kv_heads + head;
            a.pointer("exact")? + (page * exact.bytes()) as u64
        } else {
            a.pointer("scratch")? + (((slot - exact_slots) * kv_heads + head) * exact.bytes()) as u64
        };
        let rows = exact.rows(memory, source)?;
        if let Some(at) = rows.iter().flatten().position(|x| !x.is_finite()) {
            // The place of the first of all: blocks, sides, tokens, channels.
            let found = (block * 2 * PAGE_TOKENS * d + at) as u64;
            let failure = a.pointer("failure")?;
            memory.write(failure, &[memory.get::<u64>(failure)?.min(found)])?;
            continue;
        }
        let offset = (slots[1] as usize * a.count("sealed_stride")?) as u64 + u64::from(described[0]);
        let copied = described[1] == COPIED;
        let bytes = if copied { exact.bytes() } else { sealed.bytes() };
        // The address that slot 0 would have may lie before all memory.
        let target = a.pointer("sealed")?.wrapping_add(offset).wrapping_add((head * bytes) as u64);
        if copied {
            memory.copy(source, target, bytes)?;
            continue;
        }
        let mut mean = vec![0.0; d];
        if described[2] != NOT_CENTRED {
            let page = described[2] as usize * a.count("mean_pages")? + slots[2] as usize;
            let at = a.pointer("means")? + (2 * (page * kv_heads + head) * d) as u64;
            mean = widened(&memory.read::<u16>(at, d)?);
        }
        let layout = sealed.order.layout();
        let mut page = vec![0; layout.page_bytes()];
        for (index, side) in [Side::Key, Side::Value].into_iter().enumerate() {
            let rule = (layer * kv_heads + head) * 2 + index;
            let rule = memory.get::<u32>(a.pointer("rules")? + 4 * rule as u64)?;
            let encoder = encoder(call, layout, rule)?;
            for (token, row) in rows[index].chunks_exact(d).enumerate() {
                let mut row = row.to_vec();
                if side == Side::Key {
                    row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
                }
                encoder.write_token(&mut page, side, token, &row).map_err(|error| error.to_string())?;
            }
        }
        let page = sealed.order.from_cpu(&page).map_err(|error| error.to_string())?;
        memory.write(target, &page)?;
    }
    Ok(())
}
