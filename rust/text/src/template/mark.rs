//! Keeps special tokens in user strings from becoming special, through any rendering.
//!
//! A special token can only appear in rendered user text if a user string contains it whole, ends with its beginning or
//! begins with its end. Exactly there, and nowhere else, a marker character is inserted before rendering: behind the
//! first character of the token or of its beginning, or in front of its end. The marker is a private-use character that
//! occurs in none of the inputs, is no white space and is not cased, so trimming, concatenation, splitting, comparing and
//! JSON work as without it. After rendering, the markers are taken out and their places become [`Prompt::breaks`].
//! `role` strings are compared and spliced into tokens by templates on purpose (`'<|' + role + '|>'`): only whole
//! special tokens are broken there.

use std::collections::HashSet;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::{Map, Value};

use super::Prompt;

/// Supplementary private-use area A, the source of marker characters.
const CANDIDATES: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';

/// The two marker characters of one rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    /// Breaks a special token.
    pub(super) border: char,
    /// The end of the final message, when it is to be continued.
    pub(super) end: char,
}

/// Knows where user strings could take part in a special token.
#[derive(Debug)]
pub(super) struct Marker {
    /// Finds whole special tokens, overlapping ones too; `None` without special tokens.
    whole: Option<AhoCorasick>,
    prefixes: HashSet<String>,
    suffixes: HashSet<String>,
    longest: usize,
}

impl Marker {
    pub(super) fn new(special: &[String]) -> Self {
        let mut prefixes = HashSet::new();
        let mut suffixes = HashSet::new();
        for token in special {
            for (i, _) in token.char_indices().skip(1) {
                prefixes.insert(token[..i].to_owned());
                suffixes.insert(token[i..].to_owned());
            }
        }
        let whole = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .build(special);
        Self {
            whole: whole.ok().filter(|_| !special.is_empty()),
            prefixes,
            suffixes,
            longest: special.iter().map(String::len).max().unwrap_or(0),
        }
    }

    /// Two characters that occur in none of the inputs.
    pub(super) fn marks<'a>(
        &self,
        source: &'a str,
        values: impl IntoIterator<Item = &'a Value>,
    ) -> Marks {
        let mut texts = vec![source];
        for value in values {
            collect_strings(value, &mut texts);
        }
        let border = unused_character(texts.iter().copied());
        let mut buffer = [0; 4];
        let taken: &str = border.encode_utf8(&mut buffer);
        let end = unused_character(texts.iter().copied().chain([taken]));
        Marks { border, end }
    }

    /// Inserts markers into every string of `value`, keys included.
    pub(super) fn apply(&self, value: &mut Value, marks: Marks) {
        self.apply_under(None, value, marks);
    }

    fn apply_under(&self, key: Option<&str>, value: &mut Value, marks: Marks) {
        match value {
            Value::String(text) => {
                if let Some(marked) = self.marked(text, key == Some("role"), marks.border) {
                    *text = marked;
                }
            }
            Value::Array(values) => values
                .iter_mut()
                .for_each(|value| self.apply_under(None, value, marks)),
            Value::Object(fields) => {
                let old = std::mem::take(fields);
                let marked = old.into_iter().map(|(name, mut value)| {
                    self.apply_under(Some(&name), &mut value, marks);
                    (
                        self.marked(&name, false, marks.border).unwrap_or(name),
                        value,
                    )
                });
                *fields = marked.collect::<Map<_, _>>();
            }
            _ => {}
        }
    }

    /// The text with markers, or `None` if it needs none.
    fn marked(&self, text: &str, whole_only: bool, border: char) -> Option<String> {
        let mut places = Vec::new();
        for found in self
            .whole
            .iter()
            .flat_map(|whole| whole.find_overlapping_iter(text))
        {
            places.push(behind_first(text, found.start()));
        }
        if !whole_only {
            let bounded = |i: &usize| *i <= self.longest;
            let starts = text
                .char_indices()
                .rev()
                .map(|(i, _)| i)
                .take_while(|i| bounded(&(text.len() - i)));
            places.extend(
                starts
                    .filter(|&i| self.prefixes.contains(&text[i..]))
                    .map(|i| behind_first(text, i)),
            );
            let mut ends = text
                .char_indices()
                .map(|(i, c)| i + c.len_utf8())
                .take_while(bounded);
            if ends.any(|i| self.suffixes.contains(&text[..i])) {
                places.push(0);
            }
        }
        if places.is_empty() {
            return None;
        }
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + places.len() * border.len_utf8());
        let mut done = 0;
        for place in places {
            marked.push_str(&text[done..place]);
            marked.push(border);
            done = place;
        }
        marked.push_str(&text[done..]);
        Some(marked)
    }
}

/// The offset behind the character that starts at `start`.
fn behind_first(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(0, char::len_utf8)
}

fn collect_strings<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(values) => values
            .iter()
            .for_each(|value| collect_strings(value, texts)),
        Value::Object(fields) => {
            for (name, value) in fields {
                texts.push(name);
                collect_strings(value, texts);
            }
        }
        _ => {}
    }
}

/// The first private-use character that no text contains.
pub(super) fn unused_character<'a>(texts: impl IntoIterator<Item = &'a str>) -> char {
    let mut used: HashSet<char> = HashSet::new();
    for text in texts {
        // All candidates take four bytes of which the first is 0xF3.
        if text.as_bytes().contains(&0xF3) {
            used.extend(text.chars().filter(|c| CANDIDATES.contains(c)));
        }
    }
    CANDIDATES
        .into_iter()
        .find(|c| !used.contains(c))
        .unwrap_or('\u{10FFFD}')
}

/// Takes the markers out of a rendered text; their places become breaks.
pub(super) fn unmark(text: &str, marks: Marks) -> Prompt {
    let mut prompt = Prompt {
        text: String::with_capacity(text.len()),
        breaks: Vec::new(),
    };
    for (i, piece) in text.split(marks.border).enumerate() {
        if i > 0 && prompt.breaks.last() != Some(&prompt.text.len()) {
            prompt.breaks.push(prompt.text.len());
        }
        prompt.text.push_str(piece);
    }
    prompt
}
