//! Rotations that ship with the program: one line for each file of the `zoo` folder.

use std::io::{Read, Write};
use std::path::Path;

use flate2::read::ZlibDecoder;

use super::atomic::write_atomically;
use super::error::RotationError;
use super::rotation::RotationFile;
use super::safetensors::{self, FileSummary};
use crate::certificate::Certificate;

/// A rotation file inside the program.
#[derive(Clone, Copy, Debug)]
pub struct ShippedRotations {
    /// The model's name in the catalogue.
    pub name: &'static str,
    /// The rotation file with its tensors compressed, as `build.rs` packs it.
    packed: &'static [u8],
    /// The certificate that lies beside it, as JSON.
    pub certificate: &'static str,
}

impl ShippedRotations {
    /// The bytes of the rotation file, as they were before it was packed.
    pub fn bytes(&self) -> Result<Vec<u8>, RotationError> {
        let (header, packed) = safetensors::split_header(Path::new(self.name), self.packed)?;
        let mut planes = Vec::new();
        ZlibDecoder::new(packed)
            .read_to_end(&mut planes)
            .map_err(|error| RotationError::io(Path::new(self.name), "unpack", error))?;
        let (even, odd) = planes.split_at(planes.len().div_ceil(2));
        let mut bytes = Vec::with_capacity(header.len() + planes.len());
        bytes.extend_from_slice(header);
        bytes.extend(even.iter().zip(odd).flat_map(|(&even, &odd)| [even, odd]));
        // The last byte of an odd number has no partner.
        bytes.extend_from_slice(&even[odd.len()..]);
        Ok(bytes)
    }

    /// Reads and checks the rotations.
    pub fn load(&self) -> Result<RotationFile, RotationError> {
        let file = safetensors::parse(Path::new(self.name), &self.bytes()?)?;
        file.check_orthogonal(Path::new(self.name))?;
        Ok(file)
    }

    /// What can be known of the file without unpacking it.
    pub fn summary(&self) -> Result<FileSummary, RotationError> {
        safetensors::parse_header(Path::new(self.name), self.packed)
    }

    /// The certificate, parsed.
    pub fn certificate(&self) -> Option<Certificate> {
        serde_json::from_str(self.certificate).ok()
    }
}

macro_rules! shipped {
    ($name:literal) => {
        ShippedRotations {
            name: $name,
            packed: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".safetensors")),
            certificate: include_str!(concat!("../../../zoo/", $name, ".certificate.json")),
        }
    };
}

/// All rotation files that ship. Not a constant: every crate that names a constant may get its own copy of the files.
pub static SHIPPED: &[ShippedRotations] = &[
    shipped!("smollm2"),
    shipped!("qwen2.5-coder-0.5b"),
    shipped!("qwen2.5-coder-1.5b"),
    shipped!("gemma-3-270m"),
];

/// The rotations for a model of the catalogue.
pub fn find(name: &str) -> Option<&'static ShippedRotations> {
    SHIPPED.iter().find(|shipped| shipped.name.eq_ignore_ascii_case(name))
}

/// Copies a shipped file to `path`, whole or not at all.
pub fn write(shipped: &ShippedRotations, path: &Path) -> Result<(), RotationError> {
    let bytes = shipped.bytes()?;
    write_atomically(path, |file| file.write_all(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::judge;
    use crate::verdict::Verdict;
    use crate::verify;

    #[test]
    fn every_shipped_file_is_sound_and_says_what_it_is_for() {
        assert!(!SHIPPED.is_empty());
        let catalogue = oscar_model::source::Catalogue::built_in();
        for shipped in SHIPPED {
            let entry = catalogue.find(shipped.name).expect("a catalogue name");
            assert_eq!(entry.name, shipped.name);
            let path = format!("{}/../../zoo/{}.safetensors", env!("CARGO_MANIFEST_DIR"), shipped.name);
            let bytes = shipped.bytes().expect("unpack");
            assert!(bytes == std::fs::read(&path).expect("the file"), "{path} is not what was packed");
            let file = shipped.load().expect("rotations");
            let summary = shipped.summary().expect("a header");
            assert_eq!((&summary.header, summary.bytes), (&file.header, bytes.len() as u64), "{path}");
            assert!(file.header.model_fingerprint.is_some(), "{}", shipped.name);
            let findings = verify::verify(&file);
            assert!(findings.is_sound(), "{}", shipped.name);
            let of_keys =
                |place: &str| place.starts_with("bands of keys") || place.starts_with("bits of keys");
            let places = findings.findings.iter().map(|finding| &finding.place).chain(&findings.not_checked);
            assert_eq!(places.filter(|place| of_keys(place)).count(), 0, "{findings:?}");
            assert!(summary.has_bands && summary.widths == file.widths, "{}", shipped.name);
            let certificate = shipped.certificate().expect("a certificate");
            assert_ne!(certificate.verdict, Verdict::Bad, "{}", shipped.name);
            // What it says of the probe is what the limits of today say.
            let judged = judge(&certificate.heads, certificate.probe.as_ref());
            assert_eq!((certificate.verdict, certificate.reason), judged, "{}", shipped.name);
        }
    }
}
