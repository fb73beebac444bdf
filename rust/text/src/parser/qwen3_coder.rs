//! Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`.
//!
//! The format is not JSON, so arguments are made into it, see [`super::value`]. One newline at either end of a value belongs
//! to the format.

use std::sync::Arc;

use super::markers::{Front, Markers, front, leading_space};
use super::schema::ToolSchemas;
use super::sink::Sink;
use super::value::{ParameterValue, escaped};
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[
    OPEN,
    CLOSE,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
];
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// A name, with the markers in front of it, is no longer than this.
const MAX_NAME_BYTES: usize = 512;

#[derive(Debug)]
enum State {
    Text,
    /// Behind `<tool_call>`: what is held back, content if no function follows.
    Opened(String),
    /// Inside `<function=`: what is held back, and where in it the name begins.
    Function(String, usize),
    /// Between parameters; whether there was one.
    Parameters(bool),
    /// Inside `<parameter=`: the key so far, and whether there was one before.
    Key(String, bool),
    Value(ParameterValue),
    /// Behind `</function>`.
    Close,
    /// Behind a call, white space is dropped.
    Between,
}

#[derive(Debug)]
pub(super) struct Qwen3Coder {
    schemas: Arc<ToolSchemas>,
    state: State,
    /// The function of the call that is being read.
    name: String,
    open: Markers,
    value_end: Markers,
}

impl Qwen3Coder {
    pub(super) fn new(schemas: Arc<ToolSchemas>) -> Self {
        Self {
            schemas,
            state: State::Text,
            name: String::new(),
            open: Markers::new(&[OPEN, FUNCTION]),
            value_end: Markers::new(&[PARAMETER_END]),
        }
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> Step {
        let found = self.open.search(text);
        sink.content(&text[..found.plain]);
        match found.marker {
            None => return Step::all_but_held(found.plain),
            Some(0) => self.state = State::Opened(OPEN.to_owned()),
            Some(_) => self.state = State::Function(FUNCTION.to_owned(), FUNCTION.len()),
        }
        Step::Consumed(found.plain + found.marker.map_or(0, |marker| self.open.len(marker)))
    }

    fn opened(&mut self, text: &str, sink: &mut Sink) -> Step {
        let State::Opened(held) = &mut self.state else {
            return Step::Consumed(0);
        };
        let space = leading_space(text);
        if space > 0 && held.len() < MAX_NAME_BYTES {
            let space = space.min(MAX_NAME_BYTES - held.len());
            held.push_str(&text[..space]);
            return Step::Consumed(space);
        }
        match front(text, FUNCTION) {
            Front::Partial => Step::Wait,
            Front::Whole => {
                let held = format!("{held}{FUNCTION}");
                self.state = State::Function(held.clone(), held.len());
                Step::Consumed(FUNCTION.len())
            }
            Front::Other => {
                sink.content(held);
                self.state = State::Text;
                Step::Consumed(0)
            }
        }
    }

    fn function(&mut self, text: &str, sink: &mut Sink) -> Step {
        let State::Function(held, name) = &mut self.state else {
            return Step::Consumed(0);
        };
        let limit = *name + MAX_NAME_BYTES;
        match take_name(text, held, limit) {
            Name::More => Step::Consumed(text.len()),
            Name::Ends(at) if held.len() > *name => {
                self.name = held[*name..].to_owned();
                sink.start(self.name.clone());
                self.state = State::Parameters(false);
                Step::Consumed(at + 1)
            }
            Name::Ends(at) | Name::Broken(at) => {
                sink.content(held);
                self.state = State::Text;
                Step::Consumed(at)
            }
        }
    }

    fn parameters(&mut self, text: &str, any: bool, sink: &mut Sink) -> Step {
        match (front(text, PARAMETER), front(text, FUNCTION_END)) {
            (Front::Whole, _) => {
                self.state = State::Key(String::new(), any);
                Step::Consumed(PARAMETER.len())
            }
            (_, Front::Whole) => {
                sink.arguments(if any { "}" } else { "{}" });
                sink.end(true);
                self.state = State::Close;
                Step::Consumed(FUNCTION_END.len())
            }
            (Front::Partial, _) | (_, Front::Partial) => Step::Wait,
            _ => {
                sink.end(false);
                self.state = State::Text;
                Step::Consumed(0)
            }
        }
    }

    fn key(&mut self, text: &str, sink: &mut Sink) -> Step {
        let State::Key(key, any) = &mut self.state else {
            return Step::Consumed(0);
        };
        match take_name(text, key, MAX_NAME_BYTES) {
            Name::More => Step::Consumed(text.len()),
            Name::Ends(at) => {
                let separator = if *any { ", " } else { "{" };
                sink.arguments(&format!("{separator}\"{}\": ", escaped(key)));
                let types = self.schemas.types(&self.name, key);
                self.state = State::Value(ParameterValue::new(types, true));
                Step::Consumed(at + 1)
            }
            Name::Broken(at) => {
                sink.end(false);
                self.state = State::Text;
                Step::Consumed(at)
            }
        }
    }

    fn value(&mut self, text: &str, sink: &mut Sink) -> Step {
        let found = self.value_end.search(text);
        let State::Value(value) = &mut self.state else {
            return Step::Consumed(0);
        };
        value.add(&text[..found.plain], sink);
        if found.marker.is_none() {
            return Step::all_but_held(found.plain);
        }
        value.end(sink);
        self.state = State::Parameters(true);
        Step::Consumed(found.plain + PARAMETER_END.len())
    }
}

enum Name {
    More,
    Ends(usize),
    Broken(usize),
}

/// Takes text up to `>` into `held`; names have no white space, no `<`, and end before `limit`.
fn take_name(text: &str, held: &mut String, limit: usize) -> Name {
    for (at, character) in text.char_indices() {
        match character {
            '>' => return Name::Ends(at),
            '<' => return Name::Broken(at),
            _ if character.is_whitespace() || held.len() >= limit => return Name::Broken(at),
            _ => held.push(character),
        }
    }
    Name::More
}

impl Machine for Qwen3Coder {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        match &mut self.state {
            State::Text => self.text(text, sink),
            State::Opened(_) => self.opened(text, sink),
            State::Function(..) => self.function(text, sink),
            State::Key(..) => self.key(text, sink),
            State::Value(_) => self.value(text, sink),
            State::Parameters(_) | State::Close | State::Between if space > 0 => {
                Step::Consumed(space)
            }
            State::Parameters(any) => {
                let any = *any;
                self.parameters(text, any, sink)
            }
            State::Close => {
                let tag = match front(text, CLOSE) {
                    Front::Partial => return Step::Wait,
                    Front::Whole => CLOSE.len(),
                    Front::Other => 0,
                };
                self.state = State::Between;
                Step::Consumed(tag)
            }
            State::Between => {
                self.state = State::Text;
                Step::Consumed(0)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Text => sink.content(rest),
            State::Opened(held) => {
                sink.content(held);
                sink.content(rest);
            }
            State::Function(held, _) => sink.content(held),
            State::Parameters(_) | State::Key(..) | State::Value(_) => sink.end(false),
            State::Close | State::Between => {}
        }
    }
}
