//! `oscar zoo verify`: whether rotations can be trusted, with or without their model.

use std::path::PathBuf;

use clap::Args;
use oscar_model::ModelFiles;
use oscar_model::source::{FetchPolicy, resolve};
use oscar_rotations::find::certificate_beside;
use oscar_rotations::verify::{Findings, Severity, layer_list, verify, verify_pt, verify_pt_pair};
use oscar_rotations::{ORTHOGONALITY_LIMIT, RotationFile, check_model, identity, import, pt, safetensors};
use serde::Serialize;
use serde_json::{Value, json};

use super::list::printable;
use super::{is_pt, objective_line, scope_line};
use crate::failure::Failure;
use crate::output::{print_fields, print_json, print_text};
use crate::progress::DownloadProgress;

/// Check a rotation file: shapes, orthogonality, eigenvalues, swapped keys and values, and its model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar zoo verify rotations.safetensors\n  \
    oscar zoo verify rotations.safetensors --model smollm2\n  \
    oscar zoo verify k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt\n\n\
    Ends with an error if the rotations must not be used. Published .pt files hold neither a fingerprint nor the \
    metric they were fitted to, so less can be checked; what was not is listed.")]
pub(super) struct VerifyArguments {
    /// Rotations: .safetensors, or the key file of a published pair (.pt).
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The value file of a published pair (.pt).
    #[arg(value_name = "V_FILE")]
    values: Option<PathBuf>,

    /// Check that they belong to this model, too: catalogue name, .gguf file, folder or hub id.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,

    /// Print one JSON object, with every layer.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct VerifyRow<'a> {
    file: String,
    model: Option<&'a str>,
    sound: bool,
    orthogonality: f64,
    findings: Vec<Value>,
    not_checked: &'a [String],
    layers: Vec<Value>,
}

impl VerifyArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        let (file, kind, mut findings) = self.read()?;
        if let Some(model) = &self.model {
            self.compare_with(model, file.as_ref(), &mut findings)?;
            findings.sort();
        }
        self.print(file.as_ref(), &kind, &findings)?;
        let errors: Vec<_> =
            findings.findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
        match errors.first() {
            None => Ok(()),
            Some(first) => {
                let more = if errors.len() > 1 {
                    format!(" (and {} more)", errors.len() - 1)
                } else {
                    String::new()
                };
                let message = format!("{}: {}: {}{more}", self.file.display(), first.place, first.message);
                Err(Failure::new(message)
                    .with_fix("do not use these rotations; make them with `oscar calibrate MODEL`"))
            }
        }
    }

    /// The rotations as far as they make one file, what kind of file they are from, and what is wrong with
    /// them.
    fn read(&self) -> Result<(Option<RotationFile>, String, Findings), Failure> {
        if !is_pt(&self.file) {
            if self.values.is_some() {
                let message =
                    format!("{} holds keys and values; a second file has no place", self.file.display());
                return Err(Failure::new(message));
            }
            let file = safetensors::read_unverified(&self.file)?;
            let findings = verify(&file);
            let kind = format!("oscar rotations, version {}", file.header.version);
            return Ok((Some(file), kind, findings));
        }
        let keys = pt::read(&self.file)?;
        let kind = format!("published .pt, format {}", keys.format_version);
        let values = self.values.as_deref().map(pt::read).transpose()?;
        let findings = match &values {
            Some(values) => verify_pt_pair(&keys, values),
            None => verify_pt(&keys),
        };
        // One half stands for both where only sizes are looked at.
        let file = import::from_pt_unverified(&keys, values.as_ref().unwrap_or(&keys), "").ok();
        Ok((file, kind, findings))
    }

    fn compare_with(
        &self,
        model: &str,
        file: Option<&RotationFile>,
        findings: &mut Findings,
    ) -> Result<(), Failure> {
        let policy = if self.offline { FetchPolicy::Never } else { FetchPolicy::Allow };
        let files = ModelFiles::open(&resolve(model, policy, &DownloadProgress::new())?)?;
        // What does not make one file was found wanting already.
        let Some(mut file) = file.cloned() else { return Ok(()) };
        file.fill_sliding_layers(&files.config().sliding_layers());
        match check_model(&file, &identity::model_fingerprint(&files)?, files.config().kv_geometry(), false) {
            Err(error) => findings.add(Severity::Error, model, error.to_string()),
            Ok(Some(warning)) => findings.add(Severity::Warning, model, warning),
            Ok(None) => {
                let message = match &file.header.weight_fingerprint {
                    Some(found) if *found == identity::weight_fingerprint(&files)? => {
                        "calibrated on these very weights"
                    }
                    Some(_) => "calibrated on the same model in another precision",
                    None => "calibrated on this model",
                };
                findings.add(Severity::Note, model, message);
            }
        }
        Ok(())
    }

    fn print(&self, file: Option<&RotationFile>, kind: &str, findings: &Findings) -> Result<(), Failure> {
        if self.json {
            return print_json([VerifyRow {
                file: self.file.display().to_string(),
                model: file.map(|file| file.header.model.as_str()).filter(|name| !name.is_empty()),
                sound: findings.is_sound(),
                orthogonality: findings.orthogonality(),
                findings: findings
                    .findings
                    .iter()
                    .map(|finding| {
                        json!({"severity": finding.severity.name(), "place": finding.place, "message": finding.message})
                    })
                    .collect(),
                not_checked: &findings.not_checked,
                layers: findings
                    .layers
                    .iter()
                    .map(|layer| {
                        json!({
                            "scope": layer.scope.name(),
                            "layer": layer.layer,
                            "side": layer.side,
                            "orthogonality": layer.orthogonality,
                        })
                    })
                    .collect(),
            }]);
        }
        let mut fields = vec![("file", self.file.display().to_string()), ("format", kind.to_owned())];
        if let Some(file) = file {
            fields.extend(description(file));
        }
        if let Some(certificate) = certificate_beside(&self.file).filter(|_| !is_pt(&self.file)) {
            fields.push((
                "certificate",
                printable(&format!("{}: {}", certificate.verdict, certificate.reason)),
            ));
        }
        let orthogonality = format!("{:.1e}, at most {ORTHOGONALITY_LIMIT:.0e}", findings.orthogonality());
        fields.push(("orthogonality", orthogonality));
        fields.push(("sound", if findings.is_sound() { "yes" } else { "no" }.to_owned()));
        print_fields(&fields)?;
        if !findings.findings.is_empty() || !findings.not_checked.is_empty() {
            print_text("")?;
        }
        for finding in &findings.findings {
            let (place, message) = (printable(&finding.place), printable(&finding.message));
            print_text(&format!("{}: {place}: {message}", finding.severity.name()))?;
        }
        findings
            .not_checked
            .iter()
            .try_for_each(|text| print_text(&format!("not checked: {}", printable(text))))
    }
}

fn description(file: &RotationFile) -> Vec<(&'static str, String)> {
    let header = &file.header;
    let mut fields = Vec::new();
    if !header.model.is_empty() {
        fields.push(("model", printable(&header.model)));
    }
    if header.tokens > 0 {
        fields.push(("tokens", header.tokens.to_string()));
    }
    fields.push(("objective", printable(&objective_line(header))));
    let heads = match header.kv_heads {
        0 => format!("{} channels", header.head_dim),
        heads => format!("{heads} KV heads of {} channels", header.head_dim),
    };
    let layers: Vec<usize> =
        file.sets().next().map(|(_, set)| set.keys().copied().collect()).unwrap_or_default();
    fields.push(("rotations", format!("{}, {}, {heads}", scope_line(file), layer_list(&layers))));
    fields
}
