//! The JSON companions of a checkpoint (`config.json` and its kin), with errors that name the field.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::FileError;

/// Configuration files are small; tokenizer settings with thousands of added tokens reach a few megabytes.
const MAX_BYTES: u64 = 16 << 20;

/// A JSON file whose top level is an object.
#[derive(Clone, Debug)]
pub struct JsonFile {
    path: Arc<Path>,
    root: Map<String, Value>,
}

impl JsonFile {
    /// Reads and parses the file at `path`.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Self::parse(&read_limited(path, MAX_BYTES)?, path)
    }

    /// Reads `path`, `None` if there is no such file.
    pub fn open_if_present(path: &Path) -> Result<Option<Self>, FileError> {
        if path.exists() { Self::open(path).map(Some) } else { Ok(None) }
    }

    /// Parses `bytes`; `path` is only used in messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, FileError> {
        let value = serde_json::from_slice(bytes)
            .map_err(|source| FileError::Json { path: path.to_path_buf(), source })?;
        match value {
            Value::Object(root) => Ok(Self { path: Arc::from(path), root }),
            other => Err(FileError::Invalid {
                path: path.to_path_buf(),
                field: "top level".to_owned(),
                problem: format!("expected an object, got {}", describe(&other)),
            }),
        }
    }

    /// The fields of the top level.
    pub fn fields(&self) -> Fields<'_> {
        Fields { path: &self.path, prefix: String::new(), object: &self.root }
    }
}

/// The fields of one object of a JSON file. A field that is `null` counts as missing, as Python writers mean it.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The file that the fields come from.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// The parsed object, with all fields.
    pub fn object(&self) -> &'a Map<String, Value> {
        self.object
    }

    /// A field of any type.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there.
    pub fn contains(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// A required integer above zero.
    pub fn positive(&self, name: &str) -> Result<usize, FileError> {
        self.required(name, POSITIVE, positive)
    }

    /// An integer above zero, `None` if it is missing.
    pub fn positive_if_present(&self, name: &str) -> Result<Option<usize>, FileError> {
        self.optional(name, POSITIVE, positive)
    }

    /// An integer, 0 or more.
    pub fn count_if_present(&self, name: &str) -> Result<Option<usize>, FileError> {
        self.optional(name, "an integer, 0 or more", |value| usize::try_from(value.as_u64()?).ok())
    }

    /// The number in field `name`; an error that names the field if there is none.
    pub fn float(&self, name: &str) -> Result<f64, FileError> {
        self.required(name, NUMBER, Value::as_f64)
    }

    /// A number, `None` if it is missing.
    pub fn float_if_present(&self, name: &str) -> Result<Option<f64>, FileError> {
        self.optional(name, NUMBER, Value::as_f64)
    }

    /// A boolean, `None` if it is missing.
    pub fn bool_if_present(&self, name: &str) -> Result<Option<bool>, FileError> {
        self.optional(name, "true or false", Value::as_bool)
    }

    /// The string in field `name`; an error that names the field if there is none.
    pub fn str(&self, name: &str) -> Result<&'a str, FileError> {
        self.required(name, STRING, Value::as_str)
    }

    /// A string, `None` if it is missing.
    pub fn str_if_present(&self, name: &str) -> Result<Option<&'a str>, FileError> {
        self.optional(name, STRING, Value::as_str)
    }

    /// A list of strings, `None` if it is missing.
    pub fn strings_if_present(&self, name: &str) -> Result<Option<Vec<&'a str>>, FileError> {
        self.optional(name, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A list of numbers, `None` if it is missing.
    pub fn floats_if_present(&self, name: &str) -> Result<Option<Vec<f64>>, FileError> {
        self.optional(name, "a list of numbers", |value| {
            value.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    /// One token id or a list of them (`eos_token_id` is written both ways).
    pub fn token_ids_if_present(&self, name: &str) -> Result<Option<Vec<u32>>, FileError> {
        self.optional(name, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(token_id).collect(),
            id => Some(vec![token_id(id)?]),
        })
    }

    /// The fields of a nested object; errors about them show the whole path (`rope_scaling.factor`).
    pub fn fields_if_present(&self, name: &str) -> Result<Option<Fields<'a>>, FileError> {
        let object = self.optional(name, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields {
            path: self.path,
            prefix: format!("{}.", self.full_name(name)),
            object,
        }))
    }

    /// The error for a field whose value is of the right type but not acceptable.
    pub fn wrong(&self, name: &str, expected: &'static str) -> FileError {
        let got = self.value(name).map_or_else(|| "nothing".to_owned(), describe);
        FileError::WrongField { path: self.path.to_path_buf(), field: self.full_name(name), expected, got }
    }

    fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn optional<T>(
        &self,
        name: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FileError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.wrong(name, expected))
    }

    fn required<T>(
        &self,
        name: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, FileError> {
        self.optional(name, expected, convert)?.ok_or_else(|| self.wrong(name, expected))
    }
}

const POSITIVE: &str = "a positive integer";
const NUMBER: &str = "a number";
const STRING: &str = "a string";

fn positive(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok().filter(|&number| number > 0)
}

fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// A value for a message: numbers and short strings as they are, the rest by kind.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a long string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// Reads a whole file that must not be larger than `limit`.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let io_error = |source| FileError::Io { path: path.to_path_buf(), source };
    let found = fs::metadata(path).map_err(io_error)?;
    if !found.is_file() {
        return Err(FileError::NotAFile { path: path.to_path_buf() });
    }
    let mut bytes = Vec::new();
    // The file may grow after its size was asked, so the read itself is limited too.
    let file = File::open(path).map_err(io_error)?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error)?;
    let size = found.len().max(bytes.len() as u64);
    if size > limit {
        return Err(FileError::TooLarge { path: path.to_path_buf(), size, limit });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> JsonFile {
        JsonFile::parse(json.as_bytes(), Path::new("dir/config.json")).unwrap()
    }

    #[test]
    fn fields_have_their_types() {
        let file = parse(
            r#"{"hidden_size": 64, "rope_theta": 10000, "tie": true, "model_type": "llama", "nothing": null,
                "architectures": ["A", "B"], "eos_token_id": [1, 2], "bos_token_id": 0, "factors": [1, 2.5],
                "rope_scaling": {"factor": 4.0}}"#,
        );
        let fields = file.fields();
        assert_eq!(fields.positive("hidden_size").unwrap(), 64);
        assert_eq!(fields.float("rope_theta").unwrap(), 10000.0);
        assert_eq!(fields.bool_if_present("tie").unwrap(), Some(true));
        assert_eq!(fields.str("model_type").unwrap(), "llama");
        assert_eq!(fields.strings_if_present("architectures").unwrap(), Some(vec!["A", "B"]));
        assert_eq!(fields.token_ids_if_present("eos_token_id").unwrap(), Some(vec![1, 2]));
        assert_eq!(fields.token_ids_if_present("bos_token_id").unwrap(), Some(vec![0]));
        assert!(!fields.contains("nothing"));
        assert_eq!(fields.float_if_present("absent").unwrap(), None);
        let nested = fields.fields_if_present("rope_scaling").unwrap().unwrap();
        assert_eq!(nested.float("factor").unwrap(), 4.0);
    }

    #[test]
    fn errors_name_file_field_and_value() {
        let file =
            parse(r#"{"hidden_size": -4, "heads": 0, "layers": 2.5, "rope": {"deep": {"factor": "x"}}}"#);
        let fields = file.fields();
        let message = |error: FileError| error.to_string();
        assert_eq!(
            message(fields.positive("hidden_size").unwrap_err()),
            "dir/config.json: field `hidden_size`: expected a positive integer, got -4"
        );
        assert_eq!(
            message(fields.positive("heads").unwrap_err()),
            "dir/config.json: field `heads`: expected a positive integer, got 0"
        );
        assert_eq!(
            message(fields.positive("layers").unwrap_err()),
            "dir/config.json: field `layers`: expected a positive integer, got 2.5"
        );
        assert_eq!(
            message(fields.positive("vocab_size").unwrap_err()),
            "dir/config.json: field `vocab_size`: expected a positive integer, got nothing"
        );
        let rope = fields.fields_if_present("rope").unwrap().unwrap();
        let deep = rope.fields_if_present("deep").unwrap().unwrap();
        assert_eq!(
            message(deep.float("factor").unwrap_err()),
            "dir/config.json: field `rope.deep.factor`: expected a number, got \"x\""
        );
    }

    #[test]
    fn the_top_level_must_be_an_object() {
        let error = JsonFile::parse(b"[1]", Path::new("c.json")).unwrap_err();
        assert_eq!(error.to_string(), "c.json: top level: expected an object, got a list");
    }

    #[test]
    fn broken_json_names_the_file() {
        for bytes in [&b"{\"a\": "[..], b"{\"a\": 1} x", b"\xff\xfe", b""] {
            let error = JsonFile::parse(bytes, Path::new("c.json")).unwrap_err();
            assert!(matches!(error, FileError::Json { .. }), "{error}");
            assert!(error.to_string().starts_with("c.json: not valid JSON: "), "{error}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_not_an_overflow() {
        let json = format!("{{\"a\": {}", "[".repeat(1 << 20));
        assert!(JsonFile::parse(json.as_bytes(), Path::new("c.json")).is_err());
    }

    #[test]
    fn large_files_folders_and_missing_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, "123456789").unwrap();
        assert_eq!(read_limited(&path, 9).unwrap(), b"123456789");
        let error = read_limited(&path, 8).unwrap_err();
        assert!(matches!(error, FileError::TooLarge { size: 9, limit: 8, .. }), "{error}");
        let error = JsonFile::open(folder.path()).unwrap_err();
        assert!(matches!(error, FileError::NotAFile { .. }), "{error}");
        let absent = folder.path().join("absent.json");
        assert!(matches!(JsonFile::open(&absent).unwrap_err(), FileError::Io { .. }));
        assert!(JsonFile::open_if_present(&absent).unwrap().is_none());
    }
}
