//! A short fuzz run: random damage to valid files never panics, never yields a tensor outside the file, and
//! never takes memory out of proportion to the file. `fuzz/` holds the coverage-guided version.
//!
//! The seed is fixed so that a run can be repeated; `OSCAR_FUZZ_SEED` and `OSCAR_FUZZ_ROUNDS` change it.

mod files_writer;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use files_writer::{F32, GgufWriter, IQ2_XXS, Q8_0, array};
use oscar_model::files::safetensors::parse_index;
use oscar_model::files::{Gguf, JsonFile, Safetensors, TensorSource};
use oscar_random::Random;
use proptest::prelude::*;

/// Memory in proportion to the file: the smallest entries (an empty array of 12 bytes, an empty name) become
/// structures of around a hundred bytes, and growing vectors double.
const BYTES_PER_FILE_BYTE: usize = 64;
const FIXED_BYTES: usize = 64 << 10;

/// Counts the bytes each thread holds, so that tests running side by side do not disturb each other.
struct CountingAllocator;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(grown: usize, freed: usize) {
    let held = HELD.get().saturating_sub(freed).saturating_add(grown);
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call is passed on unchanged to the system's allocator; the counters hold no memory of their own.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs `work` and checks that it never held more than a file of `file_len` bytes justifies.
fn with_bounded_memory(file_len: usize, work: impl FnOnce()) {
    HELD.set(0);
    PEAK.set(0);
    work();
    let (peak, limit) = (PEAK.get(), file_len * BYTES_PER_FILE_BYTE + FIXED_BYTES);
    assert!(peak <= limit, "{peak} bytes were held for a file of {file_len}");
}

/// Everything listed must lie in the file, and everything readable must be readable.
fn check_tensors(source: &dyn TensorSource, file_len: usize) {
    source.summary();
    for entry in source.entries() {
        let end = entry.offset.checked_add(entry.byte_len.unwrap_or(0)).expect("offsets are checked");
        assert!(end <= file_len, "{} ends at {end} of {file_len}", entry.name);
        if let Ok(tensor) = source.get(&entry.name)
            && let Ok(matrix) = tensor.matrix()
        {
            assert_eq!(Some(matrix.data().expect("the window was checked").len()), entry.byte_len);
        }
    }
}

fn try_gguf(bytes: Vec<u8>) {
    let len = bytes.len();
    with_bounded_memory(len, || {
        if let Ok(file) = Gguf::parse(Arc::new(bytes), Path::new("m.gguf")) {
            check_tensors(&file, len);
        }
    });
}

fn try_safetensors(bytes: Vec<u8>) {
    let len = bytes.len();
    with_bounded_memory(len, || {
        if let Ok(file) = Safetensors::parse(Arc::new(bytes), Path::new("m.safetensors")) {
            check_tensors(&file, len);
        }
    });
}

fn try_index(bytes: Vec<u8>) {
    with_bounded_memory(bytes.len(), || {
        if let Ok(map) = parse_index(&bytes, Path::new("i.json")) {
            assert!(map.values().all(|name| Path::new("d").join(name).parent() == Some(Path::new("d"))));
        }
    });
}

fn try_config(bytes: Vec<u8>) {
    with_bounded_memory(bytes.len(), || {
        if let Ok(file) = JsonFile::parse(&bytes, Path::new("c.json")) {
            let fields = file.fields();
            for name in fields.object().keys() {
                let _ = fields.positive(name);
                let _ = fields.float(name);
                let _ = fields.str(name);
                let _ = fields.strings_if_present(name);
                let _ = fields.token_ids_if_present(name);
                let _ = fields.fields_if_present(name);
            }
        }
    });
}

fn gguf_seed() -> Vec<u8> {
    let nested = array(9, 2, &[array(4, 1, &[7, 0, 0, 0]), array(7, 2, &[1, 0])].concat());
    GgufWriter::new()
        .aligned(8)
        .str("general.architecture", "llama")
        .bool("b", true)
        .f32("f", 1.0)
        .strings("tokens", &["<s>", "a", "bc"])
        .f32s("scores", &[0.0, 1.0])
        .i32s("types", &[1, 2, 3])
        .raw("nested", 9, &nested)
        .zeros("norm", &[4])
        .zeros("weight", &[4, 2])
        .tensor("quantised", &[32, 1], Q8_0, vec![1; 34])
        .tensor("listed", &[256], IQ2_XXS, vec![2; 66])
        .tensor("cube", &[2, 2, 2], F32, vec![3; 32])
        .build()
}

fn safetensors_seed() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
        "b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"U8","shape":[],"data_offsets":[22,23]}}"#;
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 23]].concat()
}

const INDEX_SEED: &str =
    r#"{"metadata":{"total_size":1},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;
const CONFIG_SEED: &str = r#"{"hidden_size":64,"rope_theta":1e4,"architectures":["X"],"eos_token_id":[1,2],
    "tie":true,"rope_scaling":{"factor":8.0,"list":[1,2.5]},"none":null,"text":"a\u00e9\n"}"#;

/// Values that length and offset fields fear most.
const NASTY: [u64; 10] =
    [0, 1, 31, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, u64::MAX];

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        let at = random.below(bytes.len().max(1));
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next_u64() as u8,
            2 => bytes.truncate(at),
            3 => {
                let width = [4, 8][random.below(2)];
                let value = NASTY[random.below(NASTY.len())].to_le_bytes();
                let end = bytes.len().min(at + width);
                bytes[at..end].copy_from_slice(&value[..end - at]);
            }
            4 => {
                let run: Vec<u8> = bytes[at..bytes.len().min(at + 1 + random.below(24))].to_vec();
                let to = random.below(bytes.len().max(1));
                bytes.splice(to..to, run);
            }
            5 => {
                let end = bytes.len().min(at + 1 + random.below(16));
                bytes.drain(at..end);
            }
            _ => bytes.extend((0..random.below(16)).map(|_| random.next_u64() as u8)),
        }
    }
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn run(name: &str, seed_file: &[u8], attempt: fn(Vec<u8>)) {
    let seed = from_environment("OSCAR_FUZZ_SEED", 0x05ca_2b17);
    let rounds = from_environment("OSCAR_FUZZ_ROUNDS", 20_000);
    println!("{name}: {rounds} rounds, OSCAR_FUZZ_SEED={seed}");
    for round in 0..rounds {
        let mut random = Random::new(seed ^ round.wrapping_mul(0xd134_2543_de82_ef95));
        let mut bytes = seed_file.to_vec();
        damage(&mut bytes, &mut random);
        let shown = bytes.clone();
        if let Err(panic) = std::panic::catch_unwind(|| attempt(bytes)) {
            eprintln!("{name}: round {round} of seed {seed} failed on {}", shown.escape_ascii());
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn seeds_are_valid() {
    assert!(Gguf::parse(Arc::new(gguf_seed()), Path::new("m")).is_ok());
    assert!(Safetensors::parse(Arc::new(safetensors_seed()), Path::new("m")).is_ok());
    assert!(parse_index(INDEX_SEED.as_bytes(), Path::new("i")).is_ok());
    assert!(JsonFile::parse(CONFIG_SEED.as_bytes(), Path::new("c")).is_ok());
}

#[test]
fn the_memory_check_can_fail() {
    let wild = || with_bounded_memory(16, || drop(std::hint::black_box(Vec::<u8>::with_capacity(1 << 20))));
    assert!(std::panic::catch_unwind(wild).is_err());
}

#[test]
fn damaged_gguf_files() {
    run("gguf", &gguf_seed(), try_gguf);
}

#[test]
fn damaged_safetensors_files() {
    run("safetensors", &safetensors_seed(), try_safetensors);
}

#[test]
fn damaged_indexes() {
    run("index", INDEX_SEED.as_bytes(), try_index);
}

#[test]
fn damaged_configs() {
    run("config", CONFIG_SEED.as_bytes(), try_config);
}

#[test]
fn dense_tiny_entries_stay_in_proportion() {
    // Arrays of nothing: the form in which a file of a given size claims the most structures.
    let empty = array(0, 0, &[]);
    let bytes = GgufWriter::new().raw("k", 9, &array(9, 20_000, &empty.repeat(20_000))).build();
    try_gguf(bytes);
    let strings = array(8, 30_000, &[0; 8].repeat(30_000));
    try_gguf(GgufWriter::new().raw("k", 9, &strings).build());
    let mut writer = GgufWriter::new();
    for key in 0..5_000u32 {
        writer = writer.raw(key.to_le_bytes().map(|byte| byte & 0x7f), 0, &[0]);
    }
    try_gguf(writer.build());
}

proptest! {
    #[test]
    fn any_bytes_behind_a_valid_start(tail in prop::collection::vec(any::<u8>(), 0..512), tensors in 0u64..4, keys in 0u64..4) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes.extend(tail);
        try_gguf(bytes);
    }

    #[test]
    fn any_number_in_any_place(at in 0usize..1 << 12, value in any::<u64>(), width in 1usize..9) {
        let mut bytes = gguf_seed();
        let at = at % bytes.len();
        let end = bytes.len().min(at + width);
        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        try_gguf(bytes);
    }

    #[test]
    fn written_files_come_back(
        strings in prop::collection::vec(".{0,8}", 0..20),
        floats in prop::collection::vec(-1e6f32..1e6, 0..20),
        integers in prop::collection::vec(any::<i32>(), 0..20),
        shapes in prop::collection::vec(prop::collection::vec(1u64..6, 1..5), 0..6),
        alignment in 0u32..8,
    ) {
        let mut writer = GgufWriter::new().aligned(1 << alignment);
        writer = writer.strings("s", &strings).f32s("f", &floats).i32s("i", &integers);
        for (at, dims) in shapes.iter().enumerate() {
            let bytes = dims.iter().product::<u64>() as usize * 4;
            writer = writer.tensor(&format!("t{at}"), dims, F32, vec![at as u8; bytes]);
        }
        let file = Gguf::parse(Arc::new(writer.build()), Path::new("m")).unwrap();
        prop_assert_eq!(file.metadata().strings("s").unwrap().iter().collect::<Vec<_>>(), strings);
        prop_assert_eq!(file.metadata().f32s("f").unwrap(), floats);
        prop_assert_eq!(&*file.metadata().i32s("i").unwrap(), integers);
        for (at, dims) in shapes.iter().enumerate() {
            let tensor = file.tensor(&format!("t{at}")).unwrap();
            prop_assert!(tensor.shape.iter().rev().map(|&len| len as u64).eq(dims.iter().copied()));
            if let Ok(matrix) = tensor.matrix() {
                prop_assert!(matrix.data().unwrap().iter().all(|&byte| byte == at as u8));
            }
        }
    }
}
