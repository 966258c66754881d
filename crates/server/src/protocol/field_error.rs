//! Fields of a body by name, and what is wrong with them.

use serde_json::Value;

/// The error of a field that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {problem}")]
pub(crate) struct FieldError {
    /// The path of the field, such as `tools[0].function.name`.
    pub(crate) field: String,
    /// What is wrong with its value.
    pub(crate) problem: String,
}

/// The value of a field that is there and not `null`.
pub(super) fn get<'v>(value: &'v Value, field: &str) -> Option<&'v Value> {
    value.get(field).filter(|value| !value.is_null())
}

/// The error of a field with this path.
pub(super) fn wrong(field: impl Into<String>, problem: impl Into<String>) -> FieldError {
    FieldError { field: field.into(), problem: problem.into() }
}
