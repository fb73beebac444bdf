//! Llama 3: `{"name": …, "parameters": {…}}` in place of an answer, with or without `<|python_tag|>`; several calls are
//! separated by `;` or `,`. A built-in tool is called by `<|python_tag|>NAME.call(KEY="value")`.

use std::sync::Arc;

use super::builtin::BuiltinCall;
use super::call::{CallObject, Progress, Rules};
use super::markers::{Front, Markers, front, leading_space};
use super::schema::ToolSchemas;
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[TAG];
const TAG: &str = "<|python_tag|>";
/// White space behind the tag that may stand in front of a call.
const MAX_SPACE_BYTES: usize = 64;

#[derive(Debug)]
enum State {
    /// Nothing but white space yet.
    Begin,
    Text,
    /// Behind the tag: what is held back.
    Tagged(String),
    Call(Box<CallObject>),
    Builtin(Box<BuiltinCall>),
    /// Behind a call.
    Next,
    /// Behind the separator that follows a call; it is content if no call follows.
    Separated(char),
}

#[derive(Debug)]
pub(super) struct Llama3 {
    schemas: Arc<ToolSchemas>,
    state: State,
    tag: Markers,
}

impl Llama3 {
    pub(super) fn new(schemas: Arc<ToolSchemas>) -> Self {
        Self {
            schemas,
            state: State::Begin,
            tag: Markers::new(&[TAG]),
        }
    }

    fn begin_call(&mut self, rules: Rules, marker: &str) {
        self.state = State::Call(Box::new(CallObject::new(rules, marker)));
    }

    fn call(&mut self, text: &str, sink: &mut Sink) -> Step {
        let progress = match &mut self.state {
            State::Call(call) => call.push(text, sink),
            State::Builtin(call) => call.push(text, sink),
            _ => return Step::Consumed(0),
        };
        let (consumed, next) = match progress {
            Progress::More => return Step::Consumed(text.len()),
            Progress::Done(end) => (end, State::Next),
            Progress::Broken(at) => (at, State::Text),
        };
        self.state = next;
        Step::Consumed(consumed)
    }

    /// A call as an object, or as one of a built-in tool.
    fn tagged(&mut self, text: &str) -> Step {
        let State::Tagged(held) = &mut self.state else {
            return Step::Consumed(0);
        };
        let space = leading_space(text).min(MAX_SPACE_BYTES.saturating_sub(held.len() - TAG.len()));
        if space > 0 {
            held.push_str(&text[..space]);
            return Step::Consumed(space);
        }
        let held = std::mem::take(held);
        if text.starts_with('{') {
            self.begin_call(Rules::Marked, &held);
        } else {
            let call = BuiltinCall::new(&held, Arc::clone(&self.schemas));
            self.state = State::Builtin(Box::new(call));
        }
        Step::Consumed(0)
    }

    /// Where a call may stand without a tag: at the start, and behind another call. `text` begins with no space.
    fn may_call(&mut self, text: &str, separator: &str, sink: &mut Sink) -> Step {
        match front(text, TAG) {
            Front::Partial => Step::Wait,
            Front::Whole => {
                self.state = State::Tagged(TAG.to_owned());
                Step::Consumed(TAG.len())
            }
            Front::Other if text.starts_with('{') => {
                self.begin_call(Rules::Bare, separator);
                Step::Consumed(0)
            }
            Front::Other => {
                sink.content(separator);
                self.state = State::Text;
                Step::Consumed(0)
            }
        }
    }
}

impl Machine for Llama3 {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        match &mut self.state {
            State::Begin if space > 0 => {
                sink.content(&text[..space]);
                Step::Consumed(space)
            }
            State::Begin => self.may_call(text, "", sink),
            State::Text => {
                let found = self.tag.search(text);
                sink.content(&text[..found.plain]);
                if found.marker.is_none() {
                    return Step::all_but_held(found.plain);
                }
                self.state = State::Tagged(TAG.to_owned());
                Step::Consumed(found.plain + TAG.len())
            }
            State::Tagged(_) => self.tagged(text),
            State::Call(_) | State::Builtin(_) => self.call(text, sink),
            State::Next | State::Separated(_) if space > 0 => Step::Consumed(space),
            State::Next => match text.chars().next() {
                Some(separator @ (';' | ',')) => {
                    self.state = State::Separated(separator);
                    Step::Consumed(1)
                }
                _ => self.may_call(text, "", sink),
            },
            State::Separated(separator) => {
                let separator = separator.to_string();
                self.may_call(text, &separator, sink)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Tagged(held) => sink.content(held),
            State::Call(call) => call.finish(sink),
            State::Builtin(call) => call.finish(sink),
            State::Separated(separator) => {
                let separator = separator.to_string();
                sink.content(&separator);
                sink.content(rest);
            }
            State::Begin | State::Text | State::Next => sink.content(rest),
        }
    }
}
