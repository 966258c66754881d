//! What keeps a hostile template from hanging the process or eating its memory.
//!
//! A template comes out of a downloaded file. Instruction fuel bounds how long it loops, but one instruction can
//! double a string, so everything that makes values out of values is charged by size to one budget per render:
//! the operators `+`, `*`, `~` and slicing (whose instructions are exchanged for calls into
//! [`super::operators`]), filters, string methods and printed output.

use std::sync::Arc;

use minijinja::machinery::{CompiledTemplate, Instruction};
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::marked::MarkedLiterals;
use super::operators::{add, concatenate, multiply, slice};
use super::python_format::python_str;
use super::render_budget::{ENTRY_BYTES, RenderBudget, deep_size};

// Names no template can write, so none can shadow or call them.
const ADD: &str = "operator +";
const MULTIPLY: &str = "operator *";
const CONCATENATE: &str = "operator ~";
const SLICE: &str = "operator [:]";

/// Instructions a template may run: real ones take a few hundred per message.
pub(super) fn fuel(longest_literal: usize, items: usize) -> u64 {
    // A literal is printed by one instruction, and inside `{% set %}` printing fills memory.
    let by_literal = (4_u64 << 30) / (longest_literal as u64).max(1);
    (2_000_000 + 2_000 * items as u64).min(10_000_000).min(by_literal.max(10_000))
}

/// Exchanges the growing operators for guarded calls and returns the longest literal.
///
/// Each operator takes its values from the stack and leaves one, just as a call does, so no jump target moves.
pub(super) fn guard_operators(template: &mut CompiledTemplate<'_>) -> usize {
    let mut longest = 0;
    for instructions in std::iter::once(&mut template.instructions).chain(template.blocks.values_mut()) {
        for index in 0..instructions.len() as u32 {
            let Some(instruction) = instructions.get_mut(index) else { continue };
            let (name, arguments) = match instruction {
                Instruction::Add => (ADD, 2),
                Instruction::Mul => (MULTIPLY, 2),
                Instruction::StringConcat => (CONCATENATE, 2),
                Instruction::Slice => (SLICE, 4),
                Instruction::EmitRaw(text) => {
                    longest = longest.max(text.len());
                    continue;
                }
                _ => continue,
            };
            *instruction = Instruction::CallFunction(name, Some(arguments));
        }
    }
    longest
}

/// Filters whose result can be larger than a machine word.
const CHARGED_FILTERS: [&str; 30] = [
    "lower",
    "upper",
    "title",
    "capitalize",
    "escape",
    "e",
    "dictsort",
    "items",
    "reverse",
    "trim",
    "split",
    "lines",
    "sort",
    "list",
    "batch",
    "slice",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "map",
    "groupby",
    "unique",
    "chain",
    "zip",
    "pprint",
    "replace",
    "join",
    "indent",
    "format",
];

/// Installs the guarded operators, filters and methods. `filters` holds the unguarded filters.
pub(super) fn install(
    environment: &mut Environment<'_>,
    filters: &Arc<Environment<'static>>,
    budget: &Arc<RenderBudget>,
    literals: Option<&MarkedLiterals>,
) {
    literals.iter().for_each(|literals| literals.install(environment, filters));
    let operator = |budget: &Arc<RenderBudget>,
                    apply: fn(&RenderBudget, &Value, &Value) -> Result<Value, Error>| {
        let budget = Arc::clone(budget);
        move |left: &Value, right: &Value| apply(&budget, left, right)
    };
    environment.add_function(ADD, operator(budget, add));
    environment.add_function(MULTIPLY, operator(budget, multiply));
    environment.add_function(CONCATENATE, operator(budget, concatenate));
    let slices = Arc::clone(budget);
    environment.add_function(SLICE, move |value: &Value, start: &Value, stop: &Value, step: &Value| {
        slice(&slices, value, start, stop, step)
    });

    for name in CHARGED_FILTERS {
        let (budget, filters, literals) = (Arc::clone(budget), Arc::clone(filters), literals.cloned());
        environment.add_filter(name, move |mut arguments: Rest<Value>| {
            literals.iter().for_each(|literals| literals.unmark_needles(name, &mut arguments));
            budget.charge(result_size(name, &arguments))?;
            as_python_text(name, &mut arguments)?;
            filters.empty_state().apply_filter(name, &arguments)
        });
    }

    let (budget, literals) = (Arc::clone(budget), literals.cloned());
    environment.set_unknown_method_callback(
        move |state: &State, value: &Value, method: &str, arguments: &[Value]| {
            let call = minijinja_contrib::pycompat::unknown_method_callback;
            if value.kind() != ValueKind::String {
                return call(state, value, method, arguments);
            }
            let mut all = Vec::with_capacity(arguments.len() + 1);
            all.push(value.clone());
            all.extend_from_slice(arguments);
            literals.iter().for_each(|literals| literals.unmark_needles(method, &mut all));
            let size = match &all[..] {
                [separator, list] if method == "join" => {
                    result_size(method, &[list.clone(), separator.clone()])
                }
                all => result_size(method, all),
            };
            budget.charge(size)?;
            call(state, &all[0], method, &all[1..])
        },
    );
}

/// Filters on text take any value in Python, as `str()` writes it.
fn as_python_text(name: &str, arguments: &mut [Value]) -> Result<(), Error> {
    let has_attribute = arguments.iter().any(Value::is_kwargs);
    let Some(first) = arguments.first_mut() else { return Ok(()) };
    match name {
        "trim" | "lower" | "upper" | "title" | "capitalize" | "replace" if first.as_str().is_none() => {
            *first = Value::from(python_str(first)?);
        }
        "join" if first.as_str().is_none() && !has_attribute => {
            let texts: Result<Vec<String>, Error> = first.try_iter()?.map(|item| python_str(&item)).collect();
            *first = Value::from(texts?);
        }
        _ => {}
    }
    Ok(())
}

/// An upper bound on what a filter or method makes of its arguments.
fn result_size(name: &str, arguments: &[Value]) -> u64 {
    let size: u64 = arguments.iter().map(|argument| deep_size(argument, 0)).fold(0, u64::saturating_add);
    let length = |index: usize| {
        arguments.get(index).and_then(Value::as_str).map_or(ENTRY_BYTES, |text| text.len() as u64)
    };
    match name {
        // An empty needle matches between any two characters.
        "replace" => {
            let needle = length(1).max(1);
            let matches = if length(1) == 0 { length(0) + 1 } else { length(0) / needle };
            size.saturating_add(matches.saturating_mul(length(2)))
        }
        "join" => {
            let entries = arguments.first().and_then(Value::len).unwrap_or(0) as u64;
            size.saturating_add(entries.saturating_mul(length(1)))
        }
        "indent" => {
            let width = arguments.get(1).and_then(|width| u64::try_from(width.clone()).ok()).unwrap_or(4);
            size.saturating_add(size.saturating_mul(width.max(length(1))))
        }
        // Every run of digits in the pattern may be a width.
        "format" => size.saturating_add(widths(arguments.first().and_then(Value::as_str).unwrap_or(""))),
        "list" | "split" | "lines" | "splitlines" | "batch" | "slice" | "reverse" => {
            size.saturating_mul(ENTRY_BYTES)
        }
        _ => size,
    }
}

fn widths(pattern: &str) -> u64 {
    pattern
        .split(|character: char| !character.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(u64::MAX))
        .fold(0, u64::saturating_add)
}
