//! What a request says about the format of its answer: `tools`, `tool_choice`, rules about tokens and, in
//! `content_format`, what the content must look like; checked and typed.

use serde_json::Value;

use super::content_format::{ContentFormat, content};
use super::field_error::{FieldError, get, wrong};
use super::says_nothing;
use crate::grammar::{Constraint, ForcedCalls, TokenRules, closed};
use crate::parse::{Tool, ToolCallFormat};

/// The most tools of a request.
const MAX_TOOLS: usize = 128;
/// The most bytes of a tool's name.
const MAX_NAME: usize = 128;
/// The most words that may be forbidden, and the most bytes of one: each is looked for before every token.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD: usize = 128;
/// The most regular expressions that may end an answer, and the most bytes of one.
const MAX_STOP_REGEXES: usize = 8;
const MAX_STOP_REGEX: usize = 1024;

/// The field `tool_choice`: whether the model is to call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model must not call a tool: whatever looks like a call is content.
    #[default]
    None,
    /// The model decides whether to call tools.
    Auto,
    /// The model must call at least one tool.
    Required,
    /// The model must call this tool.
    Named(String),
}

/// What a request says about the format of its answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AnswerFormat {
    /// The tools that may be called, in the order of the request.
    pub(crate) tools: Vec<Tool>,
    /// Whether the model is to call them.
    pub(crate) tool_choice: ToolChoice,
    /// Whether an answer may have more than one call.
    pub(crate) parallel_tool_calls: bool,
    /// What the content must look like.
    pub(crate) content: ContentFormat,
    /// The field that says so, for errors.
    pub(crate) content_field: &'static str,
    /// What is asked of the tokens.
    pub(crate) rules: TokenRules,
}

impl AnswerFormat {
    /// Reads the fields of a request's body. Fields that are `null` count as missing.
    pub(crate) fn from_body(body: &Value) -> Result<AnswerFormat, FieldError> {
        let tools = tools(get(body, "tools"))?;
        let tool_choice = tool_choice(get(body, "tool_choice"), &tools)?;
        let parallel_tool_calls = match get(body, "parallel_tool_calls") {
            None => true,
            Some(value) => {
                value.as_bool().ok_or_else(|| wrong("parallel_tool_calls", "must be a boolean"))?
            }
        };
        let (content, content_field) = content(body)?;
        let free =
            content == ContentFormat::Text && matches!(tool_choice, ToolChoice::None | ToolChoice::Auto);
        let rules = token_rules(body, free)?;
        Ok(AnswerFormat { tools, tool_choice, parallel_tool_calls, content, content_field, rules })
    }

    /// Whether the answer may have tool calls, which are then parsed.
    pub(crate) fn wants_calls(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice != ToolChoice::None
    }

    /// Whether the answer consists of tool calls.
    pub(crate) fn forces_calls(&self) -> bool {
        matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// The constraint on the tokens of the answer, if there is one. `format` is how the model writes tool calls, if it is known.
    pub(crate) fn constraint(
        &self,
        format: Option<&'static ToolCallFormat>,
    ) -> Result<Option<Constraint<'_>>, FieldError> {
        let name = match &self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Required => Some(None),
            ToolChoice::Named(name) => Some(Some(name.as_str())),
        };
        if let Some(name) = name {
            let format = format.ok_or_else(|| {
                wrong("tool_choice", "demands a call, and how this model writes calls is not known")
            })?;
            // A named tool is called once, as clients of the API expect.
            let parallel = self.parallel_tool_calls && name.is_none();
            return Ok(Some(Constraint::Calls(ForcedCalls { format, tools: &self.tools, name, parallel })));
        }
        Ok(match &self.content {
            ContentFormat::Text => None,
            ContentFormat::JsonObject => Some(Constraint::JsonObject),
            ContentFormat::JsonSchema(schema) => Some(Constraint::JsonSchema(schema)),
            ContentFormat::Regex(regex) => Some(Constraint::Regex(regex)),
            ContentFormat::Ebnf(grammar) => Some(Constraint::Ebnf(grammar)),
            ContentFormat::Choice(texts) => Some(Constraint::Choice(texts)),
            ContentFormat::StructuralTag(tag) => Some(Constraint::StructuralTag(tag)),
        })
    }
}

/// Reads the field `tools`.
fn tools(value: Option<&Value>) -> Result<Vec<Tool>, FieldError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let list = value.as_array().ok_or_else(|| wrong("tools", "must be a list"))?;
    if list.len() > MAX_TOOLS {
        return Err(wrong("tools", format!("has {} entries, at most {MAX_TOOLS} are allowed", list.len())));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    for (index, entry) in list.iter().enumerate() {
        let at = |field: &str| format!("tools[{index}]{field}");
        if !entry.is_object() {
            return Err(wrong(at(""), "must be an object"));
        }
        if let Some(kind) = get(entry, "type").filter(|kind| *kind != "function") {
            return Err(wrong(at(".type"), format!("is {kind}, only \"function\" is supported")));
        }
        let function = get(entry, "function")
            .filter(|function| function.is_object())
            .ok_or_else(|| wrong(at(".function"), "must be an object"))?;
        let name = get(function, "name")
            .and_then(Value::as_str)
            .ok_or_else(|| wrong(at(".function.name"), "must be a string"))?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(fits) {
            let expected = format!("must have 1 to {MAX_NAME} letters, digits, and characters of `_-.:/`");
            return Err(wrong(at(".function.name"), expected));
        }
        if tools.iter().any(|tool| tool.name == name) {
            return Err(wrong(at(".function.name"), format!("is `{name}`, as of another tool")));
        }
        let parameters = get(function, "parameters").cloned().unwrap_or(Value::Null);
        if !parameters.is_null() && !parameters.is_object() {
            return Err(wrong(at(".function.parameters"), "must be a JSON schema, an object"));
        }
        let strict = match get(function, "strict") {
            None => false,
            Some(value) => {
                value.as_bool().ok_or_else(|| wrong(at(".function.strict"), "must be a boolean"))?
            }
        };
        tools.push(Tool { name: name.to_owned(), parameters: closed(&parameters), strict });
    }
    Ok(tools)
}

/// Reads the field `tool_choice`.
fn tool_choice(value: Option<&Value>, tools: &[Tool]) -> Result<ToolChoice, FieldError> {
    let choice = match value.filter(|value| !says_nothing(value)) {
        None if tools.is_empty() => ToolChoice::None,
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" if tools.is_empty() => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            other => {
                let problem = format!("is `{other}`, expected none, auto, required or a function");
                return Err(wrong("tool_choice", problem));
            }
        },
        Some(object) => {
            if get(object, "type").is_some_and(|kind| kind != "function") {
                return Err(wrong("tool_choice.type", "must be \"function\""));
            }
            let name = get(object, "function").and_then(|function| get(function, "name")?.as_str());
            let name = name.ok_or_else(|| wrong("tool_choice.function.name", "must be a string"))?;
            if !tools.iter().any(|tool| tool.name == name) {
                let problem = format!("is `{name}`, which is not among the tools");
                return Err(wrong("tool_choice.function.name", problem));
            }
            ToolChoice::Named(name.to_owned())
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(wrong("tool_choice", "is `required`, and there are no tools"));
    }
    Ok(choice)
}

/// Reads `allowed_token_ids`, `bad_words` and `stop_regex`; `free` says that the answer has no other form to keep to.
fn token_rules(body: &Value, free: bool) -> Result<TokenRules, FieldError> {
    let list = |field: &'static str| {
        let list =
            get(body, field).map(|value| value.as_array().ok_or_else(|| wrong(field, "must be a list")));
        Ok(list.transpose()?.filter(|list| !list.is_empty()))
    };
    let mut rules = TokenRules::default();
    if let Some(ids) = list("allowed_token_ids")? {
        if !free {
            return Err(wrong("allowed_token_ids", "cannot be combined with another form of answer"));
        }
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = ids.iter().map(id).collect::<Option<Vec<u32>>>();
        rules.allowed = Some(ids.ok_or_else(|| wrong("allowed_token_ids", "must be a list of token ids"))?);
    }
    if let Some(words) = list("bad_words")? {
        let fits = |word: &&str| !word.trim().is_empty() && word.len() <= MAX_BAD_WORD;
        let words = words.iter().map(|word| word.as_str().filter(fits).map(str::to_owned));
        let words = words.collect::<Option<Vec<String>>>().filter(|words| words.len() <= MAX_BAD_WORDS);
        let problem =
            || format!("must be a list of at most {MAX_BAD_WORDS} words of at most {MAX_BAD_WORD} bytes");
        rules.bad_words = words.ok_or_else(|| wrong("bad_words", problem()))?;
    }
    rules.stop_regex = stop_regex(body, free)?;
    Ok(rules)
}

/// Reads `stop_regex`, one or a list. An answer is ended by having the model end it, so nothing may keep it from that.
fn stop_regex(body: &Value, free: bool) -> Result<Vec<String>, FieldError> {
    let field = "stop_regex";
    let list = match get(body, field) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().collect(),
        Some(one) => vec![one],
    };
    let fits = |text: &&str| text.len() <= MAX_STOP_REGEX;
    let texts = list.iter().map(|text| text.as_str().filter(fits));
    let texts = texts.collect::<Option<Vec<&str>>>().filter(|texts| texts.len() <= MAX_STOP_REGEXES);
    let problem = || {
        format!("must be at most {MAX_STOP_REGEXES} regular expressions of at most {MAX_STOP_REGEX} bytes")
    };
    let texts = texts.ok_or_else(|| wrong(field, problem()))?;
    let texts: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
    let kept = get(body, "ignore_eos").is_some_and(|value| *value == true)
        || get(body, "min_tokens").and_then(Value::as_u64).is_some_and(|count| count > 0);
    if !texts.is_empty() && (kept || !free) {
        return Err(wrong(field, "cannot be combined with ignore_eos, min_tokens or a form of answer"));
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<AnswerFormat, FieldError> {
        AnswerFormat::from_body(&body)
    }

    fn tool_call_format(name: &str) -> Option<&'static ToolCallFormat> {
        ToolCallFormat::choose(name, None).unwrap()
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn nothing_is_asked_for() {
        for body in
            [json!({}), json!({"tools": null, "tool_choice": null, "response_format": null, "regex": null})]
        {
            let request = read(body).unwrap();
            let nothing = AnswerFormat {
                parallel_tool_calls: true,
                content_field: "response_format",
                ..AnswerFormat::default()
            };
            assert_eq!(request, nothing);
            assert!(!request.wants_calls());
            assert!(request.constraint(None).unwrap().is_none());
        }
        assert!(!read(json!({"tools": [], "tool_choice": "auto"})).unwrap().wants_calls());
        assert_eq!(read(json!({"response_format": {"type": "text"}})).unwrap().content, ContentFormat::Text);
    }

    #[test]
    fn tools_and_choices() {
        let strict = json!({"function": {"name": "f", "strict": true, "description": "x"}});
        let request = read(json!({"tools": [tool("a.b-c"), strict]})).unwrap();
        assert_eq!(request.tool_choice, ToolChoice::Auto);
        assert!(request.wants_calls() && request.constraint(None).unwrap().is_none());
        assert_eq!(request.tools[0].name, "a.b-c");
        assert_eq!(request.tools[1], Tool { name: "f".to_owned(), parameters: Value::Null, strict: true });

        let none = read(json!({"tools": [tool("f")], "tool_choice": "none"})).unwrap();
        assert!(!none.wants_calls());
        let required = read(json!({"tools": [tool("f")], "tool_choice": "required"})).unwrap();
        let error = required.constraint(None).unwrap_err();
        assert_eq!(error.field, "tool_choice");
        let constraint = required.constraint(tool_call_format("hermes")).unwrap();
        let forced = match constraint {
            Some(Constraint::Calls(forced)) => forced,
            other => panic!("{other:?}"),
        };
        assert!(forced.parallel && forced.name.is_none());
        let one = json!({"tools": [tool("f"), tool("g")], "tool_choice": {"type": "function", "function": {"name": "g"}}});
        match read(one).unwrap().constraint(tool_call_format("glm")).unwrap() {
            Some(Constraint::Calls(ForcedCalls { name: Some("g"), parallel: false, .. })) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rules_about_tokens_are_read() {
        let rules = |body| read(body).unwrap().rules;
        assert!(rules(json!({"allowed_token_ids": [], "bad_words": []})).is_empty());
        let both = rules(json!({"allowed_token_ids": [3, 5], "bad_words": ["x y"]}));
        let expected = TokenRules {
            allowed: Some(vec![3, 5]),
            bad_words: vec!["x y".to_owned()],
            stop_regex: Vec::new(),
        };
        assert_eq!(both, expected);
        assert_eq!(rules(json!({"stop_regex": "[.!]"})).stop_regex, ["[.!]"]);
        assert_eq!(rules(json!({"stop_regex": ["a", ""], "min_tokens": 0})).stop_regex, ["a"]);
    }

    #[test]
    fn errors_name_the_field() {
        let many: Vec<Value> = (0..129).map(|index| tool(&format!("f{index}"))).collect();
        for (body, field) in [
            (json!({"tools": {}}), "tools"),
            (json!({"tools": many}), "tools"),
            (json!({"tools": [5]}), "tools[0]"),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [tool("f"), {"function": {}}]}), "tools[1].function.name"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
            (json!({"tools": [tool(&"x".repeat(129))]}), "tools[0].function.name"),
            (json!({"tools": [tool("f"), tool("f")]}), "tools[1].function.name"),
            (
                json!({"tools": [{"function": {"name": "f", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (json!({"tools": [{"function": {"name": "f", "strict": "yes"}}]}), "tools[0].function.strict"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "maybe"}), "tool_choice"),
            (json!({"tool_choice": {"function": {}}}), "tool_choice.function.name"),
            (json!({"tool_choice": 5}), "tool_choice.function.name"),
            (json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice.type"),
            (
                json!({"tools": [tool("f")], "tool_choice": {"function": {"name": "g"}}}),
                "tool_choice.function.name",
            ),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
            (json!({"response_format": "json"}), "response_format.type"),
            (json!({"allowed_token_ids": [-1]}), "allowed_token_ids"),
            (json!({"allowed_token_ids": [1], "regex": "a"}), "allowed_token_ids"),
            (json!({"bad_words": ["a", 3]}), "bad_words"),
            (json!({"bad_words": [" "]}), "bad_words"),
            (json!({"stop_regex": 5}), "stop_regex"),
            (json!({"stop_regex": "a", "ignore_eos": true}), "stop_regex"),
            (json!({"stop_regex": "a", "min_tokens": 3}), "stop_regex"),
            (json!({"stop_regex": "a", "regex": "b"}), "stop_regex"),
            (json!({"stop_regex": "a", "tools": [tool("f")], "tool_choice": "required"}), "stop_regex"),
            (json!({"bad_words": vec!["a"; 257]}), "bad_words"),
        ] {
            let error = read(body.clone()).unwrap_err();
            assert_eq!(error.field, field, "{body}");
            assert!(error.to_string().starts_with(&format!("`{field}` ")), "{error}");
        }
    }
}
