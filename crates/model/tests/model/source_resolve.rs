//! Every way to name a model: paths, catalogue names, hub ids on disk and through the hub's client.
#![cfg(unix)]

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use oscar_model::source::{
    Cache, Catalogue, FetchPolicy, ModelPath, Settings, Silent, SourceError, resolve_with,
};

struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        let folder = tempfile::tempdir().expect("folder");
        fs::create_dir(folder.path().join("bin")).expect("bin");
        Machine { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        fs::write(&path, text).expect("write");
        path
    }

    /// A snapshot of `org/name` in the hub's layout.
    fn snapshot(&self, files: &[(&str, &str)]) -> PathBuf {
        self.write("hub/models--org--name/refs/main", "abc123\n");
        for (file, text) in files {
            self.write(&format!("hub/models--org--name/snapshots/abc123/{file}"), text);
        }
        self.path("hub/models--org--name/snapshots/abc123")
    }

    /// Installs the hub's client; written by a child so that no fork here holds it open for writing.
    fn hub_client(&self, name: &str, body: &str) {
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> {:?}\nroot=$HF_HUB_CACHE/models--org--name\n{body}\n",
            self.path("starts")
        );
        let mut child = Command::new("sh")
            .args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(self.path("bin").join(name))
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh");
        child.stdin.take().expect("stdin").write_all(script.as_bytes()).expect("write");
        assert!(child.wait().expect("sh").success());
    }

    fn starts(&self) -> String {
        fs::read_to_string(self.path("starts")).unwrap_or_default()
    }

    fn resolve(&self, model: &str, policy: FetchPolicy) -> Result<ModelPath, SourceError> {
        let settings = Settings {
            cache: Cache::new(self.path("cache")),
            hub_cache: self.path("hub"),
            python: None,
            search_path: OsString::from(self.path("bin")),
            catalogue: Catalogue::built_in(),
        };
        resolve_with(&settings, model, policy, &Silent)
    }

    fn error(&self, model: &str) -> (String, String) {
        let error = self.resolve(model, FetchPolicy::Allow).expect_err(model);
        assert!(!error.to_string().contains('\n'));
        (error.to_string(), error.fix().unwrap_or_default())
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("path")
}

#[test]
fn existing_files_and_folders_are_taken_as_they_are() {
    let machine = Machine::new();
    let gguf = machine.write("any name", "GGUF....");
    assert_eq!(machine.resolve(text(&gguf), FetchPolicy::Never).expect("file"), ModelPath::Gguf(gguf));
    let config = machine.write("folder/config.json", "{}");
    let folder = config.parent().expect("folder").to_owned();
    assert_eq!(
        machine.resolve(text(&folder), FetchPolicy::Never).expect("folder"),
        ModelPath::Folder(folder)
    );
}

#[test]
fn what_is_not_a_model_says_why() {
    let machine = Machine::new();
    let readme = machine.write("readme.md", "# hello");
    assert!(machine.error(text(&readme)).0.contains("GGUF magic"));
    let short = machine.write("short.gguf", "GG");
    assert!(machine.error(text(&short)).0.contains("GGUF magic"));
    assert!(machine.error(text(machine.folder.path())).0.contains("no config.json"));
    assert!(machine.error("./no/such/model").0.contains("no such file"));
    assert!(machine.error("missing.gguf").0.contains("no such file"));
}

#[test]
fn unknown_names_list_the_catalogue_and_suggest_the_nearest() {
    let machine = Machine::new();
    let (error, fix) = machine.error("smolm2");
    assert!(error.contains("smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"), "{error}");
    assert!(fix.contains("did you mean smollm2?"), "{fix}");
    let (_, fix) = machine.error("entirely-different");
    for form in ["oscar models", ".gguf", "config.json", "org/name"] {
        assert!(fix.contains(form), "{fix}");
    }
    assert!(machine.error("").0.contains("unknown model \"\""));
}

#[test]
fn a_snapshot_on_disk_needs_no_client() {
    let machine = Machine::new();
    machine.hub_client("hf", "exit 1");
    let folder = machine.snapshot(&[("config.json", "{}"), ("model.safetensors", "x")]);
    assert_eq!(machine.resolve("org/name", FetchPolicy::Allow).expect("cached"), ModelPath::Folder(folder));
    assert_eq!(machine.starts(), "");
}

#[test]
fn without_a_ref_the_only_snapshot_is_used_and_a_hostile_ref_is_not() {
    let machine = Machine::new();
    let folder = machine.snapshot(&[("config.json", "{}"), ("model.safetensors", "x")]);
    fs::remove_file(machine.path("hub/models--org--name/refs/main")).expect("remove");
    assert_eq!(machine.resolve("org/name", FetchPolicy::Never).expect("only"), ModelPath::Folder(folder));
    machine.write("hub/models--org--name/refs/main", "../snapshots/abc123");
    assert!(machine.resolve("org/name", FetchPolicy::Never).is_err());
}

#[test]
fn missing_shards_and_dangling_links_are_incomplete() {
    let machine = Machine::new();
    let index = r#"{"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}"#;
    let folder = machine.snapshot(&[
        ("config.json", "{}"),
        ("model.safetensors.index.json", index),
        ("model-00001.safetensors", "x"),
    ]);
    std::os::unix::fs::symlink("../../blobs/gone", folder.join("model-00002.safetensors")).expect("link");
    let (error, fix) = machine.error("org/name");
    assert!(error.contains("model-00002.safetensors is missing"), "{error}");
    assert!(fix.contains("hf download org/name"), "{fix}");
    fs::remove_file(folder.join("model-00002.safetensors")).expect("remove");
    fs::write(folder.join("model-00002.safetensors"), "x").expect("write");
    assert_eq!(machine.resolve("org/name", FetchPolicy::Never).expect("whole"), ModelPath::Folder(folder));
}

#[test]
fn gguf_files_of_a_snapshot_are_chosen_by_name_or_quantisation() {
    let machine = Machine::new();
    let folder = machine.snapshot(&[("tiny-q4_k_m.gguf", "GGUF")]);
    let first = ModelPath::Gguf(folder.join("tiny-q4_k_m.gguf"));
    assert_eq!(machine.resolve("org/name", FetchPolicy::Never).expect("only one"), first);
    machine.snapshot(&[("tiny-q8_0.gguf", "GGUF"), ("Q6/tiny-q6_k.gguf", "GGUF")]);
    let (error, fix) = machine.error("org/name");
    assert!(
        error.contains("several GGUF files: Q6/tiny-q6_k.gguf, tiny-q4_k_m.gguf, tiny-q8_0.gguf"),
        "{error}"
    );
    assert!(fix.contains("org/name:Q6/tiny-q6_k.gguf"), "{fix}");
    for selector in ["Q4_K_M", "tiny-q4_k_m", "TINY-Q4_K_M.gguf"] {
        assert_eq!(
            machine.resolve(&format!("org/name:{selector}"), FetchPolicy::Never).expect("chosen"),
            first
        );
    }
    assert!(machine.error("org/name:tiny").0.contains("several"));
    assert!(machine.error("org/name:Q2_K").0.contains("tiny-q8_0.gguf"));
}

#[test]
fn without_a_client_the_error_gives_the_command() {
    let machine = Machine::new();
    let (error, fix) = machine.error("org/name");
    assert!(error.contains("no hub client"), "{error}");
    assert!(fix.contains("`hf download org/name --exclude 'original/*'`"), "{fix}");
    let error = machine.resolve("org/name", FetchPolicy::Never).expect_err("offline");
    assert!(error.to_string().contains("downloads are off"), "{error}");
}

#[test]
fn the_client_fetches_what_is_missing() {
    let machine = Machine::new();
    machine.hub_client(
        "huggingface-cli",
        "mkdir -p $root/refs $root/snapshots/r1\nprintf r1 > $root/refs/main\n\
         echo '{}' > $root/snapshots/r1/config.json\necho x > $root/snapshots/r1/model.safetensors",
    );
    let found = machine.resolve("org/name", FetchPolicy::Allow).expect("fetched");
    assert_eq!(found, ModelPath::Folder(machine.path("hub/models--org--name/snapshots/r1")));
    assert_eq!(machine.starts(), "download org/name --exclude original/*\n");
    machine.resolve("org/name", FetchPolicy::Allow).expect("cached");
    assert_eq!(machine.starts(), "download org/name --exclude original/*\n");
}

#[test]
fn a_known_repository_of_many_files_fetches_the_one_we_test() {
    let machine = Machine::new();
    machine.hub_client("hf", "exit 3");
    let (error, _) = machine.error("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF");
    assert!(error.contains("exit status: 3"), "{error}");
    assert_eq!(
        machine.starts(),
        "download Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF qwen2.5-coder-0.5b-instruct-q4_k_m.gguf\n"
    );
}

#[test]
fn a_client_that_fetches_nothing_is_reported() {
    let machine = Machine::new();
    machine.hub_client("hf", "exit 0");
    assert!(machine.error("org/name").0.contains("left nothing"));
}
