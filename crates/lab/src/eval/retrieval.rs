//! Needles answered by a model: greedy answers of every codec to one exact prefill, or of a cache that serves, and how
//! probable the right answer was.

use oscar_codec::{CacheCodec, Windows};
use oscar_kernels::{Backend, Inspect};
use oscar_model::LoadedModel;
use serde_json::json;

use super::EvalError;
use super::evaluator::Evaluator;
use super::history::Reading;
use super::needle::{NeedlePrompt, score};
use super::served::ServedCache;

/// Tokens of an answer for each number that the question wants: a 7-digit number may be seven tokens, with words around it.
const ANSWER_TOKENS: usize = 20;

/// A prompt as token ids, cut where the exact prefill ends.
pub struct NeedleTokens {
    /// Instruction, haystack and needles.
    pub context: Vec<u32>,
    /// The question and the beginning of the answer.
    pub question: Vec<u32>,
    /// The numbers that the question wants, as they would follow the question.
    pub answer: Vec<u32>,
}

/// What a model made of a needle prompt.
#[derive(Clone, Debug)]
pub struct Retrieved {
    /// The share of numbers that the greedy answer holds.
    pub score: f64,
    /// The mean log-probability of the tokens of the right answer, each after the right ones before it. It tells caches
    /// apart that all find a needle.
    pub log_probability: f64,
    /// The text that the model gives when the most likely token is always taken.
    pub text: String,
}

impl NeedleTokens {
    /// Renders a prompt with the chat template of the model, or as plain text if it has none.
    pub fn encode<B: Backend>(
        model: &LoadedModel<B>,
        prompt: &NeedlePrompt,
    ) -> Result<NeedleTokens, EvalError> {
        let encode = |question: &str, lead_in: &str| -> Result<Vec<u32>, EvalError> {
            let text = format!("{}{question}", prompt.context);
            if model.chat_template().is_err() {
                return Ok(model.tokenizer().encode(&format!("{text}{lead_in}"), true)?);
            }
            let messages = [json!({"role": "user", "content": text})];
            let mut ids = model.encode_chat(&messages).map_err(|error| EvalError::Chat(error.to_string()))?;
            ids.extend(model.tokenizer().encode(lead_in, false)?);
            Ok(ids)
        };
        let ids = encode(&prompt.question, &prompt.lead_in)?;
        // Another question shares exactly the tokens of the context.
        let other = encode("\n\n#", "")?;
        let shared = ids.iter().zip(&other).take_while(|(a, b)| a == b).count().min(ids.len() - 1);
        let question = ids[shared..].to_vec();
        let full = encode(&prompt.question, &format!("{} {}", prompt.lead_in, prompt.answers.join(", ")))?;
        let answer = full.get(ids.len()..).filter(|_| full.starts_with(&ids));
        let answer = answer.filter(|answer| !answer.is_empty()).ok_or(EvalError::AnswerTokens)?.to_vec();
        Ok(NeedleTokens { context: ids[..shared].to_vec(), question, answer })
    }

    /// Most tokens of an answer that holds so many numbers.
    pub fn tokens_for(answers: usize) -> usize {
        answers * ANSWER_TOKENS
    }
}

/// What the model finds with each codec. The context is computed once.
pub fn retrieve<B: Inspect>(
    evaluator: &mut Evaluator<B>,
    prompt: &NeedlePrompt,
    codecs: &[Box<dyn CacheCodec>],
    windows: Windows,
    progress: impl FnMut(usize),
) -> Result<Vec<Retrieved>, EvalError> {
    let tokens = NeedleTokens::encode(evaluator.model(), prompt)?;
    evaluator.prefill(&tokens.context, progress)?;
    codecs
        .iter()
        .map(|codec| {
            let reading = Reading { codec: &**codec, windows, chunk: None };
            // An exact cache needs no history, and that path is the ordinary one.
            let reading = (codec.name() != "bf16").then_some(reading);
            let answer = evaluator.answer(
                &tokens.question,
                reading,
                NeedleTokens::tokens_for(prompt.answers.len()),
            )?;
            let log_probability = evaluator.log_probability(&tokens.question, &tokens.answer, reading)?;
            retrieved(evaluator.model(), &answer, log_probability, prompt)
        })
        .collect()
}

/// What the model finds with the cache that serves.
pub fn retrieve_served<B: Backend>(
    served: &ServedCache<B>,
    prompt: &NeedlePrompt,
    progress: impl FnMut(usize),
) -> Result<Retrieved, EvalError> {
    let model = served.engine().model();
    let tokens = NeedleTokens::encode(model, prompt)?;
    let most = NeedleTokens::tokens_for(prompt.answers.len());
    let answer = served.answer(&tokens.context, &tokens.question, most, progress)?;
    // The context is in the prefix tree, so only the question and the answer are computed again.
    let question = [&tokens.context[..], &tokens.question].concat();
    let log_probability = served.log_probability(&question, &tokens.answer)?;
    retrieved(model, &answer, log_probability, prompt)
}

fn retrieved<B: Backend>(
    model: &LoadedModel<B>,
    answer: &[u32],
    log_probability: f64,
    prompt: &NeedlePrompt,
) -> Result<Retrieved, EvalError> {
    let text = model.tokenizer().decode(answer, true)?;
    Ok(Retrieved { score: score(&text, &prompt.answers), log_probability, text })
}
