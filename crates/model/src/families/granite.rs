//! Granite 3: Llama with factors on embeddings, attention logits, what blocks add, and logits.

use oscar_kernels::backend::RopeLayout;

use super::style::above_zero;
use super::{Bias, ModelFamily, NormRule, StyleFacts};
use crate::config::BlockStyle;
use crate::error::ModelError;

pub(super) static GRANITE: ModelFamily = ModelFamily {
    name: "granite",
    gguf_architecture: "granite",
    model_type: "granite",
    gguf_rope: RopeLayout::Interleaved,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: Some(&StyleFacts {
        from_json: |fields, _| {
            let factors = Factors {
                embedding: above_zero(fields, "embedding_multiplier", 1.0)?,
                attention: above_zero(fields, "attention_multiplier", 1.0)?,
                residual: above_zero(fields, "residual_multiplier", 1.0)?,
                logits: above_zero(fields, "logits_scaling", 1.0)?,
            };
            Ok((factors.style(), None))
        },
        from_gguf: |gguf, key, shape| {
            let number = |name: &str, default: f64| -> Result<f64, ModelError> {
                match gguf.metadata().get::<f32>(&key(name))? {
                    Some(value) if !(value.is_finite() && value > 0.0) => {
                        let problem = format!("`{}` is {value}, expected a number above 0", key(name));
                        Err(ModelError::BadConfig { path: gguf.path().to_path_buf(), problem })
                    }
                    value => Ok(value.map_or(default, f64::from)),
                }
            };
            let factors = Factors {
                embedding: number("embedding_scale", 1.0)?,
                attention: number("attention.scale", 1.0 / (shape.head_dim as f64).sqrt())?,
                residual: number("residual_scale", 1.0)?,
                logits: number("logit_scale", 1.0)?,
            };
            Ok((factors.style(), None))
        },
        ..StyleFacts::PLAIN
    }),
};

struct Factors {
    embedding: f64,
    /// Factor of `q · k`, in place of one over the root of the head dimension.
    attention: f64,
    residual: f64,
    /// What logits are divided by.
    logits: f64,
}

impl Factors {
    fn style(self) -> BlockStyle {
        BlockStyle {
            embedding_scale: Some((self.embedding / self.residual) as f32),
            attention_scale: self.attention as f32,
            residual_scale: self.residual as f32,
            logit_scale: (1.0 / self.logits) as f32,
            ..BlockStyle::plain(1)
        }
    }
}
