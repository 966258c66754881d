//! A device that computes hashes instead of numbers.
//!
//! The hidden state of a row is one 64-bit hash. What a layer stores for a row is a hash of its hidden state and its
//! position, and attention is a hash of everything that the row may see: rows of bf16 pages as they were stored, sealed
//! pages as they were when they were sealed, each under its index in the sequence. So the token that is sampled for a
//! sequence depends on every page it reads and on how it reads it. A wrong page table, a page that was not copied before it
//! was written, a slot that belongs to somebody else, a page sealed from the wrong rows, or a sealed page read where a bf16
//! page should be: each changes the answer.
//!
//! Weights have no part in it. Any operation can be made to fail at random ([`HashBackend::inject_faults`]), and the device can be
//! lost, so that all of them fail from then on ([`HashBackend::lose_after`]).

mod cache;
mod faults;
mod step;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use oscar_codec::{ExactSlot, HostCopy};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, Draw, Feature, GatedMlp, Linear, RmsNorm, Rope, RoutedMlp, Sampled,
    Sampling, SealPage, StoredMatrix,
};
use oscar_kernels::{Backend, KernelError};

pub use cache::HashCache;
use faults::{Fault, Faults};
pub use faults::{FaultCounts, FaultRates};
pub use step::HashStep;

/// A device whose tokens are hashes of everything that they may depend on.
#[derive(Debug, Default)]
pub struct HashBackend {
    faults: Mutex<Faults>,
    ahead: AtomicBool,
    /// What the device says of its memory.
    free_memory: Option<usize>,
}

/// Activations: one hash for each row.
#[derive(Debug)]
pub struct HashBuffer(Vec<u64>);

impl HashBackend {
    /// Lets operations fail at random from now on.
    pub fn inject_faults(&self, seed: u64, rates: FaultRates) {
        self.faults().inject(seed, rates);
    }

    /// Loses the device after so many more operations: whatever is asked of it then fails, and the error is fatal
    /// ([`KernelError::is_fatal`]). `None` makes it whole again.
    pub fn lose_after(&self, operations: Option<u64>) {
        self.faults().lose_after(operations);
    }

    /// A device with memory of its own, of which so much is free whatever is put there.
    pub fn with_free_memory(self, bytes: usize) -> HashBackend {
        HashBackend { free_memory: Some(bytes), ..self }
    }

    /// Says whether steps may begin before the tokens that they compute are known. They may not at first.
    pub fn compute_ahead(&self, ahead: bool) {
        self.ahead.store(ahead, Ordering::SeqCst);
    }

    /// How many operations have failed, by kind.
    pub fn fault_counts(&self) -> FaultCounts {
        self.faults().counts
    }

    fn check_device(&self) -> Result<(), KernelError> {
        self.faults().check_device()
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One round of a hash: what came before and what is added.
fn mix(state: u64, value: u64) -> u64 {
    let z = (state ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).wrapping_add(state.rotate_left(23))
}

impl Backend for HashBackend {
    type Weight = ();
    type Experts = ();
    type Buffer = HashBuffer;
    type Cache = HashCache;
    type Step = HashStep;
    type Draws = Vec<Result<Sampled, KernelError>>;

    fn is_deterministic(&self) -> bool {
        true
    }

    fn supports(&self, _: Feature) -> bool {
        true
    }

    fn free_memory(&self) -> Option<usize> {
        self.free_memory
    }

    fn weight(&self, stored: &StoredMatrix) -> Result<(), KernelError> {
        self.check_device()?;
        stored.data().map(|_| ())
    }

    fn experts(&self, stored: &[StoredMatrix]) -> Result<(), KernelError> {
        stored.iter().try_for_each(|stored| self.weight(stored))
    }

    fn buffer(&self, rows: usize, _: usize) -> Result<HashBuffer, KernelError> {
        self.faults().check(Fault::Buffer)?;
        Ok(HashBuffer(vec![0; rows]))
    }

    fn cache(&self, spec: &CacheSpec) -> Result<HashCache, KernelError> {
        self.check_device()?;
        Ok(HashCache::new(spec))
    }

    fn read(&self, buffer: &HashBuffer, rows: Range<usize>) -> Result<Vec<f32>, KernelError> {
        self.check_device()?;
        // Two values of a row: one alone would be the same for all rows once they are normed.
        let halves = |hash: &u64| [(hash >> 40) as f32, (hash & 0xff_ffff) as f32];
        Ok(buffer.0[rows].iter().flat_map(halves).collect())
    }

    fn begin_step(&self, batch: &Batch<'_>, _: &Rope, cache: &HashCache) -> Result<HashStep, KernelError> {
        self.faults().check(Fault::Forward)?;
        HashStep::new(batch, cache)
    }

    fn add_windows(&self, _: &mut HashStep, _: &Rope, _: usize, _: &HashCache) -> Result<(), KernelError> {
        Ok(())
    }

    fn scale(&self, step: &HashStep, _: f32, hidden: &mut HashBuffer) -> Result<(), KernelError> {
        self.check_device()?;
        hidden.0[..step.tokens.len()].iter_mut().for_each(|hidden| *hidden = mix(8, *hidden));
        Ok(())
    }

    fn embed(&self, (): &(), step: &HashStep, hidden: &mut HashBuffer) -> Result<(), KernelError> {
        self.check_device()?;
        for (hidden, &token) in hidden.0.iter_mut().zip(&step.tokens) {
            *hidden = mix(1, u64::from(token));
        }
        Ok(())
    }

    fn norm_linear(
        &self,
        step: &HashStep,
        x: &HashBuffer,
        _: &RmsNorm<Self>,
        _: &[&Linear<Self>],
        out: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.check_device()?;
        for row in 0..step.tokens.len() {
            out.0[row] = mix(2, x.0[row]);
        }
        Ok(())
    }

    fn rope_store(
        &self,
        step: &HashStep,
        _: &AttentionSpec<Self>,
        layer: usize,
        qkv: &mut HashBuffer,
        cache: &mut HashCache,
    ) -> Result<(), KernelError> {
        self.check_device()?;
        step.for_each_row(|row, sequence, position| {
            qkv.0[row] = mix(qkv.0[row], position as u64);
            sequence.store(layer, position, qkv.0[row], cache);
        });
        Ok(())
    }

    fn attend(
        &self,
        step: &HashStep,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &HashBuffer,
        cache: &HashCache,
        out: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.faults().check(Fault::Forward)?;
        let mut missing = None;
        step.for_each_row(|row, sequence, position| {
            let seen = match spec.window {
                None => sequence.visible(layer, position, cache),
                Some(window) => {
                    sequence.visible_window(layer, position, window, cache).unwrap_or_else(|page| {
                        missing = Some(KernelError::PageMissing { page, tier: "a window" });
                        0
                    })
                }
            };
            out.0[row] = mix(qkv.0[row], seen);
        });
        missing.map_or(Ok(()), Err)
    }

    fn seal(
        &self,
        layers: Range<usize>,
        pages: &[SealPage],
        cache: &mut HashCache,
    ) -> Result<(), KernelError> {
        if pages.is_empty() {
            return Ok(());
        }
        let failed = self.faults().check_seal(pages.len());
        for (index, page) in pages.iter().enumerate() {
            // Those before the page that fails are written.
            if let Err(KernelError::Seal { page, .. }) = &failed
                && *page == index
            {
                break;
            }
            layers.clone().try_for_each(|layer| cache.seal(layer, *page))?;
        }
        failed
    }

    fn copy_pages(&self, pages: &[(ExactSlot, ExactSlot)], cache: &mut HashCache) -> Result<(), KernelError> {
        if pages.is_empty() {
            return Ok(());
        }
        self.faults().check(Fault::Copy)?;
        pages.iter().try_for_each(|&(from, to)| cache.copy(from, to))
    }

    fn copy_host_pages(&self, copies: &[HostCopy], cache: &mut HashCache) -> Result<(), KernelError> {
        self.faults().check(Fault::Copy)?;
        copies.iter().try_for_each(|&copy| cache.copy_host_page(copy))
    }

    fn release_scratch(&self, cache: &mut HashCache) {
        cache.forget_scratch();
    }

    fn linear_add(
        &self,
        step: &HashStep,
        x: &HashBuffer,
        _: &Linear<Self>,
        hidden: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.check_device()?;
        for row in 0..step.tokens.len() {
            hidden.0[row] = hidden.0[row].wrapping_add(mix(3, x.0[row]));
        }
        Ok(())
    }

    fn linear_norm_add(
        &self,
        step: &HashStep,
        x: &HashBuffer,
        linear: &Linear<Self>,
        _: &RmsNorm<Self>,
        hidden: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.linear_add(step, x, linear, hidden)
    }

    fn gated_mlp(
        &self,
        step: &HashStep,
        _: &GatedMlp<Self>,
        hidden: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.check_device()?;
        for hidden in &mut hidden.0[..step.tokens.len()] {
            *hidden = mix(4, *hidden);
        }
        Ok(())
    }

    fn routed_mlp(
        &self,
        step: &HashStep,
        _: &RoutedMlp<Self>,
        hidden: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.check_device()?;
        for hidden in &mut hidden.0[..step.tokens.len()] {
            *hidden = mix(6, *hidden);
        }
        Ok(())
    }

    fn logits(
        &self,
        hidden: &HashBuffer,
        rows: &[usize],
        _: &RmsNorm<Self>,
        (): &(),
        out: &mut HashBuffer,
    ) -> Result<(), KernelError> {
        self.faults().check(Fault::Forward)?;
        for (out, &row) in out.0.iter_mut().zip(rows) {
            *out = mix(5, hidden.0[row]);
        }
        Ok(())
    }

    fn computes_ahead(&self) -> bool {
        self.ahead.load(Ordering::SeqCst)
    }

    fn begin_step_of_draws(
        &self,
        draws: &Self::Draws,
        batch: &Batch<'_>,
        rope: &Rope,
        cache: &HashCache,
    ) -> Result<Option<HashStep>, KernelError> {
        let tokens: Vec<u32> = draws.iter().map(token_passed_on).map(|token| token.unwrap_or(0)).collect();
        self.begin_step(&Batch { tokens: &tokens, ..*batch }, rope, cache).map(Some)
    }

    fn begin_draws(
        &self,
        logits: &HashBuffer,
        settings: &[Sampling<'_>],
    ) -> Result<Self::Draws, KernelError> {
        self.faults().check(Fault::Sample)?;
        let sample = |(&hash, setting)| {
            self.faults().check(Fault::SampleRow)?;
            sample(hash, setting)
        };
        Ok(logits.0.iter().zip(settings).map(sample).collect())
    }

    fn finish_draws(
        &self,
        draws: Self::Draws,
        _: &HashBuffer,
        _: &[Sampling<'_>],
    ) -> Result<Vec<Draw>, KernelError> {
        self.check_device()?;
        let passed_on = |sampled: &_| token_passed_on(sampled).is_some();
        Ok(draws.into_iter().map(|sampled| Draw { passed_on: passed_on(&sampled), sampled }).collect())
    }
}

/// The token that a step ahead gets: none for rows that could not be drawn, and for a few others, as on a card.
fn token_passed_on(sampled: &Result<Sampled, KernelError>) -> Option<u32> {
    sampled.as_ref().ok().map(|sampled| sampled.token).filter(|token| token % 16 != 3)
}

/// Takes the token that a hash stands for, or the next one that is allowed. The draw counts unless the answer is greedy.
fn sample(hash: u64, setting: &Sampling<'_>) -> Result<Sampled, KernelError> {
    let vocabulary = setting.vocabulary as u64;
    let drawn = if setting.temperature > 0.0 { mix(hash, u64::from(setting.draw.to_bits())) } else { hash };
    let may_come = |token: u32| {
        let masked = setting.allowed.is_some_and(|words| words[token as usize / 32] >> (token % 32) & 1 == 0);
        let changed = |token| setting.changes.iter().filter(move |change| change.token == token);
        !masked && !changed(token).any(|change| change.add == f32::NEG_INFINITY)
    };
    let mut candidates = (0..vocabulary).map(|step| ((drawn + step) % vocabulary) as u32);
    let token = match setting.given {
        Some(token) => token,
        None => candidates
            .find(|&token| may_come(token))
            .ok_or_else(|| KernelError::BadSetting("no token may be drawn".into()))?,
    };
    let logprob = |token: u32| -((mix(hash, u64::from(token)) >> 44) as f32);
    let top = |count: usize| (0..count as u64).map(|rank| ((hash.wrapping_add(rank)) % vocabulary) as u32);
    Ok(Sampled {
        token,
        logprob: setting.logprobs.map(|_| logprob(token)),
        top: setting.logprobs.into_iter().flat_map(top).map(|token| (token, logprob(token))).collect(),
    })
}
