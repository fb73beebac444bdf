//! What stands between a marker and the brace of the arguments: the name of a call, in formats that write it outside JSON.

use super::sink::Sink;

/// A name and the markers around it are no longer than this.
const MAX_HEADER_BYTES: usize = 512;

/// How far the header goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All text is consumed and the brace has not come.
    More,
    /// The brace is there.
    Brace(usize),
    /// It is no header; what was held back is content, and the text from there on.
    Broken(usize),
}

/// Collects the text of a header.
#[derive(Debug)]
pub(super) struct Header {
    held: String,
    marker: usize,
}

impl Header {
    /// `marker` is what stands in front: content, if no call follows.
    pub(super) fn new(marker: &str) -> Self {
        Self {
            held: marker.to_owned(),
            marker: marker.len(),
        }
    }

    /// Takes text up to a brace, as long as every character is `allowed`.
    pub(super) fn push(
        &mut self,
        text: &str,
        allowed: impl Fn(char) -> bool,
        sink: &mut Sink,
    ) -> Progress {
        for (at, character) in text.char_indices() {
            if character == '{' {
                return Progress::Brace(at);
            }
            if !allowed(character) || self.held.len() >= MAX_HEADER_BYTES {
                sink.content(&self.held);
                return Progress::Broken(at);
            }
            self.held.push(character);
        }
        Progress::More
    }

    /// What stands between the marker and the brace.
    pub(super) fn text(&self) -> &str {
        &self.held[self.marker..]
    }

    /// It was no header.
    pub(super) fn give_up(&self, sink: &mut Sink) {
        sink.content(&self.held);
    }
}

/// Whether a text can be the name of a function.
pub(super) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_name_character)
}

/// Letters, digits and `_-.:/`, as used in names of functions and of servers that offer them.
pub(super) fn is_name_character(character: char) -> bool {
    character.is_alphanumeric() || "_-.:/".contains(character)
}
