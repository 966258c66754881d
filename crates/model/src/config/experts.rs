//! Mixtures of experts, as a model's description gives them.

use std::collections::HashSet;

use oscar_kernels::routing::{ExpertGroups, Routing, RoutingRule, Scores};

use crate::config::MOST_LAYERS;
use crate::error::ModelError;
use crate::families::{ExpertFacts, Normalise};
use crate::files::gguf::Metadata;
use crate::files::{Fields, FileError};

/// Far above any real model.
const MOST_EXPERTS: usize = 1 << 16;

/// The widest expert.
const WIDEST: usize = 1 << 24;

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Width of an expert.
    pub inner: usize,
    /// Width of the expert that all rows share, if there is one.
    pub shared_inner: Option<usize>,
    /// How a row's experts are chosen and weighed.
    pub routing: Routing,
    /// Whether each layer has experts; a layer that has none is dense.
    pub routed: Vec<bool>,
    /// What holds for all models of the family.
    pub(crate) facts: &'static ExpertFacts,
}

impl ExpertsConfig {
    /// Experts of a layer.
    pub fn count(&self) -> usize {
        self.routing.rule().experts
    }

    /// Experts that a row goes to.
    pub fn top_k(&self) -> usize {
        self.routing.rule().top_k
    }
}

/// Numbers of a description before they are known to fit together.
struct Described {
    rule: RoutingRule,
    inner: usize,
    /// 0 if there is none.
    shared_inner: usize,
    routed: Vec<bool>,
}

impl Described {
    /// Checks the numbers; a message calls them what the file does.
    fn check(self, facts: &'static ExpertFacts, names: &Names<'_>) -> Result<ExpertsConfig, String> {
        let Described { rule, inner, shared_inner, routed } = self;
        if rule.experts == 0 || rule.experts > MOST_EXPERTS {
            return Err(format!("`{}` is {}, expected 1 to {MOST_EXPERTS}", names.count, rule.experts));
        }
        let groups = rule.groups.unwrap_or(ExpertGroups { count: 1, chosen: 1 });
        if groups.count == 0 || !rule.experts.is_multiple_of(groups.count) {
            let (experts, count) = (rule.experts, groups.count);
            return Err(format!("`{}` is {count}, which does not divide {experts} experts", names.groups));
        }
        if groups.chosen == 0 || groups.chosen > groups.count {
            let (chosen, count) = (groups.chosen, groups.count);
            return Err(format!("`{}` is {chosen}, expected 1 to {count}", names.groups_chosen));
        }
        let most = rule.experts / groups.count * groups.chosen;
        if rule.top_k == 0 || rule.top_k > most {
            return Err(format!(
                "`{}` is {}, expected 1 to {most}, the experts to choose from",
                names.top_k, rule.top_k
            ));
        }
        if inner == 0 || inner > WIDEST || shared_inner > WIDEST {
            return Err(format!(
                "`{}` is {inner}: experts are 1 to {WIDEST} wide, shared ones together too",
                names.inner
            ));
        }
        let routing = Routing::new(rule).map_err(|error| error.to_string())?;
        let shared_inner = (shared_inner > 0).then_some(shared_inner);
        Ok(ExpertsConfig { inner, shared_inner, routing, routed, facts })
    }
}

/// What a kind of file calls the numbers.
struct Names<'a> {
    count: &'a str,
    inner: &'a str,
    top_k: &'a str,
    groups: &'a str,
    groups_chosen: &'a str,
}

/// The experts that `config.json` describes.
pub(super) fn from_hugging_face(
    fields: &Fields<'_>,
    facts: &'static ExpertFacts,
    layers: usize,
) -> Result<ExpertsConfig, ModelError> {
    let bad = |problem: String| ModelError::BadConfig { path: fields.path().to_path_buf(), problem };
    let count_name = facts.count.into_iter().find(|name| fields.contains(name)).unwrap_or(facts.count[0]);
    if let Some(scoring) = fields.str_if_present("scoring_func")?.filter(|&name| name != facts.scoring_name())
    {
        return Err(bad(format!("field `scoring_func` is {scoring:?}, expected {:?}", facts.scoring_name())));
    }
    let inner = fields.positive(facts.inner)?;
    let shared = match facts.names.shared {
        Some(_) => fields.count_if_present("n_shared_experts")?.unwrap_or(0),
        None => 0,
    };
    let (groups, chosen) =
        (fields.positive_if_present("n_group")?, fields.positive_if_present("topk_group")?);
    let rule = RoutingRule {
        experts: fields.positive(count_name)?,
        top_k: fields.positive("num_experts_per_tok")?,
        scores: facts.scores,
        groups: groups.map(|count| ExpertGroups { count, chosen: chosen.unwrap_or(1) }),
        normalise: match facts.normalise {
            Normalise::Always => true,
            Normalise::Unless(said) => fields.bool_if_present("norm_topk_prob")?.unwrap_or(said),
        },
        scale: fields.float_if_present("routed_scaling_factor")?.unwrap_or(1.0) as f32,
    };
    let described = Described {
        rule,
        inner,
        shared_inner: shared.saturating_mul(inner),
        routed: routed_layers(fields, layers)?,
    };
    let names = Names {
        count: count_name,
        inner: facts.inner,
        top_k: "num_experts_per_tok",
        groups: "n_group",
        groups_chosen: "topk_group",
    };
    described.check(facts, &names).map_err(bad)
}

/// Which layers have experts: none of the first `first_k_dense_replace` and of `mlp_only_layers`, and of the others every
/// `decoder_sparse_step`-th.
fn routed_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let first = fields.count_if_present("first_k_dense_replace")?.unwrap_or(0);
    let step = fields.positive_if_present("decoder_sparse_step")?.unwrap_or(1);
    let dense = fields.token_ids_if_present("mlp_only_layers")?.unwrap_or_default();
    let dense: HashSet<usize> = dense.into_iter().map(|layer| layer as usize).collect();
    let is_routed =
        |layer: usize| layer >= first && (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    Ok((0..layers.min(MOST_LAYERS)).map(is_routed).collect())
}

/// The experts that GGUF metadata describes.
pub(super) fn from_gguf(
    metadata: &Metadata,
    facts: &'static ExpertFacts,
    key: &dyn Fn(&str) -> String,
    layers: usize,
    is_dense: &dyn Fn(usize) -> bool,
) -> Result<Result<ExpertsConfig, String>, FileError> {
    let size = |name: &str| metadata.u32(&key(name)).map(|value| value as usize);
    let optional =
        |name: &str| metadata.get::<u32>(&key(name)).map(|value| value.map(|value| value as usize));
    let scores = match optional("expert_gating_func")? {
        None => facts.scores,
        Some(1) => Scores::Softmax,
        Some(2) => Scores::Sigmoid,
        Some(3) => Scores::SoftmaxOfChosen,
        Some(other) => {
            let name = key("expert_gating_func");
            return Ok(Err(format!(
                "`{name}` is {other}; supported: 1 (softmax), 2 (sigmoid), 3 (softmax of those \
                 chosen)"
            )));
        }
    };
    let inner = match optional("expert_feed_forward_length")? {
        Some(inner) => inner,
        None => size("feed_forward_length")?,
    };
    let shared = match (facts.names.shared, optional("expert_shared_feed_forward_length")?) {
        (None, _) => 0,
        (Some(_), Some(shared)) => shared,
        (Some(_), None) => optional("expert_shared_count")?.unwrap_or(0).saturating_mul(inner),
    };
    let (groups, chosen) = (optional("expert_group_count")?, optional("expert_group_used_count")?);
    let rule = RoutingRule {
        experts: size("expert_count")?,
        top_k: size("expert_used_count")?,
        scores,
        groups: groups.map(|count| ExpertGroups { count, chosen: chosen.unwrap_or(1) }),
        // Files of families that know no other way do not say so.
        normalise: metadata.get::<bool>(&key("expert_weights_norm"))?.unwrap_or(true),
        scale: match metadata.get::<f32>(&key("expert_weights_scale"))? {
            // Files that do not scale say so by 0.
            Some(0.0) | None => 1.0,
            Some(scale) => scale,
        },
    };
    let first = optional("leading_dense_block_count")?.unwrap_or(0);
    let routed = (0..layers.min(MOST_LAYERS)).map(|layer| layer >= first && !is_dense(layer)).collect();
    let [count, inner_name, top_k, groups, groups_chosen] = [
        "expert_count",
        "expert_feed_forward_length",
        "expert_used_count",
        "expert_group_count",
        "expert_group_used_count",
    ]
    .map(key);
    let names = Names {
        count: &count,
        inner: &inner_name,
        top_k: &top_k,
        groups: &groups,
        groups_chosen: &groups_chosen,
    };
    Ok(Described { rule, inner, shared_inner: shared, routed }.check(facts, &names))
}
