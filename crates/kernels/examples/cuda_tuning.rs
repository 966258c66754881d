//! Times layouts of the decode kernel against each other on a card: `cargo run --release --example cuda_tuning`.
//!
//! Arguments: `FORMAT:GROUPS:HEAD_DIM:QUERY_HEADS_PER_KV_HEAD:BATCHxTOKENS:WARPSxSTAGESxBLOCKSxLEAN`, any number of them, and
//! `read` for the read ceiling.

use oscar_codec::{CodeLayout, Fp8Layout, ScaleType};
use oscar_kernels::cpu::attention::sealed::SealedFormat;
use oscar_kernels::cuda::measure::{Case, measure, read_ceiling};
use oscar_kernels::cuda::{DecodeShape, Device, Split, Tuning};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match Device::open(0) {
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

fn case(argument: &str) -> Option<Case> {
    let parts: Vec<&str> = argument.split(':').collect();
    let [format, groups, head_dim, group, batch, tuning] = parts.as_slice() else { return None };
    let (groups, head_dim): (usize, usize) = (groups.parse().ok()?, head_dim.parse().ok()?);
    let sealed = match *format {
        "bf16" => SealedFormat::Bf16,
        "fp8" => SealedFormat::Fp8(Fp8Layout::new(head_dim).ok()?),
        "int4" => SealedFormat::Codes(CodeLayout::int4(head_dim, groups).ok()?, ScaleType::F16),
        _ => SealedFormat::Codes(CodeLayout::int2(head_dim, groups).ok()?, ScaleType::F16),
    };
    let numbers = |text: &str| text.split('x').map(|n| n.parse().ok()).collect::<Option<Vec<usize>>>();
    let batch = numbers(batch)?;
    let tuning = match numbers(tuning).as_deref() {
        Some(&[warps, stages, blocks_per_multiprocessor, lean]) => {
            Some(Tuning { warps, stages, blocks_per_multiprocessor, lean: lean != 0 })
        }
        _ => None,
    };
    Some(Case {
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
