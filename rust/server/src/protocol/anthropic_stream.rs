//! An answer of `/v1/messages` in events: blocks that open, grow and close.

use serde_json::{Value, json};

use super::anthropic::{error_body, stop};
use super::choice::Ended;
use super::collect::{Session, Step};
use super::message::{Delta, MessageReader};
use super::sse::{Events, Render};
use crate::error::ApiError;

/// The kind of the block that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    /// The call of this number.
    Call(usize),
}

/// Makes the events of one answer.
pub(super) struct Stream {
    id: String,
    model: String,
    reader: MessageReader,
    prompt_tokens: usize,
    open: Option<Open>,
    /// Blocks that were opened.
    blocks: usize,
    end: Option<Ended>,
}

impl Stream {
    pub(super) fn new(
        id: String,
        model: String,
        reader: MessageReader,
        prompt_tokens: usize,
    ) -> Self {
        Self {
            id,
            model,
            reader,
            prompt_tokens,
            open: None,
            blocks: 0,
            end: None,
        }
    }

    /// Appends to a block, which is opened as `content_block` if it is not the open one.
    fn extend(
        &mut self,
        kind: Open,
        content_block: Value,
        delta: Option<Value>,
        events: &mut Events,
    ) {
        if self.open != Some(kind) {
            self.close_block(events);
            let start = json!({"type": "content_block_start", "index": self.blocks, "content_block": content_block});
            events.push_named("content_block_start", &start);
            self.open = Some(kind);
            self.blocks += 1;
        }
        if let Some(delta) = delta {
            let delta =
                json!({"type": "content_block_delta", "index": self.blocks - 1, "delta": delta});
            events.push_named("content_block_delta", &delta);
        }
    }

    fn close_block(&mut self, events: &mut Events) {
        if self.open.take().is_some() {
            let stop = json!({"type": "content_block_stop", "index": self.blocks - 1});
            events.push_named("content_block_stop", &stop);
        }
    }

    fn delta(&mut self, delta: Delta, events: &mut Events) {
        if let Some(text) = delta.reasoning_content {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            let delta = json!({"type": "thinking_delta", "thinking": text});
            self.extend(Open::Thinking, block, Some(delta), events);
        }
        if let Some(text) = delta.content {
            let block = json!({"type": "text", "text": ""});
            let delta = json!({"type": "text_delta", "text": text});
            self.extend(Open::Text, block, Some(delta), events);
        }
        for call in delta.tool_calls {
            let block =
                json!({"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}});
            let arguments = call.function.arguments;
            let delta = (!arguments.is_empty())
                .then(|| json!({"type": "input_json_delta", "partial_json": arguments}));
            self.extend(Open::Call(call.index), block, delta, events);
        }
    }
}

impl Render for Stream {
    fn begin(&mut self, events: &mut Events) {
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": 0},
        });
        events.push_named(
            "message_start",
            &json!({"type": "message_start", "message": message}),
        );
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        let Step::Pieces { pieces, .. } = step else {
            return;
        };
        for piece in pieces {
            let delta = self.reader.push(&piece.text);
            self.delta(delta, events);
            self.end = piece.ended.or(self.end.take());
        }
    }

    fn end(&mut self, session: &Session, events: &mut Events) {
        let rest = self.reader.finish();
        self.delta(rest, events);
        self.close_block(events);
        let (stop_reason, stop_sequence) = stop(self.end.as_ref(), self.reader.has_called());
        let usage = session.usage;
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens(),
                "cache_read_input_tokens": usage.cached_tokens(),
                "output_tokens": usage.completion_tokens,
            },
        });
        events.push_named("message_delta", &delta);
        events.push_named("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.push_named("error", &error_body(error));
    }

    /// The stop event is the last.
    fn close(&mut self, _events: &mut Events) {}
}
