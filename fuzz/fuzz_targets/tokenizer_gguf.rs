//! A vocabulary of any texts, merges, types and scores is refused or makes a tokenizer that knows its own ids.
//!
//! The input is read as fields rather than as a file, so that the fuzzer spends its time behind the GGUF parser,
//! which has a target of its own: a byte of choices, then parts that end at a zero byte.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oscar_model::text::{GgufVocabulary, StreamDecoder, Tokenizer};

fn lines(part: Option<&str>) -> Vec<String> {
    part.unwrap_or_default().split('\n').map(str::to_owned).collect()
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&choices, rest)) = bytes.split_first() else { return };
    let Ok(rest) = std::str::from_utf8(rest) else { return };
    let mut parts = rest.split('\0');
    let mut vocabulary = GgufVocabulary {
        model: if choices & 1 == 0 { "gpt2" } else { "llama" }.to_owned(),
        pre: Some(["smollm", "qwen2", "llama-bpe", "default"][usize::from(choices >> 1 & 3)].to_owned()),
        tokens: lines(parts.next()),
        merges: lines(parts.next()),
        bos: (choices & 8 != 0).then_some(0),
        eos: (choices & 16 != 0).then_some(1),
        unk: (choices & 32 != 0).then_some(2),
        add_bos: (choices & 64 != 0).then_some(choices & 8 != 0),
        add_space_prefix: (choices & 128 != 0).then_some(false),
        ..GgufVocabulary::default()
    };
    // One digit for each token that has one: its type, and a score for the models that need scores.
    let digits = parts.next().unwrap_or_default().bytes();
    let mut types: Vec<i32> = digits.map(|digit| i32::from(digit) - i32::from(b'0')).collect();
    types.resize(vocabulary.tokens.len(), 1);
    vocabulary.scores = types.iter().zip(0..).map(|(kind, id)| (kind * 31 - id) as f32).collect();
    vocabulary.token_types = types;
    let text = parts.next().unwrap_or("the text");

    let tokenizer = match Tokenizer::from_gguf_vocabulary(&vocabulary) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert!(!error.to_string().contains('\n'), "{error}"),
    };
    assert_eq!(tokenizer.vocab_size(), vocabulary.tokens.len());
    let tokenizer = std::sync::Arc::new(tokenizer);
    for parse_special in [false, true] {
        let encoded = if parse_special {
            tokenizer.encode_with_special_tokens_parsed(text, true)
        } else {
            tokenizer.encode(text, true)
        };
        let Ok(ids) = encoded else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "{ids:?}");
        tokenizer.decode(&ids, false).expect("own ids decode");
        let mut decoder = StreamDecoder::new(tokenizer.clone());
        for id in ids {
            decoder.push(id).expect("own ids decode");
        }
        decoder.finish();
    }
});
