//! What a family of mixtures of experts says about them.

use oscar_kernels::routing::Scores;

/// The experts of a family.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpertFacts {
    /// What `config.json` calls the number of experts; the first name that is there counts.
    pub count: [&'static str; 2],
    /// What `config.json` calls the width of an expert.
    pub inner: &'static str,
    /// How scores are made of the router's numbers.
    pub scores: Scores,
    /// Whether the weights of a row's experts sum to one.
    pub normalise: Normalise,
    /// Names of tensors in Hugging Face checkpoints.
    pub names: ExpertNames,
    /// Name of the norm before the feed-forward block in GGUF files.
    pub gguf_norm: &'static str,
    /// How experts lie in Hugging Face checkpoints.
    pub layout: ExpertLayout,
    /// Whether the router and all projections have biases.
    pub biases: bool,
    /// What `config.json` calls the number of layers after the last one that predict further tokens.
    pub further_layers: &'static str,
}

/// How experts lie in Hugging Face checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// A matrix for each expert and projection.
    Apart,
    /// All experts in one tensor, with gates and what they are multiplied with by turns; see [`crate::stacked_experts`].
    Stacked,
}

/// Whether the weights of a row's experts are made to sum to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Normalise {
    /// They are in every model of the family.
    Always,
    /// As here, unless `norm_topk_prob` in `config.json` says otherwise.
    Unless(bool),
}

/// Names of tensors inside a layer of a Hugging Face checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpertNames {
    pub router: &'static str,
    /// What is added to scores when experts are chosen.
    pub correction: Option<&'static str>,
    /// Followed by the number of an expert.
    pub experts: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// The expert that all rows share.
    pub shared: Option<&'static str>,
}

impl ExpertFacts {
    /// What `scoring_func` of a `config.json` calls the way scores are made.
    pub(crate) fn scoring_name(&self) -> &'static str {
        match self.scores {
            Scores::Softmax | Scores::SoftmaxOfChosen => "softmax",
            Scores::Sigmoid => "sigmoid",
        }
    }
}
