//! Fields that are one value or a list of them, read without a copy and with a bound on the list.
//!
//! What serde derives for such types keeps the whole list in a form of its own before it tries the variants, which takes
//! many times the memory of the body, and names its own types in errors.

use std::marker::PhantomData;
use std::{fmt, io};

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::ApiError;

/// The most entries of a list of prompts, and of what belongs to each of them.
const MAX_ENTRIES: usize = 65_536;

/// The most messages (or items) of a conversation, and the most parts (or blocks) of one of them.
pub(crate) const MAX_MESSAGES: usize = 16_384;
pub(crate) const MAX_PARTS: usize = 4_096;

/// Refuses a list with more than `most` entries, which are called `what`.
pub(crate) fn at_most(place: &str, what: &str, len: usize, most: usize) -> Result<(), ApiError> {
    if len <= most {
        return Ok(());
    }
    Err(ApiError::bad_field(place, format!("{place} has {len} {what}, at most {most} are read")))
}

/// Refuses a value whose JSON has more than `most` bytes, without writing it anywhere.
pub(crate) fn short_json(place: &str, value: &impl Serialize, most: usize) -> Result<(), ApiError> {
    json_bytes(value, most)
        .map(|_| ())
        .ok_or_else(|| ApiError::bad_field(place, format!("{place} has more than {most} bytes of JSON")))
}

/// The bytes of a value's JSON, if there are no more than `most`.
pub(crate) fn json_bytes(value: &impl Serialize, most: usize) -> Option<usize> {
    /// Counts down the bytes that may still be written.
    struct BytesLeft(usize);

    impl io::Write for BytesLeft {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut left = BytesLeft(most);
    serde_json::to_writer(&mut left, value).ok()?;
    Some(most - left.0)
}

/// A number of tokens; -1, which llama.cpp's page sends, is as many as there is room for.
pub(crate) fn tokens_or_all<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<u64>, D::Error> {
    struct Tokens;

    impl<'de> Visitor<'de> for Tokens {
        type Value = Option<u64>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("u64")
        }

        fn visit_none<E: Error>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_unit<E: Error>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, reader: D) -> Result<Option<u64>, D::Error> {
            reader.deserialize_u64(Tokens)
        }

        fn visit_u64<E: Error>(self, tokens: u64) -> Result<Option<u64>, E> {
            Ok(Some(tokens))
        }

        fn visit_i64<E: Error>(self, tokens: i64) -> Result<Option<u64>, E> {
            match tokens {
                -1 => Ok(Some(u64::MAX)),
                0.. => Ok(Some(tokens as u64)),
                _ => Err(E::invalid_value(serde::de::Unexpected::Signed(tokens), &self)),
            }
        }
    }

    reader.deserialize_option(Tokens)
}

/// A field that is one value or a list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub(crate) fn into_vec(self) -> Vec<T> {
        match self {
            OneOrMany::One(value) => vec![value],
            OneOrMany::Many(values) => values,
        }
    }
}

/// A prompt as text or as token ids, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// Whether there is nothing in it.
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Texts(texts) => texts.is_empty(),
            Prompt::Ids(ids) => ids.is_empty(),
            Prompt::IdLists(lists) => lists.is_empty(),
        }
    }

    /// The number of prompts.
    pub(crate) fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::IdLists(lists) => lists.len(),
        }
    }
}

/// Token ids of one prompt or of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// The rest of a list that begins with `first`, of at most [`MAX_ENTRIES`] entries.
fn bounded<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut list: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        if all.len() == MAX_ENTRIES {
            return Err(A::Error::custom(format!("a list of more than {MAX_ENTRIES} entries")));
        }
        all.push(next);
    }
    Ok(all)
}

/// The rest of a list of token ids, which the size of a body bounds.
fn ids<'de, A: SeqAccess<'de>>(first: u32, mut list: A) -> Result<Vec<u32>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        all.push(next);
    }
    Ok(all)
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrManyVisitor(PhantomData))
    }
}

struct OneOrManyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> OneOrManyVisitor<T> {
    fn one<E: Error>(value: impl IntoDeserializer<'de, E>) -> Result<OneOrMany<T>, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMany::One)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrManyVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or a list of values")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        Self::one(value.to_owned())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Self::Value, E> {
        Self::one(value)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(OneOrMany::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        match list.next_element()? {
            None => Ok(OneOrMany::Many(Vec::new())),
            Some(first) => bounded(first, list).map(OneOrMany::Many),
        }
    }
}

/// The first entry of a list, which decides what the others must be.
enum Entry {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a token id or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Entry, E> {
                Ok(Entry::Text(text))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Entry, E> {
                u32::deserialize(id.into_deserializer()).map(Entry::Id)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
                match list.next_element()? {
                    None => Ok(Entry::Ids(Vec::new())),
                    Some(first) => ids(first, list).map(Entry::Ids),
                }
            }
        }

        deserializer.deserialize_any(EntryVisitor)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;

        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of texts, a list of token ids or a list of such lists")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                match list.next_element()? {
                    None => Ok(Prompt::Texts(Vec::new())),
                    Some(Entry::Text(first)) => bounded(first, list).map(Prompt::Texts),
                    Some(Entry::Id(first)) => ids(first, list).map(Prompt::Ids),
                    Some(Entry::Ids(first)) => bounded(first, list).map(Prompt::IdLists),
                }
            }
        }

        deserializer.deserialize_any(PromptVisitor)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Prompt::deserialize(deserializer)? {
            Prompt::Ids(ids) => Ok(Ids::One(ids)),
            Prompt::IdLists(lists) => Ok(Ids::Many(lists)),
            Prompt::Texts(texts) if texts.is_empty() => Ok(Ids::One(Vec::new())),
            Prompt::Text(_) | Prompt::Texts(_) => {
                Err(D::Error::custom("expected a list of token ids or a list of such lists"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_is_told_from_a_list() {
        let texts = |text: &str| serde_json::from_str::<OneOrMany<String>>(text);
        assert_eq!(texts("\"a\"").unwrap(), OneOrMany::One("a".to_owned()));
        assert_eq!(texts("[\"a\", \"b\"]").unwrap(), OneOrMany::Many(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(texts("[]").unwrap(), OneOrMany::Many(Vec::new()));
        assert_eq!(serde_json::from_str::<OneOrMany<i64>>("-1").unwrap(), OneOrMany::One(-1));
        for bad in ["3", "null", "{}", "[3]", "[[]]"] {
            let error = texts(bad).unwrap_err().to_string();
            assert!(!error.contains("OneOrMany") && !error.contains("untagged"), "{error}");
        }
    }

    #[test]
    fn lists_end_where_the_limit_is() {
        let list = |entries: usize| format!("[{}]", vec!["\"a\""; entries].join(","));
        assert!(serde_json::from_str::<Prompt>(&list(MAX_ENTRIES)).is_ok());
        for text in [list(MAX_ENTRIES + 1), list(MAX_ENTRIES + 1).replace("\"a\"", "[]")] {
            let error = serde_json::from_str::<Prompt>(&text).unwrap_err().to_string();
            assert!(error.contains("65536"), "{error}");
        }
        // One prompt may be longer.
        let ids = format!("[{}]", vec!["7"; MAX_ENTRIES + 1].join(","));
        assert_eq!(serde_json::from_str::<Ids>(&ids).unwrap(), Ids::One(vec![7; MAX_ENTRIES + 1]));
    }

    #[test]
    fn ids_are_not_texts() {
        assert_eq!(
            serde_json::from_str::<Ids>("[[1], [2, 3]]").unwrap(),
            Ids::Many(vec![vec![1], vec![2, 3]])
        );
        assert!(
            serde_json::from_str::<Ids>("\"a\"").is_err() && serde_json::from_str::<Ids>("[\"a\"]").is_err()
        );
        assert!(
            serde_json::from_str::<Ids>("[-1]").is_err()
                && serde_json::from_str::<Ids>("[4294967296]").is_err()
        );
    }
}
