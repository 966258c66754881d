//! What measurements with the lab's codecs share.

use clap::Args;
use oscar_codec::{CacheCodec, Windows};
use oscar_kernels::Inspect;
use oscar_lab::eval::codecs::CodecSource;

use crate::failure::Failure;
use crate::rotations::RotationArguments;
use crate::subject::Subject;
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
        subject: &Subject<B>,
        specs: &[String],
    ) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
        codecs(&self.rotations, subject, specs)
    }

    /// One codec.
    pub(crate) fn codec<B: Inspect>(
        &self,
        subject: &Subject<B>,
        spec: &str,
    ) -> Result<Box<dyn CacheCodec>, Failure> {
        let mut codecs = self.codecs(subject, &[spec.to_owned()])?;
        codecs.pop().ok_or_else(|| Failure::new("there is no codec to serve"))
    }

    /// What stays exact.
    pub(crate) fn windows(&self) -> Windows {
        self.windows.windows()
    }
}

/// The lab's codecs of a list of names.
pub(crate) fn codecs<B: Inspect>(
    rotations: &RotationArguments,
    subject: &Subject<B>,
    specs: &[String],
) -> Result<Vec<Box<dyn CacheCodec>>, Failure> {
    let found = rotations.find(subject)?;
    let source = CodecSource {
        geometry: subject.model.config().kv_geometry(),
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
pub(crate) fn check_context<B: Inspect>(subject: &Subject<B>, tokens: usize) -> Result<(), Failure> {
    let most = subject.model.config().max_context;
    if tokens <= most {
        return Ok(());
    }
    Err(Failure::new(format!("{tokens} tokens are more than the {most} of this model"))
        .with_fix(format!("ask for {most} or less")))
}
