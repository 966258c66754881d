//! Which instruction sets this machine has, and which one the kernels use.
//!
//! The choice is made once. `OSCAR_SIMD=scalar|avx2|avx512|amx|neon` forces a path at or below what the machine
//! has, so that every path can be tested on one machine.

use std::fmt;
use std::str::FromStr;

use crate::backend::KernelError;

/// Environment variable that forces a path.
pub const OVERRIDE: &str = "OSCAR_SIMD";

/// A family of kernels. Higher x86 levels include the lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, the reference.
    Scalar,
    /// AArch64 NEON with the dot-product extension.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// AVX-512 as above plus AMX tiles with bf16 products.
    Amx,
}

impl Isa {
    /// Every path, lowest first.
    pub const ALL: [Isa; 5] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The best path of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }

    /// The same path without AMX tiles.
    pub fn without_tiles(self) -> Isa {
        if self == Isa::Amx { Isa::Avx512 } else { self }
    }

    /// The path to use: the override if it is set, else the best one.
    pub fn from_env() -> Result<Isa, KernelError> {
        match std::env::var(OVERRIDE) {
            Err(_) => Ok(Isa::detect()),
            Ok(name) if name.is_empty() => Ok(Isa::detect()),
            Ok(name) => {
                let isa: Isa = name.parse()?;
                if isa.is_available() {
                    return Ok(isa);
                }
                let available: Vec<_> = Isa::available().map(|isa| isa.to_string()).collect();
                Err(KernelError::BadSetting(format!(
                    "{OVERRIDE}={isa} is not available on this machine; it has {}",
                    available.join(", ")
                )))
            }
        }
    }

    /// The paths this machine can run.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this machine can run the path.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16") && amx_permitted()
            }
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        })
    }
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Isa, KernelError> {
        Isa::ALL.into_iter().find(|isa| isa.to_string() == name).ok_or_else(|| {
            KernelError::BadSetting(format!("{OVERRIDE}={name}: expected scalar, neon, avx2, avx512 or amx"))
        })
    }
}

/// Whether the CPU has AMX tiles with bf16 products and the kernel lets this process use them.
#[cfg(target_arch = "x86_64")]
fn amx_permitted() -> bool {
    use std::sync::OnceLock;
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        leaf.edx & AMX_BF16 != 0 && leaf.edx & AMX_TILE != 0 && request_tile_state()
    })
}

/// Asks the kernel for the tile registers; threads started later inherit the permission.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_tile_state() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call only changes this process's permission to use tile registers and touches no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_tile_state() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert!("sse".parse::<Isa>().unwrap_err().to_string().contains("sse"));
    }

    #[test]
    fn the_best_path_is_available() {
        assert!(Isa::detect().is_available());
        assert!(Isa::Scalar.is_available());
    }

    /// Tests go through the paths that this machine has. Here it is said once which of its architecture it has not.
    #[test]
    fn paths_that_cannot_be_tested_are_named() {
        use std::io::Write;
        let of_this_architecture = |isa: &Isa| (*isa == Isa::Neon) == cfg!(target_arch = "aarch64");
        for isa in Isa::ALL.into_iter().filter(of_this_architecture).filter(|isa| !isa.is_available()) {
            // Past the test harness, which would keep the line to itself; `.ci/run` lists it.
            let line = format!("skipped: this machine has no {isa}, so those kernels were not run\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    }
}
