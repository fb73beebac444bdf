//! One choice on the client's side: from tokens to text, stop strings, and the end.

use std::sync::Arc;

use octavo_text::Tokenizer;
use octavo_text::output::{ChoiceText, TextOptions};
use octavo_wire::{ChoiceUpdate, Finish, PositionLogprobs};
use serde_json::Value;

use crate::error::ApiError;

/// Why a choice ended, as the protocol says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The model's own end.
    EndOfSequence,
    StopToken(u32),
    StopString(String),
    Length,
    Error,
}

impl Ended {
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::EndOfSequence | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Error => "error",
        }
    }

    /// The stop string or stop token that was met.
    pub(crate) fn stop_reason(&self) -> Value {
        match self {
            Self::StopToken(token) => Value::from(*token),
            Self::StopString(text) => Value::from(text.as_str()),
            _ => Value::Null,
        }
    }
}

/// What one token brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// None if the end came without one.
    pub(crate) token: Option<u32>,
    /// Text that can never change any more.
    pub(crate) text: String,
    /// Character of the whole text at which the token begins.
    pub(crate) offset: usize,
    pub(crate) logprobs: Option<PositionLogprobs>,
    pub(crate) ended: Option<Ended>,
}

/// Reads the tokens of one choice.
#[derive(Debug)]
pub(crate) struct ChoiceReader {
    text: ChoiceText,
    include_stop: bool,
    ended: bool,
}

impl ChoiceReader {
    pub(crate) fn new(
        tokenizer: Option<Arc<Tokenizer>>,
        options: &TextOptions,
    ) -> Result<Self, ApiError> {
        let text = ChoiceText::new(tokenizer, options)
            .map_err(|error| ApiError::invalid(error.to_string()))?;
        Ok(Self {
            text,
            include_stop: options.include_stop_str_in_output,
            ended: false,
        })
    }

    /// What an update brings, token by token, cut at a stop string.
    pub(crate) fn push(&mut self, update: ChoiceUpdate) -> Vec<Piece> {
        let mut logprobs = update.logprobs.into_iter();
        let mut pieces = Vec::with_capacity(update.token_ids.len());
        let last = update.token_ids.len().checked_sub(1);
        for (place, token) in update.token_ids.into_iter().enumerate() {
            if self.ended {
                return pieces;
            }
            let finish = update.finish.filter(|_| Some(place) == last);
            let mut piece = self.token(token, finish);
            piece.logprobs = logprobs.next();
            pieces.push(piece);
        }
        if let (None, Some(finish), false) = (last, update.finish, self.ended) {
            let mut piece = Piece::default();
            self.end(finish, &mut piece);
            pieces.push(piece);
        }
        pieces
    }

    fn token(&mut self, token: u32, finish: Option<Finish>) -> Piece {
        // The token that ended the choice is text only if the client wants stops included.
        let is_stop = matches!(finish, Some(Finish::EndOfSequence | Finish::StopToken(_)));
        let before = self.text.num_tokens();
        let mut piece = Piece {
            token: Some(token),
            ..Piece::default()
        };
        if is_stop && !self.include_stop {
            self.text.push_hidden();
        } else {
            let pushed = self.text.push(&[token]);
            piece.text = pushed.delta;
            // A stop string wins over any end that the engine found in the same token.
            if let Some(stop) = pushed.stopped {
                self.ended = true;
                piece.ended = Some(Ended::StopString(stop));
            }
        }
        piece.offset = self.text.text_offsets().get(before).copied().unwrap_or(0);
        if let (Some(finish), false) = (finish, self.ended) {
            self.end(finish, &mut piece);
        }
        piece
    }

    fn end(&mut self, finish: Finish, piece: &mut Piece) {
        let rest = self.text.finish();
        piece.text.push_str(&rest.delta);
        self.ended = true;
        // What was held back may turn out to hold a stop string.
        piece.ended = Some(match (rest.stopped, finish) {
            (Some(stop), _) => Ended::StopString(stop),
            (None, Finish::EndOfSequence) => Ended::EndOfSequence,
            (None, Finish::StopToken(token)) => Ended::StopToken(token),
            (None, Finish::Length) => Ended::Length,
            (None, Finish::Abort | Finish::Error) => Ended::Error,
        });
    }
}
