//! Operations that fail at random.

use oscar_codec::CodecError;
use oscar_kernels::KernelError;
use oscar_random::Random;

/// A kind of operation that can fail.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Buffer,
    Forward,
    Copy,
    Sample,
    SampleRow,
}

/// How often operations fail, by kind: about one in so many; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// Buffers for the hidden states of a prompt.
    pub buffer: usize,
    /// Operations of the forward pass: steps, attention and logits.
    pub forward: usize,
    /// Copies of pages.
    pub copy: usize,
    /// Calls that seal pages.
    pub seal: usize,
    /// Calls that sample, and rows of them.
    pub sample: usize,
}

/// How many operations have failed, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Buffers that were not given.
    pub buffer: u64,
    /// Operations of the forward pass: steps, attention and logits.
    pub forward: u64,
    /// Copies of pages.
    pub copy: u64,
    /// Pages that could not be sealed.
    pub seal: u64,
    /// Calls that sampled nothing.
    pub sample: u64,
    /// Rows for which nothing could be sampled.
    pub sample_row: u64,
    /// Operations that were asked of a device that was lost, the one that noticed included.
    pub after_loss: u64,
}

#[derive(Debug)]
pub(super) struct Faults {
    random: Random,
    rates: FaultRates,
    pub(super) counts: FaultCounts,
    /// Operations that still succeed before the device is lost, if it is going to be.
    operations_left: Option<u64>,
}

impl Default for Faults {
    fn default() -> Faults {
        let (rates, counts) = (FaultRates::default(), FaultCounts::default());
        Faults { random: Random::new(0), rates, counts, operations_left: None }
    }
}

impl Faults {
    pub(super) fn inject(&mut self, seed: u64, rates: FaultRates) {
        (self.random, self.rates) = (Random::new(seed), rates);
    }

    pub(super) fn lose_after(&mut self, operations: Option<u64>) {
        self.operations_left = operations;
    }

    /// Counts an operation, which fails if the device is lost by now, as every later one does.
    pub(super) fn check_device(&mut self) -> Result<(), KernelError> {
        match &mut self.operations_left {
            None => Ok(()),
            Some(0) => {
                self.counts.after_loss += 1;
                Err(KernelError::DeviceLost("injected fault: Device".to_owned()))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    fn fails(&mut self, one_in: usize) -> bool {
        one_in > 0 && self.random.one_in(one_in)
    }

    /// Counts an operation that can fail by itself, too.
    pub(super) fn check(&mut self, fault: Fault) -> Result<(), KernelError> {
        // A row is part of the operation that samples it.
        if !matches!(fault, Fault::SampleRow) {
            self.check_device()?;
        }
        let one_in = match fault {
            Fault::Buffer => self.rates.buffer,
            Fault::Forward => self.rates.forward,
            Fault::Copy => self.rates.copy,
            Fault::Sample | Fault::SampleRow => self.rates.sample,
        };
        if !self.fails(one_in) {
            return Ok(());
        }
        let counts = &mut self.counts;
        *match fault {
            Fault::Buffer => &mut counts.buffer,
            Fault::Forward => &mut counts.forward,
            Fault::Copy => &mut counts.copy,
            Fault::Sample => &mut counts.sample,
            Fault::SampleRow => &mut counts.sample_row,
        } += 1;
        Err(KernelError::BadSetting(format!("injected fault: {fault:?}")))
    }

    /// Sometimes one of `pages` pages cannot be sealed, and sometimes it is not said which.
    pub(super) fn check_seal(&mut self, pages: usize) -> Result<(), KernelError> {
        self.check_device()?;
        if !self.fails(self.rates.seal) {
            return Ok(());
        }
        self.counts.seal += 1;
        if self.random.one_in(3) {
            return Err(KernelError::BadSetting("injected fault: Seal".to_owned()));
        }
        let page = self.random.below(pages);
        let source = CodecError::NotFinite { row: 0, channel: 0 };
        Err(KernelError::Seal { page, layer: 0, head: 0, source })
    }
}
