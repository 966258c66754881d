//! Kernels of a loaded source, and their launches.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::call::{Call, Record};
use crate::kernels::{self, Kernel};
use crate::memory::{Access, Fault};
use crate::module::Module;
use crate::source::Layout;

/// Shared memory that a block may have without asking for more.
const USUAL_SHARED_MEMORY: usize = 48 << 10;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::module::machine_code;

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
}
