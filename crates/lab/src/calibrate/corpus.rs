//! The text that a model is calibrated on: the user's, or drawn from the model.

use std::fs;
use std::path::{Path, PathBuf};

use oscar_kernels::Backend;
use oscar_model::LoadedModel;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::CalibrateError;
use super::sample::sample;

/// Largest file that is read.
const MOST_BYTES: u64 = 1 << 30;

/// Tokens of one sequence, unless the model's context is shorter or fewer are requested. Keys turn with their position, so
/// their means and covariances hold only as far as positions reach.
pub const SEQUENCE_TOKENS: usize = 8192;

/// Tokens of the held-out sequence, and of any sequence at least: long enough for a history behind the windows.
const HELD_OUT_TOKENS: usize = 2048;

/// Tokens of one conversation drawn from the model. Several are drawn at once and joined to sequences: a step costs
/// about the same for one conversation as for forty.
const PIECE_TOKENS: usize = 256;

/// Where the calibration text comes from.
#[derive(Clone, Debug)]
pub enum CorpusSource {
    /// Text or JSONL files.
    Files {
        /// Paths of the files, in the order in which they are read.
        paths: Vec<PathBuf>,
        /// Whether to render `messages` of JSONL records with the model's chat template.
        chat: bool,
    },
    /// Conversations drawn from the model.
    Model {
        /// Seed of the conversations; the same seed gives the same text.
        seed: u64,
    },
}

/// Token sequences for moments, and one more for choosing and certifying.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Sequences that moments are summed over.
    pub sequences: Vec<Vec<u32>>,
    /// The sequence that rules are chosen and errors measured on; not part of the moments.
    pub held_out: Vec<u32>,
    /// SHA-256 of all token ids.
    pub hash: String,
}

/// How text is cut into sequences.
#[derive(Clone, Copy)]
struct Cut {
    count: usize,
    length: usize,
}

impl Cut {
    fn of(tokens: usize, context: usize) -> Cut {
        let length = SEQUENCE_TOKENS.min(tokens.max(HELD_OUT_TOKENS)).min(context);
        Cut { count: tokens.div_ceil(length).max(1), length }
    }

    /// Tokens in all, the held-out sequence included.
    fn tokens(self) -> usize {
        self.count * self.length + HELD_OUT_TOKENS.min(self.length)
    }
}

impl Corpus {
    /// Tokens of text that [`Corpus::of`] takes.
    pub fn needed(tokens: usize, context: usize) -> usize {
        Cut::of(tokens, context).tokens()
    }

    /// Collects `tokens` tokens for moments and a held-out sequence behind them.
    pub fn collect<B: Backend>(
        model: &LoadedModel<B>,
        source: &CorpusSource,
        tokens: usize,
        progress: impl FnMut(usize, usize),
    ) -> Result<Corpus, CalibrateError> {
        let cut = Cut::of(tokens, model.config().max_context);
        let needed = cut.tokens();
        let ids = match source {
            CorpusSource::Model { seed } => {
                let mut progress = progress;
                let piece = PIECE_TOKENS.min(cut.length);
                let pieces = needed.div_ceil(piece);
                sample(model, pieces, piece, *seed, |done| progress(done.min(needed), needed))?.concat()
            }
            CorpusSource::Files { paths, chat } => read(model, paths, *chat)?,
        };
        Corpus::cut(ids, cut)
    }

    /// Cuts text into sequences for a model with so much context: `tokens` tokens for moments, and a held-out sequence.
    pub fn of(ids: Vec<u32>, tokens: usize, context: usize) -> Result<Corpus, CalibrateError> {
        Corpus::cut(ids, Cut::of(tokens, context))
    }

    fn cut(mut ids: Vec<u32>, cut: Cut) -> Result<Corpus, CalibrateError> {
        let needed = cut.tokens();
        if ids.len() < needed {
            return Err(CalibrateError::TooShort { tokens: ids.len(), needed });
        }
        ids.truncate(needed);
        let held_out = ids.split_off(cut.count * cut.length);
        let sequences: Vec<Vec<u32>> = ids.chunks_exact(cut.length).map(<[u32]>::to_vec).collect();
        let mut hash = Sha256::new();
        for token in sequences.iter().chain([&held_out]).flatten() {
            hash.update(token.to_le_bytes());
        }
        let hash = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Corpus { sequences, held_out, hash })
    }

    /// Number of tokens that moments are summed over.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }
}

/// The token ids of some text or JSONL files, one after the other.
pub fn read<B: Backend>(
    model: &LoadedModel<B>,
    paths: &[PathBuf],
    chat: bool,
) -> Result<Vec<u32>, CalibrateError> {
    let mut ids = Vec::new();
    for path in paths {
        let unreadable = |source| CalibrateError::Read { path: path.clone(), source };
        let bytes = fs::metadata(path).map_err(unreadable)?.len();
        if bytes > MOST_BYTES {
            return Err(CalibrateError::TooLarge { path: path.clone(), bytes, most: MOST_BYTES });
        }
        let text = fs::read_to_string(path).map_err(unreadable)?;
        if is_jsonl(path) {
            for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let wrong =
                    |problem: String| CalibrateError::Record { path: path.clone(), line: index + 1, problem };
                let record: Value = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
                ids.extend(record_ids(model, &record, chat).map_err(wrong)?);
            }
        } else {
            ids.extend(model.tokenizer().encode(&text, true)?);
        }
    }
    Ok(ids)
}

fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

/// `{"text": …}`, `{"prompt": …, "response"|"completion": …}` or `{"messages": [{"role": …, "content": …}]}`.
fn record_ids<B: Backend>(model: &LoadedModel<B>, record: &Value, chat: bool) -> Result<Vec<u32>, String> {
    let text = |name: &str| record.get(name).and_then(Value::as_str);
    if let Some(messages) = record.get("messages").and_then(Value::as_array) {
        if chat {
            return model.encode_chat(messages).map_err(|error| error.to_string());
        }
        let contents: Vec<&str> =
            messages.iter().filter_map(|message| message.get("content").and_then(Value::as_str)).collect();
        return model.tokenizer().encode(&contents.join("\n\n"), true).map_err(|error| error.to_string());
    }
    let whole = match (text("text"), text("prompt"), text("response").or_else(|| text("completion"))) {
        (Some(text), _, _) => text.to_owned(),
        (None, Some(prompt), answer) => format!("{prompt}{}", answer.unwrap_or_default()),
        _ => return Err("a record has `text`, `prompt` (with `response`) or `messages`".into()),
    };
    if chat {
        let messages = [serde_json::json!({"role": "user", "content": whole})];
        return model.encode_chat(&messages).map_err(|error| error.to_string());
    }
    model.tokenizer().encode(&whole, true).map_err(|error| error.to_string())
}
