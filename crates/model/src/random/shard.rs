//! The slice of a model that one of several tensor-parallel cards has, as SGLang divides models with
//! `--tp-size n --ep-size n`.
//!
//! | part | on each of n cards |
//! |---|---|
//! | query heads, with their rows of the output projection | an nth |
//! | KV heads | an nth; where there are fewer than n, one, which n / heads cards have alike |
//! | columns of dense feed-forward blocks and of shared experts | an nth |
//! | experts | an nth, whole |
//! | embedding and head | an nth of the vocabulary |
//! | norms, routers, scales of FP8 rows whose columns are divided | all of it |
//!
//! A rank computes what its slice makes of every row, and nothing is added up over ranks: results mean nothing, and the time of
//! a step is that of a card without its all-reduces. The router of a slice knows its own experts only, so that a row goes to
//! its share of the top k there, rounded up: experts are assumed to be chosen evenly.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use oscar_kernels::routing::{Routing, RoutingRule};

use super::{Described, RandomTensors};
use crate::config::{ExpertsConfig, ModelConfig, WeightScales};
use crate::error::ModelError;
use crate::files::{TensorEntry, TensorSource};
use crate::loaded::ModelFiles;

/// One of several tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    count: usize,
}

impl Shard {
    /// How many ranks there are.
    pub fn count(self) -> usize {
        self.count
    }
}

impl FromStr for Shard {
    type Err = String;

    /// `0/8` is the first of eight.
    fn from_str(text: &str) -> Result<Shard, String> {
        let parts =
            text.split_once('/').and_then(|(rank, count)| Some((rank.parse().ok()?, count.parse().ok()?)));
        match parts {
            Some((rank, count)) if rank < count => Ok(Shard { rank, count }),
            Some((rank, count)) => {
                Err(format!("rank {rank} of {count} is not there; ranks are counted from 0"))
            }
            None => Err("must be a rank and their number, such as 0/8".to_owned()),
        }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.count)
    }
}

/// What a rank has of a model.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The rank that has this slice, among how many.
    pub shard: Shard,
    /// The shape of the whole model.
    pub whole: ModelConfig,
    /// The shape of the slice.
    pub own: ModelConfig,
    /// Bytes of the weights that the rank holds, with the rows of routers that its slice leaves out.
    pub weight_bytes: usize,
    /// Bytes of the weights of the whole model.
    pub whole_bytes: usize,
}

impl fmt::Display for Slice {
    /// What is divided, and what is assumed, a line each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, own) = (&self.whole, &self.own);
        write!(f, "slice {}: {} of {} query heads", self.shard, own.q_heads, whole.q_heads)?;
        write!(f, ", {} of {} KV heads", own.kv_heads, whole.kv_heads)?;
        if whole.kv_heads < self.shard.count {
            write!(f, " (each on {} cards)", self.shard.count / whole.kv_heads)?;
        }
        if has_dense_layers(whole) {
            write!(f, ", {} of {} dense columns", own.intermediate_size, whole.intermediate_size)?;
        }
        if let (Some(all), Some(some)) = (&whole.experts, &own.experts) {
            write!(f, ", {} of {} experts", some.count(), all.count())?;
            if let (Some(all), Some(some)) = (all.shared_inner, some.shared_inner) {
                write!(f, ", {some} of {all} columns of shared experts")?;
            }
        }
        write!(f, ", {} of {} tokens of embedding and head", own.vocab_size, whole.vocab_size)?;
        write!(
            f,
            "\nleft out: the all-reduces after attention and feed-forward blocks, and gathering logits"
        )?;
        if let (Some(all), Some(some)) = (&whole.experts, &own.experts) {
            let (all, some, count) = (all.top_k(), some.top_k(), self.shard.count);
            write!(f, "\nassumed: of the {all} experts of a row {some} are on this card")?;
            if !all.is_multiple_of(count) {
                write!(f, " ({all}/{count} rounded up)")?;
            }
        }
        Ok(())
    }
}

/// The slice of a model of random weights, and its files.
pub fn random_shard(name: &str, shard: Shard) -> Result<(ModelFiles, Slice), ModelError> {
    let bad = |problem: String| ModelError::BadConfig { path: format!("{name} {shard}").into(), problem };
    let whole = Described::by_name(name)?;
    let own = Described { config: slice_of(&whole.config, shard.count).map_err(bad)?, dtype: whole.dtype };
    let slice = Slice::of(shard, &whole, &own).map_err(bad)?;
    Ok((own.files(&format!("{name} {shard}"))?, slice))
}

impl Slice {
    pub(super) fn of(shard: Shard, whole: &Described, own: &Described) -> Result<Slice, String> {
        let [all, some] =
            [whole, own].map(|described| RandomTensors::new("slice", &described.config, described.dtype));
        let sizes: HashMap<&str, &TensorEntry> =
            all.entries().iter().map(|entry| (entry.name.as_str(), entry)).collect();
        let bytes = |entry: &TensorEntry| entry.byte_len.unwrap_or(0);
        let mut weight_bytes = 0;
        for entry in some.entries() {
            weight_bytes += bytes(entry);
            let Some(whole) = sizes.get(entry.name.as_str()) else { continue };
            if whole.element_type != entry.element_type {
                let problem = "would be no whole number of its blocks";
                return Err(format!("a row of `{}`, of type {}, {problem}", entry.name, whole.element_type));
            }
            if own.config.is_routing(&entry.name) {
                weight_bytes += bytes(whole) - bytes(entry);
            }
        }
        Ok(Slice {
            shard,
            whole: whole.config.clone(),
            own: own.config.clone(),
            weight_bytes,
            whole_bytes: all.entries().iter().map(bytes).sum(),
        })
    }
}

impl ModelConfig {
    /// Whether a tensor is a router or what corrects its choice.
    fn is_routing(&self, name: &str) -> bool {
        self.experts.as_ref().is_some_and(|experts| {
            let names = &experts.facts.names;
            let part = name.splitn(4, '.').nth(3).unwrap_or_default();
            part.strip_suffix(".weight") == Some(names.router) || names.correction == Some(part)
        })
    }
}

fn has_dense_layers(config: &ModelConfig) -> bool {
    config.experts.as_ref().is_none_or(|experts| experts.routed.contains(&false))
}

/// The shape of one of `count` slices; the error says what cannot be divided.
pub(super) fn slice_of(whole: &ModelConfig, count: usize) -> Result<ModelConfig, String> {
    let part = |size: usize, what: &str| match size.is_multiple_of(count) {
        true => Ok(size / count),
        false => Err(format!("{size} {what} cannot be divided among {count} cards")),
    };
    // Scales of blocks that two cards share would have to be on both.
    let columns = |size: usize, what: &str| {
        let own = part(size, what)?;
        match whole.fp8 {
            Some(WeightScales::Block([rows, cols]))
                if !(own.is_multiple_of(rows) && own.is_multiple_of(cols)) =>
            {
                Err(format!(
                    "{size} {what} on {count} cards are {own} on each, which are no whole FP8 blocks of {rows}"
                ))
            }
            _ => Ok(own),
        }
    };
    let q_heads = part(whole.q_heads, "query heads")?;
    let kv_heads = match whole.kv_heads {
        heads if heads >= count => part(heads, "KV heads")?,
        heads if count.is_multiple_of(heads) => 1,
        heads => return Err(format!("{heads} KV heads cannot be repeated evenly on {count} cards")),
    };
    let experts = whole.experts.as_ref().map(|experts| {
        let rule = experts.routing.rule();
        let rule = RoutingRule {
            experts: part(rule.experts, "experts")?,
            top_k: rule.top_k.div_ceil(count),
            ..*rule
        };
        Ok::<_, String>(ExpertsConfig {
            shared_inner: experts
                .shared_inner
                .map(|inner| columns(inner, "columns of shared experts"))
                .transpose()?,
            routing: Routing::new(rule).map_err(|error| error.to_string())?,
            ..experts.clone()
        })
    });
    Ok(ModelConfig {
        vocab_size: part(whole.vocab_size, "tokens of the vocabulary")?,
        intermediate_size: match has_dense_layers(whole) {
            true => columns(whole.intermediate_size, "columns of dense feed-forward blocks")?,
            false => whole.intermediate_size,
        },
        q_heads,
        kv_heads,
        experts: experts.transpose()?,
        ..whole.clone()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oscar_codec::ExactSlot;
    use oscar_kernels::Backend;
    use oscar_kernels::backend::{Batch, SequenceRows};
    use oscar_kernels::cpu::CpuBackend;

    use super::*;
    use crate::config::QkNorm;
    use crate::random::mixtures::MIXTURES;
    use crate::random::{GEOMETRIES, fp8, random_names};

    fn shard(text: &str) -> Shard {
        text.parse().unwrap()
    }

    /// How often n cards together hold a tensor more than once, from what the tensor is.
    fn copies(config: &ModelConfig, name: &str, count: usize) -> usize {
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        // Each KV head is on as many cards as share it.
        let of_kv_heads = (count / config.kv_heads).max(1);
        if has(&["q_norm"]) {
            return if config.head_norms == QkNorm::Layer { 1 } else { count };
        }
        if has(&["k_norm"]) {
            return if config.head_norms == QkNorm::Layer { of_kv_heads } else { count };
        }
        if has(&["k_proj", "v_proj"]) {
            return of_kv_heads;
        }
        // Rows of these are whole outputs, of which every card has some of the inputs.
        let by_inputs = has(&["o_proj", "down_proj"]) || (has(&["w2"]) && !has(&["experts"]));
        let experts_apart = has(&["experts."]) && !has(&["shared"]);
        if name.ends_with("weight_scale") && by_inputs && !experts_apart {
            return count;
        }
        match has(&["norm"]) || config.is_routing(name) {
            true => count,
            false => 1,
        }
    }

    #[test]
    fn the_slices_together_are_the_model_and_what_is_repeated() {
        let mut checked = 0;
        for name in random_names() {
            for kind in ["", ":fp8"] {
                for count in [1, 2, 8, 16] {
                    let name = format!("{name}{kind}");
                    let Ok(mut whole) = Described::by_name(&name) else { continue };
                    // The others are alike.
                    whole.config.layers = 4;
                    whole.config.experts.iter_mut().for_each(|experts| experts.routed.truncate(4));
                    let Ok(config) = slice_of(&whole.config, count) else { continue };
                    let own = Described { config, dtype: whole.dtype };
                    let slice = Slice::of(shard(&format!("0/{count}")), &whole, &own).unwrap();
                    let tensors = RandomTensors::new("whole", &whole.config, whole.dtype);
                    let repeated: usize = tensors
                        .entries()
                        .iter()
                        .map(|entry| {
                            (copies(&whole.config, &entry.name, count) - 1) * entry.byte_len.unwrap()
                        })
                        .sum();
                    assert_eq!(
                        count * slice.weight_bytes,
                        slice.whole_bytes + repeated,
                        "{name} on {count} cards"
                    );
                    checked += 1;
                }
            }
        }
        assert!(checked > 50, "{checked}");
    }

    #[test]
    fn a_slice_has_its_share_of_everything() {
        let (files, slice) = random_shard("glm-4.7-fp8", shard("3/8")).unwrap();
        let own = files.config();
        assert_eq!((own.q_heads, own.kv_heads, own.intermediate_size, own.vocab_size), (12, 1, 1536, 18_944));
        let experts = own.experts.as_ref().unwrap();
        assert_eq!(
            (experts.count(), experts.top_k(), experts.inner, experts.shared_inner),
            (20, 1, 1536, Some(192))
        );
        let text = slice.to_string();
        for words in
            ["slice 3/8", "12 of 96 query heads", "1 of 8 KV heads", "20 of 160 experts", "all-reduces"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("rounded"), "{text}");
        let (_, sixteen) = random_shard("glm-4.7-fp8", shard("0/16")).unwrap();
        let text = sixteen.to_string();
        assert!(
            text.contains("1 of 8 KV heads (each on 2 cards)") && text.contains("(8/16 rounded up)"),
            "{text}"
        );
        let (_, dense) = random_shard("qwen3-8b", shard("0/2")).unwrap();
        assert!(dense.to_string().contains("6144 of 12288 dense columns"), "{dense}");
        assert!(!dense.to_string().contains("experts"), "{dense}");
    }

    #[test]
    fn what_cannot_be_divided_is_refused_by_name() {
        for (name, ranks, words) in [
            ("glm-4.7-fp8", "0/5", "96 query heads cannot be divided among 5 cards"),
            ("glm-4.7-fp8", "0/12", "8 KV heads cannot be repeated evenly on 12 cards"),
            ("glm-4.7-fp8", "0/3", "8 KV heads cannot be divided among 3 cards"),
            ("glm-4.7-fp8", "0/48", "151552 tokens of the vocabulary cannot be divided among 48 cards"),
            ("minimax-m2", "0/24", "256 experts cannot be divided among 24 cards"),
            ("minimax-m2", "0/6", "8 KV heads cannot be divided among 6 cards"),
            (
                "glm-4.7:fp8",
                "0/8",
                "1536 columns of shared experts on 8 cards are 192 on each, which are no whole FP8",
            ),
            ("glm-4.5-air:fp8", "0/2", "10944 columns of dense feed-forward blocks"),
            ("qwen3-8b:q4_k_m", "0/32", "o_proj.weight`, of type"),
        ] {
            let error = random_shard(name, shard(ranks)).err().unwrap().to_string();
            assert!(error.contains(words) && error.contains(name), "{name} {ranks}: {error}");
        }
        for text in ["", "8", "8/8", "1/0", "-1/8", "a/b", "0/8/2"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
        assert_eq!(shard("7/8").to_string(), "7/8");
    }

    #[test]
    fn slices_run() {
        let dense = GEOMETRIES[0].config();
        let dense =
            ModelConfig { vocab_size: 1024, hidden_size: 256, intermediate_size: 512, layers: 2, ..dense };
        let mixtures = MIXTURES.iter().map(|mixture| mixture.small().config().unwrap());
        for config in [dense].into_iter().chain(mixtures) {
            let config = ModelConfig { fp8: Some(WeightScales::Channel), ..slice_of(&config, 2).unwrap() };
            let files = Described { config, dtype: fp8 }.files("slice").unwrap();
            let model = files.load_model(Arc::new(CpuBackend::new(1).unwrap())).unwrap();
            let (mut cache, mut activations) = (model.cache(2).unwrap(), model.activations(3, 1).unwrap());
            let pages = ExactSlot::first(1);
            let sequences = [SequenceRows::exact(0, 3, &pages)];
            let batch = Batch { tokens: &[1, 2, 3], sequences: &sequences };
            model.forward(&batch, &[2], &mut cache, &mut activations).unwrap();
            let logits = model.backend().read(activations.logits(), 0..1).unwrap();
            assert!(logits.iter().all(|logit| logit.is_finite()));
        }
    }
}
