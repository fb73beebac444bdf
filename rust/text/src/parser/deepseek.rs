//! DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fenced block of JSON, `<｜tool▁call▁end｜>`; and
//! V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`; all calls between `<｜tool▁calls▁begin｜>` and
//! `<｜tool▁calls▁end｜>`.

use super::call::{Arguments, Progress};
use super::header::{self, Header, is_name, is_name_character};
use super::markers::{Front, Markers, front, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

pub(super) const MARKERS: &[&str] = &[CALLS, CALLS_END, CALL, CALL_END, SEPARATOR];
const CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Behind the marker that opens the calls; it is content if no call follows.
    First,
    /// Behind a call.
    Later,
}

#[derive(Debug)]
enum State {
    Text,
    /// In front of a call or of the end of the calls.
    Between(Place),
    Header(Header),
    Arguments(Arguments),
    /// Behind the arguments.
    Fence,
    CallEnd,
    /// Behind the calls, white space is dropped.
    Behind,
}

#[derive(Debug)]
pub(super) struct DeepSeek {
    state: State,
    open: Markers,
}

impl DeepSeek {
    pub(super) fn new() -> Self {
        Self {
            state: State::Text,
            open: Markers::new(&[CALLS, CALL]),
        }
    }

    fn between(&mut self, text: &str, place: Place, sink: &mut Sink) -> Step {
        let ends = (front(text, CALL), front(text, CALLS_END));
        let (consumed, next) = match ends {
            (Front::Whole, _) => {
                let marker = if place == Place::First {
                    [CALLS, CALL].concat()
                } else {
                    CALL.to_owned()
                };
                (CALL.len(), State::Header(Header::new(&marker)))
            }
            (_, Front::Whole) => (CALLS_END.len(), State::Behind),
            (Front::Partial, _) | (_, Front::Partial) => return Step::Wait,
            _ => {
                if place == Place::First {
                    sink.content(CALLS);
                }
                (0, State::Text)
            }
        };
        self.state = next;
        Step::Consumed(consumed)
    }

    fn header(&mut self, text: &str, sink: &mut Sink) -> Step {
        let State::Header(header) = &mut self.state else {
            return Step::Consumed(0);
        };
        let (consumed, next) = match header.push(text, allowed, sink) {
            header::Progress::More => return Step::Consumed(text.len()),
            header::Progress::Broken(at) => (at, State::Text),
            header::Progress::Brace(at) => match name_of(header.text()) {
                Some(name) => {
                    sink.start(name.to_owned());
                    (at, State::Arguments(Arguments::new()))
                }
                None => {
                    header.give_up(sink);
                    (at, State::Text)
                }
            },
        };
        self.state = next;
        Step::Consumed(consumed)
    }

    /// Drops what may follow the arguments, and goes on with `next` once it is there or something else is.
    fn skip(&mut self, text: &str, token: &str, next: State) -> Step {
        let consumed = match front(text, token) {
            Front::Partial => return Step::Wait,
            Front::Whole => token.len(),
            Front::Other => 0,
        };
        self.state = next;
        Step::Consumed(consumed)
    }
}

/// The name in `name<sep>` or in `function<sep>name`, newline, opening fence.
fn name_of(header: &str) -> Option<&str> {
    let (before, after) = header.split_once(SEPARATOR)?;
    let after = after.trim();
    if after.is_empty() {
        return Some(before.trim()).filter(|name| is_name(name));
    }
    let name = after.strip_suffix("json").unwrap_or(after);
    let name = name.trim_end().strip_suffix(FENCE).unwrap_or(name).trim();
    is_name(name).then_some(name)
}

fn allowed(character: char) -> bool {
    is_name_character(character) || "<>｜▁` \t\r\n".contains(character)
}

impl Machine for DeepSeek {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        let space = leading_space(text);
        match &mut self.state {
            State::Text => {
                let found = self.open.search(text);
                sink.content(&text[..found.plain]);
                let Some(marker) = found.marker else {
                    return Step::all_but_held(found.plain);
                };
                self.state = if marker == 0 {
                    State::Between(Place::First)
                } else {
                    State::Header(Header::new(CALL))
                };
                Step::Consumed(found.plain + self.open.len(marker))
            }
            State::Header(_) => self.header(text, sink),
            State::Arguments(arguments) => {
                let (consumed, next) = match arguments.push(text, sink) {
                    Progress::More => return Step::Consumed(text.len()),
                    Progress::Done(end) => (end, State::Fence),
                    Progress::Broken(at) => (at, State::Text),
                };
                self.state = next;
                Step::Consumed(consumed)
            }
            State::Between(Place::First) => self.between(text, Place::First, sink),
            // White space between the parts is dropped.
            State::Between(_) | State::Fence | State::CallEnd | State::Behind if space > 0 => {
                Step::Consumed(space)
            }
            State::Between(Place::Later) => self.between(text, Place::Later, sink),
            State::Fence => self.skip(text, FENCE, State::CallEnd),
            State::CallEnd => self.skip(text, CALL_END, State::Between(Place::Later)),
            State::Behind => {
                self.state = State::Text;
                Step::Consumed(0)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Text => sink.content(rest),
            State::Between(Place::First) => {
                sink.content(CALLS);
                sink.content(rest);
            }
            State::Header(header) => header.give_up(sink),
            State::Arguments(_) => sink.end(false),
            State::Between(Place::Later) | State::Fence | State::CallEnd | State::Behind => {}
        }
    }
}
