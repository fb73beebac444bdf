//! What Prometheus reads; `docs/metrics.md` lists every name.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use octavo_wire::Progress;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::latency::Latency;

/// Seconds until a first token, or a whole answer.
const LONG: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Seconds between two tokens.
const SHORT: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
];
/// Tokens of a prompt or an answer.
const TOKENS: [f64; 12] = [
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    handler: String,
    status: u16,
}

/// A replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEngine {
    engine: usize,
}

/// All counts of the front, and those that the engines told last.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Mutex<Registry>,
    running: Family<OfEngine, Gauge>,
    waiting: Family<OfEngine, Gauge>,
    cache_usage: Family<OfEngine, Gauge<f64, AtomicU64>>,
    prefix_queries: Family<OfEngine, Counter>,
    prefix_hits: Family<OfEngine, Counter>,
    preemptions: Family<OfEngine, Counter>,
    pub(crate) prompt_tokens: Counter,
    pub(crate) generation_tokens: Counter,
    engine_restarts: Family<OfEngine, Counter>,
    engine_up: Family<OfEngine, Gauge>,
    finished: Family<Finished, Counter>,
    answered: Family<Answered, Counter>,
    first_token: Latency,
    between_tokens: Latency,
    whole: Histogram,
    prompt_length: Histogram,
    answer_length: Histogram,
}

impl Metrics {
    /// For `engines` replicas.
    pub(crate) fn new(engines: usize) -> Self {
        let histogram = |buckets: &[f64]| Histogram::new(buckets.iter().copied());
        let metrics = Self {
            registry: Mutex::default(),
            running: Family::default(),
            waiting: Family::default(),
            cache_usage: Family::default(),
            prefix_queries: Family::default(),
            prefix_hits: Family::default(),
            preemptions: Family::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            engine_restarts: Family::default(),
            engine_up: Family::default(),
            finished: Family::default(),
            answered: Family::default(),
            first_token: Latency::new(&LONG),
            between_tokens: Latency::new(&SHORT),
            whole: histogram(&LONG),
            prompt_length: histogram(&TOKENS),
            answer_length: histogram(&TOKENS),
        };
        // Present from the first scrape on, so that rates of them are.
        for finished_reason in ["stop", "length", "abort", "error"] {
            let _ = metrics
                .finished
                .get_or_create(&Finished { finished_reason });
        }
        for engine in 0..engines {
            metrics.set_progress(engine, &Progress::default());
            let _ = metrics.engine_restarts.get_or_create(&OfEngine { engine });
            let _ = metrics.engine_up.get_or_create(&OfEngine { engine });
        }
        *lock(&metrics.registry) = metrics.registered();
        metrics
    }

    fn registered(&self) -> Registry {
        let mut r = Registry::default();
        self.register_counts(&mut r);
        self.register_requests(&mut r);
        r
    }

    fn register_counts(&self, r: &mut Registry) {
        r.register(
            "octavo:num_requests_running",
            "Sequences in the running batch",
            self.running.clone(),
        );
        r.register(
            "octavo:num_requests_waiting",
            "Sequences that wait for a place in it",
            self.waiting.clone(),
        );
        r.register(
            "octavo:kv_cache_usage_perc",
            "Share of the KV cache's blocks in use, 0 to 1",
            self.cache_usage.clone(),
        );
        r.register(
            "octavo:prefix_cache_queries",
            "Known tokens of admitted sequences",
            self.prefix_queries.clone(),
        );
        r.register(
            "octavo:prefix_cache_hits",
            "Those of them found in the prefix cache",
            self.prefix_hits.clone(),
        );
        r.register(
            "octavo:num_preemptions",
            "Preemptions",
            self.preemptions.clone(),
        );
        r.register(
            "octavo:prompt_tokens",
            "Prompt tokens of accepted requests",
            self.prompt_tokens.clone(),
        );
        r.register(
            "octavo:generation_tokens",
            "Output tokens",
            self.generation_tokens.clone(),
        );
        r.register(
            "octavo:engine_restarts",
            "Engine processes that died and were replaced",
            self.engine_restarts.clone(),
        );
        r.register(
            "octavo:engine_up",
            "1 while an engine process takes requests",
            self.engine_up.clone(),
        );
    }

    fn register_requests(&self, r: &mut Registry) {
        r.register(
            "octavo:request_success",
            "Choices that ended, by reason",
            self.finished.clone(),
        );
        r.register(
            "octavo:http_requests",
            "HTTP requests, by route and status",
            self.answered.clone(),
        );
        r.register(
            "octavo:time_to_first_token_seconds",
            "From a request's arrival to its first token",
            self.first_token.histogram(),
        );
        r.register(
            "octavo:inter_token_latency_seconds",
            "Between two tokens of a choice",
            self.between_tokens.histogram(),
        );
        r.register(
            "octavo:e2e_request_latency_seconds",
            "From a request's arrival to the end of a choice",
            self.whole.clone(),
        );
        r.register(
            "octavo:request_prompt_tokens",
            "Tokens of a prompt",
            self.prompt_length.clone(),
        );
        r.register(
            "octavo:request_generation_tokens",
            "Tokens of a choice",
            self.answer_length.clone(),
        );
    }

    /// Takes over what an engine says of itself; after a restart it counts from 0 again.
    pub(crate) fn set_progress(&self, engine: usize, progress: &Progress) {
        let (of, stats) = (OfEngine { engine }, &progress.stats);
        self.running
            .get_or_create(&of)
            .set(stats.num_running as i64);
        self.waiting
            .get_or_create(&of)
            .set(stats.num_waiting as i64);
        let used = stats
            .num_blocks
            .saturating_sub(stats.free_blocks + stats.evictable_blocks);
        self.cache_usage
            .get_or_create(&of)
            .set(f64::from(used) / f64::from(stats.num_blocks.max(1)));
        for (counters, value) in [
            (&self.prefix_queries, stats.query_tokens),
            (&self.prefix_hits, stats.hit_tokens),
            (&self.preemptions, stats.preemptions),
        ] {
            let counter = counters.get_or_create(&of);
            counter.inner().store(value, Ordering::Relaxed);
        }
    }

    /// An engine takes requests.
    pub(crate) fn engine_up(&self, engine: usize) {
        self.engine_up.get_or_create(&OfEngine { engine }).set(1);
    }

    /// An engine is gone.
    pub(crate) fn engine_gone(&self, engine: usize) {
        let of = OfEngine { engine };
        self.engine_up.get_or_create(&of).set(0);
        self.engine_restarts.get_or_create(&of).inc();
    }

    /// An HTTP request was answered.
    pub(crate) fn answered(&self, handler: &str, status: u16) {
        let labels = Answered {
            handler: handler.to_owned(),
            status,
        };
        self.answered.get_or_create(&labels).inc();
    }

    /// What the page shows of them and of one engine, as JSON.
    pub(crate) fn summary(&self, engine: usize) -> Value {
        let restarts = self.engine_restarts.get_or_create(&OfEngine { engine });
        json!({
            "prompt_tokens": self.prompt_tokens.get(),
            "generation_tokens": self.generation_tokens.get(),
            "engine_restarts": restarts.get(),
            "time_to_first_token": self.first_token.counts(),
            "inter_token_latency": self.between_tokens.counts(),
        })
    }

    /// All of them in OpenMetrics' text form.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &lock(&self.registry));
        text
    }
}

fn lock(registry: &Mutex<Registry>) -> std::sync::MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times of one choice.
#[derive(Debug)]
pub(crate) struct Clock {
    arrived: Instant,
    last: Option<Instant>,
    tokens: u64,
    ended: bool,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            arrived: Instant::now(),
            last: None,
            tokens: 0,
            ended: false,
        }
    }

    /// Notes tokens that came together.
    pub(crate) fn tokens(&mut self, count: u64, metrics: &Metrics) {
        if count == 0 {
            return;
        }
        let now = Instant::now();
        match self.last {
            None => metrics
                .first_token
                .observe((now - self.arrived).as_secs_f64()),
            Some(last) => metrics
                .between_tokens
                .observe((now - last).as_secs_f64() / count as f64),
        }
        self.last = Some(now);
        self.tokens += count;
        metrics.generation_tokens.inc_by(count);
    }

    /// Notes the end of the choice; the first one counts.
    pub(crate) fn end(&mut self, finished_reason: &'static str, metrics: &Metrics) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        metrics.whole.observe(self.arrived.elapsed().as_secs_f64());
        metrics.answer_length.observe(self.tokens as f64);
        metrics
            .finished
            .get_or_create(&Finished { finished_reason })
            .inc();
    }
}

impl Metrics {
    /// Notes the prompt of an accepted request.
    pub(crate) fn accepted(&self, prompt_tokens: usize) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.prompt_length.observe(prompt_tokens as f64);
    }
}
