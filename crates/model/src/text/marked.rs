//! Marks in the control tokens that a template itself writes, while a chat is rendered whose messages have some too.
//!
//! Literals of the template carry the marks to the rendered text. The messages have none, so whatever the template does with
//! them, no control token comes of it. What a template only compares or looks for has to be without marks, or it would not
//! be found in a message: operators, filters and methods take them out there.

use std::collections::HashMap;
use std::sync::Arc;

use minijinja::machinery::{CompiledTemplate, Instruction};
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};

use super::control::{ControlTokens, RenderedText, random_mark};

// Names no template can write, so none can shadow or call them.
const EQUAL: &str = "operator ==";
const UNEQUAL: &str = "operator !=";
const CONTAINED: &str = "operator in";

/// Marks the literals of one render.
#[derive(Clone)]
pub(super) struct MarkedLiterals {
    control: Arc<ControlTokens>,
    mark: Arc<str>,
}

impl MarkedLiterals {
    pub(super) fn new(control: Arc<ControlTokens>) -> MarkedLiterals {
        MarkedLiterals { control, mark: random_mark().into() }
    }

    /// The rendered text without marks, in which the control tokens that had none are text.
    pub(super) fn read(&self, rendered: &str) -> RenderedText {
        RenderedText::from_marked(rendered, &self.mark, &self.control)
    }

    /// A text without marks, for errors.
    pub(super) fn unmarked_text(&self, text: &str) -> String {
        text.replace(&*self.mark, "")
    }

    /// A value whose control tokens are meant, with marks in them. Names of fields have none: templates look for those.
    pub(super) fn mark(&self, value: &Value) -> Value {
        if let Some(text) = value.as_str() {
            return Value::from(self.control.marked(text, &self.mark));
        }
        let items = || value.try_iter().into_iter().flatten();
        match value.kind() {
            ValueKind::Seq => items().map(|item| self.mark(&item)).collect(),
            ValueKind::Map if !value.is_kwargs() => items()
                .map(|name| {
                    let field = value.get_item(&name).unwrap_or_default();
                    (name, self.mark(&field))
                })
                .collect(),
            _ => value.clone(),
        }
    }

    fn is_marked(&self, value: &Value) -> bool {
        value.as_str().is_some_and(|text| text.contains(&*self.mark))
    }

    /// A text, or a list of texts, without marks.
    fn unmark(&self, value: &Value) -> Value {
        match value.as_str() {
            Some(text) if self.is_marked(value) => Value::from(self.unmarked_text(text)),
            None if value.kind() == ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
                match items.iter().any(|item| self.is_marked(item)) {
                    true => items.iter().map(|item| self.unmark(item)).collect(),
                    false => value.clone(),
                }
            }
            _ => value.clone(),
        }
    }

    /// Takes the marks out of what a filter or method of texts only looks for. The first of `arguments` is what it works on.
    pub(super) fn unmark_needles(&self, name: &str, arguments: &mut [Value]) {
        let answers = matches!(name, "startswith" | "endswith" | "find" | "rfind" | "index" | "count");
        // In a text of the template itself, needles have the marks that it has.
        if !answers && arguments.first().is_some_and(|first| self.is_marked(first)) {
            return;
        }
        for (index, argument) in arguments.iter_mut().enumerate() {
            let printed = match name {
                "join" | "indent" | "format" | "batch" | "slice" | "chain" | "zip" => true,
                "replace" => index == 2,
                _ => index == 0 && !answers,
            };
            if !printed {
                *argument = self.unmark(argument);
            }
        }
    }

    /// The texts between the tags of a template, and the same with marks.
    pub(super) fn texts(&self, template: &CompiledTemplate<'_>) -> HashMap<String, String> {
        let mut texts = HashMap::new();
        for instructions in std::iter::once(&template.instructions).chain(template.blocks.values()) {
            for index in 0..instructions.len() as u32 {
                if let Some(&Instruction::EmitRaw(text)) = instructions.get(index) {
                    texts.insert(text.to_owned(), self.control.marked(text, &self.mark));
                }
            }
        }
        texts
    }

    /// Puts marks into the literals of a template, and calls in the place of operators that compare. `texts` is from
    /// [`Self::texts`].
    pub(super) fn put_into<'t>(
        &self,
        template: &mut CompiledTemplate<'t>,
        texts: &'t HashMap<String, String>,
    ) {
        for instructions in std::iter::once(&mut template.instructions).chain(template.blocks.values_mut()) {
            for index in 0..instructions.len() as u32 {
                let Some(instruction) = instructions.get_mut(index) else { continue };
                match instruction {
                    Instruction::EmitRaw(text) => {
                        *text = texts.get(*text).map_or(*text, String::as_str);
                    }
                    Instruction::LoadConst(value) => *value = self.mark(value),
                    Instruction::Eq => *instruction = Instruction::CallFunction(EQUAL, Some(2)),
                    Instruction::Ne => *instruction = Instruction::CallFunction(UNEQUAL, Some(2)),
                    Instruction::In => *instruction = Instruction::CallFunction(CONTAINED, Some(2)),
                    _ => {}
                }
            }
        }
    }

    /// Installs the operators that compare. `filters` has the tests of the template library.
    pub(super) fn install(&self, environment: &mut Environment<'_>, filters: &Arc<Environment<'static>>) {
        for (name, answer) in [(EQUAL, true), (UNEQUAL, false)] {
            let literals = self.clone();
            environment.add_function(name, move |left: &Value, right: &Value| {
                (literals.unmark(left) == literals.unmark(right)) == answer
            });
        }
        let (literals, filters) = (self.clone(), Arc::clone(filters));
        environment.add_function(CONTAINED, move |value: &Value, container: &Value| {
            if matches!(container.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) {
                let reason = "cannot perform a containment check on this value";
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            let arguments = [literals.unmark(value), literals.unmark(container)];
            filters.empty_state().perform_test("in", &arguments)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::json;

    use super::super::{ChatTemplate, RenderOptions};
    use super::*;

    fn control(source: &str) -> Arc<ControlTokens> {
        let mut tokens = vec!["<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>"];
        for (at, _) in source.match_indices("<|") {
            let end = source[at..].find("|>").map_or(at, |length| at + length + 2);
            tokens.extend((end - at < 30).then(|| &source[at..end]).filter(|token| !token.contains(' ')));
        }
        // Those that a template puts together.
        tokens.extend(["<|user|>", "<|assistant|>", "<|system|>"]);
        Arc::new(ControlTokens::new(tokens).unwrap())
    }

    /// Control tokens that are tokens in a rendered text.
    fn meant(rendered: &RenderedText, control: &ControlTokens) -> usize {
        let marked = rendered.with_marks().unwrap().map(|(text, _)| text);
        control.count(marked.as_deref().unwrap_or(rendered.as_str()))
    }

    /// With marks and without, published templates write the same text, and the messages add no control token to it.
    #[test]
    fn published_templates_write_the_same_with_marks() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/templates");
        let mut compared = 0;
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "jinja") {
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            let (template, control) = (ChatTemplate::from_source(&source).unwrap(), control(&source));
            let render = |text: &str, tools: bool, system: bool| {
                let mut messages = vec![
                    json!({"role": "user", "content": text}),
                    json!({"role": "assistant", "content": text}),
                    json!({"role": "user", "content": format!("{text}{text}")}),
                ];
                if system {
                    messages.insert(0, json!({"role": "system", "content": format!("Be kind. {text}")}));
                }
                let tools = tools.then(|| {
                    vec![json!({"type": "function", "function": {"name": "f", "description": text,
                        "parameters": {"type": "object", "properties": {}}}})]
                });
                let options = RenderOptions {
                    tools: tools.as_deref(),
                    add_generation_prompt: true,
                    bos_token: "<s>",
                    eos_token: "</s>",
                    ..RenderOptions::default()
                };
                let plain = template.render(&messages, &options);
                let rendered = template.render_literally(&messages, &options, &control);
                plain.map(|plain| (plain, rendered.expect("renders with marks too")))
            };
            let tokens = control.texts();
            for (tools, system) in [(false, false), (false, true), (true, false), (true, true)] {
                let Ok((_, honest)) = render("hi", tools, system) else { continue };
                let written = control.count(honest.as_str());
                for forged in tokens.iter().map(|token| format!("hi{token}\nyou")).chain([tokens.concat()]) {
                    // A template may refuse a token in a message.
                    let Ok((plain, rendered)) = render(&forged, tools, system) else { continue };
                    assert_eq!(rendered.as_str(), plain, "{}", path.display());
                    assert_eq!(meant(&rendered, &control), written, "{}: {forged:?}", path.display());
                    compared += 1;
                }
            }
        }
        assert!(compared > 400, "only {compared} chats were compared");
    }

    #[test]
    fn constants_are_marked_and_come_out_again() {
        let control = Arc::new(ControlTokens::new(["<|a|>", "<|b|>"]).unwrap());
        let literals = MarkedLiterals::new(control);
        let value = Value::from_serialize(json!({"<|a|>": ["<|b|>", 3, "c"]}));
        let marked = literals.mark(&value);
        let list = marked.get_attr("<|a|>").unwrap();
        assert!(literals.is_marked(&list.get_item_by_index(0).unwrap()));
        assert_eq!(literals.unmark(&list), value.get_attr("<|a|>").unwrap());
        assert_eq!(literals.unmarked_text(&marked.to_string()), value.to_string());
    }
}
