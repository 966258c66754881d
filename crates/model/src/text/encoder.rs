//! How text becomes ids: by the merges of a byte-level vocabulary, the scores of SentencePiece, or the stages that a
//! `tokenizer.json` describes.

use tokenizers::models::bpe::BPE;
use tokenizers::{
    Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

use super::TextError;
use super::added::{AddedTokens, Matching, encode_error};
use super::byte_level::ByteLevelStages;
use super::sentence_piece::SentencePieceModel;

/// How text becomes ids.
pub(super) enum TextEncoder {
    ByteLevel(Box<ByteLevelEncoder>),
    SentencePiece(Box<SentencePieceEncoder>),
    Json(Box<JsonEncoder>),
}

/// Encodes with the stages of a byte-level vocabulary.
pub(super) struct ByteLevelEncoder {
    pub(super) stages: ByteLevelStages,
    pub(super) added: AddedTokens,
}

/// Encodes with the scores of a SentencePiece vocabulary.
pub(super) struct SentencePieceEncoder {
    pub(super) model: SentencePieceModel,
    /// Text to id for every token, including those the model never produces.
    pub(super) lookup: BPE,
    pub(super) added: AddedTokens,
}

/// Encodes with the stages a `tokenizer.json` describes.
pub(super) struct JsonEncoder {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) added: AddedTokens,
}

impl TextEncoder {
    /// Id of the token with exactly this text, as written in the vocabulary.
    pub(super) fn token_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::ByteLevel(encoder) => encoder.stages.model.token_to_id(token),
            Self::SentencePiece(encoder) => encoder.lookup.token_to_id(token),
            Self::Json(encoder) => encoder.inner.token_to_id(token),
        }
    }
}

impl ByteLevelEncoder {
    pub(super) fn encode(&self, text: &str, matching: Matching, ids: &mut Vec<u32>) -> Result<(), TextError> {
        let split = run_stages(
            &self.added,
            matching,
            self.stages.normalizer.as_ref(),
            Some(&self.stages.pre_tokenizer),
            &self.stages.model,
            text,
        )?;
        for (_, _, tokens) in split.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            ids.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }
}

impl SentencePieceEncoder {
    pub(super) fn encode(&self, text: &str, matching: Matching, ids: &mut Vec<u32>) {
        let split = self.added.matcher(matching).extract_and_normalize(None::<&NormalizerWrapper>, text);
        let mut after_break = true;
        for (fragment, _, tokens) in split.get_splits(OffsetReferential::Original, OffsetType::None) {
            match tokens {
                Some(tokens) => {
                    ids.extend(tokens.iter().map(|token| token.id));
                    after_break = true;
                }
                None => {
                    self.model.encode(&matching.without_mark(fragment), after_break, ids);
                    after_break = false;
                }
            }
        }
    }
}

impl JsonEncoder {
    pub(super) fn encode(
        &self,
        text: &str,
        add_special: bool,
        matching: Matching,
    ) -> Result<Vec<u32>, TextError> {
        let split = run_stages(
            &self.added,
            matching,
            self.inner.get_normalizer(),
            self.inner.get_pre_tokenizer(),
            self.inner.get_model(),
            text,
        )?;
        let encoding = split.into_encoding(None, 0, OffsetType::None).map_err(encode_error)?;
        let encoding = self.inner.post_process(encoding, None, add_special).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Matches whole tokens, then normalises, cuts and merges what lies between them.
fn run_stages<N: Normalizer, M: Model>(
    added: &AddedTokens,
    matching: Matching,
    normalizer: Option<&N>,
    pre_tokenizer: Option<&PreTokenizerWrapper>,
    model: &M,
    text: &str,
) -> Result<PreTokenizedString, TextError> {
    let mut split = added.matcher(matching).extract_and_normalize(normalizer, text);
    if let Matching::AllButMarked(mark) = matching {
        let remove = |fragment: &mut NormalizedString| {
            fragment.filter(|character| character != mark);
            Ok(())
        };
        split.normalize(remove).map_err(encode_error)?;
    }
    if let Some(pre_tokenizer) = pre_tokenizer {
        pre_tokenizer.pre_tokenize(&mut split).map_err(encode_error)?;
    }
    split.tokenize(|fragment| model.tokenize(fragment.get())).map_err(encode_error)?;
    Ok(split)
}
