use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use half::f16;
use oscar_random::Random;

use super::*;
use crate::backend::StoredMatrix;
use crate::dtype::DType;

const COLS: usize = 96;

/// A machine of some threads.
struct Machine {
    pool: Pool,
    dot: Dot,
    workers: PerThread<WorkerScratch>,
    scratch: ProjectScratch,
}

impl Machine {
    fn new(threads: usize) -> Machine {
        let pool = Pool::new(threads);
        let workers = PerThread::new(pool.threads());
        Machine { pool, dot: Dot::new(Isa::detect()), workers, scratch: ProjectScratch::default() }
    }

    fn run(
        &mut self,
        rows: usize,
        fill: &(dyn Fn(usize, &mut [f32]) + Sync),
        projections: &[Projection<'_>],
        out: &mut [f32],
        mode: Mode,
    ) {
        let mut projector = Projector {
            isa: Isa::detect(),
            fixed: true,
            dot: &self.dot,
            pool: &self.pool,
            workers: &self.workers,
            scratch: &mut self.scratch,
        };
        projector.run(Input { rows, cols: COLS, fill }, projections, out, mode).unwrap();
    }
}

fn weight(dtype: DType, rows: usize, random: &mut Random) -> Weight {
    let mut bytes = Vec::new();
    match dtype {
        DType::F32 => {
            bytes.extend(random.signed_vec(rows * COLS).iter().flat_map(|value| value.to_le_bytes()))
        }
        DType::Q4_1 => {
            for _ in 0..rows * COLS / 32 {
                let halves = [random.signed() * 0.1, random.signed()].map(f16::from_f32);
                bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
                bytes.extend(random.signed_vec(16).iter().map(|code| (128.0 * (code + 1.0)) as u8));
            }
        }
        _ => unreachable!("{dtype}"),
    }
    let stored = StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype, rows, cols: COLS, scales: None };
    Weight::new(&stored).unwrap()
}

/// Weights with fewer rows than threads, than places in a pass, and many; stored as floats or not, with and without bias.
/// Rows of codes with offsets round by their place in a pass, which tasks must not change.
#[test]
fn threads_and_tasks_change_nothing() {
    let mut random = Random::new(61);
    for sizes in [[1, 1], [2, 3], [5, 1], [8, 7], [40, 129], [576, 192]] {
        let weights = [(DType::Q4_1, sizes[0]), (DType::F32, sizes[1])]
            .map(|(dtype, rows)| weight(dtype, rows, &mut random));
        let bias = random.signed_vec(sizes[1]);
        let projections = [
            Projection { weight: &weights[0], bias: None },
            Projection { weight: &weights[1], bias: Some(&bias) },
        ];
        let total: usize = sizes.iter().sum();
        for rows in [1, 2, 5] {
            let (x, before) = (random.signed_vec(rows * COLS), random.signed_vec(rows * total));
            let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&x[row * COLS..][..COLS]);
            for mode in [Mode::Store, Mode::Add] {
                let mut expected: Option<Vec<f32>> = None;
                for threads in [1, 2, 3, 8] {
                    let mut machine = Machine::new(threads);
                    // Buffers are used again.
                    for _ in 0..3 {
                        let mut out = before.clone();
                        machine.run(rows, &fill, &projections, &mut out, mode);
                        let expected = expected.get_or_insert_with(|| out.clone());
                        assert_eq!(&out, expected, "{sizes:?}, {rows} rows, {threads} threads");
                    }
                }
                let mut floats = vec![0.0; COLS];
                for (i, got) in expected.unwrap().into_iter().enumerate() {
                    let (row, col) = (i / total, i % total);
                    let (weight, col) = if col < sizes[0] { (0, col) } else { (1, col - sizes[0]) };
                    weights[weight].dequantise_rows(col..col + 1, &mut floats);
                    let products = floats.iter().zip(&x[row * COLS..]).map(|(w, x)| f64::from(w * x));
                    let mut exact: f64 = products.sum();
                    exact += if weight == 1 { f64::from(bias[col]) } else { 0.0 };
                    exact += if mode == Mode::Add { f64::from(before[i]) } else { 0.0 };
                    // Activations are 16-bit numbers where weights are codes.
                    assert!((f64::from(got) - exact).abs() < 2e-3, "{sizes:?} {i}: {got} for {exact}");
                }
            }
        }
    }
}

fn sum_of_first_row(weight: &Weight) -> f32 {
    let mut row = [0.0; COLS];
    weight.dequantise_rows(0..1, &mut row);
    row.iter().sum()
}

/// Other threads may take all tasks before the one that computes the activations finds any.
#[test]
fn a_thread_without_tasks_computes_activations_for_the_others() {
    let weights = [63, 64].map(|seed| weight(DType::F32, 1, &mut Random::new(seed)));
    let projections = weights.each_ref().map(|weight| Projection { weight, bias: None });
    let sums = weights.each_ref().map(sum_of_first_row);
    let mut machine = Machine::new(4);
    for turn in 0..20_000 {
        let mut out = [f32::NAN; 2];
        let x = (turn % 7) as f32;
        machine.run(1, &|_, out| out.fill(x), &projections, &mut out, Mode::Store);
        for (got, sum) in out.into_iter().zip(sums) {
            assert!((got - x * sum).abs() < 1e-3, "turn {turn}: {got} for {}", x * sum);
        }
    }
}

/// Nobody waits for activations that do not come, and the next projection is right.
#[test]
fn a_panic_while_activations_are_computed_is_reported() {
    let mut random = Random::new(62);
    for threads in [1, 2, 8] {
        let mut machine = Machine::new(threads);
        for rows in [1, 3, 64] {
            let weight = weight(DType::F32, rows, &mut random);
            let sum = sum_of_first_row(&weight);
            let projections = [Projection { weight: &weight, bias: None }];
            let mut out = vec![f32::NAN; rows];
            for _ in 0..20 {
                let fails = |_: usize, _: &mut [f32]| panic!("no activations");
                let run = AssertUnwindSafe(|| machine.run(1, &fails, &projections, &mut out, Mode::Store));
                assert!(catch_unwind(run).is_err(), "{threads} threads, {rows} rows");
                machine.run(1, &|_, out| out.fill(2.0), &projections, &mut out, Mode::Store);
                assert!((out[0] - 2.0 * sum).abs() < 1e-3, "{threads} threads, {rows} rows");
            }
        }
    }
}
