//! Stop strings across token borders, in time linear in the text.
//!
//! One Aho-Corasick automaton over the bytes of all stop strings consumes the text once. Its state is the longest suffix
//! of the text that begins some stop string, so the depth of that state is what must be held back. The match that
//! *completes* first wins (of those, the one that starts first): the moment at which generation would stop if every
//! byte came alone, hence independent of how the text is cut into tokens and of the order of the list.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{Anchored, MatchKind};

/// Why stop strings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// The entry at that index of the list is empty: it would match everywhere.
    #[error("stop[{index}] is an empty string")]
    Empty {
        /// Index in the list.
        index: usize,
    },
    /// The automaton would be too large.
    #[error("the stop strings are too large: {reason}")]
    TooLarge {
        /// The limit that was met.
        reason: String,
    },
}

/// The stop strings of a request, compiled once and shared by its choices.
#[derive(Debug)]
pub struct StopSet {
    strings: Vec<String>,
    automaton: NFA,
    start: StateID,
    /// Length in bytes of the text that each state other than the start stands for.
    depths: HashMap<StateID, usize>,
}

impl StopSet {
    /// Compiles the list; an empty list never matches, an empty string in it is an error.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self, StopError> {
        let strings: Vec<String> = strings.iter().map(|s| s.as_ref().to_owned()).collect();
        if let Some(index) = strings.iter().position(String::is_empty) {
            return Err(StopError::Empty { index });
        }
        let too_large = |reason: String| StopError::TooLarge { reason };
        let automaton = NFA::builder()
            .match_kind(MatchKind::Standard)
            .build(&strings)
            .map_err(|error| too_large(error.to_string()))?;
        let start = automaton
            .start_state(Anchored::No)
            .map_err(|error| too_large(error.to_string()))?;
        let mut depths = HashMap::new();
        for string in &strings {
            let mut state = start;
            for (i, &byte) in string.as_bytes().iter().enumerate() {
                state = automaton.next_state(Anchored::No, state, byte);
                depths.insert(state, i + 1);
            }
        }
        Ok(Self {
            strings,
            automaton,
            start,
            depths,
        })
    }

    /// The stop strings, in the order given.
    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// Whether there is nothing to stop at.
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// The longest stop string that ends where `state` was reached.
    fn longest_match(&self, state: StateID) -> Option<usize> {
        if !self.automaton.is_match(state) {
            return None;
        }
        let patterns = (0..self.automaton.match_len(state))
            .map(|i| self.automaton.match_pattern(state, i).as_usize());
        patterns.max_by_key(|&pattern| (self.strings[pattern].len(), std::cmp::Reverse(pattern)))
    }
}

/// Searches one growing text for the strings of a [`StopSet`] and holds back what could begin one.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    set: Arc<StopSet>,
    include: bool,
    state: StateID,
    held: String,
    matched: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of a text; `include` keeps the stop string itself in the text.
    pub fn new(set: Arc<StopSet>, include: bool) -> Self {
        let state = set.start;
        Self {
            set,
            include,
            state,
            held: String::new(),
            matched: None,
        }
    }

    /// Appends `text` and moves what can be shown to the end of `out`.
    ///
    /// With `armed` unset, stop strings that end inside this `text` do not count; their parts are still tracked, so that
    /// one which began earlier may complete later. Returns the index of the stop string that ended the text; after that
    /// every push is dropped.
    pub fn push(&mut self, text: &str, armed: bool, out: &mut String) -> Option<usize> {
        if self.matched.is_some() || self.set.is_empty() {
            if self.matched.is_none() {
                out.push_str(text);
            }
            return self.matched;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, &byte) in text.as_bytes().iter().enumerate() {
            self.state = self
                .set
                .automaton
                .next_state(Anchored::No, self.state, byte);
            if !armed {
                continue;
            }
            if let Some(pattern) = self.set.longest_match(self.state) {
                let end = before + i + 1;
                let keep = if self.include {
                    end
                } else {
                    end - self.set.strings[pattern].len()
                };
                out.push_str(&self.held[..keep]);
                self.held.clear();
                self.matched = Some(pattern);
                return self.matched;
            }
        }
        let hold = self.set.depths.get(&self.state).copied().unwrap_or(0);
        let release = self.held.len() - hold;
        out.push_str(&self.held[..release]);
        self.held.drain(..release);
        None
    }

    /// Ends the text: what was held back belongs to it after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.state = self.set.start;
    }

    /// Bytes held back at the moment.
    pub fn held_len(&self) -> usize {
        self.held.len()
    }

    /// The stop string that ended the text.
    pub fn matched(&self) -> Option<&str> {
        self.matched
            .map(|pattern| self.set.strings[pattern].as_str())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: of all matches the one that ends first, of those the one that starts first.
    pub(crate) fn brute_force(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for stop in stops {
            for (start, _) in text.match_indices(stop.as_str()).take(1) {
                let end = start + stop.len();
                if best.is_none_or(|(s, e)| (end, start) < (e, s)) {
                    best = Some((start, end));
                }
            }
        }
        best
    }

    fn run(stops: &[&str], include: bool, chunks: &[&str]) -> (Vec<String>, Option<String>) {
        let set = Arc::new(StopSet::new(stops).unwrap());
        let mut matcher = StopMatcher::new(set, include);
        let mut deltas = Vec::new();
        for chunk in chunks {
            let mut out = String::new();
            matcher.push(chunk, true, &mut out);
            deltas.push(out);
        }
        let mut out = String::new();
        matcher.finish(&mut out);
        deltas.push(out);
        (deltas, matcher.matched().map(str::to_owned))
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_never_begun_and_cut_exactly() {
        let (deltas, matched) = run(&["STOP here"], false, &["one S", "TO", "P he", "re two"]);
        assert_eq!(deltas, ["one ", "", "", "", ""]);
        assert_eq!(matched.as_deref(), Some("STOP here"));
    }

    #[test]
    fn a_stop_string_that_does_not_complete_loses_nothing() {
        let (deltas, matched) = run(&["STOP here"], false, &["one S", "TO", "P there"]);
        assert_eq!(deltas, ["one ", "", "STOP there", ""]);
        assert_eq!(matched, None);
        assert_eq!(run(&["STOP"], false, &["one STO"]).0, ["one ", "STO"]);
    }

    #[test]
    fn the_earliest_match_wins_whatever_the_order_of_the_list() {
        for stops in [["late", "early"], ["early", "late"]] {
            let (deltas, matched) = run(&stops, false, &["an early and a late one"]);
            assert_eq!(
                (deltas.concat().as_str(), matched.as_deref()),
                ("an ", Some("early"))
            );
        }
    }

    #[test]
    fn of_stop_strings_that_end_together_the_longest_wins() {
        for stops in [["b", "ab"], ["ab", "b"]] {
            assert_eq!(run(&stops, false, &["xab"]).0.concat(), "x");
        }
    }

    #[test]
    fn the_stop_string_stays_in_the_text_on_demand() {
        assert_eq!(run(&["</a>"], true, &["x<", "/a>y"]).0.concat(), "x</a>");
    }

    #[test]
    fn an_empty_stop_string_is_refused_and_an_empty_list_never_matches() {
        assert_eq!(
            StopSet::new(&["a", ""]).unwrap_err(),
            StopError::Empty { index: 1 }
        );
        assert_eq!(run(&[], false, &["abc", "d"]).0, ["abc", "d", ""]);
    }

    #[test]
    fn a_match_inside_unarmed_text_does_not_count_but_one_that_ends_later_does() {
        let set = Arc::new(StopSet::new(&["aba"]).unwrap());
        let mut matcher = StopMatcher::new(set, false);
        let mut out = String::new();
        assert_eq!(matcher.push("xaba", false, &mut out), None);
        assert_eq!(matcher.push("ba", true, &mut out), Some(0));
        assert_eq!(out, "xab");
    }

    proptest! {
        #[test]
        fn any_cut_of_any_text_gives_what_a_search_of_the_whole_text_gives(
            text in "[ab😀ď]{0,40}",
            stops in prop::collection::vec("[ab😀ď]{1,5}", 0..5),
            cuts in prop::collection::vec(0.0..1.0_f64, 0..10),
            include: bool,
        ) {
            let mut borders: Vec<usize> =
                cuts.iter().map(|c| text.floor_char_boundary_at((c * text.len() as f64) as usize)).collect();
            borders.extend([0, text.len()]);
            borders.sort_unstable();
            let chunks: Vec<&str> = borders.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (deltas, matched) = run(&refs, include, &chunks);
            let expected = brute_force(&text, &stops);
            let end = expected.map_or(text.len(), |(start, end)| if include { end } else { start });
            prop_assert_eq!(deltas.concat(), &text[..end]);
            prop_assert_eq!(matched.as_deref(), expected.map(|(start, end)| &text[start..end]));
        }
    }

    trait FloorBoundary {
        fn floor_char_boundary_at(&self, index: usize) -> usize;
    }

    impl FloorBoundary for String {
        fn floor_char_boundary_at(&self, mut index: usize) -> usize {
            while !self.is_char_boundary(index) {
                index -= 1;
            }
            index
        }
    }
}
