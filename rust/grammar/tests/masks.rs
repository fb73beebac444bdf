//! Masks against brute force: a token is allowed if and only if some match of the expression goes on with it.
#![allow(clippy::unwrap_used)]

mod common;

use common::{EOS, allowed, compile, compiler, num_tokens, text};
use octavo_grammar::compiler::GrammarError;
use proptest::prelude::*;
use regex_automata::Input;
use regex_automata::dfa::{Automaton, dense};
use serde_json::json;

/// The expression, anchored at both ends, as an automaton of another library.
struct Oracle(dense::DFA<Vec<u32>>);

impl Oracle {
    fn new(expression: &str) -> Self {
        Self(dense::DFA::new(&format!("^(?:{expression})$")).unwrap())
    }

    /// Whether a match begins with the text, and whether it is one.
    fn judge(&self, text: &str) -> (bool, bool) {
        let mut state = self.0.start_state_forward(&Input::new("")).unwrap();
        for byte in text.bytes() {
            state = self.0.next_state(state, byte);
        }
        (
            !self.is_dead(state),
            self.0.is_match_state(self.0.next_eoi_state(state)),
        )
    }

    /// No match can be reached.
    fn is_dead(&self, state: regex_automata::util::primitives::StateID) -> bool {
        let (mut seen, mut open) = (vec![state], vec![state]);
        while let Some(state) = open.pop() {
            if self.0.is_match_state(self.0.next_eoi_state(state)) {
                return false;
            }
            for byte in 0..=u8::MAX {
                let next = self.0.next_state(state, byte);
                if !seen.contains(&next) {
                    seen.push(next);
                    open.push(next);
                }
            }
        }
        true
    }
}

/// Walks up to `steps` tokens through the masks, the choices of which `picks` makes, and compares each with the oracle.
fn check(expression: &str, picks: &[prop::sample::Index]) {
    let compiler = compiler();
    let oracle = Oracle::new(expression);
    let grammar = match compile(&compiler, &json!({"regex": expression})) {
        Ok(grammar) => grammar,
        Err(error) => panic!("{expression}: {error}"),
    };
    let (mut matcher, mut written) = (grammar.matcher(), String::new());
    for pick in picks {
        let found = allowed(&mut matcher);
        let expected: Vec<u32> = (0..num_tokens())
            .filter(|&id| match id {
                EOS => oracle.judge(&written).1,
                1 => false,
                _ => oracle.judge(&format!("{written}{}", text(id))).0,
            })
            .collect();
        assert_eq!(found, expected, "{expression} behind {written:?}");
        let next = found[pick.index(found.len())];
        matcher.advance(&[next]);
        if next == EOS {
            assert_eq!(allowed(&mut matcher), [EOS], "{expression}: behind the end");
            return;
        }
        written.push_str(text(next));
    }
}

fn expression() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        prop::sample::select(vec![
            "a", "b", "c", "ab", "abc", "12", "é", "[ab]", "[^a]", ".", "\\d", "[a-c12]", "-",
            "\\."
        ])
        .prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 16, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 2..4).prop_map(|parts| parts.concat()),
            prop::collection::vec(inner.clone(), 2..4)
                .prop_map(|parts| format!("(?:{})", parts.join("|"))),
            (
                inner,
                prop::sample::select(vec!["*", "+", "?", "{2}", "{1,3}", "{0,2}"])
            )
                .prop_map(|(part, times)| format!("(?:{part}){times}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_mask_allows_exactly_the_tokens_that_some_match_goes_on_with(
        expression in expression(), picks in prop::collection::vec(any::<prop::sample::Index>(), 1..8)
    ) {
        check(&expression, &picks);
    }

    #[test]
    fn a_choice_allows_exactly_its_texts(
        texts in prop::collection::vec(prop::sample::select(vec!["a", "ab", "abc", "b", "bc", "12", "1", "é", "a b", "\"", "\n"]), 1..6),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..8)
    ) {
        let compiler = compiler();
        let mut matcher = compile(&compiler, &json!({"choice": texts})).unwrap().matcher();
        let mut written = String::new();
        for pick in &picks {
            let found = allowed(&mut matcher);
            let expected: Vec<u32> = (0..num_tokens()).filter(|&id| match id {
                EOS => texts.contains(&written.as_str()),
                1 => false,
                _ => texts.iter().any(|whole| whole.starts_with(&format!("{written}{}", text(id)))),
            }).collect();
            prop_assert_eq!(&found, &expected, "{:?} behind {:?}", texts, written);
            let Some(&next) = found.get(pick.index(found.len().max(1))) else { break };
            matcher.advance(&[next]);
            if next == EOS { break; }
            written.push_str(text(next));
        }
    }
}

#[test]
fn anchors_at_the_ends_of_an_expression_say_nothing() {
    let compiler = compiler();
    for (given, same) in [
        ("^ab$", "ab"),
        ("^a|b$", "a|b"),
        ("^(|.*)$", "(|.*)"),
        ("a\\$", "a\\$"),
        ("", ""),
    ] {
        let mut masks = [given, same].map(|expression| {
            let mut matcher = compile(&compiler, &json!({"regex": expression}))
                .unwrap()
                .matcher();
            allowed(&mut matcher)
        });
        assert_eq!(masks[0], masks[1], "{given}");
        masks[0].clear();
    }
}

#[test]
fn a_token_that_is_not_allowed_leaves_none() {
    let compiler = compiler();
    let mut matcher = compile(&compiler, &json!({"regex": "ab*"}))
        .unwrap()
        .matcher();
    matcher.advance(&[2, 3, 4, 3]);
    assert!(allowed(&mut matcher).is_empty());
    assert!(matcher.error().is_some());
    assert_eq!(matcher.num_tokens(), 4);
}

#[test]
fn matchers_of_one_grammar_go_their_own_ways() {
    let compiler = compiler();
    let grammar = compile(&compiler, &json!({"choice": ["ab", "ba"]})).unwrap();
    let [mut one, mut other] = [grammar.matcher(), grammar.matcher()];
    one.advance(&[2]);
    other.advance(&[3]);
    assert_eq!(allowed(&mut one), [3]);
    assert_eq!(allowed(&mut other), [2]);
    assert_eq!(allowed(&mut grammar.matcher()), [2, 3, 5]);
}

#[test]
fn a_model_without_an_end_of_sequence_has_no_grammars() {
    let vocabulary = octavo_grammar::compiler::Vocabulary {
        tokenizer: common::tokenizer(),
        vocab_size: common::vocab_size(),
        eos_token_ids: vec![common::vocab_size()],
    };
    let compiler = octavo_grammar::compiler::Compiler::new(vocabulary);
    let result = compile(&compiler, &json!({"regex": "a"}));
    assert_eq!(result.unwrap_err(), GrammarError::NoEndOfSequence);
}
