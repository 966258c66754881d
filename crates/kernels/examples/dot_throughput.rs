//! Single-thread throughput of the dot products, in GB/s of weight bytes and dequantised weights per nanosecond.
//!
//! Weights are read twice over: from a buffer larger than any cache, as in decoding, and from one that stays in the
//! second-level cache, which shows what the arithmetic alone can do.
//!
//! `cargo run --release -p oscar-kernels --example dot_throughput [PATH [TYPE]]`

use oscar_kernels::DType;
use oscar_kernels::cpu::activation::QuantisedRows;
use oscar_kernels::cpu::dot::Dot;
use oscar_kernels::cpu::dot::stripes::{STRIPES, Stripe};
use oscar_kernels::cpu::isa::Isa;
use oscar_random::Random;

const COLS: usize = 2048;
const MEMORY_BYTES: usize = 600 << 20;
const CACHE_BYTES: usize = 512 << 10;
/// Weight rows per call and stripe, as a worker thread takes them.
const CHUNK: usize = 16;
const ROUNDS: usize = 5;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let weights = filler(MEMORY_BYTES);
    println!(
        "{:6} {:8} {:>8} {:>8} {:>8} {:>8} {:>10}",
        "type", "path", "memory", "cache", "2 rows", "4 rows", "decode/ns"
    );
    for isa in Isa::available() {
        if arguments.first().is_some_and(|name| *name != isa.to_string()) || isa == Isa::Amx {
            continue;
        }
        for dtype in DType::ALL {
            if arguments.get(1).is_some_and(|name| *name != dtype.to_string()) {
                continue;
            }
            let memory = if isa == Isa::Scalar { &weights[..16 << 20] } else { &weights };
            let cache = &weights[..CACHE_BYTES];
            println!(
                "{:6} {:8} {:8.1} {:8.1} {:8.1} {:8.1} {:10.1}",
                dtype.to_string(),
                isa.to_string(),
                throughput(isa, dtype, memory, 1),
                throughput(isa, dtype, cache, 1),
                throughput(isa, dtype, cache, 2),
                throughput(isa, dtype, cache, 4),
                decode(isa, dtype, cache),
            );
        }
    }
}

/// Processor time of this thread, which other work on the machine does not stretch.
#[allow(unsafe_code)]
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid `timespec`.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "the clock of the thread can be read");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes that form ordinary finite numbers in every type, at any place.
fn filler(len: usize) -> Vec<u8> {
    let mut random = Random::new(1);
    (0..len).map(|_| random.next_u64() as u8 & 0xb7 | 0x20).collect()
}

/// Best of some rounds, in GB/s.
fn throughput(isa: Isa, dtype: DType, weights: &[u8], rows: usize) -> f64 {
    let dot = Dot::new(isa);
    let x: Vec<f32> = (0..rows * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut quantised = QuantisedRows::default();
    dot.quantise(&x, rows, COLS, &mut quantised);
    let row_bytes = dtype.bytes_for(COLS).expect("whole blocks");
    let mut out = vec![0.0; STRIPES * rows * CHUNK];
    let chunk = row_bytes * CHUNK;
    // A stripe of chunks each.
    let quarter = weights.len() / STRIPES / chunk * chunk;
    let repeat = if weights.len() > CACHE_BYTES { 1 } else { 64 };
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = thread_seconds();
        for _ in 0..repeat {
            for first in (0..quarter).step_by(chunk) {
                let mut outs = out.chunks_exact_mut(rows * CHUNK);
                let stripes = std::array::from_fn(|stripe| Stripe {
                    weights: &weights[stripe * quarter + first..][..chunk],
                    out: outs.next().expect("four parts"),
                });
                if dtype.is_float() {
                    dot.float_rows(dtype, stripes, &x, rows);
                } else {
                    dot.quantised_rows(dtype, stripes, &quantised);
                }
            }
        }
        best = best.min(thread_seconds() - start);
    }
    (STRIPES * quarter * repeat) as f64 / best / 1e9
}

/// Best of some rounds, in weights per nanosecond.
fn decode(isa: Isa, dtype: DType, weights: &[u8]) -> f64 {
    let dot = Dot::new(isa);
    let row_bytes = dtype.bytes_for(COLS).expect("whole blocks");
    let mut out = vec![0.0; COLS];
    let mut best = f64::INFINITY;
    for _ in 0..4 * ROUNDS {
        let start = thread_seconds();
        for row in weights.chunks_exact(row_bytes) {
            dot.dequantise(dtype, row, &mut out);
        }
        best = best.min(thread_seconds() - start);
    }
    (weights.len() / row_bytes * COLS) as f64 / best / 1e9
}
