//! The text of one choice: detokenizer, stop strings and hold-back in one machine.
//!
//! Tokens go in, text that can no longer change comes out. Where a stop string completes, text, token ids, logprobs and
//! usage all end: the token that completes it is the last one kept, however many tokens a push brings.

use std::sync::Arc;

use crate::detokenizer::{Detokenizer, TextStart};
use crate::stop::{StopMatcher, StopSet};
use crate::tokenizer::Tokenizer;

/// How the text of a choice is made.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// Stop strings; `None` or an empty set: none.
    pub stop: Option<Arc<StopSet>>,
    /// Whether the stop string that ends the text stays in it.
    pub include_stop_str_in_output: bool,
    /// Output tokens before which no stop string may complete.
    pub min_tokens: usize,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// Special tokens that stay in the text all the same, see [`crate::OutputParser::special_ids`]; sorted.
    pub shown_special_ids: Arc<[u32]>,
    /// What the first output token stands behind.
    pub start: TextStart,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            stop: None,
            include_stop_str_in_output: false,
            min_tokens: 0,
            skip_special_tokens: true,
            shown_special_ids: Arc::default(),
            start: TextStart::Text,
        }
    }
}

/// Why a choice cannot be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutputError {
    /// Stop strings need text to be searched.
    #[error("stop: {count} stop strings need detokenization, which is off")]
    StopWithoutText {
        /// Number of stop strings.
        count: usize,
    },
}

/// What a push of tokens brought.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PushResult {
    /// Text to show now.
    pub delta: String,
    /// How many of the pushed tokens belong to the output; ids, logprobs and usage are cut behind them.
    pub num_tokens_kept: usize,
    /// The stop string that ended the text.
    pub stopped: Option<String>,
}

/// The growing text of one choice.
#[derive(Debug, Clone)]
pub struct ChoiceText {
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    min_tokens: usize,
    num_tokens: usize,
    /// Characters decoded so far, shown or held back.
    num_chars: usize,
    text: String,
    text_offsets: Vec<usize>,
    ended: bool,
}

impl ChoiceText {
    /// A choice without output yet; without a tokenizer (`detokenize=false`) it counts tokens and has no text.
    pub fn new(
        tokenizer: Option<Arc<Tokenizer>>,
        options: &TextOptions,
    ) -> Result<Self, OutputError> {
        let set = options.stop.clone().unwrap_or_else(empty_set);
        if tokenizer.is_none() && !set.is_empty() {
            return Err(OutputError::StopWithoutText {
                count: set.strings().len(),
            });
        }
        Ok(Self {
            detokenizer: tokenizer.map(|t| {
                Detokenizer::new(t, options.skip_special_tokens, options.start)
                    .showing(Arc::clone(&options.shown_special_ids))
            }),
            stop: StopMatcher::new(set, options.include_stop_str_in_output),
            min_tokens: options.min_tokens,
            num_tokens: 0,
            num_chars: 0,
            text: String::new(),
            text_offsets: Vec::new(),
            ended: false,
        })
    }

    /// Appends output tokens in order.
    ///
    /// A stop string counts if the token that completes it is at least the `min_tokens`-th. Once the text has ended, by a
    /// stop string or [`ChoiceText::finish`], nothing more is kept.
    pub fn push(&mut self, tokens: &[u32]) -> PushResult {
        let mut result = PushResult::default();
        for &token in tokens {
            if self.ended {
                break;
            }
            self.push_one(token, &mut result.delta);
            result.num_tokens_kept += 1;
        }
        self.close(result)
    }

    /// Appends an output token that is no part of the text: the one that ended the choice.
    pub fn push_hidden(&mut self) {
        if !self.ended {
            self.num_tokens += 1;
            self.text_offsets.push(self.num_chars);
        }
    }

    /// Ends the text: incomplete characters become U+FFFD and what was held back is released.
    pub fn finish(&mut self) -> PushResult {
        let mut result = PushResult::default();
        if let (false, Some(detokenizer)) = (self.ended, &mut self.detokenizer) {
            let mut piece = String::new();
            detokenizer.flush(&mut piece);
            self.num_chars += piece.chars().count();
            let armed = self.num_tokens >= self.min_tokens;
            if self.stop.push(&piece, armed, &mut result.delta).is_none() {
                self.stop.finish(&mut result.delta);
            }
        }
        self.ended = true;
        self.close(result)
    }

    /// All text shown so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Number of tokens kept so far.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// For each kept token, where its text begins: in characters from the start of the text, stop string included.
    ///
    /// A token in the middle of a character has the offset of that character.
    pub fn text_offsets(&self) -> &[usize] {
        &self.text_offsets
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<&str> {
        self.stop.matched()
    }

    fn push_one(&mut self, token: u32, delta: &mut String) {
        self.num_tokens += 1;
        self.text_offsets.push(self.num_chars);
        let Some(detokenizer) = &mut self.detokenizer else {
            return;
        };
        let mut piece = String::new();
        detokenizer.push(token, &mut piece);
        self.num_chars += piece.chars().count();
        let armed = self.num_tokens >= self.min_tokens;
        self.ended = self.stop.push(&piece, armed, delta).is_some();
    }

    fn close(&mut self, mut result: PushResult) -> PushResult {
        self.text.push_str(&result.delta);
        result.stopped = self.stop.matched().map(str::to_owned);
        result
    }
}

fn empty_set() -> Arc<StopSet> {
    Arc::new(StopSet::new::<&str>(&[]).expect("invariant: an empty list holds no empty string"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::tests::{byte_level, smollm2};

    fn options(stops: &[&str]) -> TextOptions {
        TextOptions {
            stop: Some(Arc::new(StopSet::new(stops).unwrap())),
            ..TextOptions::default()
        }
    }

    fn choice(options: &TextOptions) -> ChoiceText {
        ChoiceText::new(Some(byte_level()), options).unwrap()
    }

    /// The tokens of single bytes.
    fn byte_tokens(text: &str) -> Vec<u32> {
        text.bytes().map(|byte| 3 + u32::from(byte)).collect()
    }

    #[test]
    fn a_push_of_many_tokens_is_cut_at_the_token_that_completes_the_stop() {
        let mut choice = choice(&options(&["cd"]));
        let result = choice.push(&byte_tokens("abcdefg"));
        let expected = PushResult {
            delta: "ab".to_owned(),
            num_tokens_kept: 4,
            stopped: Some("cd".to_owned()),
        };
        assert_eq!(result, expected);
        let late = choice.push(&byte_tokens("x"));
        assert_eq!(
            (
                late.delta.as_str(),
                late.num_tokens_kept,
                choice.num_tokens()
            ),
            ("", 0, 4)
        );
        assert_eq!((choice.finish().delta.as_str(), choice.text()), ("", "ab"));
    }

    #[test]
    fn a_stop_that_straddles_tokens_is_cut_exactly_in_real_text() {
        let Some(tokenizer) = smollm2() else { return };
        let text = "The capital of France is Paris, and the largest city is Paris too.";
        let ids = tokenizer.encode(text, false, false).unwrap();
        let mut choice =
            ChoiceText::new(Some(tokenizer), &options(&["is, and t", "ris t!"])).unwrap();
        let deltas: String = ids.iter().map(|&id| choice.push(&[id]).delta).collect();
        assert_eq!(deltas, "The capital of France is Par");
        assert_eq!(choice.stopped(), Some("is, and t"));
    }

    #[test]
    fn what_is_held_back_for_a_stop_is_released_at_the_end() {
        let mut choice = choice(&options(&["stop"]));
        assert_eq!(choice.push(&byte_tokens("a sto")).delta, "a ");
        assert_eq!(
            choice.finish(),
            PushResult {
                delta: "sto".to_owned(),
                num_tokens_kept: 0,
                stopped: None
            }
        );
        assert_eq!(choice.text(), "a sto");
    }

    #[test]
    fn no_stop_completes_before_min_tokens() {
        for (min_tokens, expected) in [(0, ""), (2, ""), (3, "xxy"), (9, "xxyxxzz")] {
            let mut choice = choice(&TextOptions {
                min_tokens,
                ..options(&["xx"])
            });
            let mut text = choice.push(&byte_tokens("xxyxxzz")).delta;
            text.push_str(&choice.finish().delta);
            assert_eq!(text, expected, "{min_tokens}");
            assert!(choice.num_tokens() >= min_tokens.min(7));
        }
    }

    #[test]
    fn without_detokenization_tokens_are_counted_and_stop_strings_refused() {
        let mut choice = ChoiceText::new(None, &TextOptions::default()).unwrap();
        let result = choice.push(&[1, 2, u32::MAX]);
        assert_eq!(
            result,
            PushResult {
                num_tokens_kept: 3,
                ..PushResult::default()
            }
        );
        assert_eq!(
            (choice.finish(), choice.text()),
            (PushResult::default(), "")
        );
        let error = ChoiceText::new(None, &options(&["a", "b"])).unwrap_err();
        assert_eq!(error, OutputError::StopWithoutText { count: 2 });
    }

    #[test]
    fn offsets_count_characters_and_tokens_inside_one_share_its_offset() {
        let mut choice = choice(&TextOptions::default());
        choice.push(&byte_tokens("é😀a"));
        assert_eq!(choice.text_offsets(), [0, 0, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn a_token_that_ends_the_choice_is_counted_and_has_no_text() {
        let mut choice = choice(&options(&["b"]));
        choice.push(&byte_tokens("éa"));
        choice.push_hidden();
        assert_eq!(
            (choice.num_tokens(), choice.text_offsets()),
            (4, &[0, 0, 1, 2][..])
        );
        assert_eq!((choice.finish().delta.as_str(), choice.text()), ("", "éa"));
        choice.push_hidden();
        assert_eq!(choice.num_tokens(), 4);
    }

    #[test]
    fn special_tokens_follow_the_options() {
        for (skip_special_tokens, expected) in [(true, "ab"), (false, "a<|im_end|>b")] {
            let mut choice = choice(&TextOptions {
                skip_special_tokens,
                ..TextOptions::default()
            });
            let tokens = [&byte_tokens("a")[..], &[2], &byte_tokens("b")].concat();
            assert_eq!(choice.push(&tokens).delta, expected);
        }
    }

    #[test]
    fn special_tokens_that_a_parser_needs_stay_in_the_text() {
        let parser = crate::OutputParser::new(Some("hermes"), None, false).unwrap();
        assert_eq!(parser.special_ids(&byte_level()), [0; 0]);
        let mut choice = choice(&TextOptions {
            shown_special_ids: Arc::new([2]),
            ..TextOptions::default()
        });
        let tokens = [&byte_tokens("a")[..], &[1, 2, 1], &byte_tokens("b")].concat();
        assert_eq!(choice.push(&tokens).delta, "a<|im_end|>b");
    }

    #[test]
    fn an_unfinished_character_is_shown_at_the_end_only() {
        let mut choice = choice(&TextOptions::default());
        assert_eq!(choice.push(&byte_tokens("a😀")[..3]).delta, "a");
        assert_eq!(choice.finish().delta, "\u{FFFD}");
    }

    /// Of all matches the one that ends first, of those the one that starts first.
    fn earliest(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        let found = stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
        found.min().map(|(end, start)| (start, end))
    }

    proptest! {
        #[test]
        fn streamed_text_equals_a_search_of_the_whole_text(
            ids in prop::collection::vec(prop_oneof![
                Just(2), 100..104_u32, Just(3 + 0xC3), Just(3 + 0xA9), 259..266_u32, 0..266_u32], 0..40),
            stops in prop::collection::vec("[abcdé\u{FFFD}hel]{1,4}", 0..4),
            sizes in prop::collection::vec(1..6_usize, 40),
            include: bool,
            skip: bool,
        ) {
            let tokenizer = byte_level();
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let options = TextOptions { include_stop_str_in_output: include, skip_special_tokens: skip, ..options(&refs) };
            let mut choice = choice(&options);
            let (mut streamed, mut kept, mut rest) = (String::new(), 0, ids.as_slice());
            for size in sizes {
                let (now, later) = rest.split_at(size.min(rest.len()));
                rest = later;
                let result = choice.push(now);
                streamed.push_str(&result.delta);
                kept += result.num_tokens_kept;
            }
            let last = choice.finish();
            streamed.push_str(&last.delta);

            let whole = tokenizer.decode(&ids, skip);
            let found = earliest(&whole, &stops);
            let end = found.map_or(whole.len(), |(start, end)| if include { end } else { start });
            prop_assert_eq!(&streamed, &whole[..end]);
            prop_assert_eq!(choice.text(), streamed.as_str());
            prop_assert_eq!(last.stopped.as_deref(), found.map(|(start, end)| &whole[start..end]));
            prop_assert_eq!(choice.text_offsets().len(), kept);
            let needed = match found {
                None => ids.len(),
                Some((_, end)) => (0..=ids.len())
                    .find(|&n| complete_text(&ids[..n], skip).len() >= end)
                    .unwrap_or(ids.len()),
            };
            prop_assert_eq!(kept, needed);
        }
    }

    /// The text of ids without an incomplete character at its end.
    fn complete_text(ids: &[u32], skip: bool) -> String {
        let mut detokenizer = Detokenizer::new(byte_level(), skip, TextStart::Text);
        let mut out = String::new();
        ids.iter().for_each(|&id| detokenizer.push(id, &mut out));
        out
    }
}
