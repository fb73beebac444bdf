//! gpt-oss: messages on channels, `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`.
//!
//! `analysis` is reasoning, a message to a recipient (`to=functions.NAME`) is a call, everything else is content. The
//! prompt ends with `<|start|>assistant`, so a text begins inside a header, or without any.

use super::call::{Arguments, Progress};
use super::markers::{Markers, leading_space};
use super::sink::Sink;
use super::{Machine, Step};

/// A header is no longer than this.
const MAX_HEADER_BYTES: usize = 512;

const START: usize = 0;
const CHANNEL: usize = 1;
const MESSAGE: usize = 2;
const CONSTRAIN: usize = 3;
/// All that this format writes; behind [`CONSTRAIN`] those that end a message.
pub(super) const MARKERS: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

#[derive(Debug)]
enum State {
    /// Outside of messages: text here is content.
    Outside,
    Header(Header),
    Reasoning,
    Content,
    /// The message of a call, in front of its arguments.
    Call(String),
    Arguments(Arguments),
    /// Behind the arguments.
    Called,
}

#[derive(Debug, Default)]
struct Header {
    /// As the model wrote it, markers included.
    raw: String,
    /// Where in `raw` the channel is.
    channel: Option<usize>,
}

impl Header {
    fn add(&mut self, text: &str) {
        self.raw.push_str(text);
    }

    /// The kind of the message that begins behind this header.
    fn message(&self) -> State {
        let words = |text: &'static str| move |word: &&str| word.starts_with(text);
        let mut all = self
            .raw
            .split(|c: char| c.is_whitespace() || c == '<' || c == '>');
        if let Some(recipient) = all.find(words("to=")) {
            let name = recipient.trim_start_matches("to=");
            let name = name.strip_prefix("functions.").unwrap_or(name);
            if !name.is_empty() {
                return State::Call(name.to_owned());
            }
        }
        let channel = self.channel.map_or("", |at| &self.raw[at..]);
        if channel.trim_start().starts_with("analysis") {
            State::Reasoning
        } else {
            State::Content
        }
    }
}

#[derive(Debug)]
pub(super) struct Harmony {
    state: State,
    markers: Markers,
}

impl Harmony {
    pub(super) fn new() -> Self {
        Self {
            state: State::Outside,
            markers: Markers::new(MARKERS),
        }
    }

    /// A marker that stands outside of headers; inside a message it ends it, wanted or not.
    fn marker(&mut self, marker: usize) {
        self.state = match marker {
            START | CHANNEL => {
                let mut header = Header::default();
                header.add(MARKERS[marker]);
                header.channel = (marker == CHANNEL).then_some(header.raw.len());
                State::Header(header)
            }
            MESSAGE => State::Content,
            _ => State::Outside,
        };
    }

    fn header(&mut self, text: &str, sink: &mut Sink) -> Step {
        let found = self.markers.search(text);
        let State::Header(header) = &mut self.state else {
            return Step::Consumed(0);
        };
        let room = MAX_HEADER_BYTES.saturating_sub(header.raw.len());
        if found.plain > room {
            let cut = (0..=room)
                .rev()
                .find(|&at| text.is_char_boundary(at))
                .unwrap_or(0);
            sink.content(&header.raw);
            sink.content(&text[..cut]);
            self.state = State::Content;
            return Step::Consumed(cut);
        }
        header.add(&text[..found.plain]);
        let Some(marker) = found.marker else {
            return Step::all_but_held(found.plain);
        };
        match marker {
            MESSAGE => self.state = header.message(),
            CHANNEL | CONSTRAIN => {
                header.add(MARKERS[marker]);
                if marker == CHANNEL {
                    header.channel = Some(header.raw.len());
                }
            }
            // It breaks off; a header without message has nothing to show.
            _ => self.marker(marker),
        }
        Step::Consumed(found.plain + MARKERS[marker].len())
    }

    /// Text up to the next marker goes to `show`.
    fn body(&mut self, text: &str, sink: &mut Sink, show: fn(&mut Sink, &str)) -> Step {
        let found = self.markers.search(text);
        show(sink, &text[..found.plain]);
        let Some(marker) = found.marker else {
            return Step::all_but_held(found.plain);
        };
        if marker != CONSTRAIN {
            self.marker(marker);
        }
        Step::Consumed(found.plain + MARKERS[marker].len())
    }

    /// The message of a call begins: with a brace, with the end of an empty message, or with what is no JSON.
    fn call(&mut self, text: &str, sink: &mut Sink) -> Step {
        let State::Call(name) = &mut self.state else {
            return Step::Consumed(0);
        };
        if text.starts_with('{') {
            sink.start(std::mem::take(name));
            self.state = State::Arguments(Arguments::new());
            return Step::Consumed(0);
        }
        let found = self.markers.search(text);
        match found.marker {
            Some(marker) if found.plain == 0 => {
                sink.start(std::mem::take(name));
                sink.arguments("{}");
                sink.end(true);
                self.marker(marker);
                Step::Consumed(MARKERS[marker].len())
            }
            None if found.plain == 0 => Step::Wait,
            _ => {
                self.state = State::Content;
                Step::Consumed(0)
            }
        }
    }
}

impl Machine for Harmony {
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step {
        match &mut self.state {
            State::Outside | State::Content => self.body(text, sink, Sink::content),
            State::Reasoning => self.body(text, sink, Sink::reasoning),
            State::Header(_) => self.header(text, sink),
            State::Call(_) | State::Called if leading_space(text) > 0 => {
                Step::Consumed(leading_space(text))
            }
            State::Call(_) => self.call(text, sink),
            State::Arguments(arguments) => {
                let (consumed, next) = match arguments.push(text, sink) {
                    Progress::More => return Step::Consumed(text.len()),
                    Progress::Done(end) => (end, State::Called),
                    Progress::Broken(at) => (at, State::Content),
                };
                self.state = next;
                Step::Consumed(consumed)
            }
            State::Called => {
                self.state = State::Outside;
                Step::Consumed(0)
            }
        }
    }

    fn finish(&mut self, rest: &str, sink: &mut Sink) {
        match &mut self.state {
            State::Outside | State::Content => sink.content(rest),
            State::Reasoning => sink.reasoning(rest),
            State::Arguments(_) => sink.end(false),
            State::Header(_) | State::Call(_) | State::Called => {}
        }
    }
}
