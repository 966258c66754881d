//! The form in which a chat template writes the calls of earlier messages: found out once, by rendering a chat with calls.
//!
//! Templates that know calls may still leave them out. Some write them only where a message has no content at all
//! (DeepSeek-R1), some write the first call of a message and no other (GPT-OSS), and some put arguments between other texts,
//! which an object cannot be. Messages get the form in which nothing is left out.

use std::collections::HashMap;

use oscar_model::text::{ChatTemplate, RenderOptions, random_mark};
use serde_json::{Value, json};

use crate::protocol::ApiError;

/// The most different names that are looked for in a rendered chat, each of which takes a pass over its text.
const MAX_NAMES: usize = 32;

/// How messages with calls are handed to a template. The default is the usual one: an empty text for no content,
/// arguments as objects, and everything in one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CallForm {
    /// Arguments are JSON text.
    text_arguments: bool,
    /// Where there is no text, the content is null.
    null_content: bool,
    /// Text is a message of its own before the calls.
    text_apart: bool,
    /// Each call is a message of its own, with its result behind it.
    one_by_one: bool,
}

impl CallForm {
    /// The form in which this template, for chats with tools or without, writes calls. `None` if it leaves them out in all.
    pub(super) fn of(template: &ChatTemplate, with_tools: bool, bos: &str, eos: &str) -> Option<CallForm> {
        let tool = [json!({"type": "function", "function": {"name": "f", "description": "F.",
            "parameters": {"type": "object", "properties": {}}}})];
        let options = RenderOptions {
            tools: with_tools.then_some(&tool[..]),
            add_generation_prompt: true,
            bos_token: bos,
            eos_token: eos,
            ..RenderOptions::default()
        };
        // Whether all calls of a chat are in its text, if it has one.
        let writes = |form: CallForm, said: &str, count: usize| {
            let marks: Vec<String> = (0..2 * count).map(|_| random_mark()).collect();
            let (messages, _) = form.arrange(chat_with_calls(said, &marks));
            let text = template.render(&messages, &options).ok()?;
            Some(marks.iter().all(|mark| text.contains(mark)))
        };
        let forms = [(false, false), (false, true), (true, false), (true, true)].map(
            |(text_arguments, null_content)| CallForm { text_arguments, null_content, ..CallForm::default() },
        );
        let tried = forms.map(|form| (form, writes(form, "", 1)));
        let Some((mut form, _)) = tried.into_iter().find(|(_, written)| *written == Some(true)) else {
            // A template that refuses such a chat has told nothing.
            let refuses = tried.iter().all(|(_, written)| written.is_none());
            return refuses.then(CallForm::default);
        };
        form.text_apart = writes(form, "So", 1) != Some(true);
        form.one_by_one = writes(form, "", 2) != Some(true);
        Some(form)
    }

    /// Messages in this form, and the index that each of them had.
    pub(super) fn arrange(self, messages: Vec<Value>) -> (Vec<Value>, Vec<usize>) {
        let mut arranged = Vec::with_capacity(messages.len());
        let mut messages = messages.into_iter().enumerate().peekable();
        while let Some((index, mut message)) = messages.next() {
            let calls =
                message.get_mut("tool_calls").and_then(Value::as_array_mut).filter(|calls| !calls.is_empty());
            let Some(calls) = calls else {
                arranged.push((index, message));
                continue;
            };
            if self.text_arguments {
                calls.iter_mut().for_each(write_arguments);
            }
            let calls = if self.one_by_one { std::mem::take(calls) } else { Vec::new() };
            let none = if self.null_content { Value::Null } else { "".into() };
            let silent = message["content"].as_str().is_none_or(str::is_empty);
            if self.text_apart && !silent {
                arranged
                    .push((index, json!({"role": message["role"], "content": message["content"].take()})));
            }
            if self.text_apart || silent {
                message["content"] = none.clone();
            }
            if !self.one_by_one {
                arranged.push((index, message));
                continue;
            }
            let mut results = Vec::new();
            while let Some(result) = messages.next_if(|(_, next)| next["role"] == "tool") {
                results.push(result);
            }
            let later = json!({"role": message["role"], "content": none});
            for call in calls {
                let its = |(_, result): &(usize, Value)| answers(result, &call);
                let result = results.iter().position(its).map(|at| results.remove(at));
                message["tool_calls"] = json!([call]);
                arranged.push((index, std::mem::replace(&mut message, later.clone())));
                arranged.extend(result);
            }
            arranged.append(&mut results);
        }
        let origins = arranged.iter().map(|(index, _)| *index).collect();
        (arranged.into_iter().map(|(_, message)| message).collect(), origins)
    }
}

/// Refuses a chat some of whose calls are not in its text: the model would answer as if it had never made them. `origins` are
/// the indices in the request of the last messages; what is before them was added.
pub(super) fn check_written(text: &str, messages: &[Value], origins: &[usize]) -> Result<(), ApiError> {
    // Names that are written in one way only, whatever the template does to text.
    let plain = |name: &&str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
    };
    let mut left: HashMap<&str, usize> = HashMap::new();
    let mut is_there = |name, takes: usize| {
        if left.len() == MAX_NAMES && !left.contains_key(name) {
            return true;
        }
        let count = left.entry(name).or_insert_with(|| text.matches(name).count());
        let there = *count > 0;
        *count = count.saturating_sub(takes);
        there
    };
    let added = messages.len() - origins.len();
    for (message, index) in messages[added..].iter().zip(origins) {
        for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let function = &call["function"];
            let called = function["name"].as_str().filter(plain);
            let mut keys = function["arguments"].as_object().into_iter().flatten();
            // Each call takes a place of its name. Names of arguments may also stand in a description, and say less.
            let written = called.is_none_or(|name| is_there(name, 1))
                && keys.all(|(key, _)| Some(key.as_str()).filter(plain).is_none_or(|key| is_there(key, 0)));
            if !written {
                let field = format!("messages[{index}].tool_calls");
                let message = format!("{field}: the chat template of this model leaves some of them out");
                return Err(ApiError::unsupported(&field, message));
            }
        }
    }
    Ok(())
}

/// A chat with calls that have these marks for names and arguments, and their results. Identifiers are those that all
/// templates take.
fn chat_with_calls(said: &str, marks: &[String]) -> Vec<Value> {
    let id = |index: usize| format!("call{index:05}");
    let call = |(index, marks): (usize, &[String])| {
        let function = json!({"name": marks[0], "arguments": {"a": marks[1]}});
        json!({"id": id(index), "type": "function", "function": function})
    };
    let calls: Vec<Value> = marks.chunks(2).enumerate().map(call).collect();
    let results =
        (0..calls.len()).map(|index| json!({"role": "tool", "tool_call_id": id(index), "content": "R"}));
    let before = [
        json!({"role": "user", "content": "Q"}),
        json!({"role": "assistant", "content": said, "tool_calls": calls}),
    ];
    before.into_iter().chain(results).collect()
}

/// Whether a message is the result of a call. Not every client gives its calls ids.
fn answers(result: &Value, call: &Value) -> bool {
    match (result["tool_call_id"].as_str(), call["id"].as_str()) {
        (Some(of), Some(id)) => of == id,
        _ => true,
    }
}

/// Turns the arguments of a call into JSON text.
fn write_arguments(call: &mut Value) {
    if let Some(arguments) =
        call.pointer_mut("/function/arguments").filter(|arguments| !arguments.is_string())
    {
        *arguments = arguments.to_string().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(source: &str) -> Option<CallForm> {
        CallForm::of(&ChatTemplate::from_source(source).unwrap(), false, "", "")
    }

    fn published(name: &str) -> ChatTemplate {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
        ChatTemplate::from_source(&std::fs::read_to_string(format!("{folder}{name}.jinja")).unwrap()).unwrap()
    }

    #[test]
    fn published_templates_have_these_forms() {
        let usual = CallForm::default();
        let single = CallForm { one_by_one: true, ..usual };
        for (name, expected) in [
            ("qwen2.5-coder", usual),
            ("qwen3", usual),
            ("glm-4.6", usual),
            ("minimax-m2", usual),
            ("mistral-nemo", usual),
            ("mistral-small-3.1", usual),
            ("llama-3.2", single),
            ("harmony", single),
        ] {
            for with_tools in [false, true] {
                let found = CallForm::of(&published(name), with_tools, "<s>", "</s>");
                assert_eq!(found, Some(expected), "{name} {with_tools}");
            }
        }
    }

    #[test]
    fn what_a_template_leaves_out_says_its_form() {
        let each = |condition: &str, inner: &str| {
            format!(
                "{{% for m in messages %}}{{% if m.tool_calls and {condition} %}}{inner}\
                 {{% elif m.content %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
            )
        };
        let all = "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}";
        let usual = CallForm::default();
        assert_eq!(form(&each("true", all)), Some(usual));
        let null = CallForm { null_content: true, text_apart: true, ..usual };
        assert_eq!(form(&each("m.content is none", all)), Some(null));
        assert_eq!(form(&each("not m.content", all)), Some(CallForm { text_apart: true, ..usual }));
        let joined =
            "{% for c in m.tool_calls %}{{ c.function.name + '|' + c.function.arguments }}{% endfor %}";
        assert_eq!(form(&each("true", joined)), Some(CallForm { text_arguments: true, ..usual }));
        let first = "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}";
        assert_eq!(form(&each("true", first)), Some(CallForm { one_by_one: true, ..usual }));
        assert_eq!(form(&each("false", all)), None);
        assert_eq!(
            form(&each("true", "{{ m.tool_calls[0].function.name }}")),
            None,
            "arguments are left out"
        );
        assert_eq!(form("{{ raise_exception('no') }}{{ messages[0].tool_calls }}"), Some(usual));
    }

    #[test]
    fn a_call_that_is_not_in_the_text_is_named() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"place": "Rome"}}});
        let messages = [
            json!({"role": "system", "content": "added"}),
            json!({"role": "user", "content": "Q"}),
            json!({"role": "assistant", "tool_calls": [call("now")]}),
            json!({"role": "assistant", "tool_calls": [call("now")]}),
        ];
        let check = |text: &str| check_written(text, &messages, &[0, 1, 1]);
        assert_eq!(check("now(place) now(place)"), Ok(()));
        for text in ["now(place)", "now() now()", "place"] {
            assert_eq!(check(text).unwrap_err().body()["error"]["param"], "messages[1].tool_calls", "{text}");
        }
        let odd =
            [json!({"role": "assistant", "tool_calls": [{"function": {"name": "a\"b", "arguments": "é"}}]})];
        assert_eq!(check_written("", &odd, &[0]), Ok(()), "nobody can say how this is written");
    }

    #[test]
    fn calls_that_stand_alone_are_followed_by_their_results() {
        let call =
            |id: &str| json!({"id": id, "type": "function", "function": {"name": id, "arguments": {}}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": id});
        let user = json!({"role": "user", "content": "Q"});
        let called = json!({"role": "assistant", "content": "So", "thinking": "hm", "tool_calls": [call("a"), call("b")]});
        let messages = vec![user.clone(), called, result("b"), result("a"), user.clone()];
        let form = CallForm { one_by_one: true, ..CallForm::default() };
        let (arranged, origins) = form.arrange(messages.clone());
        let first =
            json!({"role": "assistant", "content": "So", "thinking": "hm", "tool_calls": [call("a")]});
        let second = json!({"role": "assistant", "content": "", "tool_calls": [call("b")]});
        assert_eq!(arranged, [user.clone(), first, result("a"), second, result("b"), user.clone()]);
        assert_eq!(origins, [0, 1, 3, 1, 2, 4]);

        let form = CallForm { text_arguments: true, null_content: true, text_apart: true, one_by_one: false };
        let (arranged, origins) = form.arrange(messages);
        let calls = ["a", "b"]
            .map(|id| json!({"id": id, "type": "function", "function": {"name": id, "arguments": "{}"}}));
        let called = json!({"role": "assistant", "content": null, "thinking": "hm", "tool_calls": calls});
        let said = json!({"role": "assistant", "content": "So"});
        assert_eq!(arranged, [user.clone(), said, called, result("b"), result("a"), user]);
        assert_eq!(origins, [0, 1, 1, 2, 3, 4]);
    }
}
