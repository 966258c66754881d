//! What a calibration has made so far.

use std::collections::BTreeMap;

use oscar_codec::PageLayout;
use oscar_rotations::certificate::{Certificate, HeadCertificate, judge, mean_of, worst};
use oscar_rotations::rotation::{RotationFile, RotationHeader};

use super::corpus::Corpus;
use super::layer::FittedLayer;
use super::settings::{Calibration, ValueTarget};

/// Rotations and certificates of the layers so far.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationState {
    /// The rotation file with the layers so far.
    pub file: RotationFile,
    /// The certificates of the heads so far.
    pub heads: Vec<HeadCertificate>,
}

impl CalibrationState {
    pub(super) fn new(calibration: &Calibration, corpus: &Corpus) -> CalibrationState {
        let header = RotationHeader {
            tokens: corpus.tokens(),
            corpus: Some(corpus.hash.clone()),
            key_objective: "qqt".into(),
            value_objective: calibration.value_target.name().into(),
            layer_value_objective: Some(ValueTarget::Proxy.name().into()),
            composition: Some(calibration.composition),
            ..calibration.header.clone()
        };
        let sets = || Some(BTreeMap::new());
        let file = RotationFile { header, heads: sets(), layers: sets(), widths: BTreeMap::new() };
        CalibrationState { file, heads: Vec::new() }
    }

    pub(super) fn push(&mut self, layer: usize, fitted: FittedLayer) {
        self.file.heads.get_or_insert_default().insert(layer, fitted.per_head);
        self.file.layers.get_or_insert_default().insert(layer, fitted.per_layer);
        self.heads.extend(fitted.certificates);
    }

    pub(super) fn finish(self, calibration: &Calibration, corpus: &Corpus) -> (RotationFile, Certificate) {
        let head_dim = self.file.header.head_dim;
        let (verdict, reason) = judge(&self.heads, None);
        let certificate = Certificate {
            model: self.file.header.model.clone(),
            format: "int2".into(),
            bits_per_element: PageLayout::banded(head_dim)
                .or(PageLayout::int2(head_dim, 1))
                .map_or(0.0, |layout| layout.bits_per_element()),
            tokens: corpus.tokens(),
            held_out_tokens: corpus.held_out.len(),
            sink: calibration.windows.sink,
            recent: calibration.windows.recent,
            verdict,
            reason,
            mean_output_error: mean_of(&self.heads, |head| head.output_error),
            mean_paper_output_error: mean_of(&self.heads, |head| head.paper_output_error),
            worst: worst(&self.heads),
            probe: None,
            heads: self.heads,
        };
        (self.file, certificate)
    }
}
