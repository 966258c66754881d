//! Structural tags: free text in which some texts (triggers) begin JSON between a beginning and an end.

use serde_json::Value;

use super::schema::prepared;

/// Free text with JSON in it. Each structure begins with one of the triggers.
#[derive(Clone, Debug, PartialEq)]
pub struct StructuralTag {
    /// The texts behind which the answer is constrained.
    pub triggers: Vec<String>,
    /// What may stand there.
    pub structures: Vec<TagStructure>,
}

/// JSON between two texts.
#[derive(Clone, Debug, PartialEq)]
pub struct TagStructure {
    /// The text before the JSON.
    pub begin: String,
    /// The schema of the JSON.
    pub schema: Value,
    /// The text behind the JSON.
    pub end: String,
}

/// The grammar in Lark. Free text ends at the first trigger, and then one of its structures follows.
pub(super) fn to_lark(tag: &StructuralTag) -> String {
    let mut rules = String::new();
    for (index, trigger) in tag.triggers.iter().enumerate() {
        rules += &format!("until{index}[suffix={}]: /(?s:.*)/\n", literal(trigger));
    }
    let mut names = Vec::new();
    for (index, structure) in tag.structures.iter().enumerate() {
        let starts = |trigger: &&String| structure.begin.starts_with(trigger.as_str());
        // The shortest trigger is the one that comes up first.
        let triggers = tag.triggers.iter().enumerate().filter(|(_, trigger)| starts(trigger));
        let Some((number, trigger)) = triggers.min_by_key(|(_, trigger)| trigger.len()) else { continue };
        let rest = &structure.begin[trigger.len()..];
        let rest = if rest.is_empty() { String::new() } else { format!("{} ", literal(rest)) };
        let (schema, end) = (prepared(&structure.schema), literal(&structure.end));
        rules += &format!("tag{index}: until{number} {rest}%json {schema} {end}\n");
        names.push(format!("tag{index}"));
    }
    format!("start: ({})* TAIL\nTAIL: /(?s:.*)/\n{rules}", names.join(" | "))
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
