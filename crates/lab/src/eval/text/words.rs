//! The vocabulary of the prose, from a file of lists.

use std::collections::HashMap;
use std::sync::LazyLock;

/// Lists by name. The order of a list decides what a seed gives, so entries are never moved.
static LISTS: LazyLock<HashMap<&str, Vec<&str>>> = LazyLock::new(|| {
    let mut lists: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut name = "";
    for line in include_str!("words.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(list) => name = list,
            None => lists.entry(name).or_default().push(line),
        }
    }
    lists
});

/// The list of a name, which is that of the slot it fills.
pub(super) fn words(list: &str) -> &'static [&'static str] {
    LISTS.get(list).unwrap_or_else(|| panic!("words.txt has no list called {list}"))
}
