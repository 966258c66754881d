//! `oscar doctor`: what this machine has, what is missing, and the fix.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::Args;
use oscar_kernels::cpu::isa::{Isa, OVERRIDE};
use oscar_model::source::Settings;
use oscar_report::Machine;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{binary_bytes, print_json, print_table};

/// Check this machine and say what is missing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar doctor\n  \
    OSCAR_SIMD=avx2 oscar doctor\n  \
    oscar doctor --json\n\n\
    Ends with 1 if something must be fixed before models run; what is merely missing is a warning.")]
pub(crate) struct DoctorArguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warning,
    Broken,
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    status: Status,
    found: String,
    fix: Option<String>,
}

impl DoctorArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut checks = hardware();
        match Settings::from_environment() {
            Ok(settings) => checks.extend(software(&settings)),
            Err(error) => checks.push(broken("cache", error.to_string(), error.fix())),
        }
        let broken = checks.iter().filter(|check| check.status == Status::Broken).count();
        if self.json {
            print_json(&checks)?;
        } else {
            print_checks(&checks)?;
        }
        if broken == 0 {
            Ok(())
        } else {
            Err(Failure::new(format!("{broken} of {} checks failed", checks.len())))
        }
    }
}

fn print_checks(checks: &[Check]) -> Result<(), Failure> {
    let rows: Vec<Vec<String>> = checks
        .iter()
        .map(|check| {
            let status = match check.status {
                Status::Ok => "ok",
                Status::Warning => "warning",
                Status::Broken => "BROKEN",
            };
            let found = match &check.fix {
                Some(fix) => format!("{} (fix: {fix})", check.found),
                None => check.found.clone(),
            };
            vec![check.check.to_owned(), status.to_owned(), found]
        })
        .collect();
    print_table(&["CHECK", "STATUS", "FOUND"], &rows, &[])
}

fn hardware() -> Vec<Check> {
    let machine = Machine::here();
    let paths: Vec<String> = Isa::available().map(|isa| isa.to_string()).collect();
    let simd = match Isa::from_env() {
        Ok(chosen) if chosen == Isa::detect() => {
            ok("simd", format!("{chosen} in use; available: {}", paths.join(", ")))
        }
        Ok(chosen) => warning(
            "simd",
            format!("{chosen} forced by {OVERRIDE}; available: {}", paths.join(", ")),
            format!("unset {OVERRIDE} for the fastest path"),
        ),
        Err(error) => broken("simd", error.to_string(), Some(format!("unset {OVERRIDE}"))),
    };
    vec![
        ok("cpu", format!("{} ({})", machine.cpu, machine.system)),
        simd,
        ok("threads", machine.threads.to_string()),
        ok("memory", machine.memory_bytes.map_or_else(|| "unknown".to_owned(), binary_bytes)),
        ok("gpu", "no CUDA backend yet: models run on the CPU".to_owned()),
    ]
}

fn software(settings: &Settings) -> Vec<Check> {
    let cache = settings.cache.directory();
    let fetched: Vec<&str> = settings
        .catalogue
        .entries()
        .iter()
        .filter(|entry| settings.cache.contains(entry))
        .map(|entry| entry.name.as_str())
        .collect();
    let models = if fetched.is_empty() {
        warning("models", "none fetched".to_owned(), "run `oscar pull smollm2`".to_owned())
    } else {
        ok("models", fetched.join(", "))
    };
    vec![
        python(settings),
        hub_client(settings),
        writable("cache", cache),
        hub_cache(&settings.hub_cache),
        models,
    ]
}

/// Only downloads need Python, so its absence is no more than a warning.
fn python(settings: &Settings) -> Check {
    let located = settings.python.clone().or_else(|| settings.program(&["python3", "python"]));
    let fix =
        "install Python 3 with pip, or set OSCAR_PYTHON; needed only to fetch catalogue models".to_owned();
    let Some(python) = located else {
        return warning("pip", "no python3 on PATH".to_owned(), fix);
    };
    let ran = Command::new(&python).args(["-m", "pip", "--version"]).stdin(Stdio::null()).output();
    match ran {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            let version: Vec<&str> = text.split_whitespace().take(2).collect();
            ok("pip", format!("{} with {}", python.display(), version.join(" ")))
        }
        Ok(_) => {
            let fix = format!("run `{} -m ensurepip`, or set OSCAR_PYTHON", python.display());
            warning("pip", format!("{} has no pip", python.display()), fix)
        }
        Err(error) => warning("pip", format!("{}: {error}", python.display()), fix),
    }
}

fn hub_client(settings: &Settings) -> Check {
    match settings.program(&["hf", "huggingface-cli"]) {
        Some(path) => ok("hub client", path.display().to_string()),
        None => warning(
            "hub client",
            "none; hub ids work only if they are in the hub cache".to_owned(),
            "pip install huggingface_hub".to_owned(),
        ),
    }
}

/// Tries to write: permissions alone do not tell of read-only disks and quotas.
fn writable(check: &'static str, directory: &Path) -> Check {
    let probe = directory.join(format!(".probe-{}", std::process::id()));
    let tried = fs::create_dir_all(directory).and_then(|()| fs::write(&probe, b"probe"));
    let _ = fs::remove_file(&probe);
    match tried {
        Ok(()) => {
            let free = free_bytes(directory)
                .map_or_else(String::new, |bytes| format!(", {} free", binary_bytes(bytes)));
            ok(check, format!("{} is writable{free}", directory.display()))
        }
        Err(error) => broken(
            check,
            format!("{} cannot be written: {error}", directory.display()),
            Some("set OSCAR_CACHE to a directory you can write to".to_owned()),
        ),
    }
}

fn hub_cache(directory: &Path) -> Check {
    let mut models: Vec<String> = fs::read_dir(directory)
        .map(|files| files.flatten().filter_map(|file| file.file_name().into_string().ok()).collect())
        .unwrap_or_default();
    models.retain(|name| name.starts_with("models--"));
    models.sort();
    let names: Vec<String> =
        models.iter().map(|name| name.trim_start_matches("models--").replacen("--", "/", 1)).collect();
    let held = if names.is_empty() { "no models".to_owned() } else { names.join(", ") };
    ok("hub cache", format!("{}: {held}", directory.display()))
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn free_bytes(directory: &Path) -> Option<u64> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let path = CString::new(directory.as_os_str().as_bytes()).ok()?;
    let mut statistics = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` ends in a zero byte and `statistics` is large enough for what the call writes.
    let result = unsafe { libc::statvfs(path.as_ptr(), statistics.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it filled the structure.
    let statistics = unsafe { statistics.assume_init() };
    #[allow(clippy::unnecessary_cast)] // the field types differ between systems
    (statistics.f_bavail as u64).checked_mul(statistics.f_frsize as u64)
}

#[cfg(not(unix))]
fn free_bytes(_directory: &Path) -> Option<u64> {
    None
}

fn ok(check: &'static str, found: String) -> Check {
    Check { check, status: Status::Ok, found, fix: None }
}

fn warning(check: &'static str, found: String, fix: String) -> Check {
    Check { check, status: Status::Warning, found, fix: Some(fix) }
}

fn broken(check: &'static str, found: String, fix: Option<String>) -> Check {
    Check { check, status: Status::Broken, found, fix }
}
