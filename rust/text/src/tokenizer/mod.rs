//! Text to token ids and back, for `tokenizer.json` files and for the vocabulary inside GGUF files.
//!
//! Encoding runs the pipeline of the `tokenizers` crate. Decoding does not: a table holds the true bytes of every token,
//! so that whole and incremental decoding, logprob bytes and stop strings all see the same text.

mod bytes;
mod config;
mod from_gguf;
mod patterns;
mod piece_cache;
mod pretokens;
mod prompt;
mod sentencepiece;
#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tokenizers::tokenizer::{Encoding, PostProcessor, PreTokenizedString, PreTokenizer, Token};
use tokenizers::{AddedVocabulary, Model};

use crate::detokenizer::Utf8Decoder;
use bytes::{ByteTable, DecoderKind};
pub use config::SpecialIds;
use pretokens::Pretokens;
use sentencepiece::SentencePiece;

/// Most tokens a vocabulary may have; tables indexed by id are sized by the largest id of the file.
const MAX_VOCAB_SIZE: usize = 1 << 24;

/// Why a tokenizer cannot be loaded, or a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TokenizerError {
    #[error("cannot read {}: {source}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}: {reason}", path.display())]
    InvalidConfig { path: PathBuf, reason: String },
    #[error("invalid tokenizer.json: {reason}")]
    InvalidJson { reason: String },
    #[error("the decoder of tokenizer.json is not supported: {decoder}")]
    UnsupportedDecoder { decoder: String },
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    #[error("{key} is {value:?}, which is not supported (supported: {supported})")]
    UnsupportedValue {
        key: &'static str,
        value: String,
        supported: String,
    },
    #[error("{key} has {found} entries, expected {expected}")]
    WrongLength {
        key: &'static str,
        found: usize,
        expected: usize,
    },
    #[error("{key} is {id}, outside the vocabulary of {vocab_size} tokens")]
    IdOutOfVocabulary {
        key: String,
        id: u64,
        vocab_size: usize,
    },
    #[error("tokenizer.ggml.merges[{index}] is {merge:?}: {reason}")]
    InvalidMerge {
        index: usize,
        merge: String,
        reason: &'static str,
    },
    #[error("cannot build the tokenizer: {reason}")]
    Build { reason: String },
    #[error("cannot encode the text: {reason}")]
    Encode { reason: String },
}

/// A vocabulary with its rules for splitting, merging and decoding; immutable and shared between threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens again, with special ones left as ordinary text.
    plain: AddedVocabulary,
    bytes: ByteTable,
    kind: DecoderKind,
    special: Vec<bool>,
    ids: SpecialIds,
    /// What `add_special` puts in front of a text and behind it.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// Whether a text that does not begin with a space is encoded as if it did.
    space_prefix: bool,
    /// Cuts text in place of the model of `inner`, which is then a dictionary only.
    sentencepiece: Option<SentencePiece>,
    /// Cuts text in place of the pre-tokenizer of `inner`, in the same way.
    pretokens: Option<Pretokens>,
    chat_template: Option<String>,
    /// The template for requests with tools, where it is another one.
    tool_template: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("ids", &self.ids)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json` file; beginning- and end-of-sequence ids are unknown, see [`Tokenizer::from_dir`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let path = path.as_ref();
        let json = std::fs::read(path).map_err(|source| TokenizerError::Io {
            path: path.to_path_buf(),
            source,
        })?;
        Self::from_bytes(&json)
    }

    /// Parses the content of a `tokenizer.json` file.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        // The crate indexes by lengths it takes from the file: an inconsistent file panics there instead of failing.
        let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json));
        let inner = match parsed {
            Ok(Ok(inner)) => inner,
            Ok(Err(error)) => {
                return Err(TokenizerError::InvalidJson {
                    reason: error.to_string(),
                });
            }
            Err(_) => {
                return Err(TokenizerError::InvalidJson {
                    reason: "its parts contradict each other".to_owned(),
                });
            }
        };
        let kind = DecoderKind::of(inner.get_decoder())?;
        let (prefix, suffix) = surrounding_ids(&inner)?;
        let vocab = inner.get_vocab(true);
        let vocab_size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size > MAX_VOCAB_SIZE {
            let reason = format!(
                "it has ids up to {}, at most {MAX_VOCAB_SIZE} tokens are accepted",
                vocab_size - 1
            );
            return Err(TokenizerError::InvalidJson { reason });
        }
        let mut tokens = vec![""; vocab_size];
        for (token, &id) in &vocab {
            tokens[id as usize] = token;
        }
        let bytes = ByteTable::new(
            &tokens,
            inner.get_added_vocabulary().get_added_tokens_decoder(),
            kind,
        );
        Ok(Self::assemble(
            inner,
            bytes,
            kind,
            SpecialIds::default(),
            (prefix, suffix),
        ))
    }

    fn assemble(
        inner: tokenizers::Tokenizer,
        bytes: ByteTable,
        kind: DecoderKind,
        ids: SpecialIds,
        (prefix, suffix): (Vec<u32>, Vec<u32>),
    ) -> Self {
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let mut special = vec![false; bytes.len()];
        for (&id, token) in inner.get_added_vocabulary().get_added_tokens_decoder() {
            if let Some(flag) = special.get_mut(id as usize) {
                *flag = token.special;
            }
        }
        let mut tokenizer = Self {
            pretokens: Pretokens::of(&inner),
            inner,
            plain,
            bytes,
            kind,
            special,
            ids,
            prefix,
            suffix,
            space_prefix: false,
            sentencepiece: None,
            chat_template: None,
            tool_template: None,
        };
        tokenizer.collect_eog();
        tokenizer
    }

    /// The ids of a text.
    ///
    /// `add_special` surrounds it with what the model expects at the start and end of a text (often its BOS).
    /// `parse_special` turns the text of special tokens into these tokens; without it they are ordinary characters.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let spaced = (self.space_prefix && !text.is_empty() && !text.starts_with(' '))
            .then(|| format!(" {text}"));
        let text = spaced.as_deref().unwrap_or(text);
        let mut ids = if add_special {
            self.prefix.clone()
        } else {
            Vec::new()
        };
        let model = self.inner.get_model();
        match (&self.pretokens, &self.sentencepiece) {
            (_, Some(rules)) if rules.takes(text, parse_special) => {
                rules.encode(text, |piece| model.token_to_id(piece), &mut ids)?;
            }
            (Some(pretokens), None) if pretokens.takes(text, parse_special) => {
                pretokens.encode(text, model, &mut ids)?;
            }
            _ => {
                let added = if parse_special {
                    self.inner.get_added_vocabulary()
                } else {
                    &self.plain
                };
                let pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
                self.encode_pieces(pieces, &mut ids)?;
            }
        }
        if add_special {
            ids.extend_from_slice(&self.suffix);
        }
        Ok(ids)
    }

    /// [`Tokenizer::encode`] of many texts on all threads of the rayon pool.
    pub fn encode_batch<S: AsRef<str> + Sync>(
        &self,
        texts: &[S],
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        texts
            .par_iter()
            .map(|text| self.encode(text.as_ref(), add_special, parse_special))
            .collect()
    }

    fn encode_pieces(
        &self,
        mut pieces: PreTokenizedString,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let model = self.inner.get_model();
        if let Some(rules) = &self.sentencepiece {
            return encode_between_added(&pieces, ids, |text, ids| {
                rules.encode(text, |piece| model.token_to_id(piece), ids)
            });
        }
        if let Some(pretokens) = &self.pretokens {
            return encode_between_added(&pieces, ids, |text, ids| {
                pretokens.encode(text, model, ids)
            });
        }
        let failed = |error: tokenizers::Error| TokenizerError::Encode {
            reason: error.to_string(),
        };
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        pieces
            .tokenize(|piece| model.tokenize(piece.get()))
            .map_err(failed)?;
        let splits = pieces.get_splits(
            tokenizers::OffsetReferential::Normalized,
            tokenizers::OffsetType::None,
        );
        for (_, _, tokens) in splits {
            ids.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }

    /// The text of ids that begin a text; see [`crate::Detokenizer`] for invalid bytes and for continuations.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut decoder = Utf8Decoder::new(self.strips_leading_space());
        let mut text = String::new();
        for &id in ids {
            if skip_special && self.is_special(id) {
                continue;
            }
            if let Some(bytes) = self.token_bytes(id) {
                decoder.push(bytes, &mut text);
            }
        }
        decoder.flush(&mut text);
        text
    }

    /// The bytes that a token stands for inside a text, or `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    /// The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn token_str(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Whether a token is special: a control token that is no text of its own.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// All special tokens: their text and their ids, in the order of the ids.
    pub fn special_tokens(&self) -> Vec<(String, u32)> {
        let decoder = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let mut tokens: Vec<(String, u32)> = decoder
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (token.content.clone(), id))
            .collect();
        tokens.sort_unstable_by_key(|&(_, id)| id);
        tokens
    }

    /// The named special ids of the model.
    pub fn ids(&self) -> &SpecialIds {
        &self.ids
    }

    /// The beginning-of-sequence id.
    pub fn bos_id(&self) -> Option<u32> {
        self.ids.bos
    }

    /// The ids that the model's configuration calls end-of-sequence; the first one is the tokenizer's own.
    pub fn eos_ids(&self) -> &[u32] {
        &self.ids.eos
    }

    /// All ids that end a generation: [`Tokenizer::eos_ids`] and special tokens known by name, such as `<|im_end|>`.
    pub fn eog_ids(&self) -> &[u32] {
        &self.ids.eog
    }

    /// The chat template that came with the tokenizer.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The chat template for requests with tools, if it is another one: the one named `tool_use`.
    pub fn tool_chat_template(&self) -> Option<&str> {
        self.tool_template.as_deref()
    }

    /// Whether decoding a text from its start drops one leading space.
    pub fn strips_leading_space(&self) -> bool {
        self.kind.strip_leading_space
    }
}

/// The ids of added tokens that were found, and of what `encode` makes of the text between them.
fn encode_between_added(
    pieces: &PreTokenizedString,
    ids: &mut Vec<u32>,
    mut encode: impl FnMut(&str, &mut Vec<u32>) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    let splits = pieces.get_splits(
        tokenizers::OffsetReferential::Normalized,
        tokenizers::OffsetType::None,
    );
    for (text, _, added) in splits {
        match added {
            Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            None => encode(text, ids)?,
        }
    }
    Ok(())
}

/// What the post-processor puts around a text: it is run on one marker token.
fn surrounding_ids(inner: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    const MARKER: u32 = u32::MAX;
    let Some(post_processor) = inner.get_post_processor() else {
        return Ok((Vec::new(), Vec::new()));
    };
    let marker = Encoding::from_tokens(vec![Token::new(MARKER, String::new(), (0, 0))], 0);
    let processed = post_processor
        .process(marker, None, true)
        .map_err(|error| TokenizerError::InvalidJson {
            reason: error.to_string(),
        })?;
    let ids = processed.get_ids();
    match ids.iter().position(|&id| id == MARKER) {
        Some(at) => Ok((ids[..at].to_vec(), ids[at + 1..].to_vec())),
        None => Err(TokenizerError::InvalidJson {
            reason: "the post-processor drops the text".to_owned(),
        }),
    }
}
