//! Settings from a file: its entries become flags before those of the command line, which therefore win.

use std::ffi::OsString;
use std::path::Path;

use toml::{Table, Value};

use crate::failure::Failure;

/// Longest file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// The arguments of the program, with what the file after `--config` says put in after `serve`.
pub(crate) fn with_config_file(arguments: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let Some(serve) = arguments.iter().position(|argument| argument == "serve") else { return Ok(arguments) };
    let after = &arguments[serve + 1..];
    let file = after.iter().enumerate().find_map(|(index, argument)| {
        if argument == "--config" {
            return after.get(index + 1).cloned();
        }
        argument.to_str()?.strip_prefix("--config=").map(OsString::from)
    });
    let Some(file) = file else { return Ok(arguments) };
    let flags = flags(&read(Path::new(&file))?, Path::new(&file))?;
    let (before, after) = arguments.split_at(serve + 1);
    Ok(before
        .iter()
        .cloned()
        .chain(flags.into_iter().map(OsString::from))
        .chain(after.iter().cloned())
        .collect())
}

fn read(path: &Path) -> Result<Table, Failure> {
    let shown = path.display();
    let size = path.metadata().map_err(|error| Failure::new(format!("cannot read {shown}: {error}")))?.len();
    if size > MAX_BYTES {
        return Err(Failure::new(format!("{shown} has {size} bytes, which is no configuration")));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::new(format!("cannot read {shown}: {error}")))?;
    text.parse::<Table>().map_err(|error| {
        let message = error.message().to_owned();
        let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
        Failure::new(format!("{shown} line {line}: {message}")).with_fix("write it as TOML: name = value")
    })
}

/// `port = 8000` is `--port=8000`, `deterministic = true` is `--deterministic`, a list is a flag for each entry.
fn flags(table: &Table, path: &Path) -> Result<Vec<String>, Failure> {
    let mut flags = Vec::new();
    for (name, value) in table {
        let flag = format!("--{}", name.replace('_', "-"));
        let values = match value {
            Value::Array(values) => values.iter().collect(),
            value => vec![value],
        };
        for value in values {
            match value {
                Value::Boolean(true) => flags.push(flag.clone()),
                Value::Boolean(false) => {}
                Value::String(text) => flags.push(format!("{flag}={text}")),
                Value::Integer(number) => flags.push(format!("{flag}={number}")),
                Value::Float(number) => flags.push(format!("{flag}={number}")),
                Value::Datetime(_) | Value::Array(_) | Value::Table(_) => {
                    let message =
                        format!("{}: {name} must be a text, a number, true or false", path.display());
                    return Err(
                        Failure::new(message).with_fix("use the names of flags as keys, without tables")
                    );
                }
            }
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_become_flags() {
        let text = "port = 8000\nkv_cache_dtype = \"int2\"\nmem-fraction-static = 0.5\ndeterministic = true\n\
            offline = false\ncors-allow-origin = [\"a\", \"b\"]\n";
        let flags = flags(&text.parse().unwrap(), Path::new("x")).unwrap();
        let expected = [
            "--port=8000",
            "--kv-cache-dtype=int2",
            "--mem-fraction-static=0.5",
            "--deterministic",
            "--cors-allow-origin=a",
            "--cors-allow-origin=b",
        ];
        let mut sorted = flags.clone();
        sorted.sort();
        let mut wanted = expected.map(String::from);
        wanted.sort();
        assert_eq!(sorted, wanted);
        assert!(super::flags(&"[server]\nport = 1".parse().unwrap(), Path::new("x")).is_err());
    }

    #[test]
    fn other_commands_are_left_alone() {
        let arguments: Vec<OsString> = ["oscar", "chat", "--config", "x"].map(OsString::from).to_vec();
        assert_eq!(with_config_file(arguments.clone()).unwrap(), arguments);
    }
}
