//! What each kernel computes, in plain loops: a file for each source of `oscar-kernels` or for a few that belong together.
//!
//! A kernel goes through its blocks as the grid says, reads its argument by the names of its source, and touches memory only
//! through [`Access`](crate::memory::Access). Orders of bytes that nobody but kernels reads (tiles of weights, packed activations)
//! are simpler here than on a card, and take as much room.

mod activations;
mod attend;
mod experts;
mod multiply;
mod norm;
mod route;
mod rows;
mod sample;
mod seal;
mod tiles;
mod undo;
mod weights;
mod write;

use crate::call::Call;
use crate::memory::Fault;

/// A kernel.
pub(crate) type Kernel = fn(&Call<'_>) -> Result<(), Fault>;

/// The kernel of a name.
pub(crate) fn find(name: &str) -> Option<Kernel> {
    Some(match name {
        "norm_columns" => norm::norm_columns,
        "add_normed" => norm::add_normed,
        "scale" => norm::scale,
        "repack" => weights::repack,
        "unpack_floats" => weights::unpack_floats,
        "embed" => weights::embed,
        "pack" => activations::pack,
        "multiply" => multiply::multiply,
        "write_rows" => write::write_rows,
        "attend" => attend::attend,
        "attend_rows" => rows::attend_rows,
        "undo" => undo::undo,
        "seal" => seal::seal,
        "survey" => sample::survey,
        "choose_experts" => route::choose_experts,
        "sort_choices" => route::sort_choices,
        "route" => route::route,
        "combine" => route::combine,
        "multiply_experts" => experts::multiply_experts,
        "open_experts" => experts::open_experts,
        "close_experts" => experts::close_experts,
        // Only products of cuBLASLt, which is not there, read what it writes.
        "unpack_rows" => unpack_rows,
        _ => return None,
    })
}

fn unpack_rows(_: &Call<'_>) -> Result<(), Fault> {
    Err("there is no stand-in for what cuBLASLt multiplies with".to_owned())
}

/// Calls a function compiled for wide vectors and fused operations, where the machine has them; these are no part of what every
/// machine of its kind has.
macro_rules! with_vectors {
    ($function:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2") {
            #[target_feature(enable = "avx2,fma")]
            fn with_instructions($($argument: $kind),*) $(-> $result)? {
                $function($($argument),*)
            }
            // SAFETY: the machine has both.
            return unsafe { with_instructions($($argument),*) };
        }
        $function($($argument),*)
    }};
}

/// Adds a multiple of numbers to others, each sum rounded once.
fn add_multiple(sums: &mut [f32], x: f32, of: &[f32]) {
    #[inline(always)]
    fn plain(sums: &mut [f32], x: f32, of: &[f32]) {
        sums.iter_mut().zip(of).for_each(|(sum, y)| *sum = x.mul_add(*y, *sum));
    }
    with_vectors!(plain(sums: &mut [f32], x: f32, of: &[f32]))
}

/// The sum of products, in several chains.
fn dot(left: &[f32], right: &[f32]) -> f32 {
    #[inline(always)]
    fn plain(left: &[f32], right: &[f32]) -> f32 {
        const CHAINS: usize = 32;
        let mut sums = [0.0_f32; CHAINS];
        let (left_parts, left_rest) = left.as_chunks::<CHAINS>();
        let (right_parts, right_rest) = right.as_chunks::<CHAINS>();
        for (left, right) in left_parts.iter().zip(right_parts) {
            for i in 0..CHAINS {
                sums[i] += left[i] * right[i];
            }
        }
        let rest: f32 = left_rest.iter().zip(right_rest).map(|(a, b)| a * b).sum();
        sums.iter().sum::<f32>() + rest
    }
    with_vectors!(plain(left: &[f32], right: &[f32]) -> f32)
}
