//! `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and Qwen 3.

use super::call::{CallObject, Progress, Rules};
use super::markers::{Front, Markers, front, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[OPEN, CLOSE];
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
enum State {
    Text,
    Call(Box<CallObject>),
    /// Behind the object: its closing tag, which some models leave out.
    Close,
    /// Between calls, white space is dropped.
    Between,
}

#[derive(Debug)]
pub(super) struct Hermes {
    state: State,
    open: Markers,
}

impl Hermes {
    pub(super) fn new() -> Self {
        Self {
            state: State::Text,
            open: Markers::new(&[OPEN]),
        }
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> Step {
        let found = self.open.search(text);
        sink.content(&text[..found.plain]);
        if found.marker.is_none() {
            return Step::all_but_held(found.plain);
        }
        self.state = State::Call(Box::new(CallObject::new(Rules::Marked, OPEN)));
        Step::Consumed(found.plain + OPEN.len())
    }
}

impl Machine for Hermes {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        match &mut self.state {
            State::Text => self.text(text, sink),
            State::Call(call) => {
                let (consumed, next) = match call.push(text, sink) {
                    Progress::More => return Step::Consumed(text.len()),
                    Progress::Done(end) => (end, State::Close),
                    Progress::Broken(at) => (at, State::Text),
                };
                self.state = next;
                Step::Consumed(consumed)
            }
            State::Close => {
                let space = leading_space(text);
                if space > 0 {
                    return Step::Consumed(space);
                }
                let tag = match front(text, CLOSE) {
                    Front::Partial => return Step::Wait,
                    Front::Whole => CLOSE.len(),
                    Front::Other => 0,
                };
                self.state = State::Between;
                Step::Consumed(tag)
            }
            State::Between => {
                let space = leading_space(text);
                if space < text.len() {
                    self.state = State::Text;
                }
                Step::Consumed(space)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Text => sink.content(rest),
            State::Call(call) => call.finish(sink),
            // The beginning of a closing tag belongs to the call that is complete.
            State::Close | State::Between => {}
        }
    }
}
