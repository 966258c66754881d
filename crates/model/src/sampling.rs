//! The sampling settings that a model's makers recommend: `generation_config.json`, or `general.sampling.*` of a GGUF file.
//! Servers and chats use them for what a request leaves out.

use std::path::Path;

use crate::files::{Fields, FileError, Gguf, JsonFile};

/// Settings that a model comes with; `None` where its makers say nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Sampling temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens whose probability reaches this.
    pub top_p: Option<f32>,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Drop tokens less likely than this share of the most likely one.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens that came up already; 1 is off.
    pub repetition_penalty: Option<f32>,
}

/// A sampling setting: its name, its key in GGUF, what is allowed.
struct SamplingSetting {
    name: &'static str,
    gguf: &'static str,
    allowed: fn(f64) -> bool,
    expected: &'static str,
}

const TEMPERATURE: SamplingSetting = SamplingSetting {
    name: "temperature",
    gguf: "general.sampling.temp",
    allowed: |value| value >= 0.0,
    expected: "a number of 0 or more",
};
const TOP_P: SamplingSetting = SamplingSetting {
    name: "top_p",
    gguf: "general.sampling.top_p",
    allowed: |value| value > 0.0 && value <= 1.0,
    expected: "a number above 0, at most 1",
};
/// Some writers have -1 for all tokens.
const TOP_K: SamplingSetting = SamplingSetting {
    name: "top_k",
    gguf: "general.sampling.top_k",
    allowed: |value| value >= -1.0 && value <= f64::from(u32::MAX) && value.fract() == 0.0,
    expected: "a whole number of -1 or more",
};
const MIN_P: SamplingSetting = SamplingSetting {
    name: "min_p",
    gguf: "general.sampling.min_p",
    allowed: |value| (0.0..=1.0).contains(&value),
    expected: "a number from 0 to 1",
};
const REPETITION_PENALTY: SamplingSetting = SamplingSetting {
    name: "repetition_penalty",
    gguf: "general.sampling.penalty_repeat",
    allowed: |value| value > 0.0,
    expected: "a number above 0",
};

impl SamplingDefaults {
    /// Reads `generation_config.json` of a folder; there are no settings where there is no such file.
    pub fn from_folder(folder: &Path) -> Result<SamplingDefaults, FileError> {
        match JsonFile::open_if_present(&folder.join("generation_config.json"))? {
            Some(file) => Self::from_fields(&file.fields()),
            None => Ok(SamplingDefaults::default()),
        }
    }

    /// Reads the metadata of a GGUF file.
    pub fn from_gguf(gguf: &Gguf) -> Result<SamplingDefaults, FileError> {
        Self::read(|setting| {
            let (key, metadata) = (setting.gguf, gguf.metadata());
            let Some(found) = metadata.value(key) else { return Ok(None) };
            // Floats and integers are both written for the same key. A float is meant as it was typed: 0.6, not the
            // nearest f32 in f64.
            let typed = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
            let float = metadata.get::<f32>(key).ok().flatten().map(typed);
            let value = float.or_else(|| metadata.get::<i32>(key).ok().flatten().map(f64::from));
            match value.filter(|&value| acceptable(setting, value)) {
                Some(value) => Ok(Some(value)),
                None => Err(FileError::WrongType {
                    path: gguf.path().to_path_buf(),
                    key: key.to_owned(),
                    expected: setting.expected,
                    found: value.map_or_else(|| found.describe(), |value| value.to_string()),
                }),
            }
        })
    }

    fn from_fields(fields: &Fields<'_>) -> Result<SamplingDefaults, FileError> {
        Self::read(|setting| match fields.float_if_present(setting.name)? {
            Some(value) if !acceptable(setting, value) => Err(fields.wrong(setting.name, setting.expected)),
            value => Ok(value),
        })
    }

    fn read(
        mut value: impl FnMut(&SamplingSetting) -> Result<Option<f64>, FileError>,
    ) -> Result<SamplingDefaults, FileError> {
        let mut number =
            |setting: &SamplingSetting| value(setting).map(|value| value.map(|value| value as f32));
        Ok(SamplingDefaults {
            temperature: number(&TEMPERATURE)?,
            top_p: number(&TOP_P)?,
            min_p: number(&MIN_P)?,
            repetition_penalty: number(&REPETITION_PENALTY)?,
            top_k: value(&TOP_K)?.map(|count| count.max(0.0) as usize),
        })
    }

    /// Whether the model comes without any recommended setting.
    pub fn is_empty(&self) -> bool {
        *self == SamplingDefaults::default()
    }
}

/// Whether a value is allowed. One that is too large for an `f32` is not.
fn acceptable(setting: &SamplingSetting, value: f64) -> bool {
    (value as f32).is_finite() && (setting.allowed)(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<SamplingDefaults, FileError> {
        let file = JsonFile::parse(json.as_bytes(), Path::new("generation_config.json")).unwrap();
        SamplingDefaults::from_fields(&file.fields())
    }

    #[test]
    fn what_makers_say_is_read() {
        let qwen3 = r#"{"bos_token_id": 1, "do_sample": true, "eos_token_id": [2, 3], "pad_token_id": 1,
            "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}"#;
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            ..SamplingDefaults::default()
        };
        assert_eq!(parse(qwen3).unwrap(), expected);
        let rest = parse(r#"{"min_p": 0.1, "repetition_penalty": 1.05, "temperature": null, "top_k": -1}"#);
        let expected = SamplingDefaults {
            min_p: Some(0.1),
            repetition_penalty: Some(1.05),
            top_k: Some(0),
            ..SamplingDefaults::default()
        };
        assert_eq!(rest.unwrap(), expected);
        assert!(parse(r#"{"eos_token_id": 2}"#).unwrap().is_empty());
        let folder = tempfile::tempdir().unwrap();
        assert!(SamplingDefaults::from_folder(folder.path()).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (json, field) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"temperature": "warm"}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"top_k": 2.5}"#, "top_k"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"min_p": 2}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        ] {
            let error = parse(json).unwrap_err().to_string();
            assert!(error.starts_with(&format!("generation_config.json: field `{field}`")), "{error}");
        }
    }
}
