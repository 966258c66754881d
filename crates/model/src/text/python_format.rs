//! Values written the way Python writes them: `str()`, `repr()` and `json.dumps()`.
//!
//! Templates are trained on text that Python produced, so `True`, `1e+16` and `", "` between JSON items are part
//! of a model's prompt format.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deeper values are refused rather than recursed into.
const MAX_DEPTH: usize = 128;

/// `str(value)`; undefined values print as nothing.
pub(super) fn python_str(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        _ => {
            let mut out = String::new();
            write_repr(value, 0, &mut out)?;
            Ok(out)
        }
    }
}

fn write_repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value, "inf", "nan")),
        ValueKind::String => write_string_repr(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, depth + 1, out)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn write_string_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => {
                out.push('\\');
                out.push(quote);
            }
            _ if character.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}

fn number(value: &Value, infinity: &str, nan: &str) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if float.is_nan() {
        return nan.to_owned();
    }
    if float.is_infinite() {
        return format!("{}{infinity}", if float < 0.0 { "-" } else { "" });
    }
    // Both languages print the shortest digits that round-trip; only the layout differs.
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific.as_str(), "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// Options of `json.dumps` that templates use.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, kwargs: &Kwargs) -> Result<String, Error> {
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let indent: Option<Value> = kwargs.get("indent")?;
    let separators: Option<Value> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;

    let indent = match indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => {
            let width = i64::try_from(width)?;
            if width > 64 {
                return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent above 64"));
            }
            Some(" ".repeat(usize::try_from(width).unwrap_or(0)))
        }
    };
    let (mut item_separator, mut key_separator) = (", ".to_owned(), ": ".to_owned());
    if indent.is_some() {
        item_separator = ",".to_owned();
    }
    if let Some(pair) = separators.filter(|pair| !pair.is_none() && !pair.is_undefined()) {
        let parts: Vec<Value> = pair.try_iter()?.collect();
        let [item, key] = parts.as_slice() else {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"));
        };
        item_separator = item.to_string();
        key_separator = key.to_string();
    }
    let style = JsonStyle {
        ensure_ascii: ensure_ascii.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: sort_keys.unwrap_or(false),
    };
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out)
}

impl JsonStyle {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, "Infinity", "NaN")),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.begin_item(empty, depth + 1, out);
                    empty = false;
                    self.write(&item, depth + 1, out)?;
                }
                self.end_items(empty, depth, out);
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                let empty = keys.is_empty();
                for (index, key) in keys.iter().enumerate() {
                    self.begin_item(index == 0, depth + 1, out);
                    self.write_key(key, out)?;
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)?;
                }
                self.end_items(empty, depth, out);
                out.push('}');
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value of type {other} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn begin_item(&self, first: bool, depth: usize, out: &mut String) {
        if !first {
            out.push_str(&self.item_separator);
        }
        self.new_line(depth, out);
    }

    fn end_items(&self, empty: bool, depth: usize, out: &mut String) {
        if !empty {
            self.new_line(depth, out);
        }
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.write_string(key.as_str().unwrap_or_default(), out),
            ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                let mut text = String::new();
                self.write(key, 0, &mut text)?;
                self.write_string(&text, out);
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: keys must be strings, not {other}"),
                ));
            }
        }
        Ok(())
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if character < ' ' || (self.ensure_ascii && !(' '..='~').contains(&character)) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a value is nested more than {MAX_DEPTH} levels deep"),
        ));
    }
    Ok(())
}
