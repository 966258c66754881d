//! What a kernel is given when it runs: its argument and tables by the names of the source, and device memory.

use std::sync::Arc;

use bytemuck::AnyBitPattern;

use crate::memory::{Access, Fault};
use crate::module::Module;
use crate::pages::Order;
use crate::source::{Field, FieldType, Layout};

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

    /// bf16 pages of the kernel.
    pub(crate) fn exact_pages(&self) -> Result<Order, Fault> {
        Ok(self.module.pages()?.exact().clone())
    }

    /// Sealed pages of the kernel; bf16 where it knows no format of them.
    pub(crate) fn sealed_pages(&self) -> Result<Order, Fault> {
        Ok(self.module.pages()?.sealed().clone())
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
    pub(crate) layout: &'a Layout,
    pub(crate) bytes: &'a [u8],
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
    use crate::module::machine_code;

    #[test]
    fn fields_are_read_by_name_and_type() {
        let text = "struct Arguments { float* x; int rows; float scale; };";
        let code = machine_code(&["--std=c++17".to_owned()], text);
        // SAFETY: it was made above.
        let module = unsafe { Module::load(code.as_ptr()) }.unwrap();
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
