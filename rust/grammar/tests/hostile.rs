//! Grammars that are wrong, or made to take long: refused in bounded time and memory, and never by the end of the process.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use common::{compile, compiler, source};
use octavo_grammar::compiler::GrammarError;
use octavo_wire::{GrammarPart, GrammarSource, Syntax};
use serde_json::{Value, json};

fn nested(key: &str, depth: usize) -> Value {
    (0..depth).fold(
        json!({"type": "string"}),
        |inner, _| json!({key: [inner, {"type": "null"}]}),
    )
}

fn objects(depth: usize) -> Value {
    (0..depth).fold(
        json!({"type": "string"}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}}),
    )
}

#[test]
fn what_is_no_grammar_is_refused_and_the_next_one_compiles() {
    let compiler = compiler();
    for wrong in [
        json!({"regex": "("}),
        json!({"regex": "a{3,2}"}),
        json!({"regex": "(?<=a)b"}),
        json!({"regex": "[z-a]"}),
        json!({"json": {"type": "nonsense"}}),
        json!({"json": {"$ref": "#/$defs/none"}}),
        json!({"json": {"$ref": "http://example.com/schema"}}),
        json!({"json": {"type": "string", "pattern": "("}}),
        json!({"json": {"type": "integer", "minimum": 3, "maximum": 2}}),
        json!({"json": {"not": {}}}),
        json!({"grammar": "start: unknown"}),
        json!({"grammar": "not a grammar"}),
        json!({"grammar": "start: <[99999999]>"}),
        json!({"grammar": "%json {"}),
    ] {
        let result = compile(&compiler, &wrong);
        assert!(
            matches!(result, Err(GrammarError::Invalid(_))),
            "{wrong}: {result:?}"
        );
        assert!(compile(&compiler, &json!({"regex": "a"})).is_ok());
    }
}

#[test]
fn a_schema_that_refers_to_itself_compiles_if_an_end_can_be_reached() {
    let compiler = compiler();
    let tree = json!({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}}});
    assert!(compile(&compiler, &json!({"json": tree})).is_ok());
    // Nothing but itself: no output, or an error, but no end of the process.
    let circle = json!({"$ref": "#/$defs/t", "$defs": {"t": {"$ref": "#/$defs/t"}}});
    assert!(compile(&compiler, &json!({"json": circle})).is_err());
}

#[test]
fn deep_large_and_exponential_sources_end_within_their_limits() {
    let compiler = compiler();
    let long = "a|".repeat(200_000);
    for hostile in [
        json!({"regex": "(a{1,500}){1,500}"}),
        json!({"regex": "((a{0,100}){0,100}){0,100}"}),
        json!({"regex": "(.*a.{20}|.*b.{20})*"}),
        json!({"regex": format!("{}a{}", "(".repeat(100_000), ")".repeat(100_000))}),
        json!({"regex": format!("{}a{}", "(".repeat(60), ")*".repeat(60))}),
        json!({"regex": long}),
        json!({"regex": "x".repeat(200_000)}),
        json!({"json": nested("oneOf", 12)}),
        json!({"json": nested("anyOf", 60)}),
        json!({"json": nested("allOf", 60)}),
        json!({"json": objects(60)}),
        json!({"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "string"}}}),
        json!({"json": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}}),
        json!({"json": {"enum": (0..20_000).collect::<Vec<u32>>()}}),
        json!({"grammar": format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000))}),
        json!({"grammar": "start: a\na: a a | \"a\" | a a a"}),
        json!({"grammar": "start: /a/{1,100000}"}),
    ] {
        // Whether it is a grammar or not: an answer, not a time-out.
        let result = compile(&compiler, &hostile);
        assert_ne!(
            result.err(),
            Some(GrammarError::TimedOut),
            "{:.100}",
            hostile.to_string()
        );
    }
    assert!(compile(&compiler, &json!({"regex": "a"})).is_ok());
}

#[test]
fn a_source_that_is_too_long_or_too_deep_is_refused_before_it_is_read() {
    let compiler = compiler();
    let part = |text: String| GrammarSource {
        parts: vec![GrammarPart {
            name: "a".to_owned(),
            syntax: Syntax::Lark,
            text,
        }],
    };
    let long = compiler.compile(Arc::new(part("x".repeat(300_000))));
    assert!(matches!(
        long,
        Err(GrammarError::TooLong { given: 300_000, .. })
    ));
    let deep = compiler.compile(Arc::new(part(format!("start: {}", "[".repeat(65)))));
    assert!(matches!(deep, Err(GrammarError::TooDeep { .. })));
}

#[test]
fn what_has_been_compiled_is_kept_and_callers_of_one_source_share_the_work() {
    let compiler = compiler();
    let one = compile(&compiler, &json!({"regex": "ab"})).unwrap();
    let again = compile(&compiler, &json!({"regex": "ab"})).unwrap();
    assert!(Arc::ptr_eq(&one, &again));
    // More than are kept: the one that was used last stays.
    for i in 0..200 {
        compile(&compiler, &json!({"regex": format!("a{{{i}}}")})).unwrap();
        assert!(Arc::ptr_eq(
            &one,
            &compile(&compiler, &json!({"regex": "ab"})).unwrap()
        ));
    }
    let (sender, receiver) = mpsc::channel();
    let wanted = source(&json!({"regex": "[abc]{1,20}"}));
    for _ in 0..20 {
        let sender = sender.clone();
        compiler.request(Arc::clone(&wanted), move |result| {
            sender.send(result.unwrap()).unwrap()
        });
    }
    let first = receiver.recv().unwrap();
    assert!((1..20).all(|_| Arc::ptr_eq(&first, &receiver.recv().unwrap())));
}

#[test]
fn more_sources_than_may_wait_are_refused_at_once() {
    let compiler = compiler();
    let refused = Arc::new(AtomicU32::new(0));
    let (sender, receiver) = mpsc::channel();
    for i in 0..2000 {
        let (refused, sender) = (Arc::clone(&refused), sender.clone());
        let slow = source(&json!({"regex": format!("(a{{1,300}}b{{0,{i}}}){{1,300}}")}));
        compiler.request(slow, move |result| {
            if matches!(result, Err(GrammarError::Busy { .. })) {
                refused.fetch_add(1, Ordering::Relaxed);
            }
            sender.send(()).unwrap();
        });
    }
    drop(sender);
    assert_eq!(receiver.iter().count(), 2000);
    assert!(refused.load(Ordering::Relaxed) > 0);
}
