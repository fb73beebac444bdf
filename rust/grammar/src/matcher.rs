//! The state of one sequence in its grammar.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Follows the tokens of a sequence and says which may come next.
pub struct Matcher {
    inner: llguidance::Matcher,
    num_tokens: usize,
    /// The grammar is complete and its end-of-sequence token has come: the sequence has ended.
    has_ended: bool,
    error: Option<String>,
    /// Set when the work of a mask exceeds a limit.
    is_spent: Arc<AtomicBool>,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher")
            .field("num_tokens", &self.num_tokens)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, is_spent: Arc<AtomicBool>) -> Self {
        Self {
            inner,
            num_tokens: 0,
            has_ended: false,
            error: None,
            is_spent,
        }
    }

    /// Tokens it has followed.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Follows further tokens. One that the grammar does not allow leaves no token from then on, see [`Matcher::error`].
    pub fn advance(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.num_tokens += 1;
            if self.error.is_some() || self.has_ended {
                continue;
            }
            if self.inner.is_stopped() {
                // What comes behind the end of a grammar is an end of sequence.
                self.has_ended = true;
            } else if let Err(error) = self.inner.consume_token(token) {
                self.error = Some(crate::compiler::shorten(&error.to_string()));
            }
        }
    }

    /// Writes the tokens that may come next into `row`, bit `i % 32` of word `i / 32` for token `i`: where the grammar may end the
    /// end-of-sequence ids among them, behind its end those alone, after an error none.
    pub fn fill(&mut self, row: &mut [i32]) {
        row.fill(0);
        if self.error.is_some() {
            return;
        }
        match self.inner.compute_mask_or_eos() {
            Ok(mask) => {
                for (word, &bits) in row.iter_mut().zip(mask.as_slice()) {
                    *word = bits.cast_signed();
                }
            }
            Err(error) => {
                self.is_spent.store(true, Ordering::Relaxed);
                self.error = Some(crate::compiler::shorten(&error.to_string()));
            }
        }
    }

    /// Why no token is left.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
}
