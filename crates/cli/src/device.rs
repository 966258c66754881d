//! The one place that chooses a device. Everything else is generic over it: a command that runs a model is an [`OnDevice`].

use std::str::FromStr;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_kernels::cuda::{CudaBackend, Device};
use oscar_model::source::Settings;

use crate::arguments::positive;
use crate::failure::Failure;

/// The device that a model runs on, and the threads it may use.
#[derive(Clone, Debug, Args)]
pub(crate) struct DeviceArguments {
    /// Where the model runs: cpu, cuda, or cuda:1 for the second of several cards.
    #[arg(long, default_value = "cpu", value_name = "DEVICE", env = "OSCAR_DEVICE")]
    pub(crate) device: DeviceChoice,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    pub(crate) threads: Option<usize>,
}

/// A device as it is named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The processor of this machine.
    Cpu,
    /// The NVIDIA card of this number.
    Cuda(usize),
}

impl DeviceChoice {
    /// Prompt tokens of a pass: enough to be worth the weights that are read for them.
    pub(crate) fn prefill_chunk(self) -> usize {
        match self {
            DeviceChoice::Cpu => 512,
            DeviceChoice::Cuda(_) => 2048,
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match (text, text.strip_prefix("cuda:").and_then(|number| number.parse().ok())) {
            ("cpu", _) => Ok(DeviceChoice::Cpu),
            ("cuda", _) => Ok(DeviceChoice::Cuda(0)),
            (_, Some(card)) => Ok(DeviceChoice::Cuda(card)),
            _ => Err("must be cpu, cuda, or cuda:N".to_owned()),
        }
    }
}

/// Something that runs a model, on whatever device was chosen.
pub(crate) trait OnDevice {
    /// The result of the command.
    type Output;

    /// Runs on a device that is open.
    fn run_on<B: Inspect>(self, backend: B) -> Result<Self::Output, Failure>;
}

impl DeviceArguments {
    /// Opens the device and runs a command on it. `deterministic` gives a row the same bits in batches of every size.
    pub(crate) fn run<C: OnDevice>(&self, deterministic: bool, command: C) -> Result<C::Output, Failure> {
        let used = worker_threads(self.threads);
        if let Some(threads) = self.threads.filter(|&threads| threads > used) {
            tracing::warn!("--threads {threads}: using {used}, as many as this machine has");
        }
        // Encoding and statistics run on a pool of their own; it can only be sized once, before its first use.
        if rayon::ThreadPoolBuilder::new().num_threads(used).build_global().is_err() {
            tracing::debug!("the thread pool was sized before");
        }
        match self.device {
            DeviceChoice::Cpu => {
                let backend = CpuBackend::new(used)?;
                command.run_on(if deterministic { backend.deterministic() } else { backend })
            }
            DeviceChoice::Cuda(card) => {
                let kernels = Some(Settings::from_environment()?.kernel_folder());
                let device = Device::open(card, kernels).map_err(Failure::new)?;
                tracing::info!("{}, {}", device.name(), device.architecture());
                let backend = CudaBackend::new(device, deterministic).map_err(Failure::new)?;
                if !deterministic && !backend.has_blas() {
                    tracing::warn!("libcublasLt.so is not there: prompts are read more slowly without it");
                }
                command.run_on(backend)
            }
        }
    }
}

/// Worker threads that are used when so many were requested. They wait for each other by spinning, so more of them than
/// cores would only take turns.
pub(crate) fn worker_threads(asked: Option<usize>) -> usize {
    let most = Pool::default_threads();
    asked.unwrap_or(most).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
