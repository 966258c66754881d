//! Metadata values of a GGUF file, with arrays stored as plain vectors of their element type.

use std::borrow::Cow;

/// A value of the metadata of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(MetadataArray),
}

/// An array of one element type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum MetadataArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Strings(Strings),
    /// Arrays inside an array; each has its own element type.
    Arrays(Vec<MetadataArray>),
}

/// A list of strings kept in one allocation: vocabularies have hundreds of thousands of short ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Strings {
    /// The number of strings in the array.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`; `None` behind the end.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.text.get(start..end)
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        (0..self.len()).map(|index| self.get(index).expect("the index is below the length"))
    }

    pub(super) fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut list = Self::default();
        strings.into_iter().for_each(|string| list.push(string.as_ref()));
        list
    }
}

impl MetadataValue {
    /// The type, for messages: `u32`, `array of string`.
    pub fn type_name(&self) -> &'static str {
        match self {
            MetadataValue::U8(_) => "u8",
            MetadataValue::I8(_) => "i8",
            MetadataValue::U16(_) => "u16",
            MetadataValue::I16(_) => "i16",
            MetadataValue::U32(_) => "u32",
            MetadataValue::I32(_) => "i32",
            MetadataValue::U64(_) => "u64",
            MetadataValue::I64(_) => "i64",
            MetadataValue::F32(_) => "f32",
            MetadataValue::F64(_) => "f64",
            MetadataValue::Bool(_) => "bool",
            MetadataValue::String(_) => "string",
            MetadataValue::Array(array) => array.type_name(),
        }
    }

    /// What was found, for messages: the type, and the value where it is short.
    pub(crate) fn describe(&self) -> String {
        match self {
            MetadataValue::U8(v) => format!("u8 {v}"),
            MetadataValue::I8(v) => format!("i8 {v}"),
            MetadataValue::U16(v) => format!("u16 {v}"),
            MetadataValue::I16(v) => format!("i16 {v}"),
            MetadataValue::U32(v) => format!("u32 {v}"),
            MetadataValue::I32(v) => format!("i32 {v}"),
            MetadataValue::U64(v) => format!("u64 {v}"),
            MetadataValue::I64(v) => format!("i64 {v}"),
            MetadataValue::F32(v) => format!("f32 {v}"),
            MetadataValue::F64(v) => format!("f64 {v}"),
            MetadataValue::Bool(v) => format!("bool {v}"),
            MetadataValue::String(_) | MetadataValue::Array(_) => self.type_name().to_owned(),
        }
    }

    fn integer(&self) -> Option<i128> {
        Some(match *self {
            MetadataValue::U8(v) => v.into(),
            MetadataValue::I8(v) => v.into(),
            MetadataValue::U16(v) => v.into(),
            MetadataValue::I16(v) => v.into(),
            MetadataValue::U32(v) => v.into(),
            MetadataValue::I32(v) => v.into(),
            MetadataValue::U64(v) => v.into(),
            MetadataValue::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl MetadataArray {
    /// The number of elements in the array.
    pub fn len(&self) -> usize {
        match self {
            MetadataArray::U8(v) => v.len(),
            MetadataArray::I8(v) => v.len(),
            MetadataArray::U16(v) => v.len(),
            MetadataArray::I16(v) => v.len(),
            MetadataArray::U32(v) => v.len(),
            MetadataArray::I32(v) => v.len(),
            MetadataArray::U64(v) => v.len(),
            MetadataArray::I64(v) => v.len(),
            MetadataArray::F32(v) => v.len(),
            MetadataArray::F64(v) => v.len(),
            MetadataArray::Bool(v) => v.len(),
            MetadataArray::Strings(v) => v.len(),
            MetadataArray::Arrays(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn type_name(&self) -> &'static str {
        match self {
            MetadataArray::U8(_) => "array of u8",
            MetadataArray::I8(_) => "array of i8",
            MetadataArray::U16(_) => "array of u16",
            MetadataArray::I16(_) => "array of i16",
            MetadataArray::U32(_) => "array of u32",
            MetadataArray::I32(_) => "array of i32",
            MetadataArray::U64(_) => "array of u64",
            MetadataArray::I64(_) => "array of i64",
            MetadataArray::F32(_) => "array of f32",
            MetadataArray::F64(_) => "array of f64",
            MetadataArray::Bool(_) => "array of bool",
            MetadataArray::Strings(_) => "array of string",
            MetadataArray::Arrays(_) => "array of array",
        }
    }
}

/// A Rust type that a metadata value can be read as.
///
/// Converters disagree on the width and sign of integers, so any stored integer that fits is taken.
pub trait FromMetadata<'a>: Sized {
    /// What a message says was expected.
    const EXPECTED: &'static str;

    /// The value as `Self`, `None` if it is of another type or does not fit.
    fn from_value(value: &'a MetadataValue) -> Option<Self>;
}

macro_rules! from_integer {
    ($($type:ty, $expected:literal;)*) => {$(
        impl FromMetadata<'_> for $type {
            const EXPECTED: &'static str = $expected;

            fn from_value(value: &MetadataValue) -> Option<Self> {
                value.integer()?.try_into().ok()
            }
        }
    )*};
}

from_integer! {
    u32, "a non-negative integer of 32 bits";
    u64, "a non-negative integer of 64 bits";
    usize, "a non-negative integer";
    i32, "an integer of 32 bits";
}

impl FromMetadata<'_> for f32 {
    const EXPECTED: &'static str = "a float";

    fn from_value(value: &MetadataValue) -> Option<Self> {
        match *value {
            MetadataValue::F32(v) => Some(v),
            MetadataValue::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl FromMetadata<'_> for bool {
    const EXPECTED: &'static str = "a bool";

    fn from_value(value: &MetadataValue) -> Option<Self> {
        match *value {
            MetadataValue::Bool(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for &'a str {
    const EXPECTED: &'static str = "a string";

    fn from_value(value: &'a MetadataValue) -> Option<Self> {
        match value {
            MetadataValue::String(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for &'a Strings {
    const EXPECTED: &'static str = "an array of strings";

    fn from_value(value: &'a MetadataValue) -> Option<Self> {
        match value {
            MetadataValue::Array(MetadataArray::Strings(v)) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for &'a [f32] {
    const EXPECTED: &'static str = "an array of f32";

    fn from_value(value: &'a MetadataValue) -> Option<Self> {
        match value {
            MetadataValue::Array(MetadataArray::F32(v)) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for Cow<'a, [i32]> {
    const EXPECTED: &'static str = "an array of integers of 32 bits";

    fn from_value(value: &'a MetadataValue) -> Option<Self> {
        fn convert<T: Copy + TryInto<i32>>(values: &[T]) -> Option<Cow<'static, [i32]>> {
            values.iter().map(|&v| v.try_into().ok()).collect::<Option<Vec<i32>>>().map(Cow::Owned)
        }
        let MetadataValue::Array(array) = value else { return None };
        match array {
            MetadataArray::I32(v) => Some(Cow::Borrowed(v)),
            MetadataArray::U8(v) => convert(v),
            MetadataArray::I8(v) => convert(v),
            MetadataArray::U16(v) => convert(v),
            MetadataArray::I16(v) => convert(v),
            MetadataArray::U32(v) => convert(v),
            MetadataArray::U64(v) => convert(v),
            MetadataArray::I64(v) => convert(v),
            _ => None,
        }
    }
}
