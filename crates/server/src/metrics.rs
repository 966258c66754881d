//! Metrics for Prometheus, under SGLang's names where it has one, so that its dashboards work.

use std::borrow::Cow;

use oscar_engine::{EngineInfo, EngineStats};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::tiers::{OfferedTier, offered, tier_use};

/// The buckets of the time to the first token, in seconds.
const FIRST_TOKEN_BUCKETS: [f64; 15] =
    [0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
/// The buckets of the inter-token latency, in seconds.
const INTER_TOKEN_BUCKETS: [f64; 14] =
    [0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];
/// The buckets of the end-to-end latency of requests, in seconds.
const END_TO_END_BUCKETS: [f64; 14] =
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0];

type Labels = Vec<(&'static str, String)>;

/// The metrics that the server counts itself. The others are the engine's, read when `/metrics` is.
pub(crate) struct Metrics {
    model: String,
    registry: Registry,
    pub(crate) requests: Counter,
    pub(crate) finished: Counter,
    pub(crate) failed: Counter,
    pub(crate) abandoned: Counter,
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) end_to_end: Histogram,
    responses: Family<Labels, Counter>,
}

impl Metrics {
    pub(crate) fn new(model: &str) -> Metrics {
        let mut registry = labelled(model);
        let requests = Counter::default();
        let finished = Counter::default();
        let (failed, abandoned) = (Counter::default(), Counter::default());
        let first_token = Histogram::new(FIRST_TOKEN_BUCKETS);
        let inter_token = Histogram::new(INTER_TOKEN_BUCKETS);
        let end_to_end = Histogram::new(END_TO_END_BUCKETS);
        let responses = Family::default();
        for (name, help, counter) in [
            ("sglang:num_requests", "Requests taken", &requests),
            ("oscar_answers_finished", "Answers that came to an end", &finished),
            ("oscar_answers_failed", "Answers that failed", &failed),
            ("sglang:num_aborted_requests", "Answers whose client went away", &abandoned),
        ] {
            registry.register(name, help, counter.clone());
        }
        for (name, help, histogram) in [
            ("sglang:time_to_first_token_seconds", "From a request to its first token", &first_token),
            ("sglang:inter_token_latency_seconds", "From one token to the next", &inter_token),
            ("sglang:e2e_request_latency_seconds", "From a request to its last token", &end_to_end),
        ] {
            registry.register(name, help, histogram.clone());
        }
        registry.register("oscar_http_responses", "Responses by status", Family::clone(&responses));
        Metrics {
            model: model.to_owned(),
            registry,
            requests,
            finished,
            failed,
            abandoned,
            first_token,
            inter_token,
            end_to_end,
            responses,
        }
    }

    /// Counts a response by its status.
    pub(crate) fn responded(&self, status: u16) {
        self.responses.get_or_create(&vec![("status", status.to_string())]).inc();
    }

    /// All metrics in the text format of Prometheus.
    pub(crate) fn text(
        &self,
        info: &EngineInfo,
        stats: &EngineStats,
        device_failed: bool,
    ) -> Result<String, std::fmt::Error> {
        let mut text = String::with_capacity(16 << 10);
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &engine_registry(&self.model, info, stats, device_failed))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// A registry whose series all carry the name of the model.
fn labelled(model: &str) -> Registry {
    Registry::with_labels([(Cow::Borrowed("model_name"), Cow::Owned(model.to_owned()))].into_iter())
}

/// The share of the cache's tokens that requests use.
pub(crate) fn token_usage(info: &EngineInfo, stats: &EngineStats) -> f64 {
    ratio(used_tokens(stats) as f64, info.capacity_tokens as f64)
}

/// The number of tokens in the cache of all running requests.
pub(crate) fn used_tokens(stats: &EngineStats) -> usize {
    stats.sequences.iter().map(|sequence| sequence.tokens).sum()
}

/// The share of prompt tokens that came from the prefix cache.
pub(crate) fn hit_rate(stats: &EngineStats) -> f64 {
    ratio(stats.cached_tokens as f64, stats.prompt_tokens as f64)
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn engine_registry(model: &str, info: &EngineInfo, stats: &EngineStats, device_failed: bool) -> Registry {
    let mut registry = labelled(model);
    for (name, help, value) in [
        ("sglang:num_running_reqs", "Answers in progress", (stats.running + stats.prefilling) as f64),
        ("sglang:num_queue_reqs", "Requests that wait", stats.queued as f64),
        ("sglang:num_used_tokens", "Tokens of requests in the cache", used_tokens(stats) as f64),
        ("sglang:max_total_num_tokens", "Tokens the cache can hold", info.capacity_tokens as f64),
        ("sglang:token_usage", "Share of the cache that requests use", token_usage(info, stats)),
        ("sglang:cache_hit_rate", "Share of prompt tokens that came from the cache", hit_rate(stats)),
        ("oscar_kv_bits_per_element", "Bits per stored key or value element", info.bits_per_element),
        ("oscar_prefix_tree_pages", "Full pages in the prefix tree", stats.cache.tree_pages as f64),
        ("oscar_prefix_tree_warm_pages", "Sealed pages that are in bf16 too", stats.cache.warm_pages as f64),
        (
            "oscar_device_failed",
            "1 when the device has failed and no request is answered",
            f64::from(device_failed),
        ),
    ] {
        registry.register(name, help, ConstGauge::new(value));
    }
    for (name, help, value) in [
        ("sglang:prompt_tokens", "Prompt tokens", stats.prompt_tokens),
        ("sglang:generation_tokens", "Tokens drawn", stats.generated_tokens),
        ("sglang:cached_tokens", "Prompt tokens that came from the cache", stats.cached_tokens),
        ("oscar_preemptions", "Answers that lost their place to an older one", stats.preemptions),
        ("oscar_kv_demoted_pages", "bf16 history that was sealed for want of pages", stats.demoted_pages),
        ("oscar_evicted_pages", "Pages that the prefix tree forgot", stats.cache.evicted_pages),
        ("oscar_evicted_warm_pages", "bf16 copies that the prefix tree gave up", stats.cache.evicted_warm),
        ("oscar_host_stored_pages", "Pages copied to the host's memory", stats.cache.host.stored),
        ("oscar_host_restored_pages", "Pages copied back from the host's memory", stats.cache.host.restored),
        ("oscar_prefix_lookups", "Prompts looked up in the prefix tree", stats.cache.lookups),
        ("oscar_prefix_hits", "Prompts of which the prefix tree had something", stats.cache.hits),
    ] {
        registry.register(name, help, ConstCounter::new(value));
    }
    let pages = Family::<Labels, Gauge>::default();
    for (pool, count) in [
        ("exact", stats.cache.exact),
        ("sealed", stats.cache.sealed),
        ("high", stats.cache.high),
        ("scratch", stats.cache.scratch),
    ] {
        for (owner, value) in [
            ("free", count.free),
            ("tree", count.tree_only),
            ("shared", count.shared),
            ("request", count.request_only),
        ] {
            let labels = vec![("pool", pool.to_owned()), ("owner", owner.to_owned())];
            pages.get_or_create(&labels).set(value as i64);
        }
    }
    registry.register("oscar_pages", "Pages by pool and owner", pages);
    let (host, host_pages) = (stats.cache.host, Family::<Labels, Gauge>::default());
    for (pool, pages, used) in
        [("exact", host.exact_pages, host.exact_used), ("sealed", host.sealed_pages, host.sealed_used)]
    {
        for (owner, value) in [("free", pages - used), ("tree", used)] {
            let labels = vec![("pool", pool.to_owned()), ("owner", owner.to_owned())];
            host_pages.get_or_create(&labels).set(value as i64);
        }
    }
    registry.register("oscar_host_pages", "Pages in the host's memory by pool", host_pages);
    let states = Family::<Labels, Gauge>::default();
    let count = stats.cache.states;
    for (state, value) in
        [("filling", count.filling), ("exact", count.exact), ("both", count.both), ("sealed", count.sealed)]
    {
        states.get_or_create(&vec![("state", state.to_owned())]).set(value as i64);
    }
    registry.register("oscar_sequence_pages", "Pages of open sequences by state", states);
    let (sequences, pages) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
    for OfferedTier { name, tier, .. } in offered(info) {
        let held = tier_use(stats, tier);
        let label = ("tier", name.to_owned());
        sequences.get_or_create(&vec![label.clone()]).set(held.sequences as i64);
        for (pool, count) in [("exact", held.exact_pages), ("sealed", held.sealed_pages)] {
            pages.get_or_create(&vec![label.clone(), ("pool", pool.to_owned())]).set(count as i64);
        }
    }
    registry.register("oscar_tier_sequences", "Sequences by the precision of their history", sequences);
    registry.register("oscar_tier_pages", "Their pages by pool; shared ones count twice", pages);
    registry
}

/// A series of the text, for those who read one number.
#[cfg(test)]
pub(crate) fn series<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let head = format!("{name}{{");
    text.lines().find(|line| line.starts_with(&head)).and_then(|line| line.rsplit(' ').next())
}

#[cfg(test)]
mod tests {
    use oscar_engine::{SequenceView, Tier};
    use oscar_kv::HostStats;

    use super::*;

    #[test]
    fn numbers_carry_the_names_dashboards_know() {
        let metrics = Metrics::new("m");
        metrics.first_token.observe(0.5);
        metrics.requests.inc();
        metrics.responded(200);
        let info = EngineInfo {
            capacity_tokens: 1000,
            bits_per_element: 2.5,
            kv: "int2".to_owned(),
            bf16_context: Some(500),
            high_context: Some(800),
            ..EngineInfo::default()
        };
        let mut stats = EngineStats { running: 3, queued: 2, prompt_tokens: 10, ..EngineStats::default() };
        stats.demoted_pages = 6;
        let view = |tier, exact_pages| SequenceView { tier, exact_pages, ..SequenceView::default() };
        stats.sequences =
            vec![view(Tier::Exact, 9), view(Tier::Sealed, 4), view(Tier::Exact, 2), view(Tier::High, 5)];
        stats.cached_tokens = 4;
        stats.cache.exact.free = 7;
        stats.cache.host = HostStats { sealed_pages: 9, sealed_used: 4, restored: 3, ..HostStats::default() };
        let text = metrics.text(&info, &stats, false).unwrap();
        for (name, value) in [
            ("sglang:num_running_reqs", "3.0"),
            ("sglang:num_queue_reqs", "2.0"),
            ("sglang:cache_hit_rate", "0.4"),
            ("sglang:prompt_tokens_total", "10"),
            ("sglang:time_to_first_token_seconds_count", "1"),
            ("sglang:num_requests_total", "1"),
            ("oscar_kv_bits_per_element", "2.5"),
            ("oscar_kv_demoted_pages_total", "6"),
            ("oscar_host_restored_pages_total", "3"),
            ("oscar_device_failed", "0.0"),
        ] {
            assert_eq!(series(&text, name), Some(value), "{text}");
        }
        assert!(text.contains("oscar_pages{model_name=\"m\",pool=\"exact\",owner=\"free\"} 7"), "{text}");
        for line in [
            "oscar_host_pages{model_name=\"m\",pool=\"sealed\",owner=\"free\"} 5",
            "oscar_tier_sequences{model_name=\"m\",tier=\"bf16\"} 2",
            "oscar_tier_pages{model_name=\"m\",tier=\"bf16\",pool=\"exact\"} 11",
            "oscar_tier_pages{model_name=\"m\",tier=\"int2\",pool=\"exact\"} 4",
            "oscar_tier_pages{model_name=\"m\",tier=\"high\",pool=\"exact\"} 5",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
