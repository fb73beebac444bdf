//! Whole formats by example, and what holds for every text and every parser.

mod formats;
mod properties;
mod typed;

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Event, OutputParser, ToolSchemas};

/// Every useful pair of parsers: tools, reasoning, whether the prompt opened the reasoning.
const ALL: &[(Option<&str>, Option<&str>, bool)] = &[
    (None, None, false),
    (Some("hermes"), None, false),
    (Some("hermes"), Some("qwen3"), false),
    (Some("hermes"), Some("qwen3"), true),
    (Some("llama3_json"), None, false),
    (Some("mistral"), None, false),
    (Some("deepseek_v3"), None, false),
    (Some("deepseek_v3"), Some("deepseek_r1"), false),
    (Some("qwen3_coder"), None, false),
    (Some("qwen3_coder"), Some("qwen3"), false),
    (Some("harmony"), Some("gpt_oss"), false),
    (Some("harmony"), None, false),
    (None, Some("gpt_oss"), false),
    (None, Some("qwen3"), true),
];

fn parser((tools, reasoning, open): (Option<&str>, Option<&str>, bool)) -> OutputParser {
    OutputParser::for_tools(tools, reasoning, open, &schemas()).unwrap()
}

/// Of a function `typed` with a parameter of each type; all other functions are unknown.
fn schemas() -> Arc<ToolSchemas> {
    let properties = json!({
        "s": {"type": "string"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
        "sn": {"type": ["string", "integer", "null"]},
    });
    let function =
        json!({"name": "typed", "parameters": {"type": "object", "properties": properties}});
    Arc::new(ToolSchemas::new(
        &json!([{"type": "function", "function": function}]),
    ))
}

/// The events of a text that comes in these pieces, neighbours of one kind joined.
fn events<'a>(mut parser: OutputParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Event> {
    let mut all = Vec::new();
    for piece in pieces {
        for event in parser.push(piece) {
            join(&mut all, event);
        }
    }
    for event in parser.finish() {
        join(&mut all, event);
    }
    all
}

fn join(all: &mut Vec<Event>, event: Event) {
    match (all.last_mut(), event) {
        (Some(Event::Content(last)), Event::Content(text))
        | (Some(Event::Reasoning(last)), Event::Reasoning(text)) => last.push_str(&text),
        (
            Some(Event::ToolCallArguments { index, delta }),
            Event::ToolCallArguments {
                index: same,
                delta: more,
            },
        ) if *index == same => delta.push_str(&more),
        (_, event) => all.push(event),
    }
}

fn content(text: &str) -> Event {
    Event::Content(text.to_owned())
}

fn reasoning(text: &str) -> Event {
    Event::Reasoning(text.to_owned())
}

/// The events of a whole call.
fn call(index: usize, name: &str, arguments: &str) -> Vec<Event> {
    let mut events = broken_call(index, name, arguments);
    events.pop();
    events.push(Event::ToolCallEnd { index, valid: true });
    events
}

/// The events of a call that breaks off.
fn broken_call(index: usize, name: &str, arguments: &str) -> Vec<Event> {
    let start = Event::ToolCallStart {
        index,
        name: name.to_owned(),
    };
    let delta = Event::ToolCallArguments {
        index,
        delta: arguments.to_owned(),
    };
    let end = Event::ToolCallEnd {
        index,
        valid: false,
    };
    vec![start, delta, end]
}

/// What must hold of any events: calls are counted, whole and in order, and valid ones have JSON objects as arguments.
fn check(events: &[Event]) {
    let mut open: Option<String> = None;
    let mut calls = 0;
    for event in events {
        match event {
            Event::Content(text) | Event::Reasoning(text) => {
                assert!(open.is_none() && !text.is_empty(), "{events:?}");
            }
            Event::ToolCallStart { index, name } => {
                assert!(open.is_none() && *index == calls && !name.is_empty());
                open = Some(String::new());
                calls += 1;
            }
            Event::ToolCallArguments { index, delta } => {
                assert_eq!(*index + 1, calls);
                open.as_mut().unwrap().push_str(delta);
            }
            Event::ToolCallEnd { index, valid } => {
                assert_eq!(*index + 1, calls);
                let arguments = open.take().unwrap();
                // Numbers beyond the range of a float are JSON, and no `Value`.
                if *valid && !arguments.contains(['e', 'E']) {
                    let parsed: Value = serde_json::from_str(&arguments).unwrap();
                    assert!(parsed.is_object(), "{arguments}");
                }
            }
        }
    }
    assert!(open.is_none());
}
