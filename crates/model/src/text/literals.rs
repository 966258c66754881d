//! String literals of templates that go on in the next line. Behind a backslash at the end of a line Python's Jinja leaves out
//! the line break, and our template library keeps both.

/// Takes a backslash and the line break behind it out of string literals: the parts of such a literal are joined by an
/// operator, with the line break outside of them, so that errors name the same lines.
pub(super) fn join_continued(source: &str) -> String {
    if !source.contains("\\\n") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        let (text, tag) = rest.split_at(start);
        out.push_str(text);
        let length = match &tag[..2] {
            "{#" => tag.find("#}").map_or(tag.len(), |end| end + 2),
            _ if opens_raw(tag) => tag.find("endraw").map_or(tag.len(), |end| end + 6),
            _ => {
                rest = copy_tag(tag, &mut out);
                continue;
            }
        };
        out.push_str(&tag[..length]);
        rest = &tag[length..];
    }
    out + rest
}

fn opens_raw(tag: &str) -> bool {
    let inside = tag.strip_prefix("{%").map(|inside| inside.trim_start_matches(['-', '+']).trim_start());
    let behind = inside.and_then(|inside| inside.strip_prefix("raw"));
    behind.is_some_and(|behind| behind.trim_start().trim_start_matches(['-', '+']).starts_with("%}"))
}

/// Copies a tag to its end; what follows is returned.
fn copy_tag<'t>(tag: &'t str, out: &mut String) -> &'t str {
    let end = if tag.starts_with("{{") { "}}" } else { "%}" };
    let mut at = 0;
    while at < tag.len() {
        let rest = &tag[at..];
        if at >= 2 && rest.starts_with(end) {
            out.push_str(end);
            return &rest[2..];
        }
        let length = match rest.chars().next() {
            Some(quote @ ('"' | '\'')) => copy_literal(rest, quote, out),
            Some(character) => {
                out.push(character);
                character.len_utf8()
            }
            None => break,
        };
        at += length;
    }
    ""
}

/// Copies a literal, which begins with its quote; its length is returned.
fn copy_literal(text: &str, quote: char, out: &mut String) -> usize {
    let mut length = text.len();
    let mut escaped = false;
    for (index, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => {
                length = index + 1;
                break;
            }
            _ => {}
        }
    }
    let parts = split_continued(&text[..length]);
    match &parts[..] {
        [whole] => out.push_str(whole),
        parts => {
            let between = format!("{quote} ~\n{quote}");
            out.push_str(&format!("({})", parts.join(&between)));
        }
    }
    length
}

/// The parts of a literal between its continued lines.
fn split_continued(literal: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut from, mut escaped) = (0, false);
    for (index, byte) in literal.bytes().enumerate() {
        match byte {
            b'\n' if escaped => {
                parts.push(&literal[from..index - 1]);
                (from, escaped) = (index + 1, false);
            }
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    parts.push(&literal[from..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_literals_are_joined() {
        for same in [
            "a\\\nb",
            "{# 'a\\\nb' #}",
            "{% raw %}{{ 'a\\\nb' }}{% endraw %}",
            "{{ 'a\\\\\nb' }}",
            "{{ 'a' }}\\\n",
            "{{ 'a",
            "{% x",
            "{{ \"}}\" }} '\\\n'",
        ] {
            assert_eq!(join_continued(same), same);
        }
        assert_eq!(join_continued("{{ 'a\\\nb'|trim }}c"), "{{ ('a' ~\n'b')|trim }}c");
        assert_eq!(
            join_continued("{%- set x = \"é'\\\n\\\n\" %}"),
            "{%- set x = (\"é'\" ~\n\"\" ~\n\"\") %}"
        );
        assert_eq!(
            join_continued("{{ '}}\\'\\\n' }}{{ 'x\\\ny' }}"),
            "{{ ('}}\\'' ~\n'') }}{{ ('x' ~\n'y') }}"
        );
        assert_eq!(join_continued("{{ 'a\\\n"), "{{ ('a' ~\n')");
    }
}
