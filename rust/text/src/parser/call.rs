//! Readers of one tool call's JSON: an object that holds name and arguments, or the arguments alone.
//!
//! Arguments are passed on as they come. What stands before a call is known to be one is held back, to become content if
//! it turns out not to be; a call that is not known within [`MAX_HELD_BYTES`] is none.

use super::json::{JsonScanner, Mark};
use super::sink::Sink;

/// Most text that is held back for a call whose name is not known yet.
pub(super) const MAX_HELD_BYTES: usize = 256 << 10;

/// How far a reader came; the numbers are bytes of the text it was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// All text is consumed, the call goes on.
    More,
    /// The call ended there.
    Done(usize),
    /// From there on the text is no call.
    Broken(usize),
}

/// Reads the object of arguments of a call that has begun.
#[derive(Debug)]
pub(super) struct Arguments(JsonScanner);

impl Arguments {
    pub(super) fn new() -> Self {
        Self(JsonScanner::new())
    }

    /// `text` begins with the brace, or goes on where the last one ended.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink) -> Progress {
        for (at, byte) in text.bytes().enumerate() {
            if self.0.push(byte).is_err() {
                sink.arguments(&text[..at]);
                sink.end(false);
                return Progress::Broken(at);
            }
            if self.0.is_done() {
                sink.arguments(&text[..=at]);
                sink.end(true);
                return Progress::Done(at + 1);
            }
        }
        sink.arguments(text);
        Progress::More
    }
}

/// Which objects are calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// Behind a marker: any further keys, and arguments may be missing.
    Marked,
    /// Without a marker, an object may also be an answer in JSON: only the keys of a call, arguments among them.
    Bare,
}

/// Keys of a call besides its name and arguments.
const OTHER_KEYS: &[&str] = &["type", "id"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Name,
    Arguments,
    Other,
}

/// Reads `{"name": …, "arguments": {…}}`, the keys in any order; `parameters` is another word for `arguments`.
#[derive(Debug)]
pub(super) struct CallObject {
    scanner: JsonScanner,
    rules: Rules,
    /// The text so far, from the marker on, until the call is known to be one.
    held: String,
    role: Role,
    /// Where in `held` the string that is being read begins.
    string: Option<usize>,
    name: Option<String>,
    /// Where in `held` the arguments are.
    arguments: Option<(usize, Option<usize>)>,
    started: bool,
    in_arguments: bool,
}

impl CallObject {
    /// `marker` is what stands in front of the object: content, if it is no call.
    pub(super) fn new(rules: Rules, marker: &str) -> Self {
        Self {
            scanner: JsonScanner::new(),
            rules,
            held: marker.to_owned(),
            role: Role::Other,
            string: None,
            name: None,
            arguments: None,
            started: false,
            in_arguments: false,
        }
    }

    pub(super) fn push(&mut self, text: &str, sink: &mut Sink) -> Progress {
        // Offsets in `text`: of what is not yet in `held`, and of arguments not yet passed on.
        let mut from = 0;
        for (at, byte) in text.bytes().enumerate() {
            let mark = match self.scanner.push(byte) {
                Ok(mark) if self.started || self.has_room(at - from, byte) => mark,
                _ => return self.give_up(text, from, at, sink),
            };
            if self.started {
                if mark == Mark::Close && self.in_arguments && self.scanner.depth() == 1 {
                    sink.arguments(&text[from..=at]);
                    self.in_arguments = false;
                }
            } else if mark != Mark::Other && self.scanner.depth() <= 2 {
                self.held.push_str(&text[from..=at]);
                from = at + 1;
                if !self.note(mark) {
                    return self.give_up(text, from, at + 1, sink);
                }
                self.start_if_known(sink);
            }
            if self.scanner.is_done() {
                return self.done(at + 1, sink);
            }
        }
        if self.in_arguments {
            sink.arguments(&text[from..]);
        } else if !self.started {
            self.held.push_str(&text[from..]);
        }
        Progress::More
    }

    /// The text ended inside the call.
    pub(super) fn finish(&mut self, sink: &mut Sink) {
        if self.started {
            sink.end(false);
        } else {
            sink.content(&self.held);
        }
    }

    /// Whether one more byte may be held back; a character is never cut.
    fn has_room(&self, unheld: usize, byte: u8) -> bool {
        self.held.len() + unheld < MAX_HELD_BYTES || byte & 0xC0 == 0x80
    }

    fn done(&mut self, end: usize, sink: &mut Sink) -> Progress {
        if !self.started {
            let name = self.name.take().filter(|_| self.rules == Rules::Marked);
            let Some(name) = name else {
                sink.content(&self.held);
                return Progress::Broken(end);
            };
            sink.start(name);
            sink.arguments("{}");
        }
        sink.end(true);
        Progress::Done(end)
    }

    fn give_up(&mut self, text: &str, from: usize, at: usize, sink: &mut Sink) -> Progress {
        if !self.started {
            sink.content(&self.held);
            sink.content(&text[from..at]);
        } else {
            if self.in_arguments {
                sink.arguments(&text[from..at]);
            }
            sink.end(false);
        }
        Progress::Broken(at)
    }

    /// Notes a mark whose byte is the last of `held`; false if the object is no call.
    fn note(&mut self, mark: Mark) -> bool {
        let (end, depth) = (self.held.len(), self.scanner.depth());
        match (mark, depth) {
            (Mark::KeyStart, 1) => self.string = Some(end - 1),
            (Mark::KeyEnd, 1) => return self.key(),
            (Mark::StringStart, 1) if self.role == Role::Name => self.string = Some(end - 1),
            (Mark::StringEnd, 1) if self.role == Role::Name => {
                self.name = self.take_string().filter(|name| !name.is_empty());
                return self.name.is_some();
            }
            (Mark::ObjectStart, 2) if self.role == Role::Arguments => {
                self.arguments = Some((end - 1, None));
            }
            (Mark::Close, 1) if self.role == Role::Arguments => {
                if let Some((_, close)) = &mut self.arguments {
                    *close = Some(end);
                }
            }
            // Any other value of the outer object.
            (Mark::StringStart | Mark::ScalarStart, 1)
            | (Mark::ObjectStart | Mark::ListStart, 2) => return self.role == Role::Other,
            _ => {}
        }
        true
    }

    /// What the key that ends here announces; false if no call has such a key.
    fn key(&mut self) -> bool {
        let Some(key) = self.take_string() else {
            return false;
        };
        self.role = match key.as_str() {
            "name" if self.name.is_none() => Role::Name,
            "arguments" | "parameters" if self.arguments.is_none() => Role::Arguments,
            _ => Role::Other,
        };
        self.rules == Rules::Marked
            || self.role != Role::Other
            || OTHER_KEYS.contains(&key.as_str())
    }

    fn take_string(&mut self) -> Option<String> {
        let start = self.string.take()?;
        serde_json::from_str(&self.held[start..]).ok()
    }

    /// Once name and arguments are there, the call is one.
    fn start_if_known(&mut self, sink: &mut Sink) {
        let (Some((open, close)), Some(_)) = (self.arguments, &self.name) else {
            return;
        };
        sink.start(self.name.take().unwrap_or_default());
        let end = close.unwrap_or(self.held.len());
        sink.arguments(&self.held[open..end]);
        self.in_arguments = close.is_none();
        self.started = true;
        self.held = String::new();
    }
}
