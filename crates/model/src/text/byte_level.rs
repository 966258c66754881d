//! Byte-level BPE rebuilt from GGUF metadata: the byte alphabet, the pre-tokenizers by name, the pipeline.

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::TextError;
use super::vocabulary::GgufVocabulary;

/// How text is cut before merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreTokenizerName {
    Gpt2,
    Default,
    Smollm,
    Qwen2,
    Llama3,
    Glm4,
    O200k,
}

const KNOWN: [(&str, PreTokenizerName); 12] = [
    ("default", PreTokenizerName::Default),
    ("gpt-2", PreTokenizerName::Gpt2),
    ("smollm", PreTokenizerName::Smollm),
    ("qwen2", PreTokenizerName::Qwen2),
    ("deepseek-r1-qwen", PreTokenizerName::Qwen2),
    ("llama-bpe", PreTokenizerName::Llama3),
    ("llama3", PreTokenizerName::Llama3),
    ("llama-v3", PreTokenizerName::Llama3),
    ("glm4", PreTokenizerName::Glm4),
    ("chatglm-bpe", PreTokenizerName::Glm4),
    ("minimax-m2", PreTokenizerName::O200k),
    ("gpt-4o", PreTokenizerName::O200k),
];

const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4o, GPT-OSS and MiniMax: words end where lower case is followed by upper case.
const O200K_PATTERN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

impl PreTokenizerName {
    /// Reads `tokenizer.ggml.pre`; files from before that key existed mean `default`.
    pub(super) fn parse(pre: Option<&str>) -> Result<Self, TextError> {
        let Some(pre) = pre else { return Ok(Self::Default) };
        KNOWN.iter().find(|(name, _)| *name == pre).map(|(_, value)| *value).ok_or_else(|| {
            TextError::UnknownPreTokenizer {
                pre: pre.to_owned(),
                known: KNOWN.map(|(name, _)| name).join(", "),
            }
        })
    }

    /// Llama-3 takes a whole word that is in the vocabulary before it looks at the merges.
    fn ignores_merges(self) -> bool {
        self == Self::Llama3
    }

    /// Whether text starts with the begin token when the file does not say.
    pub(super) fn adds_bos_by_default(self) -> bool {
        self == Self::Llama3
    }

    fn normalizer(self) -> Option<NormalizerWrapper> {
        (self == Self::Qwen2).then_some(NormalizerWrapper::NFC(NFC))
    }

    fn pre_tokenizer(self) -> Result<PreTokenizerWrapper, TextError> {
        let bytes_only = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false));
        let gpt2_words = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
        let steps = match self {
            Self::Gpt2 => vec![gpt2_words],
            Self::Smollm => vec![PreTokenizerWrapper::Digits(Digits::new(true)), gpt2_words],
            Self::Qwen2 => vec![isolate(QWEN2_PATTERN)?, bytes_only],
            Self::Llama3 | Self::Glm4 => vec![isolate(LLAMA3_PATTERN)?, bytes_only],
            Self::O200k => vec![isolate(O200K_PATTERN)?, bytes_only],
            // What llama.cpp does when a file names no pre-tokenizer.
            Self::Default => vec![
                isolate(r"[\p{P}\$\+<=>\^~\|]+")?,
                isolate(GPT2_PATTERN)?,
                isolate(r"\p{N}+")?,
                isolate(r"[0-9][0-9][0-9]")?,
                bytes_only,
            ],
        };
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

fn isolate(pattern: &str) -> Result<PreTokenizerWrapper, TextError> {
    Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
        .map(PreTokenizerWrapper::Split)
        .map_err(|error| TextError::Encode { reason: error.to_string() })
}

/// The three stages a text passes through.
pub(super) struct ByteLevelStages {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    pub(super) model: BPE,
}

/// Builds the stages from a vocabulary that has already been checked for duplicates and lengths.
pub(super) fn build(vocabulary: &GgufVocabulary) -> Result<ByteLevelStages, TextError> {
    let name = PreTokenizerName::parse(vocabulary.pre.as_deref())?;
    let ids: Vocab =
        vocabulary.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect();
    let mut merges: Merges = Vec::with_capacity(vocabulary.merges.len());
    let mut joined = String::new();
    for (index, merge) in vocabulary.merges.iter().enumerate() {
        let bad = |reason: String| TextError::BadMerge { index, merge: merge.clone(), reason };
        // The first character is skipped because a token may itself begin with a space.
        let space = merge.char_indices().skip(1).find(|(_, character)| *character == ' ');
        let Some((space, _)) = space else {
            return Err(bad("expected two tokens separated by a space".to_owned()));
        };
        let (left, right) = (&merge[..space], &merge[space + 1..]);
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [left, right, &joined] {
            if !ids.contains_key(part) {
                return Err(bad(format!("{part:?} is not in the vocabulary")));
            }
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model =
        BPE::builder().vocab_and_merges(ids, merges).ignore_merges(name.ignores_merges()).build().map_err(
            |error| TextError::BadField { field: "tokenizer.ggml.merges", reason: error.to_string() },
        )?;
    Ok(ByteLevelStages { normalizer: name.normalizer(), pre_tokenizer: name.pre_tokenizer()?, model })
}

#[cfg(test)]
mod tests {
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    #[test]
    fn text_is_cut_as_the_families_cut_it() {
        let pieces = |name: &str, text: &str| -> Vec<String> {
            let mut text = PreTokenizedString::from(text);
            let cut = PreTokenizerName::parse(Some(name)).unwrap().pre_tokenizer().unwrap();
            cut.pre_tokenize(&mut text).unwrap();
            let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
            splits.into_iter().map(|(piece, ..)| piece.to_owned()).collect()
        };
        let text = "HelloWorld I'LL 12345/\n";
        assert_eq!(pieces("glm4", text), ["HelloWorld", "ĠI", "'LL", "Ġ", "123", "45", "/Ċ"]);
        assert_eq!(pieces("chatglm-bpe", text), pieces("glm4", text));
        assert_eq!(pieces("minimax-m2", text), ["Hello", "World", "ĠI'LL", "Ġ", "123", "45", "/Ċ"]);
        assert_eq!(pieces("qwen2", "123"), ["1", "2", "3"]);
    }
}
