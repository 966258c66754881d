//! The cache that serves against the lab that promised its quality, on SmolLM2 if `oscar pull smollm2` has fetched it.
use std::sync::Arc;

use oscar_codec::{CacheCodec, CodecError, HeadIndex, PAGE_TOKENS, PageWindows, Side, Windows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::CodecComparison;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::paged::PagedCache;
use oscar_lab::eval::probe::{CopyProbe, CopyTask};
use oscar_lab::eval::text::prose;
use oscar_model::source::{FetchPolicy, Silent, resolve};
use oscar_model::{LoadedModel, ModelFiles};
use oscar_rotations::{
    CacheOptions, CachePlan, CacheType, FoundRotations, ModelIdentity, RotationFile, find, interleaved,
};

const TOKENS: usize = 1024;
const SKIP: usize = 512;
const WINDOWS: PageWindows = PageWindows { sink: 1, recent: 2 };

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

/// The cache of a type as an engine has it.
fn paged(
    model: &Model,
    identity: &ModelIdentity,
    file: &RotationFile,
    dtype: CacheType,
) -> PagedCache<CpuBackend> {
    let found = FoundRotations {
        file: file.clone(),
        name: "shipped".to_owned(),
        certificate: None,
        notices: Vec::new(),
    };
    let options = CacheOptions { dtype, ..CacheOptions::default() };
    let plan = CachePlan::settle_with(model, identity, Some(&found), &options).unwrap();
    PagedCache::new(model.clone(), plan.codec, WINDOWS, TOKENS).unwrap()
}

/// A codec that is read in whole pages only, as a cache of pages is: with a window of one token more than the pages' own, every
/// query reads through it exactly the positions that it reads sealed where it is served.
struct WholePages(Box<dyn CacheCodec>);

impl CacheCodec for WholePages {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn token_group(&self) -> usize {
        PAGE_TOKENS
    }
    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        self.0.round_trip(head, side, first, rows)
    }
    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.0.token_bytes(head_dim)
    }
}

fn aligned(codec: &WholePages) -> Reading<'_> {
    let windows = Windows { sink: WINDOWS.sink * PAGE_TOKENS, recent: WINDOWS.recent * PAGE_TOKENS + 1 };
    Reading { codec, windows, chunk: None }
}

#[test]
fn the_lab_reads_what_the_cache_reads_sealed() {
    let source = CodecSource::of_shape(oscar_codec::KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 });
    let codec = WholePages(source.build("int4").unwrap());
    for position in 0..TOKENS {
        let history = WINDOWS.history(position / PAGE_TOKENS, usize::MAX, 0);
        let pages = if history.is_empty() { 0 } else { history.end };
        assert_eq!(aligned(&codec).history_end(position), pages * PAGE_TOKENS, "{position}");
    }
}

#[test]
fn the_cache_is_as_good_as_the_lab_says() {
    let Some((model, identity, file)) = smollm2() else { return };
    let mut ids = model.tokenizer().encode(&prose(11, TOKENS * 8), true).unwrap();
    ids.truncate(TOKENS);
    let source = CodecSource::new(&model, Some(&file));
    let mut comparison = CodecComparison::new(model.clone(), TOKENS).unwrap();
    // Without a prefix every position reads what is sealed; with one, the prompt reads itself in bf16.
    for prefix in [0, SKIP + 32] {
        comparison.set_text(&ids, prefix, SKIP.saturating_sub(prefix), |_| ()).unwrap();
        let mut served = |kind| {
            let mut cache = paged(&model, &identity, &file, kind);
            comparison.measure_served(&mut cache, |_| ()).unwrap().mean_kl()
        };
        let [bf16, fp8, int4, int2] =
            [CacheType::Bf16, CacheType::Fp8, CacheType::Int4, CacheType::Int2].map(&mut served);
        let codec = WholePages(source.build("int2").unwrap());
        let lab = comparison.measure(aligned(&codec), |_| ()).unwrap().mean_kl();
        println!(
            "KL after {prefix}: bf16 {bf16:.1e}, fp8 {fp8:.5}, int4 {int4:.5}, int2 {int2:.4}; lab {lab:.4}"
        );
        assert!(bf16 < 1e-6 && fp8 < int4 && int4 < int2, "{bf16} {fp8} {int4} {int2}");
        assert!((int2 / lab - 1.0).abs() < 0.1, "{int2} where it is served, {lab} in the lab");
    }
}

#[test]
fn strings_are_copied_from_the_cache_as_the_lab_says() {
    let Some((model, identity, file)) = smollm2() else { return };
    let source = CodecSource::new(&model, Some(&file));
    let mut ids = model.tokenizer().encode(&prose(12, TOKENS * 8), true).unwrap();
    ids.truncate(TOKENS - 24);
    let task = CopyTask::new(ids, Windows { sink: 64, recent: 256 }).expect("room");
    let mut probe = CopyProbe::new(model.clone(), &task, |_| ()).unwrap();
    let codec = WholePages(source.build("int2").unwrap());
    let lab = probe.measure(aligned(&codec)).unwrap();
    let [exact, served] = [CacheType::Bf16, CacheType::Int2].map(|kind| {
        let mut cache = paged(&model, &identity, &file, kind);
        probe.measure_served(&mut cache, |_| ()).unwrap()
    });
    println!("loss: {:.3} where it is served, {:.3} in the lab", served.loss(), lab.loss());
    assert!(exact.loss().abs() < 1e-4, "{}", exact.loss());
    assert!(
        served.loss() > 0.0 && (served.loss() - lab.loss()).abs() < 0.1 * lab.loss().max(0.1),
        "{served:?} {lab:?}"
    );
}
