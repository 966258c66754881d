//! Attention of a prompt on a GPU: rows at the end of a context, with the sealed prefix before them and bf16 pages of their
//! own, in operations per second.

use std::path::PathBuf;
use std::sync::Arc;

use oscar_codec::{CodecError, ExactSlot, PAGE_TOKENS, PageLayout, SealedSlot};
use oscar_kernels::cuda::reference::shuffled;
use oscar_kernels::cuda::{
    CudaError, DecodeShape, Device, PageOrder, PoolView, PrefillAttention, PrefillPools, PrefillSequence,
};
use oscar_random::Random;
use serde::Serialize;

use super::attention::CudaBenchError;
use super::decode::{SAMPLES, SamplePages, relative_error, replay};
use super::page_means::CentredPages;
use crate::formats::PageFormat;

/// A measurement of attention of prompts on a card.
#[derive(Clone, Debug)]
pub struct CudaPrefillBench {
    /// Index of the card.
    pub card: usize,
    /// Folder of compiled kernels, which are compiled anew without one.
    pub kernels: Option<PathBuf>,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// The number of KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of channels with a scale of their own, in formats that have groups.
    pub groups: usize,
    /// Tokens of a prompt that are computed at once, the last ones of the context.
    pub prompt_tokens: usize,
    /// Numbers of tokens in all.
    pub contexts: Vec<usize>,
    /// Formats of the pages before the prompt.
    pub formats: Vec<PageFormat>,
    /// Tokens read in bf16 at the start, in whole pages.
    pub sink_tokens: usize,
    /// The number of passes that are timed.
    pub repeat: usize,
}

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CudaPrefillRow {
    kind: &'static str,
    card: String,
    /// Version of the CUDA interface of the driver.
    cuda: i32,
    /// The format of the pages before the prompt.
    pub kv: &'static str,
    prompt_tokens: usize,
    context: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Microseconds of a layer, median.
    us_per_layer: f64,
    /// Microseconds of a layer of the fastest pass.
    fastest_us: f64,
    /// Multiplications and additions per second, of tokens that are seen.
    tflop_per_s: f64,
    /// Speed over that of a bf16 prefix of the same context, if that is measured.
    of_bf16: Option<f64>,
    /// Norm of the difference to f64 over the norm of the result, for the first and the last row of one head.
    error: f64,
}

/// Measures; `on_row` is called after each row.
pub fn run(bench: &CudaPrefillBench, mut on_row: impl FnMut(&CudaPrefillRow)) -> Result<(), CudaBenchError> {
    let CudaPrefillBench { q_heads, kv_heads, head_dim, groups, .. } = *bench;
    if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        return Err(CudaBenchError::Heads { q_heads, kv_heads });
    }
    let formats: Vec<(PageFormat, PageLayout)> = bench
        .formats
        .iter()
        .map(|&format| Ok((format, format.layout(head_dim, groups)?)))
        .collect::<Result<_, CodecError>>()?;
    let device = Device::open(bench.card, bench.kernels.clone())?;
    let mut exact = Vec::new();
    for &(format, sealed) in &formats {
        let shape = DecodeShape { head_dim, kv_heads, group: q_heads / kv_heads, sealed };
        for &context in &bench.contexts {
            let measured = measure(&device, bench, shape, context)?;
            if format == PageFormat::Bf16 {
                exact.push((context, measured.seconds));
            }
            let same = exact.iter().find(|(tokens, _)| *tokens == context);
            let prompt = bench.prompt_tokens.min(context);
            let seen: usize = (context - prompt..context).map(|position| position + 1).sum();
            let operations = 4.0 * (seen * q_heads * head_dim) as f64;
            on_row(&CudaPrefillRow {
                kind: "cuda_prefill",
                card: device.name().to_owned(),
                cuda: device.driver_version()?,
                kv: format.name(),
                prompt_tokens: prompt,
                context,
                q_heads,
                kv_heads,
                head_dim,
                us_per_layer: measured.seconds * 1e6,
                fastest_us: measured.fastest * 1e6,
                tflop_per_s: operations / measured.seconds / 1e12,
                of_bf16: same.map(|(_, seconds)| seconds / measured.seconds),
                error: measured.error,
            });
        }
    }
    Ok(())
}

struct Measured {
    seconds: f64,
    fastest: f64,
    error: f64,
}

fn measure(
    device: &Arc<Device>,
    bench: &CudaPrefillBench,
    shape: DecodeShape,
    context: usize,
) -> Result<Measured, CudaError> {
    let DecodeShape { head_dim, kv_heads, group, sealed } = shape;
    let kernel = PrefillAttention::new(device, shape)?;
    let rows = bench.prompt_tokens.min(context);
    let start = context - rows;
    let pages = context.div_ceil(PAGE_TOKENS);
    let sink = bench.sink_tokens.div_ceil(PAGE_TOKENS);
    let history_end = if sealed.is_bf16() { 0 } else { start / PAGE_TOKENS };
    let is_sealed = |page: usize| (sink..history_end).contains(&page);
    let mut random = Random::new(11);
    let orders = [PageOrder::new(PageLayout::bf16(head_dim))?, PageOrder::new(sealed)?];
    let samples = orders.each_ref().map(|order| SamplePages::new(order, &mut random));
    // Slots in random order, as after some hours of serving.
    let slots = shuffled(pages, &mut random);
    let (exact, codes): (Vec<_>, Vec<_>) = (slots.iter().enumerate())
        .map(|(page, &slot)| match is_sealed(page) {
            true => (None, SealedSlot::new(slot + 1)),
            false => (ExactSlot::new(slot + 1), None),
        })
        .unzip();
    let ends = vec![history_end * PAGE_TOKENS; rows];
    let plan =
        kernel.plan(&[PrefillSequence { first_row: 0, start, exact: &exact, sealed: &codes, ends }], None)?;
    let [exact_pool, sealed_pool] =
        samples.each_ref().map(|pages_| pages_.fill(device, (pages + 1) * kv_heads));
    let (exact_pool, sealed_pool) = (exact_pool?, sealed_pool?);
    fn view<'a>(memory: &'a cudarc::driver::CudaSlice<u8>, order: &PageOrder, heads: usize) -> PoolView<'a> {
        PoolView {
            memory,
            first: 0,
            offset: 0,
            stride: order.page_bytes() * heads,
            scratch: None,
            means: None,
        }
    }
    let centred = CentredPages::new(device, sealed, kv_heads, 1, pages)?;
    let means = centred.as_ref().and_then(|centred| centred.table.of_layer(0));
    let pools = PrefillPools {
        exact: view(&exact_pool, &orders[0], kv_heads),
        sealed: Some(PoolView { means, ..view(&sealed_pool, &orders[1], kv_heads) }),
        sink: sink * PAGE_TOKENS,
    };
    let stride = kv_heads * group * head_dim;
    let queries: Vec<f32> = (0..rows * stride).map(|_| 2.0 * random.signed()).collect();
    let on_card = device.stream().clone_htod(&queries)?;
    let mut out = device.stream().clone_htod(&vec![f32::NAN; rows * stride])?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut launch = || kernel.launch(&plan, &pools, &on_card, stride, scale, None, &mut out);
    launch()?;
    device.synchronise()?;
    let seconds = replay(device, bench.repeat, &mut launch)?;
    let got = device.stream().clone_dtoh(&out)?;
    device.synchronise()?;
    let held = |page: usize| {
        let pool = usize::from(is_sealed(page));
        let rows = &samples[pool].rows[(slots[page] as usize + 1) * kv_heads % SAMPLES];
        match &centred {
            Some(centred) if pool == 1 => centred.with_mean(page, rows),
            _ => rows.clone(),
        }
    };
    let held: Vec<[Vec<f32>; 2]> = (0..pages).map(held).collect();
    let width = group * head_dim;
    let error = [0, rows - 1].map(|row| {
        let row_of = |numbers: &[f32]| numbers[row * stride..row * stride + width].to_vec();
        relative_error(&row_of(&queries), &row_of(&got), head_dim, scale, start + row + 1, |page| &held[page])
    });
    Ok(Measured {
        seconds: seconds[seconds.len() / 2],
        fastest: seconds[0],
        error: if error[0].is_nan() { error[0] } else { error[1].max(error[0]) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_from_a_card_or_an_error_says_that_there_is_none() {
        let bench = CudaPrefillBench {
            card: 0,
            kernels: None,
            q_heads: 4,
            kv_heads: 1,
            head_dim: 64,
            groups: 1,
            prompt_tokens: 100,
            contexts: vec![50, 1000],
            formats: vec![PageFormat::Bf16, PageFormat::Int2],
            sink_tokens: 64,
            repeat: 1,
        };
        let mut rows = Vec::new();
        match run(&bench, |row| rows.push(row.clone())) {
            Ok(()) => {
                assert_eq!(rows.len(), 4);
                assert!(rows.iter().all(|row| row.error < 1e-2 && row.tflop_per_s > 0.0), "{rows:?}");
            }
            Err(error) => assert!(error.to_string().to_lowercase().contains("cuda"), "{error}"),
        }
        let uneven = CudaPrefillBench { q_heads: 5, kv_heads: 2, ..bench };
        assert!(run(&uneven, |_| {}).unwrap_err().to_string().contains("5 query heads"));
    }
}
