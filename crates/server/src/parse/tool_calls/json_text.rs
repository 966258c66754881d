//! Checks JSON text as it comes, byte by byte, without building anything.

/// What a byte did to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The byte is part of the value, which goes on.
    More,
    /// A control character that should have been escaped in a string. Models write these; the value goes on.
    Unescaped,
    /// The byte is the last of the value.
    Last,
    /// The value, a number, ended before this byte.
    Before,
    /// The byte cannot follow: the text is not JSON.
    Invalid,
}

/// Checks one JSON value.
#[derive(Debug, Default)]
pub(super) struct JsonText {
    /// The objects (`true`) and arrays (`false`) that are open.
    open: Vec<bool>,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Value,
    /// Behind `[`: a value or the end.
    FirstItem,
    /// Behind `{`: a key or the end.
    FirstKey,
    Key,
    Colon,
    /// Behind a value in an object or array.
    Comma,
    String {
        key: bool,
    },
    Escape {
        key: bool,
    },
    /// This many hexadecimal digits are missing.
    Unicode {
        key: bool,
        missing: u8,
    },
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static [u8]),
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl JsonText {
    /// Takes the next byte.
    pub(super) fn step(&mut self, byte: u8) -> Step {
        let blank = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        match self.state {
            State::String { key } => match byte {
                b'"' if key => self.go(State::Colon),
                b'"' => self.value_ends(),
                b'\\' => self.go(State::Escape { key }),
                0..0x20 => Step::Unescaped,
                _ => Step::More,
            },
            State::Escape { key } => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.go(State::String { key }),
                b'u' => self.go(State::Unicode { key, missing: 4 }),
                _ => Step::Invalid,
            },
            State::Unicode { key, missing } if byte.is_ascii_hexdigit() => self.go(match missing {
                1 => State::String { key },
                _ => State::Unicode { key, missing: missing - 1 },
            }),
            State::Unicode { .. } => Step::Invalid,
            State::Word(rest) => match rest {
                [only] if *only == byte => self.value_ends(),
                [first, rest @ ..] if *first == byte => self.go(State::Word(rest)),
                _ => Step::Invalid,
            },
            State::Number(number) => self.number(number, byte),
            State::Ended => Step::Invalid,
            _ if blank => Step::More,
            State::Value => self.value(byte),
            State::FirstItem if byte == b']' => self.close(),
            State::FirstItem => self.value(byte),
            State::FirstKey if byte == b'}' => self.close(),
            State::FirstKey | State::Key if byte == b'"' => self.go(State::String { key: true }),
            State::Colon if byte == b':' => self.go(State::Value),
            State::Comma => match (byte, self.open.last()) {
                (b',', Some(true)) => self.go(State::Key),
                (b',', Some(false)) => self.go(State::Value),
                (b'}', Some(true)) | (b']', Some(false)) => self.close(),
                _ => Step::Invalid,
            },
            State::FirstKey | State::Key | State::Colon => Step::Invalid,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn value(&mut self, byte: u8) -> Step {
        let state = match byte {
            b'{' => {
                self.open.push(true);
                State::FirstKey
            }
            b'[' => {
                self.open.push(false);
                State::FirstItem
            }
            b'"' => State::String { key: false },
            b't' => State::Word(b"rue"),
            b'f' => State::Word(b"alse"),
            b'n' => State::Word(b"ull"),
            b'-' => State::Number(Number::Minus),
            b'0' => State::Number(Number::Zero),
            b'1'..=b'9' => State::Number(Number::Digits),
            _ => return Step::Invalid,
        };
        self.go(state)
    }

    fn number(&mut self, number: Number, byte: u8) -> Step {
        use Number::{Digits, Exponent, ExponentDigits, ExponentSign, Fraction, Minus, Point, Zero};
        let next = match (number, byte) {
            (Minus, b'0') => Zero,
            (Minus | Digits, b'0'..=b'9') => Digits,
            (Zero | Digits, b'.') => Point,
            (Point | Fraction, b'0'..=b'9') => Fraction,
            (Zero | Digits | Fraction, b'e' | b'E') => Exponent,
            (Exponent, b'+' | b'-') => ExponentSign,
            (Exponent | ExponentSign | ExponentDigits, b'0'..=b'9') => ExponentDigits,
            (Zero | Digits | Fraction | ExponentDigits, _) => {
                // The byte belongs to what the number is in.
                return match self.value_ends() {
                    Step::Last => Step::Before,
                    _ => self.step(byte),
                };
            }
            _ => return Step::Invalid,
        };
        self.go(State::Number(next))
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        self.value_ends()
    }

    fn value_ends(&mut self) -> Step {
        if self.open.is_empty() {
            self.state = State::Ended;
            return Step::Last;
        }
        self.go(State::Comma)
    }
}

/// Whether the text is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    let mut json = JsonText::default();
    let text = text.trim_matches([' ', '\n', '\r', '\t']);
    let mut ended = false;
    for byte in text.bytes() {
        match json.step(byte) {
            _ if ended => return false,
            Step::More => {}
            Step::Last => ended = true,
            Step::Unescaped | Step::Before | Step::Invalid => return false,
        }
    }
    // A number is known to end only at what follows.
    ended || (!text.is_empty() && json.open.is_empty() && json.step(b' ') == Step::Before)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXTS: [&str; 44] = [
        "{}",
        "[]",
        "{\"a\":1}",
        "[1,2.5,-3e+7]",
        "\"x\"",
        "true",
        "null",
        "-0.0E-1",
        "0",
        "[[[]]]",
        "{\"a\":{\"b\":[{}]}}",
        "\"\\u00e9\\n\"",
        " { \"a\" : [ 1 , \"b\" ] } ",
        "1e5",
        "[0]",
        "\"é\"",
        "",
        "{",
        "}",
        "[1,]",
        "{\"a\"}",
        "{\"a\":}",
        "{a:1}",
        "01",
        "1.",
        ".5",
        "+1",
        "-",
        "1e",
        "tru",
        "truee",
        "nul",
        "\"a",
        "\"\\x\"",
        "\"\\u12g4\"",
        "\"\n\"",
        "[1 2]",
        "{\"a\":1,}",
        "{,}",
        "1 2",
        "{}{}",
        "[}",
        "NaN",
        "'a'",
    ];

    #[test]
    fn agrees_with_a_real_parser() {
        for text in TEXTS {
            let real = serde_json::from_str::<serde_json::Value>(text).is_ok();
            assert_eq!(is_json(text), real, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn agrees_on_random_texts(text in r#"([\[\]{},: ]|"a"|1|-|0|\.|e|true|null|\\|"){0,12}"#) {
            let real = serde_json::from_str::<serde_json::Value>(&text).is_ok();
            prop_assert_eq!(is_json(&text), real, "{:?}", text);
        }
    }
}
