//! `<think>…</think>` at the start of a text: Qwen3, DeepSeek R1 and others.

use super::markers::{Front, Markers, front, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[OPEN, CLOSE];
const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";
/// White space at the start that may stand in front of reasoning.
const MAX_SPACE_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space yet, which is held back.
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
    /// White space at the start.
    space: String,
}

impl Think {
    pub(super) fn new(open: bool) -> Self {
        Self {
            state: State::Begin,
            close: Markers::new(&[CLOSE]),
            open,
            space: String::new(),
        }
    }

    fn begin(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        if space > 0 && self.space.len() < MAX_SPACE_BYTES {
            let space = space.min(MAX_SPACE_BYTES - self.space.len());
            self.space.push_str(&text[..space]);
            return Step::Consumed(space);
        }
        match front(text, OPEN) {
            Front::Partial => Step::Wait,
            Front::Whole => {
                self.state = State::Opened;
                Step::Consumed(OPEN.len())
            }
            Front::Other => {
                self.state = if self.open {
                    State::Inside
                } else {
                    // In front of reasoning white space is no part of it, in front of an answer it is.
                    sink.content(&self.space);
                    State::Content
                };
                Step::Consumed(0)
            }
        }
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
        match self.state {
            State::Begin if self.open => sink.reasoning(rest),
            State::Begin => {
                sink.content(&self.space);
                sink.content(rest);
            }
            State::Inside => sink.reasoning(rest),
            State::Opened | State::Closed | State::Content => sink.content(rest),
        }
    }
}
