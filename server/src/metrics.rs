//! Counts for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::access_log::Record;

/// Counters since the server began.
#[derive(Debug)]
pub(crate) struct Metrics {
    start: Instant,
    requests: Mutex<BTreeMap<(String, u16), Requests>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    pub refused: AtomicU64,
    pub loads: AtomicU64,
}

#[derive(Debug, Default)]
struct Requests {
    count: u64,
    seconds: f64,
}

/// Current values of gauges.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    pub waiting: usize,
    pub running: usize,
    pub loaded: usize,
    pub loaded_bytes: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            requests: Mutex::default(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            completion_tokens: AtomicU64::default(),
            refused: AtomicU64::default(),
            loads: AtomicU64::default(),
        }
    }
}

impl Metrics {
    /// Counts a request that is over.
    pub(crate) fn request(&self, record: &Record) {
        let add = |counter: &AtomicU64, count: usize| {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        };
        add(&self.prompt_tokens, record.prompt_tokens);
        add(&self.cached_tokens, record.cached_tokens);
        add(&self.completion_tokens, record.completion_tokens);
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let of_route = requests.entry((record.route.clone(), record.status)).or_default();
        of_route.count += 1;
        of_route.seconds += record.time.as_secs_f64();
    }

    /// All of it as text.
    pub(crate) fn text(&self, now: &Gauges) -> String {
        let mut out = String::new();
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        head(&mut out, "qhx_requests_total", "counter", "Requests that are over");
        for ((route, status), requests) in requests.iter() {
            let count = requests.count;
            line(&mut out, "qhx_requests_total", &labels(route, *status), count);
        }
        head(&mut out, "qhx_request_seconds_total", "counter", "Time that they took");
        for ((route, status), requests) in requests.iter() {
            let seconds = requests.seconds;
            line(&mut out, "qhx_request_seconds_total", &labels(route, *status), seconds);
        }
        drop(requests);
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        for (name, kind, what, value) in [
            ("prompt_tokens_total", "counter", "Tokens of prompts", of(&self.prompt_tokens)),
            (
                "cached_tokens_total",
                "counter",
                "Of these, those whose state was there already",
                of(&self.cached_tokens),
            ),
            (
                "completion_tokens_total",
                "counter",
                "Tokens of answers",
                of(&self.completion_tokens),
            ),
            (
                "refused_total",
                "counter",
                "Requests refused as the queue was full",
                of(&self.refused),
            ),
            ("model_loads_total", "counter", "Models that were loaded", of(&self.loads)),
            ("requests_waiting", "gauge", "Requests that wait for their turn", now.waiting as f64),
            ("requests_running", "gauge", "Requests that are worked on", now.running as f64),
            ("models_loaded", "gauge", "Models that are loaded", now.loaded as f64),
            (
                "models_loaded_bytes",
                "gauge",
                "Bytes of their files, states and sessions",
                now.loaded_bytes as f64,
            ),
            (
                "uptime_seconds",
                "gauge",
                "Time since the server began",
                self.start.elapsed().as_secs_f64(),
            ),
        ] {
            let name = format!("qhx_{name}");
            head(&mut out, &name, kind, what);
            line(&mut out, &name, "", value);
        }
        out
    }
}

/// Routes are the server's own, and need no escapes.
fn labels(route: &str, status: u16) -> String {
    format!("{{route=\"{route}\",status=\"{status}\"}}")
}

fn head(out: &mut String, name: &str, kind: &str, what: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "# HELP {name} {what}\n# TYPE {name} {kind}");
}

fn line(out: &mut String, name: &str, labels: &str, value: impl std::fmt::Display) {
    let _ = writeln!(out, "{name}{labels} {value}");
}
