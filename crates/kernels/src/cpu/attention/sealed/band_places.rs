//! Where the bands of keys lie in a page, found once for all pages of a call.

use oscar_codec::layout::banded::MOST_BANDS;
use oscar_codec::layout::widths::BAND_STEP;
use oscar_codec::{BandLayout, PAGE_TOKENS};

/// Channels that a register multiplies in each of its lanes.
pub(super) const QUAD: usize = 4;

/// Where a band lies in a page and in the bytes of queries.
#[derive(Clone, Copy, Default)]
pub(super) struct BandPlace {
    pub(super) bits: u32,
    /// First byte of the words of the band's region.
    pub(super) words: usize,
    /// The first step of 16 channels in the region, and how many the band has.
    pub(super) step: usize,
    pub(super) steps: usize,
    /// The first quad of channels.
    pub(super) quad: usize,
    /// First byte of the scales.
    pub(super) scales: usize,
}

/// The bands of keys, found once for all pages of a call. Kernels read at these places without looking again, so nothing but
/// [`BandPlaces::new`] makes them, which checks that they are inside of a page.
#[derive(Clone, Copy, Default)]
pub(super) struct BandPlaces {
    places: [BandPlace; MOST_BANDS],
    count: usize,
    /// Bytes of a page, and quads of a row, that these places are inside of.
    page_bytes: usize,
    quads: usize,
}

impl BandPlaces {
    pub(super) fn new(layout: &BandLayout) -> BandPlaces {
        let mut all = BandPlaces { page_bytes: layout.page_bytes(), ..BandPlaces::default() };
        for (index, band) in layout.bands().iter().enumerate() {
            let end = band.first + band.channels;
            let place = BandPlace {
                bits: band.bits,
                words: 4 * band.region_word * PAGE_TOKENS,
                step: (band.first - band.region) / BAND_STEP,
                steps: band.channels / BAND_STEP,
                quad: band.first / QUAD,
                scales: layout.key_scales() + index * PAGE_TOKENS,
            };
            let words = ((end - band.region) * band.bits as usize).div_ceil(32);
            assert!(place.words + 4 * words * PAGE_TOKENS <= all.page_bytes);
            assert!(place.scales + PAGE_TOKENS <= all.page_bytes && matches!(band.bits, 1 | 2 | 4));
            all.places[index] = place;
            all.count = index + 1;
            all.quads = all.quads.max(end / QUAD);
        }
        all
    }

    /// The places of all bands, in order.
    #[inline(always)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &BandPlace> {
        self.places.iter().take(self.count)
    }

    /// How many bands there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The bytes that every page has at least.
    #[inline(always)]
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// The quads that every row has at least.
    #[inline(always)]
    pub(super) fn quads(&self) -> usize {
        self.quads
    }
}
