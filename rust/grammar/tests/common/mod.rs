//! A small vocabulary, and compilers for it.
#![allow(dead_code, reason = "each test uses its own part")]

use std::fmt::Write;
use std::sync::Arc;

use octavo_grammar::compiler::{Compiler, Grammar, GrammarError, Vocabulary};
use octavo_grammar::constraint::{self, Constraint};
use octavo_grammar::matcher::Matcher;
use octavo_text::Tokenizer;
use octavo_wire::GrammarSource;
use serde_json::{Value, json};

pub(crate) const EOS: u32 = 0;
/// Texts of the tokens behind two special ones; a few begin alike.
pub(crate) const WORDS: &[&str] = &[
    "a", "b", "c", "ab", "abc", "bc", "1", "2", "12", "{", "}", "\"", ":", ",", "[", "]", " ",
    "\n", "-", ".", "é", "true", "\"a\"", "\":", "e", "E", "n", "r", "t", "u", "l", "s", "f", "x",
    "0",
];

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    let mut vocab = String::from("\"<eos>\": 0, \"<think>\": 1");
    for (i, word) in WORDS.iter().enumerate() {
        write!(vocab, ", {}: {}", Value::from(*word), i + 2).unwrap();
    }
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let added = json!([special(0, "<eos>"), special(1, "<think>")]);
    let file = format!(
        "{{\"added_tokens\": {added}, \"decoder\": {{\"type\": \"Fuse\"}}, \"model\": {{\"type\": \"BPE\", \"vocab\": {{{vocab}}}, \"merges\": []}}}}"
    );
    Arc::new(Tokenizer::from_bytes(file.as_bytes()).unwrap())
}

pub(crate) fn num_tokens() -> u32 {
    WORDS.len() as u32 + 2
}

/// More ids than tokens, as models have.
pub(crate) fn vocab_size() -> u32 {
    num_tokens() + 7
}

pub(crate) fn compiler() -> Compiler {
    Compiler::bounded(Vocabulary {
        tokenizer: tokenizer(),
        vocab_size: vocab_size(),
        eos_token_ids: vec![EOS, 1_000_000],
    })
}

pub(crate) fn source(options: &Value) -> Arc<GrammarSource> {
    let constraint: Constraint = constraint::structured_outputs(options).unwrap().constraint;
    Arc::new(GrammarSource {
        parts: vec![constraint.part("answer")],
    })
}

pub(crate) fn compile(compiler: &Compiler, options: &Value) -> Result<Arc<Grammar>, GrammarError> {
    compiler.compile(source(options))
}

/// Tokens that a matcher allows.
pub(crate) fn allowed(matcher: &mut Matcher) -> Vec<u32> {
    let mut row = vec![0; vocab_size().div_ceil(32) as usize];
    matcher.fill(&mut row);
    let bits = |id: u32| row[id as usize / 32] >> (id % 32) & 1 == 1;
    assert!(
        (num_tokens()..row.len() as u32 * 32).all(|id| !bits(id)),
        "a token that nobody knows is allowed"
    );
    (0..num_tokens()).filter(|&id| bits(id)).collect()
}

pub(crate) fn text(id: u32) -> &'static str {
    WORDS[id as usize - 2]
}
