//! `tokenizer.json` and the small configuration files beside it.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::TextError;
use super::added::{AddedTokens, encode_error, id_lookup};
use super::encoder::{JsonEncoder, TextEncoder};
use super::pieces::{PieceKind, PieceTable, Spelling};
use super::tokenizer::{SpecialTokens, Tokenizer};
use super::vocabulary::MAX_TOKENS;
use crate::files::JsonFile;

/// The largest tokenizers published are about 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const MAX_CONFIG_BYTES: u64 = 64 << 20;

impl Tokenizer {
    /// Reads a `tokenizer.json`. It does not name begin and end tokens; see [`Tokenizer::from_folder`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TextError> {
        load(path.as_ref(), |_| Ok(SpecialTokens::default()))
    }

    /// Reads `tokenizer.json` from a model folder, and the begin and end tokens from the
    /// `tokenizer_config.json`, `config.json` and `generation_config.json` beside it, where they exist.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let folder = folder.as_ref();
        load(&folder.join("tokenizer.json"), |inner| specials_of_folder(folder, inner))
    }
}

fn load(
    path: &Path,
    specials: impl FnOnce(&tokenizers::Tokenizer) -> Result<SpecialTokens, TextError>,
) -> Result<Tokenizer, TextError> {
    let bytes = read_bounded(path, MAX_TOKENIZER_BYTES)?;
    let bad = |reason: String| TextError::File { path: path.to_owned(), reason };
    let outline: Outline = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    outline.check().map_err(&bad)?;
    let (spelling, strips_leading_space) = spelling_of(outline.decoder.as_ref()).map_err(&bad)?;

    let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| bad(error.to_string()))?;
    // Training leftovers: a prompt must be neither cut nor padded behind the caller's back.
    inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
    inner.with_padding(None);

    let mut decoder: Vec<(u32, AddedToken)> = inner.get_added_tokens_decoder().into_iter().collect();
    decoder.sort_unstable_by_key(|(id, _)| *id);
    // Added tokens keep the ids of the file; matching only some of them must not renumber the rest.
    let ids = id_lookup(decoder.iter().map(|(id, token)| (token.content.as_str(), *id)))?;
    let added =
        AddedTokens::new(decoder.iter().map(|(_, token)| token.clone()), &ids, inner.get_normalizer())?;

    let kinds: HashMap<u32, PieceKind> = decoder
        .iter()
        .map(|(id, token)| (*id, if token.special { PieceKind::Control } else { PieceKind::UserDefined }))
        .collect();
    let mut texts: Vec<(u32, String)> =
        inner.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
    texts.sort_unstable();
    let highest = texts.last().map(|(id, _)| *id as usize);
    if highest.is_none_or(|id| id >= MAX_TOKENS) {
        return Err(bad(format!("token ids must lie between 0 and {MAX_TOKENS}, highest is {highest:?}")));
    }
    let mut pieces = PieceTable::default();
    for (id, text) in texts {
        // Ids nobody uses are holes in the table; a second text for one id is an alias for encoding only.
        while pieces.len() < id as usize {
            pieces.push("", PieceKind::Unused, spelling)?;
        }
        if pieces.len() == id as usize {
            let kind = kinds.get(&id).copied().unwrap_or(PieceKind::Normal);
            pieces.push(&text, kind, spelling)?;
        }
    }
    let mut specials = specials(&inner)?;
    if let Some(id) = specials.bos {
        let with = inner.encode_fast("a", true).map_err(encode_error)?;
        specials.adds_bos = with.get_ids().first() == Some(&id);
    }
    let encoder = TextEncoder::Json(Box::new(JsonEncoder { inner, added }));
    Tokenizer::assemble(encoder, pieces, specials, strips_leading_space)
}

/// The parts of `tokenizer.json` that are looked at before the library sees it.
#[derive(Deserialize)]
struct Outline {
    model: OutlineModel,
    decoder: Option<Value>,
}

#[derive(Deserialize)]
struct OutlineModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Value,
    #[serde(default)]
    merges: Vec<Merge>,
    continuing_subword_prefix: Option<String>,
}

/// Merge rules are written as `"a b"` in old files and as `["a", "b"]` in new ones.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

impl Outline {
    /// The library indexes by merge results without looking, so rules are checked here.
    fn check(&self) -> Result<(), String> {
        if self.model.kind.as_deref().is_some_and(|kind| kind != "BPE") || self.model.merges.is_empty() {
            return Ok(());
        }
        let Value::Object(vocabulary) = &self.model.vocab else {
            return Err("field `model.vocab` must be an object".to_owned());
        };
        let prefix = self.model.continuing_subword_prefix.as_deref().unwrap_or("");
        for (index, merge) in self.model.merges.iter().enumerate() {
            let (left, right) = match merge {
                Merge::Pair(left, right) => (left.as_str(), right.as_str()),
                Merge::Line(line) if line.starts_with("#version") => continue,
                Merge::Line(line) => line.split_once(' ').ok_or_else(|| {
                    format!("field `model.merges`: rule {index} ({line:?}) is not two tokens")
                })?,
            };
            let rest = right.strip_prefix(prefix).ok_or_else(|| {
                format!("field `model.merges`: rule {index}: {right:?} does not start with {prefix:?}")
            })?;
            let joined = format!("{left}{rest}");
            for part in [left, right, joined.as_str()] {
                if !vocabulary.contains_key(part) {
                    return Err(format!(
                        "field `model.merges`: rule {index} ({left:?}, {right:?}): {part:?} is not in the vocabulary"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Reads from the decoder how tokens stand for bytes, and whether a leading space is dropped.
fn spelling_of(decoder: Option<&Value>) -> Result<(Spelling, bool), String> {
    let mut steps = Vec::new();
    match decoder {
        Some(Value::Object(step)) if step.get("type").and_then(Value::as_str) == Some("Sequence") => {
            steps.extend(step.get("decoders").and_then(Value::as_array).into_iter().flatten());
        }
        Some(step) => steps.push(step),
        None => {}
    }
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or("").to_owned();
    let kinds: Vec<String> = steps.iter().map(|step| kind(step)).collect();
    let has = |name: &str| kinds.iter().any(|kind| kind == name);
    if has("ByteLevel") {
        return Ok((Spelling::ByteLevel, false));
    }
    if has("Metaspace") || has("ByteFallback") || has("Replace") {
        let strips = steps.iter().any(|step| match kind(step).as_str() {
            "Strip" => step.get("start").and_then(Value::as_u64).unwrap_or(0) > 0,
            "Metaspace" => match step.get("prepend_scheme").and_then(Value::as_str) {
                Some(scheme) => scheme != "never",
                None => step.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
            },
            _ => false,
        });
        return Ok((Spelling::SentencePiece, strips));
    }
    Err(format!(
        "field `decoder`: {} is not supported (known: ByteLevel, Metaspace, or a sequence with ByteFallback)",
        if kinds.is_empty() { "no decoder".to_owned() } else { kinds.join(" + ") }
    ))
}

/// Begin and end tokens from the files beside `tokenizer.json`.
fn specials_of_folder(folder: &Path, inner: &tokenizers::Tokenizer) -> Result<SpecialTokens, TextError> {
    let mut specials = SpecialTokens::default();
    if let Some(config) = read_json(&folder.join("tokenizer_config.json"))? {
        // A token is a string, or an object with a `content`.
        let id = |key: &str| {
            let value = config.get(key)?;
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            inner.token_to_id(text)
        };
        specials.bos = id("bos_token");
        specials.eos = id("eos_token");
    }
    specials.end.extend(specials.eos);
    for name in ["config.json", "generation_config.json"] {
        let Some(config) = JsonFile::open_if_present(&folder.join(name))? else { continue };
        let ids = |field| config.fields().token_ids_if_present(field).map(Option::unwrap_or_default);
        specials.end.extend(ids("eos_token_id")?);
        if specials.bos.is_none() {
            specials.bos = ids("bos_token_id")?.first().copied();
        }
    }
    specials.end.retain(|id| inner.id_to_token(*id).is_some());
    specials.bos = specials.bos.filter(|id| inner.id_to_token(*id).is_some());
    specials.eos = specials.eos.or(specials.end.first().copied());
    Ok(specials)
}

/// Reads a JSON file, or nothing where there is none.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, TextError> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_bounded(path, MAX_CONFIG_BYTES)?;
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| TextError::File { path: path.to_owned(), reason: error.to_string() })
}

/// Reads a whole file unless it is larger than such a file can be.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let failed = |source| TextError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let mut contents = Vec::new();
    // The size in the metadata may be wrong (pipes, growing files), so reading stops at the limit too.
    file.take(limit + 1).read_to_end(&mut contents).map_err(failed)?;
    let bytes = bytes.max(contents.len() as u64);
    if bytes > limit {
        return Err(TextError::TooLarge { path: path.to_owned(), bytes, limit });
    }
    Ok(contents)
}
