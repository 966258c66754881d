use half::bf16;
use oscar_codec::PAGE_TOKENS;
use oscar_random::Random;

use super::*;
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

/// A sequence of one KV head: its pages, and the same keys and values as plain rows.
struct Sequence {
    d: usize,
    pages: Vec<Vec<u16>>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Sequence {
    /// Tokens that were never written are NaN.
    fn new(d: usize, len: usize, mut token: impl FnMut(usize) -> (Vec<f32>, Vec<f32>)) -> Sequence {
        let nan = bf16::NAN.to_bits();
        let mut pages = vec![vec![nan; page_elements(d)]; len.div_ceil(PAGE_TOKENS).max(1)];
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for position in 0..len {
            let (key, value) = token(position);
            let page = &mut pages[position / PAGE_TOKENS];
            write_token(page, d, position % PAGE_TOKENS, &key, &value);
            let rounded = |x: Vec<f32>| x.into_iter().map(|x| bf16::from_f32(x).to_f32());
            keys.extend(rounded(key));
            values.extend(rounded(value));
        }
        Sequence { d, pages, keys, values }
    }

    fn random(d: usize, len: usize, random: &mut Random) -> Sequence {
        Sequence::new(d, len, |_| {
            let key = random.signed_vec(d).into_iter().map(|x| x * 3.0).collect();
            (key, random.signed_vec(d))
        })
    }

    /// Softmax attention in `f64`, straight from the definition, and the largest value seen.
    fn exact(&self, q: &[f32], scale: f32, span: Span) -> (Vec<f64>, f64) {
        let d = self.d;
        let seen = span.from..span.to.max(span.from);
        let logits: Vec<f64> = seen
            .clone()
            .map(|t| {
                let dot: f64 = (0..d).map(|c| f64::from(q[c]) * f64::from(self.keys[t * d + c])).sum();
                dot * f64::from(scale)
            })
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let value = |t: usize, c: usize| f64::from(self.values[t * d + c]);
        let out = (0..d)
            .map(|c| {
                let total: f64 = seen.clone().zip(&weights).map(|(t, weight)| weight * value(t, c)).sum();
                if seen.is_empty() { 0.0 } else { total / sum }
            })
            .collect();
        (
            out,
            self.values[seen.start * d..seen.end * d].iter().fold(0.0, |max, x| max.max(f64::from(x.abs()))),
        )
    }

    fn attend(&self, isa: Isa, q: &[f32], scale: f32, spans: &[Span], ranges: &[usize]) -> Vec<f32> {
        let d = self.d;
        let pages: Vec<&[u16]> = self.pages.iter().map(Vec::as_slice).collect();
        let mut scratch = AttentionScratch::default();
        let mut parts = Vec::new();
        let mut first = 0;
        for &end in ranges.iter().chain([&pages.len()]) {
            let mut state = SoftmaxState::default();
            state.reset(spans.len(), d);
            attend(isa, q, scale, spans, first, &pages[first..end], d, &mut scratch, &mut state);
            parts.push(state);
            first = end;
        }
        let mut out = vec![f32::NAN; spans.len() * d];
        for (row, out) in out.chunks_exact_mut(d).enumerate() {
            SoftmaxState::finish_parts(&parts.iter().collect::<Vec<_>>(), row, out);
        }
        out
    }

    /// Compares all rows with the definition; `tolerance` is relative to the largest value.
    fn check(&self, isa: Isa, q: &[f32], scale: f32, limits: &[usize], ranges: &[usize], tolerance: f64) {
        self.check_spans(isa, q, scale, &up_to(limits), ranges, tolerance);
    }

    fn check_spans(&self, isa: Isa, q: &[f32], scale: f32, spans: &[Span], ranges: &[usize], tolerance: f64) {
        let d = self.d;
        let out = self.attend(isa, q, scale, spans, ranges);
        for (row, &span) in spans.iter().enumerate() {
            let (exact, size) = self.exact(&q[row * d..][..d], scale, span);
            for c in 0..d {
                let got = f64::from(out[row * d + c]);
                assert!(
                    (got - exact[c]).abs() <= tolerance * size,
                    "{isa} d={d} row {row} of {} {span:?} channel {c}: {got} for {}, ranges {ranges:?}",
                    spans.len(),
                    exact[c]
                );
            }
        }
    }
}

/// Spans from the start of the sequence.
fn up_to(limits: &[usize]) -> Vec<Span> {
    limits.iter().map(|&to| Span::up_to(to)).collect()
}

const TOLERANCE: f64 = 1e-5;

#[test]
fn rows_may_begin_anywhere() {
    let mut random = Random::new(17);
    for d in [32, 48, 64, 128] {
        let sequence = Sequence::random(d, 260, &mut random);
        let edges = [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 259, 260];
        let spans: Vec<Span> = edges
            .iter()
            .flat_map(|&from| edges.iter().map(move |&to| Span { from, to }))
            .filter(|span| span.from <= span.to)
            .collect();
        for rows in [1, 3, 7, 20] {
            for spans in spans.chunks(rows) {
                let q = random.signed_vec(spans.len() * d);
                for isa in Isa::available() {
                    sequence.check_spans(isa, &q, 0.2, spans, &[], TOLERANCE);
                    sequence.check_spans(isa, &q, 0.2, spans, &[1, 3], TOLERANCE);
                }
            }
        }
    }
}

#[test]
fn decode_rows_agree_with_the_definition() {
    let mut random = Random::new(11);
    for d in [32, 48, 64, 80, 96, 128, 256] {
        let scale = 1.0 / (d as f32).sqrt();
        for len in [1, 2, 63, 64, 65, 127, 128, 129, 320, 321, 1000] {
            let sequence = Sequence::random(d, len, &mut random);
            for group in [1, 3, 4, 6, 7, 8, 12] {
                if len > 321 && ![3, 6].contains(&group) {
                    continue;
                }
                let q = random.signed_vec(group * d);
                for isa in Isa::available().filter(|isa| *isa != Isa::Scalar || len < 130) {
                    sequence.check(isa, &q, scale, &vec![len; group], &[], TOLERANCE);
                }
            }
        }
    }
}

#[test]
fn prefill_rows_have_their_own_limits() {
    let mut random = Random::new(12);
    for d in [64, 48, 128] {
        for (start, tokens, group) in [(0, 16, 3), (50, 20, 1), (60, 5, 7), (128, 64, 1), (190, 16, 4)] {
            let sequence = Sequence::random(d, start + tokens, &mut random);
            let limits: Vec<usize> = (0..tokens * group).map(|row| start + row / group + 1).collect();
            let q = random.signed_vec(limits.len() * d);
            for isa in Isa::available() {
                sequence.check(isa, &q, 0.2, &limits, &[], TOLERANCE);
            }
        }
        // Limits in any order, none at all, and pages that only some rows see.
        let sequence = Sequence::random(d, 200, &mut random);
        let limits = [0, 200, 1, 64, 65, 63, 128, 129, 0, 199, 2, 100, 66, 127, 130, 3, 5, 0];
        let q = random.signed_vec(limits.len() * d);
        for isa in Isa::available() {
            sequence.check(isa, &q, 0.2, &limits, &[], TOLERANCE);
        }
    }
}

#[test]
fn page_ranges_merge_to_the_whole() {
    let mut random = Random::new(13);
    let sequence = Sequence::random(64, 500, &mut random);
    let limits = [500, 450, 64, 10, 0];
    let q = random.signed_vec(limits.len() * 64);
    for isa in Isa::available() {
        for ranges in [&[1][..], &[1, 2, 3, 4, 5, 6, 7], &[4], &[0, 3, 3, 7]] {
            sequence.check(isa, &q, 0.3, &limits, ranges, TOLERANCE);
        }
    }
}

#[test]
fn odd_head_dimensions_use_the_reference() {
    let mut random = Random::new(14);
    for d in [2, 6, 20, 36, 272] {
        let sequence = Sequence::random(d, 70, &mut random);
        let q = random.signed_vec(3 * d);
        for isa in Isa::available() {
            sequence.check(isa, &q, 0.3, &[70, 1, 65], &[], TOLERANCE);
        }
    }
}

#[test]
fn nasty_keys() {
    let mut random = Random::new(15);
    let (d, len) = (64, 150);
    let q = random.signed_vec(3 * d);
    let constant = Sequence::new(d, len, |_| (vec![0.7; d], random.signed_vec(d)));
    let mut random = Random::new(16);
    let zeros = Sequence::new(d, len, |_| (vec![0.0; d], random.signed_vec(d)));
    let nothing = Sequence::new(d, len, |_| (vec![0.0; d], vec![0.0; d]));
    let huge = |at: usize| {
        let mut random = Random::new(17);
        Sequence::new(d, len, move |t| {
            let size = if t == at { 3e4 } else { 1.0 };
            (random.signed_vec(d).into_iter().map(|x| x * size).collect(), random.signed_vec(d))
        })
    };
    for isa in Isa::available() {
        for sequence in [&constant, &zeros, &nothing] {
            sequence.check(isa, &q, 1.0, &[len; 3], &[1], TOLERANCE);
        }
        for at in [0, 63, 64, 149] {
            // Logits of ±1e5 and more: one token takes all, or none of it.
            huge(at).check(isa, &q, 1.0, &[len; 3], &[], TOLERANCE);
            huge(at).check(isa, &q, 1e25, &[len; 3], &[1], TOLERANCE);
        }
    }
}

#[test]
fn large_constant_keys_cancel() {
    // Keys with a common part many times their spread, as Qwen2.5 has them: logits near ±300 that differ by a few.
    let mut random = Random::new(18);
    let d = 128;
    let common: Vec<f32> = random.signed_vec(d).into_iter().map(|x| x * 60.0).collect();
    let sequence = Sequence::new(d, 200, |_| {
        (common.iter().map(|x| x + 4.0 * random.signed()).collect(), random.signed_vec(d))
    });
    let mut random = Random::new(19);
    let q: Vec<f32> = common.iter().map(|x| x * 0.02 + random.signed() * 0.3).collect();
    let scale = 1.0 / (d as f32).sqrt();
    for isa in Isa::available() {
        sequence.check(isa, &q, scale, &[200], &[], 5e-5);
    }
}

#[test]
fn a_row_that_is_not_a_number_stays_alone() {
    let mut random = Random::new(20);
    let d = 64;
    let sequence = Sequence::random(d, 100, &mut random);
    let q = random.signed_vec(9 * d);
    for isa in Isa::available() {
        let good = sequence.attend(isa, &q, 0.2, &up_to(&[100; 9]), &[]);
        let mut bad = q.clone();
        bad[4 * d + 3] = f32::NAN;
        let out = sequence.attend(isa, &bad, 0.2, &up_to(&[100; 9]), &[]);
        assert!(out[4 * d..5 * d].iter().all(|x| x.is_nan()), "{isa}");
        assert_eq!(out[..4 * d], good[..4 * d], "{isa}");
        assert_eq!(out[5 * d..], good[5 * d..], "{isa}");
    }
}

#[test]
fn an_empty_state_is_zero_and_neutral() {
    let (mut empty, mut one) = (SoftmaxState::default(), SoftmaxState::default());
    empty.reset(1, 32);
    one.reset(1, 32);
    let mut out = [1.0; 32];
    empty.finish(0, &mut out);
    assert_eq!(out, [0.0; 32]);
    let sequence = Sequence::new(32, 1, |_| (vec![0.5; 32], vec![2.5; 32]));
    let pages: Vec<&[u16]> = sequence.pages.iter().map(Vec::as_slice).collect();
    let scratch = &mut AttentionScratch::default();
    attend(Isa::detect(), &[1.0; 32], 1.0, &up_to(&[1]), 0, &pages, 32, scratch, &mut one);
    SoftmaxState::finish_parts(&[&empty, &one, &empty], 0, &mut out);
    assert_eq!(out, [2.5; 32]);
}

/// CPU seconds of this thread, which a busy machine inflates less than wall time.
#[cfg(target_os = "linux")]
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Prints GB/s of decoding and tokens/s of prefill per path; run with `--ignored --nocapture` in a release build.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "measures speed"]
fn speed() {
    let bytes = 800 << 20;
    for threads in [1, 2] {
        for d in [64, 128] {
            let groups = if d == 64 { [1, 3, 8] } else { [1, 6, 8] };
            let elements = page_elements(d);
            let mut random = Random::new(21);
            let page: Vec<u16> = (0..elements).map(|_| bf16::from_f32(random.signed()).to_bits()).collect();
            let memory: Vec<u16> = page.iter().copied().cycle().take(bytes / 2).collect();
            let pages: Vec<&[u16]> = memory.chunks_exact(elements).collect();
            let parallel = |work: &(dyn Fn(&[&[u16]]) + Sync)| {
                let mut best = f64::MAX;
                for _ in 0..3 {
                    let seconds: Vec<f64> = std::thread::scope(|scope| {
                        let parts = pages.chunks(pages.len() / threads);
                        let handles: Vec<_> = parts
                            .map(|part| {
                                scope.spawn(move || {
                                    let start = thread_seconds();
                                    work(part);
                                    thread_seconds() - start
                                })
                            })
                            .collect();
                        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
                    });
                    best = best.min(seconds.into_iter().fold(0.0, f64::max));
                }
                bytes as f64 / best / 1e9
            };
            let read = parallel(&|pages| {
                let mut sum = [0u64; 32];
                for page in pages {
                    for chunk in page.as_chunks::<128>().0 {
                        let words: &[u64; 32] = bytemuck::cast_ref(chunk);
                        sum.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= word);
                    }
                }
                std::hint::black_box(sum);
            });
            println!("d={d} threads={threads}: plain read {read:.1} GB/s");
            for isa in [Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|isa| isa.is_available()) {
                for group in groups {
                    let rate = parallel(&|pages| {
                        let q = Random::new(22).signed_vec(group * d);
                        let spans = vec![Span::up_to(pages.len() * PAGE_TOKENS); group];
                        let (mut scratch, mut state) = (AttentionScratch::default(), SoftmaxState::default());
                        state.reset(group, d);
                        attend(isa, &q, 0.1, &spans, 0, pages, d, &mut scratch, &mut state);
                        std::hint::black_box(state.sum[0]);
                    });
                    println!(
                        "  {isa} G={group}: {rate:.1} GB/s, {:.0} % of a plain read",
                        rate / read * 100.0
                    );
                }
            }
        }
    }
    for d in [64, 128] {
        let mut memory = AlignedScratch::default();
        let mut random = Random::new(23);
        let memory = memory.at_least::<u16>(16 * page_elements(d));
        memory.iter_mut().for_each(|x| *x = bf16::from_f32(random.signed()).to_bits());
        let pages: Vec<&[u16]> = memory.chunks_exact(page_elements(d)).collect();
        for isa in [Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|isa| isa.is_available()) {
            for group in [1, 3, 6, 16, 48, 64, 128] {
                let q = Random::new(22).signed_vec(group * d);
                let (mut scratch, mut state) = (AttentionScratch::default(), SoftmaxState::default());
                let mut best = f64::MAX;
                for _ in 0..50 {
                    let start = thread_seconds();
                    state.reset(group, d);
                    attend(
                        isa,
                        &q,
                        0.1,
                        &vec![Span::up_to(1024); group],
                        0,
                        &pages,
                        d,
                        &mut scratch,
                        &mut state,
                    );
                    best = best.min(thread_seconds() - start);
                }
                let bytes = (pages.len() * page_elements(d) * 2) as f64;
                println!(
                    "cached d={d} {isa} rows={group}: {:.0} GFLOP/s, {:.1} GB/s",
                    4.0 * (group * d * 1024) as f64 / best / 1e9,
                    bytes / best / 1e9
                );
            }
        }
    }
}
