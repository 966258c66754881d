//! Packs the rotation files of the `zoo` folder for the program.
//!
//! A packed file begins as the file does, up to the end of its header. Its tensors follow as one zlib stream: all their even
//! bytes, then all odd ones. Nearly all numbers have 16 bits, so these are the low halves, which look random, and the high
//! halves with sign and exponent, which compress.

use std::env;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::ZlibEncoder;

fn main() -> Result<(), Box<dyn Error>> {
    let zoo = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../zoo");
    let out = env::var("OUT_DIR")?;
    println!("cargo::rerun-if-changed={}", zoo.display());
    for entry in fs::read_dir(&zoo)? {
        let path = entry?.path();
        let Some(name) =
            path.file_name().filter(|_| path.extension().is_some_and(|end| end == "safetensors"))
        else {
            continue;
        };
        fs::write(Path::new(&out).join(name), pack(&fs::read(&path)?)?)?;
    }
    Ok(())
}

fn pack(file: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let length = file.first_chunk::<8>().ok_or("a file without a header")?;
    let header = 8 + usize::try_from(u64::from_le_bytes(*length))?;
    let (header, data) = file.split_at_checked(header).ok_or("a file that ends in its header")?;
    let mut encoder = ZlibEncoder::new(header.to_vec(), Compression::best());
    for parity in 0..2 {
        encoder.write_all(&data.iter().skip(parity).step_by(2).copied().collect::<Vec<u8>>())?;
    }
    Ok(encoder.finish()?)
}
