//! The body of `/v1/score`.

use std::sync::Arc;

use serde::Deserialize;

use super::{ApiError, OneOrMany, UnreadFields};

/// The body of `/v1/score`: texts, and texts that may follow them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ScoreRequest {
    pub(crate) model: Option<String>,
    pub(crate) text_1: Option<OneOrMany<String>>,
    pub(crate) text_2: Option<OneOrMany<String>>,
    pub(crate) rid: Option<String>,
    pub(crate) cache_salt: Option<String>,
    #[serde(flatten)]
    pub(crate) unread: UnreadFields,
}

impl ScoreRequest {
    /// The pairs to score: one text, which is shared, with each of the others, or two lists side by side.
    pub(crate) fn take_pairs(&mut self) -> Result<Vec<(Arc<str>, String)>, ApiError> {
        let missing =
            |field: &str| ApiError::bad_field(field, format!("{field} must be a text or a list of texts"));
        let first = self.text_1.take().ok_or_else(|| missing("text_1"))?;
        let second = self.text_2.take().ok_or_else(|| missing("text_2"))?.into_vec();
        let pairs: Vec<(Arc<str>, String)> = match first {
            OneOrMany::One(first) => {
                let first: Arc<str> = first.into();
                second.into_iter().map(|second| (Arc::clone(&first), second)).collect()
            }
            OneOrMany::Many(first) if first.len() == second.len() => {
                first.into_iter().map(Arc::from).zip(second).collect()
            }
            OneOrMany::Many(first) => {
                let message = format!(
                    "text_1 is one text or a list as long as text_2: it has {} and text_2 has {}",
                    first.len(),
                    second.len()
                );
                return Err(ApiError::bad_field("text_1", message));
            }
        };
        if pairs.is_empty() {
            return Err(ApiError::bad_field("text_2", "the list of texts is empty"));
        }
        Ok(pairs)
    }

    /// The number of pairs, before any of them is made.
    pub(crate) fn count(&self) -> usize {
        match &self.text_2 {
            Some(OneOrMany::Many(texts)) => texts.len(),
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pairs(first: Value, second: Value) -> Result<Vec<(Arc<str>, String)>, ApiError> {
        serde_json::from_value::<ScoreRequest>(json!({"text_1": first, "text_2": second}))
            .unwrap()
            .take_pairs()
    }

    #[test]
    fn texts_are_paired() {
        let pair = |first: &str, second: &str| (Arc::from(first), second.to_owned());
        assert_eq!(pairs(json!("a"), json!("b")).unwrap(), [pair("a", "b")]);
        assert_eq!(pairs(json!("a"), json!(["b", "c"])).unwrap(), [pair("a", "b"), pair("a", "c")]);
        assert_eq!(pairs(json!(["a", "b"]), json!(["c", "d"])).unwrap(), [pair("a", "c"), pair("b", "d")]);
        for (first, second, param) in [
            (json!(["a", "b"]), json!("c"), "text_1"),
            (json!("a"), json!([]), "text_2"),
            (Value::Null, json!("a"), "text_1"),
            (json!("a"), Value::Null, "text_2"),
        ] {
            let error = pairs(first.clone(), second.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{first} {second}");
        }
    }
}
