//! Spans to an OpenTelemetry collector: OTLP over HTTP in its JSON form, in batches, beside the requests and never in their way.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::log::say;

/// Spans that wait; those that come when so many do are lost.
const MAX_WAITING: usize = 8192;
/// Spans of one message.
const BATCH: usize = 512;
/// How long a span waits for others.
const EVERY: Duration = Duration::from_secs(1);
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where spans are given away.
#[derive(Clone, Debug)]
pub(crate) struct Exporter(mpsc::Sender<Value>);

/// A collector's address.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    host: String,
    authority: HeaderValue,
    port: u16,
    path: String,
}

impl Endpoint {
    /// Of a URL; without a path it is the one of the protocol's standard.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(url: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("otlp_endpoint must be {why}, got {url:?}");
        let uri: Uri = url.parse().map_err(|_| wrong("a URL"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong(
                "an http:// URL: put a collector on this machine in between for TLS",
            ));
        }
        let authority = uri.authority().ok_or_else(|| wrong("a URL with a host"))?;
        let path = match uri.path() {
            "" | "/" => "/v1/traces",
            path => path,
        };
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            authority: HeaderValue::from_str(authority.as_str())
                .map_err(|_| wrong("a URL with a host"))?,
            port: authority.port_u16().unwrap_or(4318),
            path: path.to_owned(),
        })
    }
}

impl Exporter {
    /// Begins to send to `endpoint`.
    pub(crate) fn start(endpoint: Endpoint) -> Self {
        let (sender, inbox) = mpsc::channel(MAX_WAITING);
        tokio::spawn(run(endpoint, inbox));
        Self(sender)
    }

    /// Takes a span; it is lost if too many wait.
    pub(crate) fn send(&self, span: Value) {
        let _ = self.0.try_send(span);
    }
}

async fn run(endpoint: Endpoint, mut inbox: mpsc::Receiver<Value>) {
    let mut spans = Vec::with_capacity(BATCH);
    let mut was_lost = false;
    while let Some(first) = inbox.recv().await {
        spans.push(first);
        let more = async {
            while spans.len() < BATCH {
                match inbox.recv().await {
                    Some(span) => spans.push(span),
                    None => return,
                }
            }
        };
        let _ = timeout(EVERY, more).await;
        let sent = post(&endpoint, &message(&spans)).await;
        // One line for each time that it begins to fail.
        if let (Err(reason), false) = (&sent, was_lost) {
            say(&format!(
                "{} spans were lost, the collector fails: {reason}",
                spans.len()
            ));
        }
        was_lost = sent.is_err();
        spans.clear();
        if was_lost {
            sleep(EVERY).await;
        }
    }
}

fn message(spans: &[Value]) -> Value {
    let named = |name: &str, value: &str| json!({"key": name, "value": {"stringValue": value}});
    json!({"resourceSpans": [{
        "resource": {"attributes": [
            named("service.name", "octavo"),
            named("service.version", env!("CARGO_PKG_VERSION")),
        ]},
        "scopeSpans": [{"scope": {"name": "octavo.server"}, "spans": spans}],
    }]})
}

/// Sends one message on a connection of its own.
async fn post(endpoint: &Endpoint, message: &Value) -> Result<(), String> {
    let sending = async {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|error| error.to_string())?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        let connection = tokio::spawn(connection);
        let request = Request::post(&endpoint.path)
            .header(header::HOST, &endpoint.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(Bytes::from(message.to_string())))
            .map_err(|error| error.to_string())?;
        let answer = sender.send_request(request).await;
        connection.abort();
        match answer {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => Err(format!("it answers {}", answer.status())),
            Err(error) => Err(error.to_string()),
        }
    };
    match timeout(PATIENCE, sending).await {
        Ok(sent) => sent,
        Err(_) => Err("it does not answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_base_or_a_whole_address() {
        let parts = |url: &str| {
            let found = Endpoint::parse(url).unwrap();
            (found.host, found.port, found.path)
        };
        let expected = |host: &str, port, path: &str| (host.to_owned(), port, path.to_owned());
        assert_eq!(
            parts("http://localhost:4318"),
            expected("localhost", 4318, "/v1/traces")
        );
        assert_eq!(
            parts("http://collector/"),
            expected("collector", 4318, "/v1/traces")
        );
        assert_eq!(
            parts("http://[::1]:9/x/v1/traces"),
            expected("::1", 9, "/x/v1/traces")
        );
        for wrong in [
            "localhost:4318",
            "https://localhost",
            "ftp://x",
            "",
            "http://",
        ] {
            assert!(Endpoint::parse(wrong).is_err(), "{wrong}");
        }
    }
}
