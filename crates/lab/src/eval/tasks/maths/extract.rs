//! Where the answer is in a text.

/// The answer without what a reasoning model thought before it.
pub(in crate::eval::tasks) fn without_thoughts(text: &str) -> &str {
    text.rfind("</think>").map_or(text, |at| &text[at + "</think>".len()..])
}

/// The answer a text ends on: the last box, else what follows the last "answer is", else the last number.
pub fn final_answer(text: &str) -> Option<String> {
    let text = without_thoughts(text);
    boxed(text).or_else(|| stated(text)).or_else(|| last_number(text)).filter(|answer| !answer.is_empty())
}

/// What the last `\boxed{…}` holds. A box that is never closed holds the rest of its line.
pub(in crate::eval::tasks) fn boxed(text: &str) -> Option<String> {
    let (at, name) =
        ["\\boxed", "\\fbox"].iter().filter_map(|name| Some((text.rfind(name)?, name.len()))).max()?;
    let rest = text[at + name..].trim_start();
    let Some(inside) = rest.strip_prefix('{') else {
        // \boxed 5
        let end = rest.find([' ', '$', '\n', '.']).unwrap_or(rest.len());
        return Some(rest[..end].to_owned());
    };
    let mut depth = 1;
    for (at, letter) in inside.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(inside[..at].trim().to_owned());
        }
    }
    Some(inside.lines().next().unwrap_or("").trim().to_owned())
}

/// What follows the last "answer is" or "answer:" up to the end of the sentence.
fn stated(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let starts = ["answer is", "answer:", "answer ="];
    let (at, length) = starts
        .iter()
        .filter_map(|start| Some((lower.rfind(start)?, start.len())))
        .max_by_key(|(at, _)| *at)?;
    let rest = text[at + length..].trim_start_matches([' ', ':', '*', '\n']);
    let line = rest.lines().next()?;
    // A full stop ends the sentence, unless digits follow it.
    let stop = line
        .match_indices('.')
        .map(|(at, _)| at)
        .find(|&at| !line[at + 1..].starts_with(|next: char| next.is_ascii_digit()));
    let sentence = &line[..stop.unwrap_or(line.len())];
    let answer = sentence.trim().trim_matches(['*', '$', '`', ' ']);
    // Words after a number explain it.
    (!answer.is_empty() && answer.chars().count() <= 80).then(|| answer.to_owned())
}

/// The last number: `-3`, `1,250`, `0.5`, `3/4`.
fn last_number(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let end = bytes.iter().rposition(u8::is_ascii_digit)? + 1;
    let mut start = end - 1;
    while start > 0 {
        let joins = match bytes[start - 1] {
            b'0'..=b'9' => true,
            // A mark belongs to the number if digits are on both of its sides.
            b'.' | b',' | b'/' => {
                start >= 2 && bytes[start - 2].is_ascii_digit() && bytes[start].is_ascii_digit()
            }
            _ => false,
        };
        if !joins {
            break;
        }
        start -= 1;
    }
    let negative = start > 0
        && bytes[start - 1] == b'-'
        && (start < 2 || !bytes[start - 2].is_ascii_alphanumeric() && bytes[start - 2] != b')');
    Some(text[start - usize::from(negative)..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_where_models_put_them() {
        for (text, expected) in [
            ("so \\boxed{42}.", Some("42")),
            ("first \\boxed{1}, then $\\boxed{\\frac{1}{\\sqrt{2}}}$", Some("\\frac{1}{\\sqrt{2}}")),
            ("\\boxed 5$", Some("5")),
            ("\\boxed{12 + \\frac{3", Some("12 + \\frac{3")),
            ("<think>\\boxed{3}</think> It is \\boxed{4}", Some("4")),
            ("<think>\\boxed{3}</think> It is 4", Some("4")),
            ("The answer is 12. That was easy.", Some("12")),
            ("The final answer is: $\\frac{1}{2}$.", Some("\\frac{1}{2}")),
            ("Answer: 3.5\n\nDone", Some("3.5")),
            ("We get 3 and then 1,250 apples", Some("1,250")),
            ("x = -7", Some("-7")),
            ("from 3-7", Some("7")),
            ("about 22/7.", Some("22/7")),
            ("no number here", None),
            ("", None),
            ("é٣", None),
        ] {
            assert_eq!(final_answer(text).as_deref(), expected, "{text}");
        }
    }
}
