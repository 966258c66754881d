//! Environment variables of the published implementation, taken as the options they stand for, with a notice each.

use std::env;
use std::path::PathBuf;

use oscar_codec::PAGE_TOKENS;

use crate::failure::Failure;

/// Variables that set something we always do, or have no use for here.
const NO_EFFECT: [&str; 17] = [
    "SGLANG_ENABLE_MIXED_KV_WINDOWS",
    "SGLANG_MIXED_KV_HP_DTYPE",
    "SGLANG_MIXED_KV_SCALE_DTYPE",
    "SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS",
    "SGLANG_OSCAR_ABSORB_V_ROTATION",
    "SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT",
    "SGLANG_LLOYD_MAX",
    "HADAMARD_ORDER",
    "SGL_INT2_BLOCK_N",
    "SGL_INT2_BLOCK_H",
    "SGL_INT2_NUM_WARPS",
    "SGL_INT2_NUM_STAGES",
    "OSCAR_TRITON_PER_RANK_BASE",
    "DUMP_KVCACHE",
    "DUMP_KVCACHE_TOKENS",
    "DUMP_KVCACHE_DIR",
];

/// The settings that the variables stand for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SglangVariables {
    pub(crate) sink_tokens: Option<usize>,
    pub(crate) recent_tokens: Option<usize>,
    pub(crate) key_rotations: Option<PathBuf>,
    pub(crate) value_rotations: Option<PathBuf>,
    pub(crate) key_clip: Option<f32>,
    pub(crate) value_clip: Option<f32>,
}

impl SglangVariables {
    /// Reads the environment and prints a notice for each variable that was used.
    pub(crate) fn from_environment() -> Result<SglangVariables, Failure> {
        for name in NO_EFFECT.into_iter().filter(|name| env::var_os(name).is_some()) {
            tracing::warn!("{name} has no effect here");
        }
        SglangVariables::read(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Result<SglangVariables, Failure> {
        let taken = |name: &str, option: &str| {
            let value = get(name)?;
            tracing::warn!("{name}={value} is taken as {option}; the option of that name overrides it");
            Some(value)
        };
        let pages = |name: &str, option: &str| -> Result<Option<usize>, Failure> {
            let Some(value) = taken(name, option) else { return Ok(None) };
            let tokens = value.parse::<usize>().map_err(|_| bad(name, &value, "a number of tokens"))?;
            if !tokens.is_multiple_of(PAGE_TOKENS) {
                tracing::warn!("{name}: windows are whole pages of {PAGE_TOKENS} tokens here; rounded up");
            }
            Ok(Some(tokens.next_multiple_of(PAGE_TOKENS)))
        };
        let clip = |name: &str, option: &str| -> Result<Option<f32>, Failure> {
            let Some(value) = taken(name, option) else { return Ok(None) };
            match value.parse::<f32>() {
                Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Some(ratio)),
                _ => Err(bad(name, &value, "a number from 0 to 1")),
            }
        };
        let path = |name: &str, option: &str| taken(name, option).map(PathBuf::from);
        let (keys, values) = ("SGLANG_OSCAR_K_ROTATION_PATH", "SGLANG_OSCAR_V_ROTATION_PATH");
        if get(keys).is_some() != get(values).is_some() {
            return Err(Failure::new(format!("{keys} and {values} go together, and only one is set"))
                .with_fix("set both, or neither"));
        }
        Ok(SglangVariables {
            sink_tokens: pages("SGLANG_MIXED_KV_PREFIX_TOKENS", "--sink-tokens")?,
            recent_tokens: pages("SGLANG_MIXED_KV_RECENT_TOKENS", "--recent-tokens")?,
            key_rotations: path(keys, "--k-rotation-path"),
            value_rotations: path(values, "--v-rotation-path"),
            key_clip: clip("SGLANG_OSCAR_K_CLIP_RATIO", "--k-clip")?,
            value_clip: clip("SGLANG_OSCAR_V_CLIP_RATIO", "--v-clip")?,
        })
    }
}

fn bad(name: &str, value: &str, expected: &str) -> Failure {
    Failure::new(format!("{name} is {value:?}, expected {expected}")).with_fix(format!("unset {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_become_options() {
        let get = |name: &str| {
            let value = match name {
                "SGLANG_MIXED_KV_PREFIX_TOKENS" => "32",
                "SGLANG_MIXED_KV_RECENT_TOKENS" => "256",
                "SGLANG_OSCAR_K_ROTATION_PATH" => "k.pt",
                "SGLANG_OSCAR_V_ROTATION_PATH" => "v.pt",
                "SGLANG_OSCAR_K_CLIP_RATIO" => "0.96",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let found = SglangVariables::read(get).unwrap();
        assert_eq!((found.sink_tokens, found.recent_tokens), (Some(64), Some(256)));
        assert_eq!(found.key_rotations, Some(PathBuf::from("k.pt")));
        assert_eq!((found.key_clip, found.value_clip), (Some(0.96), None));
        assert_eq!(SglangVariables::read(|_| None).unwrap(), SglangVariables::default());
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for name in
            ["SGLANG_MIXED_KV_RECENT_TOKENS", "SGLANG_OSCAR_V_CLIP_RATIO", "SGLANG_OSCAR_K_ROTATION_PATH"]
        {
            let get = |asked: &str| (asked == name).then(|| "much".to_owned());
            let Err(Failure::Error { message, .. }) = SglangVariables::read(get) else { panic!("accepted") };
            assert!(message.contains(name), "{message}");
        }
    }
}
