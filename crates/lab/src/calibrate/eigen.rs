//! Eigenvalues and eigenvectors of a symmetric matrix, in `f64`.
//!
//! Householder reflections make the matrix tridiagonal, then QL steps with implicit shifts make it diagonal. Both are
//! backward stable, take a few milliseconds at the sizes of attention heads, and keep nothing but the matrix and its basis.

/// Steps after which an eigenvalue that still has not converged never will; two or three are usual.
const MOST_STEPS: usize = 60;

/// The eigenvalues and eigenvectors of a symmetric matrix, in ascending order of the eigenvalues.
#[derive(Clone, Debug)]
pub(super) struct Eigen {
    /// The eigenvalues, ascending.
    pub(super) values: Vec<f64>,
    /// The unit eigenvector of each value. The sign of each is arbitrary.
    pub(super) vectors: Vec<Vec<f64>>,
}

/// Decomposes a symmetric matrix of `dim` rows, of which only the upper triangle is read. Nothing if numbers are not
/// finite or do not converge.
pub(super) fn symmetric_eigen(matrix: &[f64], dim: usize) -> Option<Eigen> {
    assert_eq!(matrix.len(), dim * dim, "a square matrix");
    let largest = matrix.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    if !matrix.iter().all(|value| value.is_finite()) {
        return None;
    }
    // Near one there is neither overflow nor underflow, and a power of two changes no digit.
    let scale =
        if largest == 0.0 { 1.0 } else { 2f64.powi(-(largest.log2().floor() as i32).clamp(-1000, 1000)) };
    let rows = (0..dim).map(|i| (0..dim).map(|j| scale * matrix[i.min(j) * dim + i.max(j)]).collect());
    let (mut tridiagonal, mut basis) = tridiagonalise(rows.collect());
    tridiagonal.diagonalise(&mut basis)?;
    let mut pairs: Vec<(f64, Vec<f64>)> = tridiagonal.diagonal.into_iter().zip(basis).collect();
    pairs.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (values, vectors) = pairs.into_iter().map(|(value, vector)| (value / scale, vector)).unzip();
    Some(Eigen { values, vectors })
}

/// A symmetric matrix that is zero but for its diagonal and the numbers beside it.
struct Tridiagonal {
    diagonal: Vec<f64>,
    /// Entry `i` stands between rows `i` and `i + 1`; a zero follows the last.
    beside: Vec<f64>,
}

/// The dot product in eight sums, which do not wait for each other.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    let ((one, one_rest), (other, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in one.iter().zip(other) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f64 = one_rest.iter().zip(other_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// `target += factor · row`.
fn add_scaled(target: &mut [f64], factor: f64, row: &[f64]) {
    target.iter_mut().zip(row).for_each(|(target, value)| *target += factor * value);
}

/// Reflects a symmetric matrix to tridiagonal form. The rows of the second result are the basis in which it has it.
fn tridiagonalise(mut rows: Vec<Vec<f64>>) -> (Tridiagonal, Vec<Vec<f64>>) {
    let dim = rows.len();
    let mut beside = vec![0.0; dim];
    // The unit vector of the reflection that clears row `k` right of the entry beside the diagonal: I - 2 v vᵀ.
    let mut reflections: Vec<Vec<f64>> = Vec::with_capacity(dim);
    for k in 0..dim.saturating_sub(1) {
        let mut v = rows[k][k + 1..].to_vec();
        let length = dot(&v, &v).sqrt();
        // Away from the first entry, so that nothing cancels.
        beside[k] = if v[0] > 0.0 { -length } else { length };
        v[0] -= beside[k];
        let norm = dot(&v, &v).sqrt();
        if norm == 0.0 || v[1..].iter().all(|value| *value == 0.0) {
            beside[k] = rows[k][k + 1];
            reflections.push(Vec::new());
            continue;
        }
        v.iter_mut().for_each(|value| *value /= norm);
        let rest = &mut rows[k + 1..];
        let products: Vec<f64> = rest.iter().map(|row| dot(&row[k + 1..], &v)).collect();
        let mut w = products;
        let along = dot(&w, &v);
        add_scaled(&mut w, -along, &v);
        for (i, row) in rest.iter_mut().enumerate() {
            add_scaled(&mut row[k + 1..], -2.0 * v[i], &w);
            add_scaled(&mut row[k + 1..], -2.0 * w[i], &v);
        }
        reflections.push(v);
    }
    let diagonal = (0..dim).map(|i| rows[i][i]).collect();
    // The product of the reflections, from the last: each changes only the rows and columns that those after it do.
    // Transposed as it is built, so that the vectors of the basis are rows.
    let mut basis: Vec<Vec<f64>> =
        (0..dim).map(|i| (0..dim).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for (k, v) in reflections.iter().enumerate().rev().filter(|(_, v)| !v.is_empty()) {
        for row in &mut basis[k + 1..] {
            let along = dot(&row[k + 1..], v);
            add_scaled(&mut row[k + 1..], -2.0 * along, v);
        }
    }
    (Tridiagonal { diagonal, beside }, basis)
}

impl Tridiagonal {
    /// Turns the matrix until it is diagonal, and the rows of `basis` with it. Nothing if that does not end.
    fn diagonalise(&mut self, basis: &mut [Vec<f64>]) -> Option<()> {
        for first in 0..self.diagonal.len() {
            let mut steps = 0;
            loop {
                let last = self.block_end(first);
                if last == first {
                    break;
                }
                steps += 1;
                if steps > MOST_STEPS {
                    return None;
                }
                self.step(first, last, basis);
            }
        }
        Some(())
    }

    /// The last row of the block that begins at `first`: what stands beside it is nothing but rounding.
    fn block_end(&self, first: usize) -> usize {
        let d = &self.diagonal;
        let is_end = |&i: &usize| {
            self.beside[i].abs() <= f64::EPSILON * (d[i].abs() + d[i + 1].abs()) + f64::MIN_POSITIVE
        };
        (first..d.len() - 1).find(is_end).unwrap_or(d.len() - 1)
    }

    /// One QL step with Wilkinson's shift on the block from `first` to `last`: plane rotations from its end to its begin,
    /// each of which removes what the one before it put outside the three diagonals.
    fn step(&mut self, first: usize, last: usize, basis: &mut [Vec<f64>]) {
        let (d, e) = (&mut self.diagonal, &mut self.beside);
        let half_gap = (d[first + 1] - d[first]) / (2.0 * e[first]);
        let shift = d[first] - e[first] / (half_gap + f64::hypot(half_gap, 1.0).copysign(half_gap));
        let mut remainder = d[last] - shift;
        let (mut sine, mut cosine, mut moved) = (1.0, 1.0, 0.0);
        for i in (first..last).rev() {
            let (outside, inside) = (sine * e[i], cosine * e[i]);
            let length = f64::hypot(outside, remainder);
            e[i + 1] = length;
            if length == 0.0 {
                // The block has come apart here.
                d[i + 1] -= moved;
                e[last] = 0.0;
                return;
            }
            (sine, cosine) = (outside / length, remainder / length);
            let lower = d[i + 1] - moved;
            let turn = (d[i] - lower) * sine + 2.0 * cosine * inside;
            moved = sine * turn;
            d[i + 1] = lower + moved;
            remainder = cosine * turn - inside;
            let (above, below) = basis.split_at_mut(i + 1);
            for (one, other) in above[i].iter_mut().zip(&mut below[0]) {
                (*one, *other) = (cosine * *one - sine * *other, sine * *one + cosine * *other);
            }
        }
        d[first] -= moved;
        e[first] = remainder;
        e[last] = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;

    use super::*;

    fn from_fn(dim: usize, value: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        (0..dim * dim).map(|index| value(index / dim, index % dim)).collect()
    }

    fn random_symmetric(dim: usize, seed: u64) -> Vec<f64> {
        let mut random = Random::new(seed);
        let numbers: Vec<f64> = (0..dim * dim).map(|_| 2.0 * random.fraction() - 1.0).collect();
        from_fn(dim, |i, j| numbers[i.min(j) * dim + i.max(j)])
    }

    /// Decomposes and checks order, orthogonality and that every vector belongs to its value.
    fn checked(name: &str, matrix: &[f64], dim: usize) -> Eigen {
        let eigen = symmetric_eigen(matrix, dim).unwrap_or_else(|| panic!("{name}: no result"));
        let Eigen { values, vectors } = &eigen;
        assert_eq!((values.len(), vectors.len()), (dim, dim), "{name}");
        assert!(values.is_sorted(), "{name}: {values:?}");
        let size = matrix.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        let tolerance = 1e-14 * dim as f64;
        for i in 0..dim {
            for j in 0..dim {
                let expected = f64::from(u8::from(i == j));
                let product = dot(&vectors[i], &vectors[j]);
                assert!((product - expected).abs() <= tolerance, "{name}: vectors {i}, {j}: {product}");
            }
            for (row, component) in matrix.chunks_exact(dim).zip(&vectors[i]) {
                let difference = dot(row, &vectors[i]) - values[i] * component;
                let allowed = tolerance * dim as f64 * size + f64::MIN_POSITIVE;
                assert!(difference.abs() <= allowed, "{name}: value {i}: {difference}");
            }
        }
        eigen
    }

    fn assert_values(name: &str, got: &[f64], expected: &[f64]) {
        let size = expected.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= 1e-12 * size, "{name}: {got} for {expected}");
        }
    }

    #[test]
    fn random_matrices_of_all_sizes() {
        for dim in (0..20).chain([32, 63, 64, 100, 128, 257]) {
            checked(&format!("random {dim}"), &random_symmetric(dim, dim as u64), dim);
        }
    }

    #[test]
    fn values_that_are_known() {
        let dim = 96;
        let second_difference = from_fn(dim, |i, j| match i.abs_diff(j) {
            0 => 2.0,
            1 => -1.0,
            _ => 0.0,
        });
        let angle = |k: usize| std::f64::consts::PI * k as f64 / (dim + 1) as f64;
        let expected: Vec<f64> = (1..=dim).map(|k| 2.0 - 2.0 * angle(k).cos()).collect();
        assert_values(
            "second difference",
            &checked("second difference", &second_difference, dim).values,
            &expected,
        );

        // The two largest values agree in 14 digits although nothing beside the diagonal is small.
        let wilkinson = from_fn(21, |i, j| match i.abs_diff(j) {
            0 => 10.0 - i.min(20 - i) as f64,
            1 => 1.0,
            _ => 0.0,
        });
        let values = checked("wilkinson", &wilkinson, 21).values;
        assert!((values[20] - 10.746_194_182_903_39).abs() < 1e-12, "{values:?}");
        assert!((values[20] - values[19]).abs() < 1e-12, "{values:?}");
    }

    #[test]
    fn repeated_zero_and_rank_one() {
        let dim = 40;
        assert_values("zero", &checked("zero", &vec![0.0; dim * dim], dim).values, &vec![0.0; dim]);
        let identity = from_fn(dim, |i, j| if i == j { 3.0 } else { 0.0 });
        assert_values("identity", &checked("identity", &identity, dim).values, &vec![3.0; dim]);
        let mut expected = vec![0.0; dim];
        expected[dim - 1] = dim as f64;
        let ones = vec![1.0; dim * dim];
        assert_values("ones", &checked("ones", &ones, dim).values, &expected);

        // Twenty times 1 and twenty times 2 in a random basis.
        let basis = checked("basis", &random_symmetric(dim, 5), dim).vectors;
        let twice = from_fn(dim, |i, j| {
            (0..dim).map(|k| basis[k][i.min(j)] * basis[k][i.max(j)] * (1 + k % 2) as f64).sum()
        });
        let expected: Vec<f64> = (0..dim).map(|k| if k < dim / 2 { 1.0 } else { 2.0 }).collect();
        assert_values("repeated", &checked("repeated", &twice, dim).values, &expected);
    }

    #[test]
    fn tiny_huge_and_steep() {
        let dim = 48;
        let ordinary = checked("ordinary", &random_symmetric(dim, 8), dim);
        for factor in [1e-300, 1e-160, 1e160, 1e300] {
            let matrix: Vec<f64> = random_symmetric(dim, 8).iter().map(|value| value * factor).collect();
            let scaled = checked(&format!("times {factor}"), &matrix, dim);
            let expected: Vec<f64> = ordinary.values.iter().map(|value| value * factor).collect();
            assert_values(&format!("times {factor}"), &scaled.values, &expected);
        }
        checked(
            "denormal",
            &random_symmetric(4, 2).iter().map(|value| value * 1e-318).collect::<Vec<_>>(),
            4,
        );
        let steep = from_fn(dim, |i, j| 10f64.powi(-(i as i32) - j as i32) * if i == j { 2.0 } else { 0.5 });
        checked("steep", &steep, dim);
        let blocks = from_fn(dim, |i, j| if i / 8 == j / 8 { 1.0 + (i + j) as f64 } else { 0.0 });
        checked("blocks", &blocks, dim);
    }

    #[test]
    fn what_is_not_finite_has_no_eigenvectors() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut matrix = random_symmetric(6, 1);
            (matrix[7], matrix[35]) = (bad, 1.0);
            assert!(symmetric_eigen(&matrix, 6).is_none(), "{bad}");
        }
    }
}
