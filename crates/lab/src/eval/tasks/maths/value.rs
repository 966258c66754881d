//! The number an answer is, if it is one: sums, products, quotients, powers and roots of plain numbers.

/// Deepest brackets that are followed; answers of people have three.
const MAX_DEPTH: usize = 64;

/// The value of a normalised answer that is a plain number.
pub(super) fn value(text: &str) -> Option<f64> {
    // A mixed number: its parts are joined by the only space left.
    if let Some((whole, part)) = text.split_once(' ') {
        let (whole, part) = (value(whole)?, value(part)?);
        return Some(if whole < 0.0 || text.starts_with('-') { whole - part } else { whole + part });
    }
    let mut reader = Reader { rest: text.as_bytes(), depth: 0 };
    let value = reader.sum()?;
    (reader.rest.is_empty() && value.is_finite()).then_some(value)
}

struct Reader<'a> {
    rest: &'a [u8],
    depth: usize,
}

impl Reader<'_> {
    fn take(&mut self, byte: u8) -> bool {
        let there = self.rest.first() == Some(&byte);
        if there {
            self.rest = &self.rest[1..];
        }
        there
    }

    fn sum(&mut self) -> Option<f64> {
        let mut total = if self.take(b'-') { -self.product()? } else { self.product()? };
        loop {
            if self.take(b'+') {
                total += self.product()?;
            } else if self.take(b'-') {
                total -= self.product()?;
            } else {
                return Some(total);
            }
        }
    }

    fn product(&mut self) -> Option<f64> {
        let mut total = self.power()?;
        loop {
            if self.take(b'*') {
                total *= self.power()?;
            } else if self.take(b'/') {
                total /= self.power()?;
            } else if self.rest.first().is_some_and(|next| *next == b'(' || next.is_ascii_alphabetic()) {
                // 6sqrt(2), 2pi
                total *= self.power()?;
            } else {
                return Some(total);
            }
        }
    }

    fn power(&mut self) -> Option<f64> {
        let base = self.atom()?;
        if !self.take(b'^') {
            return Some(base);
        }
        let braced = self.take(b'{');
        let negative = self.take(b'-');
        let exponent = self.atom()?;
        if braced && !self.take(b'}') {
            return None;
        }
        Some(base.powf(if negative { -exponent } else { exponent }))
    }

    fn atom(&mut self) -> Option<f64> {
        if let Some(rest) = self.rest.strip_prefix(b"pi") {
            self.rest = rest;
            return Some(std::f64::consts::PI);
        }
        let root = self.rest.strip_prefix(b"sqrt");
        if let Some(rest) = root {
            self.rest = rest;
        }
        if self.take(b'(') {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return None;
            }
            let inside = self.sum()?;
            self.depth -= 1;
            return self.take(b')').then(|| if root.is_some() { inside.sqrt() } else { inside });
        }
        if root.is_some() { None } else { self.number() }
    }

    fn number(&mut self) -> Option<f64> {
        let digits = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let mut length = digits(self.rest);
        if self.rest.get(length) == Some(&b'.') {
            length += 1 + digits(&self.rest[length + 1..]);
        }
        // 2.5e3, but not 2e, where e may be a name.
        if length > 0 && matches!(self.rest.get(length), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(self.rest.get(length + 1), Some(b'-' | b'+')));
            let exponent = digits(self.rest.get(length + 1 + sign..).unwrap_or(&[]));
            if exponent > 0 {
                length += 1 + sign + exponent;
            }
        }
        let (number, rest) = self.rest.split_at(length);
        self.rest = rest;
        std::str::from_utf8(number).ok()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_numbers_have_values() {
        for (text, expected) in [
            ("42", 42.0),
            ("-0.5", -0.5),
            (".5", 0.5),
            ("1 4/5", 1.8),
            ("-1 1/2", -1.5),
            ("6sqrt(2)", 6.0 * 2f64.sqrt()),
            ("(1+2)/(3*4)", 0.25),
            ("2^10", 1024.0),
            ("10^{-2}", 0.01),
            ("7pi", 7.0 * std::f64::consts::PI),
            ("2.5e3", 2500.0),
        ] {
            let value = value(text).expect(text);
            assert!((value - expected).abs() < 1e-9, "{text}: {value}");
        }
    }

    #[test]
    fn other_texts_have_none() {
        for text in
            ["", "x", "2k", "1,2", "(1,2)", "1/0", "1+", "sqrt", "sqrt(-1)", "52_8", "1±2", "é", "1 x", "2e"]
        {
            assert_eq!(value(text), None, "{text}");
        }
        assert_eq!(value(&"(".repeat(100_000)), None);
    }
}
