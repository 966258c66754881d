//! What measurements with the lab's codecs share.

use clap::Args;
use oscar_codec::{CacheCodec, Windows};
use oscar_kernels::Inspect;
use oscar_lab::eval::codecs::CodecSource;

use crate::failure::Failure;
use crate::named_model::NamedModel;
use crate::rotations::RotationArguments;
use crate::windows::WindowArguments;

/// How a measurement reads the cache: what codecs need, and what stays exact.
#[derive(Debug, Args)]
pub(crate) struct ReadingArguments {
    #[command(flatten)]
    rotations: RotationArguments,

    #[command(flatten)]
    windows: WindowArguments,
}

impl ReadingArguments {
    /// The codecs of a list of names.
    pub(crate) fn codecs<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        specs: &[String],
    ) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
        codecs(&self.rotations, named, specs)
    }

    /// The codec of a specification.
    pub(crate) fn codec<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        spec: &str,
    ) -> Result<Box<dyn CacheCodec>, Failure> {
        let mut codecs = self.codecs(named, &[spec.to_owned()])?;
        codecs.pop().ok_or_else(|| Failure::new("there is no codec to serve"))
    }

    /// The windows that stay exact.
    pub(crate) fn windows(&self) -> Windows {
        self.windows.windows()
    }
}

/// The lab's codecs of a list of names.
pub(crate) fn codecs<B: Inspect>(
    rotations: &RotationArguments,
    named: &NamedModel<B>,
    specs: &[String],
) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
    let found = rotations.find(named)?;
    let source = CodecSource {
        geometry: named.model.config().kv_geometry(),
        rotations: found.as_ref().map(|found| &found.file),
    };
    specs.iter().map(|spec| Ok(source.build(spec)?)).collect()
}

/// A prefix must leave something to measure.
pub(crate) fn check_prefix(prefix: usize, tokens: usize) -> Result<(), Failure> {
    if prefix < tokens {
        return Ok(());
    }
    Err(Failure::new(format!("--prefix {prefix} leaves nothing of --tokens {tokens} to measure"))
        .with_fix("give a smaller --prefix or more --tokens"))
}

/// A sequence must fit the model.
pub(crate) fn check_context<B: Inspect>(named: &NamedModel<B>, tokens: usize) -> Result<(), Failure> {
    let most = named.model.config().max_context;
    if tokens <= most {
        return Ok(());
    }
    Err(Failure::new(format!("{tokens} tokens are more than the {most} of this model"))
        .with_fix(format!("ask for {most} or less")))
}
