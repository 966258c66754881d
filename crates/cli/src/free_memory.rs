//! How much memory this process may still take: what is free on the machine, and in the container it runs in.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that are free, counting files in the page cache as free; `None` where the system does not say.
pub(crate) fn free_bytes() -> Option<u64> {
    free_under(Path::new("/"))
}

/// Does the work of [`free_bytes`] with `/proc` and `/sys` below `root`.
fn free_under(root: &Path) -> Option<u64> {
    let machine = CounterFile::read(&root.join("proc/meminfo")).kibibytes("MemAvailable")?;
    [Some(machine), committable(root), free_in_container(root)].into_iter().flatten().min()
}

/// What may still be reserved on a machine that promises no more memory than it has.
fn committable(root: &Path) -> Option<u64> {
    let mode = fs::read_to_string(root.join("proc/sys/vm/overcommit_memory")).ok()?;
    let memory = CounterFile::read(&root.join("proc/meminfo"));
    let (limit, taken) = (memory.kibibytes("CommitLimit")?, memory.kibibytes("Committed_AS")?);
    (mode.trim() == "2").then_some(limit.saturating_sub(taken))
}

/// The names that a version of control groups has for the same things.
struct GroupFiles {
    folder: &'static str,
    limit: &'static str,
    usage: &'static str,
    cached: [&'static str; 2],
}

const VERSION_1: GroupFiles = GroupFiles {
    folder: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

const VERSION_2: GroupFiles = GroupFiles {
    folder: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    cached: ["inactive_file", "active_file"],
};

/// The least that is free in the groups that the process belongs to, from its own up to the root.
fn free_in_container(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut free = Vec::new();
    for group in groups.lines() {
        let mut parts = group.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let files = match controllers {
            "" => VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => VERSION_1,
            _ => continue,
        };
        // Inside a container the path may be that of the machine: then only the root is there.
        let own = Path::new(path.trim_start_matches('/'));
        free.extend(own.ancestors().filter_map(|group| files.free(&root.join(files.folder).join(group))));
    }
    free.into_iter().min()
}

impl GroupFiles {
    /// What is free in one group; `None` if it has no limit.
    fn free(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let statistics = CounterFile::read(&group.join("memory.stat"));
        let cached: u64 = self.cached.iter().filter_map(|name| statistics.get(name)).sum();
        Some(limit.saturating_sub(usage.saturating_sub(cached)))
    }
}

/// A file in which the kernel reports counters: a name and a number to a line.
struct CounterFile(String);

impl CounterFile {
    /// Reads a file; one that is not there has no counters.
    fn read(path: &Path) -> CounterFile {
        CounterFile(fs::read_to_string(path).unwrap_or_default())
    }

    fn get(&self, name: &str) -> Option<u64> {
        let mut lines = self.0.lines().map(str::split_whitespace);
        lines.find_map(|mut words| {
            let found = words.next()?.trim_end_matches(':') == name;
            if found { words.next()?.parse().ok() } else { None }
        })
    }

    fn kibibytes(&self, name: &str) -> Option<u64> {
        self.get(name)?.checked_mul(1024)
    }
}

/// Bytes of a model's files.
pub(crate) fn weight_bytes(path: &Path) -> u64 {
    let size = |path: PathBuf| path.metadata().map_or(0, |data| data.len());
    match path.read_dir() {
        Ok(files) => {
            let weights = files.flatten().map(|file| file.path());
            weights.filter(|path| path.extension().is_some_and(|kind| kind == "safetensors")).map(size).sum()
        }
        Err(_) => size(path.to_path_buf()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemAvailable:    800 kB\nCommitLimit:     700 kB\n\
                           Committed_AS:    100 kB\n";

    fn machine(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        free_under(root.path())
    }

    #[test]
    fn without_a_container_it_is_what_the_machine_has() {
        assert_eq!(machine(&[]), None);
        let memory = ("proc/meminfo", MEMINFO);
        assert_eq!(machine(&[memory]), Some(800 << 10));
        let unlimited = [
            memory,
            ("proc/self/cgroup", "0::/user.slice/x\n"),
            ("sys/fs/cgroup/user.slice/x/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/x/memory.current", "5\n"),
        ];
        assert_eq!(machine(&unlimited), Some(800 << 10));
        // Strict accounting: what is promised counts, used or not.
        assert_eq!(machine(&[memory, ("proc/sys/vm/overcommit_memory", "2\n")]), Some(600 << 10));
        assert_eq!(machine(&[memory, ("proc/sys/vm/overcommit_memory", "0\n")]), Some(800 << 10));
    }

    #[test]
    fn the_smallest_group_counts_and_its_page_cache_is_free() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/box/memory.max", "500000\n"),
            ("sys/fs/cgroup/pod/box/memory.current", "300000\n"),
            ("sys/fs/cgroup/pod/box/memory.stat", "anon 200000\ninactive_file 60000\nactive_file 40000\n"),
        ];
        assert_eq!(machine(&files), Some(300_000));
        let parent =
            [("sys/fs/cgroup/pod/memory.max", "400000\n"), ("sys/fs/cgroup/pod/memory.current", "300000\n")];
        assert_eq!(machine(&[&files[..], &parent].concat()), Some(100_000));
    }

    #[test]
    fn old_groups_and_paths_of_the_machine_are_understood() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/docker/1\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "250000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 30000\n"),
        ];
        assert_eq!(machine(&files), Some(180_000));
        let full = ("sys/fs/cgroup/memory/memory.usage_in_bytes", "900000\n");
        assert_eq!(machine(&[&files[..], &[full]].concat()), Some(0));
    }
}
