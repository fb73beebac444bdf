//! One span for each generation, with the attributes of OpenTelemetry's conventions for generative AI. Nothing is kept when nobody asks.
//!
//! A span is reached by the tasks that work on its request through a task-local; it is told when the last of them lets go of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{MatchedPath, Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use octavo_core::params::SamplingParams;
use serde_json::{Value, json};

use crate::app::App;
use crate::otlp::Exporter;

tokio::task_local! {
    static CURRENT: Trace;
}

/// Where a span belongs, as W3C's trace context says it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parent {
    /// 32 hexadecimal digits.
    trace_id: String,
    /// 16 hexadecimal digits.
    span_id: String,
    is_sampled: bool,
    state: Option<String>,
}

/// The span of the request that this task works on.
#[derive(Clone, Debug)]
pub(crate) struct Trace(Arc<Span>);

#[derive(Debug)]
struct Span {
    exporter: Exporter,
    operation: &'static str,
    model: String,
    trace_id: String,
    span_id: String,
    parent: Option<Parent>,
    start: u64,
    facts: Mutex<Facts>,
}

/// What is learned on the way.
#[derive(Debug, Default)]
struct Facts {
    attributes: Vec<(&'static str, Value)>,
    first_token: Option<u64>,
    finish_reasons: Vec<&'static str>,
    status: Option<u16>,
    failure: Option<String>,
}

/// The span of this task, if requests are traced.
pub(crate) fn current() -> Option<Trace> {
    CURRENT.try_with(Clone::clone).ok()
}

impl Trace {
    fn facts(&self) -> std::sync::MutexGuard<'_, Facts> {
        self.0.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was asked for.
    pub(crate) fn asked(&self, params: &SamplingParams) {
        let shortest = |number: f32| number.to_string().parse::<f64>().unwrap_or_default();
        let facts = &mut self.facts().attributes;
        facts.extend([
            ("gen_ai.request.max_tokens", json!(params.max_tokens)),
            (
                "gen_ai.request.temperature",
                json!(shortest(params.temperature)),
            ),
            ("gen_ai.request.top_p", json!(shortest(params.top_p))),
            ("gen_ai.request.choice.count", json!(params.n)),
        ]);
        if params.top_k > 0 {
            facts.push(("gen_ai.request.top_k", json!(f64::from(params.top_k))));
        }
        for (name, penalty) in [
            ("gen_ai.request.frequency_penalty", params.frequency_penalty),
            ("gen_ai.request.presence_penalty", params.presence_penalty),
        ] {
            if penalty != 0.0 {
                facts.push((name, json!(shortest(penalty))));
            }
        }
    }

    /// A token has come; the first one counts.
    pub(crate) fn token(&self) {
        self.facts().first_token.get_or_insert_with(now);
    }

    /// A choice has ended.
    pub(crate) fn finished(&self, reason: &'static str) {
        self.facts().finish_reasons.push(reason);
    }

    /// The request failed after its answer had begun.
    pub(crate) fn failed(&self, message: &str) {
        self.facts().failure = Some(message.to_owned());
    }

    /// Tokens of all prompts and choices.
    pub(crate) fn used(&self, input: usize, cached: usize, output: usize) {
        self.facts().attributes.extend([
            ("gen_ai.usage.input_tokens", json!(input)),
            ("gen_ai.usage.cache_read.input_tokens", json!(cached)),
            ("gen_ai.usage.output_tokens", json!(output)),
        ]);
    }
}

/// Gives a generation its span.
pub(crate) async fn layer(
    State((app, exporter)): State<(Arc<App>, Exporter)>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let route = route.as_ref().map_or("", MatchedPath::as_str);
    let Some(operation) = operation(route) else {
        return next.run(request).await;
    };
    let parent = parent(request.headers());
    if parent.as_ref().is_some_and(|parent| !parent.is_sampled) {
        return next.run(request).await;
    }
    let Some((trace_id, span_id)) = ids(parent.as_ref()) else {
        return next.run(request).await;
    };
    let trace = Trace(Arc::new(Span {
        exporter,
        operation,
        model: app
            .config
            .served_model_name
            .first()
            .cloned()
            .unwrap_or_default(),
        trace_id,
        span_id,
        parent,
        start: now(),
        facts: Mutex::default(),
    }));
    trace.facts().attributes.push(("http.route", json!(route)));
    let response = CURRENT.scope(trace.clone(), next.run(request)).await;
    trace.facts().status = Some(response.status().as_u16());
    response
}

fn operation(route: &str) -> Option<&'static str> {
    match route {
        "/v1/chat/completions" | "/v1/responses" | "/v1/messages" => Some("chat"),
        "/v1/completions" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// `traceparent` and `tracestate`; none if they are absent or no valid ones.
fn parent(headers: &HeaderMap) -> Option<Parent> {
    let mut parts = headers.get("traceparent")?.to_str().ok()?.trim().split('-');
    let (version, trace_id, span_id, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length| {
        text.len() == length
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    // Later versions may have more parts; ff is none.
    let is_whole = is_hex(version, 2)
        && version != "ff"
        && (version != "00" || parts.next().is_none())
        && is_hex(trace_id, 32)
        && !is_zero(trace_id)
        && is_hex(span_id, 16)
        && !is_zero(span_id)
        && is_hex(flags, 2);
    if !is_whole {
        return None;
    }
    let state = headers
        .get("tracestate")
        .and_then(|value| value.to_str().ok());
    Some(Parent {
        trace_id: trace_id.to_owned(),
        span_id: span_id.to_owned(),
        is_sampled: u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1),
        state: state.map(str::to_owned),
    })
}

/// The trace's id and a new span's.
fn ids(parent: Option<&Parent>) -> Option<(String, String)> {
    let hex = |number: u128, digits: usize| format!("{number:0digits$x}");
    let random =
        || Some(u128::from(getrandom::u64().ok()?) << 64 | u128::from(getrandom::u64().ok()?));
    let trace_id = match parent {
        Some(parent) => parent.trace_id.clone(),
        None => hex(random()?.max(1), 32),
    };
    Some((trace_id, hex(u128::from(getrandom::u64().ok()?.max(1)), 16)))
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

impl Drop for Span {
    fn drop(&mut self) {
        let facts = std::mem::take(self.facts.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.exporter.send(self.told(facts, now()));
    }
}

impl Span {
    /// The span in OTLP's JSON form.
    fn told(&self, facts: Facts, end: u64) -> Value {
        let mut attributes = vec![
            attribute("gen_ai.operation.name", &json!(self.operation)),
            attribute("gen_ai.provider.name", &json!("octavo")),
            attribute("gen_ai.request.model", &json!(self.model)),
            attribute("gen_ai.response.model", &json!(self.model)),
        ];
        attributes.extend(
            facts
                .attributes
                .iter()
                .map(|(name, value)| attribute(name, value)),
        );
        if !facts.finish_reasons.is_empty() {
            attributes.push(attribute(
                "gen_ai.response.finish_reasons",
                &json!(facts.finish_reasons),
            ));
        }
        let mut events = Vec::new();
        if let Some(time) = facts.first_token {
            let wait = time.saturating_sub(self.start) as f64 * 1e-9;
            attributes.push(attribute(
                "gen_ai.latency.time_to_first_token",
                &json!(wait),
            ));
            events.push(json!({"timeUnixNano": time.to_string(), "name": "first_token"}));
        }
        let status = facts.status.unwrap_or(499);
        attributes.push(attribute("http.response.status_code", &json!(status)));
        let failure = match status {
            500.. => Some(status.to_string()),
            _ => facts.failure.as_ref().map(|_| "stream_error".to_owned()),
        };
        if let Some(kind) = &failure {
            attributes.push(attribute("error.type", &json!(kind)));
        }
        let mut span = json!({
            "traceId": self.trace_id,
            "spanId": self.span_id,
            "name": format!("{} {}", self.operation, self.model),
            // A server's.
            "kind": 2,
            "startTimeUnixNano": self.start.to_string(),
            "endTimeUnixNano": end.to_string(),
            "attributes": attributes,
            "events": events,
            "status": if failure.is_some() { json!({"code": 2, "message": facts.failure.unwrap_or_default()}) } else { json!({}) },
        });
        if let Some(parent) = &self.parent {
            span["parentSpanId"] = json!(parent.span_id);
            span["traceState"] = json!(parent.state.as_deref().unwrap_or_default());
        }
        span
    }
}

fn attribute(name: &str, value: &Value) -> Value {
    json!({"key": name, "value": any_value(value)})
}

/// A value in OTLP's JSON form, where 64-bit integers are strings.
fn any_value(value: &Value) -> Value {
    match value {
        Value::Array(values) => {
            json!({"arrayValue": {"values": values.iter().map(any_value).collect::<Vec<_>>()}})
        }
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::Bool(flag) => json!({"boolValue": flag}),
        other => json!({"stringValue": other.as_str().unwrap_or_default()}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<Parent> {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", text.parse().unwrap());
        headers.insert("tracestate", "vendor=1".parse().unwrap());
        parent(&headers)
    }

    #[test]
    fn a_parent_is_taken_over_as_the_recommendation_says() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let found = parsed(&format!("00-{trace}-{span}-01")).unwrap();
        assert_eq!(
            (found.trace_id.as_str(), found.span_id.as_str()),
            (trace, span)
        );
        assert_eq!(
            (found.is_sampled, found.state.as_deref()),
            (true, Some("vendor=1"))
        );
        assert!(!parsed(&format!("00-{trace}-{span}-00")).unwrap().is_sampled);
        assert!(parsed(&format!("cc-{trace}-{span}-01-what-comes")).is_some());
        for wrong in [
            format!("00-{trace}-{span}-01-more"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{trace}-{span}"),
            String::new(),
        ] {
            assert_eq!(parsed(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn new_ids_have_their_lengths_and_are_never_the_same() {
        let (trace, span) = ids(None).unwrap();
        assert_eq!((trace.len(), span.len()), (32, 16));
        assert_ne!(ids(None).unwrap(), (trace, span));
    }
}
