//! Fields that have two names, of which a request may have both, and those that limit others.

use std::fmt::Display;

use crate::protocol::ApiError;

/// The value of a field with two names. Where both are there they must agree, unless one of them asks for nothing.
pub(crate) fn either<T: PartialEq + Display>(
    (name, value): (&str, Option<T>),
    (other_name, other): (&str, Option<T>),
    asks_nothing: impl Fn(&T) -> bool,
) -> Result<Option<T>, ApiError> {
    match (value, other) {
        (Some(value), Some(other)) if value != other && !asks_nothing(&value) && !asks_nothing(&other) => {
            let short = |value: &T| value.to_string().chars().take(80).collect::<String>();
            let (value, other) = (short(&value), short(&other));
            let message = format!("{name} is {value} and {other_name} is {other}; send one of them");
            Err(ApiError::bad_field(name, message))
        }
        (Some(value), Some(other)) => Ok(Some(if asks_nothing(&value) { other } else { value })),
        (value, other) => Ok(value.or(other)),
    }
}

/// The penalties of tokens (of repetition, presence and frequency) where a request has llama.cpp's `repeat_last_n`: they
/// count in the last tokens only, which is not there, or in none of them where that is 0.
pub(crate) fn penalties(given: [Option<f32>; 3], last: Option<i64>) -> Result<[Option<f32>; 3], ApiError> {
    const OFF: [Option<f32>; 3] = [Some(1.0), Some(0.0), Some(0.0)];
    if last == Some(0) {
        // Said, because the model may have a penalty of its own.
        return Ok(OFF);
    }
    let some = given.iter().zip(OFF).any(|(penalty, off)| penalty.is_some() && *penalty != off);
    if some && last.is_some_and(|count| count > 0) {
        let message = "repeat_last_n: penalties are on the whole text; send -1 or nothing";
        return Err(ApiError::unsupported("repeat_last_n", message));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_must_agree_unless_one_asks_for_nothing() {
        let read = |one, other| either(("a", one), ("b", other), |value| *value == 1.0);
        assert_eq!(read(None, None), Ok(None));
        assert_eq!(read(Some(0.5), None), Ok(Some(0.5)));
        assert_eq!(read(None, Some(0.5)), Ok(Some(0.5)));
        assert_eq!(read(Some(0.5), Some(0.5)), Ok(Some(0.5)));
        assert_eq!(read(Some(1.0), Some(0.5)), Ok(Some(0.5)));
        assert_eq!(read(Some(0.5), Some(1.0)), Ok(Some(0.5)));
        let error = read(Some(0.5), Some(0.75)).unwrap_err();
        assert_eq!(error.to_string(), "a is 0.5 and b is 0.75; send one of them");
    }

    #[test]
    fn penalties_are_on_the_whole_text_or_off() {
        let all = [Some(1.5), Some(0.5), Some(0.25)];
        let (none, off) = ([None; 3], [Some(1.0), Some(0.0), Some(0.0)]);
        for same in [none, off, all] {
            assert_eq!(penalties(same, None), Ok(same));
            assert_eq!(penalties(same, Some(-1)), Ok(same));
            assert_eq!(penalties(same, Some(0)), Ok(off));
        }
        assert_eq!(penalties(off, Some(64)), Ok(off));
        assert_eq!(penalties(none, Some(64)), Ok(none));
        for one in 0..3 {
            let mut some = off;
            some[one] = all[one];
            assert_eq!(penalties(some, Some(64)).unwrap_err().param(), Some("repeat_last_n"));
        }
    }
}
