//! Attention with stand-ins for early positions, against the definition.
use half::bf16;
use oscar_codec::{ExactSlot, KvGeometry};
use oscar_kernels::backend::{AttentionSpec, Batch, CacheSpec, Rope, RopeLayout, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::inspect::{KvRows, StandIn};
use oscar_kernels::{Backend, Inspect};
use oscar_random::Random;

const DIM: usize = 32;
const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const TOKENS: usize = 200;

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| bf16::from_f32(2.0 * random.signed()).to_f32()).collect()
}

/// Gives the end of the history of a query by its position.
type Rule = fn(usize) -> usize;

/// Rows of one position: what is read, `(key, value)`.
type Row<'a> = (&'a [f32], &'a [f32]);

fn softmax_attention(query: &[f32], scale: f32, rows: &[Row<'_>]) -> Vec<f64> {
    let logits: Vec<f64> = rows
        .iter()
        .map(|(key, _)| {
            let dot: f64 = query.iter().zip(*key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            dot * f64::from(scale)
        })
        .collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..DIM)
        .map(|c| rows.iter().zip(&weights).map(|((_, value), w)| w * f64::from(value[c])).sum::<f64>() / sum)
        .collect()
}

#[test]
fn early_positions_come_from_the_history_and_the_rest_from_the_cache() {
    for isa in Isa::available() {
        let backend = CpuBackend::with_isa(2, isa);
        let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: DIM };
        let spec = CacheSpec::exact(geometry, KV_HEADS * GROUP, 6);
        let (mut exact, mut history) = (backend.cache(&spec).unwrap(), backend.cache(&spec).unwrap());
        let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
        let attention = AttentionSpec {
            q_heads: KV_HEADS * GROUP,
            kv_heads: KV_HEADS,
            head_dim: DIM,
            scale: 0.3,
            window: None,
            rotates: true,
            sinks: None,
            q_norm: None,
            k_norm: None,
        };
        let cols = attention.qkv_cols();
        let pages = ExactSlot::table([4, 2, 5, 1]);
        let tokens = vec![0; TOKENS];
        let rows = SequenceRows::exact(0, TOKENS, &pages);
        let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &[rows] }, &rope, &exact).unwrap();
        let mut qkv = backend.buffer(TOKENS, cols).unwrap();
        let values = numbers(TOKENS * cols, 7);
        qkv.first_rows_mut("rows", TOKENS).unwrap().copy_from_slice(&values);
        backend.rope_store(&step, &attention, 0, &mut qkv, &mut exact).unwrap();
        let stand_ins: Vec<(Vec<f32>, Vec<f32>)> = (0..KV_HEADS as u64)
            .map(|head| (numbers(TOKENS * DIM, 11 + head), numbers(TOKENS * DIM, 13 + head)))
            .collect();
        for (head, (keys, values)) in stand_ins.iter().enumerate() {
            let rows = KvRows { layer: 0, head, pages: &pages };
            backend.write_kv(&mut history, rows, 0, keys, values).unwrap();
        }

        let rules: [(&str, Rule); 7] = [
            ("nothing", |_| 0),
            ("the first", |_| 1),
            ("63", |_| 63),
            ("a page", |_| 64),
            ("65", |_| 65),
            ("a window of 10", |position| (position + 1).saturating_sub(10)),
            ("everything, also the query", |position| position + 1),
        ];
        for (name, ends) in rules {
            let mut out = backend.buffer(TOKENS, KV_HEADS * GROUP * DIM).unwrap();
            let stand_in = StandIn { cache: &history, ends: &ends };
            backend.attend_with_stand_in(&step, &attention, 0, &qkv, &exact, stand_in, &mut out).unwrap();
            let out = out.first_rows("rows", TOKENS).unwrap();
            for position in [0, 1, 9, 10, 62, 63, 64, 65, 66, 127, 128, 199] {
                for query_head in [0, 2, 3, 5] {
                    let head = query_head / GROUP;
                    let row = |p: usize, at: usize| &values[p * cols + at * DIM..][..DIM];
                    let read: Vec<Row<'_>> = (0..=position)
                        .map(|p| {
                            if p < ends(position) {
                                let (keys, values) = &stand_ins[head];
                                (&keys[p * DIM..][..DIM], &values[p * DIM..][..DIM])
                            } else {
                                (row(p, KV_HEADS * GROUP + head), row(p, KV_HEADS * (GROUP + 1) + head))
                            }
                        })
                        .collect();
                    let want = softmax_attention(row(position, query_head), 0.3, &read);
                    let got = &out[(position * KV_HEADS * GROUP + query_head) * DIM..][..DIM];
                    for (got, want) in got.iter().zip(&want) {
                        assert!(
                            (f64::from(*got) - want).abs() < 1e-4,
                            "{isa} {name} position {position} head {query_head}: {got} for {want}"
                        );
                    }
                }
            }
        }
    }
}
