//! What commands that calibrate and measure share. Everything else of the command line does without the lab, but for
//! [`first_use`].

pub(crate) mod calibration;
mod failure;
pub(crate) mod first_use;

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
    let source = CodecSource::new(&named.model, found.as_ref().map(|found| &found.file));
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// Calls `visit` with the path below `src` and the text of every source file.
    fn visit_sources(folder: &Path, visit: &mut impl FnMut(&str, &str)) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                visit_sources(&path, visit);
            } else {
                let text = fs::read_to_string(&path).expect("a source file");
                let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
                visit(path.strip_prefix(source).expect("below src").to_str().expect("a name"), &text);
            }
        }
    }

    #[test]
    fn only_measurements_use_the_lab_and_a_first_use_of_int2() {
        let measures = |path: &str| {
            let parts = ["lab/", "commands/lab", "commands/calibrate", "commands/eval", "commands/bench"];
            parts.iter().any(|part| path.starts_with(part))
        };
        let (mut lab, mut doors) = (0, Vec::new());
        visit_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut |path, text| {
            if measures(path) {
                lab += 1;
                return;
            }
            for krate in ["oscar_lab", "oscar_bench"] {
                assert!(!text.contains(krate), "{path} names {krate}");
            }
            doors.extend(text.matches("crate::lab::").map(|_| path.to_owned()));
        });
        assert!(lab > 10, "the lab was found");
        assert_eq!(doors, ["kv/settle.rs"]);
    }
}
