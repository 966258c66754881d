//! `--kv-tiers`: the precisions of history that requests may choose.

use std::fmt;
use std::str::FromStr;

use oscar_engine::KvOptions;
use oscar_rotations::CacheType;

use crate::failure::Failure;

/// A precision of history by its name in requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvTier {
    /// The type of the cache, or bf16 beside it.
    Type(CacheType),
    /// About four bits in the basis of `int2`.
    High,
}

impl FromStr for KvTier {
    type Err = String;

    fn from_str(text: &str) -> Result<KvTier, String> {
        match text.parse() {
            _ if text == "high" => Ok(KvTier::High),
            Ok(CacheType::Auto) | Err(_) => Err("must be bf16, high or the type of the cache".to_owned()),
            Ok(kind) => Ok(KvTier::Type(kind)),
        }
    }
}

impl fmt::Display for KvTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvTier::Type(kind) => kind.fmt(f),
            KvTier::High => f.write_str("high"),
        }
    }
}

/// Has a cache of some type offer these tiers.
pub(super) fn offer(tiers: &[KvTier], kind: CacheType, kv: &mut KvOptions) -> Result<(), Failure> {
    for tier in tiers {
        match *tier {
            KvTier::Type(other) if other == kind => {}
            KvTier::Type(CacheType::Bf16) => kv.bf16_tier = true,
            KvTier::High if kind == CacheType::Int2 => kv.high_tier = true,
            KvTier::High => {
                return Err(Failure::new(format!(
                    "--kv-tiers high: a cache of type {kind} has no tier of more bits in its own basis"
                ))
                .with_fix("give --kv-cache-dtype int2, or leave it out"));
            }
            KvTier::Type(other) => {
                return Err(Failure::new(format!(
                    "--kv-tiers {other}: a cache of type {kind} has histories in {kind} or bf16, and int2 in high"
                ))
                .with_fix(format!("give --kv-tiers bf16, or --kv-cache-dtype {other}")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the high tier and bf16 are offered.
    fn offers(list: &str, kind: CacheType) -> Result<(bool, bool), (String, String)> {
        let names = list.split(',').filter(|name| !name.is_empty());
        let tiers: Vec<KvTier> = names.map(|name| name.parse().unwrap()).collect();
        let mut kv = KvOptions::default();
        match offer(&tiers, kind, &mut kv) {
            Ok(()) => Ok((kv.high_tier, kv.bf16_tier)),
            Err(Failure::Error { message, fix }) => Err((message, fix.unwrap_or_default())),
            Err(_) => panic!("another failure"),
        }
    }

    #[test]
    fn tiers_are_offered_beside_what_is_served() {
        for (list, kind, expected) in [
            ("", CacheType::Int2, (false, false)),
            ("int2", CacheType::Int2, (false, false)),
            ("int2,bf16", CacheType::Int2, (false, true)),
            ("bf16", CacheType::Int4, (false, true)),
            ("bf16", CacheType::Bf16, (false, false)),
            ("high", CacheType::Int2, (true, false)),
            ("bf16,high", CacheType::Int2, (true, true)),
        ] {
            assert_eq!(offers(list, kind).unwrap(), expected, "{list} beside {kind}");
        }
        let (message, fix) = offers("int4,bf16", CacheType::Int2).unwrap_err();
        assert!(message.contains("--kv-tiers int4") && fix.contains("--kv-cache-dtype int4"), "{message}");
        for kind in [CacheType::Int4, CacheType::Fp8, CacheType::Int15, CacheType::Bf16] {
            let (message, fix) = offers("high", kind).unwrap_err();
            assert!(message.contains(&kind.to_string()) && fix.contains("int2"), "{message}");
        }
    }

    #[test]
    fn names_are_checked() {
        assert_eq!("high".parse(), Ok(KvTier::High));
        assert!("auto".parse::<KvTier>().is_err() && "int3".parse::<KvTier>().is_err());
    }
}
