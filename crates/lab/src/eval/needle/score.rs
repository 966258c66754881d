//! Whether an answer holds the numbers it should.

use std::collections::HashSet;

/// The share of `answers` that stand in `text` as whole numbers. 4821937 is found in "4,821,937." and not in
/// "14821937", "4821937.5" or "48219370".
pub fn score(text: &str, answers: &[String]) -> f64 {
    if answers.is_empty() {
        return 0.0;
    }
    let found = whole_numbers(text);
    answers.iter().filter(|answer| found.contains(answer.as_str())).count() as f64 / answers.len() as f64
}

/// The whole numbers of a text, with commas between groups of three digits left out.
fn whole_numbers(text: &str) -> HashSet<String> {
    let bytes = text.as_bytes();
    let digits_from = |at: usize| bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut numbers = HashSet::new();
    let mut at = 0;
    while at < bytes.len() {
        let count = digits_from(at);
        if count == 0 {
            at += 1;
            continue;
        }
        let start = at;
        let mut parts = vec![&text[at..at + count]];
        at += count;
        while bytes.get(at) == Some(&b',') && digits_from(at + 1) > 0 {
            let count = digits_from(at + 1);
            parts.push(&text[at + 1..at + 1 + count]);
            at += 1 + count;
        }
        let fraction = bytes.get(at) == Some(&b'.') && digits_from(at + 1) > 0;
        let after_point = start >= 2 && bytes[start - 1] == b'.' && bytes[start - 2].is_ascii_digit();
        if fraction || after_point {
            continue;
        }
        let grouped = parts.len() > 1 && parts[0].len() <= 3 && parts[1..].iter().all(|part| part.len() == 3);
        if grouped {
            numbers.insert(parts.concat());
        } else {
            // A list without spaces.
            numbers.extend(parts.into_iter().map(str::to_owned));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_only() {
        let answers = ["4821937".to_owned()];
        for right in [
            "4821937",
            "It is 4821937.",
            "**4,821,937**",
            "x4821937y",
            "1234567,4821937",
            "code: 4821937, or so",
            "é4821937é",
        ] {
            assert_eq!(score(right, &answers), 1.0, "{right}");
        }
        for wrong in ["", "14821937", "48219370", "4821937.5", "3.4821937", "48219", "4 821 937", "482,1937"]
        {
            assert_eq!(score(wrong, &answers), 0.0, "{wrong}");
        }
    }

    #[test]
    fn several_answers_count_each() {
        let answers = ["111".to_owned(), "222".to_owned(), "333".to_owned(), "444".to_owned()];
        assert_eq!(score("111, 333 and 999", &answers), 0.5);
        assert_eq!(score("444 333 222 111", &answers), 1.0);
        assert_eq!(score("anything", &[]), 0.0);
    }
}
