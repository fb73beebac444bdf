//! Tokenizers from the metadata of GGUF files: byte-level BPE (`tokenizer.ggml.model = gpt2`) and SentencePiece (`llama`).

use std::collections::HashSet;

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, SplitDelimiterBehavior, decoders};

use super::bytes::{ByteTable, DecoderKind, METASPACE, fallback_byte};
use super::patterns::{Rules, rules, supported};
use super::sentencepiece::{Fallback, SentencePiece, TokenType};
use super::{SpecialIds, Tokenizer, TokenizerError};
use crate::gguf::{Gguf, StringArray};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const EXTRA_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// What holds unless the file says otherwise.
#[derive(Debug, Clone, Copy, Default)]
struct Defaults {
    add_bos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes, with its chat template.
    ///
    /// Errors name the key: a model or `tokenizer.ggml.pre` that is not supported, lengths that differ, a merge of
    /// unknown tokens, an id outside the vocabulary.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        let (mut tokenizer, defaults) = match gguf.require(MODEL)? {
            "gpt2" => byte_level(gguf)?,
            "llama" => sentencepiece(gguf)?,
            other => {
                return Err(TokenizerError::UnsupportedValue {
                    key: MODEL,
                    value: other.to_owned(),
                    supported: "gpt2, llama".to_owned(),
                });
            }
        };
        tokenizer.read_ids(gguf, defaults)?;
        tokenizer.chat_template = gguf
            .get::<&str>("tokenizer.chat_template")?
            .map(str::to_owned);
        tokenizer.tool_template = gguf
            .get::<&str>("tokenizer.chat_template.tool_use")?
            .map(str::to_owned);
        Ok(tokenizer)
    }

    fn read_ids(&mut self, gguf: &Gguf, defaults: Defaults) -> Result<(), TokenizerError> {
        let id = |name: &str| -> Result<Option<u32>, TokenizerError> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            gguf.get::<u64>(&key)?
                .map(|id| self.checked_id(&key, id))
                .transpose()
        };
        let eog = [id("eot")?, id("eom")?].into_iter().flatten().collect();
        self.ids = SpecialIds {
            bos: id("bos")?.or(defaults.bos),
            eos: id("eos")?.or(defaults.eos).into_iter().collect(),
            eog,
            unk: id("unknown")?.or(defaults.unk),
            pad: id("padding")?,
        };
        if gguf
            .get("tokenizer.ggml.add_bos_token")?
            .unwrap_or(defaults.add_bos)
        {
            self.prefix.extend(self.ids.bos);
        }
        if gguf.get("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
            self.suffix.extend(self.ids.eos.first());
        }
        self.collect_eog();
        Ok(())
    }
}

fn byte_level(gguf: &Gguf) -> Result<(Tokenizer, Defaults), TokenizerError> {
    let pre: &str = gguf.get(PRE)?.unwrap_or("default");
    let rules = rules(pre).ok_or_else(|| TokenizerError::UnsupportedValue {
        key: PRE,
        value: pre.to_owned(),
        supported: supported(),
    })?;
    let tokens: &StringArray = gguf.require(TOKENS)?;
    let merges: &StringArray = gguf.require(MERGES)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary(tokens.iter()), split_merges(merges, tokens)?)
        .ignore_merges(rules.ignore_merges)
        .build()
        .map_err(|error| explain(merges, tokens, &error))?;
    let types = match gguf.get::<&[i32]>(TOKEN_TYPE)? {
        Some(_) => token_types(gguf, tokens.len())?,
        None => vec![TokenType::Normal; tokens.len()],
    };
    let added = tokens
        .iter()
        .zip(types)
        .filter_map(|(token, kind)| match kind {
            TokenType::Unknown | TokenType::Control => Some(AddedToken::from(token, true)),
            TokenType::UserDefined => Some(AddedToken::from(token, false).normalized(false)),
            _ => None,
        });

    let mut inner = tokenizers::Tokenizer::new(bpe);
    inner.with_pre_tokenizer(Some(pre_tokenizer(rules)?));
    inner.with_decoder(Some(ByteLevel::default()));
    let spellings: Vec<&str> = tokens.iter().collect();
    let mut tokenizer = finish(inner, &spellings, added)?;
    tokenizer.space_prefix = gguf.get(SPACE_PREFIX)?.unwrap_or(false);
    let defaults = Defaults {
        add_bos: rules.add_bos,
        ..Defaults::default()
    };
    Ok((tokenizer, defaults))
}

/// SentencePiece's BPE. The pipeline of the crate serves as dictionary and finds control tokens, see [`SentencePiece`].
///
/// Files mark as user-defined what Hugging Face calls an added token; as there, the text behind one begins anew.
fn sentencepiece(gguf: &Gguf) -> Result<(Tokenizer, Defaults), TokenizerError> {
    refuse_normalization(gguf)?;
    let tokens: &StringArray = gguf.require(TOKENS)?;
    let types = token_types(gguf, tokens.len())?;
    let scores = scores(gguf, tokens.len())?;
    // Converters write the spaces of user-defined tokens as they are in a text, those of other tokens as `▁`.
    let spaced: Vec<(usize, String)> = tokens
        .iter()
        .zip(&types)
        .enumerate()
        .filter(|(_, (token, kind))| **kind == TokenType::UserDefined && token.contains(' '))
        .map(|(id, (token, _))| (id, token.replace(' ', METASPACE)))
        .collect();
    let mut spellings: Vec<&str> = tokens.iter().collect();
    for (id, token) in &spaced {
        spellings[*id] = token;
    }

    let space_prefix = gguf.get(SPACE_PREFIX)?.unwrap_or(true);
    let first = |kind, id: u32| (types.get(id as usize) == Some(&kind)).then_some(id);
    let unk = match gguf.get::<u32>("tokenizer.ggml.unknown_token_id")? {
        Some(id) if (id as usize) < tokens.len() => Some(id),
        Some(_) => None,
        None => first(TokenType::Unknown, 0),
    };
    let fallback = fallback(&spellings, &types, unk)?;
    let rules = SentencePiece::new(&spellings, &types, scores, fallback, space_prefix)?;

    let dictionary = BPE::builder()
        .vocab_and_merges(vocabulary(spellings.iter().copied()), Merges::new())
        .build()
        .map_err(build_error)?;
    let mut inner = tokenizers::Tokenizer::new(dictionary);
    inner.with_decoder(Some(sentencepiece_decoder(space_prefix)?));
    let special = spellings
        .iter()
        .zip(&types)
        .filter(|(_, kind)| matches!(kind, TokenType::Unknown | TokenType::Control))
        .map(|(token, _)| AddedToken::from(*token, true));
    let mut tokenizer = finish(inner, &spellings, special)?;
    tokenizer.sentencepiece = Some(rules);
    let defaults = Defaults {
        add_bos: true,
        bos: first(TokenType::Control, 1),
        eos: first(TokenType::Control, 2),
        unk,
    };
    Ok((tokenizer, defaults))
}

/// Refuses files whose texts are rewritten before they are cut, which vocabularies of this kind do without.
fn refuse_normalization(gguf: &Gguf) -> Result<(), TokenizerError> {
    let key = if gguf.get(EXTRA_SPACES)? == Some(true) {
        EXTRA_SPACES
    } else if gguf.metadata(CHARSMAP).is_some() {
        CHARSMAP
    } else {
        return Ok(());
    };
    Err(TokenizerError::UnsupportedValue {
        key,
        value: "present".to_owned(),
        supported: format!("none with {MODEL} \"llama\""),
    })
}

fn scores(gguf: &Gguf, vocab_size: usize) -> Result<&[f32], TokenizerError> {
    let scores: &[f32] = gguf.require(SCORES)?;
    check_length(SCORES, scores.len(), vocab_size)?;
    match scores.iter().position(|score| score.is_nan()) {
        None => Ok(scores),
        Some(id) => Err(TokenizerError::UnsupportedValue {
            key: SCORES,
            value: format!("NaN at {id}"),
            supported: "numbers".to_owned(),
        }),
    }
}

/// All bytes, or none and an unknown token.
fn fallback(
    tokens: &[&str],
    types: &[TokenType],
    unk: Option<u32>,
) -> Result<Fallback, TokenizerError> {
    let mut bytes = Box::new([None; 256]);
    for (id, token) in (0..).zip(tokens) {
        if types[id as usize] == TokenType::Byte {
            let byte = fallback_byte(token).ok_or_else(|| TokenizerError::UnsupportedValue {
                key: TOKENS,
                value: (*token).to_owned(),
                supported: "<0xNN> for a token of type byte".to_owned(),
            })?;
            bytes[usize::from(byte)] = Some(id);
        }
    }
    let found = bytes.iter().flatten().count();
    match (found, unk) {
        (256, _) => {
            Ok(Fallback::Bytes(Box::new(bytes.map(|id| {
                id.expect("invariant: all 256 bytes were counted")
            }))))
        }
        (0, Some(unk)) => Ok(Fallback::Unknown(unk)),
        (0, None) => Err(TokenizerError::Build {
            reason: "the vocabulary has neither byte tokens nor an unknown token".to_owned(),
        }),
        _ => Err(TokenizerError::Build {
            reason: format!("the vocabulary has {found} of the 256 byte tokens"),
        }),
    }
}

/// The decoder that `tokenizer.json` files of such vocabularies have.
fn sentencepiece_decoder(
    space_prefix: bool,
) -> Result<decoders::sequence::Sequence, TokenizerError> {
    let spaces = Replace::new(METASPACE, " ").map_err(build_error)?;
    let mut steps: Vec<DecoderWrapper> = vec![
        spaces.into(),
        ByteFallback::default().into(),
        Fuse::default().into(),
    ];
    if space_prefix {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    Ok(decoders::sequence::Sequence::new(steps))
}

/// Adds the whole tokens and the table of bytes, for the decoder that `inner` has.
fn finish(
    mut inner: tokenizers::Tokenizer,
    spellings: &[&str],
    added: impl IntoIterator<Item = AddedToken>,
) -> Result<Tokenizer, TokenizerError> {
    inner.add_tokens(added).map_err(build_error)?;
    let kind = DecoderKind::of(inner.get_decoder())?;
    let bytes = ByteTable::new(
        spellings,
        inner.get_added_vocabulary().get_added_tokens_decoder(),
        kind,
    );
    let around = (Vec::new(), Vec::new());
    Ok(Tokenizer::assemble(
        inner,
        bytes,
        kind,
        SpecialIds::default(),
        around,
    ))
}

fn vocabulary<'a>(tokens: impl Iterator<Item = &'a str>) -> Vocab {
    tokens
        .zip(0..)
        .map(|(token, id)| (token.to_owned(), id))
        .collect()
}

fn token_types(gguf: &Gguf, vocab_size: usize) -> Result<Vec<TokenType>, TokenizerError> {
    let types: &[i32] = gguf.require(TOKEN_TYPE)?;
    check_length(TOKEN_TYPE, types.len(), vocab_size)?;
    let parse = |(id, &kind): (usize, &i32)| {
        TokenType::from_id(kind).ok_or_else(|| TokenizerError::UnsupportedValue {
            key: TOKEN_TYPE,
            value: format!("{kind} at {id}"),
            supported: "1 to 6".to_owned(),
        })
    };
    types.iter().enumerate().map(parse).collect()
}

fn check_length(key: &'static str, found: usize, expected: usize) -> Result<(), TokenizerError> {
    if found == expected {
        return Ok(());
    }
    Err(TokenizerError::WrongLength {
        key,
        found,
        expected,
    })
}

fn build_error(error: impl std::fmt::Display) -> TokenizerError {
    TokenizerError::Build {
        reason: error.to_string(),
    }
}

/// Splits `"left right"` pairs; the model builder relies on no union being longer than the longest token.
fn split_merges(merges: &StringArray, tokens: &StringArray) -> Result<Merges, TokenizerError> {
    let longest = tokens.iter().map(str::len).max().unwrap_or(0);
    let mut pairs = Vec::with_capacity(merges.len());
    for (index, merge) in merges.iter().enumerate() {
        let (left, right) = merge
            .split_once(' ')
            .ok_or_else(|| invalid_merge(index, merge, "it has no space"))?;
        if left.len() + right.len() > longest {
            return Err(invalid_merge(index, merge, "the result is not a token"));
        }
        pairs.push((left.to_owned(), right.to_owned()));
    }
    Ok(pairs)
}

/// Finds the merge that the model builder refused: a part or the result of it is not a token.
fn explain(
    merges: &StringArray,
    tokens: &StringArray,
    refusal: &tokenizers::Error,
) -> TokenizerError {
    let known: HashSet<&str> = tokens.iter().collect();
    for (index, merge) in merges.iter().enumerate() {
        if !merge.split(' ').all(|part| known.contains(part)) {
            return invalid_merge(index, merge, "a part is not a token");
        }
        if !known.contains(merge.replacen(' ', "", 1).as_str()) {
            return invalid_merge(index, merge, "the result is not a token");
        }
    }
    TokenizerError::Build {
        reason: refusal.to_string(),
    }
}

fn invalid_merge(index: usize, merge: &str, reason: &'static str) -> TokenizerError {
    TokenizerError::InvalidMerge {
        index,
        merge: merge.to_owned(),
        reason,
    }
}

/// The splitting rules and the byte alphabet as the steps of one pre-tokenizer.
fn pre_tokenizer(rules: Rules) -> Result<Sequence, TokenizerError> {
    Ok(Sequence::new(vec![
        splitter(rules)?.into(),
        ByteLevel::new(false, false, false).into(),
    ]))
}

/// The splitting rules alone.
pub(super) fn splitter(rules: Rules) -> Result<Sequence, TokenizerError> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::with_capacity(rules.patterns.len());
    for pattern in rules.patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split =
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(build_error)?;
        steps.push(split.into());
    }
    Ok(Sequence::new(steps))
}
