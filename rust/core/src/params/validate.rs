//! What each sampling parameter may be: the engine's one truth. `octavo/sampling_params.py` refuses the same values earlier;
//! `tests/vectors/sampling_params.json` holds the edge values on which both must agree.

use std::collections::HashSet;

use super::{BAN_BIAS, SamplingParams};

/// What an engine grants to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Choices of one request.
    pub max_n: u32,
    /// `logprobs` and `prompt_logprobs`; the vocabulary's size bounds them too.
    pub max_logprobs: u32,
    /// Entries of `logit_bias` and `stop_token_ids`.
    pub max_list_entries: usize,
    /// Entries of `bad_words`: a word of the user may stand for two, with and without a space before it.
    pub max_bad_words: usize,
    /// Tokens of one bad word.
    pub max_bad_word_tokens: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_n: 1024,
            max_logprobs: 20,
            max_list_entries: 1024,
            max_bad_words: 2048,
            max_bad_word_tokens: 256,
        }
    }
}

/// A sampling parameter that cannot be granted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ParamError {
    /// A number is NaN or outside its range.
    #[error("{param} must be {}{low} {}{high}, got {value}", if *.open_below { "above " } else { "from " }, if *.open_below { "and at most " } else { "to " })]
    OutOfRange {
        /// The parameter's name.
        param: &'static str,
        /// What was given.
        value: f64,
        /// Smallest value, or what the value must exceed.
        low: f64,
        /// Largest value.
        high: f64,
        /// Whether `low` itself is refused.
        open_below: bool,
    },
    /// A list is longer than the engine grants.
    #[error("{param} must be at most {limit} entries, got {count} entries")]
    TooManyEntries {
        /// The parameter's name.
        param: &'static str,
        /// Entries given.
        count: usize,
        /// Entries granted.
        limit: usize,
    },
    /// A list holds an id that is no token of the model.
    #[error(
        "{param} must be token ids below {vocab_size}, the size of the vocabulary, got {token}"
    )]
    OutOfVocabulary {
        /// The parameter's name.
        param: &'static str,
        /// The id given.
        token: u32,
        /// The model's number of tokens.
        vocab_size: u32,
    },
    /// A bad word has no tokens, which would forbid everything.
    #[error("bad_words must be non-empty lists of token ids, entry {index} is empty")]
    EmptyBadWord {
        /// Its place in the list.
        index: usize,
    },
    /// More outputs are demanded than allowed.
    #[error("min_tokens must be at most max_tokens ({max_tokens}), got {min_tokens}")]
    MinAboveMax {
        /// `min_tokens`.
        min_tokens: u32,
        /// `max_tokens`.
        max_tokens: u32,
    },
    /// A grammar alone says when an output may end.
    #[error(
        "{param} must be left out with structured output or forced calls, which end where their grammar does"
    )]
    WithGrammar {
        /// The parameter's name.
        param: &'static str,
    },
    /// Bans, allow-list and stop ids that `min_tokens` bans leave no token for the first output.
    #[error("{param} must be such that a token is left: every token is banned or not allowed")]
    NothingLeft {
        /// The parameter that excludes the most.
        param: &'static str,
    },
}

impl ParamError {
    /// The name of the parameter, as the user wrote it.
    pub fn param(&self) -> &'static str {
        match self {
            Self::OutOfRange { param, .. }
            | Self::TooManyEntries { param, .. }
            | Self::OutOfVocabulary { param, .. }
            | Self::WithGrammar { param }
            | Self::NothingLeft { param } => param,
            Self::EmptyBadWord { .. } => "bad_words",
            Self::MinAboveMax { .. } => "min_tokens",
        }
    }
}

/// Written so that NaN fails.
fn within(param: &'static str, value: f32, low: f32, high: f32) -> Result<(), ParamError> {
    if low <= value && value <= high {
        return Ok(());
    }
    // Through text: a user who wrote 0.1 reads 0.1, not the digits of its float32.
    let shown = |x: f32| x.to_string().parse().unwrap_or(f64::from(x));
    Err(ParamError::OutOfRange {
        param,
        value: shown(value),
        low: shown(low),
        high: shown(high),
        open_below: false,
    })
}

fn count_within(param: &'static str, value: u32, low: u32, high: u32) -> Result<(), ParamError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let (low, high) = (f64::from(low), f64::from(high));
    Err(ParamError::OutOfRange {
        param,
        value: f64::from(value),
        low,
        high,
        open_below: false,
    })
}

fn entries(param: &'static str, count: usize, limit: usize) -> Result<(), ParamError> {
    if count > limit {
        Err(ParamError::TooManyEntries {
            param,
            count,
            limit,
        })
    } else {
        Ok(())
    }
}

fn in_vocabulary(
    param: &'static str,
    ids: impl IntoIterator<Item = u32>,
    vocab_size: u32,
) -> Result<(), ParamError> {
    match ids.into_iter().find(|&token| token >= vocab_size) {
        Some(token) => Err(ParamError::OutOfVocabulary {
            param,
            token,
            vocab_size,
        }),
        None => Ok(()),
    }
}

impl SamplingParams {
    /// Checks what a grammar leaves no sense to: behind its end nothing but an end of sequence may come.
    ///
    /// # Errors
    /// The parameter that asks for more.
    pub fn validate_with_grammar(&self) -> Result<(), ParamError> {
        match (self.ignore_eos, self.min_tokens) {
            (true, _) => Err(ParamError::WithGrammar {
                param: "ignore_eos",
            }),
            (_, 1..) => Err(ParamError::WithGrammar {
                param: "min_tokens",
            }),
            _ => Ok(()),
        }
    }

    /// Checks every parameter against its range, the vocabulary and the engine's limits.
    ///
    /// # Errors
    /// The first parameter that cannot be granted.
    pub fn validate(&self, vocab_size: u32, limits: &Limits) -> Result<(), ParamError> {
        self.validate_numbers(vocab_size, limits)?;
        self.validate_lists(vocab_size, limits)?;
        self.validate_something_left(vocab_size)
    }

    fn validate_numbers(&self, vocab_size: u32, limits: &Limits) -> Result<(), ParamError> {
        // What Python and a plan's int32 words can hold.
        const INT_MAX: u32 = i32::MAX.unsigned_abs();
        count_within("n", self.n, 1, limits.max_n)?;
        count_within("top_k", self.top_k, 0, INT_MAX)?;
        count_within("max_tokens", self.max_tokens, 1, INT_MAX)?;
        count_within("min_tokens", self.min_tokens, 0, INT_MAX)?;
        let max_logprobs = limits.max_logprobs.min(vocab_size);
        count_within("logprobs", self.logprobs.unwrap_or(0), 0, max_logprobs)?;
        count_within(
            "prompt_logprobs",
            self.prompt_logprobs.unwrap_or(0),
            0,
            max_logprobs,
        )?;
        if self.pooling.is_some() {
            count_within("n", self.n, 1, 1)?;
            count_within("max_tokens", self.max_tokens, 1, 1)?;
        }
        within("temperature", self.temperature, 0.0, 1e6)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        if self.top_p == 0.0 {
            return Err(ParamError::OutOfRange {
                param: "top_p",
                value: 0.0,
                low: 0.0,
                high: 1.0,
                open_below: true,
            });
        }
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        within("repetition_penalty", self.repetition_penalty, 1e-9, 1e9)?;
        if self.min_tokens > self.max_tokens {
            return Err(ParamError::MinAboveMax {
                min_tokens: self.min_tokens,
                max_tokens: self.max_tokens,
            });
        }
        Ok(())
    }

    fn validate_lists(&self, vocab_size: u32, limits: &Limits) -> Result<(), ParamError> {
        entries(
            "stop_token_ids",
            self.stop_token_ids.len(),
            limits.max_list_entries,
        )?;
        entries("logit_bias", self.logit_bias.len(), limits.max_list_entries)?;
        entries("bad_words", self.bad_words.len(), limits.max_bad_words)?;
        entries(
            "allowed_token_ids",
            self.allowed_token_ids.len(),
            vocab_size as usize,
        )?;
        in_vocabulary(
            "stop_token_ids",
            self.stop_token_ids.iter().copied(),
            vocab_size,
        )?;
        in_vocabulary(
            "logit_bias",
            self.logit_bias.iter().map(|bias| bias.0),
            vocab_size,
        )?;
        in_vocabulary(
            "allowed_token_ids",
            self.allowed_token_ids.iter().copied(),
            vocab_size,
        )?;
        in_vocabulary(
            "bad_words",
            self.bad_words.iter().flatten().copied(),
            vocab_size,
        )?;
        for &(_, value) in &self.logit_bias {
            if value != f32::NEG_INFINITY {
                within("logit_bias", value, BAN_BIAS, -BAN_BIAS)?;
            }
        }
        for (index, word) in self.bad_words.iter().enumerate() {
            if word.is_empty() {
                return Err(ParamError::EmptyBadWord { index });
            }
            entries("bad_words", word.len(), limits.max_bad_word_tokens)?;
        }
        Ok(())
    }

    /// The first output has a token to choose. (Bad words of several tokens may still exclude the last one later.)
    fn validate_something_left(&self, vocab_size: u32) -> Result<(), ParamError> {
        let biased = self
            .logit_bias
            .iter()
            .filter(|bias| bias.1 <= BAN_BIAS)
            .map(|bias| bias.0);
        let words = self
            .bad_words
            .iter()
            .filter(|word| word.len() == 1)
            .map(|word| word[0]);
        let mut banned: HashSet<u32> = biased.chain(words).collect();
        if self.min_tokens > 0 {
            banned.extend(&self.stop_token_ids);
            if !self.ignore_eos {
                banned.extend(
                    self.eos_token_ids
                        .iter()
                        .filter(|&&token| token < vocab_size),
                );
            }
        }
        if !self.allowed_token_ids.is_empty() {
            let left = self
                .allowed_token_ids
                .iter()
                .any(|token| !banned.contains(token));
            return if left {
                Ok(())
            } else {
                Err(ParamError::NothingLeft {
                    param: "allowed_token_ids",
                })
            };
        }
        if banned.len() < vocab_size as usize {
            return Ok(());
        }
        let lists = [
            ("logit_bias", self.logit_bias.len()),
            ("bad_words", self.bad_words.len()),
            (
                "min_tokens",
                self.stop_token_ids.len() + self.eos_token_ids.len(),
            ),
        ];
        let largest = lists.into_iter().max_by_key(|list| list.1);
        Err(ParamError::NothingLeft {
            param: largest.map_or("logit_bias", |list| list.0),
        })
    }
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
