//! `--kv-tiers`: the precisions of history that requests may ask for.

use std::fmt;
use std::str::FromStr;

use oscar_rotations::CacheType;

use crate::failure::Failure;

/// A precision of history by its name in requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvTier(CacheType);

impl FromStr for KvTier {
    type Err = String;

    fn from_str(text: &str) -> Result<KvTier, String> {
        match text.parse() {
            _ if text == "high" => Err(
                "there is no tier of 4 bits beside another type; --kv-cache-dtype int4 serves all in 4 bits"
                    .to_owned(),
            ),
            Ok(CacheType::Auto) | Err(_) => Err("must be bf16 or the type of the cache".to_owned()),
            Ok(kind) => Ok(KvTier(kind)),
        }
    }
}

impl fmt::Display for KvTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether histories in bf16 are offered beside those of a cache of some type.
pub(super) fn offers_bf16(tiers: &[KvTier], kind: CacheType) -> Result<bool, Failure> {
    if let Some(other) = tiers.iter().find(|tier| tier.0 != kind && tier.0 != CacheType::Bf16) {
        return Err(Failure::new(format!(
            "--kv-tiers {other}: a cache of type {kind} has histories in {kind} or bf16"
        ))
        .with_fix(format!("give --kv-tiers {kind},bf16, or --kv-cache-dtype {other}")));
    }
    Ok(kind != CacheType::Bf16 && tiers.contains(&KvTier(CacheType::Bf16)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(list: &str, kind: CacheType) -> Result<bool, Failure> {
        let tiers: Vec<KvTier> =
            list.split(',').filter(|name| !name.is_empty()).map(|name| name.parse().unwrap()).collect();
        offers_bf16(&tiers, kind)
    }

    #[test]
    fn bf16_is_offered_beside_what_is_served() {
        assert!(!offers("", CacheType::Int2).unwrap() && !offers("int2", CacheType::Int2).unwrap());
        assert!(offers("int2,bf16", CacheType::Int2).unwrap() && offers("bf16", CacheType::Int4).unwrap());
        assert!(!offers("bf16", CacheType::Bf16).unwrap());
        let Err(Failure::Error { message, fix }) = offers("int4,bf16", CacheType::Int2) else {
            panic!("not refused")
        };
        assert!(message.contains("--kv-tiers int4") && fix.unwrap().contains("int2,bf16"), "{message}");
    }

    #[test]
    fn names_are_checked() {
        assert!("high".parse::<KvTier>().unwrap_err().contains("no tier of 4 bits"));
        assert!("auto".parse::<KvTier>().is_err() && "int3".parse::<KvTier>().is_err());
    }
}
