//! Collects whole answers, for clients that do not stream.

use oscar_engine::{EngineError, Event, Summary, Token};

use crate::protocol::ApiError;
use crate::requests::AnswerStream;

/// An answer that has finished.
#[derive(Debug)]
pub(crate) struct FinishedChoice {
    pub(crate) prompt: usize,
    pub(crate) choice: usize,
    /// The tokens with their logprobs, if those were asked for.
    pub(crate) tokens: Vec<Token>,
    pub(crate) summary: Summary,
}

/// Waits for all answers to `prompts` prompts with `n` choices each, and gives them in order.
pub(crate) async fn collect(
    answers: &mut AnswerStream,
    prompts: usize,
    n: usize,
    keep_tokens: bool,
) -> Result<Vec<FinishedChoice>, ApiError> {
    let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); prompts * n];
    let mut whole = Vec::with_capacity(prompts * n);
    while let Some(delivered) = answers.next().await {
        let place = |choice: usize| delivered.prompt * n + choice;
        match delivered.event {
            Event::Token { choice, token } if keep_tokens => tokens[place(choice)].push(token),
            Event::Finished { choice, summary } => {
                let tokens = std::mem::take(&mut tokens[place(choice)]);
                whole.push(FinishedChoice { prompt: delivered.prompt, choice, tokens, summary: *summary });
            }
            Event::Failed { error, .. } => return Err(ApiError::from(&*error)),
            Event::Token { .. } | Event::Prefill { .. } | Event::Scored { .. } => {}
        }
    }
    if whole.len() < prompts * n {
        return Err(EngineError::Stopped.into());
    }
    whole.sort_by_key(|answer| (answer.prompt, answer.choice));
    Ok(whole)
}
