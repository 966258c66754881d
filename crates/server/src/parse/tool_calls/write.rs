//! Writes tool calls as a family of models does: what the parser reads.

use serde_json::{Value, json};

use super::{CallLayout, ToolCallFormat, XmlLayout};

impl ToolCallFormat {
    /// Calls as a model writes them, by the names of the functions and their arguments, with these markers around a
    /// block: [`ToolCallFormat::block`], or what stands for it.
    pub(crate) fn written(&self, calls: &[(&str, &Value)], block: (&str, &str)) -> String {
        let one = |&(name, arguments): &(&str, &Value)| match &self.layout {
            CallLayout::Json { arguments: key, .. } => {
                format!("{{\"name\": {}, \"{key}\": {arguments}}}", json!(name))
            }
            CallLayout::Named { separator } => format!("{name}{separator}{arguments}"),
            CallLayout::Xml(layout) => layout.written(name, arguments),
            CallLayout::Harmony => format!("functions.{name} <|constrain|>json<|message|>{arguments}"),
        };
        let (open, close) = block;
        if self.one_block {
            let calls: Vec<String> = calls.iter().map(one).collect();
            let calls = calls.join(self.separator);
            let list = matches!(self.layout, CallLayout::Json { list: true, .. });
            return if list { format!("{open}[{calls}]{close}") } else { format!("{open}{calls}{close}") };
        }
        let calls: Vec<String> = calls.iter().map(|call| format!("{open}{}{close}", one(call))).collect();
        calls.join(self.separator)
    }
}

impl XmlLayout {
    fn written(&self, name: &str, arguments: &Value) -> String {
        let quoted = |name: &str| if self.quoted_names { format!("\"{name}\"") } else { name.to_owned() };
        let (mut text, close) = match self.call_open {
            Some(open) => (format!("{open}{}>\n", quoted(name)), self.call_close),
            None => (format!("{name}\n"), ""),
        };
        let line_break = if self.values_on_lines { "\n" } else { "" };
        let after_key = if self.values_on_lines || !self.value.0.is_empty() { "\n" } else { "" };
        for (key, value) in arguments.as_object().into_iter().flatten() {
            // Text stands there as it is.
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            for part in [self.key.0, &quoted(key), self.key.1, after_key, self.value.0] {
                text += part;
            }
            text += &[&value, line_break, self.value.1, "\n"].concat();
        }
        text + close
    }
}
