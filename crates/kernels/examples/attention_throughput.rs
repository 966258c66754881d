//! Throughput of attention over pages of every format, from memory that no cache holds.
//!
//! `cargo run --release -p oscar-kernels --example attention_throughput [PATH]`

use oscar_codec::code_page::CodeLayout;
use oscar_codec::fp8_page::Fp8Layout;
use oscar_codec::{PAGE_TOKENS, ScaleType, Side};
use oscar_kernels::cpu::attention::sealed::{SealedFormat, attend_sealed};
use oscar_kernels::cpu::attention::{AttentionScratch, SoftmaxState, Span};
use oscar_kernels::cpu::isa::Isa;

fn memory_bytes() -> usize {
    std::env::var("MB").ok().and_then(|mb| mb.parse::<usize>().ok()).unwrap_or(1024) << 20
}

fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(5)
}

fn passes() -> usize {
    std::env::var("PASSES").ok().and_then(|passes| passes.parse().ok()).unwrap_or(1)
}

fn seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn random(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    ((*state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
}

fn page(format: &SealedFormat, d: usize, seed: &mut u64) -> Vec<u8> {
    let mut page = vec![0u8; format.page_bytes(d)];
    match format {
        SealedFormat::Bf16 => page.chunks_exact_mut(2).for_each(|x| {
            x.copy_from_slice(&half::bf16::from_f32(random(seed)).to_le_bytes());
        }),
        SealedFormat::Codes(layout, kind) => {
            for token in 0..PAGE_TOKENS {
                for side in [Side::Key, Side::Value] {
                    let codes: Vec<u8> = (0..d).map(|_| (random(seed) * 1e6) as i32 as u8).collect();
                    let scale = 0.5 + 0.1 * random(seed);
                    let scales = vec![(kind.to_bits(scale), kind.to_bits(1.5 * scale)); layout.groups()];
                    layout.write_token(&mut page, side, token, &codes, &scales).unwrap();
                }
            }
        }
        SealedFormat::Fp8(layout) => {
            for token in 0..PAGE_TOKENS {
                for side in [Side::Key, Side::Value] {
                    let row: Vec<f32> = (0..d).map(|_| random(seed)).collect();
                    layout.write_token(&mut page, side, token, &row).unwrap();
                }
            }
        }
    }
    page
}

fn best(threads: usize, pages: &[&[u8]], work: &(dyn Fn(&[&[u8]]) + Sync)) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..rounds() {
        let times: Vec<f64> = std::thread::scope(|scope| {
            let handles: Vec<_> = pages
                .chunks(pages.len().div_ceil(threads))
                .map(|part| {
                    scope.spawn(move || {
                        let start = seconds();
                        work(part);
                        seconds() - start
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        best = best.min(times.into_iter().fold(0.0, f64::max));
    }
    best
}

fn main() {
    let only = std::env::args().nth(1);
    let bytes = memory_bytes();
    for (d, group, heads) in [(64, 3, 3), (128, 6, 2), (128, 4, 8)] {
        if std::env::var("GROUP").is_ok_and(|only| only != group.to_string()) {
            continue;
        }
        for isa in [Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|isa| isa.is_available()) {
            if only.as_ref().is_some_and(|only| *only != isa.to_string()) {
                continue;
            }
            for threads in std::env::var("THREADS").map_or(vec![1, 2], |n| vec![n.parse().unwrap()]) {
                let mut exact = 0.0;
                for (name, format) in [
                    ("bf16", SealedFormat::Bf16),
                    ("fp8", SealedFormat::Fp8(Fp8Layout::new(d).unwrap())),
                    ("int4", SealedFormat::Codes(CodeLayout::int4(d, 1).unwrap(), ScaleType::F16)),
                    ("int2", SealedFormat::Codes(CodeLayout::int2(d, 1).unwrap(), ScaleType::F16)),
                ] {
                    if std::env::var("FORMAT").is_ok_and(|only| only != name) {
                        continue;
                    }
                    let mut seed = 7;
                    let page_bytes = format.page_bytes(d);
                    let sample: Vec<Vec<u8>> = (0..8).map(|_| page(&format, d, &mut seed)).collect();
                    let mut memory: Vec<u64> = vec![0; bytes / 8];
                    if std::env::var("HUGE").is_ok() {
                        let start = memory.as_mut_ptr().addr().next_multiple_of(4096);
                        // SAFETY: advice about pages of this vector.
                        unsafe { libc::madvise(start as *mut libc::c_void, bytes - 8192, libc::MADV_HUGEPAGE) };
                    }
                    let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
                    for (at, page) in memory.chunks_exact_mut(page_bytes).zip(sample.iter().cycle()) {
                        at.copy_from_slice(page);
                    }
                    // Pages of one head lie a slot apart.
                    let slot = page_bytes * heads;
                    let pages: Vec<&[u8]> = (0..heads)
                        .flat_map(|head| {
                            memory.chunks_exact(slot).map(move |slot| &slot[head * page_bytes..][..page_bytes])
                        })
                        .collect();
                    let read = best(threads, &pages, &|pages| {
                        let mut sum = [0u64; 32];
                        for page in pages {
                            let words: &[u64] = bytemuck::cast_slice(page);
                            for words in words.as_chunks::<32>().0 {
                                sum.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= word);
                            }
                        }
                        std::hint::black_box(sum);
                    });
                    let time = best(threads, &pages, &|pages| {
                        let mut seed = 9;
                        let q: Vec<f32> = (0..group * d).map(|_| random(&mut seed)).collect();
                        let (mut scratch, mut state) = (AttentionScratch::default(), SoftmaxState::default());
                        // A context of 8K tokens per call.
                        for pages in (0..passes()).flat_map(|_| pages.chunks(128)) {
                            let spans = vec![Span::up_to(pages.len() * PAGE_TOKENS); group];
                            state.reset(group, d);
                            attend_sealed(isa, &format, &q, 0.1, &spans, 0, pages, &mut scratch, &mut state);
                            std::hint::black_box(&mut state);
                        }
                    });
                    let time = time / passes() as f64;
                    let per_page = time / (pages.len() / threads) as f64;
                    if name == "bf16" {
                        exact = per_page;
                    }
                    println!(
                        "d={d} G={group} {isa} threads={threads} {name}: {:.0} ns/page {:.1} GB/s, read {:.1} GB/s, {:.0} %, {:.2}x bf16",
                        per_page * 1e9,
                        bytes as f64 / time / 1e9,
                        bytes as f64 / read / 1e9,
                        read / time * 100.0,
                        exact / per_page
                    );
                }
            }
        }
    }
}
