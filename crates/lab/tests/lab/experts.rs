//! Calibration of models where only part of a head rotates, heads are normed together or have learned sinks, and what it is
//! worth at two bits.

use std::ops::ControlFlow;
use std::sync::Arc;

use oscar_codec::Windows;
use oscar_kernels::cpu::CpuBackend;
use oscar_lab::calibrate::{Calibration, Corpus, calibrate};
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::CodecComparison;
use oscar_lab::eval::history::Reading;
use oscar_random::Random;
use oscar_rotations::{RotationHeader, verify};
use oscar_testing::tiny_model_with;

const WINDOWS: Windows = Windows { sink: 16, recent: 32 };

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(110) as u32 + 3).collect()
}

#[test]
fn mixtures_are_calibrated_and_read_at_two_bits() {
    for name in ["qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss-mxfp4"] {
        let model = tiny_model_with(name, 512, Arc::new(CpuBackend::new(2).unwrap()), |_| ());
        let config = model.config();
        let header = RotationHeader {
            model: name.into(),
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            ..RotationHeader::default()
        };
        let corpus = Corpus {
            sequences: (0..4).map(|seed| tokens(seed, 256)).collect(),
            held_out: tokens(9, 256),
            hash: "test".into(),
        };
        let calibration = Calibration { windows: WINDOWS, ..Calibration::new(header) };
        let (mut file, certificate) =
            calibrate(&model, &corpus, &calibration, None, |_| ControlFlow::Continue(())).unwrap();
        let global = config.layers - config.sliding_layers().len();
        assert_eq!(certificate.heads.len(), global * config.kv_heads, "{name}");
        let findings = verify::verify(&file);
        assert!(findings.is_sound(), "{name}: {findings:?}");

        file.fill_sliding_layers(&config.sliding_layers());
        let source = CodecSource { geometry: config.kv_geometry(), rotations: Some(&file) };
        let mut comparison = CodecComparison::new(model.clone(), 512).unwrap();
        comparison.set_text(&tokens(10, 400), 0, 64, |_| ()).unwrap();
        let mut divergence = |codec: &str| {
            let codec = source.build(codec).unwrap();
            let reading = Reading { codec: &*codec, windows: WINDOWS, chunk: None };
            comparison.measure(reading, |_| ()).unwrap().mean_kl()
        };
        let [int4, int2, naive] = ["int4", "int2", "naive-int2"].map(&mut divergence);
        println!("{name}: KL int4 {int4:.4}, int2 {int2:.4}, without rotations {naive:.4}");
        // Random weights have no outliers for rotations to take care of; wrong ones would be much worse than none.
        assert!(int4 < 0.2 * int2 && int2 < 1.25 * naive, "{name}: {int4} {int2} {naive}");
        assert!(certificate.mean_output_error < 1.0, "{name}: {}", certificate.mean_output_error);
    }
}
