//! SentencePiece BPE: join the neighbouring pair whose joined token scores highest, until none is left.
//!
//! Unlike byte-level BPE there is no list of merge rules: any two neighbours whose joined text is a token may
//! merge, and the token's score is its priority. Characters without a token become their UTF-8 bytes.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::TextError;
use super::pieces::{PieceKind, byte_token};

/// Scores and ids of the tokens that may appear in plain text.
pub(super) struct SentencePieceModel {
    ranks: HashMap<String, ScoredToken>,
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
    adds_space_prefix: bool,
}

#[derive(Clone, Copy)]
struct ScoredToken {
    id: u32,
    score: f32,
}

/// A piece of text in a doubly linked list; merged away when its length is 0.
struct Symbol {
    start: usize,
    length: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that could be joined, valid as long as their lengths still add up to `length`.
struct MergeCandidate {
    score: f32,
    left: usize,
    right: usize,
    length: usize,
}

impl Ord for MergeCandidate {
    fn cmp(&self, other: &Self) -> Ordering {
        // Highest score first, then leftmost; scores are checked to be numbers when the model is built.
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for MergeCandidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for MergeCandidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for MergeCandidate {}

impl SentencePieceModel {
    pub(super) fn new(
        tokens: &[String],
        scores: &[f32],
        kinds: &[PieceKind],
        unknown: Option<u32>,
        adds_space_prefix: bool,
    ) -> Result<Self, TextError> {
        if scores.is_empty() {
            return Err(TextError::MissingField { field: "tokenizer.ggml.scores" });
        }
        let mut ranks = HashMap::with_capacity(tokens.len());
        let mut bytes = [None; 256];
        for (index, ((token, score), kind)) in tokens.iter().zip(scores).zip(kinds).enumerate() {
            if score.is_nan() {
                return Err(TextError::BadField {
                    field: "tokenizer.ggml.scores",
                    reason: format!("the score of token {index} is not a number"),
                });
            }
            let id = index as u32;
            match kind {
                PieceKind::Byte => {
                    let byte = byte_token(token).ok_or_else(|| TextError::BadField {
                        field: "tokenizer.ggml.tokens",
                        reason: format!("token {index} has the byte type but is written {token:?}"),
                    })?;
                    bytes[usize::from(byte)] = Some(id);
                }
                // Text must never turn into a control token, whatever its characters.
                PieceKind::Control | PieceKind::Unknown | PieceKind::Unused => {}
                PieceKind::Normal | PieceKind::UserDefined => {
                    // Negative zero would sort below zero in a total order.
                    ranks.insert(token.clone(), ScoredToken { id, score: score + 0.0 });
                }
            }
        }
        Ok(Self { ranks, bytes, unknown, adds_space_prefix })
    }

    /// Appends the tokens of `text` to `ids`. `after_break` is true at the start of the text and after a token
    /// that was matched as a whole: there the model expects a leading space.
    pub(super) fn encode(&self, text: &str, after_break: bool, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut escaped = String::with_capacity(text.len() + text.len() / 4 + 3);
        if self.adds_space_prefix && after_break {
            escaped.push('▁');
        }
        escaped.extend(text.chars().map(|character| if character == ' ' { '▁' } else { character }));

        let mut symbols = symbols_of(&escaped);
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.propose(&escaped, &symbols, right - 1, right, &mut queue);
        }
        while let Some(candidate) = queue.pop() {
            let (left, right) = (candidate.left, candidate.right);
            let (left_length, right_length) = (symbols[left].length, symbols[right].length);
            if left_length == 0 || right_length == 0 || left_length + right_length != candidate.length {
                continue;
            }
            symbols[left].length = candidate.length;
            symbols[right].length = 0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if let Some(next) = next {
                symbols[next].previous = Some(left);
                self.propose(&escaped, &symbols, left, next, &mut queue);
            }
            if let Some(previous) = symbols[left].previous {
                self.propose(&escaped, &symbols, previous, left, &mut queue);
            }
        }

        let mut current = Some(0);
        while let Some(index) = current {
            let symbol = &symbols[index];
            self.emit(&escaped[symbol.start..symbol.start + symbol.length], ids);
            current = symbol.next;
        }
    }

    fn propose(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<MergeCandidate>,
    ) {
        let length = symbols[left].length + symbols[right].length;
        let start = symbols[left].start;
        if let Some(entry) = self.ranks.get(&text[start..start + length]) {
            queue.push(MergeCandidate { score: entry.score, left, right, length });
        }
    }

    fn emit(&self, text: &str, ids: &mut Vec<u32>) {
        if let Some(entry) = self.ranks.get(text) {
            ids.push(entry.id);
            return;
        }
        // Only single characters can miss the vocabulary: everything longer was made by a merge.
        for byte in text.bytes() {
            if let Some(id) = self.bytes[usize::from(byte)].or(self.unknown) {
                ids.push(id);
            }
        }
    }
}

fn symbols_of(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(index, (start, character))| Symbol {
            start,
            length: character.len_utf8(),
            previous: index.checked_sub(1),
            next: Some(index + 1),
        })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
    symbols
}
