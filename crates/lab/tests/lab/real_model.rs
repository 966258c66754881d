//! Calibration and measurement on SmolLM2, if `oscar pull smollm2` has fetched it.
use std::ops::ControlFlow;
use std::sync::Arc;

use oscar_codec::Windows;
use oscar_engine::EngineOptions;
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_lab::calibrate::checkpoint::Checkpoint;
use oscar_lab::calibrate::{CalibrateError, Calibration, Corpus, calibrate};
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::{CodecComparison, Divergence};
use oscar_lab::eval::evaluator::Evaluator;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::needle::{Haystack, NeedleKind, NeedleOptions, build};
use oscar_lab::eval::probe::{CopyProbe, CopyTask};
use oscar_lab::eval::retrieval::{retrieve, retrieve_served};
use oscar_lab::eval::served::ServedCache;
use oscar_lab::eval::text::prose;
use oscar_model::LoadedModel;
use oscar_model::source::{FetchPolicy, Silent, resolve};
use oscar_rotations::means::fill_mean_keys;
use oscar_rotations::{RotationFile, RotationHeader, Verdict, safetensors, verify};

type Model = Arc<LoadedModel<CpuBackend>>;

fn smollm2() -> Option<Model> {
    let Ok(path) = resolve("smollm2", FetchPolicy::Never, &Silent) else {
        oscar_testing::skipped("smollm2 is not in the cache directory; `oscar pull smollm2` fetches it");
        return None;
    };
    let backend = Arc::new(CpuBackend::new(Pool::default_threads()).unwrap());
    Some(Arc::new(LoadedModel::load(&path, backend).unwrap()))
}

fn ids(model: &Model, seed: u64, tokens: usize) -> Vec<u32> {
    let mut ids = model.tokenizer().encode(&prose(seed, tokens * 8), true).unwrap();
    ids.truncate(tokens);
    assert_eq!(ids.len(), tokens);
    ids
}

fn calibration(model: &Model) -> (Calibration, Corpus) {
    let config = model.config();
    let header = RotationHeader {
        model: "smollm2".into(),
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        ..RotationHeader::default()
    };
    let windows = Windows { sink: 16, recent: 64 };
    let corpus = Corpus {
        sequences: vec![ids(model, 1, 512), ids(model, 2, 512)],
        held_out: ids(model, 3, 384),
        hash: "test".into(),
    };
    (Calibration { windows, ..Calibration::new(header) }, corpus)
}

/// Calibrates, is interrupted on the way, goes on, and must end where an undisturbed run ends.
fn calibrated(model: &Model) -> RotationFile {
    let (calibration, corpus) = calibration(model);
    let (whole, certificate) =
        calibrate(model, &corpus, &calibration, None, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(certificate.heads.len(), 90);
    assert_ne!(certificate.verdict, Verdict::Bad, "{}", certificate.reason);
    assert!(certificate.mean_output_error < certificate.mean_paper_output_error, "{}", certificate.reason);
    let findings = verify::verify(&whole);
    assert!(findings.is_sound(), "{findings:?}");

    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("smollm2.safetensors");
    let checkpoint = || Checkpoint::beside(&output, &calibration, &corpus).after_every_layer();
    let stop_at =
        |layer| move |done| if done == layer { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let stopped = calibrate(model, &corpus, &calibration, Some(&checkpoint()), stop_at(25));
    assert!(matches!(stopped, Err(CalibrateError::Interrupted)));
    let mut first = None;
    let (resumed, same) = calibrate(model, &corpus, &calibration, Some(&checkpoint()), |layer| {
        first.get_or_insert(layer);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(first, Some(25), "the first 25 layers were kept");
    // Numbers of the first layers have been through JSON.
    assert_eq!((certificate.verdict, &certificate.worst), (same.verdict, &same.worst));
    assert!((certificate.mean_output_error - same.mean_output_error).abs() < 1e-9);
    let bytes = |file: &RotationFile, name: &str| {
        let path = folder.path().join(name);
        safetensors::write(&path, file).unwrap();
        std::fs::read(path).unwrap()
    };
    assert!(bytes(&whole, "a.safetensors") == bytes(&resumed, "b.safetensors"), "the same file to the byte");
    whole
}

/// Published files have no mean keys; an estimate from other text must come close to the calibrated ones.
fn check_estimated_means(model: &Model, file: &RotationFile) {
    let mut bare = file.clone();
    for set in [&mut bare.heads, &mut bare.layers].into_iter().flatten() {
        set.values_mut().for_each(|layer| layer.keys.means = None);
    }
    fill_mean_keys(model, &mut bare).unwrap();
    let (mut difference, mut size) = (0.0, 0.0);
    for (layer, rotations) in file.heads.as_ref().unwrap() {
        let estimated = bare.heads.as_ref().unwrap()[layer].keys.means.as_ref().unwrap();
        for (a, b) in rotations.keys.means.iter().flatten().flatten().zip(estimated.iter().flatten()) {
            difference += f64::from(a - b).powi(2);
            size += f64::from(*a).powi(2);
        }
    }
    // The estimate is of the first positions and calibration counts with the whole context, where the same keys are turned by
    // other angles, so not all of it can agree.
    assert!(difference < 0.3 * size, "{difference} of {size}");
}

#[test]
fn calibrated_codecs_keep_the_published_order() {
    let Some(model) = smollm2() else { return };
    let file = calibrated(&model);
    check_estimated_means(&model, &file);
    let source = CodecSource::new(&model, Some(&file));
    let mut comparison = CodecComparison::new(model.clone(), 1024).unwrap();
    comparison.set_text(&ids(&model, 4, 1024), 0, 128, |_| ()).unwrap();
    let windows = Windows { sink: 16, recent: 64 };
    let mut measure = |spec: &str| -> Divergence {
        let codec = source.build(spec).unwrap();
        comparison.measure(Reading { codec: &*codec, windows, chunk: None }, |_| ()).unwrap()
    };
    let exact = measure("bf16");
    assert!(exact.mean_kl() < 1e-4, "a second reading of bf16 pages changes nothing: {}", exact.mean_kl());
    assert!(exact.top1_agreement() > 0.99);
    let kl: Vec<(&str, f64)> = ["int4", "int2", "int2:paper", "quarot-int2", "naive-int2"]
        .into_iter()
        .map(|spec| (spec, measure(spec).mean_kl()))
        .collect();
    println!("{kl:?}");
    assert!(kl.windows(2).all(|pair| pair[0].1 < pair[1].1), "{kl:?}");

    // The probe: 4 bits copy from far back, and a codec that loses the place does not.
    let task = CopyTask::new(ids(&model, 5, 1000), windows).expect("room for strings");
    let mut probe = CopyProbe::new(model.clone(), &task, |_| ()).unwrap();
    let mut copies = |spec: &str| {
        let codec = source.build(spec).unwrap();
        probe.measure(Reading { codec: &*codec, windows, chunk: None }).unwrap()
    };
    let (fine, lost) = (copies("int4"), copies("naive-int2"));
    assert_eq!(fine.verdict(), Some(Verdict::Good), "{fine}");
    assert_eq!(lost.verdict(), Some(Verdict::Bad), "{lost}");
    assert!(fine.loss() < copies("int2").loss() && fine.exact == lost.exact, "{fine}; {lost}");
    assert_eq!(fine, copies("int4"), "what other codecs made of the text is gone");

    // Needles: an exact cache finds a number in a short context.
    let mut evaluator = Evaluator::new(model.clone(), 1024).unwrap();
    let tokenizer = model.tokenizer().clone();
    let count = move |text: &str| tokenizer.encode(text, false).unwrap().len();
    let options =
        NeedleOptions { kind: NeedleKind::Single, tokens: 700, digits: 5, seed: 5, ..Default::default() };
    let prompt = build(&options, &Haystack::Generated, &count).unwrap();
    let codecs = [source.build("bf16").unwrap(), source.build("naive-int2").unwrap()];
    let answers = retrieve(&mut evaluator, &prompt, &codecs, windows, |_| ()).unwrap();
    assert_eq!(answers[0].score, 1.0, "{answers:?} for {:?}", prompt.answers);
    // A found number is a probable one, and a bad codec makes it less probable.
    assert!((-0.5..=0.0).contains(&answers[0].log_probability), "{answers:?}");
    assert!(answers[1].log_probability < answers[0].log_probability - 0.5, "{answers:?}");
    // The engine scores the answer as the lab does.
    let options = EngineOptions { context: Some(1024), ..EngineOptions::default() };
    let served = ServedCache::new(model.clone(), &options, "bf16").unwrap();
    let served = retrieve_served(&served, &prompt, |_| ()).unwrap();
    assert!((served.log_probability - answers[0].log_probability).abs() < 0.02, "{served:?} {answers:?}");
}
