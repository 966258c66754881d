//! Complaints of the JSON library in words that a client's author knows: it names types of this program.

/// Types of this program after the word "expected", and what a client knows them as.
const TYPES: [(&str, &str); 12] = [
    ("u8", "a whole number of 0 or more"),
    ("u16", "a whole number of 0 or more"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", "a whole number of 0 or more"),
    ("usize", "a whole number of 0 or more"),
    ("i32", "a whole number"),
    ("i64", "a whole number"),
    ("f32", "a number"),
    ("f64", "a number"),
    ("a sequence", "a list"),
    ("a map", "an object"),
    ("a boolean", "true or false"),
];

/// What was found, as the library calls it.
const FOUND: [(&str, &str); 9] = [
    ("invalid type: ", "found "),
    ("invalid value: ", "found "),
    ("found string ", "found the text "),
    ("found integer ", "found "),
    ("found floating point ", "found "),
    ("found boolean ", "found "),
    ("found map", "found an object"),
    ("found sequence", "found a list"),
    ("found unit value", "found null"),
];

/// Puts a message of the JSON library into plain words. What it quotes of the client's values stays as it is.
pub(super) fn plain(message: &str) -> String {
    if message.contains("did not match any variant") {
        return "the value is of a kind that is not expected here".to_owned();
    }
    // The last one: a value that is quoted before it may contain the word.
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let (expected, place) = match expected.find(" at line ") {
        Some(at) => expected.split_at(at),
        None => (expected, ""),
    };
    let known = TYPES.iter().find(|(name, _)| *name == expected);
    let expected = match known {
        Some((_, words)) => words,
        None if is_type(expected) => "an object",
        None => expected,
    };
    let mut found = found.to_owned();
    for (theirs, ours) in FOUND {
        if let Some(rest) = found.strip_prefix(theirs) {
            found = format!("{ours}{rest}");
        }
    }
    format!("{found}, expected {expected}{place}")
}

/// Whether a name is that of a type of this program.
fn is_type(expected: &str) -> bool {
    ["struct ", "enum ", "internally tagged enum ", "tuple struct ", "variant "]
        .iter()
        .any(|kind| expected.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Inner {
        x: u32,
    }

    #[derive(Debug, Deserialize)]
    #[serde(untagged)]
    #[allow(dead_code)]
    enum Either {
        One(u32),
        Other(Inner),
    }

    fn told<T: for<'de> Deserialize<'de> + std::fmt::Debug>(json: &str) -> String {
        let error = serde_json::from_str::<T>(json).unwrap_err().to_string();
        let told = plain(&error);
        for word in
            ["struct", "Inner", "Either", "untagged", "variant", "f32", "u32", "i64", "sequence", "a map"]
        {
            assert!(!told.contains(word), "{told}");
        }
        told.split(" at line").next().unwrap().to_owned()
    }

    #[test]
    fn types_are_called_what_clients_call_them() {
        assert_eq!(told::<Inner>("\"yes\""), "found the text \"yes\", expected an object");
        assert_eq!(told::<Inner>("{\"x\": -1}"), "found `-1`, expected a whole number from 0 to 4294967295");
        assert_eq!(told::<f32>("\"hot\""), "found the text \"hot\", expected a number");
        assert_eq!(told::<f32>("true"), "found `true`, expected a number");
        assert_eq!(told::<i64>("1.5"), "found `1.5`, expected a whole number");
        assert_eq!(told::<bool>("{}"), "found an object, expected true or false");
        assert_eq!(told::<Vec<bool>>("5"), "found `5`, expected a list");
        assert_eq!(told::<HashMap<String, bool>>("[]"), "found a list, expected an object");
        assert_eq!(told::<String>("null"), "found null, expected a string");
        assert_eq!(told::<Either>("\"x\""), "the value is of a kind that is not expected here");
    }

    #[test]
    fn what_the_client_wrote_is_not_rewritten() {
        let odd = "a map, expected struct";
        let error = serde_json::from_str::<f32>(&format!("\"{odd}\"")).unwrap_err().to_string();
        assert!(plain(&error).starts_with(&format!("found the text \"{odd}\", expected a number")));
        assert_eq!(plain("missing field `tokens`"), "missing field `tokens`");
    }
}
