//! The operators of a template that make new values, with Python's meaning and charged to the render's budget.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::python_format::python_str;
use super::render_budget::{ENTRY_BYTES, RenderBudget, deep_size};

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn unsupported(operator: &str, left: &Value, right: &Value) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("unsupported operand types for {operator}: {} and {}", left.kind(), right.kind()),
    )
}

/// `left + right` of texts, lists or numbers.
pub(super) fn add(budget: &RenderBudget, left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(left_text), Some(right_text)) = (left.as_str(), right.as_str()) {
        budget.charge(left_text.len() as u64 + right_text.len() as u64)?;
        // Text marked `safe` escapes what is added to it; a few templates do this, and models know the result.
        return Ok(match (left.is_safe(), right.is_safe()) {
            (false, false) => Value::from([left_text, right_text].concat()),
            (true, false) => Value::from_safe_string([left_text, &escape(right_text)].concat()),
            (false, true) => Value::from_safe_string([&escape(left_text), right_text].concat()),
            (true, true) => Value::from_safe_string([left_text, right_text].concat()),
        });
    }
    if is_list(left) && is_list(right) {
        let kept = left.len().unwrap_or(0) as u64;
        budget.charge(kept.saturating_mul(ENTRY_BYTES).saturating_add(deep_size(right, 0)))?;
        return Ok(Value::from_iter(left.try_iter()?.chain(right.try_iter()?)));
    }
    number(left, right, i128::checked_add, |a, b| a + b).ok_or_else(|| unsupported("+", left, right))
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(character),
        }
    }
    out
}

/// `left * right` of numbers, or of a text or list and a count.
pub(super) fn multiply(budget: &RenderBudget, left: &Value, right: &Value) -> Result<Value, Error> {
    for (value, count) in [(left, right), (right, left)] {
        if value.as_str().is_none() && !is_list(value) {
            continue;
        }
        // A negative count repeats nothing.
        let Ok(count) = i64::try_from(count.clone()) else { return Err(unsupported("*", left, right)) };
        let count = u64::try_from(count).unwrap_or(0);
        budget.charge(deep_size(value, 0).saturating_mul(count))?;
        let times = usize::try_from(count).map_err(|_| unsupported("*", left, right))?;
        if let Some(text) = value.as_str() {
            return Ok(Value::from(text.repeat(times)));
        }
        let items: Vec<Value> = value.try_iter()?.collect();
        return Ok(std::iter::repeat_n(items, times).flatten().collect());
    }
    number(left, right, i128::checked_mul, |a, b| a * b).ok_or_else(|| unsupported("*", left, right))
}

/// `left ~ right`: both as text.
pub(super) fn concatenate(budget: &RenderBudget, left: &Value, right: &Value) -> Result<Value, Error> {
    budget.charge(deep_size(left, 0).saturating_add(deep_size(right, 0)))?;
    let mut text = python_str(left)?;
    text.push_str(&python_str(right)?);
    Ok(Value::from(text))
}

fn number(
    left: &Value,
    right: &Value,
    whole: fn(i128, i128) -> Option<i128>,
    real: fn(f64, f64) -> f64,
) -> Option<Value> {
    let numeric = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !numeric(left) || !numeric(right) {
        return None;
    }
    let is_whole = |value: &Value| value.kind() == ValueKind::Bool || value.is_integer();
    if is_whole(left) && is_whole(right) {
        let result = whole(i128::try_from(left.clone()).ok()?, i128::try_from(right.clone()).ok()?)?;
        return Some(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    Some(Value::from(real(f64::try_from(left.clone()).ok()?, f64::try_from(right.clone()).ok()?)))
}

/// `value[start:stop:step]` of a text or list.
pub(super) fn slice(
    budget: &RenderBudget,
    value: &Value,
    start: &Value,
    stop: &Value,
    step: &Value,
) -> Result<Value, Error> {
    let bound = |bound: &Value| -> Result<Option<i64>, Error> {
        if bound.is_none() { Ok(None) } else { i64::try_from(bound.clone()).map(Some) }
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "slice step cannot be zero"));
    }
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if let Some(text) = value.as_str() {
        // Characters are gathered first, four bytes each.
        budget.charge(4 * text.len() as u64)?;
        let characters: Vec<char> = text.chars().collect();
        let picked = indices(characters.len(), start, stop, step).map(|index| characters[index]);
        return Ok(Value::from(picked.collect::<String>()));
    }
    if is_list(value) {
        budget.charge(ENTRY_BYTES * (1 + value.len().unwrap_or(0) as u64))?;
        let items: Vec<Value> = value.try_iter()?.collect();
        return Ok(indices(items.len(), start, stop, step).map(|index| items[index].clone()).collect());
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("a value of type {} cannot be sliced", value.kind())))
}

/// The positions a slice picks out of `length` items, each below `length`.
fn indices(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    // Going backwards, the last position is before the first item.
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: i64| {
        let from_start = if bound < 0 { bound.saturating_add(length) } else { bound };
        from_start.clamp(lowest, highest)
    };
    let first = start.map_or(if step > 0 { lowest } else { highest }, place);
    let end = stop.map_or(if step > 0 { highest } else { lowest }, place);
    std::iter::successors(Some(first), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < end } else { *at > end })
        .map(|at| at as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_pick_what_python_picks() {
        let pick = |length, start, stop, step| indices(length, start, stop, step).collect::<Vec<_>>();
        // Expected positions from Python's range(n)[start:stop:step].
        assert_eq!(pick(5, None, None, 1), [0, 1, 2, 3, 4]);
        assert_eq!(pick(5, None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(pick(0, None, None, -1), [0; 0]);
        assert_eq!(pick(5, Some(1), Some(-1), 2), [1, 3]);
        assert_eq!(pick(5, Some(-2), None, 1), [3, 4]);
        assert_eq!(pick(5, Some(-99), Some(99), 3), [0, 3]);
        assert_eq!(pick(5, Some(3), Some(0), -2), [3, 1]);
        assert_eq!(pick(5, Some(99), Some(-99), -3), [4, 1]);
        assert_eq!(pick(5, Some(4), Some(2), 1), [0; 0]);
        assert_eq!(pick(5, Some(1), None, i64::MAX), [1]);
        assert_eq!(pick(5, Some(1), None, i64::MIN), [1]);
    }
}
