//! Caches in lists of what is measured: a type, and for `int2` its encoder.

use std::str::FromStr;

use clap::ValueEnum;
use oscar_rotations::CacheType;

use super::{CacheArguments, EncoderChoice};

/// A cache as lists name it: `bf16`, `int2`, `int2:scalar`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheSpec {
    /// The type of the cache.
    pub(crate) kind: CacheType,
    /// How 2-bit codes are chosen; as `--kv-encoder` says if the list does not.
    encoder: Option<EncoderChoice>,
}

impl FromStr for CacheSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheSpec, String> {
        let Some((kind, encoder)) = text.split_once(':') else {
            return Ok(CacheSpec { kind: text.parse()?, encoder: None });
        };
        let kind: CacheType = kind.parse()?;
        let encoder = EncoderChoice::from_str(encoder, false).ok().filter(|_| kind == CacheType::Int2);
        let Some(encoder) = encoder else {
            return Err("has no such encoder: there are int2:band, int2:scalar and int2:paper".to_owned());
        };
        Ok(CacheSpec { kind, encoder: Some(encoder) })
    }
}

impl CacheArguments {
    /// The same settings with the encoder of a list's entry, if it names one.
    pub(crate) fn of_spec(&self, spec: CacheSpec) -> CacheArguments {
        CacheArguments { kv_encoder: spec.encoder.or(self.kv_encoder), ..self.clone() }
    }
}

/// The types of a list, for messages about all of them.
pub(crate) fn type_names(specs: &[CacheSpec]) -> String {
    specs.iter().map(|spec| spec.kind.name()).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoders_belong_to_int2() {
        for kind in CacheType::ALL {
            assert_eq!(kind.name().parse(), Ok(CacheSpec { kind, encoder: None }));
        }
        let scalar = CacheSpec { kind: CacheType::Int2, encoder: Some(EncoderChoice::Scalar) };
        assert_eq!("int2:scalar".parse(), Ok(scalar));
        for bad in ["int2:", "int2:best", "int2:scalar+rule=search", "int4:scalar", ":scalar", "int3"] {
            assert!(bad.parse::<CacheSpec>().is_err(), "{bad}");
        }
    }
}
