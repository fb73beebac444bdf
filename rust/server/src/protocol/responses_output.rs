//! The output of `/v1/responses`: items that open, grow and close, told as events and kept for the whole response.

use serde_json::{Map, Value, json};

use super::choice::{Ended, Piece};
use super::collect::{Session, Step};
use super::message::{Delta, MessageReader};
use super::reply::{Usage, random_hex};
use super::scores::{Scorer, TokenLogprobs};
use super::sse::{Events, Render};
use crate::error::ApiError;

/// The kind of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    /// The call of this number, with its id and name.
    Call {
        index: usize,
        id: String,
        name: String,
    },
}

/// The item that grows.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
    /// Of a message's tokens, if they were asked for.
    scores: Vec<TokenLogprobs>,
}

/// One response while it is made.
pub(super) struct Output {
    /// What it says of its request.
    told: Map<String, Value>,
    reader: MessageReader,
    scorer: Scorer,
    /// Of tokens whose text has not come out yet.
    waiting: Vec<TokenLogprobs>,
    /// Those that are whole.
    items: Vec<Value>,
    open: Option<Open>,
    reasoning_tokens: usize,
    end: Option<Ended>,
    /// Unique part of the ids of items.
    unique: String,
    sequence: u64,
}

impl Open {
    /// The item as far as it goes.
    fn item(&self, status: &str) -> Value {
        match &self.kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "id": self.id, "status": status, "summary": [],
                "content": [{"type": "reasoning_text", "text": self.text}],
            }),
            Kind::Message => json!({
                "type": "message", "id": self.id, "status": status, "role": "assistant",
                "content": [self.part()],
            }),
            Kind::Call { id, name, .. } => json!({
                "type": "function_call", "id": self.id, "status": status, "call_id": id, "name": name,
                "arguments": self.text,
            }),
        }
    }

    /// The one part of a message or of the reasoning.
    fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => {
                json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.scores})
            }
        }
    }
}

impl Output {
    pub(super) fn new(
        told: Map<String, Value>,
        reader: MessageReader,
        scorer: Scorer,
    ) -> Result<Self, ApiError> {
        Ok(Self {
            told,
            reader,
            scorer,
            waiting: Vec::new(),
            items: Vec::new(),
            open: None,
            reasoning_tokens: 0,
            end: None,
            unique: random_hex()?,
            sequence: 0,
        })
    }

    fn emit(&mut self, name: &str, mut data: Value, events: &mut Events) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        events.push_named(name, &data);
    }

    /// Appends what tokens brought.
    pub(super) fn extend(&mut self, pieces: Vec<Piece>, events: &mut Events) {
        for piece in pieces {
            self.waiting.extend(self.scorer.scores(&piece));
            let delta = self.reader.push(&piece.text);
            self.reasoning_tokens += usize::from(delta.reasoning_content.is_some());
            self.delta(delta, events);
            self.end = piece.ended.or(self.end.take());
        }
    }

    fn delta(&mut self, delta: Delta, events: &mut Events) {
        if let Some(text) = delta.reasoning_content {
            self.append(Kind::Reasoning, &text, events);
        }
        if let Some(text) = delta.content {
            self.append(Kind::Message, &text, events);
        }
        for call in delta.tool_calls {
            let (index, text) = (call.index, call.function.arguments);
            let kind = match (call.id, call.function.name) {
                (Some(id), Some(name)) => Kind::Call { index, id, name },
                // More of the call that is open.
                _ => match self.open.as_ref().map(|open| open.kind.clone()) {
                    Some(kind @ Kind::Call { .. }) => kind,
                    _ => continue,
                },
            };
            self.append(kind, &text, events);
        }
    }

    fn append(&mut self, kind: Kind, text: &str, events: &mut Events) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close_item(events);
            self.open_item(kind, events);
        }
        let place = self.items.len();
        let Some(open) = self.open.as_mut().filter(|_| !text.is_empty()) else {
            return;
        };
        open.text.push_str(text);
        // Those of reasoning, calls and what marks them are told nowhere.
        let scores = std::mem::take(&mut self.waiting);
        let mut data = json!({"item_id": open.id, "output_index": place, "delta": text});
        let name = match open.kind {
            Kind::Call { .. } => "response.function_call_arguments.delta",
            Kind::Reasoning => {
                data["content_index"] = 0.into();
                "response.reasoning_text.delta"
            }
            Kind::Message => {
                data["content_index"] = 0.into();
                data["logprobs"] = json!(scores);
                open.scores.extend(scores);
                "response.output_text.delta"
            }
        };
        self.emit(name, data, events);
    }

    fn open_item(&mut self, kind: Kind, events: &mut Events) {
        let place = self.items.len();
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let open = Open {
            kind,
            id: format!("{prefix}_{}{place:02}", self.unique),
            text: String::new(),
            scores: Vec::new(),
        };
        let mut item = open.item("in_progress");
        if item["content"].is_array() {
            item["content"] = json!([]);
        }
        self.emit(
            "response.output_item.added",
            json!({"output_index": place, "item": item}),
            events,
        );
        if !matches!(open.kind, Kind::Call { .. }) {
            let data = json!({"item_id": open.id, "output_index": place, "content_index": 0, "part": open.part()});
            self.emit("response.content_part.added", data, events);
        }
        self.open = Some(open);
    }

    fn close_item(&mut self, events: &mut Events) {
        let Some(open) = self.open.take() else {
            return;
        };
        let place = self.items.len();
        let mut data = json!({"item_id": open.id, "output_index": place});
        let name = match &open.kind {
            Kind::Call { name, .. } => {
                data["name"] = name.as_str().into();
                data["arguments"] = open.text.as_str().into();
                "response.function_call_arguments.done"
            }
            Kind::Reasoning | Kind::Message => {
                data["content_index"] = 0.into();
                data["text"] = open.text.as_str().into();
                if open.kind == Kind::Message {
                    data["logprobs"] = json!(open.scores);
                    "response.output_text.done"
                } else {
                    "response.reasoning_text.done"
                }
            }
        };
        self.emit(name, data, events);
        if !matches!(open.kind, Kind::Call { .. }) {
            let data = json!({"item_id": open.id, "output_index": place, "content_index": 0, "part": open.part()});
            self.emit("response.content_part.done", data, events);
        }
        let item = open.item(if self.is_cut() {
            "incomplete"
        } else {
            "completed"
        });
        self.emit(
            "response.output_item.done",
            json!({"output_index": place, "item": item}),
            events,
        );
        self.items.push(item);
    }

    fn is_cut(&self) -> bool {
        self.end == Some(Ended::Length)
    }

    /// Ends the output and returns the whole response.
    pub(super) fn finish(&mut self, usage: &Usage, events: &mut Events) -> Value {
        let rest = self.reader.finish();
        self.delta(rest, events);
        self.close_item(events);
        let status = if self.is_cut() {
            "incomplete"
        } else {
            "completed"
        };
        let mut response = self.response(status);
        if self.is_cut() {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens()},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        response
    }

    /// The response as far as it goes.
    fn response(&self, status: &str) -> Value {
        let mut response = json!({
            "object": "response",
            "status": status,
            "error": null,
            "incomplete_details": null,
            "output": self.items,
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "store": false,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": {},
            "usage": null,
        });
        for (name, value) in &self.told {
            response[name] = value.clone();
        }
        for (name, default) in [
            ("tools", json!([])),
            ("tool_choice", json!("auto")),
            ("parallel_tool_calls", json!(true)),
        ] {
            if response[name].is_null() {
                response[name] = default;
            }
        }
        response
    }
}

impl Render for Output {
    fn begin(&mut self, events: &mut Events) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.emit(name, json!({"response": response}), events);
        }
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        if let Step::Pieces { pieces, .. } = step {
            self.extend(pieces, events);
        }
    }

    fn end(&mut self, session: &Session, events: &mut Events) {
        let response = self.finish(&session.usage, events);
        let name = if self.is_cut() {
            "response.incomplete"
        } else {
            "response.completed"
        };
        self.emit(name, json!({"response": response}), events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        let mut response = self.response("failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        self.emit("response.failed", json!({"response": response}), events);
    }

    /// The response's end is the last event.
    fn close(&mut self, _events: &mut Events) {}
}
