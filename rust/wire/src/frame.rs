//! Length-prefixed MessagePack.

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Bytes of a message at most; a longer one is a damaged or hostile stream.
pub const MAX_FRAME_BYTES: usize = 256 << 20;

const PREFIX_BYTES: usize = 4;

/// A stream that cannot be gone on with.
#[derive(Debug, Error)]
pub enum WireError {
    /// A length above [`MAX_FRAME_BYTES`].
    #[error("a message of {0} bytes; at most {MAX_FRAME_BYTES} are accepted")]
    TooLong(usize),
    /// Bytes that are no message.
    #[error("a message that cannot be read: {0}")]
    Decode(#[from] rmp_serde::decode::Error),
    /// A message that has no form in MessagePack.
    #[error("a message that cannot be written: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
}

/// A message as the bytes of its frame.
///
/// # Errors
/// The message is longer than [`MAX_FRAME_BYTES`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let mut frame = vec![0; PREFIX_BYTES];
    rmp_serde::encode::write(&mut frame, message)?;
    let length = frame.len() - PREFIX_BYTES;
    if length > MAX_FRAME_BYTES {
        return Err(WireError::TooLong(length));
    }
    frame[..PREFIX_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Makes messages of a stream's bytes, however they are cut.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Bytes of messages that were taken.
    taken: usize,
}

impl Decoder {
    /// Appends bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if all of it is there.
    ///
    /// # Errors
    /// The stream is damaged; nothing after this can be trusted.
    pub fn take<T: DeserializeOwned>(&mut self) -> Result<Option<T>, WireError> {
        let waiting = &self.bytes[self.taken..];
        let Some((prefix, rest)) = waiting.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > MAX_FRAME_BYTES {
            return Err(WireError::TooLong(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message = rmp_serde::from_slice(body)?;
        self.taken += PREFIX_BYTES + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use octavo_core::params::SamplingParams;
    use proptest::prelude::*;

    use super::*;
    use std::sync::Arc;

    use crate::{
        AddRequest, ChoiceUpdate, Finish, FromEngine, GrammarPart, GrammarSource, PositionLogprobs,
        Syntax, ToEngine, Update,
    };

    fn add(tokens: Vec<u32>, bias: Vec<(u32, f32)>) -> ToEngine {
        ToEngine::Add(Box::new(AddRequest {
            id: u64::MAX,
            num_prompt_tokens: tokens.len() as u32,
            tokens,
            first_choice: 3,
            params: SamplingParams {
                logit_bias: bias,
                seed: u64::MAX,
                logprobs: Some(0),
                ..SamplingParams::default()
            },
            priority: -1,
            tenant: 1 << 63,
            namespace: 7,
            grammar: Some(Arc::new(GrammarSource {
                parts: vec![GrammarPart {
                    name: "a".to_owned(),
                    syntax: Syntax::Lark,
                    text: "start: /é/".to_owned(),
                }],
            })),
        }))
    }

    fn updates(tokens: Vec<u32>) -> FromEngine {
        let position = PositionLogprobs {
            ids: tokens.clone(),
            values: tokens.iter().map(|&t| -(t as f32)).collect(),
            rank: 1,
        };
        let choice = ChoiceUpdate {
            index: 2,
            logprobs: vec![position.clone(); tokens.len()],
            token_ids: tokens,
            finish: Some(Finish::StopToken(5)),
        };
        FromEngine::Updates(vec![Update {
            id: 9,
            num_cached_tokens: 16,
            prompt_logprobs: Some(vec![None, Some(position)]),
            pooled: Some(vec![0.5, -1e-30]),
            choices: vec![choice],
            finished: true,
            error: None,
        }])
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_and_in_order_however_the_stream_is_cut(
            prompts in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..40), 1..6),
            bias in prop::collection::vec((any::<u32>(), -100f32..100.0), 0..4),
            sizes in prop::collection::vec(1..50_usize, 1..20),
        ) {
            let sent: Vec<ToEngine> = prompts.into_iter().map(|tokens| add(tokens, bias.clone())).collect();
            let stream: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
            let (mut decoder, mut received, mut rest) = (Decoder::default(), Vec::new(), stream.as_slice());
            for size in sizes.into_iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at(size.min(rest.len()));
                rest = later;
                decoder.push(now);
                while let Some(message) = decoder.take::<ToEngine>().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.take::<FromEngine>() {}
        }
    }

    #[test]
    fn updates_keep_every_field_and_every_bit_of_a_float() {
        let sent = updates(vec![0, 127, 128, u32::MAX]);
        let mut decoder = Decoder::default();
        decoder.push(&encode(&sent).unwrap());
        assert_eq!(decoder.take::<FromEngine>().unwrap(), Some(sent));
    }

    #[test]
    fn a_banned_token_stays_banned_on_the_way() {
        let sent = add(vec![1], vec![(4, f32::NEG_INFINITY)]);
        let mut decoder = Decoder::default();
        decoder.push(&encode(&sent).unwrap());
        assert_eq!(decoder.take::<ToEngine>().unwrap(), Some(sent));
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_it_is_waited_for() {
        let mut decoder = Decoder::default();
        decoder.push(&(MAX_FRAME_BYTES as u32 + 1).to_le_bytes());
        let found = decoder.take::<ToEngine>();
        assert!(matches!(found, Err(WireError::TooLong(_))), "{found:?}");
    }
}
