//! Maths by exact match: where an answer is in a text, and when two ways to write it are the same.

mod extract;
mod normal;
mod value;

pub use extract::final_answer;
pub(super) use extract::{boxed, without_thoughts};
pub use normal::normalise;

/// Whether two answers are the same: written alike once normalised, equal as numbers, or lists of equal parts.
pub fn equal(one: &str, other: &str) -> bool {
    same(&normalise(one), &normalise(other))
}

fn same(one: &str, other: &str) -> bool {
    if one.is_empty() || other.is_empty() {
        return false;
    }
    if one == other {
        return true;
    }
    if let (Some(one), Some(other)) = (value::value(one), value::value(other)) {
        // Decimals of a fraction are often cut; a thousandth of a percent is closer than any two answers are.
        return (one - other).abs() <= 1e-5 * one.abs().max(other.abs()).max(1e-9);
    }
    let (left, right) = (parts(one), parts(other));
    if left.len() < 2 || left.len() != right.len() {
        return false;
    }
    let ordered = ordered(one);
    if ordered != self::ordered(other) {
        return false;
    }
    if ordered {
        return left.iter().zip(&right).all(|(left, right)| same(left, right));
    }
    // Solutions of an equation may come in any order.
    let mut open = right;
    left.iter().all(|part| match open.iter().position(|other| same(part, other)) {
        Some(index) => {
            open.swap_remove(index);
            true
        }
        None => false,
    })
}

/// Points, intervals and the like have brackets, and their parts an order.
fn ordered(text: &str) -> bool {
    text.starts_with(['(', '['])
}

/// What commas separate, outside of inner brackets; outer brackets go, but for the kind of an interval's ends.
fn parts(text: &str) -> Vec<&str> {
    let bracketed = text.len() >= 2 && text.starts_with(['(', '[', '{']) && text.ends_with([')', ']', '}']);
    if bracketed && (text.starts_with('[') || text.ends_with(']')) {
        // Whether an end belongs to an interval is part of the answer: compared as written.
        return Vec::new();
    }
    let inner = if bracketed { &text[1..text.len() - 1] } else { text };
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0i32, 0);
    for (at, letter) in inner.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        if depth < 0 {
            // The outer brackets were two pairs, as in (a+b)(c+d).
            return Vec::new();
        }
    }
    parts.push(&inner[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_answer_in_other_words() {
        for (one, other) in [
            ("\\frac{14}{3}", "14/3"),
            ("\\dfrac{17}{50}", "\\frac{17}{50}"),
            ("\\frac 34", "0.75"),
            ("1\\frac{4}{5}", "\\frac{9}{5}"),
            ("-\\frac{1}{2}", "\\frac{-1}{2}"),
            ("10,\\!080", "10080"),
            ("1,250", "1250"),
            ("30^\\circ", "30"),
            ("90^{\\circ}", "90°"),
            ("\\$18.90", "18.90"),
            ("18.9", "18.90"),
            ("50\\%", "50"),
            ("\\text{even}", "even"),
            ("\\text{(E)}", "E"),
            ("5 \\text{ cm}", "5"),
            ("12 inches", "12"),
            ("073", "73"),
            ("204.0", "204"),
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
            ("3, 5, 7", "7,5,3"),
            ("x = 5", "5"),
            ("y = -2x", "-2x"),
            ("52_8", "52_{8}"),
            ("6\\sqrt{2}", "6\\sqrt2"),
            ("x^{2}+1", "x^2 + 1"),
            ("288 \\pi", "288\\pi"),
            ("\\frac{1}{3}", "0.333333"),
            ("(5,\\infty)", "(5, +\\infty)"),
            ("\\{1, 2\\}", "\\{2,1\\}"),
            ("1 - 12i", "1-12i"),
            ("$\\frac{8}{15}$.", "\\tfrac{8}{15}"),
            ("2.5e3", "2500"),
            (
                "\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}",
                "\\begin{pmatrix}\\frac{1}{5}\\\\-\\frac{18}{5}\\end{pmatrix}",
            ),
            ("3 \\times 10^2", "300"),
            ("(a+5)(b+2)", "(a + 5)(b + 2)"),
        ] {
            assert!(equal(one, other), "{one} and {other}: {} and {}", normalise(one), normalise(other));
            assert!(equal(other, one), "{other} and {one}");
        }
    }

    #[test]
    fn different_answers() {
        for (one, other) in [
            ("9", "8"),
            ("", ""),
            ("", "0"),
            ("\\frac{1}{2}", "\\frac{2}{1}"),
            ("0.33", "\\frac{1}{3}"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "[1,2]"),
            ("(2,12)", "(2,12]"),
            ("3,5", "3,5,7"),
            ("3,3,5", "3,5,5"),
            ("2k", "2"),
            ("7\\pi", "7"),
            ("x^3", "x^2"),
            ("1+274i", "1-274i"),
            ("10080", "10,81"),
            ("\\text{even}", "odd"),
            ("1234", "(1,234)"),
            ("12", "1,2"),
            ("6\\sqrt{2}", "6"),
        ] {
            assert!(!equal(one, other), "{one} and {other}: {} and {}", normalise(one), normalise(other));
        }
    }
}
