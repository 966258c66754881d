//! Writes `.pt` files that `torch.load(path, weights_only=True)` reads.
//!
//! The pickle is of protocol 2, as `torch.save` writes it, but without memo: names are short and few. Members
//! are stored without compression and aligned, so that torch can map them. The same input gives the same
//! bytes.

use std::io::{self, Seek, Write};
use std::path::Path;

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use super::{PtFile, PtLayer};
use crate::atomic::write_atomically;
use crate::error::RotationError;

/// Alignment of tensors in the archive, as torch writes it.
const ALIGNMENT: u16 = 64;

/// Which of the two layouts a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PtFormat {
    /// `[d, d]` for each layer.
    PerLayer,
    /// `[kv_heads, d, d]` for each layer.
    PerHead,
}

impl PtFormat {
    /// The number in the file.
    pub fn version(self) -> u8 {
        match self {
            PtFormat::PerLayer => 1,
            PtFormat::PerHead => 2,
        }
    }
}

/// Writes `file` to `path`, in float32.
pub fn write(path: &Path, file: &PtFile) -> Result<(), RotationError> {
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or("rotation");
    // The name becomes a folder inside the archive.
    let name = name.replace(['/', '\\'], "_");
    write_atomically(path, |out| write_to(out, &name, file))
}

fn write_to(out: impl Write + Seek, name: &str, file: &PtFile) -> io::Result<()> {
    let mut tensors = Vec::new();
    let pickle = describe(file, &mut tensors);
    let mut archive = ZipWriter::new(out);
    let plain = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::default());
    let mut member = |member: &str, bytes: &[u8], options: SimpleFileOptions| -> io::Result<()> {
        archive.start_file(format!("{name}/{member}"), options)?;
        archive.write_all(bytes)
    };
    member("data.pkl", &pickle, plain)?;
    member("byteorder", b"little", plain)?;
    for (key, tensor) in tensors.iter().enumerate() {
        let bytes: Vec<u8> = tensor.iter().flat_map(|value| value.to_le_bytes()).collect();
        member(&format!("data/{key}"), &bytes, plain.with_alignment(ALIGNMENT))?;
    }
    member("version", b"3\n", plain)?;
    archive.finish()?;
    Ok(())
}

/// The pickle; the numbers of each tensor are added to `tensors`.
fn describe(file: &PtFile, tensors: &mut Vec<Vec<f32>>) -> Vec<u8> {
    let mut pickle = PickleWriter { bytes: vec![0x80, 2], tensors };
    pickle.dictionary(|pickle| {
        pickle.text("format_version");
        match file.format_version.parse::<u8>() {
            Ok(version) => pickle.integer(version.into()),
            Err(_) => pickle.text(&file.format_version),
        }
        if let Some(objective) = &file.objective {
            pickle.text("objective");
            pickle.text(objective);
        }
        pickle.text("source_grouping");
        pickle.text(if file.heads.is_some() { "head" } else { "layer" });
        pickle.text("layers");
        pickle.dictionary(|pickle| {
            for (&id, layer) in &file.layers {
                pickle.integer(id);
                pickle.dictionary(|pickle| pickle.layer(id, layer, file));
            }
        });
    });
    pickle.bytes.push(b'.');
    pickle.bytes
}

struct PickleWriter<'a> {
    bytes: Vec<u8>,
    tensors: &'a mut Vec<Vec<f32>>,
}

impl PickleWriter<'_> {
    fn dictionary(&mut self, fill: impl FnOnce(&mut Self)) {
        self.bytes.extend(b"}(");
        fill(self);
        self.bytes.push(b'u');
    }

    fn text(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    /// Sizes and ids; limits of the format keep them far below 2^31.
    fn integer(&mut self, value: usize) {
        match (u8::try_from(value), u16::try_from(value)) {
            (Ok(value), _) => self.bytes.extend([b'K', value]),
            (_, Ok(value)) => {
                self.bytes.push(b'M');
                self.bytes.extend(value.to_le_bytes());
            }
            _ => {
                self.bytes.push(b'J');
                self.bytes.extend((value as i32).to_le_bytes());
            }
        }
    }

    fn tuple(&mut self, values: &[usize]) {
        self.bytes.push(b'(');
        values.iter().for_each(|&value| self.integer(value));
        self.bytes.push(b't');
    }

    fn layer(&mut self, id: usize, layer: &PtLayer, file: &PtFile) {
        let dim = file.head_dim;
        let with_heads =
            |shape: &[usize]| file.heads.into_iter().chain(shape.iter().copied()).collect::<Vec<_>>();
        self.text("layer_id");
        self.integer(id);
        self.text("rotation");
        let rotations = layer.rotations.iter().flat_map(|rotation| rotation.to_f32()).collect();
        self.tensor(rotations, &with_heads(&[dim, dim]));
        if let Some(eigenvalues) = &layer.eigenvalues {
            self.text("eigenvalues");
            let eigenvalues = eigenvalues.iter().flatten().map(|&value| value as f32).collect();
            self.tensor(eigenvalues, &with_heads(&[dim]));
        }
    }

    fn tensor(&mut self, values: Vec<f32>, shape: &[usize]) {
        let strides: Vec<usize> = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        self.bytes.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.text("storage");
        self.bytes.extend(b"ctorch\nFloatStorage\n");
        self.text(&self.tensors.len().to_string());
        self.text("cpu");
        self.integer(values.len());
        self.bytes.extend(b"tQ");
        self.integer(0);
        self.tuple(shape);
        self.tuple(&strides);
        self.bytes.push(0x89);
        self.bytes.extend(b"ccollections\nOrderedDict\n)RtR");
        self.tensors.push(values);
    }
}
