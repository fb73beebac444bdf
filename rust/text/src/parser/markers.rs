//! Finds markers in a growing text, and knows how much of its end could still become one.

use aho_corasick::{AhoCorasick, MatchKind};

/// A few fixed strings, none of which begins inside another.
#[derive(Debug)]
pub(super) struct Markers {
    automaton: AhoCorasick,
    strings: &'static [&'static str],
}

/// What a search found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Bytes in front of the marker, or of what could become one: plain text.
    pub(super) plain: usize,
    /// Index of the marker that begins there, if it is whole.
    pub(super) marker: Option<usize>,
}

impl Markers {
    pub(super) fn new(strings: &'static [&'static str]) -> Self {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(strings)
            .expect("invariant: a few short strings make a small automaton");
        Self { automaton, strings }
    }

    /// The first marker of `text`, else the longest end of it that begins one.
    pub(super) fn search(&self, text: &str) -> Found {
        if let Some(found) = self.automaton.find(text) {
            return Found {
                plain: found.start(),
                marker: Some(found.pattern().as_usize()),
            };
        }
        let held = self.strings.iter().map(|marker| overlap(text, marker));
        Found {
            plain: text.len() - held.max().unwrap_or(0),
            marker: None,
        }
    }

    /// Length of a marker.
    pub(super) fn len(&self, marker: usize) -> usize {
        self.strings[marker].len()
    }
}

/// Length of the longest end of `text` that is a beginning of `marker`, but not all of it.
fn overlap(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len() - 1);
    (1..=longest)
        .rev()
        .find(|&n| text.as_bytes()[text.len() - n..] == marker.as_bytes()[..n])
        .unwrap_or(0)
}

/// What stands at the front of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Front {
    /// The marker, whole.
    Whole,
    /// So far its beginning, and nothing else.
    Partial,
    /// Something else.
    Other,
}

/// Compares the front of `text` with `marker`.
pub(super) fn front(text: &str, marker: &str) -> Front {
    if text.starts_with(marker) {
        Front::Whole
    } else if marker.starts_with(text) {
        Front::Partial
    } else {
        Front::Other
    }
}

/// Bytes of white space (as JSON has it) at the front of a text.
pub(super) fn leading_space(text: &str) -> usize {
    text.len() - text.trim_start_matches([' ', '\t', '\n', '\r']).len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_is_found_and_the_longest_possible_beginning_held_back() {
        let markers = Markers::new(&["<tool>", "<think>"]);
        let found = |text| {
            let Found { plain, marker } = markers.search(text);
            (plain, marker)
        };
        assert_eq!(found("a<think>b<tool>"), (1, Some(1)));
        assert_eq!(found("a<t"), (1, None));
        assert_eq!(found("a<t<th"), (3, None));
        assert_eq!(found("a<tx"), (4, None));
        assert_eq!(found(""), (0, None));
    }

    #[test]
    fn markers_of_several_byte_characters_are_never_cut_inside_one() {
        let markers = Markers::new(&["<｜x｜>"]);
        assert_eq!(markers.search("é<｜").plain, "é".len());
        // U+FF5D shares two bytes with U+FF5C.
        assert_eq!(markers.search("<｝").plain, "<｝".len());
    }
}
