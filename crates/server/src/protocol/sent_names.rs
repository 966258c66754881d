//! What a client called the fields of a request that was translated into another, so that errors name what was sent.

use super::ApiError;

/// Names in the request that was made of a client's, each with the name that the client sent.
type Fixed = &'static [(&'static str, &'static str)];

/// The same of fields that have several names, of which the client sent another than errors have.
pub(crate) type Aliases = Vec<(&'static str, &'static str)>;

/// What other routes call a chat's prompt, which is rendered from its messages.
const CHAT: Fixed = &[("prompt", "messages")];

/// The fields of `/v1/responses`.
const RESPONSES: Fixed = &[
    ("prompt", "input"),
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("tool_choice.function", "tool_choice"),
];

/// The fields of `/v1/messages`.
const MESSAGES: Fixed = &[
    ("prompt", "messages"),
    ("stop", "stop_sequences"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("tool_choice.function", "tool_choice"),
    ("continue_final_message", "messages"),
];

/// What the engine and the parts that all routes share call fields of `/generate`.
const GENERATE: Fixed = &[
    ("prompt", "text"),
    ("logprobs", "top_logprobs_num"),
    ("prompt_logprobs", "top_logprobs_num"),
    ("max_tokens", "sampling_params.max_new_tokens"),
    ("min_tokens", "sampling_params.min_new_tokens"),
    ("temperature", "sampling_params.temperature"),
    ("top_p", "sampling_params.top_p"),
    ("typical_p", "sampling_params.typical_p"),
    ("top_k", "sampling_params.top_k"),
    ("min_p", "sampling_params.min_p"),
    ("seed", "sampling_params.seed"),
    ("repetition_penalty", "sampling_params.repetition_penalty"),
    ("presence_penalty", "sampling_params.presence_penalty"),
    ("frequency_penalty", "sampling_params.frequency_penalty"),
    ("logit_bias", "sampling_params.logit_bias"),
    ("stop", "sampling_params.stop"),
    ("stop_token_ids", "sampling_params.stop_token_ids"),
    ("n", "sampling_params.n"),
    ("json_schema", "sampling_params.json_schema"),
    ("regex", "sampling_params.regex"),
    ("ebnf", "sampling_params.ebnf"),
    ("structural_tag", "sampling_params.structural_tag"),
    ("stop_regex", "sampling_params.stop_regex"),
];

/// The fields of llama.cpp's `/completion`.
const COMPLETION: Fixed =
    &[("max_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty"), ("logprobs", "n_probs")];

/// The names that a client sent, by those of the request that was made of its own.
#[derive(Clone, Debug)]
pub(crate) struct SentNames {
    fixed: Fixed,
    aliases: Aliases,
    paths: Vec<(String, String)>,
}

impl SentNames {
    fn new(fixed: Fixed, aliases: Aliases) -> SentNames {
        SentNames { fixed, aliases, paths: Vec::new() }
    }

    /// Those of a chat, which was not translated.
    pub(crate) fn of_chat(aliases: Aliases) -> SentNames {
        SentNames::new(CHAT, aliases)
    }

    /// Those of plain text, which was not translated.
    pub(crate) fn of_completions(aliases: Aliases) -> SentNames {
        SentNames::new(&[], aliases)
    }

    /// Those of a route that calls its prompt `field`.
    pub(crate) fn of_prompt(field: &'static str) -> SentNames {
        SentNames::new(&[], vec![("prompt", field)])
    }

    /// Those of `/v1/responses`, whose tools are functions without a shell around them. `tools` has the index in the request
    /// of each tool.
    pub(super) fn of_responses(places: &[Place], tools: &[usize]) -> SentNames {
        let mut names = SentNames::new(RESPONSES, Vec::new());
        names.add_places(places, "call_id");
        for (index, sent) in tools.iter().enumerate() {
            let (tool, sent) = (format!("tools[{index}]"), format!("tools[{sent}]"));
            names.paths.push((format!("{tool}.function"), sent.clone()));
            names.paths.push((tool, sent));
        }
        names
    }

    /// Those of `/v1/messages`, as with [`SentNames::of_responses`].
    pub(super) fn of_messages(places: &[Place], tools: &[usize]) -> SentNames {
        let mut names = SentNames::new(MESSAGES, Vec::new());
        names.add_places(places, "tool_use_id");
        for (index, sent) in tools.iter().enumerate() {
            let (tool, sent) = (format!("tools[{index}]"), format!("tools[{sent}]"));
            names.paths.push((format!("{tool}.function.parameters"), format!("{sent}.input_schema")));
            names.paths.push((format!("{tool}.function"), sent.clone()));
            names.paths.push((tool, sent));
        }
        names
    }

    /// Those of `/generate`.
    pub(crate) fn of_generate(aliases: Aliases) -> SentNames {
        SentNames::new(GENERATE, aliases)
    }

    /// Those of `/completion`.
    pub(crate) fn of_completion() -> SentNames {
        SentNames::new(COMPLETION, Vec::new())
    }

    fn add_places(&mut self, places: &[Place], id: &str) {
        for (index, place) in places.iter().enumerate() {
            let (chat, sent) = (format!("messages[{index}]"), &place.message);
            self.paths.push((format!("{chat}.tool_call_id"), format!("{sent}.{id}")));
            if let Some(first) = place.calls.first() {
                self.paths.push((format!("{chat}.tool_calls"), first.clone()));
            }
            for (number, call) in place.calls.iter().enumerate() {
                self.paths.push((format!("{chat}.tool_calls[{number}].function"), call.clone()));
            }
            self.paths.push((chat, sent.clone()));
        }
    }

    /// The error under the names that the client sent.
    pub(crate) fn restore(&self, error: ApiError) -> ApiError {
        let sent = error.param().and_then(|param| Some((param.to_owned(), self.sent(param)?)));
        match sent {
            Some((param, sent)) => error.renamed(&param, sent),
            None => error,
        }
    }

    /// What the client called a field, if it called it something else: the longest name that the path begins with is
    /// replaced.
    fn sent(&self, path: &str) -> Option<String> {
        // Of names of one length the last one counts.
        let fixed = self.fixed.iter().chain(&self.aliases).copied();
        let paths = self.paths.iter().map(|(name, sent)| (name.as_str(), sent.as_str()));
        let rest = |name: &str| {
            let rest = path.strip_prefix(name)?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then_some(rest)
        };
        let fits = fixed.chain(paths).filter_map(|(name, sent)| Some((name, sent, rest(name)?)));
        let (_, sent, rest) = fits.max_by_key(|(name, ..)| name.len())?;
        Some(format!("{sent}{rest}"))
    }
}

/// Where a message of a chat was in the request of the client: the path of the message or of its first part, and those
/// of the calls in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) message: String,
    pub(super) calls: Vec<String>,
}

impl Place {
    /// A message without calls.
    pub(super) fn new(message: impl Into<String>) -> Place {
        Place { message: message.into(), calls: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restored(names: &SentNames, param: &str, message: &str) -> (String, String) {
        let error = names.restore(ApiError::bad_field(param, message));
        (error.param().unwrap().to_owned(), error.to_string())
    }

    #[test]
    fn the_longest_name_is_replaced_in_field_and_message() {
        let calls = vec!["input[2]".to_owned(), "input[3]".to_owned()];
        let places = [Place::new("instructions"), Place { message: "input[1]".into(), calls }];
        let names = SentNames::of_responses(&places, &[0]);
        for (param, sent) in [
            ("messages[0]", "instructions"),
            ("messages[1]", "input[1]"),
            ("messages[1].tool_call_id", "input[1].call_id"),
            ("messages[1].tool_calls", "input[2]"),
            ("messages[1].tool_calls[1].function.name", "input[3].name"),
            ("messages[10]", "input[10]"),
            ("messages", "input"),
            ("prompt", "input"),
            ("tools[0].function.name", "tools[0].name"),
            ("response_format.json_schema", "text.format.json_schema"),
            ("temperature", "temperature"),
            ("max_tokens_of_another", "max_tokens_of_another"),
        ] {
            let (field, message) = restored(&names, param, &format!("{param} is wrong"));
            assert_eq!((field.as_str(), message), (sent, format!("{sent} is wrong")), "{param}");
            let (_, message) = restored(&names, param, &format!("`{param}` is wrong"));
            assert_eq!(message, format!("`{sent}` is wrong"));
        }
        // Words of a sentence are not names.
        let (_, message) = restored(&names, "messages", "the template cannot render these messages");
        assert_eq!(message, "the template cannot render these messages");
    }

    #[test]
    fn schemas_of_messages_have_their_own_name() {
        let names = SentNames::of_messages(&[Place::new("system")], &[0, 3]);
        let sent = |param: &str| restored(&names, param, "").0;
        assert_eq!(sent("tools[1].function.parameters"), "tools[3].input_schema");
        assert_eq!(sent("tools[1].function.name"), "tools[3].name");
        assert_eq!(sent("messages[0].tool_call_id"), "system.tool_use_id");
        assert_eq!(sent("stop"), "stop_sequences");
    }

    #[test]
    fn an_error_without_a_field_stays_as_it_is() {
        let error = ApiError::bad_request("prompt");
        assert_eq!(SentNames::of_chat(Vec::new()).restore(error.clone()), error);
    }
}
