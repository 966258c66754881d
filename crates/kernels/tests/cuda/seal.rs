//! Pages sealed on the card against the codec's definition, byte by byte.
//!
//! Rows are random and nasty, one kind per token: constant, zero of both signs, one outlier, smaller than the smallest
//! normal number, so large that sums overflow, far from zero, exactly between two codes, any bits at all. Sealed pools
//! begin as 0xff and are compared as a whole, so that nothing else may be written.

use std::sync::Arc;

use half::bf16;
use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, ExactSlot, HeadEncoder, HeadIndex, HeadTransform,
    KeyTurning, KeyWidths, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, PageMeans, RopeLayout, RowEncoder,
    Rule, ScaleType, SealedSlot, Side,
};
use oscar_kernels::backend::SealPage;
use oscar_kernels::cpu::attention::{page_elements, write_token};
use oscar_kernels::cpu::encode::{SealScratch, Sealer};
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cuda::reference::shuffled;
use oscar_kernels::cuda::seal::SealShape;
use oscar_kernels::cuda::{CudaError, Device, PageMeanTable, PageOrder, PageSealer, SealPools};
use oscar_random::Random;

const LAYERS: usize = 4;
const KV_HEADS: usize = 2;
/// The layer that is kept in bf16.
const KEPT: usize = 1;
const RULES: [Rule; 8] = [
    Rule::Search,
    Rule::Clip(0.96),
    Rule::Gaussian,
    Rule::MIN_MAX,
    Rule::Clip(0.5),
    Rule::Clip(1.0),
    Rule::Clip(0.001),
    Rule::Clip(0.92),
];
const EXACT_SLOTS: usize = 9;
const SCRATCH_SLOTS: usize = 3;
const SEALED_SLOTS: usize = 12;
/// The number of the first sealed slot, as where those of another codec come before.
const FIRST_SEALED: usize = 5;

/// Pages that a sequence may have: their means differ.
const SEQUENCE_PAGES: usize = 900;

/// Runs everything; the number of failures.
pub(crate) fn run(device: &Arc<Device>, quick: bool) -> usize {
    let (mut failures, mut pages) = (0, 0);
    for (index, (name, codec, portable)) in codecs(quick).into_iter().enumerate() {
        if !super::named(&name) {
            continue;
        }
        let codec = Arc::new(codec);
        let sealer = match PageSealer::with_shapes(device, &codec, |shape| SealShape { portable, ..shape }) {
            Ok(sealer) => sealer,
            Err(error) => {
                println!("FAILED seal {name}: {error}");
                failures += 1;
                continue;
            }
        };
        let (registers, spilled) = sealer.resources().unwrap();
        let mut pools = Pools::new(device, &codec, sealer, index as u64);
        let problems: Vec<String> = [pools.seals_like_the_codec(), pools.refuses_what_is_not_finite()]
            .into_iter()
            .flatten()
            .collect();
        for problem in &problems {
            println!("FAILED seal {name}: {problem}");
        }
        failures += problems.len();
        pages += pools.sealed_pages;
        println!("seal {name:44} ({registers} registers, {spilled} bytes spilled)");
    }
    failures += usize::from(!refuses_bad_lists(device));
    println!("cuda: {pages} pages sealed, each equal to the codec's bytes unless said above");
    failures
}

fn codecs(quick: bool) -> Vec<(String, PageCodec, bool)> {
    let mut codecs = Vec::new();
    for head_dim in [32, 64, 96, 128, 256] {
        if quick && !matches!(head_dim, 96 | 128) {
            continue;
        }
        let geometry = KvGeometry { layers: LAYERS, kv_heads: KV_HEADS, head_dim };
        let mut groups = vec![1, 2, head_dim / 32];
        groups.retain(|&groups| head_dim.is_multiple_of(32 * groups));
        groups.sort_unstable();
        groups.dedup();
        for (scale_type, published) in [
            (ScaleType::F16, false),
            (ScaleType::F16, true),
            (ScaleType::Bf16, false),
            (ScaleType::Bf16, true),
        ] {
            for &groups in &groups {
                if quick && (published || groups > 1) && head_dim == 128 {
                    continue;
                }
                let scales = if scale_type == ScaleType::Bf16 { " bf16 scales" } else { "" };
                let codes = if published { " published" } else { "" };
                let name = format!("int2 x{groups} d{head_dim}{scales}{codes}");
                let start = codecs.len();
                let rule = |index: usize| RULES[(index + start) % RULES.len()];
                let codec = int2(geometry, groups, scale_type, published, rule);
                let portable = (head_dim == 128 || head_dim == 96) && groups == 1;
                if portable {
                    codecs.push((format!("{name} portable"), codec.clone(), true));
                }
                codecs.push((name, codec, false));
            }
        }
        if head_dim >= 64 {
            let mut layouts = vec![("banded", BandLayout::int2(head_dim).unwrap())];
            layouts.push(("high", BandLayout::high(head_dim).unwrap()));
            if head_dim >= 128 {
                layouts.push(("int1.5", BandLayout::int15(head_dim).unwrap()));
            }
            let others = KeyWidths::menu(head_dim).filter(|&widths| widths != KeyWidths::default());
            let of = |widths| ("widths", BandLayout::of_widths(head_dim, widths).unwrap());
            layouts.extend(others.map(of));
            for (name, layout) in layouts {
                let start = codecs.len();
                let codec = banded(geometry, layout, |index| RULES[(index + start) % RULES.len()]);
                codecs.push((format!("{name} d{head_dim}"), codec, false));
                let codec = banded(geometry, layout, |_| Rule::Search);
                codecs.push((format!("{name} d{head_dim}, search alone"), codec, false));
                let codec = centred(banded(geometry, layout, |_| Rule::Search));
                codecs.push((format!("{name} d{head_dim}, centred by page"), codec, false));
            }
        }
        let int4 = PageCodec::int4(geometry, None).unwrap();
        codecs.push((format!("int4 d{head_dim}"), int4.clone(), false));
        let fp8 = PageCodec::fp8(geometry, None).unwrap();
        codecs.push((format!("fp8 d{head_dim}"), fp8.clone(), false));
        codecs.push((format!("fp8 d{head_dim} portable"), fp8.clone(), true));
        let all: Vec<usize> = (0..LAYERS).collect();
        codecs.push((format!("bf16 d{head_dim}"), fp8.keep_bf16(&all).unwrap(), false));
    }
    // Layers of different widths have a kernel each, beside one that is kept in bf16.
    for head_dim in [64, 128] {
        let geometry = KvGeometry { layers: LAYERS, kv_heads: KV_HEADS, head_dim };
        let menu: Vec<KeyWidths> = KeyWidths::menu(head_dim).collect();
        let layout = |layer: usize| BandLayout::of_widths(head_dim, menu[layer % menu.len()]).unwrap();
        let codec = banded_by_layer(geometry, layout, |index| RULES[index % RULES.len()]);
        codecs.push((format!("widths by layer d{head_dim}"), codec, false));
    }
    // One rule alone is another kernel.
    let geometry = KvGeometry { layers: LAYERS, kv_heads: KV_HEADS, head_dim: 128 };
    for rule in [Rule::MIN_MAX, Rule::Clip(0.96), Rule::Gaussian, Rule::Search] {
        let codec = int2(geometry, 1, ScaleType::F16, false, |_| rule);
        codecs.push((format!("int2 x1 d128, {rule} alone"), codec, false));
    }
    codecs
        .into_iter()
        .map(|(name, codec, portable)| (name, codec.keep_bf16(&[KEPT]).unwrap(), portable))
        .collect()
}

/// A codec with a rule per head and side. Pages hold rows that are rotated already, so rotations do not matter.
fn int2(
    geometry: KvGeometry,
    groups: usize,
    scale_type: ScaleType,
    published: bool,
    rule: impl Fn(usize) -> Rule,
) -> PageCodec {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let layout = CodeLayout::new(2, head_dim, groups).unwrap().with_scales(scale_type);
    let encoders = |side: usize| -> Vec<HeadEncoder> {
        (0..layers * kv_heads)
            // Both sides of a head differ, and each rule comes up on both.
            .map(|head| {
                let transform = HeadTransform::identity(head_dim);
                HeadEncoder::codes(transform, layout, rule(head + 3 * side), published)
            })
            .collect()
    };
    PageCodec::new("int2", geometry, encoders(0), encoders(1)).unwrap()
}

/// A codec with keys in bands, and a rule per head for values.
fn banded(geometry: KvGeometry, layout: BandLayout, rule: impl Fn(usize) -> Rule) -> PageCodec {
    banded_by_layer(geometry, |_| layout, rule)
}

/// The same with a layout for each layer.
fn banded_by_layer(
    geometry: KvGeometry,
    layout: impl Fn(usize) -> BandLayout,
    rule: impl Fn(usize) -> Rule,
) -> PageCodec {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let encoder = |head: usize| {
        let layout = layout(head / kv_heads);
        let rows = RowEncoder::Banded(BandRows { layout, value_rule: rule(head) });
        HeadEncoder { transform: HeadTransform::identity(head_dim), rows, page_means: None }
    };
    let encoders = || (0..layers * kv_heads).map(encoder).collect::<Vec<_>>();
    PageCodec::new("banded", geometry, encoders(), encoders()).unwrap()
}

/// The same with keys that are less the means of their pages, in all layers but the first.
fn centred(codec: PageCodec) -> PageCodec {
    let geometry = codec.geometry();
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let frequencies = (0..head_dim / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
    let turning = Arc::new(KeyTurning::new(frequencies, RopeLayout::Halves));
    let mut random = Random::new(41);
    let mut encoders = |side: Side| -> Vec<HeadEncoder> {
        let heads = (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| HeadIndex { layer, head }));
        let with_means = heads.map(|head| {
            let unturned: Vec<f32> = (0..head_dim).map(|_| 4.0 * random.signed()).collect();
            let means = PageMeans::new(&unturned, turning.clone()).unwrap();
            let page_means = (head.layer > 0 && side == Side::Key).then_some(means);
            HeadEncoder { page_means, ..codec.encoder(head, side).unwrap().clone() }
        });
        with_means.collect()
    };
    let (keys, values) = (encoders(Side::Key), encoders(Side::Value));
    PageCodec::new("centred", geometry, keys, values).unwrap()
}

/// Kinds of rows.
const KINDS: usize = 18;

/// One row of a kind.
fn row(kind: usize, d: usize, random: &mut Random) -> Vec<f32> {
    let gaussian = |random: &mut Random| (0..12).map(|_| random.signed()).sum::<f32>();
    let constant = 3.0 * random.signed();
    let outlier = random.below(d);
    let size = (20.0 * random.signed()).exp2();
    // Sixteens of channels of their own size, some of them of zeros.
    let sizes: Vec<f32> = (0..d.div_ceil(16))
        .map(|_| if random.below(5) == 0 { 0.0 } else { (40.0 * random.signed()).exp2() })
        .collect();
    (0..d)
        .map(|channel| match kind {
            0..=2 => gaussian(random),
            3 => constant,
            4 => {
                if random.signed() < 0.0 {
                    0.0
                } else {
                    -0.0
                }
            }
            5 => {
                if channel == outlier {
                    1e4
                } else {
                    0.1 * random.signed()
                }
            }
            6 => {
                f32::from_bits((random.below(128) as u32) << 16)
                    * if random.signed() < 0.0 { -1.0 } else { 1.0 }
            }
            7 => 3e38 * random.signed(),
            8 => 300.0 + gaussian(random),
            9 => random.below(7) as f32 / 2.0,
            10 => loop {
                let bits = random.below(65536) as u16;
                if bf16::from_bits(bits).is_finite() {
                    break bf16::from_bits(bits).to_f32();
                }
            },
            11 => {
                if random.signed() < 0.0 {
                    -1.5
                } else {
                    2.0
                }
            }
            12 => 1e-7 * gaussian(random),
            13 => 3e4 * gaussian(random),
            14 => sizes[channel / 16] * gaussian(random),
            // As above, but around the smallest numbers that have a square.
            15 => sizes[channel / 16] * 1e-22 * gaussian(random),
            16 => 1e18 * gaussian(random),
            _ => size * gaussian(random),
        })
        .collect()
}

struct Pools {
    device: Arc<Device>,
    codec: Arc<PageCodec>,
    sealer: PageSealer,
    /// CPU pages, `[slot][layer][head]`.
    exact: Vec<Vec<u16>>,
    /// `[slot][head]`.
    scratch: Vec<Vec<u16>>,
    sealed_pages: usize,
    means: Option<PageMeanTable>,
}

impl Pools {
    fn new(device: &Arc<Device>, codec: &Arc<PageCodec>, sealer: PageSealer, seed: u64) -> Pools {
        let d = codec.geometry().head_dim;
        let mut random = Random::new(seed + 100);
        let mut page = || {
            let mut page = vec![0; page_elements(d)];
            for token in 0..PAGE_TOKENS {
                let [key, value] = [0, 1].map(|_| row(random.below(KINDS), d, &mut random));
                write_token(&mut page, d, token, &key, &value);
            }
            page
        };
        let exact = (0..EXACT_SLOTS * LAYERS * KV_HEADS).map(|_| page()).collect();
        let scratch = (0..SCRATCH_SLOTS * KV_HEADS).map(|_| page()).collect();
        let means = PageMeanTable::new(device, codec, SEQUENCE_PAGES).unwrap();
        Pools { device: device.clone(), codec: codec.clone(), sealer, exact, scratch, sealed_pages: 0, means }
    }

    fn source(&self, slot: ExactSlot, head: HeadIndex) -> &Vec<u16> {
        match slot.index().checked_sub(EXACT_SLOTS) {
            Some(slot) => &self.scratch[slot * KV_HEADS + head.head],
            None => &self.exact[(slot.index() * LAYERS + head.layer) * KV_HEADS + head.head],
        }
    }

    /// The sealed pool as the definition writes it, and the first error.
    fn expected(
        &self,
        pages: &[SealPage],
        layers: std::ops::Range<usize>,
    ) -> (Vec<u8>, Option<(usize, HeadIndex, CodecError)>) {
        let codec = &self.codec;
        let mut pool = vec![0xff_u8; SEALED_SLOTS * codec.page_bytes()];
        let reference = Sealer::new(Isa::Scalar, codec.clone());
        let mut failure = None;
        for (index, page) in pages.iter().enumerate() {
            for head in
                layers.clone().flat_map(|layer| (0..KV_HEADS).map(move |head| HeadIndex { layer, head }))
            {
                let mut bytes = vec![0; codec.head_bytes(head.layer)];
                let mean = reference.page_mean(head, page.page, &mut SealScratch::default());
                let sealed = reference.seal(
                    head,
                    mean.as_deref(),
                    self.source(page.exact, head),
                    &mut bytes,
                    &mut SealScratch::default(),
                );
                if let Err(error) = sealed {
                    failure.get_or_insert((index, head, error));
                    continue;
                }
                let format = codec.layout(head.layer);
                let order = PageOrder::new(format).unwrap();
                let at = page.sealed.index() * codec.page_bytes() + codec.head_range(head).unwrap().start;
                pool[at..at + bytes.len()].copy_from_slice(&order.from_cpu(&bytes).unwrap());
            }
        }
        (pool, failure)
    }

    /// The sealed pool as the card writes it.
    fn run(&mut self, pages: &[SealPage], layers: std::ops::Range<usize>) -> Vec<u8> {
        let d = self.codec.geometry().head_dim;
        let order = PageOrder::new(PageLayout::bf16(d)).unwrap();
        let upload = |pages: &[Vec<u16>]| {
            let bytes = |page: &Vec<u16>| page.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let pool: Vec<u8> = pages.iter().flat_map(|page| order.from_cpu(&bytes(page)).unwrap()).collect();
            self.device.stream().clone_htod(&pool).unwrap()
        };
        let (exact, scratch) = (upload(&self.exact), upload(&self.scratch));
        let stream = self.device.stream().clone();
        let mut sealed = stream.clone_htod(&vec![0xff_u8; SEALED_SLOTS * self.codec.page_bytes()]).unwrap();
        let moved =
            |page: &SealPage| seal_page(page.exact.number(), page.sealed.number() + FIRST_SEALED as u32);
        let list = self.sealer.list(&pages.iter().map(moved).collect::<Vec<_>>()).unwrap();
        let first_sealed = FIRST_SEALED;
        let pools = SealPools {
            exact: &exact,
            scratch: Some(&scratch),
            sealed: &mut sealed,
            first_sealed,
            page_means: self.means.as_ref(),
        };
        self.sealer.launch(&list, layers, EXACT_SLOTS, pools).unwrap();
        let got = stream.clone_dtoh(&sealed).unwrap();
        self.device.synchronise().unwrap();
        got
    }

    fn seals_like_the_codec(&mut self) -> Vec<String> {
        let mut random = Random::new(5);
        let mut targets = shuffled(SEALED_SLOTS - 1, &mut random).into_iter().map(|slot| slot + 1);
        let mut to = |exact: usize| seal_page(exact as u32, targets.next().unwrap());
        let some: Vec<SealPage> = [3, 1, EXACT_SLOTS - 1, 6].map(&mut to).to_vec();
        let scratch: Vec<SealPage> = [EXACT_SLOTS, EXACT_SLOTS + SCRATCH_SLOTS - 1, 2].map(&mut to).to_vec();
        let mut problems = Vec::new();
        for (pages, layers) in [(&some, 0..LAYERS), (&some, 1..3), (&scratch, 2..3), (&vec![], 0..LAYERS)] {
            let (expected, failure) = self.expected(pages, layers.clone());
            assert_eq!(failure, None, "all rows are finite");
            let got = self.run(pages, layers.clone());
            self.sealed_pages += pages.len() * layers.len() * KV_HEADS;
            let found = self.sealer.failure(layers.clone()).unwrap();
            if found.is_some() {
                problems.push(format!("{found:?} though all rows are finite"));
            }
            problems
                .extend(self.difference(&expected, &got).map(|text| format!("layers {layers:?}: {text}")));
        }
        problems
    }

    fn refuses_what_is_not_finite(&mut self) -> Vec<String> {
        let d = self.codec.geometry().head_dim;
        let (pages, layers) = ([seal_page(4, 7), seal_page(5, 2)], 0..LAYERS);
        let mut problems = Vec::new();
        for (side, token, channel, bad) in [
            (Side::Value, 41, d - 1, f32::NAN),
            (Side::Key, 63, 0, f32::INFINITY),
            (Side::Value, 0, 9, f32::NEG_INFINITY),
            (Side::Key, 7, 17, f32::NAN),
        ] {
            // The second page, in a layer that is encoded and in one that is copied.
            for layer in [2, KEPT] {
                let index = (5 * LAYERS + layer) * KV_HEADS + 1;
                let clean = self.exact[index].clone();
                let (mut key, mut value) = (vec![1.0; d], vec![2.0; d]);
                let row = if side == Side::Key { &mut key } else { &mut value };
                // The first of two is the one that is named.
                row[channel] = bad;
                row[d - 1] = bad;
                write_token(&mut self.exact[index], d, token, &key, &value);
                let (expected, failure) = self.expected(&pages, layers.clone());
                let got = self.run(&pages, layers.clone());
                self.exact[index] = clean;
                problems.extend(self.difference(&expected, &got));
                let found = self.sealer.failure(layers.clone()).unwrap();
                let named = found.map(|found| {
                    let head = HeadIndex { layer: found.layer, head: found.head };
                    (found.page, head, CodecError::NotFinite { row: found.token, channel: found.channel })
                });
                if failure.is_none() || named != failure || found.is_none_or(|found| found.side != side) {
                    problems.push(format!("{found:?} instead of {failure:?}, {side:?}"));
                }
                if self.sealer.failure(layers.clone()).unwrap().is_some() {
                    problems.push("a failure is remembered".into());
                }
            }
        }
        problems
    }

    /// Where and how often pools differ.
    fn difference(&self, expected: &[u8], got: &[u8]) -> Option<String> {
        let wrong = |at: &usize| expected[*at] != got[*at];
        let first = (0..expected.len()).find(wrong)?;
        let count = (0..expected.len()).filter(wrong).count();
        let (slot, at) = (first / self.codec.page_bytes(), first % self.codec.page_bytes());
        let head = (0..LAYERS)
            .flat_map(|layer| (0..KV_HEADS).map(move |head| HeadIndex { layer, head }))
            .find(|&head| self.codec.head_range(head).unwrap().contains(&at))
            .unwrap();
        let byte = at - self.codec.head_range(head).unwrap().start;
        let rules = [Side::Key, Side::Value].map(|side| self.codec.encoder(head, side).unwrap().rows);
        Some(format!(
            "{count} bytes differ, first in slot {slot}, {head:?} ({:?} and {:?}), byte {byte} of {}: {:#x} instead of {:#x}",
            rules[0],
            rules[1],
            self.codec.head_bytes(head.layer),
            got[first],
            expected[first]
        ))
    }
}

fn seal_page(exact: u32, sealed: u32) -> SealPage {
    // Any number in a sequence.
    let page = exact as usize * 97 % SEQUENCE_PAGES;
    SealPage { page, exact: ExactSlot::new(exact).unwrap(), sealed: SealedSlot::new(sealed).unwrap() }
}

/// Slots that do not exist, and a target twice, are refused before anything is launched.
fn refuses_bad_lists(device: &Arc<Device>) -> bool {
    let geometry = KvGeometry { layers: LAYERS, kv_heads: KV_HEADS, head_dim: 64 };
    let codec = PageCodec::fp8(geometry, None).unwrap();
    let mut sealer = PageSealer::new(device, &codec).unwrap();
    let exact = device.zeroed(EXACT_SLOTS * geometry.page_bytes(geometry.bf16())).unwrap();
    let mut sealed = device.zeroed(SEALED_SLOTS * codec.page_bytes()).unwrap();
    let mut attempt = |exact_slot: u32, sealed_slot: u32, layers: std::ops::Range<usize>| {
        let list = sealer.list(&[seal_page(exact_slot, sealed_slot)])?;
        let first_sealed = FIRST_SEALED;
        let pools =
            SealPools { exact: &exact, scratch: None, sealed: &mut sealed, first_sealed, page_means: None };
        sealer.launch(&list, layers, EXACT_SLOTS, pools)
    };
    let outside = |result| matches!(result, Err(CudaError::PageOutOfRange { .. }));
    let first = FIRST_SEALED as u32;
    let mut right = attempt(1, first, 0..LAYERS).is_ok()
        && outside(attempt(EXACT_SLOTS as u32, first, 0..1))
        && outside(attempt(1, first - 1, 0..1))
        && outside(attempt(1, first + SEALED_SLOTS as u32, 0..1))
        && matches!(attempt(1, first, 0..LAYERS + 1), Err(CudaError::Shape { .. }));
    let twice = [seal_page(1, 3), seal_page(2, 3)];
    right &= matches!(sealer.list(&twice), Err(CudaError::PageWrittenTwice { slot: 3 }));
    if !right {
        println!("FAILED seal: a list of pages that cannot be sealed was not refused");
    }
    right
}
