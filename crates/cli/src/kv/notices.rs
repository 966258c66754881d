//! Options of the cache that have no effect are named in a warning; those that contradict each other are refused.

use oscar_rotations::CacheType;

use super::{CacheArguments, KvArguments, PrefixTail};

/// What an option needs to matter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// The option has an effect on 2-bit codes only.
    Int2,
    /// The option has an effect on sealed pages of any type.
    Sealed,
}

impl CacheArguments {
    /// Options that were given, with what they need.
    fn given(&self) -> Vec<(&'static str, Needs)> {
        let option = |name, given: bool, needs| given.then_some((name, needs));
        [
            option("--kv-encoder", self.kv_encoder.is_some(), Needs::Int2),
            option("--kv-cache-quant-group-size", self.kv_cache_quant_group_size.is_some(), Needs::Int2),
            option("--k-clip", self.k_clip.is_some(), Needs::Int2),
            option("--v-clip", self.v_clip.is_some(), Needs::Int2),
            // fp8 and int4 take mean keys from it.
            option("--rotations", self.rotations.names_a_file(), Needs::Sealed),
            option("--k-rotation-path, --v-rotation-path", self.rotations.names_published(), Needs::Sealed),
            option("--force-rotations", self.rotations.is_forced(), Needs::Sealed),
            option("--kv-bf16-layers", !self.kv_bf16_layers.is_empty(), Needs::Sealed),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Options that were given and change nothing for a type.
    pub(crate) fn without_effect(&self, kind: CacheType) -> Vec<&'static str> {
        let met = |needs: Needs| match needs {
            Needs::Int2 => matches!(kind, CacheType::Int2 | CacheType::Auto),
            Needs::Sealed => kind != CacheType::Bf16,
        };
        self.given().into_iter().filter(|&(_, needs)| !met(needs)).map(|(name, _)| name).collect()
    }

    /// Options that were given and matter only to an engine.
    pub(crate) fn given_for_an_engine(&self) -> Vec<&'static str> {
        let lab = ["--rotations", "--k-rotation-path, --v-rotation-path", "--force-rotations"];
        let mut names: Vec<&'static str> =
            self.given().into_iter().map(|(name, _)| name).filter(|name| !lab.contains(name)).collect();
        names.extend(self.given_for_requests());
        names
    }

    /// Options that were given and matter only where requests are answered.
    pub(crate) fn given_for_requests(&self) -> Vec<&'static str> {
        let given = [self.kv_memory.map(|_| "--kv-memory"), self.prefill.map(|_| "--prefill")];
        given.into_iter().flatten().collect()
    }
}

impl KvArguments {
    /// Options that were given and change nothing for a type.
    pub(super) fn without_effect(&self, kind: CacheType) -> Vec<&'static str> {
        let mut names = self.cache.without_effect(kind);
        let sealed = kind != CacheType::Bf16;
        if !sealed {
            names.extend(self.sink_tokens.map(|_| "--sink-tokens"));
            names.extend(self.recent_tokens.map(|_| "--recent-tokens"));
        }
        // Where pages depend on the tokens alone, only whole windows count, whatever is done about others.
        let uniform = self.cache.deterministic || self.cache.prefill == Some(super::PrefillChoice::Uniform);
        let moot = !sealed || self.no_prefix_cache || uniform && self.prefix_tail == Some(PrefixTail::Sealed);
        if moot {
            names.extend(self.prefix_tail.map(|_| "--prefix-tail"));
        }
        names
    }
}

/// Says in one line which options have no effect on a cache.
pub(crate) fn warn_without_effect(names: Vec<&'static str>, cache: &str) {
    if names.is_empty() {
        return;
    }
    let verb = if names.len() == 1 { "has" } else { "have" };
    tracing::warn!("{} {verb} no effect on a KV cache of type {cache}", names.join(", "));
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::failure::Failure;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        kv: KvArguments,
    }

    fn parse(line: &[&str]) -> KvArguments {
        Line::try_parse_from([&["oscar"], line].concat()).map(|line| line.kv).expect("arguments")
    }

    #[test]
    fn what_changes_nothing_is_named() {
        let clips = parse(&["--k-clip", "0.9", "--v-clip", "0.9", "--kv-encoder", "auto"]);
        assert_eq!(clips.without_effect(CacheType::Int2), [""; 0]);
        for kind in [CacheType::Int4, CacheType::Fp8, CacheType::Bf16] {
            assert_eq!(clips.without_effect(kind), ["--kv-encoder", "--k-clip", "--v-clip"], "{kind}");
        }
        let sealed = parse(&["--rotations", "f", "--kv-bf16-layers", "1", "--sink-tokens", "0"]);
        assert_eq!(sealed.without_effect(CacheType::Fp8), [""; 0]);
        let names = ["--rotations", "--kv-bf16-layers", "--sink-tokens"];
        assert_eq!(sealed.without_effect(CacheType::Bf16), names);
        let specs = ["bf16", "int2:scalar"].map(|spec| spec.parse().expect("a cache"));
        assert_eq!(sealed.without_effect_on_any(&specs), [""; 0]);
        assert_eq!(sealed.without_effect_on_any(&specs[..1]), names);
        assert_eq!(parse(&[]).without_effect(CacheType::Bf16), [""; 0]);
    }

    #[test]
    fn the_tail_of_a_prefix_matters_only_where_there_is_one() {
        let tail = ["--prefix-tail", "sealed"];
        assert_eq!(parse(&tail).without_effect(CacheType::Int4), [""; 0]);
        assert_eq!(parse(&tail).without_effect(CacheType::Bf16), ["--prefix-tail"]);
        for more in [&["--no-prefix-cache"][..], &["--deterministic"], &["--prefill", "uniform"]] {
            let arguments = parse(&[&tail[..], more].concat());
            assert_eq!(arguments.without_effect(CacheType::Int4), ["--prefix-tail"], "{more:?}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let both = parse(&["--deterministic", "--prefill", "exact"]);
        assert!(
            matches!(both.cache.prefill_mode(), Err(Failure::Error { message, .. }) if message.contains("--prefill exact"))
        );
        assert!(parse(&["--deterministic", "--prefill", "uniform"]).cache.prefill_mode().is_ok());
    }
}
