//! Conditions of macros, and the values of constants.

use std::collections::HashMap;

use super::tokens::{Token, split};
use crate::memory::Fault;

type Macros = HashMap<String, Vec<Token>>;

/// Constants that are computed from one another, at most.
const MOST_DEPTH: usize = 32;

/// The lines that conditions leave; definitions are added to `macros`.
pub(super) fn active_text(text: &str, macros: &mut Macros) -> Result<String, Fault> {
    let mut active = String::with_capacity(text.len());
    // Of each condition that is open: whether its lines count, and whether one of its parts did already.
    let mut open: Vec<(bool, bool)> = Vec::new();
    for line in text.lines() {
        let Some(directive) = line.trim_start().strip_prefix('#') else {
            if open.iter().all(|(counts, _)| *counts) {
                active.push_str(line);
                active.push('\n');
            }
            continue;
        };
        let directive = directive.trim();
        let (name, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let outside =
            |open: &[(bool, bool)]| open[..open.len().saturating_sub(1)].iter().all(|(counts, _)| *counts);
        match name {
            "if" | "ifdef" | "ifndef" => {
                let holds = open.iter().all(|(counts, _)| *counts)
                    && match name {
                        "if" => evaluate(&split(rest)?, macros, &[])? != 0,
                        _ => macros.contains_key(rest.trim()) == (name == "ifdef"),
                    };
                open.push((holds, holds));
            }
            "elif" | "else" => {
                let before = open.last().ok_or("an #else without an #if")?.1;
                let holds = !before
                    && outside(&open)
                    && (name == "else" || evaluate(&split(rest)?, macros, &[])? != 0);
                if let Some(last) = open.last_mut() {
                    *last = (holds, before || holds);
                }
            }
            "endif" => {
                open.pop().ok_or("an #endif without an #if")?;
            }
            "define" if open.iter().all(|(counts, _)| *counts) => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
                macros.insert(rest[..end].to_owned(), split(&rest[end..])?);
            }
            "undef" if open.iter().all(|(counts, _)| *counts) => {
                macros.remove(rest.trim());
            }
            // Hints for the compiler, and what does not count.
            "pragma" | "define" | "undef" => {}
            other => return Err(format!("#{other} in a kernel source")),
        }
    }
    Ok(active)
}

/// The value of a macro, or of a constant that a text defines.
pub(super) fn value_of(name: &str, macros: &Macros, text: &[Token]) -> Result<i64, Fault> {
    Values { macros, text, depth: 0 }
        .named(name)?
        .ok_or_else(|| format!("{name} has no value in the kernel source"))
}

/// The value of an expression. A name that nobody defines is 0 where there is no text, as in conditions.
pub(super) fn evaluate(expression: &[Token], macros: &Macros, text: &[Token]) -> Result<i64, Fault> {
    Values { macros, text, depth: 0 }.whole(expression)
}

#[derive(Clone, Copy)]
struct Values<'a> {
    macros: &'a Macros,
    text: &'a [Token],
    depth: usize,
}

impl Values<'_> {
    fn whole(self, expression: &[Token]) -> Result<i64, Fault> {
        if self.depth > MOST_DEPTH {
            return Err("a constant that is defined by itself".to_owned());
        }
        let mut parser =
            Parser { tokens: expression, at: 0, values: Values { depth: self.depth + 1, ..self } };
        let value = parser.choice()?;
        if parser.at < expression.len() {
            return Err(format!("{:?} in a constant", expression[parser.at]));
        }
        Ok(value)
    }

    fn named(self, name: &str) -> Result<Option<i64>, Fault> {
        if let Some(value) = self.macros.get(name) {
            return self.whole(value).map(Some);
        }
        // `constexpr int NAME = expression, OTHER = expression;`
        for (at, _) in self.text.iter().enumerate().filter(|(_, token)| token.is_word("constexpr")) {
            let statement = &self.text[at..];
            let end = statement.iter().position(|token| token.is(";")).unwrap_or(statement.len());
            let mut statement = &statement[..end];
            while let Some(equals) = statement.iter().position(|token| token.is("=")) {
                let value = &statement[equals + 1..];
                let end = end_of_value(value);
                if equals > 0 && statement[equals - 1].is_word(name) {
                    return self.whole(&value[..end]).map(Some);
                }
                statement = &value[end..];
            }
        }
        Ok(None)
    }
}

/// Where a value ends: at a comma that is in no brackets.
fn end_of_value(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign("(" | "{" | "[") => depth += 1,
            Token::Sign(")" | "}" | "]") => depth -= 1,
            Token::Sign(",") if depth == 0 => return at,
            _ => {}
        }
    }
    tokens.len()
}

/// Signs between two values, by how strongly they bind; the weakest first.
const LEVELS: [&[&str]; 7] =
    [&["||"], &["&&"], &["==", "!="], &["<", ">", "<=", ">="], &["<<", ">>"], &["+", "-"], &["*", "/", "%"]];

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    values: Values<'a>,
}

impl Parser<'_> {
    fn take(&mut self, sign: &str) -> bool {
        let there = self.tokens.get(self.at).is_some_and(|token| token.is(sign));
        self.at += usize::from(there);
        there
    }

    fn choice(&mut self) -> Result<i64, Fault> {
        let condition = self.level(0)?;
        if !self.take("?") {
            return Ok(condition);
        }
        let yes = self.choice()?;
        if !self.take(":") {
            return Err("a choice without its second value".to_owned());
        }
        let no = self.choice()?;
        Ok(if condition != 0 { yes } else { no })
    }

    fn level(&mut self, level: usize) -> Result<i64, Fault> {
        let Some(signs) = LEVELS.get(level) else { return self.single() };
        let mut left = self.level(level + 1)?;
        while let Some(sign) = signs.iter().find(|sign| self.take(sign)) {
            let right = self.level(level + 1)?;
            left = apply(sign, left, right).ok_or_else(|| format!("{left} {sign} {right} in a constant"))?;
        }
        Ok(left)
    }

    fn single(&mut self) -> Result<i64, Fault> {
        if self.take("!") {
            return Ok(i64::from(self.single()? == 0));
        }
        if self.take("-") {
            return Ok(-self.single()?);
        }
        if self.take("(") {
            let value = self.choice()?;
            return if self.take(")") { Ok(value) } else { Err("a bracket that does not close".to_owned()) };
        }
        let token = self.tokens.get(self.at).ok_or("a constant without a value")?;
        self.at += 1;
        match token {
            Token::Number(number) => Ok(*number),
            Token::Word(name) if name == "defined" => Err("defined() in a condition".to_owned()),
            Token::Word(name) => match self.values.named(name)? {
                Some(value) => Ok(value),
                None if self.values.text.is_empty() => Ok(0),
                None => Err(format!("{name} has no value in the kernel source")),
            },
            other => Err(format!("{other:?} in a constant")),
        }
    }
}

fn apply(sign: &str, left: i64, right: i64) -> Option<i64> {
    Some(match sign {
        "||" => i64::from(left != 0 || right != 0),
        "&&" => i64::from(left != 0 && right != 0),
        "==" => i64::from(left == right),
        "!=" => i64::from(left != right),
        "<" => i64::from(left < right),
        ">" => i64::from(left > right),
        "<=" => i64::from(left <= right),
        ">=" => i64::from(left >= right),
        "<<" => left.checked_shl(u32::try_from(right).ok()?)?,
        ">>" => left.checked_shr(u32::try_from(right).ok()?)?,
        "+" => left.checked_add(right)?,
        "-" => left.checked_sub(right)?,
        "*" => left.checked_mul(right)?,
        "/" => left.checked_div(right)?,
        _ => left.checked_rem(right)?,
    })
}
