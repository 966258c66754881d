//! Text of a result file that is safe inside a page.

/// A text without line breaks and without control characters, which XML forbids.
pub(super) fn printable(text: &str) -> String {
    let shown = |letter: char| match letter {
        '\n' | '\t' | '\r' => ' ',
        control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => '\u{fffd}',
        plain => plain,
    };
    text.chars().map(shown).collect()
}

/// Text that is safe between tags and inside quotes.
pub(super) fn escape(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(
            escape("<script>\"a\" & 'b'</script>"),
            "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/script&gt;"
        );
        assert_eq!(escape("a\nb\u{1b}[0m\u{0}"), "a b\u{fffd}[0m\u{fffd}");
        assert_eq!(escape("schön 日本"), "schön 日本");
    }
}
