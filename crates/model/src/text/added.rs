//! Cutting text at tokens that are matched as a whole before any merging happens.

use std::borrow::Cow;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, AddedVocabulary, Model, Normalizer};

use super::TextError;
use super::pieces::PieceKind;

/// Two matchers over the same vocabulary: one for text we trust to name special tokens (what a chat template
/// writes), one for plain text, where only user-defined tokens are matched and `<|im_end|>` is seven
/// harmless characters of punctuation and letters.
pub(super) struct AddedTokens {
    /// Matches special and user-defined tokens.
    all: AddedVocabulary,
    /// Matches user-defined tokens only.
    plain: AddedVocabulary,
}

impl AddedTokens {
    /// Splits tokens into the two matchers. `model` and `normalizer` decide their ids and how they match.
    pub(super) fn new<N: Normalizer>(
        tokens: impl IntoIterator<Item = AddedToken>,
        model: &impl Model,
        normalizer: Option<&N>,
    ) -> Result<Self, TextError> {
        let tokens: Vec<AddedToken> = tokens.into_iter().collect();
        let user_defined: Vec<AddedToken> = tokens.iter().filter(|token| !token.special).cloned().collect();
        let mut all = AddedVocabulary::new();
        let mut plain = AddedVocabulary::new();
        all.add_tokens(tokens, model, normalizer).map_err(encode_error)?;
        plain.add_tokens(user_defined, model, normalizer).map_err(encode_error)?;
        Ok(Self { all, plain })
    }

    pub(super) fn matcher(&self, matching: Matching) -> &AddedVocabulary {
        match matching {
            Matching::UserDefined => &self.plain,
            Matching::All | Matching::AllButMarked(_) => &self.all,
        }
    }
}

/// Which tokens are matched as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matching {
    /// Only tokens that the tokenizer calls user-defined.
    UserDefined,
    /// User-defined tokens and special ones.
    All,
    /// Special tokens too, except across this character, which is then removed.
    AllButMarked(char),
}

impl Matching {
    /// A text that was not matched, without marks.
    pub(super) fn without_mark(self, text: &str) -> Cow<'_, str> {
        match self {
            Matching::AllButMarked(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
            _ => Cow::Borrowed(text),
        }
    }
}

/// The tokens of a GGUF vocabulary that are matched as a whole.
pub(super) fn added_tokens<'a>(
    pieces: impl IntoIterator<Item = (&'a str, PieceKind)> + 'a,
) -> impl Iterator<Item = AddedToken> + 'a {
    pieces.into_iter().filter(|(text, _)| !text.is_empty()).filter_map(|(text, kind)| match kind {
        PieceKind::Control | PieceKind::Unknown => Some(AddedToken::from(text, true).normalized(false)),
        PieceKind::UserDefined => Some(AddedToken::from(text, false).normalized(false)),
        PieceKind::Normal | PieceKind::Unused | PieceKind::Byte => None,
    })
}

/// A model that knows token texts and ids and nothing else, for matchers without a BPE model behind them.
pub(super) fn id_lookup<'a>(tokens: impl IntoIterator<Item = (&'a str, u32)>) -> Result<BPE, TextError> {
    let vocabulary: Vocab = tokens.into_iter().map(|(text, id)| (text.to_owned(), id)).collect();
    BPE::builder().vocab_and_merges(vocabulary, Vec::new()).build().map_err(encode_error)
}

pub(super) fn encode_error(error: tokenizers::Error) -> TextError {
    TextError::Encode { reason: error.to_string() }
}
