//! A cursor over untrusted bytes. Nothing is allocated before the bytes that would fill it are known to exist.

use std::path::Path;

use super::value::{MetadataArray, MetadataValue, Strings};
use crate::files::FileError;

/// Arrays of arrays deeper than this are refused: no writer makes them, and recursion must end.
const MAX_ARRAY_DEPTH: usize = 4;

/// An element type and a length: the least an array can take.
const ARRAY_HEADER_BYTES: usize = 4 + 8;

/// A length prefix: the least a string can take.
const STRING_HEADER_BYTES: usize = 8;

/// What went wrong, before it is known which field was being read.
#[derive(Debug)]
pub(super) enum GgufProblem {
    Truncated { expected: u64, actual: u64 },
    CountTooLarge { count: u64, limit: u64 },
    Invalid(String),
}

impl GgufProblem {
    pub(super) fn at(self, path: &Path, field: impl Into<String>) -> FileError {
        let (path, field) = (path.to_path_buf(), field.into());
        match self {
            GgufProblem::Truncated { expected, actual } => {
                FileError::Truncated { path, field, expected, actual }
            }
            GgufProblem::CountTooLarge { count, limit } => {
                FileError::CountTooLarge { path, field, count, limit }
            }
            GgufProblem::Invalid(problem) => FileError::Invalid { path, field, problem },
        }
    }
}

/// A cursor over the bytes of a GGUF file.
pub(super) struct GgufReader<'a> {
    bytes: &'a [u8],
    position: usize,
}

macro_rules! read_number {
    ($($name:ident, $type:ty;)*) => {$(
        pub(super) fn $name(&mut self) -> Result<$type, GgufProblem> {
            Ok(<$type>::from_le_bytes(self.array()?))
        }
    )*};
}

impl<'a> GgufReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], GgufProblem> {
        let truncated = GgufProblem::Truncated {
            expected: (self.position as u64).saturating_add(len),
            actual: self.bytes.len() as u64,
        };
        let Ok(len) = usize::try_from(len) else { return Err(truncated) };
        let Some(bytes) = self.bytes[self.position..].get(..len) else { return Err(truncated) };
        self.position += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufProblem> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("take returns as many bytes as asked"))
    }

    read_number! {
        u8, u8; i8, i8; u16, u16; i16, i16; u32, u32; i32, i32; u64, u64; i64, i64; f32, f32; f64, f64;
    }

    /// Reads a count of things that take at least `least_bytes` each, and refuses one the rest cannot hold.
    pub(super) fn count(&mut self, least_bytes: usize) -> Result<usize, GgufProblem> {
        let count = self.u64()?;
        self.check_count(count, least_bytes)
    }

    pub(super) fn check_count(&self, count: u64, least_bytes: usize) -> Result<usize, GgufProblem> {
        let limit = self.remaining() / least_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= limit => Ok(count),
            _ => Err(GgufProblem::CountTooLarge { count, limit: limit as u64 }),
        }
    }

    pub(super) fn string(&mut self) -> Result<&'a str, GgufProblem> {
        let len = self.u64()?;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes)
            .map_err(|error| GgufProblem::Invalid(format!("a string is not valid UTF-8: {error}")))
    }

    fn bool(&mut self) -> Result<bool, GgufProblem> {
        to_bool(self.u8()?)
    }

    /// Reads a type id and a value of that type.
    pub(super) fn value(&mut self) -> Result<MetadataValue, GgufProblem> {
        Ok(match self.u32()? {
            0 => MetadataValue::U8(self.u8()?),
            1 => MetadataValue::I8(self.i8()?),
            2 => MetadataValue::U16(self.u16()?),
            3 => MetadataValue::I16(self.i16()?),
            4 => MetadataValue::U32(self.u32()?),
            5 => MetadataValue::I32(self.i32()?),
            6 => MetadataValue::F32(self.f32()?),
            7 => MetadataValue::Bool(self.bool()?),
            8 => MetadataValue::String(self.string()?.to_owned()),
            9 => MetadataValue::Array(self.array_value(1)?),
            10 => MetadataValue::U64(self.u64()?),
            11 => MetadataValue::I64(self.i64()?),
            12 => MetadataValue::F64(self.f64()?),
            id => return Err(unknown_type(id)),
        })
    }

    fn array_value(&mut self, depth: usize) -> Result<MetadataArray, GgufProblem> {
        if depth > MAX_ARRAY_DEPTH {
            let problem = format!("arrays are nested deeper than {MAX_ARRAY_DEPTH} levels");
            return Err(GgufProblem::Invalid(problem));
        }
        Ok(match self.u32()? {
            0 => MetadataArray::U8(self.number_array(u8::from_le_bytes)?),
            1 => MetadataArray::I8(self.number_array(i8::from_le_bytes)?),
            2 => MetadataArray::U16(self.number_array(u16::from_le_bytes)?),
            3 => MetadataArray::I16(self.number_array(i16::from_le_bytes)?),
            4 => MetadataArray::U32(self.number_array(u32::from_le_bytes)?),
            5 => MetadataArray::I32(self.number_array(i32::from_le_bytes)?),
            6 => MetadataArray::F32(self.number_array(f32::from_le_bytes)?),
            7 => {
                let count = self.count(1)?;
                let bytes = self.take(count as u64)?;
                MetadataArray::Bool(bytes.iter().map(|&byte| to_bool(byte)).collect::<Result<_, _>>()?)
            }
            8 => {
                let count = self.count(STRING_HEADER_BYTES)?;
                let mut strings = Strings::default();
                for index in 0..count {
                    strings.push(self.string().map_err(|problem| in_element(problem, index))?);
                }
                MetadataArray::Strings(strings)
            }
            9 => {
                let count = self.count(ARRAY_HEADER_BYTES)?;
                let mut arrays = Vec::new();
                for _ in 0..count {
                    arrays.push(self.array_value(depth + 1)?);
                }
                MetadataArray::Arrays(arrays)
            }
            10 => MetadataArray::U64(self.number_array(u64::from_le_bytes)?),
            11 => MetadataArray::I64(self.number_array(i64::from_le_bytes)?),
            12 => MetadataArray::F64(self.number_array(f64::from_le_bytes)?),
            id => return Err(unknown_type(id)),
        })
    }

    fn number_array<T, const N: usize>(&mut self, convert: fn([u8; N]) -> T) -> Result<Vec<T>, GgufProblem> {
        let count = self.count(N)?;
        // The count fits the rest of the file, so the product cannot overflow.
        let bytes = self.take((count * N) as u64)?;
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().map(|&element| convert(element)).collect())
    }
}

fn to_bool(byte: u8) -> Result<bool, GgufProblem> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(GgufProblem::Invalid(format!("a bool is stored as {byte}, expected 0 or 1"))),
    }
}

fn unknown_type(id: u32) -> GgufProblem {
    GgufProblem::Invalid(format!("value type {id} is unknown"))
}

fn in_element(problem: GgufProblem, index: usize) -> GgufProblem {
    match problem {
        GgufProblem::Invalid(text) => GgufProblem::Invalid(format!("element {index}: {text}")),
        other => other,
    }
}
