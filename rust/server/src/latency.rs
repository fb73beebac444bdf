//! A histogram that can be read back: Prometheus' client writes its own, and does not tell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::histogram::Histogram;
use serde_json::{Value, json};

/// Times in buckets.
#[derive(Debug)]
pub(crate) struct Latency {
    histogram: Histogram,
    bounds: &'static [f64],
    /// One more than there are bounds: the last is for what is above all of them.
    counts: Arc<[AtomicU64]>,
}

impl Latency {
    /// `bounds` are the upper ends of the buckets in seconds, ascending.
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        Self {
            histogram: Histogram::new(bounds.iter().copied()),
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// For the registry.
    pub(crate) fn histogram(&self) -> Histogram {
        self.histogram.clone()
    }

    pub(crate) fn observe(&self, seconds: f64) {
        self.histogram.observe(seconds);
        let bucket = self.bounds.partition_point(|&bound| bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// The buckets' upper ends in seconds and how many times fell into each, the last one without an end.
    pub(crate) fn counts(&self) -> Value {
        let counts: Vec<u64> = self
            .counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        json!({"bounds": self.bounds, "counts": counts})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_falls_into_the_bucket_whose_end_is_not_below_it_as_in_prometheus() {
        let latency = Latency::new(&[0.1, 1.0]);
        for seconds in [0.0, 0.1, 0.100_1, 1.0, 1.1, 50.0] {
            latency.observe(seconds);
        }
        assert_eq!(latency.counts()["counts"], json!([2, 2, 2]));
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register("seconds", "help", latency.histogram());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        // Prometheus counts from the first bucket on.
        for line in [
            "seconds_bucket{le=\"0.1\"} 2",
            "seconds_bucket{le=\"1.0\"} 4",
            "seconds_bucket{le=\"+Inf\"} 6",
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
    }
}
