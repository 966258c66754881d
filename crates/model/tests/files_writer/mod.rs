//! Writes GGUF files for tests: honest ones, and ones that lie about any field.

// Each test binary that includes this module uses another part of it.
#![allow(dead_code)]

/// Tensor type ids used in tests.
pub(crate) const F32: u32 = 0;
pub(crate) const Q8_0: u32 = 8;
pub(crate) const IQ2_XXS: u32 = 16;

/// A GGUF file under construction. Fields that are `Some` replace what would be written.
#[derive(Clone, Default)]
pub(crate) struct GgufWriter {
    pub(crate) magic: Option<[u8; 4]>,
    pub(crate) version: Option<u32>,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) metadata_count: Option<u64>,
    /// Where data is aligned to; written as `general.alignment` only by [`GgufWriter::aligned`].
    alignment: Option<u32>,
    metadata: Vec<u8>,
    metadata_entries: u64,
    pub(crate) tensors: Vec<WrittenTensor>,
}

/// One entry of the table. Its data is zeros unless given.
#[derive(Clone, Default)]
pub(crate) struct WrittenTensor {
    pub(crate) name: Vec<u8>,
    /// Innermost first, as the format has it.
    pub(crate) dims: Vec<u64>,
    pub(crate) type_id: u32,
    pub(crate) data: Vec<u8>,
    pub(crate) offset: Option<u64>,
    pub(crate) dimension_count: Option<u32>,
}

impl GgufWriter {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a key with a type id and the encoded value.
    pub(crate) fn raw(mut self, key: impl AsRef<[u8]>, type_id: u32, value: &[u8]) -> Self {
        self.metadata.extend(string(key));
        self.metadata.extend(type_id.to_le_bytes());
        self.metadata.extend(value);
        self.metadata_entries += 1;
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    pub(crate) fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    pub(crate) fn strings<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| string(value.as_ref())).collect();
        self.raw(key, 9, &array(8, values.len() as u64, &elements))
    }

    pub(crate) fn f32s(self, key: &str, values: &[f32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &array(6, values.len() as u64, &elements))
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &array(5, values.len() as u64, &elements))
    }

    /// Aligns data to `alignment` and says so in the metadata.
    pub(crate) fn aligned(mut self, alignment: u32) -> Self {
        self.alignment = Some(alignment);
        self.u32("general.alignment", alignment)
    }

    /// Adds a tensor; `dims` innermost first.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, data: Vec<u8>) -> Self {
        let dims = dims.to_vec();
        self.tensors.push(WrittenTensor { name: name.into(), dims, type_id, data, ..Default::default() });
        self
    }

    /// Adds an F32 tensor of zeros.
    pub(crate) fn zeros(self, name: &str, dims: &[u64]) -> Self {
        let bytes = dims.iter().product::<u64>() as usize * 4;
        self.tensor(name, dims, F32, vec![0; bytes])
    }

    /// Changes the tensor added last.
    pub(crate) fn last(mut self, change: impl FnOnce(&mut WrittenTensor)) -> Self {
        change(self.tensors.last_mut().expect("a tensor was added"));
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut file = Vec::new();
        file.extend(self.magic.unwrap_or(*b"GGUF"));
        file.extend(self.version.unwrap_or(3).to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.metadata_count.unwrap_or(self.metadata_entries).to_le_bytes());
        file.extend(&self.metadata);
        let alignment = self.alignment.unwrap_or(32) as usize;
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(alignment), 0);
            file.extend(string(&tensor.name));
            file.extend(tensor.dimension_count.unwrap_or(tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
            file.extend(tensor.type_id.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !data.is_empty() {
            file.resize(file.len().next_multiple_of(alignment), 0);
            file.extend(data);
        }
        file
    }
}

/// A length and the bytes.
pub(crate) fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// An element type, a count, and the encoded elements.
pub(crate) fn array(type_id: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&type_id.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}
