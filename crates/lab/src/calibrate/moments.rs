//! Second moments of queries, keys, values and attention outputs, summed in `f64` while a layer runs.
//!
//! One set per KV head; query heads are added to the head they read from. Nothing but the sums is kept, so their
//! size does not depend on how much text is seen.

use std::sync::Arc;

use half::bf16;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, s};
use oscar_codec::{CodecError, KeyTurning, PAGE_TOKENS, PageMeans, SquareMatrix};
use rayon::prelude::*;

use super::spread::Positions;

/// Positions before this one stay in bf16 in every cache (the sink), so means and plain moments leave them out.
const SINK: usize = 64;

/// Rows converted to `f64` at a time.
const BLOCK_ROWS: usize = 256;

/// Rows of a sum that are computed together, up to the diagonal: the sum is symmetric.
const STRIP: usize = 32;

/// Σ xᵀx over rows.
#[derive(Clone, Debug)]
pub struct Gram {
    dim: usize,
    /// The sum, which is complete on and below the diagonal only.
    sum: Vec<f64>,
    rows: usize,
}

impl Gram {
    fn new(dim: usize) -> Gram {
        Gram { dim, sum: vec![0.0; dim * dim], rows: 0 }
    }

    /// Adds rows of `dim` values, each scaled by the root of its weight.
    fn add<'a>(&mut self, rows: impl Iterator<Item = (&'a [f32], f64)>) {
        let dim = self.dim;
        let mut block = Vec::with_capacity(BLOCK_ROWS * dim);
        let flush = |block: &mut Vec<f64>, sum: &mut [f64]| {
            if block.is_empty() {
                return;
            }
            let rows = ArrayView2::from_shape((block.len() / dim, dim), block).expect("whole rows");
            let mut sum = ArrayViewMut2::from_shape((dim, dim), sum).expect("dim · dim values");
            for begin in (0..dim).step_by(STRIP) {
                let end = dim.min(begin + STRIP);
                let (strip, left) = (rows.slice(s![.., begin..end]), rows.slice(s![.., ..end]));
                general_mat_mul(1.0, &strip.t(), &left, 1.0, &mut sum.slice_mut(s![begin..end, ..end]));
            }
            block.clear();
        };
        for (row, weight) in rows {
            debug_assert_eq!(row.len(), dim);
            let root = weight.max(0.0).sqrt();
            block.extend(row.iter().map(|&value| f64::from(value) * root));
            self.rows += 1;
            if block.len() == BLOCK_ROWS * dim {
                flush(&mut block, &mut self.sum);
            }
        }
        flush(&mut block, &mut self.sum);
    }

    /// The mean over rows, exactly symmetric.
    pub fn mean(&self) -> SquareMatrix {
        let (dim, count) = (self.dim, self.rows.max(1) as f64);
        SquareMatrix::from_fn(dim, |i, j| self.sum[i.max(j) * dim + i.min(j)] / count)
    }
}

/// The moments of one KV head.
#[derive(Clone, Debug)]
pub struct HeadMoments {
    /// Moment of the queries of the GQA group: C_Q, which key rotations are fitted to.
    pub queries: Gram,
    /// Moment of attention outputs before the output projection, S·V row by row: VᵀSᵀSV, which the paper fits value
    /// rotations to.
    pub attended: Gram,
    /// Moment of values weighted with the energy of their keys, which the published code uses instead.
    pub weighted_values: Gram,
    /// Moment of the keys behind the sink.
    pub keys: Gram,
    /// Moment of the values behind the sink.
    pub values: Gram,
    /// Moments of the keys behind the sink, centred by the mean of their page: the plain one, and one with weights.
    centred_keys: [Gram; 2],
    key_sum: Vec<f64>,
    /// Sum of the keys behind the sink before they were turned.
    unturned_key_sum: Vec<f64>,
    value_sum: Vec<f64>,
    turning: Arc<KeyTurning>,
}

/// The quadratic form `x M xᵀ` of a symmetric metric, of every row.
fn energies(metric: &SquareMatrix, rows: &[f32]) -> Vec<f64> {
    let dim = metric.dim();
    let matrix = ArrayView2::from_shape((dim, dim), metric.values()).expect("dim · dim values");
    let of_block = |block: &[f32]| -> Vec<f64> {
        let block: Vec<f64> = block.iter().copied().map(f64::from).collect();
        let block = ArrayView2::from_shape((block.len() / dim, dim), &block).expect("whole rows");
        let products = block.dot(&matrix);
        block.rows().into_iter().zip(products.rows()).map(|(row, product)| row.dot(&product)).collect()
    };
    rows.par_chunks(BLOCK_ROWS * dim).flat_map_iter(of_block).collect()
}

impl HeadMoments {
    /// The moments before any row was added, of keys that turn so.
    pub fn new(head_dim: usize, turning: Arc<KeyTurning>) -> HeadMoments {
        let gram = || Gram::new(head_dim);
        HeadMoments {
            queries: gram(),
            attended: gram(),
            weighted_values: gram(),
            keys: gram(),
            values: gram(),
            centred_keys: [gram(), gram()],
            key_sum: vec![0.0; head_dim],
            unturned_key_sum: vec![0.0; head_dim],
            turning,
            value_sum: vec![0.0; head_dim],
        }
    }

    /// Adds the rows of one sequence, which are at `positions`. The first ones are its sink.
    pub fn add(&mut self, rows: &ObservedRows<'_>, head: usize, positions: &Positions) {
        let ObservedRows { heads, .. } = *rows;
        let members = head * heads.group()..(head + 1) * heads.group();
        let HeadMoments { queries, attended, keys, values, .. } = self;
        // Each sum has the order of its rows, whoever adds it up.
        rayon::scope(|scope| {
            scope.spawn(|_| {
                members.clone().for_each(|member| queries.add(rows.queries(member).map(|row| (row, 1.0))));
            });
            scope.spawn(|_| {
                members.clone().for_each(|member| attended.add(rows.attended(member).map(|row| (row, 1.0))));
            });
            keys.add(rows.keys(head).skip(SINK).map(|row| (row, 1.0)));
            values.add(rows.values(head).skip(SINK).map(|row| (row, 1.0)));
        });
        for (sum, rows) in [
            (&mut self.key_sum, &mut rows.keys(head).skip(SINK) as &mut dyn Iterator<Item = &[f32]>),
            (&mut self.value_sum, &mut rows.values(head).skip(SINK)),
        ] {
            for row in rows {
                sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
            }
        }
        for (index, key) in rows.keys(head).enumerate().skip(SINK) {
            let mut key = key.to_vec();
            self.turning.by(-(positions.of(index) as f64)).apply(&mut key);
            self.unturned_key_sum.iter_mut().zip(key).for_each(|(sum, value)| *sum += f64::from(value));
        }
    }

    /// Adds all keys and values for the weighted moment; the queries of all sequences must have been added.
    ///
    /// The weight of a token is `k A kᵀ` with `A` the mean of `qᵀq`, scaled so that the mean weight is 1.
    pub fn add_weighted_values(&mut self, keys: &[f32], values: &[f32]) {
        let dim = self.queries.dim;
        let weights = energies(&self.queries.mean(), keys);
        let scale = weights.len() as f64 / weights.iter().sum::<f64>().max(1e-12);
        let rows = values.chunks_exact(dim).zip(weights.iter().map(|weight| weight * scale));
        self.weighted_values.add(rows);
    }

    fn mean(&self, sum: &[f64], rows: usize) -> Vec<f32> {
        sum.iter().map(|sum| (sum / rows.max(1) as f64) as f32).collect()
    }

    /// Adds the keys of one sequence, centred by the mean of their page: alike, and weighted with their energy in the metric of
    /// queries. All moments must have been added before.
    pub fn add_centred_keys(&mut self, keys: &[f32], positions: &Positions) {
        let dim = self.queries.dim;
        // Keys that are not finite are an error of the fit, which says where they are.
        let Ok(page_means) = self.page_means() else { return };
        let mut centred = keys[(SINK * dim).min(keys.len())..].to_vec();
        for (page, keys) in centred.chunks_mut(PAGE_TOKENS * dim).enumerate() {
            let mean = page_means.of_page(positions.of(SINK + page * PAGE_TOKENS) / PAGE_TOKENS);
            for key in keys.chunks_exact_mut(dim) {
                key.iter_mut().zip(&mean).for_each(|(key, mean)| *key -= mean);
            }
        }
        let of_keys = energies(&self.queries.mean(), &centred);
        // The mean over these keys, which are about as many in every sequence.
        let usual = (of_keys.iter().sum::<f64>() / of_keys.len().max(1) as f64).max(f64::MIN_POSITIVE);
        let [plain, weighted] = &mut self.centred_keys;
        plain.add(centred.chunks_exact(dim).map(|key| (key, 1.0)));
        weighted.add(centred.chunks_exact(dim).zip(of_keys.iter().map(|it| it / usual)));
    }

    /// The covariance of the keys behind the sink, and one that counts those with large logits more: the sum of the plain one and
    /// of one with the weights of [`Self::add_centred_keys`]. Rare tokens that draw most of the attention, such as the markers of a
    /// chat, have directions of their own, which a plain covariance takes for weak ones.
    pub fn key_covariances(&self) -> [SquareMatrix; 2] {
        let [plain, weighted] = self.centred_keys.each_ref().map(Gram::mean);
        let both = SquareMatrix::from_fn(plain.dim(), |i, j| plain.get(i, j) + weighted.get(i, j));
        [plain, both]
    }

    /// The mean key of every page. An error if the model computed keys that are not finite.
    pub fn page_means(&self) -> Result<PageMeans, CodecError> {
        PageMeans::new(&self.unturned_key_mean(), self.turning.clone())
    }

    /// Mean key behind the sink before rotary embedding.
    pub fn unturned_key_mean(&self) -> Vec<f32> {
        self.mean(&self.unturned_key_sum, self.keys.rows)
    }

    /// Mean key behind the sink.
    pub fn key_mean(&self) -> Vec<f32> {
        self.mean(&self.key_sum, self.keys.rows)
    }

    /// Mean value behind the sink.
    pub fn value_mean(&self) -> Vec<f32> {
        self.mean(&self.value_sum, self.values.rows)
    }
}

/// How many heads an attention layer has, and their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadCounts {
    /// Number of query heads.
    pub query: usize,
    /// Number of KV heads.
    pub kv: usize,
    /// Channels per head.
    pub dim: usize,
}

impl HeadCounts {
    /// Query heads per KV head: the size of a GQA group.
    pub fn group(&self) -> usize {
        self.query / self.kv
    }

    /// Columns of a row of queries, keys and values.
    pub fn qkv_cols(&self) -> usize {
        (self.query + 2 * self.kv) * self.dim
    }
}

/// What one layer computed for the tokens of one sequence.
#[derive(Clone, Copy)]
pub struct ObservedRows<'a> {
    /// The heads that a row consists of.
    pub heads: HeadCounts,
    /// `[tokens][queries | keys | values]`, after norms and rotary embedding.
    pub qkv: &'a [f32],
    /// `[tokens][query heads]` attention outputs.
    pub attended: &'a [f32],
}

impl<'a> ObservedRows<'a> {
    fn column(rows: &'a [f32], cols: usize, first: usize, dim: usize) -> impl Iterator<Item = &'a [f32]> {
        rows.chunks_exact(cols).map(move |row| &row[first..first + dim])
    }

    /// Queries of one query head.
    pub fn queries(&self, query_head: usize) -> impl Iterator<Item = &'a [f32]> {
        Self::column(self.qkv, self.heads.qkv_cols(), query_head * self.heads.dim, self.heads.dim)
    }

    fn keys(&self, head: usize) -> impl Iterator<Item = &'a [f32]> {
        let first = (self.heads.query + head) * self.heads.dim;
        Self::column(self.qkv, self.heads.qkv_cols(), first, self.heads.dim)
    }

    fn values(&self, head: usize) -> impl Iterator<Item = &'a [f32]> {
        let first = (self.heads.query + self.heads.kv + head) * self.heads.dim;
        Self::column(self.qkv, self.heads.qkv_cols(), first, self.heads.dim)
    }

    /// Keys and values of a head as a cache of bf16 pages stores them.
    pub fn stored(&self, head: usize) -> (Vec<f32>, Vec<f32>) {
        let rounded = |rows: &mut dyn Iterator<Item = &'a [f32]>| {
            rows.flatten().map(|&x| bf16::from_f32(x).to_f32()).collect()
        };
        (rounded(&mut self.keys(head)), rounded(&mut self.values(head)))
    }

    fn attended(&self, query_head: usize) -> impl Iterator<Item = &'a [f32]> {
        Self::column(
            self.attended,
            self.heads.query * self.heads.dim,
            query_head * self.heads.dim,
            self.heads.dim,
        )
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::RopeLayout;
    use oscar_random::Random;

    use super::*;

    /// Keys that do not turn.
    fn still() -> Arc<KeyTurning> {
        Arc::new(KeyTurning::new(Vec::new(), RopeLayout::Halves))
    }

    /// Keys with a mean that turns keep a covariance without it, wherever the text is taken to be.
    #[test]
    fn what_turns_is_no_covariance_of_page_centred_keys() {
        let heads = HeadCounts { query: 1, kv: 1, dim: 4 };
        // So slow that hardly anything turns within a page.
        let turning = Arc::new(KeyTurning::new(vec![4e-4, 1e-4], RopeLayout::Halves));
        let tokens = 4096;
        let mut qkv = numbers(tokens * heads.qkv_cols(), 5);
        for (position, row) in qkv.chunks_exact_mut(heads.qkv_cols()).enumerate() {
            let key = &mut row[4..8];
            key.iter_mut().zip([9.0, -3.0, 1.0, 4.0]).for_each(|(x, mean)| *x += mean);
            turning.by(position as f64).apply(key);
        }
        let attended = numbers(tokens * heads.dim, 6);
        let rows = ObservedRows { heads, qkv: &qkv, attended: &attended };
        let positions = Positions::spread(tokens, 30_000);
        let turned = positions.turned(&rows, &turning);
        let rows = ObservedRows { qkv: &turned, ..rows };
        let mut moments = HeadMoments::new(heads.dim, turning);
        moments.add(&rows, 0, &positions);
        moments.add_centred_keys(&rows.stored(0).0, &positions);
        for (mean, expected) in moments.unturned_key_mean().into_iter().zip([9.0, -3.0, 1.0, 4.0]) {
            assert!((mean - expected).abs() < 0.02, "{mean} for {expected}");
        }
        let [plain, _] = moments.key_covariances();
        for channel in 0..4 {
            // Numbers that are as likely anywhere in a range of one have a variance of a twelfth.
            let variance = plain.get(channel, channel);
            assert!((variance - 1.0 / 12.0).abs() < 0.02, "channel {channel}: {variance}");
        }
        let mean = moments.key_mean();
        let around_one =
            moments.keys.mean().trace() - mean.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        assert!(around_one > 10.0, "one mean leaves what turns: {around_one}");
    }

    /// A model that computes NaN is an error and no panic.
    #[test]
    fn keys_that_are_not_finite_have_no_page_means() {
        let heads = HeadCounts { query: 1, kv: 1, dim: 4 };
        let mut qkv = numbers(100 * heads.qkv_cols(), 7);
        qkv[80 * heads.qkv_cols() + 5] = f32::NAN;
        let attended = numbers(100 * heads.dim, 8);
        let rows = ObservedRows { heads, qkv: &qkv, attended: &attended };
        let positions = Positions::spread(100, 0);
        let mut moments = HeadMoments::new(heads.dim, still());
        moments.add(&rows, 0, &positions);
        moments.add_centred_keys(&rows.stored(0).0, &positions);
        assert!(moments.page_means().is_err());
    }

    /// Numbers in [-0.5, 0.5).
    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..len).map(|_| (random.fraction() - 0.5) as f32).collect()
    }

    fn gram(rows: &[&[f32]], weights: &[f64], dim: usize) -> Vec<f64> {
        let mut sum = vec![0.0; dim * dim];
        for (row, weight) in rows.iter().zip(weights) {
            for i in 0..dim {
                for j in 0..dim {
                    sum[i * dim + j] += weight * f64::from(row[i]) * f64::from(row[j]);
                }
            }
        }
        sum.iter().map(|sum| sum / rows.len() as f64).collect()
    }

    fn assert_close(got: &[f64], want: &[f64]) {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-9, "{got} for {want}");
        }
    }

    #[test]
    fn moments_are_the_definitions() {
        let heads = HeadCounts { query: 4, kv: 2, dim: 8 };
        let tokens = 300;
        let qkv = numbers(tokens * heads.qkv_cols(), 1);
        let attended = numbers(tokens * heads.query * heads.dim, 2);
        let rows = ObservedRows { heads, qkv: &qkv, attended: &attended };
        let head = 1;
        let mut moments = HeadMoments::new(heads.dim, still());
        moments.add(&rows, head, &Positions::spread(tokens, 0));

        let queries: Vec<&[f32]> = rows.queries(2).chain(rows.queries(3)).collect();
        let c_q = gram(&queries, &vec![1.0; queries.len()], 8);
        assert_close(moments.queries.mean().values(), &c_q);
        let outputs: Vec<&[f32]> = rows.attended(2).chain(rows.attended(3)).collect();
        assert_close(moments.attended.mean().values(), &gram(&outputs, &vec![1.0; outputs.len()], 8));
        let keys: Vec<&[f32]> = rows.keys(head).collect();
        let past_sink = &keys[SINK..];
        assert_close(moments.keys.mean().values(), &gram(past_sink, &vec![1.0; past_sink.len()], 8));
        let mean = moments.key_mean();
        for c in 0..8 {
            let want: f32 = past_sink.iter().map(|key| key[c]).sum::<f32>() / past_sink.len() as f32;
            assert!((mean[c] - want).abs() < 1e-5);
        }

        // The published proxy: w = k A kᵀ, normalised to a mean of one.
        let values: Vec<&[f32]> = rows.values(head).collect();
        let energy: Vec<f64> = keys
            .iter()
            .map(|key| {
                (0..64).map(|ij| f64::from(key[ij / 8]) * c_q[ij] * f64::from(key[ij % 8])).sum::<f64>()
            })
            .collect();
        let total: f64 = energy.iter().sum();
        let weights: Vec<f64> = energy.iter().map(|energy| energy * tokens as f64 / total).collect();
        moments.add_weighted_values(&keys.concat(), &values.concat());
        assert_close(moments.weighted_values.mean().values(), &gram(&values, &weights, 8));
    }

    #[test]
    fn sequences_add_up() {
        let heads = HeadCounts { query: 2, kv: 1, dim: 4 };
        let (qkv, attended) = (numbers(200 * 16, 3), numbers(200 * 8, 4));
        let part = |from: usize, to: usize| ObservedRows {
            heads,
            qkv: &qkv[from * 16..to * 16],
            attended: &attended[from * 8..to * 8],
        };
        let (mut whole, mut parts) = (HeadMoments::new(4, still()), HeadMoments::new(4, still()));
        whole.add(&part(0, 200), 0, &Positions::spread(200, 0));
        parts.add(&part(0, 77), 0, &Positions::spread(77, 0));
        parts.add(&part(77, 200), 0, &Positions::spread(123, 0));
        assert_close(whole.queries.mean().values(), parts.queries.mean().values());
        assert_eq!(whole.keys.rows, 136);
        // Every sequence has its own sink.
        assert_eq!(parts.keys.rows, 13 + 59);
    }
}
