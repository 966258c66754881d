//! Pages in the order of the card, which `page_order.rs` defines: where every element lies, and what rows of a page are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use oscar_codec::band::{half_range, scale as band_scale};
use oscar_codec::fp8::e4m3_to_f32;
use oscar_codec::{BandLayout, CodeLayout, Fp8Layout, KeyWidths, PAGE_TOKENS, PageLayout, ScaleType, Side};
use oscar_kernels::cuda::PageOrder;

use crate::call::Call;
use crate::memory::{Access, Fault};
use crate::source::Source;

/// The pages that kernels of a source read.
pub(crate) struct Pages {
    exact: Order,
    sealed: Option<Order>,
}

impl Pages {
    /// The pages that the macros of a source describe.
    pub(crate) fn of(source: &Source) -> Result<Pages, Fault> {
        let head_dim = count(source, "HEAD_DIM")?;
        let sealed = sealed_layout(source, head_dim)?.map(Order::new).transpose()?;
        Ok(Pages { exact: Order::new(PageLayout::bf16(head_dim))?, sealed })
    }

    /// bf16 pages.
    pub(crate) fn exact(&self) -> &Order {
        &self.exact
    }

    /// Sealed pages; bf16 where the source knows no format of them.
    pub(crate) fn sealed(&self) -> &Order {
        self.sealed.as_ref().unwrap_or(&self.exact)
    }
}

/// Pages of one format, with the place of every element.
#[derive(Clone)]
pub(crate) struct Order {
    pub(crate) order: PageOrder,
    places: Arc<Places>,
}

/// Where an element lies; no bits where it is not stored.
#[derive(Clone, Copy)]
struct Place {
    byte: u32,
    shift: u8,
    bits: u8,
}

/// The places of all elements and scales of a page, first those of keys, then those of values.
struct Places {
    /// `[token][channel]`.
    elements: [Vec<Place>; 2],
    /// `[token][group or band]`.
    scales: [Vec<u32>; 2],
}

const SIDES: [Side; 2] = [Side::Key, Side::Value];

impl Order {
    fn new(layout: PageLayout) -> Result<Order, Fault> {
        let order = PageOrder::new(layout).map_err(|error| error.to_string())?;
        let d = order.head_dim();
        let cells = || (0..PAGE_TOKENS).flat_map(|token| (0..d).map(move |channel| (token, channel)));
        let elements = SIDES.map(|side| {
            cells()
                .map(|(token, channel)| match order.element_bits(side, channel) {
                    0 => Place { byte: 0, shift: 0, bits: 0 },
                    bits => {
                        let (byte, shift) = order.element_position(side, token, channel);
                        Place { byte: byte as u32, shift: shift as u8, bits: bits as u8 }
                    }
                })
                .collect()
        });
        let scales = SIDES.map(|side| match (layout, side) {
            (PageLayout::Bf16(_), _) => Vec::new(),
            (PageLayout::Banded(bands), Side::Key) => (0..PAGE_TOKENS)
                .flat_map(|token| (0..bands.bands().len()).map(move |band| (token, band)))
                .map(|(token, band)| order.band_scale_position(token, band) as u32)
                .collect(),
            _ => (0..PAGE_TOKENS)
                .flat_map(|token| (0..order.groups()).map(move |group| (token, group)))
                .map(|(token, group)| order.scale_position(side, token, group) as u32)
                .collect(),
        });
        Ok(Order { order, places: Arc::new(Places { elements, scales }) })
    }

    /// Bytes of a page of one head.
    pub(crate) fn bytes(&self) -> usize {
        self.order.page_bytes()
    }

    /// Byte of an element of a bf16 page.
    pub(crate) fn byte(&self, side: Side, token: usize, channel: usize) -> Result<usize, Fault> {
        let place = self.places.elements[side as usize].get(token * self.order.head_dim() + channel);
        place.map(|place| place.byte as usize).ok_or_else(|| format!("token {token} of a page"))
    }

    /// The rows of a page: keys, then values, `[token][channel]`.
    pub(crate) fn rows(&self, memory: &Access, at: u64) -> Result<Arc<Rows>, Fault> {
        let page = memory.view::<u8>(at, self.bytes())?;
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let layout = self.order.layout();
        if let Some(known) = known.get(&at).filter(|known| known.layout == layout && known.page == page) {
            return Ok(known.rows.clone());
        }
        let d = self.order.head_dim();
        let rows = Arc::new(SIDES.map(|side| {
            let mut rows = Vec::with_capacity(PAGE_TOKENS * d);
            (0..PAGE_TOKENS).for_each(|token| self.add_row(page, side, token, &mut rows));
            rows
        }));
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(at, KnownPage { layout, page: page.to_vec(), rows: rows.clone() });
        Ok(rows)
    }

    fn add_row(&self, page: &[u8], side: Side, token: usize, rows: &mut Vec<f32>) {
        let d = self.order.head_dim();
        let places = &self.places.elements[side as usize][token * d..(token + 1) * d];
        let scales = &self.places.scales[side as usize];
        let scales = &scales[token * scales.len() / PAGE_TOKENS..(token + 1) * scales.len() / PAGE_TOKENS];
        let word = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
        let code = |place: &Place| {
            f32::from(page[place.byte as usize] >> place.shift & ((1_u16 << place.bits) - 1) as u8)
        };
        match (self.order.layout(), side) {
            (PageLayout::Bf16(_), _) => {
                rows.extend(places.iter().map(|place| bf16::from_bits(word(place.byte as usize)).to_f32()));
            }
            (PageLayout::Fp8(_), _) => {
                let scale = ScaleType::F16.to_f32(word(scales[0] as usize));
                rows.extend(places.iter().map(|place| e4m3_to_f32(page[place.byte as usize]) * scale));
            }
            (PageLayout::Banded(layout), Side::Key) => {
                let first = rows.len();
                rows.resize(first + d, 0.0);
                for (band, &at) in layout.bands().iter().zip(scales) {
                    let (scale, half) = (band_scale(page[at as usize]), half_range(band.bits));
                    for channel in band.range() {
                        rows[first + channel] = (code(&places[channel]) - half) * scale;
                    }
                }
            }
            (layout, _) => {
                let scale_type = match layout {
                    PageLayout::Codes(layout) => layout.scale_type(),
                    _ => ScaleType::F16,
                };
                for (places, &at) in places.chunks(d / scales.len()).zip(scales) {
                    let [scale, offset] = [0, 2].map(|part| scale_type.to_f32(word(at as usize + part)));
                    rows.extend(places.iter().map(|place| code(place) * scale - offset));
                }
            }
        }
    }
}

/// Keys and values of a page, `[token][channel]`.
pub(crate) type Rows = [Vec<f32>; 2];

/// A page whose rows are known, for as long as its bytes are the same: most pages of a sequence are read in every step.
struct KnownPage {
    layout: PageLayout,
    page: Vec<u8>,
    rows: Arc<Rows>,
}

/// Pages by their address.
static KNOWN: Mutex<BTreeMap<u64, KnownPage>> = Mutex::new(BTreeMap::new());

/// How many are remembered; 96 KB each at 128 channels.
const MOST_KNOWN: usize = 4096;

fn count(source: &Source, name: &str) -> Result<usize, Fault> {
    let number = source.number(name)?;
    usize::try_from(number).map_err(|_| format!("{name} is {number}"))
}

/// The mean keys of pages, `[page][KV head][channel]` in bf16, if the kernel was given some.
pub(crate) fn page_mean(
    call: &Call<'_>,
    page: usize,
    [kv_heads, head]: [usize; 2],
    head_dim: usize,
) -> Result<Option<Vec<f32>>, Fault> {
    let Some(means) = call.arguments.optional("means")? else { return Ok(None) };
    let at = means + (2 * (page * kv_heads + head) * head_dim) as u64;
    Ok(Some(widened(&call.memory.read::<u16>(at, head_dim)?)))
}

/// Numbers of bf16.
pub(crate) fn widened(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect()
}

/// The format of sealed pages that macros describe, if they describe one.
fn sealed_layout(source: &Source, head_dim: usize) -> Result<Option<PageLayout>, Fault> {
    let wrong = |error: oscar_codec::CodecError| error.to_string();
    // `seal.cu` calls them otherwise than those that read pages.
    let Ok(bits) = count(source, "SEALED_BITS").or_else(|_| count(source, "BITS")) else { return Ok(None) };
    let bands = [count(source, "BAND_UNITS")?, count(source, "BAND_BITS")?];
    Ok(match bits {
        0 | 16 => None,
        8 => Some(PageLayout::Fp8(Fp8Layout::new(head_dim).map_err(wrong)?)),
        _ if bands[0] != 0 => Some(PageLayout::Banded(band_layout(head_dim, bits, bands)?)),
        2 | 4 => {
            let layout = CodeLayout::new(bits as u32, head_dim, count(source, "GROUPS")?).map_err(wrong)?;
            let scales = if count(source, "SCALE_BF16")? != 0 { ScaleType::Bf16 } else { ScaleType::F16 };
            Some(PageLayout::Codes(layout.with_scales(scales)))
        }
        other => return Err(format!("pages of {other} bits")),
    })
}

/// The layout whose bands are those of two macros, a digit for each band.
fn band_layout(head_dim: usize, value_bits: usize, macros: [usize; 2]) -> Result<BandLayout, Fault> {
    let digits = |layout: &BandLayout| {
        let mut digits = [0, 0];
        for (index, band) in layout.bands().iter().enumerate() {
            digits[0] |= (band.channels / 16) << (4 * index);
            digits[1] |= (band.bits as usize) << (4 * index);
        }
        digits
    };
    let of_widths = KeyWidths::menu(head_dim).map(|widths| BandLayout::of_widths(head_dim, widths));
    let all = of_widths.chain([BandLayout::high(head_dim), BandLayout::int15(head_dim)]);
    let mut found = all.filter_map(Result::ok).filter(|layout| {
        digits(layout) == macros
            && layout.value_bits() as usize == value_bits
            && PageOrder::new(PageLayout::Banded(*layout)).is_ok()
    });
    found.next().ok_or_else(|| format!("bands of {:#x} sixteens and {:#x} bits", macros[0], macros[1]))
}
