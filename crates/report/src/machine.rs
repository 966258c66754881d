//! The machine a measurement was made on, and what the process uses of it.

use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cpu::pool::Pool;
use serde::Serialize;

/// The machine a measurement was made on, as a reader needs it to judge a number.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor name as the system reports it.
    pub cpu: String,
    /// Threads this process may use.
    pub threads: usize,
    /// Kernel path in use.
    pub simd: String,
    /// Bytes of physical memory, if the system says.
    pub memory_bytes: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
    /// Version of oscar.
    pub oscar: &'static str,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Machine {
        Machine {
            cpu: cpu_name().unwrap_or_else(|| "unknown".into()),
            threads: Pool::default_threads(),
            simd: Isa::from_env().unwrap_or(Isa::Scalar).to_string(),
            memory_bytes: memory_bytes(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            oscar: env!("CARGO_PKG_VERSION"),
        }
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let memory = self
            .memory_bytes
            .map_or(String::new(), |bytes| format!(", {:.0} GiB", bytes as f64 / (1u64 << 30) as f64));
        format!(
            "{}, {} threads{memory}, {} kernels, {}, oscar {}",
            self.cpu, self.threads, self.simd, self.system, self.oscar
        )
    }
}

/// A value of a `name : value` file such as those under /proc.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn cpu_name() -> Option<String> {
    field("/proc/cpuinfo", "model name").or_else(|| field("/proc/cpuinfo", "Processor"))
}

fn memory_bytes() -> Option<u64> {
    kibibytes(&field("/proc/meminfo", "MemTotal")?)
}

fn kibibytes(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Largest resident size of this process so far; mapped weights count once they are read.
pub fn peak_rss_bytes() -> Option<u64> {
    kibibytes(&field("/proc/self/status", "VmHWM")?)
}

/// Resident size of this process now without mapped files: weights become resident whenever they are first read.
pub fn anonymous_bytes() -> Option<u64> {
    kibibytes(&field("/proc/self/status", "RssAnon")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_a_line() {
        let machine = Machine::here();
        assert!(machine.threads > 0);
        assert!(machine.line().contains(&machine.simd));
    }

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(kibibytes("24 kB"), Some(24 * 1024));
        assert_eq!(kibibytes("24"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn resident_size_is_known() {
        assert!(peak_rss_bytes().unwrap() > 1 << 20);
    }
}
