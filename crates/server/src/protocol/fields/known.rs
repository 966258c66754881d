//! The fields that clients are known to send and that no request type has: which of them change nothing, and at which
//! values the others do not.
//!
//! Some were recorded from the programs themselves: what litellm, langchain, instructor and pydantic-ai send
//! (`tests/python/client_fields.json`), and requests of Open WebUI, Continue, Claude Code, Codex, opencode, pi, `llm` and
//! three generations of llama.cpp's web page (`tests/python/front_ends.json`). All others are from documentation and
//! sources, and no recorded request has them: those of SillyTavern, text-generation-webui, vLLM and SGLang, whose routers
//! send the defaults of all fields, what else llama.cpp and Ollama read, and what else the official `openai` and
//! `anthropic` packages can be told to send.

use super::RequestKind;

/// A field that clients send.
pub(super) struct Known {
    pub(super) name: &'static str,
    /// The values that change nothing, as a JSON list; all of them when `None`.
    pub(super) neutral: Option<&'static str>,
    /// Why the field changes nothing, or what it asks for that is not there.
    pub(super) reason: &'static str,
}

/// A field that changes nothing, whatever its value.
const fn harmless(name: &'static str, reason: &'static str) -> Known {
    Known { name, neutral: None, reason }
}

/// A field that asks for something that is not there, except at its neutral values.
const fn missing(name: &'static str, neutral: &'static str, reason: &'static str) -> Known {
    Known { name, neutral: Some(neutral), reason }
}

/// What is known of a field in requests of this kind.
pub(super) fn known(kind: RequestKind, name: &str) -> Option<&'static Known> {
    let own: &[Known] = match kind {
        RequestKind::Chat => CHAT,
        RequestKind::Completions => COMPLETIONS,
        RequestKind::Responses => RESPONSES,
        RequestKind::Messages => MESSAGES,
        RequestKind::Generate => GENERATE,
        RequestKind::Completion => COMPLETION,
        RequestKind::Tokenize => TOKENIZE,
        RequestKind::Abort => ABORT,
        // What is said within a field is about it, and none of what the lists for all bodies have.
        RequestKind::StreamOptions => return find(&[STREAM_OPTIONS], name),
        RequestKind::TextSettings => return find(&[TEXT_SETTINGS], name),
        RequestKind::ReasoningSettings => return find(&[REASONING_SETTINGS], name),
        RequestKind::Thinking => return find(&[THINKING], name),
        RequestKind::OutputConfig => return None,
        RequestKind::SamplingParams
        | RequestKind::Detokenize
        | RequestKind::Embeddings
        | RequestKind::Score
        | RequestKind::Cache => &[],
    };
    find(&[own, BOOKKEEPING, SAMPLERS, SERVERS, ABSENT], name)
}

/// The values of a field of another door that ask for what every door does anyway, as a JSON list.
pub(super) fn neutral_elsewhere(kind: RequestKind, name: &str) -> Option<&'static str> {
    if kind.is_within_another() {
        return None;
    }
    NEUTRAL.iter().find(|(field, _)| *field == name).map(|(_, neutral)| *neutral)
}

fn find(lists: &[&'static [Known]], name: &str) -> Option<&'static Known> {
    lists.iter().copied().flatten().find(|known| known.name == name)
}

/// Fields that some doors have, with the values that change nothing at those that do not have them, unless the model has a
/// setting of its own for them.
const NEUTRAL: &[(&str, &str)] = &[
    ("stream", "[false]"),
    ("n", "[1]"),
    ("best_of", "[1]"),
    ("temperature", "[1]"),
    ("top_p", "[1]"),
    ("top_k", "[-1, 0]"),
    ("min_p", "[0]"),
    ("repetition_penalty", "[1]"),
    ("presence_penalty", "[0]"),
    ("frequency_penalty", "[0]"),
    ("min_tokens", "[0]"),
    ("ignore_eos", "[false]"),
    ("logprobs", "[false, 0]"),
    ("top_logprobs", "[0]"),
    ("return_logprob", "[false]"),
    ("echo", "[false]"),
    ("detokenize", "[true]"),
    ("skip_special_tokens", "[true]"),
    ("include_stop_str_in_output", "[false]"),
    ("no_stop_trim", "[false]"),
    ("separate_reasoning", "[true]"),
    ("continue_final_message", "[false]"),
    ("parallel_tool_calls", "[true]"),
    ("tool_choice", "[\"none\", \"auto\"]"),
    ("response_format", "[{\"type\": \"text\"}]"),
    ("kv_demote", "[false]"),
];

/// Who asks and how it is accounted for: the answer is the same for everybody.
const BOOKKEEPING: &[Known] = &[
    harmless("user", "names the user"),
    harmless("metadata", "labels of the client"),
    harmless("client_metadata", "labels of the client (Codex)"),
    harmless("custom_labels", "labels of metrics (SGLang)"),
    harmless("safety_identifier", "names the user"),
    harmless("service_tier", "there is one tier"),
    harmless("speed", "there is one speed (Anthropic)"),
    harmless("inference_geo", "the server is where it is (Anthropic)"),
    harmless("store", "nothing is stored"),
    harmless("prompt_cache_key", "prompts find their pages without it"),
    harmless("prompt_cache_retention", "pages stay as long as there is room"),
    harmless("cache_control", "every prompt is cached (Anthropic)"),
    harmless("cache_prompt", "every prompt is cached (llama.cpp)"),
    harmless("prediction", "predicted text saves time elsewhere"),
    harmless("priority", "requests are served in their order"),
    harmless("chat_id", "names the chat (Open WebUI)"),
    harmless("session_id", "names the session (Open WebUI)"),
    harmless("conversation_id", "names the conversation (SGLang)"),
    harmless("no_logs", "prompts are not logged"),
    harmless("api_type", "which server the client takes this for (SillyTavern)"),
    harmless("api_server", "which server the client takes this for (SillyTavern)"),
];

/// Samplers of llama.cpp, vLLM and text-generation-webui, which SillyTavern and llama.cpp's page send switched off.
/// Parameters of a sampler that is off say nothing, and the order of samplers is fixed.
const SAMPLERS: &[Known] = &[
    missing("mirostat", "[0]", "there is no mirostat"),
    missing("mirostat_mode", "[0]", "there is no mirostat"),
    harmless("mirostat_tau", "of mirostat"),
    harmless("mirostat_eta", "of mirostat"),
    missing("dry_multiplier", "[0]", "there is no DRY penalty"),
    harmless("dry_base", "of DRY"),
    harmless("dry_allowed_length", "of DRY"),
    harmless("dry_penalty_last_n", "of DRY"),
    harmless("dry_sequence_breakers", "of DRY"),
    missing("xtc_probability", "[0]", "there is no XTC"),
    harmless("xtc_threshold", "of XTC"),
    missing("typical_p", "[1]", "no token is drawn by it here"),
    missing("typical", "[1]", "its name here is typical_p"),
    missing("typ_p", "[1]", "its name here is typical_p"),
    missing("tfs_z", "[1]", "there is no tail-free sampling"),
    missing("tfs", "[1]", "there is no tail-free sampling"),
    missing("top_a", "[0]", "there is no top-a sampling"),
    missing("top_n_sigma", "[-1, 0]", "there is no top-n-sigma sampling"),
    missing("nsigma", "[-1, 0]", "there is no top-n-sigma sampling"),
    missing("min_keep", "[0, 1]", "samplers keep one token at least"),
    missing("adaptive_target", "[-1]", "there is no adaptive sampling"),
    harmless("adaptive_decay", "of adaptive sampling"),
    missing("dynamic_temperature", "[false]", "the temperature is constant"),
    missing("dynatemp_range", "[0]", "the temperature is constant"),
    harmless("dynatemp_exponent", "of a temperature that varies"),
    harmless("dynatemp_low", "of a temperature that varies"),
    harmless("dynatemp_high", "of a temperature that varies"),
    missing("smoothing_factor", "[0]", "there is no quadratic sampling"),
    harmless("smoothing_curve", "of quadratic sampling"),
    missing("epsilon_cutoff", "[0]", "there is no epsilon cutoff"),
    missing("eta_cutoff", "[0]", "there is no eta cutoff"),
    missing("penalty_alpha", "[0]", "there is no contrastive search"),
    missing("guidance_scale", "[1]", "there is no guidance"),
    harmless("negative_prompt", "of guidance"),
    missing("encoder_repetition_penalty", "[1]", "there is no such penalty"),
    missing("no_repeat_ngram_size", "[0]", "n-grams are not counted"),
    missing("use_beam_search", "[false]", "there is no beam search"),
    missing("num_beams", "[1]", "there is no beam search"),
    missing("beam_width", "[1]", "there is no beam search"),
    harmless("length_penalty", "of beam search"),
    harmless("early_stopping", "of beam search"),
    missing("do_sample", "[true]", "send temperature 0 for the likeliest tokens"),
    harmless("temperature_last", "the order of samplers is fixed"),
    harmless("samplers", "the order of samplers is fixed"),
    harmless("sampler_order", "the order of samplers is fixed"),
    harmless("sampler_priority", "the order of samplers is fixed"),
    harmless("sampler_seed", "another seed of samplers that are not there"),
    harmless("backend_sampling", "where tokens are drawn is not for clients to say"),
    missing("rep_pen", "[1]", "its name here is repetition_penalty"),
    missing("rep_pen_range", "[0]", "the penalty is on the whole text"),
    missing("repetition_penalty_range", "[0]", "the penalty is on the whole text"),
    missing("repeat_penalty", "[1]", "its name here is repetition_penalty"),
    harmless("repeat_last_n", "penalties are on the whole text"),
];

/// How other servers go about their work, and what they say about an answer besides it.
const SERVERS: &[Known] = &[
    harmless("log_metrics", "metrics count all requests (SGLang)"),
    harmless("stream_reasoning", "reasoning is streamed as it comes (SGLang)"),
    harmless("stream_interval", "tokens are sent as they come (SGLang)"),
    harmless("bootstrap_host", "of prefill on another machine (SGLang)"),
    harmless("bootstrap_port", "of prefill on another machine (SGLang)"),
    harmless("bootstrap_room", "of prefill on another machine (SGLang)"),
    harmless("bootstrap_pair_key", "of prefill on another machine (SGLang)"),
    harmless("data_parallel_rank", "there is one rank (SGLang)"),
    harmless("decode_tp_size", "of prefill on another machine (SGLang)"),
    harmless("background", "a client that leaves aborts its request (SGLang)"),
    harmless("guided_decoding_backend", "there is one library for grammars (vLLM)"),
    harmless("request_id", "rid or x-request-id name a request (vLLM)"),
    missing("return_token_ids", "[false]", "/generate gives the ids of answers, /tokenize those of prompts"),
    missing("return_tokens_as_token_ids", "[false]", "tokens are shown as text"),
    missing("include_reasoning", "[true]", "reasoning is in the answer if there is any"),
    harmless("spaces_between_special_tokens", "of old tokenizers (vLLM, SGLang)"),
    harmless("mm_processor_kwargs", "of images (vLLM)"),
    harmless("kv_transfer_params", "of caches on other machines (vLLM)"),
    harmless("timings_per_token", "more about an answer, not another one (llama.cpp)"),
    harmless("return_progress", "more about a prompt, not another one (llama.cpp)"),
    missing("return_tokens", "[false]", "/completion and /generate give the ids of answers"),
    harmless("response_fields", "which fields come back (llama.cpp)"),
    missing("post_sampling_probs", "[false]", "probabilities are those before sampling"),
    missing(
        "reasoning_format",
        "[\"auto\", \"deepseek\"]",
        "send separate_reasoning: false to have it in the content",
    ),
    missing("parse_tool_calls", "[true]", "send tool_choice: \"none\" to have calls in the content"),
    harmless("id_slot", "requests have no slots (llama.cpp)"),
    harmless("slot_id", "requests have no slots (llama.cpp)"),
    harmless("n_keep", "prompts are never cut (llama.cpp)"),
    harmless("n_discard", "prompts are never cut (llama.cpp)"),
    harmless("n_cache_reuse", "of a cache that finds prefixes by itself (llama.cpp)"),
    missing("t_max_predict_ms", "[0]", "answers are bounded in tokens, not in time"),
    harmless("reasoning_control", "reasoning cannot be stopped apart from its answer (llama.cpp)"),
    harmless("sse_ping_interval", "streams say nothing between tokens (llama.cpp)"),
    harmless("speculative.n_max", "of speculative decoding (llama.cpp)"),
    harmless("speculative.n_min", "of speculative decoding (llama.cpp)"),
    harmless("speculative.p_min", "of speculative decoding (llama.cpp)"),
    harmless("num_ctx", "the context is that of the server (Ollama)"),
    harmless("keep_alive", "the model stays loaded (Ollama)"),
    harmless("num_keep", "prompts are never cut (Ollama)"),
    harmless("num_batch", "how a prompt is computed is for the server to say (Ollama)"),
    harmless("num_thread", "the threads are those of the server (Ollama)"),
    harmless("num_gpu", "the device is that of the server (Ollama)"),
    harmless("use_mmap", "the model is loaded (Ollama)"),
    harmless("use_mlock", "the model is loaded (Ollama)"),
    harmless("truncation_length", "a prompt that does not fit is refused (text-generation-webui)"),
];

/// What is not there and would change an answer.
const ABSENT: &[Known] = &[
    missing("lora_path", "[false]", "there are no adapters"),
    missing("lora_id", "[]", "there are no adapters"),
    missing("lora", "[]", "there are no adapters"),
    missing("lora_request", "[]", "there are no adapters"),
    missing("session_params", "[]", "nothing is kept between requests"),
    missing("custom_logit_processor", "[]", "clients cannot bring code"),
    missing("logits_processors", "[]", "clients cannot bring code"),
    missing("custom_params", "[]", "of a logit processor, and clients cannot bring code"),
    missing("vllm_xargs", "[]", "there are no plugins"),
    missing("chat_template", "[]", "the chat template is the model's own"),
    missing("documents", "[]", "put documents into messages"),
    missing("truncate_prompt_tokens", "[-1]", "a prompt that does not fit is refused, never cut"),
    missing("functions", "[]", "send tools"),
    missing("function_call", "[\"none\", \"auto\"]", "send tool_choice"),
    missing("modalities", "[[\"text\"], \"text\"]", "this model writes text only"),
    missing("audio", "[]", "this model writes text only"),
    missing("images", "[]", "this model reads text only"),
    missing("image_data", "[false]", "this model reads text only"),
    missing("video_data", "[]", "this model reads text only"),
    missing("audio_data", "[]", "this model reads text only"),
    missing("input_embeds", "[false]", "prompts are text or token ids"),
    missing("prompt_embeds", "[]", "prompts are text or token ids"),
    missing("return_hidden_states", "[false]", "hidden states are not given out"),
    missing("return_routed_experts", "[false]", "experts are not given out"),
    missing("return_entropy", "[false]", "entropies are not given out"),
    missing("return_bytes", "[false]", "answers are text"),
    missing("return_prompt_token_ids", "[false]", "/tokenize gives the ids of a prompt"),
    missing("token_ids_logprob", "[]", "ask for top_logprobs"),
    missing("logprob_token_ids", "[]", "ask for top_logprobs"),
    missing("prompt_logprobs", "[]", "/v1/completions has them with echo and logprobs"),
    missing("n_probs", "[0]", "/v1/chat/completions, /v1/completions and /completion have it"),
    missing("grammar_lazy", "[false]", "a grammar holds from the first token"),
    harmless("grammar_triggers", "of grammar_lazy"),
    missing("guided_whitespace_pattern", "[]", "white space in JSON is bounded here"),
    missing("thinking_budget", "[-1]", "reasoning has no limit of its own"),
    missing("reasoning_budget", "[-1]", "reasoning has no limit of its own"),
    harmless("thinking_budget_tokens", "reasoning has no limit of its own (llama.cpp's page)"),
    missing("think", "[]", "send chat_template_kwargs with enable_thinking"),
    missing("web_search_options", "[]", "this server searches nothing"),
    missing("response_schema", "[]", "send response_format"),
    missing("stop_sequence", "[]", "send stop"),
    missing("stopping_strings", "[]", "send stop"),
    missing("enable_thinking", "[]", "send chat_template_kwargs with it"),
    missing("custom_token_bans", "[]", "send logit_bias"),
    missing("banned_tokens", "[]", "send logit_bias"),
    missing("banned_strings", "[]", "send logit_bias for single tokens"),
    missing("grammar_string", "[]", "send ebnf"),
];

/// Fields that clients send to `/v1/chat/completions`.
const CHAT: &[Known] = &[
    harmless("verbosity", "a hint for OpenAI's models (Codex, langchain)"),
    harmless("mid", "names the message (Open WebUI)"),
    missing("prompt", "[]", "a chat has messages; /v1/completions continues a prompt"),
    missing("echo", "[false]", "an answer does not repeat the last message"),
    missing("add_special_tokens", "[false]", "the chat template adds special tokens"),
    missing("return_assistant_tokens_mask", "[false]", "masks of tokens are not given out"),
];

/// Fields that clients send to `/v1/completions`.
const COMPLETIONS: &[Known] = &[
    missing("messages", "[]", "plain text has no messages; /v1/chat/completions has"),
    missing("tools", "[]", "plain text has no tools; /v1/chat/completions has"),
    missing("tool_choice", "[\"none\", \"auto\"]", "plain text has no tools; /v1/chat/completions has"),
    harmless("parallel_tool_calls", "plain text has no tools"),
    missing("chat_template_kwargs", "[]", "plain text has no template; /v1/chat/completions has"),
    missing("reasoning_effort", "[]", "plain text has no template; /v1/chat/completions has"),
    harmless("add_generation_prompt", "plain text has no template"),
    missing("continue_final_message", "[false]", "plain text has no messages"),
    harmless("separate_reasoning", "reasoning is not told apart in plain text"),
    harmless("reasoning_format", "reasoning is not told apart in plain text"),
    missing(
        "add_special_tokens",
        "[true]",
        "a prompt begins as the model expects it; send token ids for others",
    ),
    missing("add_bos_token", "[true]", "a prompt begins as the model expects it; send token ids for others"),
    missing("ban_eos_token", "[false]", "its name here is ignore_eos"),
];

/// Fields that clients send to `/v1/responses`.
const RESPONSES: &[Known] = &[
    missing("presence_penalty", "[0]", "/v1/chat/completions has it"),
    missing("frequency_penalty", "[0]", "/v1/chat/completions has it"),
    missing("repetition_penalty", "[1]", "/v1/chat/completions has it"),
    missing("n", "[1]", "a response has one answer"),
    missing("ignore_eos", "[false]", "/v1/chat/completions has it"),
    missing("skip_special_tokens", "[true]", "/v1/chat/completions has it"),
    harmless("include", "more about an answer, not another one"),
    harmless("stream_options", "streams have one form"),
    harmless("max_tool_calls", "this server has no tools of its own"),
    harmless("verbosity", "a hint for OpenAI's models"),
];

/// Fields that clients send to `/v1/messages`.
const MESSAGES: &[Known] = &[
    missing("presence_penalty", "[0]", "/v1/chat/completions has it"),
    missing("frequency_penalty", "[0]", "/v1/chat/completions has it"),
    missing("repetition_penalty", "[1]", "/v1/chat/completions has it"),
    missing("n", "[1]", "a message has one answer"),
    missing("ignore_eos", "[false]", "/v1/chat/completions has it"),
    missing("skip_special_tokens", "[true]", "/v1/chat/completions has it"),
    harmless("betas", "names of features that are there or refused by their own names"),
    harmless("context_management", "prompts are never cut (Claude Code)"),
];

/// Fields that clients send to `/generate`.
const GENERATE: &[Known] = &[harmless("model", "there is one model (routers)")];

/// Fields that clients send to `/completion`.
const COMPLETION: &[Known] = &[
    harmless("model", "there is one model (editors)"),
    missing("n_indent", "[0]", "lines have the indentation that the model gives them"),
    missing("image_data", "[]", "this model reads text only"),
    missing("max_tokens", "[-1]", "its name here is n_predict"),
    missing("n", "[1]", "one answer is given"),
    missing("repetition_penalty", "[1]", "its name here is repeat_penalty"),
    missing("min_tokens", "[0]", "/v1/completions has it"),
];

/// Fields that clients send to `/tokenize`.
const TOKENIZE: &[Known] = &[
    missing("return_token_strs", "[false]", "ask for with_pieces"),
    missing("continue_final_message", "[false]", "a chat is counted as one that is answered"),
];

/// Fields that clients send to `/abort_request`.
const ABORT: &[Known] = &[
    harmless("finished_reason", "an aborted answer ends as such (SGLang)"),
    harmless("abort_message", "an aborted answer ends as such (SGLang)"),
];

/// Fields that clients send within `stream_options`.
const STREAM_OPTIONS: &[Known] = &[
    harmless("include_obfuscation", "chunks have the length of what they say (OpenAI)"),
    harmless("continuous_usage_stats", "usage is told at the end (vLLM)"),
];

/// Fields that clients send within `text` of `/v1/responses`.
const TEXT_SETTINGS: &[Known] = &[harmless("verbosity", "a hint for OpenAI's models (Codex)")];

/// Fields that clients send within `reasoning` of `/v1/responses`.
const REASONING_SETTINGS: &[Known] = &[
    harmless("summary", "reasoning is returned as it is"),
    harmless("generate_summary", "reasoning is returned as it is"),
    missing("max_tokens", "[]", "reasoning has no limit of its own"),
    missing("exclude", "[false]", "reasoning is in the answer if there is any"),
    missing("enabled", "[true]", "send effort \"none\" or chat_template_kwargs"),
];

/// Fields that clients send within `thinking` of `/v1/messages`.
const THINKING: &[Known] = &[
    harmless("budget_tokens", "reasoning has no limit of its own"),
    harmless("display", "reasoning is returned as it is"),
];

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn neutral_values_are_json_and_reasons_are_given() {
        let own = [
            CHAT,
            COMPLETIONS,
            RESPONSES,
            MESSAGES,
            GENERATE,
            COMPLETION,
            TOKENIZE,
            ABORT,
            STREAM_OPTIONS,
            TEXT_SETTINGS,
            REASONING_SETTINGS,
            THINKING,
        ];
        for known in own.into_iter().chain([BOOKKEEPING, SAMPLERS, SERVERS, ABSENT]).flatten() {
            let neutral = known.neutral.map(serde_json::from_str::<Vec<Value>>);
            assert!(neutral.is_none_or(|list| list.is_ok()), "{}", known.name);
            assert!(!known.reason.is_empty(), "{}", known.name);
        }
        for (name, neutral) in NEUTRAL {
            assert!(serde_json::from_str::<Vec<Value>>(neutral).is_ok(), "{name}");
        }
    }

    #[test]
    fn no_field_is_listed_twice() {
        let mut names: Vec<&str> =
            [BOOKKEEPING, SAMPLERS, SERVERS, ABSENT].into_iter().flatten().map(|known| known.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
