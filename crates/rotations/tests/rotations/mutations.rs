//! Random damage to rotation files: an error or a file whose numbers are all finite, never a panic, and soon.
//!
//! The seed is fixed so that a run can be repeated; `OSCAR_FUZZ_ROUNDS` makes it longer.

use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use oscar_random::Random;
use oscar_rotations::{pt, safetensors};
use zip::write::SimpleFileOptions;
use zip::{ZipArchive, ZipWriter};

fn rounds(default: usize) -> usize {
    std::env::var("OSCAR_FUZZ_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rotations");
    fs::read(folder.join(name)).expect("fixture")
}

/// A few bytes changed, removed, repeated or inserted.
fn damage(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    const OPCODES: &[u8] = b"\x80\x95.(01NJKMGX)t]ae}suqrhjcQR\x85\x86\x87\x88\x89\x8a\x8c\x93\x94ibo\x81";
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len().max(1));
        match random.below(6) {
            0 => bytes[at] = random.next_u64() as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = OPCODES[random.below(OPCODES.len())],
            3 => drop(bytes.drain(at..(at + 1 + random.below(8)).min(bytes.len()))),
            4 => bytes.insert(at, OPCODES[random.below(OPCODES.len())]),
            _ => {
                let piece = bytes[at..(at + 1 + random.below(64)).min(bytes.len())].to_vec();
                let to = random.below(bytes.len().max(1));
                bytes.splice(to..to, piece);
            }
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

fn check(bytes: Vec<u8>) -> bool {
    let begun = Instant::now();
    let result = pt::read_from(Path::new("damaged.pt"), Cursor::new(bytes));
    assert!(begun.elapsed() < Duration::from_secs(2));
    let Ok(file) = result else { return false };
    let mut matrices = file.layers.values().flat_map(|layer| &layer.rotations);
    assert!(
        matrices.all(|matrix| matrix.dim() == file.head_dim && matrix.values().iter().all(|v| v.is_finite()))
    );
    true
}

/// The archive with another pickle in it.
fn with_pickle(members: &[(String, Vec<u8>)], pickle: &[u8]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        let bytes = if name.ends_with("/data.pkl") { pickle } else { bytes };
        archive.start_file(name, SimpleFileOptions::default()).expect("member");
        archive.write_all(bytes).expect("write");
    }
    archive.finish().expect("archive").into_inner()
}

#[test]
fn damaged_pickles_never_panic() {
    let mut random = Random::new(0x05ca_7205_ca72);
    for name in ["format1_k.pt", "format2_k.pt", "shared_storage.pt", "strides.pt", "string_ids.pt"] {
        let mut archive = ZipArchive::new(Cursor::new(fixture(name))).expect("archive");
        let mut members = Vec::new();
        for index in 0..archive.len() {
            let mut member = archive.by_index(index).expect("member");
            let mut bytes = Vec::new();
            member.read_to_end(&mut bytes).expect("read");
            members.push((member.name().expect("name").into_owned(), bytes));
        }
        let pickle = &members.iter().find(|(name, _)| name.ends_with("/data.pkl")).expect("pickle").1.clone();
        assert!(check(with_pickle(&members, pickle)), "{name} itself is read");
        let mut read = 0;
        for _ in 0..rounds(1500) {
            read += usize::from(check(with_pickle(&members, &damage(pickle, &mut random))));
        }
        // Damage to a name or a memo number that is not used does no harm; most damage does.
        assert!(read < rounds(1500) / 2, "{name}: {read} damaged files were read");
    }
}

#[test]
fn damaged_archives_never_panic() {
    let mut random = Random::new(77);
    for name in ["format1_k.pt", "shared_storage.pt", "hostile_bomb_lies.pt"] {
        let bytes = fixture(name);
        for _ in 0..rounds(1500) {
            check(damage(&bytes, &mut random));
        }
        for length in (0..bytes.len()).step_by(1 + bytes.len() / 200) {
            assert!(!check(bytes[..length].to_vec()), "{name} cut to {length} bytes");
        }
    }
}

#[test]
fn damaged_safetensors_never_panic() {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rotations").join(name);
        pt::read(&path).expect("fixture")
    };
    let file =
        oscar_rotations::import::from_pt(&read("format1_k.pt"), &read("format1_v.pt"), "test").expect("pair");
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("x.safetensors");
    safetensors::write(&path, &file).expect("write");
    let bytes = fs::read(&path).expect("bytes");
    let mut random = Random::new(5);
    for _ in 0..rounds(4000) {
        let damaged = damage(&bytes, &mut random);
        if let Ok(file) = safetensors::parse(&path, &damaged) {
            file.check_shapes(&path).expect("what was read is well-formed");
        }
    }
    for length in (0..bytes.len()).step_by(97) {
        assert!(safetensors::parse(&path, &bytes[..length]).is_err(), "cut to {length} bytes");
    }
    // The header alone is where most of the decisions are.
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    for _ in 0..rounds(4000) {
        let damaged = [&damage(&bytes[8..header], &mut random)[..], &bytes[header..]].concat();
        let length = (damaged.len() - (bytes.len() - header)) as u64;
        let _ = safetensors::parse(&path, &[&length.to_le_bytes()[..], &damaged].concat());
    }
}
