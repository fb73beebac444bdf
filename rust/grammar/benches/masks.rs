//! What a mask costs: `cargo bench -p octavo-grammar --profile release --bench masks -- TOKENIZER…` (`tokenizer.json`, folder or `.gguf`).
//!
//! Random walks through grammars: each step takes any token that the mask allows. A walk begins anew where its grammar ends.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_grammar::compiler::{Compiler, Vocabulary};
use octavo_grammar::constraint;
use octavo_text::Tokenizer;
use octavo_text::gguf::Gguf;
use octavo_wire::GrammarSource;
use serde_json::{Value, json};

const MASKS: usize = 2000;
/// Tokens after which a walk begins anew.
const LONGEST: usize = 200;

fn grammars() -> Vec<(&'static str, Value)> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
        },
        "required": ["name", "age", "tags", "address"],
        "additionalProperties": false,
    });
    vec![
        ("any JSON object", json!({"json_object": true})),
        ("a JSON schema of 6 fields", json!({"json": person})),
        (
            "an expression, `\\d{4}-\\d\\d-\\d\\d`",
            json!({"regex": r"\d{4}-\d\d-\d\d"}),
        ),
        (
            "an expression, `(a{1,500}){1,500}`",
            json!({"regex": "(a{1,500}){1,500}"}),
        ),
        (
            "an expression, `(.*a.{20}|.*b.{20})*`",
            json!({"regex": "(.*a.{20}|.*b.{20})*"}),
        ),
        (
            "one of 1,000 texts",
            json!({"choice": (0..1000).map(|i| format!("text {i}")).collect::<Vec<_>>()}),
        ),
    ]
}

fn load(path: &Path) -> Tokenizer {
    if path
        .extension()
        .is_some_and(|extension| extension == "gguf")
    {
        Tokenizer::from_gguf(&Gguf::open(path).unwrap()).unwrap()
    } else if path.is_dir() {
        Tokenizer::from_dir(path).unwrap()
    } else {
        Tokenizer::from_file(path).unwrap()
    }
}

fn percentile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6
}

fn measure(compiler: &Compiler, name: &str, options: &Value) {
    let constraint = constraint::structured_outputs(options).unwrap().constraint;
    let parts = vec![constraint.part("answer")];
    let began = Instant::now();
    let grammar = match compiler.compile(Arc::new(GrammarSource { parts })) {
        Ok(grammar) => grammar,
        Err(error) => return println!("| {name} | refused: {error} |"),
    };
    let compiled = began.elapsed();
    let mut row = vec![0; compiler.vocabulary().vocab_size.div_ceil(32) as usize];
    let (mut matcher, mut random) = (grammar.matcher(), 1_u64);
    let (mut masks, mut steps, mut failed) = (Vec::new(), Vec::new(), 0);
    while masks.len() < MASKS {
        let began = Instant::now();
        matcher.fill(&mut row);
        masks.push(began.elapsed());
        let count: u32 = row.iter().map(|word| word.count_ones()).sum();
        failed += u32::from(matcher.error().is_some());
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let pick = ((random >> 33) as u32).checked_rem(count);
        let bits =
            (0..row.len() as u32 * 32).filter(|id| row[*id as usize / 32] >> (id % 32) & 1 == 1);
        let Some(token) = pick.and_then(|pick| bits.clone().nth(pick as usize)) else {
            matcher = grammar.matcher();
            continue;
        };
        let began = Instant::now();
        matcher.advance(&[token]);
        steps.push(began.elapsed());
        if compiler.vocabulary().eos_token_ids.contains(&token) || matcher.num_tokens() == LONGEST {
            matcher = grammar.matcher();
        }
    }
    let [p50, p99, most] = [0.5, 0.99, 1.0].map(|share| percentile(&mut masks, share));
    println!(
        "| {name} | {:.1} | {p50:.0} / {p99:.0} / {most:.0} | {:.0} / {:.0} | {failed} |",
        compiled.as_secs_f64() * 1e3,
        percentile(&mut steps, 0.5),
        percentile(&mut steps, 0.99),
    );
}

fn main() {
    for path in std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
    {
        let tokenizer = Arc::new(load(Path::new(&path)));
        let compiler = Compiler::new(Vocabulary {
            vocab_size: tokenizer.vocab_size() as u32,
            eos_token_ids: tokenizer.eog_ids().to_vec(),
            tokenizer,
        });
        let began = Instant::now();
        compiler.prepare();
        println!(
            "\n{path}: {} tokens, prepared in {:.2} s",
            compiler.vocabulary().vocab_size,
            began.elapsed().as_secs_f64()
        );
        println!(
            "| grammar | compiled, ms | a mask, µs: p50 / p99 / most | a token followed, µs: p50 / p99 | failed |"
        );
        println!("| --- | --- | --- | --- | --- |");
        for (name, options) in grammars() {
            measure(&compiler, name, &options);
        }
    }
}
