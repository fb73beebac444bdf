//! Byte-level BPE tokenizers from the metadata of GGUF files (`tokenizer.ggml.model = gpt2`).

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::bytes::{ByteTable, DecoderKind};
use super::patterns::{Rules, rules, supported};
use super::{SpecialIds, Tokenizer, TokenizerError};
use crate::gguf::{Gguf, StringArray};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// `tokenizer.ggml.token_type` of the unknown token.
const TYPE_UNKNOWN: i32 = 2;
/// `tokenizer.ggml.token_type` of control tokens, which are special.
const TYPE_CONTROL: i32 = 3;
/// `tokenizer.ggml.token_type` of tokens that are matched whole but are text.
const TYPE_USER_DEFINED: i32 = 4;

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes, with its chat template.
    ///
    /// Errors name the key: a model or `tokenizer.ggml.pre` that is not supported, lengths that differ, a merge of
    /// unknown tokens, an id outside the vocabulary.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        let model: &str = gguf.require(MODEL)?;
        if model != "gpt2" {
            return Err(TokenizerError::UnsupportedValue {
                key: MODEL,
                value: model.to_owned(),
                supported: "gpt2".to_owned(),
            });
        }
        let pre: &str = gguf.get(PRE)?.unwrap_or("default");
        let rules = rules(pre).ok_or_else(|| TokenizerError::UnsupportedValue {
            key: PRE,
            value: pre.to_owned(),
            supported: supported(),
        })?;
        let tokens: &StringArray = gguf.require(TOKENS)?;
        let vocab: Vocab = tokens
            .iter()
            .zip(0..)
            .map(|(token, id)| (token.to_owned(), id))
            .collect();
        let merges: &StringArray = gguf.require(MERGES)?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, split_merges(merges, tokens)?)
            .ignore_merges(rules.ignore_merges)
            .build()
            .map_err(|error| explain(merges, tokens, &error))?;

        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(pre_tokenizer(rules)?));
        inner.with_decoder(Some(ByteLevel::default()));
        inner
            .add_tokens(added_tokens(gguf, tokens)?)
            .map_err(|error| TokenizerError::Build {
                reason: error.to_string(),
            })?;

        let kind = DecoderKind {
            byte_level: true,
            ..DecoderKind::default()
        };
        let spellings: Vec<&str> = tokens.iter().collect();
        let bytes = ByteTable::new(
            &spellings,
            inner.get_added_vocabulary().get_added_tokens_decoder(),
            kind,
        );
        let ids = SpecialIds::default();
        let mut tokenizer = Self::assemble(inner, bytes, kind, ids, (Vec::new(), Vec::new()));
        tokenizer.read_ids(gguf, rules)?;
        tokenizer.space_prefix = gguf
            .get("tokenizer.ggml.add_space_prefix")?
            .unwrap_or(false);
        tokenizer.chat_template = gguf
            .get::<&str>("tokenizer.chat_template")?
            .map(str::to_owned);
        Ok(tokenizer)
    }

    fn read_ids(&mut self, gguf: &Gguf, rules: Rules) -> Result<(), TokenizerError> {
        let id = |name: &str| -> Result<Option<u32>, TokenizerError> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            gguf.get::<u64>(&key)?
                .map(|id| self.checked_id(&key, id))
                .transpose()
        };
        let eog = [id("eot")?, id("eom")?].into_iter().flatten().collect();
        self.ids = SpecialIds {
            bos: id("bos")?,
            eos: id("eos")?.into_iter().collect(),
            eog,
            unk: id("unknown")?,
            pad: id("padding")?,
        };
        if gguf
            .get("tokenizer.ggml.add_bos_token")?
            .unwrap_or(rules.add_bos)
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
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|error| {
                TokenizerError::Build {
                    reason: error.to_string(),
                }
            })?;
        steps.push(split.into());
    }
    Ok(Sequence::new(steps))
}

fn added_tokens(gguf: &Gguf, tokens: &StringArray) -> Result<Vec<AddedToken>, TokenizerError> {
    let Some(types) = gguf.get::<&[i32]>(TOKEN_TYPE)? else {
        return Ok(Vec::new());
    };
    if types.len() != tokens.len() {
        return Err(TokenizerError::WrongLength {
            key: TOKEN_TYPE,
            found: types.len(),
            expected: tokens.len(),
        });
    }
    let added = tokens
        .iter()
        .zip(types)
        .filter_map(|(token, &token_type)| match token_type {
            TYPE_UNKNOWN | TYPE_CONTROL => Some(AddedToken::from(token, true)),
            TYPE_USER_DEFINED => Some(AddedToken::from(token, false).normalized(false)),
            _ => None,
        });
    Ok(added.collect())
}
