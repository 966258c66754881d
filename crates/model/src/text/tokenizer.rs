//! One tokenizer over all encoders: text to ids, ids to text, ids to bytes.

use std::sync::Arc;

use tokenizers::NormalizerWrapper;

use super::added::{AddedTokens, Matching, added_tokens, id_lookup};
use super::byte_level::{self, PreTokenizerName};
use super::control::{ControlTokens, RenderedText, looks_like_control};
use super::encoder::{ByteLevelEncoder, SentencePieceEncoder, TextEncoder};
use super::pieces::{PieceKind, PieceTable, Spelling};
use super::sentence_piece::SentencePieceModel;
use super::{GgufVocabulary, TextError};
use crate::files::gguf::Gguf;

/// Tokens that end a generation in some model family. A model may emit any of those its vocabulary marks as
/// control tokens, whichever one its file happens to name as the end of text.
const END_TOKENS: [&str; 13] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_sentence|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "</s>",
];

/// Converts between text and the token ids of one model.
pub struct Tokenizer {
    encoder: TextEncoder,
    pieces: PieceTable,
    specials: SpecialTokens,
    control: Arc<ControlTokens>,
    /// Decoded text starts with a space the encoder put there.
    strips_leading_space: bool,
}

/// The ids of special tokens, and which of them a whole text gets.
#[derive(Debug, Default, Clone)]
pub(super) struct SpecialTokens {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    /// Ids at which generation stops, sorted, without duplicates.
    pub(super) end: Vec<u32>,
    pub(super) adds_bos: bool,
    pub(super) adds_eos: bool,
}

impl Tokenizer {
    /// Rebuilds the tokenizer of a GGUF file.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TextError> {
        Self::from_gguf_vocabulary(&GgufVocabulary::from_gguf(file)?)
    }

    /// Rebuilds the tokenizer that vocabulary fields describe. Ids are the positions in `vocabulary.tokens`.
    pub fn from_gguf_vocabulary(vocabulary: &GgufVocabulary) -> Result<Self, TextError> {
        vocabulary.check()?;
        let kinds = vocabulary.kinds()?;
        let texts = || vocabulary.tokens.iter().map(String::as_str);
        let whole = || added_tokens(texts().zip(kinds.iter().copied()));
        let (encoder, spelling, strips_leading_space, adds_bos);
        match vocabulary.model.as_str() {
            "gpt2" => {
                let stages = byte_level::build(vocabulary)?;
                let added = AddedTokens::new(whole(), &stages.model, stages.normalizer.as_ref())?;
                encoder = TextEncoder::ByteLevel(Box::new(ByteLevelEncoder { stages, added }));
                spelling = Spelling::ByteLevel;
                strips_leading_space = false;
                adds_bos = PreTokenizerName::parse(vocabulary.pre.as_deref())?.adds_bos_by_default();
            }
            "llama" => {
                let adds_space_prefix = vocabulary.add_space_prefix.unwrap_or(true);
                let model = SentencePieceModel::new(
                    &vocabulary.tokens,
                    &vocabulary.scores,
                    &kinds,
                    vocabulary.unk,
                    adds_space_prefix,
                )?;
                let lookup = id_lookup(texts().zip(0..))?;
                let added = AddedTokens::new(whole(), &lookup, None::<&NormalizerWrapper>)?;
                encoder = TextEncoder::SentencePiece(Box::new(SentencePieceEncoder { model, lookup, added }));
                spelling = Spelling::SentencePiece;
                strips_leading_space = adds_space_prefix;
                adds_bos = true;
            }
            "" => return Err(TextError::MissingField { field: "tokenizer.ggml.model" }),
            other => return Err(TextError::UnknownModel { model: other.to_owned() }),
        }
        let mut pieces = PieceTable::default();
        for (text, kind) in texts().zip(&kinds) {
            pieces.push(text, *kind, spelling)?;
        }
        let specials = SpecialTokens {
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            end: [vocabulary.eos, vocabulary.eot, vocabulary.eom].into_iter().flatten().collect(),
            adds_bos: vocabulary.add_bos.unwrap_or(adds_bos && vocabulary.bos.is_some()),
            adds_eos: vocabulary.add_eos.unwrap_or(false),
        };
        Self::assemble(encoder, pieces, specials, strips_leading_space)
    }

    pub(super) fn assemble(
        encoder: TextEncoder,
        pieces: PieceTable,
        specials: SpecialTokens,
        strips_leading_space: bool,
    ) -> Result<Self, TextError> {
        let control = Arc::new(ControlTokens::new(control_texts(&pieces))?);
        let mut tokenizer = Self { encoder, pieces, specials, control, strips_leading_space };
        let special = |text: &str| tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id));
        // Where answers are several messages (GPT-OSS), `<|end|>` ends one of them.
        let several = special("<|return|>").is_some() && special("<|call|>").is_some();
        let ends = END_TOKENS.into_iter().filter(|text| !(several && *text == "<|end|>"));
        let ends: Vec<u32> = ends.filter_map(special).collect();
        tokenizer.specials.end.extend(ends);
        tokenizer.specials.end.sort_unstable();
        tokenizer.specials.end.dedup();
        Ok(tokenizer)
    }

    /// Encodes plain text: text that looks like a special token stays text, so a user cannot forge a turn.
    /// `add_special` adds the begin and end tokens the model expects around a whole text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.encode_text(text, add_special, Matching::UserDefined)
    }

    /// Encodes text in which special tokens are meant wherever they are written, such as a raw prompt: `<|im_end|>`
    /// becomes one id. `add_special` adds the begin and end tokens the model expects around a whole text.
    pub fn encode_with_special_tokens_parsed(
        &self,
        text: &str,
        add_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_text(text, add_special, Matching::All)
    }

    /// Encodes a rendered chat: control tokens that the template wrote become one id, those in messages stay text.
    pub fn encode_rendered(&self, rendered: &RenderedText) -> Result<Vec<u32>, TextError> {
        match rendered.with_marks()? {
            Some((marked, mark)) => self.encode_text(&marked, false, Matching::AllButMarked(mark)),
            None => self.encode_text(rendered.as_str(), false, Matching::All),
        }
    }

    /// The control tokens, for [`ChatTemplate::render_literally`](super::ChatTemplate::render_literally).
    pub fn control_tokens(&self) -> &Arc<ControlTokens> {
        &self.control
    }

    fn encode_text(&self, text: &str, add_special: bool, matching: Matching) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if let Some(bos) = self.specials.bos.filter(|_| add_special && self.specials.adds_bos) {
            ids.push(bos);
        }
        match &self.encoder {
            // The file's own post-processor adds the special tokens.
            TextEncoder::Json(encoder) => ids = encoder.encode(text, add_special, matching)?,
            TextEncoder::ByteLevel(encoder) => encoder.encode(text, matching, &mut ids)?,
            TextEncoder::SentencePiece(encoder) => encoder.encode(text, matching, &mut ids),
        }
        if let Some(eos) = self.specials.eos.filter(|_| add_special && self.specials.adds_eos) {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// Decodes a whole text. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut at_start = self.strips_leading_space;
        for &id in ids {
            let special = self.piece_kind(id)?.is_special();
            if special && skip_special {
                continue;
            }
            let mut piece = self.token_bytes(id)?;
            if at_start {
                piece = piece.strip_prefix(b" ").unwrap_or(piece);
                at_start = false;
            }
            bytes.extend_from_slice(piece);
        }
        Ok(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        })
    }

    /// The bytes a token stands for; not always UTF-8 on their own.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TextError> {
        self.pieces.bytes(id).ok_or_else(|| self.unknown_id(id))
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Id of the token with exactly this text, as written in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.encoder.token_id(token)
    }

    /// Text of a token for display and for `bos_token` in chat templates.
    pub fn token_text(&self, id: u32) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(self.token_bytes(id)?).into_owned())
    }

    /// The token that begins a text (BOS).
    pub fn bos_id(&self) -> Option<u32> {
        self.specials.bos
    }

    /// The token that ends a text (EOS), as named by the model's files.
    pub fn eos_id(&self) -> Option<u32> {
        self.specials.eos
    }

    /// Every id at which generation stops, ascending.
    pub fn end_ids(&self) -> &[u32] {
        &self.specials.end
    }

    /// Whether generation stops at this id.
    pub fn is_end(&self, id: u32) -> bool {
        self.specials.end.binary_search(&id).is_ok()
    }

    /// Whether a whole text starts with [`Tokenizer::bos_id`].
    pub fn adds_bos(&self) -> bool {
        self.specials.adds_bos
    }

    /// Whether the token is hidden from decoded text.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.kind(id).is_some_and(PieceKind::is_special)
    }

    /// Refuses a model whose embedding has fewer rows than there are ids. More rows are padding and fine.
    pub fn check_embedding_rows(&self, rows: usize) -> Result<(), TextError> {
        if self.vocab_size() > rows {
            return Err(TextError::LargerThanEmbedding { tokenizer: self.vocab_size(), rows });
        }
        Ok(())
    }

    pub(super) fn strips_leading_space(&self) -> bool {
        self.strips_leading_space
    }

    fn piece_kind(&self, id: u32) -> Result<PieceKind, TextError> {
        self.pieces.kind(id).ok_or_else(|| self.unknown_id(id))
    }

    fn unknown_id(&self, id: u32) -> TextError {
        TextError::UnknownId { id, tokens: self.vocab_size() }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("specials", &self.specials)
            .finish_non_exhaustive()
    }
}

/// The tokens that messages may not contain as tokens.
fn control_texts(pieces: &PieceTable) -> impl Iterator<Item = &str> {
    let ids = 0..u32::try_from(pieces.len()).unwrap_or(u32::MAX);
    ids.filter_map(|id| {
        let text = str::from_utf8(pieces.bytes(id)?).ok()?;
        match pieces.kind(id)? {
            kind if kind.is_special() => Some(text),
            // Some vocabularies do not say of the tokens that begin turns that they are control tokens.
            PieceKind::UserDefined => Some(text).filter(|text| looks_like_control(text)),
            _ => None,
        }
    })
}
