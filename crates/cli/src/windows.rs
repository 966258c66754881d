//! What stays exact: tokens at the start and at the end of a sequence.

use clap::Args;
use oscar_codec::{PAGE_TOKENS, PageWindows, Windows};

use crate::failure::Failure;
use crate::sglang_variables::SglangVariables;

/// The windows at both ends of a sequence that a codec leaves exact.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct WindowArguments {
    /// Tokens at the start that are read exactly [default: 64].
    #[arg(long, value_name = "TOKENS")]
    sink_tokens: Option<usize>,

    /// Tokens before a query, itself included, that are read exactly [default: 256].
    #[arg(long, value_name = "TOKENS")]
    recent_tokens: Option<usize>,
}

impl WindowArguments {
    /// The windows in tokens, with defaults where nothing was given: what the lab measures with.
    pub(crate) fn windows(&self) -> Windows {
        let Windows { sink, recent } = Windows::default();
        Windows { sink: self.sink_tokens.unwrap_or(sink), recent: self.recent_tokens.unwrap_or(recent) }
    }

    /// The windows of a served cache, which are whole pages.
    pub(crate) fn whole_pages(&self) -> Result<GivenWindows, Failure> {
        for (name, given) in [("--sink-tokens", self.sink_tokens), ("--recent-tokens", self.recent_tokens)] {
            if let Some(tokens) = given {
                check_whole_pages(tokens).map_err(|problem| {
                    Failure::new(format!("{name} {tokens} with --kv-cache-dtype: {problem}"))
                })?;
            }
        }
        Ok(GivenWindows { sink: self.sink_tokens, recent: self.recent_tokens })
    }
}

/// Windows in tokens, as far as they were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenWindows {
    pub(crate) sink: Option<usize>,
    pub(crate) recent: Option<usize>,
}

impl GivenWindows {
    /// The windows in whole pages. Where an option was not given, the variables of the environment count, and then the
    /// defaults.
    pub(crate) fn pages(self, variables: &SglangVariables) -> PageWindows {
        let pages = |given: Option<usize>, variable: Option<usize>, default: usize| {
            given.or(variable).unwrap_or(default).div_ceil(PAGE_TOKENS)
        };
        PageWindows {
            sink: pages(self.sink, variables.sink_tokens, 64),
            recent: pages(self.recent, variables.recent_tokens, 256),
        }
    }
}

/// A number of tokens that is a whole number of pages.
pub(crate) fn whole_pages(text: &str) -> Result<usize, String> {
    let tokens = text.parse::<usize>().map_err(|error| error.to_string())?;
    check_whole_pages(tokens).map(|()| tokens)
}

/// Whether a window is a whole number of pages, or which ones are near.
fn check_whole_pages(tokens: usize) -> Result<(), String> {
    if tokens.is_multiple_of(PAGE_TOKENS) {
        return Ok(());
    }
    let below = tokens / PAGE_TOKENS * PAGE_TOKENS;
    Err(format!("windows are counted in pages of {PAGE_TOKENS}: {below} or {}", below + PAGE_TOKENS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_pages() {
        assert_eq!(whole_pages("0"), Ok(0));
        assert_eq!(whole_pages("256"), Ok(256));
        assert!(whole_pages("100").unwrap_err().contains("64 or 128"));
        assert!(whole_pages("-1").is_err() && whole_pages("many").is_err());
    }
}
