//! The cache that serves against the lab that promised its quality, on SmolLM2 if `oscar pull smollm2` has fetched it.
use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageWindows, SealedSlot, Windows};
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, CacheSpec, HostSlots, SealPage, SealedRows, SealedSpec, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::CodecComparison;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::text::prose;
use oscar_model::source::{FetchPolicy, Silent, resolve};
use oscar_model::{LoadedModel, ModelFiles, PagedSealing};
use oscar_rotations::{
    CacheOptions, CachePlan, CacheType, FoundRotations, ModelIdentity, RotationFile, find, interleaved,
};

const TOKENS: usize = 1024;
const CHUNK: usize = 256;
const SKIP: usize = 512;

type Model = Arc<LoadedModel<CpuBackend>>;

fn smollm2() -> Option<(Model, ModelIdentity, RotationFile)> {
    let Ok(path) = resolve("smollm2", FetchPolicy::Never, &Silent) else {
        oscar_testing::skipped("smollm2 is not in the cache directory; `oscar pull smollm2` fetches it");
        return None;
    };
    let files = ModelFiles::open(&path).unwrap();
    let identity = ModelIdentity::of("smollm2", &files).unwrap();
    let empty = tempfile::tempdir().unwrap();
    let file =
        find::find(empty.path(), &identity.model_fingerprint).expect("rotations ship").taken.load().unwrap();
    let model = Arc::new(files.load(Arc::new(CpuBackend::new(Pool::default_threads()).unwrap())).unwrap());
    let rotations = interleaved::to_interleaved(&file, model.config().rope.rotary_dim);
    Some((model, identity, rotations))
}

/// Logits of every position when all rows read the mixed cache by the rule of visibility.
fn served_logits(
    model: &Model,
    identity: &ModelIdentity,
    file: &RotationFile,
    dtype: CacheType,
    windows: PageWindows,
    ids: &[u32],
) -> Vec<f32> {
    let geometry = model.config().kv_geometry();
    let pages = ids.len().div_ceil(PAGE_TOKENS);
    let found = FoundRotations {
        file: file.clone(),
        name: "shipped".to_owned(),
        certificate: None,
        notices: Vec::new(),
    };
    let options = CacheOptions { dtype, ..CacheOptions::default() };
    let plan = CachePlan::settle_with(model, identity, Some(&found), &options).unwrap();
    let sealed = plan.codec.map(|codec| SealedSpec { codec, slots: pages + 1, windows, high: None });
    let mixed = sealed.is_some();
    let spec = CacheSpec {
        geometry,
        query_heads: model.config().q_heads,
        slots: pages + 1,
        scratch_slots: 0,
        sealed,
        host: HostSlots::default(),
    };
    let forward = model.model();
    let mut cache = forward.backend().cache(&spec).unwrap();
    let mut activations = forward.activations(CHUNK, CHUNK).unwrap();
    let (exact, sealed) = (ExactSlot::first(pages), SealedSlot::first(pages));
    let (mut logits, mut sealed_pages) = (Vec::new(), windows.sink);
    for (index, chunk) in ids.chunks(CHUNK).enumerate() {
        let start = index * CHUNK;
        let history = windows.history((start + chunk.len() - 1) / PAGE_TOKENS, usize::MAX, 0);
        let seal: Vec<SealPage> = (sealed_pages..history.end)
            .filter(|_| mixed)
            .map(|page| SealPage { exact: exact[page].unwrap(), sealed: sealed[page].unwrap() })
            .collect();
        sealed_pages = history.end;
        let sealed = mixed.then_some(SealedRows { pages: &sealed, exact_from: usize::MAX, sealed_until: 0 });
        let rows = SequenceRows { start, len: chunk.len(), pages: &exact, sealed };
        let batch = Batch { tokens: chunk, sequences: &[rows] };
        let step = forward.begin_step(&batch, &cache).unwrap();
        forward.embed(&batch, &step, &mut activations).unwrap();
        let mut attention = PagedSealing { cache: &mut cache, before: &seal, after: &[] };
        forward.run_layers(0..model.config().layers, &step, &mut attention, &mut activations).unwrap();
        forward.logits(&(0..chunk.len()).collect::<Vec<_>>(), &mut activations).unwrap();
        logits.extend(forward.backend().read(activations.logits(), 0..chunk.len()).unwrap());
    }
    logits
}

fn mean_kl(model: &Model, exact: &[f32], other: &[f32]) -> f64 {
    let vocabulary = model.config().vocab_size;
    let log_probabilities = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        row.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
    };
    let rows = exact.chunks(vocabulary).zip(other.chunks(vocabulary)).skip(SKIP);
    let kls: Vec<f64> = rows
        .map(|(exact, other)| {
            let (exact, other) = (log_probabilities(exact), log_probabilities(other));
            exact.iter().zip(&other).map(|(p, q)| p.exp() * (p - q)).sum()
        })
        .collect();
    kls.iter().sum::<f64>() / kls.len() as f64
}

#[test]
fn the_cache_is_as_good_as_the_lab_says() {
    let Some((model, identity, file)) = smollm2() else { return };
    let mut ids = model.tokenizer().encode(&prose(11, TOKENS * 8), true).unwrap();
    ids.truncate(TOKENS);
    let windows = PageWindows { sink: 1, recent: 2 };
    let served = |kind| served_logits(&model, &identity, &file, kind, windows, &ids);
    let exact = served(CacheType::Bf16);
    let kl = |kind| mean_kl(&model, &exact, &served(kind));
    let [fp8, int4, int2] = [CacheType::Fp8, CacheType::Int4, CacheType::Int2].map(kl);

    // The lab counts its window in tokens; the cache's has 129 to 192 of them.
    let source = CodecSource { geometry: model.config().kv_geometry(), rotations: Some(&file) };
    let mut comparison = CodecComparison::new(model.clone(), TOKENS).unwrap();
    comparison.set_text(&ids, 0, SKIP, |_| ()).unwrap();
    let codec = source.build("int2").unwrap();
    let mut lab = |recent| {
        let reading = Reading { codec: &*codec, windows: Windows { sink: 64, recent }, chunk: None };
        comparison.measure(reading, |_| ()).unwrap().mean_kl()
    };
    let (narrow, wide) = (lab(129), lab(192));
    println!("KL: fp8 {fp8:.5}, int4 {int4:.5}, int2 {int2:.4}; the lab's int2 {narrow:.4} to {wide:.4}");
    assert!(fp8 < int4 && int4 < int2, "{fp8} {int4} {int2}");
    assert!(int2 < 1.15 * narrow && int2 > 0.85 * wide, "{int2} against {narrow} to {wide}");
}
