//! Random and damaged streams for as long as `OCTAVO_FUZZ_SECONDS` says (one second without it): nothing panics, nothing hangs, and what is
//! read is what a peer of the same version could have written.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use octavo_core::params::SamplingParams;
use std::sync::Arc;

use octavo_wire::{
    AddRequest, ChoiceUpdate, Decoder, Finish, FromEngine, GrammarPart, GrammarSource,
    PositionLogprobs, Syntax, ToEngine, Update, encode, journal,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Checks fresh inputs until the time is over. The seed is random, and a failure prints its input.
fn fuzz<S: Strategy>(strategy: &S, check: impl Fn(&S::Value))
where
    S::Value: std::fmt::Debug,
{
    let seconds = std::env::var("OCTAVO_FUZZ_SECONDS").map_or(1, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut runner = TestRunner::default();
    while Instant::now() < end {
        let input = strategy.new_tree(&mut runner).unwrap().current();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&input)));
        assert!(outcome.is_ok(), "failing input: {input:?}");
    }
}

/// A frame of a message to an engine.
fn to_engine() -> impl Strategy<Value = Vec<u8>> {
    let tokens = prop::collection::vec(any::<u32>(), 0..30);
    let bias = prop::collection::vec((any::<u32>(), any::<f32>()), 0..4);
    let add = (tokens, bias, any::<u64>(), any::<i32>()).prop_map(
        |(tokens, logit_bias, id, priority)| {
            ToEngine::Add(Box::new(AddRequest {
                id,
                num_prompt_tokens: tokens.len() as u32,
                tokens,
                first_choice: 0,
                params: SamplingParams {
                    logit_bias,
                    bad_words: vec![vec![1, 2], vec![3]],
                    logprobs: Some(3),
                    ..SamplingParams::default()
                },
                priority,
                tenant: id,
                namespace: 1,
                grammar: (id % 2 == 0).then(|| {
                    Arc::new(GrammarSource {
                        parts: vec![GrammarPart {
                            name: "start".to_owned(),
                            syntax: Syntax::Lark,
                            text: format!("start: /a{{{id}}}/"),
                        }],
                    })
                }),
            }))
        },
    );
    let other = prop_oneof![
        any::<u64>().prop_map(|id| ToEngine::Abort { id }),
        (any::<u64>(), any::<u32>()).prop_map(|(id, choice)| ToEngine::AbortChoice { id, choice }),
        any::<u64>().prop_map(|nonce| ToEngine::Ping { nonce }),
        Just(ToEngine::ResetPrefixCache),
        Just(ToEngine::Shutdown),
    ];
    prop_oneof![add, other].prop_map(|message| encode(&message).unwrap())
}

/// A frame of a message from an engine.
fn from_engine() -> impl Strategy<Value = Vec<u8>> {
    let updates = (
        prop::collection::vec(any::<u32>(), 0..12),
        any::<Option<String>>(),
    )
        .prop_map(|(ids, error)| {
            let position = PositionLogprobs {
                values: vec![-1.5; ids.len()],
                ids: ids.clone(),
                rank: 2,
            };
            let choice = ChoiceUpdate {
                index: 1,
                logprobs: vec![position.clone(); ids.len()],
                token_ids: ids,
                finish: Some(Finish::StopToken(3)),
            };
            FromEngine::Updates(vec![Update {
                id: 7,
                prompt_logprobs: Some(vec![None, Some(position)]),
                pooled: Some(vec![0.25; 5]),
                choices: vec![choice],
                error,
                ..Update::default()
            }])
        });
    let other = prop_oneof![
        any::<u32>().prop_map(|version| FromEngine::Hello { version }),
        any::<String>().prop_map(FromEngine::Failed),
        (any::<u64>(), any::<String>())
            .prop_map(|(id, message)| FromEngine::Refused { id, message }),
        any::<u64>().prop_map(|nonce| FromEngine::Pong {
            nonce,
            progress: Box::default()
        }),
    ];
    prop_oneof![updates, other].prop_map(|message| encode(&message).unwrap())
}

/// Whole frames, some of whose bytes are changed, cut out or put in; lengths among them.
fn damaged(frames: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0..3_u8);
    let frames = prop::collection::vec(frames, 1..4).prop_map(|frames| frames.concat());
    (frames, prop::collection::vec(change, 0..6)).prop_map(|(mut bytes, changes)| {
        for (at, byte, kind) in changes {
            let at = at.index(bytes.len() + 1);
            match kind {
                0 if at < bytes.len() => bytes[at] = byte,
                1 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.insert(at, byte),
            }
        }
        bytes
    })
}

/// Reads all that can be read, in pieces; what was read is written and read again.
fn read<T: DeserializeOwned + Serialize + std::fmt::Debug>(bytes: &[u8]) {
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(17) {
        decoder.push(piece);
        loop {
            match decoder.take::<T>() {
                Ok(Some(message)) => {
                    let mut again = Decoder::default();
                    again.push(&encode(&message).unwrap());
                    let copy = again.take::<T>().unwrap().unwrap();
                    assert_eq!(format!("{copy:?}"), format!("{message:?}"));
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

#[test]
fn damaged_messages_to_an_engine_are_read_or_refused() {
    fuzz(&damaged(to_engine()), |bytes| read::<ToEngine>(bytes));
}

#[test]
fn damaged_messages_from_an_engine_are_read_or_refused() {
    fuzz(&damaged(from_engine()), |bytes| read::<FromEngine>(bytes));
}

#[test]
fn any_bytes_are_read_or_refused() {
    let framed = prop::collection::vec(any::<u8>(), 0..400).prop_map(|body| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        bytes
    });
    fuzz(&framed, |bytes| {
        read::<ToEngine>(bytes);
        read::<FromEngine>(bytes);
        let _ = journal::decode(bytes);
    });
}

#[test]
fn a_journal_that_was_torn_or_damaged_is_read_whole_or_not_at_all() {
    let requests = prop::collection::vec(any::<u64>(), 0..20);
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let strategy = (
        requests,
        prop::option::of(change),
        any::<prop::sample::Index>(),
    );
    fuzz(&strategy, |(requests, change, end)| {
        let mut bytes = Vec::new();
        journal::encode(9, requests, &mut bytes);
        if let Some((at, byte)) = change {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        if let Some(journal) = journal::decode(&bytes) {
            assert!(journal.requests.len() <= bytes.len() / 8);
        }
    });
}
