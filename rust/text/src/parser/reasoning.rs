//! `<think>…</think>` at the start of a text: Qwen3, DeepSeek R1 and others.

use super::markers::{Front, Markers, front, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[OPEN, CLOSE];
const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space yet.
    Begin,
    /// Behind `<think>`, white space is dropped.
    Opened,
    Inside,
    /// Behind `</think>`, white space is dropped.
    Closed,
    Content,
}

/// Separates the reasoning of a text from what follows it, which goes on as content.
#[derive(Debug)]
pub(super) struct Think {
    state: State,
    close: Markers,
    /// Whether the prompt ends inside the reasoning.
    open: bool,
}

impl Think {
    pub(super) fn new(open: bool) -> Self {
        Self {
            state: State::Begin,
            close: Markers::new(&[CLOSE]),
            open,
        }
    }

    fn begin(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        match front(&text[space..], OPEN) {
            Front::Whole => {
                self.state = State::Opened;
                return Step::Consumed(space + OPEN.len());
            }
            Front::Other if self.open => self.state = State::Inside,
            Front::Other => self.state = State::Content,
            Front::Partial if space == 0 => return Step::Wait,
            Front::Partial => {}
        }
        // White space in front of the reasoning is no part of it, in front of an answer it is.
        if !self.open {
            sink.content(&text[..space]);
        }
        Step::Consumed(space)
    }
}

impl Machine for Think {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        match self.state {
            State::Begin => self.begin(text, sink),
            State::Opened | State::Closed => {
                let space = leading_space(text);
                if space < text.len() {
                    self.state = if self.state == State::Opened {
                        State::Inside
                    } else {
                        State::Content
                    };
                }
                Step::Consumed(space)
            }
            State::Inside => {
                let found = self.close.search(text);
                sink.reasoning(&text[..found.plain]);
                if found.marker.is_none() {
                    return Step::all_but_held(found.plain);
                }
                self.state = State::Closed;
                Step::Consumed(found.plain + CLOSE.len())
            }
            State::Content => {
                sink.content(text);
                Step::Consumed(text.len())
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        if self.state == State::Inside || (self.open && self.state == State::Begin) {
            sink.reasoning(rest);
        } else {
            sink.content(rest);
        }
    }
}
