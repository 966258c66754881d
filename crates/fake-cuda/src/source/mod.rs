//! Kernel sources as far as launches need them: macros, which parts of the text they leave, and the structs that kernels are given.
//!
//! This is no compiler. It reads the subset of C++ that the sources of `oscar-kernels` have where they describe memory, and says so
//! where it meets anything else.

mod numbers;
mod structs;
mod tokens;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use structs::{Field, FieldType, Layout};

use crate::memory::Fault;
use tokens::Token;

/// A source with its macros.
pub(crate) struct Source {
    /// The macros of the options, and those of the text.
    macros: HashMap<String, Vec<Token>>,
    tokens: Vec<Token>,
    layouts: Mutex<HashMap<String, Arc<Layout>>>,
}

impl Source {
    /// Reads a text with macros such as `HEAD_DIM=64`.
    pub(crate) fn new(text: &str, defines: &[(String, String)]) -> Result<Source, Fault> {
        let mut macros = HashMap::new();
        for (name, value) in defines {
            macros.insert(name.clone(), tokens::split(value)?);
        }
        let active = numbers::active_text(&tokens::without_comments(text), &mut macros)?;
        Ok(Source { macros, tokens: tokens::split(&active)?, layouts: Mutex::default() })
    }

    /// The value of a macro or of a constant of the text.
    pub(crate) fn number(&self, name: &str) -> Result<i64, Fault> {
        numbers::value_of(name, &self.macros, &self.tokens)
    }

    /// The structs that a kernel of this name is given; `None` if there is no such kernel.
    pub(crate) fn parameter(&self, kernel: &str) -> Result<Option<Arc<Layout>>, Fault> {
        match structs::parameter_of(&self.tokens, kernel) {
            Some(name) => self.layout(&name?).map(Some),
            None => Ok(None),
        }
    }

    /// The layout of the struct of this name, which the source defines.
    pub(crate) fn layout(&self, name: &str) -> Result<Arc<Layout>, Fault> {
        let known = self.layouts.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        if let Some(layout) = known {
            return Ok(layout);
        }
        let body =
            structs::body_of(&self.tokens, name).ok_or_else(|| format!("the source has no struct {name}"))?;
        let layout = Layout::of(name, body, &|inner| self.layout(inner), &|tokens| {
            numbers::evaluate(tokens, &self.macros, &self.tokens)
        })?;
        let layout = Arc::new(layout);
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        layouts.insert(name.to_owned(), layout.clone());
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        typedef unsigned char u8;  // a byte
        #define FLOATS 0
        constexpr int MOST = 2 + 1, ROWS = WIDE ? 8 * TILES : 1;
        /* struct Gone { int x; }; */
        struct Inner {
          const u8* tiles;
          int kind, rows;
        };
        #if KIND == FLOATS && TILES >= 4
        struct Choice { int wide; };
        #else
        struct Choice {
          float narrow;
          DEVICE float twice() const { if (narrow > 0) { return 2 * narrow; } return 0; }
          static constexpr int SIZE = 4;
        };
        #endif
        template <class T> struct Other { T x; };
        struct Arguments {
          Inner inner[MOST];
          float a[ROWS];
          const float *cos, *sin; // of angles
          long long stride;
          Choice choice;
          uint2 pair;
          double total;
        };
        extern "C" __global__ void __launch_bounds__(THREADS, MOST > 2 ? 2 : 1) run(const __grid_constant__ Arguments a) { }
        extern "C" __global__ void plain(Inner a) { }
    "#;

    fn source(tiles: &str) -> Source {
        let defines = [("KIND", "0"), ("TILES", tiles), ("WIDE", "1")];
        Source::new(TEXT, &defines.map(|(name, value)| (name.to_owned(), value.to_owned()))).unwrap()
    }

    #[test]
    fn fields_lie_where_a_compiler_puts_them() {
        let layout = source("2").parameter("run").unwrap().unwrap();
        let offset = |name: &str| layout.field(name).unwrap().offset;
        assert_eq!((offset("inner"), offset("inner[2].rows"), offset("a[3]")), (0, 44, 60));
        assert_eq!((offset("cos"), offset("sin"), offset("stride")), (112, 120, 128));
        assert_eq!((offset("choice.narrow"), offset("pair"), offset("total")), (136, 144, 152));
        assert_eq!(layout.bytes, 160);
        assert_eq!(layout.field("choice.narrow").unwrap().kind, FieldType::Float);
        for wrong in ["inner[3].rows", "cosine", "choice.wide", "stride.x"] {
            assert!(layout.field(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn macros_choose_between_parts_of_the_text() {
        let layout = source("4").layout("Choice").unwrap();
        assert_eq!(layout.field("wide").unwrap().kind, FieldType::Int);
        assert!(source("2").layout("Choice").unwrap().field("wide").is_err());
        assert_eq!((source("4").number("ROWS").unwrap(), source("4").number("KIND").unwrap()), (32, 0));
        assert!(source("4").number("MISSING").is_err());
    }

    #[test]
    fn kernels_are_known_by_name() {
        let source = source("1");
        assert_eq!(source.parameter("plain").unwrap().unwrap().bytes, 16);
        assert!(source.parameter("other").unwrap().is_none());
        assert!(source.layout("Gone").is_err() && source.layout("Other").is_err());
    }
}
