//! Looking for markers in a text that is still growing.

/// Finds the first marker in a text: where it starts and which it is.
pub(super) fn find_first<'m>(text: &str, markers: &[&'m str]) -> Option<(usize, &'m str)> {
    let found = markers.iter().filter_map(|marker| Some((text.find(marker)?, *marker)));
    found.min_by_key(|&(start, _)| start)
}

/// The number of bytes at the end of a text that may be the beginning of a marker.
pub(super) fn held_back(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest.saturating_sub(1));
    let begins = |start: &usize| {
        let tail = &text.as_bytes()[*start..];
        markers.iter().any(|marker| marker.len() > tail.len() && marker.as_bytes().starts_with(tail))
    };
    // A marker's first byte is never inside a character, so neither is the start found here.
    (from..text.len()).find(begins).map_or(0, |start| text.len() - start)
}

/// What stands at the start of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The marker with this index.
    Marker(usize),
    /// The first part of a marker, and the text ends there.
    Partial,
    /// None of the markers.
    Other,
}

/// Compares the start of a text with markers.
pub(super) fn start_of(text: &str, markers: &[&str]) -> Start {
    if let Some(index) = markers.iter().position(|marker| text.starts_with(marker)) {
        return Start::Marker(index);
    }
    if markers.iter().any(|marker| marker.starts_with(text)) { Start::Partial } else { Start::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_become_a_marker_is_held_back() {
        let markers = ["<think>", "</think>"];
        assert_eq!(held_back("abc", &markers), 0);
        assert_eq!(held_back("abc<", &markers), 1);
        assert_eq!(held_back("abc<th", &markers), 3);
        assert_eq!(held_back("abc</think", &markers), 7);
        assert_eq!(held_back("abc<<", &markers), 1);
        assert_eq!(held_back("abc<tx", &markers), 0);
        assert_eq!(held_back("é◁", &["◁think▷"]), 3);
        assert_eq!(held_back("", &markers), 0);
    }

    #[test]
    fn the_first_marker_wins() {
        assert_eq!(find_first("a<b>c<d>", &["<d>", "<b>"]), Some((1, "<b>")));
        assert_eq!(find_first("abc", &["<d>"]), None);
        assert_eq!(start_of("<d>x", &["<b>", "<d>"]), Start::Marker(1));
        assert_eq!(start_of("<", &["<b>", "<d>"]), Start::Partial);
        assert_eq!(start_of("", &["<b>"]), Start::Partial);
        assert_eq!(start_of("<c", &["<b>"]), Start::Other);
    }
}
