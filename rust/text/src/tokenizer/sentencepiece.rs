//! SentencePiece's BPE: characters are merged, always the two neighbours that make the piece of the highest score.
//!
//! Pieces are the dictionary; there is no list of merges. Where scores are equal the leftmost pair is first, which a list of
//! merges by rank cannot say, and pieces of type "unused" are taken apart again. Algorithm: Sennrich et al. 2016
//! (arXiv:1508.07909) in the form of SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226) with byte fallback.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};

use super::TokenizerError;
use super::bytes::METASPACE;
use super::piece_cache::{PieceCache, Pool};

#[cfg(test)]
mod tests;

/// Marks the end of the list of symbols.
const NONE: u32 = u32::MAX;
/// The rank of tokens that no merge makes.
const NO_PIECE: u32 = u32::MAX;

/// What `tokenizer.ggml.token_type` says of a token, with the numbers of SentencePiece's `ModelProto.SentencePiece.Type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    pub(super) fn from_id(id: i32) -> Option<Self> {
        Some(match id {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// What stands for a character that is no piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fallback {
    /// The tokens of its UTF-8 bytes.
    Bytes(Box<[u32; 256]>),
    /// One unknown token for a run of such characters.
    Unknown(u32),
}

/// The merging rules of a SentencePiece vocabulary; the spellings are kept by the caller.
#[derive(Debug)]
pub(super) struct SentencePiece {
    /// By id: 0 for the piece that is merged first, [`NO_PIECE`] for what is no piece; equal scores have equal ranks.
    ranks: Vec<u32>,
    /// Pieces that are merged on the way to others but never put out, sorted.
    unused: Vec<u32>,
    /// Finds user-defined tokens, which are never part of a merge; pattern `i` is token `whole[i]`.
    finder: Option<AhoCorasick>,
    whole: Vec<u32>,
    /// Finds control tokens, which the caller cuts out where they are asked for.
    control: AhoCorasick,
    fallback: Fallback,
    space_prefix: bool,
    /// Characters behind which a `▁` may be merged: some piece has the two side by side.
    glued: HashSet<char>,
    caches: Pool<PieceCache>,
}

impl SentencePiece {
    /// `scores[id]` must be comparable; `tokens[id]` is the spelling with `▁` for spaces.
    ///
    /// `space_prefix`: every piece of text between whole tokens is encoded as if a space stood before it.
    pub(super) fn new(
        tokens: &[&str],
        types: &[TokenType],
        scores: &[f32],
        fallback: Fallback,
        space_prefix: bool,
    ) -> Result<Self, TokenizerError> {
        let ids = |kind: TokenType| {
            (0..)
                .zip(types)
                .filter(move |&(_, &found)| found == kind)
                .map(|(id, _)| id)
        };
        let whole: Vec<u32> = ids(TokenType::UserDefined)
            .filter(|&id: &u32| !tokens[id as usize].is_empty())
            .collect();
        let finder = (!whole.is_empty())
            .then(|| {
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(whole.iter().map(|&id| tokens[id as usize]))
            })
            .transpose()
            .map_err(|error| TokenizerError::Build {
                reason: error.to_string(),
            })?;
        let control = (0..)
            .zip(types)
            .filter(|(_, kind)| matches!(kind, TokenType::Control | TokenType::Unknown))
            .map(|(id, _): (usize, _)| tokens[id])
            .filter(|token| !token.is_empty());
        let control = AhoCorasick::new(control).map_err(|error| TokenizerError::Build {
            reason: error.to_string(),
        })?;
        Ok(Self {
            control,
            ranks: ranks(types, scores),
            unused: ids(TokenType::Unused).collect(),
            finder,
            whole,
            fallback,
            space_prefix,
            glued: glued(tokens),
            caches: Pool::default(),
        })
    }

    /// Whether a text holds no control token, or they are not asked for.
    pub(super) fn takes(&self, text: &str, parse_special: bool) -> bool {
        !parse_special || !self.control.is_match(text)
    }

    /// Appends the ids of a text without control tokens; `id_of` looks a spelling up.
    pub(super) fn encode(
        &self,
        text: &str,
        id_of: impl Fn(&str) -> Option<u32>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let text = text.replace(' ', METASPACE);
        if u32::try_from(text.len() + METASPACE.len()).is_err() {
            return Err(TokenizerError::Encode {
                reason: format!("it has {} bytes, at most 2^32 are accepted", text.len()),
            });
        }
        let mut cache = self.caches.take().unwrap_or_default();
        let mut start = 0;
        for found in self
            .finder
            .iter()
            .flat_map(|finder| finder.find_iter(&text))
        {
            self.encode_between(&text[start..found.start()], &id_of, &mut cache, ids);
            ids.push(self.whole[found.pattern().as_usize()]);
            start = found.end();
        }
        self.encode_between(&text[start..], &id_of, &mut cache, ids);
        self.caches.give_back(cache);
        Ok(())
    }

    fn encode_between(
        &self,
        text: &str,
        id_of: &impl Fn(&str) -> Option<u32>,
        cache: &mut PieceCache,
        ids: &mut Vec<u32>,
    ) {
        if text.is_empty() {
            return;
        }
        let prefixed = self.space_prefix.then(|| format!("{METASPACE}{text}"));
        let begin = ids.len();
        self.for_each_word(prefixed.as_deref().unwrap_or(text), |word| {
            let first = ids.len();
            if let Some(known) = cache.get(word) {
                ids.extend_from_slice(known);
            } else {
                self.merge(word, id_of, ids);
                cache.insert(word, &ids[first..]);
            }
            self.fuse_unknown(begin, first, ids);
        });
    }

    /// Cuts a text before every `▁` that no piece has behind what stands before it: no merge goes over such a border, so
    /// the words have the ids that they have in the whole text.
    fn for_each_word<'a>(&self, text: &'a str, mut put: impl FnMut(&'a str)) {
        if !self.unused.is_empty() {
            // How an unused piece is taken apart depends on where else in the text it was made.
            return put(text);
        }
        let mut start = 0;
        for (at, _) in text.match_indices(METASPACE) {
            let before = text[start..at].chars().next_back();
            if before.is_some_and(|c| !METASPACE.starts_with(c) && !self.glued.contains(&c)) {
                put(&text[start..at]);
                start = at;
            }
        }
        put(&text[start..]);
    }

    /// Appends the ids of a text in which all pieces may be merged.
    fn merge(&self, text: &str, id_of: &impl Fn(&str) -> Option<u32>, ids: &mut Vec<u32>) {
        let piece_of = |spelling: &str| id_of(spelling).filter(|&id| self.rank(id) != NO_PIECE);
        let mut merger = Merger::new(self, text, piece_of);
        merger.merge();
        merger.put_out(ids);
    }

    /// A run of unknown characters is one token, over the border at `at` too.
    fn fuse_unknown(&self, begin: usize, at: usize, ids: &mut Vec<u32>) {
        if let Fallback::Unknown(unknown) = self.fallback
            && at > begin
            && ids[at - 1] == unknown
            && ids.get(at) == Some(&unknown)
        {
            ids.remove(at);
        }
    }

    fn rank(&self, id: u32) -> u32 {
        self.ranks.get(id as usize).copied().unwrap_or(NO_PIECE)
    }

    fn is_unused(&self, id: u32) -> bool {
        self.unused.binary_search(&id).is_ok()
    }
}

/// The characters that stand before a `▁` in some token.
fn glued(tokens: &[&str]) -> HashSet<char> {
    let before = tokens.iter().flat_map(|token| {
        token
            .match_indices(METASPACE)
            .filter_map(|(at, _)| token[..at].chars().next_back())
    });
    before.collect()
}

fn ranks(types: &[TokenType], scores: &[f32]) -> Vec<u32> {
    let mut pieces: Vec<u32> = (0..)
        .zip(types)
        .filter(|(_, kind)| {
            matches!(
                kind,
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused
            )
        })
        .map(|(id, _)| id)
        .collect();
    let score = |id: u32| scores[id as usize];
    pieces.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut ranks = vec![NO_PIECE; types.len()];
    let mut rank = 0;
    for (at, &id) in pieces.iter().enumerate() {
        // An equality of floats: -0 and 0 are one score.
        if at > 0 && score(id) != score(pieces[at - 1]) {
            rank += 1;
        }
        ranks[id as usize] = rank;
    }
    ranks
}

/// A part of the text, linked to its neighbours; `len` is 0 once it is merged into its left one.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: u32,
    len: u32,
    previous: u32,
    next: u32,
}

/// Two neighbours that make a piece, ordered by its rank, then from left to right; stale if their lengths have changed.
type Candidate = Reverse<(u32, u32, u32, u32)>;

struct Merger<'a, F> {
    rules: &'a SentencePiece,
    text: &'a str,
    piece_of: F,
    symbols: Vec<Symbol>,
    agenda: BinaryHeap<Candidate>,
    /// For unused pieces: how many bytes their left part has.
    parts: HashMap<&'a str, u32>,
}

impl<'a, F: Fn(&str) -> Option<u32>> Merger<'a, F> {
    fn new(rules: &'a SentencePiece, text: &'a str, piece_of: F) -> Self {
        let count = text.chars().count() as u32;
        let symbols = text
            .char_indices()
            .zip(0..)
            .map(|((start, character), at)| Symbol {
                start: start as u32,
                len: character.len_utf8() as u32,
                previous: if at == 0 { NONE } else { at - 1 },
                next: if at + 1 == count { NONE } else { at + 1 },
            });
        let mut merger = Self {
            rules,
            text,
            piece_of,
            symbols: symbols.collect(),
            agenda: BinaryHeap::new(),
            parts: HashMap::new(),
        };
        for right in 1..count {
            merger.propose(right - 1, right);
        }
        merger
    }

    fn propose(&mut self, left: u32, right: u32) {
        if left == NONE || right == NONE {
            return;
        }
        let (first, second) = (self.symbols[left as usize], self.symbols[right as usize]);
        let len = first.len + second.len;
        let piece = self.slice(first.start, len);
        if let Some(id) = (self.piece_of)(piece) {
            self.agenda
                .push(Reverse((self.rules.rank(id), left, right, len)));
            if self.rules.is_unused(id) {
                self.parts.insert(piece, first.len);
            }
        }
    }

    fn merge(&mut self) {
        while let Some(Reverse((_, left, right, len))) = self.agenda.pop() {
            let (first, second) = (self.symbols[left as usize], self.symbols[right as usize]);
            if first.len == 0 || second.len == 0 || first.len + second.len != len {
                continue;
            }
            self.symbols[right as usize].len = 0;
            self.symbols[left as usize].len = len;
            self.symbols[left as usize].next = second.next;
            if second.next != NONE {
                self.symbols[second.next as usize].previous = left;
            }
            self.propose(first.previous, left);
            self.propose(left, second.next);
        }
    }

    /// Appends the ids of what is left, with unused pieces taken apart.
    fn put_out(&self, ids: &mut Vec<u32>) {
        let begin = ids.len();
        let mut waiting = Vec::new();
        for symbol in self.symbols.iter().filter(|symbol| symbol.len > 0) {
            waiting.push(self.slice(symbol.start, symbol.len));
            while let Some(piece) = waiting.pop() {
                let id = (self.piece_of)(piece);
                let parts = id
                    .filter(|&id| self.rules.is_unused(id))
                    .and_then(|_| self.parts.get(piece));
                match (id, parts) {
                    (_, Some(&len)) => {
                        let (left, right) = piece.split_at(len as usize);
                        waiting.extend([right, left]);
                    }
                    (Some(id), None) => ids.push(id),
                    (None, None) => self.fall_back(piece, begin, ids),
                }
            }
        }
    }

    fn fall_back(&self, piece: &str, begin: usize, ids: &mut Vec<u32>) {
        match &self.rules.fallback {
            Fallback::Bytes(bytes) => {
                ids.extend(piece.bytes().map(|byte| bytes[usize::from(byte)]));
            }
            Fallback::Unknown(id) if ids[begin..].last() == Some(id) => {}
            Fallback::Unknown(id) => ids.push(*id),
        }
    }

    fn slice(&self, start: u32, len: u32) -> &'a str {
        &self.text[start as usize..(start + len) as usize]
    }
}
