//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
//! `[TOOL_CALLS]name[ARGS]{…}`, also with `[CALL_ID]id` in front of `[ARGS]`.

use super::call::{Arguments, CallObject, Progress, Rules};
use super::header::{self, Header, is_name, is_name_character};
use super::markers::{Markers, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[OPEN, ARGS, CALL_ID];
const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

#[derive(Debug)]
enum State {
    Text,
    /// Behind the marker.
    Opened(Header),
    /// An object of a list of calls, or a single one.
    Call(Box<CallObject>, InList),
    Arguments(Arguments),
    /// Behind an object of a list.
    Listed,
    /// Between calls, white space is dropped.
    Between,
}

type InList = bool;

#[derive(Debug)]
pub(super) struct Mistral {
    state: State,
    open: Markers,
}

impl Mistral {
    pub(super) fn new() -> Self {
        Self {
            state: State::Text,
            open: Markers::new(&[OPEN]),
        }
    }

    /// The brace behind the marker and a header has come.
    fn brace(&mut self, at: usize, sink: &mut Sink) -> Step {
        let State::Opened(header) = &self.state else {
            return Step::Consumed(0);
        };
        let between = header.text().trim();
        self.state = if between.is_empty() || between == "[" {
            let marker = format!("{OPEN}{}", header.text());
            let call = CallObject::new(Rules::Marked, &marker);
            State::Call(Box::new(call), between == "[")
        } else if let Some(name) = name_of(between) {
            sink.start(name.to_owned());
            State::Arguments(Arguments::new())
        } else {
            header.give_up(sink);
            State::Text
        };
        Step::Consumed(at)
    }
}

/// The name in `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`.
fn name_of(header: &str) -> Option<&str> {
    let name = header.strip_suffix(ARGS).unwrap_or(header);
    let name = name.split_once(CALL_ID).map_or(name, |(name, _)| name);
    is_name(name.trim()).then(|| name.trim())
}

fn allowed(character: char) -> bool {
    is_name_character(character) || "[] \t\r\n".contains(character)
}

impl Machine for Mistral {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        match &mut self.state {
            State::Text => {
                let found = self.open.search(text);
                sink.content(&text[..found.plain]);
                if found.marker.is_none() {
                    return Step::all_but_held(found.plain);
                }
                self.state = State::Opened(Header::new(OPEN));
                Step::Consumed(found.plain + OPEN.len())
            }
            State::Opened(opened) => match opened.push(text, allowed, sink) {
                header::Progress::More => Step::Consumed(text.len()),
                header::Progress::Brace(at) => self.brace(at, sink),
                header::Progress::Broken(at) => {
                    self.state = State::Text;
                    Step::Consumed(at)
                }
            },
            State::Call(call, in_list) => {
                let in_list = *in_list;
                let (consumed, next) = match call.push(text, sink) {
                    Progress::More => return Step::Consumed(text.len()),
                    Progress::Done(end) if in_list => (end, State::Listed),
                    Progress::Done(end) => (end, State::Between),
                    Progress::Broken(at) => (at, State::Text),
                };
                self.state = next;
                Step::Consumed(consumed)
            }
            State::Arguments(arguments) => {
                let (consumed, next) = match arguments.push(text, sink) {
                    Progress::More => return Step::Consumed(text.len()),
                    Progress::Done(end) => (end, State::Between),
                    Progress::Broken(at) => (at, State::Text),
                };
                self.state = next;
                Step::Consumed(consumed)
            }
            State::Listed if space > 0 => Step::Consumed(space),
            State::Listed => match text.as_bytes().first() {
                Some(b',') => {
                    let call = CallObject::new(Rules::Marked, ",");
                    self.state = State::Call(Box::new(call), true);
                    Step::Consumed(1)
                }
                Some(b']') => {
                    self.state = State::Between;
                    Step::Consumed(1)
                }
                Some(_) => {
                    self.state = State::Text;
                    Step::Consumed(0)
                }
                None => Step::Wait,
            },
            State::Between => {
                if space < text.len() {
                    self.state = State::Text;
                }
                Step::Consumed(space)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Text | State::Between => sink.content(rest),
            State::Opened(header) => header.give_up(sink),
            State::Call(call, _) => call.finish(sink),
            State::Arguments(_) => sink.end(false),
            State::Listed => {}
        }
    }
}
