//! A faster way to the same ids for byte-level tokenizers: texts are cut by automata, and the ids of pieces are remembered.
//!
//! The pipeline of the `tokenizers` crate keeps offsets of every byte and matches with a backtracking engine. Here a text is
//! only sliced. The one look-ahead that these splitting rules use, `\s+(?!\S)|\s+` at the end, means: of white space in
//! front of something else, leave the last character to it. Rules of any other form are left to the pipeline.

use aho_corasick::AhoCorasick;
use regex_automata::Input;
use regex_automata::meta::{self, Regex};
use serde_json::Value;
use tokenizers::{Model, ModelWrapper};

use super::TokenizerError;
use super::bytes::byte_chars;
use super::patterns::{GPT2, LINE_BREAK, TRAILING_SPACE};
use super::piece_cache::{PieceCache, Pool};

/// What the rules end with when they look ahead.
const LOOK_AHEAD: &str = r"|\s+(?!\S)|\s+";

/// One splitting rule: cuts a text into matches and the gaps between them.
#[derive(Debug)]
enum Rule {
    /// The second pattern, where there is one, is the white space behind all other alternatives.
    Regex(Regex),
    /// Digits as the standard library knows them, each alone or a run together.
    Digits { alone: bool },
    /// The white space that a piece without line breaks ends with.
    TrailingSpace,
}

impl Rule {
    /// `None` for what means something else to this engine, or nothing.
    fn new(pattern: &str) -> Option<Self> {
        let (first, looks_ahead) = match pattern.strip_suffix(LOOK_AHEAD) {
            Some(first) => (first, true),
            None => (pattern, false),
        };
        if !is_common(first) {
            return None;
        }
        let regex = if looks_ahead {
            Regex::new_many(&[first, r"\s+"])
        } else {
            Regex::new(first)
        };
        regex
            .ok()
            .filter(|regex| !regex.is_match(""))
            .map(Self::Regex)
    }

    fn new_cache(&self) -> Option<meta::Cache> {
        match self {
            Self::Regex(regex) => Some(regex.create_cache()),
            Self::Digits { .. } | Self::TrailingSpace => None,
        }
    }

    /// The first match that begins at `from` or behind it.
    fn find(
        &self,
        text: &str,
        from: usize,
        cache: &mut Option<meta::Cache>,
    ) -> Option<(usize, usize)> {
        match (self, cache) {
            (Self::Regex(regex), Some(cache)) => {
                let found = regex.search_with(cache, &Input::new(text).range(from..))?;
                let (start, end) = (found.start(), found.end());
                if found.pattern().as_usize() == 0 || end == text.len() {
                    return Some((start, end));
                }
                let last = text[start..end].chars().next_back();
                let last = last.map_or(0, char::len_utf8);
                let alone = last == end - start;
                Some((start, if alone { end } else { end - last }))
            }
            (Self::Regex(_), None) => None,
            (Self::TrailingSpace, _) => {
                let start = text.trim_end().len().max(from);
                (start < text.len()).then_some((start, text.len()))
            }
            (Self::Digits { alone }, _) => {
                let start = from + text[from..].find(char::is_numeric)?;
                let rest = &text[start..];
                let length = if *alone {
                    rest.chars().next().map_or(0, char::len_utf8)
                } else {
                    rest.len() - rest.trim_start_matches(char::is_numeric).len()
                };
                Some((start, start + length))
            }
        }
    }
}

/// Whether a pattern means the same to all engines: without look-around, anchors and possessive repetition.
fn is_common(pattern: &str) -> bool {
    // Classes and escaped characters are left out of what is searched.
    let mut bare = String::new();
    let (mut escaped, mut in_class) = (false, false);
    for character in pattern.chars() {
        match character {
            'b' | 'B' | 'A' | 'z' | 'Z' | 'G' | 'K' if escaped && !in_class => return false,
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => in_class = true,
            ']' => {
                in_class = false;
                bare.push(']');
            }
            '^' | '$' if !in_class => return false,
            _ if !in_class => bare.push(character),
            _ => {}
        }
    }
    let foreign = ["++", "*+", "?+", "(?=", "(?!", "(?<", "(?>"];
    let possessive = |window: &[u8]| window[0].is_ascii_digit() && &window[1..] == b"}+";
    !bare.as_bytes().windows(3).any(possessive) && !foreign.iter().any(|part| bare.contains(part))
}

/// The ids of pieces seen before, and the scratch space of the automata.
#[derive(Debug)]
struct Cache {
    automata: Vec<Option<meta::Cache>>,
    pieces: PieceCache,
    /// A piece in the alphabet of byte-level vocabularies.
    spelled: String,
}

/// The splitting rules of a byte-level tokenizer.
#[derive(Debug)]
pub(super) struct Pretokens {
    rules: Vec<Rule>,
    /// Finds any added token, special ones among them or not; `None`: there are none.
    added: Option<AhoCorasick>,
    plain: Option<AhoCorasick>,
    alphabet: [char; 256],
    /// Texts are brought into a normal form that leaves ASCII alone.
    only_ascii: bool,
    caches: Pool<Cache>,
}

impl Pretokens {
    /// `None` for tokenizers of any other kind.
    pub(super) fn of(inner: &tokenizers::Tokenizer) -> Option<Self> {
        let rules = rules(&serde_json::to_value(inner.get_pre_tokenizer()?).ok()?)?;
        let only_ascii = match inner.get_normalizer() {
            None => false,
            Some(normalizer) => {
                let kind = serde_json::to_value(normalizer).ok()?;
                if kind["type"] != "NFC" {
                    return None;
                }
                true
            }
        };
        if !matches!(inner.get_model(), ModelWrapper::BPE(bpe) if bpe.dropout.is_none()) {
            return None;
        }
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let finder = |special: bool| {
            let found = added.values().filter(|token| special || !token.special);
            let contents: Vec<&str> = found.map(|token| token.content.as_str()).collect();
            let empty = contents.is_empty();
            AhoCorasick::new(contents)
                .ok()
                .map(|finder| (!empty).then_some(finder))
        };
        Some(Self {
            rules,
            added: finder(true)?,
            plain: finder(false)?,
            alphabet: byte_chars(),
            only_ascii,
            caches: Pool::default(),
        })
    }

    /// Whether a whole text can be cut here: it holds no added token, and no normal form changes it.
    pub(super) fn takes(&self, text: &str, parse_special: bool) -> bool {
        let finder = if parse_special {
            &self.added
        } else {
            &self.plain
        };
        (!self.only_ascii || text.is_ascii())
            && !finder.as_ref().is_some_and(|finder| finder.is_match(text))
    }

    /// Appends the ids of a text in its normal form, or of one between added tokens.
    pub(super) fn encode(
        &self,
        text: &str,
        model: &impl Model,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut cache = self.caches.take().unwrap_or_else(|| self.new_cache());
        let mut automata = std::mem::take(&mut cache.automata);
        let result = split(&self.rules, &mut automata, text, &mut |piece| {
            self.encode_piece(piece, &mut cache, model, ids)
        });
        cache.automata = automata;
        self.caches.give_back(cache);
        result
    }

    fn new_cache(&self) -> Cache {
        Cache {
            automata: self.rules.iter().map(Rule::new_cache).collect(),
            pieces: PieceCache::default(),
            spelled: String::new(),
        }
    }

    fn encode_piece(
        &self,
        piece: &str,
        cache: &mut Cache,
        model: &impl Model,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        if let Some(known) = cache.pieces.get(piece) {
            ids.extend_from_slice(known);
            return Ok(());
        }
        cache.spelled.clear();
        let spelled = piece.bytes().map(|byte| self.alphabet[usize::from(byte)]);
        cache.spelled.extend(spelled);
        let tokens = model
            .tokenize(&cache.spelled)
            .map_err(|error| TokenizerError::Encode {
                reason: error.to_string(),
            })?;
        let first = ids.len();
        ids.extend(tokens.iter().map(|token| token.id));
        cache.pieces.insert(piece, &ids[first..]);
        Ok(())
    }
}

/// Cuts a text by all rules, one after the other.
fn split<E>(
    rules: &[Rule],
    automata: &mut [Option<meta::Cache>],
    text: &str,
    put: &mut impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let ([rule, later @ ..], [automaton, later_automata @ ..]) = (rules, automata) else {
        return put(text);
    };
    let mut done = 0;
    while let Some((start, end)) = rule.find(text, done, automaton) {
        if start > done {
            split(later, later_automata, &text[done..start], put)?;
        }
        split(later, later_automata, &text[start..end], put)?;
        done = end;
    }
    if done < text.len() {
        split(later, later_automata, &text[done..], put)?;
    }
    Ok(())
}

/// The rules in front of the byte alphabet, which must be the last step.
fn rules(pre_tokenizer: &Value) -> Option<Vec<Rule>> {
    let mut steps = Vec::new();
    flatten(pre_tokenizer, &mut steps);
    let (last, first) = steps.split_last()?;
    let by_line = first
        .first()
        .is_some_and(|step| step["pattern"]["Regex"] == LINE_BREAK);
    let mut rules = first
        .iter()
        .map(|step| rule(step, by_line))
        .collect::<Option<Vec<_>>>()?;
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    if last["use_regex"] != false {
        rules.push(Rule::new(GPT2)?);
    }
    Some(rules)
}

fn flatten<'a>(step: &'a Value, steps: &mut Vec<&'a Value>) {
    match &step["pretokenizers"] {
        Value::Array(inner) => inner.iter().for_each(|step| flatten(step, steps)),
        _ => steps.push(step),
    }
}

/// `by_line`: the pieces that the rule cuts have no line break inside.
fn rule(step: &Value, by_line: bool) -> Option<Rule> {
    match step["type"].as_str()? {
        "Digits" => Some(Rule::Digits {
            alone: step["individual_digits"] == true,
        }),
        "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
            match step["pattern"]["Regex"].as_str()? {
                TRAILING_SPACE if by_line => Some(Rule::TrailingSpace),
                pattern => Rule::new(pattern),
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use tokenizers::models::bpe::BPE;
    use tokenizers::normalizers::unicode::NFC;
    use tokenizers::pre_tokenizers::PreTokenizerWrapper;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::digits::Digits;
    use tokenizers::pre_tokenizers::punctuation::Punctuation;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{AddedToken, SplitDelimiterBehavior};

    use super::*;
    use crate::tokenizer::from_gguf::splitter;
    use crate::tokenizer::patterns::{rules, supported};
    use crate::tokenizer::piece_cache::MAX_PIECES;
    use crate::tokenizer::tests::byte_level;

    /// A byte-level vocabulary with these steps in front of the byte alphabet.
    fn with_steps(
        steps: impl IntoIterator<Item = PreTokenizerWrapper>,
        regex: bool,
    ) -> tokenizers::Tokenizer {
        let merges = ["h e", "l l", "he ll", "Ġ w", "Ġ Ġ", "Ċ Ċ", "ĠĠ ĠĠ", "' s"];
        let merges = merges.map(|merge| merge.split_once(' ').unwrap());
        let tokens = byte_chars().map(String::from).into_iter();
        let tokens = tokens.chain(merges.map(|(left, right)| format!("{left}{right}")));
        let vocab: tokenizers::models::bpe::Vocab = tokens.zip(0..).collect();
        let merges = merges.map(|(left, right)| (left.to_owned(), right.to_owned()));
        let bpe = BPE::builder().vocab_and_merges(vocab, merges.to_vec());
        let mut inner = tokenizers::Tokenizer::new(bpe.build().unwrap());
        let mut steps: Vec<PreTokenizerWrapper> = steps.into_iter().collect();
        steps.push(ByteLevel::new(false, true, regex).into());
        inner.with_pre_tokenizer(Some(Sequence::new(steps)));
        inner
    }

    /// One tokenizer for each splitting rule of GGUF files, and those that `tokenizer.json` files write.
    static ALL: LazyLock<Vec<tokenizers::Tokenizer>> = LazyLock::new(|| {
        let names = supported();
        let mut distinct: Vec<_> = names.split(", ").map(|name| rules(name).unwrap()).collect();
        let mut seen = HashSet::new();
        distinct.retain(|rules| seen.insert(rules.patterns));
        let mut found: Vec<_> = distinct
            .into_iter()
            .map(|rules| with_steps([splitter(rules).unwrap().into()], false))
            .collect();
        found.push(with_steps([], true));
        for individual in [true, false] {
            found.push(with_steps([Digits::new(individual).into()], true));
        }
        let mut normalized = with_steps([], true);
        normalized.with_normalizer(Some(NFC)).unwrap();
        normalized
            .add_tokens([
                AddedToken::from("<b>", false).lstrip(true),
                AddedToken::from("<s>", true).rstrip(true),
            ])
            .unwrap();
        found.push(normalized);
        found
    });

    fn quick(inner: &tokenizers::Tokenizer, text: &str) -> Option<Vec<u32>> {
        let pretokens = Pretokens::of(inner)?;
        let mut ids = Vec::new();
        pretokens.takes(text, true).then(|| {
            // The second time all pieces are known.
            pretokens.encode(text, inner.get_model(), &mut ids).unwrap();
            let first = std::mem::take(&mut ids);
            pretokens.encode(text, inner.get_model(), &mut ids).unwrap();
            assert_eq!(first, ids);
            ids
        })
    }

    fn slow(inner: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
        inner.encode(text, false).unwrap().get_ids().to_vec()
    }

    fn mixed() -> impl Strategy<Value = String> {
        let parts = prop::sample::select(vec![
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u{a0}",
            "\u{3000}",
            "\u{85}",
            "a",
            "hello",
            " w",
            "'s",
            "'LL",
            "ſ",
            "1",
            "234",
            "٣",
            "½",
            "é",
            "e\u{301}",
            "漢字",
            "カ",
            "😀",
            "👩\u{200d}👧",
            ".",
            "...",
            "/",
            "`",
            "<b>",
            "<s>",
            "_",
            "|",
            "Ab",
            "ABc",
            "ǅ",
            "\u{0}",
            "\u{7f}",
            "نص",
            "ไทย",
            "한",
        ]);
        prop::collection::vec(parts, 0..14).prop_map(|parts| parts.concat())
    }

    #[test]
    fn every_rule_is_taken_and_others_are_left_alone() {
        for inner in ALL.iter() {
            assert!(Pretokens::of(inner).is_some());
        }
        let split = |pattern: &str, behavior| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            Split::new(pattern, behavior, false).unwrap()
        };
        let isolated = SplitDelimiterBehavior::Isolated;
        for step in [
            split(r"\p{L}++|\s+", isolated).into(),
            split(r"a(?=b)|c", isolated).into(),
            split(r"\p{N}{1,3}+", isolated).into(),
            split(r"a*", isolated).into(),
            split(r"a$|b", isolated).into(),
            split("a", SplitDelimiterBehavior::Removed).into(),
            PreTokenizerWrapper::from(Punctuation::default()),
        ] {
            assert!(Pretokens::of(&with_steps([step], false)).is_none());
        }
    }

    #[test]
    fn a_cache_that_is_full_begins_anew() {
        let tokenizer = byte_level();
        let text: String = (0..3 * MAX_PIECES).map(|i| format!(" {i}")).collect();
        assert_eq!(
            tokenizer.encode(&text, false, false).unwrap(),
            slow(&tokenizer.inner, &text)
        );
    }

    proptest! {
        #[test]
        fn ids_are_those_of_the_pipeline(text in prop_oneof![3 => mixed(), 1 => any::<String>()]) {
            for inner in ALL.iter() {
                if let Some(ids) = quick(inner, &text) {
                    prop_assert_eq!(ids, slow(inner, &text), "{:?}", inner.get_pre_tokenizer());
                } else {
                    prop_assert!(!text.is_ascii() || text.contains('<'));
                }
            }
        }
    }
}
