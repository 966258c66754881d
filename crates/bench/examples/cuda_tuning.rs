//! Times kernels on a card: `cargo run --release -p oscar-bench --example cuda_tuning`. Arguments, any number of them:
//!
//! * `FORMAT:GROUPS:HEAD_DIM:QUERY_HEADS_PER_KV_HEAD:BATCHxTOKENS:WARPSxSTAGESxBLOCKS`: layouts of the decode kernel;
//! * `seal:FORMAT:RULE:GROUPS:HEAD_DIM:PAGES`: sealing so many pages of 36 layers and 8 heads per launch;
//! * `write:FORMAT:HEAD_DIM:QUERY_HEADS_PER_KV_HEAD:SEQUENCESxTOKENS`: QK-norm, RoPE, rotation and page write of a layer;
//! * `read`: the read ceiling.
//!
//! Formats are `bf16`, `fp8`, `int4`, `int2` (scalar codes), `banded` (2 bits with keys in bands) and, where rows are sealed or
//! written, `published`.

use std::sync::Arc;

use oscar_bench::cuda::{DecodeCase, MeasuredPages, measure, measure_sealing, measure_writing, read_ceiling};
use oscar_codec::{
    BandLayout, BandRows, CodeLayout, HeadEncoder, HeadTransform, KvGeometry, PageCodec, PageLayout,
    RowEncoder, SquareMatrix, hadamard,
};
use oscar_kernels::cuda::{CudaError, DecodeShape, Device, Split, Tuning};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match Device::open(0, None) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    println!("{}, {}, driver {}", device.name(), device.architecture(), device.driver_version()?);
    for argument in std::env::args().skip(1) {
        if argument == "read" {
            println!("read: {:.3} TB/s", read_ceiling(&device)? / 1e12);
            continue;
        }
        if argument.starts_with("seal:") || argument.starts_with("write:") {
            match pages(&device, &argument) {
                None => println!("{argument}: not understood"),
                Some(Err(error)) => println!("{argument}: {error}"),
                Some(Ok(measured)) => println!(
                    "{argument:36} {:9.2} us  fastest {:9.2}  {:7.1} GB/s of bf16  {:.1} MB, {} launches",
                    measured.seconds * 1e6,
                    measured.fastest * 1e6,
                    measured.bytes as f64 / measured.seconds / 1e9,
                    measured.bytes as f64 / 1e6,
                    measured.launches
                ),
            }
            continue;
        }
        match case(&argument).map(|case| measure(&device, &case)) {
            None => println!("{argument}: not understood"),
            Some(Err(error)) => println!("{argument}: {error}"),
            Some(Ok(measured)) => println!(
                "{argument:36} {:9.2} us  fastest {:9.2}  {:.3} TB/s  error {:.1e}  {} layers, {} registers, {} spilled, {} partials",
                measured.seconds * 1e6,
                measured.fastest * 1e6,
                measured.bytes as f64 / measured.seconds / 1e12,
                measured.error,
                measured.layers,
                measured.registers,
                measured.spilled,
                measured.partials
            ),
        }
    }
    Ok(())
}

fn case(argument: &str) -> Option<DecodeCase> {
    let parts: Vec<&str> = argument.split(':').collect();
    let [format, groups, head_dim, group, batch, tuning] = parts.as_slice() else { return None };
    let (groups, head_dim): (usize, usize) = (groups.parse().ok()?, head_dim.parse().ok()?);
    let sealed = match *format {
        "bf16" => PageLayout::bf16(head_dim),
        "fp8" => PageLayout::fp8(head_dim).ok()?,
        "int4" => PageLayout::Codes(CodeLayout::new(4, head_dim, groups).ok()?),
        "banded" => PageLayout::banded(head_dim).ok()?,
        _ => PageLayout::Codes(CodeLayout::new(2, head_dim, groups).ok()?),
    };
    let numbers = |text: &str| text.split('x').map(|n| n.parse().ok()).collect::<Option<Vec<usize>>>();
    let batch = numbers(batch)?;
    let tuning = match numbers(tuning).as_deref() {
        Some(&[warps, stages, blocks_per_multiprocessor]) => {
            Some(Tuning { warps, stages, blocks_per_multiprocessor })
        }
        _ => None,
    };
    Some(DecodeCase {
        shape: DecodeShape { head_dim, kv_heads: 8, group: group.parse().ok()?, sealed },
        batch: *batch.first()?,
        tokens: *batch.get(1)?,
        sink_pages: 1,
        recent_pages: 4,
        split: Split::Balanced,
        tuning,
        pool_bytes: 2 << 30,
        passes: 15,
    })
}

/// Times the kernel that seals pages or the one that writes rows.
fn pages(device: &Arc<Device>, argument: &str) -> Option<Result<MeasuredPages, CudaError>> {
    let parts: Vec<&str> = argument.split(':').collect();
    match parts.as_slice() {
        ["seal", format, rule, groups, head_dim, pages] => {
            let codec = codec(format, rule, groups.parse().ok()?, head_dim.parse().ok()?)??;
            Some(measure_sealing(device, &codec, pages.parse().ok()?, 3 << 30, 15))
        }
        ["write", format, head_dim, group, batch] => {
            let head_dim = head_dim.parse().ok()?;
            let codec = codec(format, "search", 1, head_dim)?;
            let (sequences, tokens) = batch.split_once('x')?;
            let (sequences, tokens) = (sequences.parse().ok()?, tokens.parse().ok()?);
            let geometry = geometry(head_dim);
            Some(measure_writing(
                device,
                geometry,
                group.parse().ok()?,
                codec.as_ref(),
                sequences,
                tokens,
                15,
            ))
        }
        _ => None,
    }
}

/// The layers and KV heads of Qwen3-8B.
fn geometry(head_dim: usize) -> KvGeometry {
    KvGeometry { layers: 36, kv_heads: 8, head_dim }
}

/// A codec; none for `bf16`.
fn codec(format: &str, rule: &str, groups: usize, head_dim: usize) -> Option<Option<PageCodec>> {
    let geometry = geometry(head_dim);
    Some(Some(match format {
        "bf16" => return Some(None),
        "fp8" => PageCodec::fp8(geometry, None).ok()?,
        "int4" => PageCodec::int4(geometry, None).ok()?,
        "banded" => {
            let layout = BandLayout::int2(head_dim).ok()?;
            let rows = RowEncoder::Banded(BandRows { layout, value_rule: rule.parse().ok()? });
            // A matrix of its own for every head that is no rotation, as calibrated keys have.
            let rotation = hadamard::matrix(head_dim);
            let matrix = SquareMatrix::from_fn(head_dim, |i, j| rotation.get(i, j) * (1.0 + j as f64));
            let heads = 0..geometry.layers * geometry.kv_heads;
            let keys = heads.clone().map(|_| HeadTransform::general(None, &matrix).ok());
            let values = heads.map(|_| HeadTransform::new(None, &hadamard::matrix(head_dim)).ok());
            let encoder =
                |transform: Option<_>| Some(HeadEncoder { transform: transform?, rows, page_means: None });
            let keys = keys.map(encoder).collect::<Option<Vec<_>>>()?;
            let values = values.map(encoder).collect::<Option<Vec<_>>>()?;
            PageCodec::new(format, geometry, keys, values).ok()?
        }
        _ => {
            let published = format == "published";
            let layout = CodeLayout::new(2, head_dim, groups).ok()?;
            let transform = HeadTransform::new(None, &hadamard::matrix(head_dim)).ok()?;
            // A rotation of its own for every head, as a calibrated codec has.
            let encoder = |_| {
                let own = HeadTransform::new(None, &hadamard::matrix(head_dim)).unwrap_or(transform.clone());
                rule.parse().ok().map(|rule| HeadEncoder::codes(own, layout, rule, published))
            };
            let heads = geometry.layers * geometry.kv_heads;
            let keys = (0..heads).map(encoder).collect::<Option<Vec<_>>>()?;
            let values = (0..heads).map(encoder).collect::<Option<Vec<_>>>()?;
            PageCodec::new(format, geometry, keys, values).ok()?
        }
    }))
}
