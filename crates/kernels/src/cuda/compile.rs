//! Kernel sources to machine code, with NVRTC and a cache on disk.
//!
//! Kernels are compiled for the card that is there, once per shape: head dimension, format and the like are macros, so
//! that every loop has a constant length. The cache is keyed by the compiler's version, the text, the options and the
//! architecture; a file that is not there, or cannot be written, costs a compilation of some seconds and nothing else.

use std::ffi::{CString, OsString};
use std::fmt::Write;
use std::path::Path;
use std::sync::OnceLock;

use crate::error::CudaError;
use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};

/// Options of kernels whose results are compared with a tolerance. `configurations.json` has the same, for the check
/// without a card.
pub const OPTIONS: [&str; 2] = ["--std=c++17", "--use_fast_math"];

/// Options of kernels whose results are defined to the bit: what is written as two operations is rounded twice.
pub const EXACT_OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// The files of a kernel: `prelude.cu`, then those that are named.
macro_rules! texts {
    ($($file:literal),*) => {
        vec![
            ("prelude.cu", include_str!("kernels/prelude.cu")),
            $(($file, include_str!(concat!("kernels/", $file)))),*
        ]
    };
}
pub(super) use texts;

/// A kernel before it is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name that errors call the kernel by.
    pub name: String,
    /// Files by name with their text, in the order in which they are compiled as one.
    pub texts: Vec<(&'static str, &'static str)>,
    /// Macros that are defined for the compiler, with their values.
    pub defines: Vec<(&'static str, usize)>,
    /// Whether results are defined to the bit: [`EXACT_OPTIONS`] instead of [`OPTIONS`].
    pub exact: bool,
}

impl Source {
    /// The entry of this kernel in a list of `tools/check-cuda-kernels`.
    #[cfg(test)]
    pub(super) fn configuration(&self, name: &str) -> serde_json::Value {
        let sources: Vec<&str> = self.texts.iter().map(|(name, _)| *name).collect();
        let defines: serde_json::Map<_, _> =
            self.defines.iter().map(|&(key, value)| (key.to_owned(), value.into())).collect();
        serde_json::json!({ "name": name, "sources": sources, "defines": defines })
    }

    /// The options for an architecture such as `sm_90a`.
    pub fn options(&self, architecture: &str) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend(if self.exact { EXACT_OPTIONS } else { OPTIONS }.map(str::to_owned));
        options.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }

    /// Name of the file that caches the machine code: a hash of the compiler's version, text, options and architecture.
    pub fn cache_name(&self, architecture: &str) -> String {
        self.cache_name_by(architecture, compiler_version())
    }

    fn cache_name_by(&self, architecture: &str, (major, minor): (i32, i32)) -> String {
        let mut hash = Sha256::new();
        hash.update(format!("{major}.{minor}\0").as_bytes());
        for option in self.options(architecture) {
            hash.update(option.as_bytes());
            hash.update([0]);
        }
        for (_, text) in &self.texts {
            hash.update(text.as_bytes());
        }
        let mut name = String::with_capacity(70);
        for byte in hash.finalize() {
            let _ = write!(name, "{byte:02x}");
        }
        name + ".cubin"
    }

    /// Machine code for an architecture, from the folder `cache` if it is there.
    pub fn machine_code(&self, architecture: &str, cache: Option<&Path>) -> Result<Vec<u8>, CudaError> {
        let file = cache.map(|folder| folder.join(self.cache_name(architecture)));
        if let Some(code) =
            file.as_deref().and_then(|file| std::fs::read(file).ok()).filter(|code| is_machine_code(code))
        {
            return Ok(code);
        }
        let code = self.compile(architecture)?;
        if let Some(file) = file {
            // A cache that cannot be written is no reason to fail.
            let _ = store(&file, &code);
        }
        Ok(code)
    }

    /// Compiles, whatever the cache holds.
    pub fn compile(&self, architecture: &str) -> Result<Vec<u8>, CudaError> {
        // SAFETY: probing opens and closes the library, whose initialisers are those of a CUDA installation.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::LibraryMissing {
                library: "libnvrtc.so (NVIDIA's run-time compiler)",
                fix: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` and put its `lib` folder on \
                      LD_LIBRARY_PATH",
            });
        }
        let failed = |log: String| CudaError::Compile {
            name: self.name.clone(),
            architecture: architecture.to_owned(),
            log,
        };
        let text: String = self.texts.iter().map(|(_, text)| *text).collect();
        let text = CString::new(text).map_err(|error| failed(error.to_string()))?;
        let program =
            Program(result::create_program(&text, None).map_err(|error| failed(error.to_string()))?);
        // SAFETY: the program was created above and lives until the end of this function.
        let compiled = unsafe { result::compile_program(program.0, &self.options(architecture)) };
        if let Err(error) = compiled {
            // SAFETY: as above.
            let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
            let log: Vec<u8> = log.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
            return Err(failed(format!("{error}\n{}", String::from_utf8_lossy(&log))));
        }
        let mut size = 0;
        // SAFETY: as above; `size` outlives the call.
        unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size).result() }
            .map_err(|error| failed(error.to_string()))?;
        let mut code = vec![0_u8; size];
        // SAFETY: as above; the library writes exactly `size` bytes.
        unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result() }
            .map_err(|error| failed(error.to_string()))?;
        Ok(code)
    }
}

/// The version of NVRTC, which decides how fast the same source becomes; zeros if it is not there.
fn compiler_version() -> (i32, i32) {
    static VERSION: OnceLock<(i32, i32)> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: probing opens and closes the library; it is asked only if it is there, and the numbers outlive the call.
        unsafe {
            if sys::is_culib_present() {
                let _ = sys::nvrtcVersion(&mut major, &mut minor);
            }
        }
        (major, minor)
    })
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is destroyed once, here. An error leaves nothing to be done.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// A file that was cut short is compiled again; machine code is an ELF file.
fn is_machine_code(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Under another name first, so that nobody reads half a file.
fn store(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut temporary = OsString::from(file.as_os_str());
    temporary.push(format!(".{}", std::process::id()));
    std::fs::write(&temporary, code)?;
    std::fs::rename(&temporary, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> Source {
        let texts = vec![("test.cu", "extern \"C\" __global__ void kernel() {}")];
        Source { name: "test".into(), texts, defines: vec![("HEAD_DIM", 64)], exact: false }
    }

    #[test]
    fn the_cache_name_depends_on_everything_that_changes_the_code() {
        let name = source().cache_name("sm_90a");
        assert_eq!(name, source().cache_name("sm_90a"));
        assert_eq!(name.len(), 64 + ".cubin".len());
        let mut others = vec![source().cache_name("sm_80")];
        others.push(Source { texts: vec![("test.cu", "extern")], ..source() }.cache_name("sm_90a"));
        others.push(Source { defines: vec![("HEAD_DIM", 128)], ..source() }.cache_name("sm_90a"));
        others.push(Source { defines: vec![], ..source() }.cache_name("sm_90a"));
        others.push(Source { exact: true, ..source() }.cache_name("sm_90a"));
        others.push(source().cache_name_by("sm_90a", (99, 0)));
        assert!(others.iter().all(|other| *other != name), "{others:?}");
        // A message may call a kernel something else.
        assert_eq!(Source { name: "other".into(), ..source() }.cache_name("sm_90a"), name);
    }

    #[test]
    fn cached_code_is_used_and_broken_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sub").join(source().cache_name("sm_90a"));
        store(&file, b"\x7fELF and so on").unwrap();
        let cache = file.parent().unwrap();
        assert_eq!(source().machine_code("sm_90a", Some(cache)).unwrap(), b"\x7fELF and so on");
        assert_eq!(std::fs::read_dir(cache).unwrap().count(), 1, "no temporary file stays");
        std::fs::write(&file, b"").unwrap();
        match source().machine_code("sm_90a", Some(cache)) {
            Ok(code) => assert!(is_machine_code(&code)),
            Err(error) => assert!(error.to_string().contains("libnvrtc"), "{error}"),
        }
    }
}
