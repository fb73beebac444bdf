//! The true bytes of every token, by the conventions of byte-level BPE and of SentencePiece.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::decoders::{DecoderWrapper, wordpiece};

use super::TokenizerError;

/// SentencePiece's visible space, U+2581.
pub(super) const METASPACE: &str = "\u{2581}";

/// How the spelling of a token becomes bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct DecoderKind {
    /// GPT-2's alphabet: one printable character per byte.
    pub(super) byte_level: bool,
    /// `▁` is a space.
    pub(super) metaspace: bool,
    /// `<0xNN>` is a byte.
    pub(super) byte_fallback: bool,
    /// One space at the start of a text is dropped.
    pub(super) strip_leading_space: bool,
    /// Tokens that do not go on with a word have a space in front of them.
    pub(super) words: Words,
}

/// How a decoder that knows words tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Words {
    /// Spaces are part of tokens.
    #[default]
    Spelled,
    /// Every token is a word, as without a decoder.
    All,
    /// Tokens that begin with `##` go on with a word; with the clean-up, there is no space in front of punctuation.
    Pieces { clean_up: bool },
}

/// The prefix of pieces inside words.
const PIECE_PREFIX: &str = "##";

impl DecoderKind {
    /// Recognises the decoder of a `tokenizer.json`.
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> Result<Self, TokenizerError> {
        let unsupported = |decoder: String| TokenizerError::UnsupportedDecoder { decoder };
        let Some(decoder) = decoder else {
            return Ok(Self {
                words: Words::All,
                strip_leading_space: true,
                ..Self::default()
            });
        };
        let json = serde_json::to_value(decoder).map_err(|error| unsupported(error.to_string()))?;
        let steps = match &json["decoders"] {
            Value::Array(steps) => steps.as_slice(),
            _ => std::slice::from_ref(&json),
        };
        let mut kind = Self::default();
        for step in steps {
            if !kind.apply(step) {
                return Err(unsupported(step.to_string()));
            }
        }
        Ok(kind)
    }

    fn apply(&mut self, step: &Value) -> bool {
        match step["type"].as_str() {
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") if step["pattern"]["String"] == METASPACE && step["content"] == " " => {
                self.metaspace = true
            }
            Some("Strip") if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                self.strip_leading_space = true;
            }
            Some("Strip") if step["start"] == 0 && step["stop"] == 0 => {}
            Some("WordPiece") if step["prefix"] == PIECE_PREFIX => {
                let clean_up = step["cleanup"] == true;
                self.words = Words::Pieces { clean_up };
                self.strip_leading_space = true;
            }
            Some("Metaspace") if step["replacement"] == METASPACE => {
                self.metaspace = true;
                self.strip_leading_space |= step["prepend_scheme"] != "never";
            }
            _ => return false,
        }
        true
    }

    fn push_bytes(self, token: &str, out: &mut Vec<u8>) {
        if self.words != Words::Spelled {
            out.extend_from_slice(self.words.text(token).as_bytes());
        } else if self.byte_level {
            let start = out.len();
            for character in token.chars() {
                let Some(&byte) = CHAR_BYTES.get(&character) else {
                    out.truncate(start);
                    out.extend_from_slice(token.as_bytes());
                    return;
                };
                out.push(byte);
            }
        } else if let Some(byte) = fallback_byte(token).filter(|_| self.byte_fallback) {
            out.push(byte);
        } else if self.metaspace && token.contains(METASPACE) {
            out.extend_from_slice(token.replace(METASPACE, " ").as_bytes());
        } else {
            out.extend_from_slice(token.as_bytes());
        }
    }
}

impl Words {
    /// A token as it stands inside a text.
    fn text(self, token: &str) -> String {
        match self {
            Self::Spelled => token.to_owned(),
            Self::All => format!(" {token}"),
            Self::Pieces { clean_up } => {
                let spaced = match token.strip_prefix(PIECE_PREFIX) {
                    Some(piece) => piece.to_owned(),
                    None => format!(" {token}"),
                };
                if clean_up {
                    wordpiece::cleanup(&spaced)
                } else {
                    spaced
                }
            }
        }
    }
}

/// The byte that a token of the form `<0xNN>` stands for.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2)
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
pub(super) fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u8 {
        printable @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(printable),
        _ => {
            next += 1;
            char::from_u32(next - 1)
                .expect("invariant: U+0100 and the 67 code points after it are characters")
        }
    })
}

static CHAR_BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| byte_chars().into_iter().zip(0..=u8::MAX).collect());

/// The bytes of all tokens in one allocation.
#[derive(Debug)]
pub(super) struct ByteTable {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl ByteTable {
    /// `tokens[id]` is the spelling of a token; added tokens are matched in raw text, so their bytes are literal.
    pub(super) fn new<'a, M>(tokens: &[&str], added: M, kind: DecoderKind) -> Self
    where
        M: IntoIterator<Item = (&'a u32, &'a AddedToken)>,
    {
        let mut literal: Vec<Option<&str>> = vec![None; tokens.len()];
        for (&id, token) in added {
            if let Some(slot) = literal.get_mut(id as usize) {
                *slot = Some(&token.content);
            }
        }
        let mut table = Self {
            bytes: Vec::with_capacity(tokens.len() * 8),
            ends: Vec::with_capacity(tokens.len()),
        };
        for (token, literal) in tokens.iter().zip(literal) {
            match literal {
                Some(content) if kind.byte_level => {
                    table.bytes.extend_from_slice(content.as_bytes())
                }
                _ => kind.push_bytes(token, &mut table.bytes),
            }
            table.ends.push(table.bytes.len());
        }
        table
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start..end])
    }
}
