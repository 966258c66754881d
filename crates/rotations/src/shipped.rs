//! Rotations that ship with the program: one line for each file of the `zoo` folder.

use std::io::Write;
use std::path::Path;

use super::atomic::write_atomically;
use super::error::RotationError;
use crate::certificate::Certificate;

/// A rotation file inside the program.
#[derive(Clone, Copy, Debug)]
pub struct ShippedRotations {
    /// The model's name in the catalogue.
    pub name: &'static str,
    /// Bytes of the rotation file.
    pub bytes: &'static [u8],
    /// The certificate that lies beside it, as JSON.
    pub certificate: &'static str,
}

impl ShippedRotations {
    /// The certificate, parsed.
    pub fn certificate(&self) -> Option<Certificate> {
        serde_json::from_str(self.certificate).ok()
    }
}

macro_rules! shipped {
    ($name:literal) => {
        ShippedRotations {
            name: $name,
            bytes: include_bytes!(concat!("../../../zoo/", $name, ".safetensors")),
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
    write_atomically(path, |file| file.write_all(shipped.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::{Verdict, judge};
    use crate::{safetensors, verify};

    #[test]
    fn every_shipped_file_is_sound_and_says_what_it_is_for() {
        assert!(!SHIPPED.is_empty());
        let catalogue = oscar_model::source::Catalogue::built_in();
        for shipped in SHIPPED {
            let entry = catalogue.find(shipped.name).expect("a catalogue name");
            assert_eq!(entry.name, shipped.name);
            let file = safetensors::parse(Path::new(shipped.name), shipped.bytes).expect("parse");
            file.check_orthogonal(Path::new(shipped.name)).expect("rotations");
            assert!(file.header.model_fingerprint.is_some(), "{}", shipped.name);
            assert!(verify::verify(&file).is_sound(), "{}", shipped.name);
            let certificate = shipped.certificate().expect("a certificate");
            assert_ne!(certificate.verdict, Verdict::Bad, "{}", shipped.name);
            // What it says of the probe is what the limits of today say.
            let judged = judge(&certificate.heads, certificate.probe.as_ref());
            assert_eq!((certificate.verdict, certificate.reason), judged, "{}", shipped.name);
        }
    }
}
