//! Structs of kernel sources: where each field lies, by the rules of C.

use std::sync::Arc;

use super::tokens::{Token, after_closing};
use crate::memory::Fault;

/// What a field holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FieldType {
    Pointer,
    /// 32 bits, with or without a sign.
    Int,
    /// 64 bits, with or without a sign.
    Long,
    Float,
    Double,
    /// So many bytes of another kind.
    Plain(usize),
    Struct(Arc<Layout>),
}

/// A field of a struct.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) offset: usize,
    pub(crate) kind: FieldType,
    /// How many of them lie side by side.
    pub(crate) count: usize,
}

/// The layout of a struct: the offset, kind and count of each field.
#[derive(Debug, PartialEq)]
pub(crate) struct Layout {
    name: String,
    fields: Vec<Field>,
    pub(crate) bytes: usize,
    alignment: usize,
}

impl FieldType {
    fn bytes(&self) -> usize {
        match self {
            FieldType::Pointer | FieldType::Long | FieldType::Double => 8,
            FieldType::Int | FieldType::Float => 4,
            FieldType::Plain(bytes) => *bytes,
            FieldType::Struct(layout) => layout.bytes,
        }
    }

    fn alignment(&self) -> usize {
        match self {
            FieldType::Struct(layout) => layout.alignment,
            other => other.bytes(),
        }
    }

    /// The types that the sources know without defining them.
    fn named(words: &[&str]) -> Option<FieldType> {
        Some(match words {
            ["int" | "u32"] => FieldType::Int,
            ["long", "long"] | ["u64"] => FieldType::Long,
            ["float"] => FieldType::Float,
            ["double"] => FieldType::Double,
            ["u8"] => FieldType::Plain(1),
            ["u16"] => FieldType::Plain(2),
            ["int2" | "uint2" | "float2"] => FieldType::Plain(8),
            ["int4" | "uint4" | "float4"] => FieldType::Plain(16),
            _ => return None,
        })
    }
}

impl Layout {
    /// The layout of a struct with this body. `inner` finds other structs, `value` the lengths of arrays.
    pub(super) fn of(
        name: &str,
        body: &[Token],
        inner: &dyn Fn(&str) -> Result<Arc<Layout>, Fault>,
        value: &dyn Fn(&[Token]) -> Result<i64, Fault>,
    ) -> Result<Layout, Fault> {
        let mut layout = Layout { name: name.to_owned(), fields: Vec::new(), bytes: 0, alignment: 1 };
        let mut at = 0;
        while at < body.len() {
            let (member, next) = member_of(body, at);
            at = next;
            if let Some(member) = member {
                layout.add(member, inner, value)?;
            }
        }
        layout.bytes = layout.bytes.next_multiple_of(layout.alignment);
        Ok(layout)
    }

    /// Adds the fields of a declaration, such as `const float *cos, *sin`.
    fn add(
        &mut self,
        declaration: &[Token],
        inner: &dyn Fn(&str) -> Result<Arc<Layout>, Fault>,
        value: &dyn Fn(&[Token]) -> Result<i64, Fault>,
    ) -> Result<(), Fault> {
        let words: Vec<&str> =
            declaration.iter().map_while(Token::word).filter(|word| *word != "const").collect();
        let pointer_follows =
            declaration.iter().find(|token| token.word().is_none()).is_some_and(|token| token.is("*"));
        // The last word before a comma is a name, unless a star stands between type and name.
        let type_words = if pointer_follows { &words[..] } else { &words[..words.len().saturating_sub(1)] };
        let constants = declaration.iter().take_while(|token| token.is_word("const")).count();
        let known = FieldType::named(type_words);
        for part in declaration[constants + type_words.len()..].split(|token| token.is(",")) {
            let is_pointer = part.iter().any(|token| token.is("*"));
            let name = part.iter().rev().find_map(|token| match token {
                Token::Word(word) if !part_of_length(part, token) => Some(word.clone()),
                _ => None,
            });
            let Some(name) = name else { return Err(format!("a field without a name in {}", self.name)) };
            let kind = match (is_pointer, &known, type_words) {
                (true, _, _) => FieldType::Pointer,
                (false, Some(kind), _) => kind.clone(),
                (false, None, [of]) => FieldType::Struct(inner(of)?),
                (false, None, other) => return Err(format!("a field of type {other:?} in {}", self.name)),
            };
            let count = match part.iter().position(|token| token.is("[")) {
                Some(open) => {
                    let length = value(&part[open + 1..after_closing(part, open) - 1])?;
                    usize::try_from(length).map_err(|_| format!("{length} of {name} in {}", self.name))?
                }
                None => 1,
            };
            let offset = self.bytes.next_multiple_of(kind.alignment());
            self.alignment = self.alignment.max(kind.alignment());
            self.bytes = offset + count * kind.bytes();
            self.fields.push(Field { name, offset, kind, count });
        }
        Ok(())
    }

    /// A field by its name, such as `source.x` or `matrices[1].tiles`.
    pub(crate) fn field(&self, path: &str) -> Result<Field, Fault> {
        let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
        let (name, index) = match first.strip_suffix(']').and_then(|inside| inside.split_once('[')) {
            Some((name, index)) => (name, index.parse().unwrap_or(usize::MAX)),
            None => (first, 0),
        };
        let missing = || format!("the source has no {path} in {}", self.name);
        let field = self.fields.iter().find(|field| field.name == name).ok_or_else(missing)?;
        if index >= field.count {
            return Err(missing());
        }
        let offset = field.offset + index * field.kind.bytes();
        match (rest, &field.kind) {
            (None, kind) => {
                Ok(Field { name: path.to_owned(), offset, kind: kind.clone(), count: field.count - index })
            }
            (Some(rest), FieldType::Struct(layout)) => {
                let inner = layout.field(rest)?;
                Ok(Field { offset: offset + inner.offset, ..inner })
            }
            (Some(_), _) => Err(missing()),
        }
    }
}

/// Whether a word belongs to the length of an array.
fn part_of_length(part: &[Token], word: &Token) -> bool {
    let open = part.iter().position(|token| token.is("[")).unwrap_or(part.len());
    let at = part.iter().position(|token| std::ptr::eq(token, word)).unwrap_or(0);
    at > open
}

/// The declaration of fields that begins at `at`, if it is one, and where the next member begins.
fn member_of(body: &[Token], at: usize) -> (Option<&[Token]>, usize) {
    let mut end = at;
    while end < body.len() && !body[end].is(";") {
        if body[end].is("{") {
            // A function, or a struct inside of this one; what follows a struct is its semicolon.
            let after = after_closing(body, end);
            return (None, after + usize::from(body.get(after).is_some_and(|token| token.is(";"))));
        }
        end = match &body[end] {
            Token::Sign("(" | "[") => after_closing(body, end),
            _ => end + 1,
        };
    }
    let member = &body[at..end];
    let counts = !member.is_empty()
        && !member.iter().any(|token| token.is("(") || token.is_word("static") || token.is_word("typedef"));
    // Initial values do not matter.
    let declared = member.split(|token| token.is("=")).next().unwrap_or(member);
    (counts.then_some(declared), end + 1)
}

/// What lies between the braces of a struct that is no template.
pub(super) fn body_of<'a>(tokens: &'a [Token], name: &str) -> Option<&'a [Token]> {
    (0..tokens.len()).find_map(|at| {
        let [structure, named, open] = tokens.get(at..at + 3)? else { return None };
        let template = at > 0 && tokens[at - 1].is(">");
        let found = structure.is_word("struct") && named.is_word(name) && open.is("{") && !template;
        found.then(|| &tokens[at + 3..after_closing(tokens, at + 2) - 1])
    })
}

/// The struct that a kernel takes; `None` if there is no such kernel.
pub(super) fn parameter_of(tokens: &[Token], kernel: &str) -> Option<Result<String, Fault>> {
    for (at, _) in tokens.iter().enumerate().filter(|(_, token)| token.is_word("__global__")) {
        let mut next = at + 1;
        while let Some(token) = tokens.get(next) {
            if token.is_word("__launch_bounds__") {
                next = after_closing(tokens, next + 1);
                continue;
            }
            if tokens.get(next + 1).is_some_and(|after| after.is("(")) {
                if !token.is_word(kernel) {
                    break;
                }
                let parameters = &tokens[next + 2..after_closing(tokens, next + 1) - 1];
                let words: Vec<&str> = parameters
                    .iter()
                    .filter_map(Token::word)
                    .filter(|word| !["const", "__grid_constant__"].contains(word))
                    .collect();
                return Some(match (words.as_slice(), parameters.iter().any(|token| token.is(","))) {
                    ([of, _], false) => Ok((*of).to_owned()),
                    _ => Err(format!("kernel {kernel} does not take one struct")),
                });
            }
            next += 1;
        }
    }
    None
}
