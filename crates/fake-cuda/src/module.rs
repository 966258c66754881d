//! Machine code of this compiler, and sources that were loaded from it.

use std::fmt::Write;
use std::sync::OnceLock;

use crate::memory::Fault;
use crate::pages::Pages;
use crate::source::Source;

/// What begins machine code of this compiler; the length of the rest follows as eight bytes.
const MAGIC: &[u8] = b"\x7fELF of no card\n";

/// Machine code: the options, a line each, an empty line, and the text.
pub(crate) fn machine_code(options: &[String], text: &str) -> Vec<u8> {
    let mut body = String::new();
    for option in options {
        let _ = writeln!(body, "{option}");
    }
    body.push('\n');
    body.push_str(text);
    let length = (body.len() as u64).to_le_bytes();
    [MAGIC, &length, body.as_bytes()].concat()
}

/// A source that was loaded.
pub(crate) struct Module {
    pub(crate) source: Source,
    /// Worked out from the macros of the source when a kernel first needs them.
    pages: OnceLock<Result<Pages, Fault>>,
}

impl Module {
    /// Loads machine code.
    ///
    /// # Safety
    /// The bytes are readable as far as their own length says, which is true of whatever [`machine_code`] made.
    pub(crate) unsafe fn load(image: *const u8) -> Result<Module, Fault> {
        // SAFETY: machine code has these bytes at least.
        let (magic, length) = unsafe {
            let head = std::slice::from_raw_parts(image, MAGIC.len());
            (head, std::slice::from_raw_parts(image.add(MAGIC.len()), 8))
        };
        if magic != MAGIC {
            return Err("machine code that another compiler has made".to_owned());
        }
        let length = u64::from_le_bytes(length.try_into().map_err(|_| "a length of eight bytes")?) as usize;
        // SAFETY: as the caller says.
        let body = unsafe { std::slice::from_raw_parts(image.add(MAGIC.len() + 8), length) };
        let body = std::str::from_utf8(body).map_err(|error| error.to_string())?;
        let (options, text) = body.split_once("\n\n").ok_or("machine code without options")?;
        Module::of(options, text)
    }

    fn of(options: &str, text: &str) -> Result<Module, Fault> {
        let mut defines: Vec<(String, String)> = options
            .lines()
            .filter_map(|option| option.strip_prefix("-D")?.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        if let Some(name) = options.lines().find_map(|option| option.strip_prefix("--gpu-architecture=sm_")) {
            let digits = name.trim_end_matches(|c: char| !c.is_ascii_digit());
            defines.push(("__CUDA_ARCH__".to_owned(), format!("{digits}0")));
        }
        Ok(Module { source: Source::new(text, &defines)?, pages: OnceLock::new() })
    }

    /// The pages that kernels of this source read.
    pub(crate) fn pages(&self) -> Result<&Pages, Fault> {
        self.pages.get_or_init(|| Pages::of(&self.source)).as_ref().map_err(Clone::clone)
    }
}
