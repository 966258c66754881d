//! A GGUF file of any bytes is refused or gives tensors that lie inside it.

#![no_main]

use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use oscar_model::files::{Gguf, TensorSource};

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = Gguf::parse(Arc::new(bytes.to_vec()), Path::new("fuzz.gguf")) else { return };
    file.summary();
    for entry in file.tensors() {
        assert!(entry.offset + entry.byte_len.unwrap_or(0) <= bytes.len());
        if let Ok(matrix) = file.tensor(&entry.name).and_then(|tensor| tensor.matrix()) {
            matrix.data().expect("the window was checked when the file was opened");
        }
    }
});
