//! Server-sent events: one for each token, each handed to the connection by itself.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde::Serialize;

use super::collect::{Session, Step};
use crate::error::ApiError;

const DONE: &[u8] = b"data: [DONE]\n\n";

/// Makes events of steps.
pub(crate) trait Render: Send + Unpin + 'static {
    /// Events before the first token.
    fn begin(&mut self, events: &mut Events);
    /// Events of a step that did not fail.
    fn step(&mut self, step: Step, events: &mut Events);
    /// Events after the last token.
    fn end(&mut self, session: &Session, events: &mut Events);
    /// The event of an error; nothing but the close comes after it.
    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.push(&error.body());
    }
    /// What a stream ends with, however it went.
    fn close(&mut self, events: &mut Events) {
        events.0.push_back(Bytes::from_static(DONE));
    }
}

/// Events on their way to the client.
#[derive(Debug, Default)]
pub(crate) struct Events(VecDeque<Bytes>);

impl Events {
    /// Appends an event.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.append(Vec::with_capacity(256), data);
    }

    /// Forgets what is not on its way yet.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Appends an event with a name.
    pub(crate) fn push_named(&mut self, name: &str, data: &impl Serialize) {
        let mut event = Vec::with_capacity(256);
        event.extend_from_slice(b"event: ");
        event.extend_from_slice(name.as_bytes());
        event.push(b'\n');
        self.append(event, data);
    }

    fn append(&mut self, mut event: Vec<u8>, data: &impl Serialize) {
        event.extend_from_slice(b"data: ");
        // Strings and numbers have a form in JSON; log-probabilities are finite.
        if serde_json::to_writer(&mut event, data).is_ok() {
            event.extend_from_slice(b"\n\n");
            self.0.push_back(Bytes::from(event));
        }
    }
}

/// The body of a streamed reply. Dropping it, as the server does when the client leaves, withdraws its requests.
struct EventStream<R> {
    session: Session,
    render: R,
    events: Events,
    ended: bool,
}

impl<R: Render> Stream for EventStream<R> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.events.0.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            let event = ready!(this.session.ticket().events.poll_recv(context));
            match this.session.take(event) {
                Step::Failed(error) => {
                    this.render.fail(&error, &mut this.events);
                    this.close();
                }
                step => {
                    this.render.step(step, &mut this.events);
                    if this.session.is_finished() {
                        this.render.end(&this.session, &mut this.events);
                        this.close();
                    }
                }
            }
        }
    }
}

impl<R: Render> EventStream<R> {
    fn close(&mut self) {
        self.render.close(&mut self.events);
        self.ended = true;
    }
}

/// The reply whose events `render` makes.
pub(crate) fn response<R: Render>(session: Session, mut render: R) -> Response {
    let mut events = Events::default();
    render.begin(&mut events);
    let stream = EventStream {
        session,
        render,
        events,
        ended: false,
    };
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream; charset=utf-8"),
        ),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // A proxy that collects events would make one of many.
        (
            header::HeaderName::from_static("x-accel-buffering"),
            HeaderValue::from_static("no"),
        ),
    ];
    (headers, Body::from_stream(stream)).into_response()
}

/// `stream` and `stream_options` of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

impl StreamOptions {
    pub(crate) fn take(body: &mut super::body::Body) -> Result<Self, ApiError> {
        let stream = body.flag("stream", false)?;
        let Some(options) = body.take("stream_options") else {
            return Ok(Self {
                stream,
                include_usage: false,
            });
        };
        if !stream {
            return Err(ApiError::field(
                "stream_options",
                "left out unless 'stream' is true",
                &options,
            ));
        }
        let mut options = super::body::Body::inner("stream_options", options)?;
        let include_usage = options.flag("include_usage", false)?;
        // Padding against those who read lengths of encrypted packets: asked for by a client, never needed by it.
        options.flag("include_obfuscation", false)?;
        options.finish(crate::config::UnknownFields::Reject)?;
        Ok(Self {
            stream,
            include_usage,
        })
    }
}
