//! What a device may not have.

/// What some families need beyond the plain transformer; see [`Backend::supports`](crate::backend::Backend::supports).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Some layers see the last positions only: [`AttentionSpec::window`](crate::backend::AttentionSpec::window) and
    /// [`Backend::add_windows`](crate::backend::Backend::add_windows).
    SlidingWindows,
    /// The output of a block has a norm before it is added:
    /// [`Backend::linear_norm_add`](crate::backend::Backend::linear_norm_add) and
    /// [`GatedMlp::output_norm`](crate::backend::GatedMlp::output_norm).
    OutputNorms,
    /// The gate of the feed-forward block is [`Activation::GeluTanh`](crate::backend::Activation::GeluTanh).
    GeluTanh,
    /// Embeddings are multiplied with a number before the first layer: [`Backend::scale`](crate::backend::Backend::scale).
    ScaledEmbeddings,
    /// Every query head has a logit without a value in its softmax:
    /// [`AttentionSpec::sinks`](crate::backend::AttentionSpec::sinks).
    LearnedSinks,
    /// The gate of the feed-forward block is [`Activation::ClampedSwiglu`](crate::backend::Activation::ClampedSwiglu).
    ClampedSwiglu,
    /// Projections of experts have biases: [`RoutedMlp::biases`](crate::backend::RoutedMlp::biases).
    ExpertBiases,
    /// Some layers have no rotary embedding; their [`AttentionSpec::rotates`](crate::backend::AttentionSpec::rotates) is false.
    LayersWithoutRope,
    /// Pages can leave the device for the host's memory: [`CacheSpec::host`](crate::backend::CacheSpec::host) and
    /// [`Backend::copy_host_pages`](crate::backend::Backend::copy_host_pages).
    HostPages,
    /// A cache can have sealed pages of a second codec with more bits: [`SealedSpec::high`](crate::backend::SealedSpec::high).
    HighTier,
}

impl std::fmt::Display for Feature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Feature::SlidingWindows => "sliding windows",
            Feature::OutputNorms => "norms of a block's output",
            Feature::GeluTanh => "GELU activations",
            Feature::ScaledEmbeddings => "scaled embeddings",
            Feature::LearnedSinks => "learned sinks",
            Feature::ClampedSwiglu => "clamped activations",
            Feature::ExpertBiases => "biases of experts",
            Feature::LayersWithoutRope => "layers without rotary embedding",
            Feature::HostPages => "pages in the host's memory",
            Feature::HighTier => "sealed pages of two codecs (`--kv-tiers high`)",
        })
    }
}
