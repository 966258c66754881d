//! Loaded sources, their kernels, and what a kernel is given when it runs.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use bytemuck::AnyBitPattern;

use crate::kernels::{self, Kernel};
use crate::memory::{Access, Fault};
use crate::source::{Field, FieldType, Layout, Source};

/// What begins machine code of this compiler; the length of the rest follows as eight bytes.
const MAGIC: &[u8] = b"\x7fELF of no card\n";

/// Shared memory that a block may have without asking for more.
const USUAL_SHARED_MEMORY: usize = 48 << 10;

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
    /// What kernels have worked out from the macros of the source.
    pub(crate) pages: OnceLock<Result<kernels::Pages, Fault>>,
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
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) name: String,
    module: Arc<Module>,
    kernel: Kernel,
    parameter: Arc<Layout>,
    /// Shared memory that launches may ask for.
    shared_memory: AtomicUsize,
}

impl Function {
    /// A kernel by its name; `None` if the source has none of that name.
    pub(crate) fn find(module: &Arc<Module>, name: &str) -> Result<Option<Function>, Fault> {
        let Some(parameter) = module.source.parameter(name)? else { return Ok(None) };
        let kernel = kernels::find(name).ok_or_else(|| format!("there is no stand-in for kernel {name}"))?;
        Ok(Some(Function {
            name: name.to_owned(),
            module: module.clone(),
            kernel,
            parameter,
            shared_memory: AtomicUsize::new(USUAL_SHARED_MEMORY),
        }))
    }

    /// Bytes of the argument.
    pub(crate) fn argument_bytes(&self) -> usize {
        self.parameter.bytes
    }

    /// Allows launches so much shared memory.
    pub(crate) fn allow_shared_memory(&self, bytes: usize) {
        self.shared_memory.store(bytes, Ordering::Relaxed);
    }

    /// Whether a launch may have so much shared memory.
    pub(crate) fn has_shared_memory(&self, bytes: usize) -> bool {
        bytes <= self.shared_memory.load(Ordering::Relaxed)
    }
}

/// A launch on its way: everything of it is known but what memory holds when it runs.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) argument: Vec<u8>,
    pub(crate) grid: [usize; 3],
}

impl Launch {
    /// Runs the kernel.
    pub(crate) fn run(&self) -> Result<(), Fault> {
        let access = Access::new();
        let call = Call {
            module: &self.function.module,
            arguments: Record { layout: &self.function.parameter, bytes: &self.argument },
            grid: self.grid,
            memory: &access,
        };
        (self.function.kernel)(&call)
    }
}

/// What a kernel is given.
pub(crate) struct Call<'a> {
    pub(crate) module: &'a Module,
    pub(crate) arguments: Record<'a>,
    /// Blocks.
    pub(crate) grid: [usize; 3],
    pub(crate) memory: &'a Access,
}

impl Call<'_> {
    /// The value of a macro or constant of the source.
    pub(crate) fn number(&self, name: &str) -> Result<usize, Fault> {
        let number = self.module.source.number(name)?;
        usize::try_from(number).map_err(|_| format!("{name} is {number}"))
    }

    /// Structs of a table in device memory.
    pub(crate) fn table(&self, name: &str, at: u64, count: usize) -> Result<Table, Fault> {
        let layout = self.module.source.layout(name)?;
        let bytes = self.memory.read(at, count * layout.bytes)?;
        Ok(Table { layout, bytes })
    }

    /// A struct of device memory.
    pub(crate) fn entry(&self, name: &str, at: u64, index: usize) -> Result<Table, Fault> {
        let bytes = self.module.source.layout(name)?.bytes;
        self.table(name, at + (index * bytes) as u64, 1)
    }
}

/// A copy of structs that lay in device memory.
pub(crate) struct Table {
    layout: Arc<Layout>,
    bytes: Vec<u8>,
}

impl Table {
    pub(crate) fn get(&self, index: usize) -> Record<'_> {
        let bytes = self.layout.bytes;
        Record { layout: &self.layout, bytes: &self.bytes[index * bytes..(index + 1) * bytes] }
    }
}

/// A struct as the source defines it.
#[derive(Clone, Copy)]
pub(crate) struct Record<'a> {
    layout: &'a Layout,
    bytes: &'a [u8],
}

impl Record<'_> {
    fn number<T: AnyBitPattern>(&self, name: &str, kind: &FieldType) -> Result<T, Fault> {
        let field: Field = self.layout.field(name)?;
        if field.kind != *kind {
            return Err(format!("{name} is a field of type {:?}, not {kind:?}", field.kind));
        }
        Ok(bytemuck::pod_read_unaligned(&self.bytes[field.offset..field.offset + size_of::<T>()]))
    }

    pub(crate) fn pointer(&self, name: &str) -> Result<u64, Fault> {
        self.number(name, &FieldType::Pointer)
    }

    /// A pointer that may be null.
    pub(crate) fn optional(&self, name: &str) -> Result<Option<u64>, Fault> {
        Ok(Some(self.pointer(name)?).filter(|pointer| *pointer != 0))
    }

    pub(crate) fn int(&self, name: &str) -> Result<i32, Fault> {
        self.number(name, &FieldType::Int)
    }

    pub(crate) fn long(&self, name: &str) -> Result<i64, Fault> {
        self.number(name, &FieldType::Long)
    }

    pub(crate) fn float(&self, name: &str) -> Result<f32, Fault> {
        self.number(name, &FieldType::Float)
    }

    /// A number of things, in 32 bits or in 64.
    pub(crate) fn count(&self, name: &str) -> Result<usize, Fault> {
        let number = match self.layout.field(name)?.kind {
            FieldType::Long => self.long(name)?,
            _ => i64::from(self.int(name)?),
        };
        usize::try_from(number).map_err(|_| format!("{name} is {number}"))
    }

    /// Whether a number is not zero.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, Fault> {
        Ok(self.int(name)? != 0)
    }
}

/// A struct that a kernel writes.
pub(crate) struct Written {
    layout: Arc<Layout>,
    pub(crate) bytes: Vec<u8>,
}

impl Written {
    /// A struct of this name in the source whose bytes are all zero.
    pub(crate) fn new(module: &Module, name: &str) -> Result<Written, Fault> {
        let layout = module.source.layout(name)?;
        Ok(Written { bytes: vec![0; layout.bytes], layout })
    }

    fn set(&mut self, name: &str, kind: &FieldType, number: &[u8]) -> Result<(), Fault> {
        let field = self.layout.field(name)?;
        if field.kind != *kind {
            return Err(format!("{name} is a field of type {:?}, not {kind:?}", field.kind));
        }
        self.bytes[field.offset..field.offset + number.len()].copy_from_slice(number);
        Ok(())
    }

    pub(crate) fn set_int(&mut self, name: &str, number: u32) -> Result<(), Fault> {
        self.set(name, &FieldType::Int, &number.to_le_bytes())
    }

    pub(crate) fn set_float(&mut self, name: &str, number: f32) -> Result<(), Fault> {
        self.set(name, &FieldType::Float, &number.to_le_bytes())
    }

    pub(crate) fn set_double(&mut self, name: &str, number: f64) -> Result<(), Fault> {
        self.set(name, &FieldType::Double, &number.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "struct Arguments { float* x; int rows; float scale; };\n\
                        extern \"C\" __global__ void scale(Arguments a) {}\n\
                        extern \"C\" __global__ void unknown(Arguments a) {}";

    fn module() -> Arc<Module> {
        let options = ["--gpu-architecture=sm_90a", "--std=c++17", "-DFEW=3"].map(str::to_owned);
        let code = machine_code(&options, TEXT);
        // SAFETY: it was made above.
        Arc::new(unsafe { Module::load(code.as_ptr()) }.unwrap())
    }

    #[test]
    fn machine_code_is_loaded_as_it_was_compiled() {
        let module = module();
        assert_eq!(
            (module.source.number("FEW").unwrap(), module.source.number("__CUDA_ARCH__").unwrap()),
            (3, 900)
        );
        let function = Function::find(&module, "scale").unwrap().unwrap();
        assert_eq!(function.argument_bytes(), 16);
        assert!(Function::find(&module, "missing").unwrap().is_none());
        let refused = Function::find(&module, "unknown").err().unwrap();
        assert!(refused.contains("stand-in for kernel unknown"), "{refused}");
        let foreign = [b"\x7fELF".as_slice(), &[0; 60]].concat();
        // SAFETY: the bytes that are looked at are there.
        assert!(unsafe { Module::load(foreign.as_ptr()) }.is_err());
    }

    #[test]
    fn fields_are_read_by_name_and_type() {
        let module = module();
        let layout = module.source.layout("Arguments").unwrap();
        let bytes: Vec<u8> =
            [7_u64.to_le_bytes().as_slice(), &5_i32.to_le_bytes(), &0.5_f32.to_le_bytes()].concat();
        let record = Record { layout: &layout, bytes: &bytes };
        assert_eq!((record.pointer("x"), record.int("rows"), record.float("scale")), (Ok(7), Ok(5), Ok(0.5)));
        assert!(record.float("rows").is_err() && record.int("columns").is_err());
        let mut written = Written::new(&module, "Arguments").unwrap();
        written.set_int("rows", 5).unwrap();
        written.set_float("scale", 0.5).unwrap();
        assert!(written.set_double("x", 1.0).is_err());
        assert_eq!(written.bytes[8..], bytes[8..]);
    }
}
