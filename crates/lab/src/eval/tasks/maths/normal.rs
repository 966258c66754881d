//! One way to write an answer.

/// Commands that only change how an answer looks.
const LOOKS: [&str; 14] = [
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\limits",
    "\\!",
    "\\,",
    "\\;",
    "\\:",
    "\\ ",
    "\\quad",
    "\\bigl",
    "\\bigr",
    "\\big",
    "~",
];

/// Commands around words.
const WRAPS: [&str; 8] = [
    "\\text{",
    "\\mathrm{",
    "\\mbox{",
    "\\textbf{",
    "\\mathbf{",
    "\\textit{",
    "\\operatorname{",
    "\\mathit{",
];

/// What may follow a number without changing it.
const UNITS: &[&str] = &[
    "cm",
    "mm",
    "km",
    "m",
    "meters",
    "meter",
    "metres",
    "metre",
    "inches",
    "inch",
    "in",
    "feet",
    "foot",
    "ft",
    "miles",
    "mile",
    "yards",
    "units",
    "unit",
    "squareunits",
    "squarecm",
    "squareinches",
    "squarefeet",
    "squaremeters",
    "cubicunits",
    "cubicinches",
    "cubicfeet",
    "degrees",
    "degree",
    "percent",
    "dollars",
    "dollar",
    "cents",
    "cent",
    "hours",
    "hour",
    "minutes",
    "minute",
    "seconds",
    "second",
    "days",
    "day",
    "years",
    "year",
    "weeks",
    "months",
    "people",
    "students",
    "ways",
    "points",
    "kg",
    "grams",
    "g",
    "pounds",
    "mph",
    "sqin",
    "gallons",
    "liters",
    "litres",
];

/// An answer without spaces, marks of typesetting, units and signs of money; fractions as `a/b`, roots as
/// `sqrt(a)`, no commas between thousands. Two answers that are written the same way become equal texts.
pub fn normalise(answer: &str) -> String {
    // Two backslashes end a row of a matrix; one of them and a space is a space.
    let mut text = answer.trim().trim_end_matches('.').replace("\\\\", ";");
    for (from, to) in [
        ("\\$", ""),
        ("$", ""),
        ("\\%", ""),
        ("%", ""),
        ("^\\circ", ""),
        ("^{\\circ}", ""),
        ("\\degree", ""),
        ("°", ""),
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\\cfrac", "\\frac"),
        ("\\leq", "\\le"),
        ("\\geq", "\\ge"),
        ("\\neq", "\\ne"),
        ("\\times", "*"),
        ("\\cdot", "*"),
        ("−", "-"),
        ("\\{", "{"),
        ("\\}", "}"),
    ] {
        text = text.replace(from, to);
    }
    for look in LOOKS {
        text = text.replace(look, "");
    }
    text = unwrapped(&text);
    text = text.split_whitespace().collect();
    text = fractions(&text);
    text = roots(&text);
    for (from, to) in [("\\pi", "pi"), ("\\infty", "inf"), ("+inf", "inf"), ("\\pm", "±")] {
        text = text.replace(from, to);
    }
    text = single_braces(&text);
    // "x=5" and "5" answer the same question.
    if let Some((name, value)) = text.split_once('=')
        && name.chars().count() == 1
        && name.chars().all(char::is_alphabetic)
        && !value.contains('=')
    {
        text = value.to_owned();
    }
    text = without_unit(&text);
    if let Some(number) = without_commas(&text) {
        text = number;
    }
    // Options and words.
    if text.len() == 3
        && text.starts_with('(')
        && text.ends_with(')')
        && text.as_bytes()[1].is_ascii_alphabetic()
    {
        text = text[1..2].to_owned();
    }
    if text.chars().all(char::is_alphabetic) { text.to_lowercase() } else { text }
}

/// Words without the command around them.
fn unwrapped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, wrap)) =
        WRAPS.iter().filter_map(|wrap| Some((rest.find(wrap)?, *wrap))).min_by_key(|(at, _)| *at)
    {
        out.push_str(&rest[..at]);
        rest = &rest[at + wrap.len()..];
        let Some(end) = closing(rest) else { break };
        out.push(' ');
        out.push_str(&rest[..end]);
        out.push(' ');
        rest = &rest[end + 1..];
    }
    out + rest
}

/// Where the brace that is open at the beginning closes.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, letter) in text.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// An argument of a command, in braces or one character, and what follows it.
fn argument(text: &str) -> Option<(&str, &str)> {
    if let Some(inside) = text.strip_prefix('{') {
        let end = closing(inside)?;
        return Some((&inside[..end], &inside[end + 1..]));
    }
    let first = text.chars().next().filter(|first| first.is_alphanumeric())?;
    Some(text.split_at(first.len_utf8()))
}

/// `\frac{a}{b}` as `a/b`, with brackets around what is more than one number or name. A number in front makes a
/// mixed number and is joined with a space, which nothing else has by now.
fn fractions(text: &str) -> String {
    let Some((before, rest)) = text.split_once("\\frac") else { return text.to_owned() };
    let parsed = argument(rest).and_then(|(top, rest)| {
        let (bottom, rest) = argument(rest)?;
        Some((top, bottom, rest))
    });
    let Some((top, bottom, rest)) = parsed else { return text.to_owned() };
    let mixed = before.ends_with(|last: char| last.is_ascii_digit());
    let both_whole = [top, bottom].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
    let space = if mixed && both_whole { " " } else { "" };
    format!(
        "{before}{space}{}/{}{}",
        bracketed(&fractions(top)),
        bracketed(&fractions(bottom)),
        fractions(rest)
    )
}

/// `\sqrt{a}` as `sqrt(a)`.
fn roots(text: &str) -> String {
    let Some((before, rest)) = text.split_once("\\sqrt") else { return text.to_owned() };
    match argument(rest) {
        Some((inside, rest)) => format!("{before}sqrt({}){}", roots(inside), roots(rest)),
        None => format!("{before}sqrt{}", roots(rest)),
    }
}

fn bracketed(part: &str) -> String {
    let number = part.strip_prefix('-').unwrap_or(part);
    let simple = number.chars().all(|letter| letter.is_alphanumeric() || letter == '.')
        && (number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') || number.chars().count() == 1)
        || (number.starts_with('\\') && number[1..].chars().all(char::is_alphabetic));
    if simple { part.to_owned() } else { format!("({part})") }
}

/// `x^{2}` as `x^2`, `52_{8}` as `52_8`.
fn single_braces(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['^', '_']) {
        out.push_str(&rest[..=at]);
        rest = &rest[at + 1..];
        if let Some(inside) = rest.strip_prefix('{')
            && let Some(end) = closing(inside)
        {
            let simple = inside[..end].chars().all(char::is_alphanumeric);
            out.push_str(&if simple { inside[..end].to_owned() } else { format!("{{{}}}", &inside[..end]) });
            rest = &inside[end + 1..];
        }
    }
    out + rest
}

fn without_unit(text: &str) -> String {
    let start = text
        .rfind(|letter: char| !letter.is_alphabetic())
        .map_or(0, |at| at + text[at..].chars().next().map_or(1, char::len_utf8));
    let (number, unit) = text.split_at(start);
    let is_number = number.ends_with(|last: char| last.is_ascii_digit())
        && number.chars().all(|letter| letter.is_ascii_digit() || ".,/- ".contains(letter));
    if is_number && UNITS.contains(&unit.to_lowercase().as_str()) {
        number.to_owned()
    } else {
        text.to_owned()
    }
}

/// A whole text that is one number with commas between thousands.
fn without_commas(text: &str) -> Option<String> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = whole.strip_prefix('-').unwrap_or(whole);
    let mut groups = digits.split(',');
    let first = groups.next()?;
    let is_digits = |group: &str| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit());
    let grouped = digits.contains(',')
        && is_digits(first)
        && first.len() <= 3
        && groups.all(|group| group.len() == 3 && is_digits(group))
        && fraction.bytes().all(|byte| byte.is_ascii_digit());
    grouped.then(|| text.replace(',', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_way_to_write_it() {
        for (answer, normal) in [
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,pi/2)"),
            ("\\frac{11+9a}{20}", "(11+9a)/20"),
            ("\\frac{\\frac{1}{2}}{3}", "(1/2)/3"),
            ("1\\frac{4}{5}", "1 4/5"),
            ("x\\frac{4}{5}", "x4/5"),
            ("\\frac{a}{bc}", "a/(bc)"),
            ("6\\sqrt{2}", "6sqrt(2)"),
            ("1 \\pm \\sqrt{19}", "1±sqrt(19)"),
            ("1,234,567.5", "1234567.5"),
            ("12,34", "12,34"),
            ("\\text{Navin}", "navin"),
            ("5\\text{ square units}", "5"),
            ("5x", "5x"),
            ("f(x)=2", "f(x)=2"),
            ("\\frac", "\\frac"),
            ("\\frac{1", "\\frac{1"),
            ("\\text{open", "open"),
            ("", ""),
        ] {
            assert_eq!(normalise(answer), normal, "{answer}");
        }
    }

    #[test]
    fn nothing_breaks_it() {
        for answer in [
            "}{",
            "\\frac{}{}",
            "\\sqrt",
            "^{",
            "_",
            "=",
            "é=",
            "ü\\frac é",
            "((((",
            "-",
            "\\text{\\text{x}}",
            "日本cm",
        ] {
            let once = normalise(answer);
            assert!(once.len() < 100, "{answer}: {once}");
        }
        let deep = "\\frac{".repeat(2000);
        assert!(!normalise(&deep).is_empty());
    }
}
