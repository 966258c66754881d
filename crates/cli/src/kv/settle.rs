//! From what was asked for to a cache: rotations are found or made, their certificate is heard, the type is settled.

use std::sync::Arc;

use oscar_engine::KvOptions;
use oscar_lab::calibrate::means::{MEAN_TOKENS, mean_keys};
use oscar_lab::calibrate::{Certificate, Verdict};
use oscar_lab::eval::EvalError;
use oscar_lab::page_codec::{CacheType, EncoderOptions, page_codec};

use super::{CacheArguments, Encoder, GivenWindows};
use crate::commands::calibrate;
use crate::failure::Failure;
use crate::lab::{FoundRotations, Subject};
use crate::published::Published;

/// A cache for a model.
#[derive(Clone, Debug)]
pub(crate) struct Settled {
    /// Settings for the engine.
    pub(crate) options: KvOptions,
    /// What it came to; never `auto`.
    pub(crate) kind: CacheType,
    /// Encoder and where its numbers come from, for people; empty if there is nothing to say.
    pub(crate) source: String,
}

impl CacheArguments {
    /// The cache of the type `asked` for, or of the best that is possible.
    pub(crate) fn settle(
        &self,
        subject: &Subject,
        asked: Option<CacheType>,
        windows: GivenWindows,
    ) -> Result<Settled, Failure> {
        let published = Published::from_environment()?;
        let windows = windows.pages(&published);
        let encoder = EncoderOptions {
            paper: self.kv_encoder == Some(Encoder::Paper),
            key_clip: self.k_clip.or(published.key_clip),
            value_clip: self.v_clip.or(published.value_clip),
            group: self.kv_cache_quant_group_size,
            bf16_layers: self.kv_bf16_layers.clone(),
        };
        let mut options = self.options(windows)?;
        let found = match asked {
            Some(CacheType::Bf16) => None,
            _ => self.rotations(subject, asked, published)?,
        };
        let kind = possible(asked, found.as_ref(), subject);
        // Some models collapse even in 4 bits when their keys are not centred.
        let means = || {
            tracing::warn!(
                "no rotations for {}: mean keys are estimated from {MEAN_TOKENS} tokens of generated prose",
                subject.name
            );
            Ok(Some(mean_keys(&subject.model)?.concat()))
        };
        let geometry = subject.model.config().kv_geometry();
        let rotations = found.as_ref().map(|found| &found.file);
        let codec = page_codec(kind, &encoder, rotations, means, geometry).map_err(|error| match error {
            EvalError::NoRotations { .. } => {
                Failure::new(format!("there are no rotations for {}", subject.name))
                    .with_fix(format!("run `oscar calibrate {}`, or give --rotations FILE", subject.name))
            }
            error => error.into(),
        })?;
        options.codec = codec.map(Arc::new);
        let from = found.map(|found| found.name);
        let source = match (kind, from) {
            (CacheType::Int2, Some(name)) => {
                let encoder = if encoder.paper { "paper" } else { "auto" };
                format!("encoder {encoder}, rotations {name}")
            }
            (CacheType::Fp8 | CacheType::Int4, Some(name)) => format!("mean keys of {name}"),
            (CacheType::Fp8 | CacheType::Int4, None) => "mean keys estimated".to_owned(),
            _ => String::new(),
        };
        Ok(Settled { options, kind, source })
    }

    /// The rotations of the model. `int2` cannot do without: they are made when there are none.
    fn rotations(
        &self,
        subject: &Subject,
        asked: Option<CacheType>,
        published: Published,
    ) -> Result<Option<FoundRotations>, Failure> {
        let rotations = self.rotations.or_published(published);
        if let Some(found) = rotations.resolve(subject)? {
            return Ok(Some(found));
        }
        if asked != Some(CacheType::Int2) {
            return Ok(None);
        }
        eprintln!("{} has no rotations yet; calibrating once (`oscar calibrate {0} --help`)", subject.name);
        calibrate::on_the_spot(subject).map_err(|failure| {
            failure.with_fix(format!(
                "give --rotations FILE, calibrate on text of your own (`oscar calibrate {} --data FILE`), or choose \
                 another --kv-cache-dtype",
                subject.name
            ))
        })?;
        rotations.resolve(subject)
    }
}

/// What `auto` comes to, and a word about what the certificate says.
fn possible(asked: Option<CacheType>, found: Option<&FoundRotations>, subject: &Subject) -> CacheType {
    let name = &subject.name;
    let refused = found.and_then(|found| found.certificate.as_ref()).filter(|it| it.verdict == Verdict::Bad);
    match (asked.unwrap_or_default(), found, refused) {
        (CacheType::Auto, None, _) => {
            let why =
                format!("no rotations for {name}, so the cache is bf16; `oscar calibrate {name}` makes them");
            // Whoever did not ask need not be told at every start.
            match asked {
                Some(_) => tracing::warn!("{why}"),
                None => tracing::info!("{why}"),
            }
            CacheType::Bf16
        }
        (CacheType::Auto, Some(found), Some(Certificate { reason, .. })) => {
            tracing::warn!(
                "the certificate of {} advises against int2, so the cache is int4: {reason}",
                found.name
            );
            CacheType::Int4
        }
        (CacheType::Auto, Some(_), None) => CacheType::Int2,
        (CacheType::Int2, Some(found), Some(Certificate { reason, .. })) => {
            tracing::warn!("the certificate of {} advises against int2: {reason}", found.name);
            CacheType::Int2
        }
        (kind, _, _) => kind,
    }
}
