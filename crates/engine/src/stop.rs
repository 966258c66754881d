//! Stop texts in a stream: what may still become one is held back.

/// Looks for stop texts in text that arrives piece by piece.
pub(crate) struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Filtered {
    /// Text that is certainly not part of a stop text.
    pub(crate) text: String,
    /// The stop text that came up; nothing after it counts.
    pub(crate) stopped: Option<String>,
}

impl StopFilter {
    pub(crate) fn new(stops: &[String]) -> StopFilter {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopFilter { stops, held: String::new() }
    }

    /// Takes the next piece of text and returns what can be shown of it.
    pub(crate) fn push(&mut self, piece: &str) -> Filtered {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((start, stop)) = found.min_by_key(|&(start, _)| start) {
            let (text, stopped) = (self.held[..start].to_owned(), Some(stop.clone()));
            self.held.clear();
            return Filtered { text, stopped };
        }
        let keep = self.longest_beginning();
        let text = self.held.drain(..self.held.len() - keep).collect();
        Filtered { text, stopped: None }
    }

    /// Text held back at the end of the stream.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that could begin a stop text.
    fn longest_beginning(&self) -> usize {
        let begins = |stop: &String| {
            (1..stop.len().min(self.held.len() + 1))
                .rev()
                .find(|&len| stop.is_char_boundary(len) && self.held.ends_with(&stop[..len]))
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds the text in pieces of every size and checks that the outcome does not depend on them.
    fn run(stops: &[&str], text: &str) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let mut outcomes = Vec::new();
        for size in 1..=chars.len().max(1) {
            let mut filter = StopFilter::new(&stops);
            let mut shown = String::new();
            let mut stopped = false;
            for piece in chars.chunks(size) {
                let filtered = filter.push(&piece.concat());
                shown.push_str(&filtered.text);
                if filtered.stopped.is_some() {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                shown.push_str(&filter.finish());
            }
            outcomes.push((shown, stopped));
        }
        outcomes.dedup();
        assert_eq!(outcomes.len(), 1, "{outcomes:?}");
        outcomes.remove(0)
    }

    #[test]
    fn stops_are_cut_wherever_pieces_end() {
        assert_eq!(run(&["\n\n"], "one\ntwo\n\nthree"), ("one\ntwo".into(), true));
        assert_eq!(run(&["END"], "an ENDing"), ("an ".into(), true));
        assert_eq!(run(&["END"], "an EN"), ("an EN".into(), false));
        assert_eq!(run(&["aab"], "aaab!"), ("a".into(), true));
        assert_eq!(run(&["é!", "ö"], "caféé!"), ("café".into(), true));
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(run(&["c", "bc"], "abcd"), ("a".into(), true));
        assert_eq!(run(&[], "abc"), ("abc".into(), false));
        assert_eq!(run(&[""], "abc"), ("abc".into(), false));
    }
}
