//! Random inputs for as long as `OCTAVO_FUZZ_SECONDS` says (one second without it): nothing panics, nothing hangs, and what
//! is read in two ways is the same in both.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_text::gguf::Gguf;
use octavo_text::parser::{OutputParser, REASONING_PARSERS, TOOL_PARSERS, ToolSchemas};
use octavo_text::{ChatTemplate, Detokenizer, Event, RenderOptions, TextStart, Tokenizer};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

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

/// Texts made of whole and broken parts, with some random characters.
fn texts(parts: &'static [&'static str], longest: usize) -> impl Strategy<Value = String> {
    let part = prop_oneof![
        8 => select(parts).prop_map(str::to_owned),
        1 => (select(parts), 0..9_usize).prop_map(|(part, end)| part.chars().take(end).collect()),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(part, 0..longest).prop_map(|parts| parts.concat())
}

const TEMPLATE_PARTS: &[&str] = &[
    "{{ ",
    " }}",
    "{% ",
    " %}",
    "{%- ",
    " -%}",
    "{# ",
    " #}",
    "for m in messages",
    "endfor",
    "if ",
    "else",
    "endif",
    "set x = ",
    "set ns = namespace(x=0)",
    "set ns.x = ns.x + 1",
    "macro f(a)",
    "endmacro",
    "f(1)",
    "messages",
    "m.role",
    "m.content",
    "['content']",
    "tools",
    "none",
    "loop.index0",
    "loop.last",
    "x",
    "1",
    "'a'",
    "\"b\"",
    "|trim",
    "|tojson",
    "|length",
    "|upper",
    "|join(',')",
    "|default('')",
    " ~ ",
    " + ",
    " - ",
    " * ",
    " % ",
    " == ",
    " in ",
    " not ",
    " and ",
    " is defined",
    " is string",
    "(",
    ")",
    "[",
    "]",
    "[1:]",
    "[::-1]",
    ".split('a')",
    ".strip()",
    ".items()",
    "range(9)",
    "raise_exception('no')",
    "strftime_now('%Y')",
    "<|im_start|>",
    "\n",
    " text ",
    "bos_token",
    "dict(a=1)",
    "__class__",
];

fn byte_level() -> Arc<Tokenizer> {
    let mut spellings: Vec<String> = ["<|im_start|>", "<|im_end|>", "<s>"]
        .map(String::from)
        .to_vec();
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..256)
        .filter(|byte| !printable(byte))
        .enumerate()
        .map(|(at, _)| 256 + at as u32);
    let alphabet = (0..256)
        .filter(printable)
        .chain(others)
        .filter_map(char::from_u32);
    spellings.extend(alphabet.map(String::from));
    spellings.extend(["he", "Ġa", "ðŁ"].map(String::from));
    let vocab: serde_json::Map<String, Value> = spellings
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = (0..3)
        .map(|id| {
            json!({"id": id, "content": spellings[id], "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": step, "post_processor": null,
        "decoder": step, "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "Ġ a", "ð Ł"]},
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}

#[test]
fn templates_end_in_a_prompt_or_an_error() {
    let tokenizer = byte_level();
    let strategy = (
        texts(TEMPLATE_PARTS, 24),
        texts(TEMPLATE_PARTS, 6),
        any::<bool>(),
    );
    fuzz(&strategy, |(source, content, generate)| {
        let Ok(template) = ChatTemplate::new(source, &tokenizer) else {
            return;
        };
        let messages =
            json!([{"role": "user", "content": content}, {"role": "assistant", "content": null}]);
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        let options = RenderOptions {
            tools: generate.then_some(&tools),
            add_generation_prompt: *generate,
            ..RenderOptions::default()
        };
        if let Ok(prompt) = template.render(&messages, &options) {
            let ids = tokenizer.encode_prompt(&prompt).unwrap();
            assert_eq!(tokenizer.decode(&ids, false), prompt.text);
        }
    });
}

const OUTPUT_PARTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|start|>",
    "<|channel|>",
    "analysis",
    "commentary to=functions.f",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<function=f>",
    "<parameter=k>",
    "</parameter>",
    "</function>",
    "f.call(",
    "k=",
    "None",
    "'",
    ")",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\":\"g\",\"parameters\":{}}",
    "\"k\": ",
    "true",
    "1e5",
    "\"v\"",
    "\\u00e9",
    "\\",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ";",
    ":",
    "<",
    "\n",
    " ",
    "```json\n",
    "name",
    "é😀",
];

/// All events of a text that comes in these pieces, as one text.
fn events(mut parser: OutputParser, pieces: &[&str]) -> String {
    let mut all = String::new();
    let mut last = None;
    let pushed: Vec<Event> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    for event in pushed.into_iter().chain(parser.finish()) {
        let (kind, text) = match event {
            Event::Content(text) => ("content".to_owned(), text),
            Event::Reasoning(text) => ("reasoning".to_owned(), text),
            Event::ToolCallArguments { index, delta } => (format!("arguments {index}"), delta),
            other => (format!("{other:?}"), String::new()),
        };
        if last.as_ref() != Some(&kind) {
            all += &format!("\n[{kind}]");
            last = Some(kind);
        }
        all += &text;
    }
    all
}

#[test]
fn parsers_see_the_same_events_however_a_text_is_cut() {
    let strategy = (
        texts(OUTPUT_PARTS, 40),
        prop::collection::vec(any::<Index>(), 0..12),
        any::<bool>(),
        prop::collection::vec(
            select(vec![
                "string", "integer", "boolean", "null", "object", "array",
            ]),
            0..3,
        ),
    );
    fuzz(&strategy, |(text, cuts, open, types)| {
        let function = json!({"name": "f", "parameters": {"properties": {"k": {"type": types}}}});
        let schemas = Arc::new(ToolSchemas::new(&json!([{"function": function}])));
        let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        borders.push(text.len());
        let mut places: Vec<usize> = cuts.iter().map(|cut| *cut.get(&borders)).collect();
        places.extend([0, text.len()]);
        places.sort_unstable();
        let pieces: Vec<&str> = places
            .windows(2)
            .map(|pair| &text[pair[0]..pair[1]])
            .collect();
        let tools = TOOL_PARSERS.iter().map(Some).chain([None]);
        for tools in tools {
            for reasoning in REASONING_PARSERS.iter().map(Some).chain([None]) {
                let make = || {
                    OutputParser::for_tools(tools.copied(), reasoning.copied(), *open, &schemas)
                        .ok()
                };
                if let (Some(whole), Some(cut)) = (make(), make()) {
                    assert_eq!(
                        events(whole, &[text]),
                        events(cut, &pieces),
                        "{tools:?} {reasoning:?}"
                    );
                }
            }
        }
    });
}

#[test]
fn detokenizers_join_to_the_decoding_of_all_ids_and_show_whole_characters_only() {
    let tokenizer = byte_level();
    let strategy = (prop::collection::vec(0..300_u32, 0..60), any::<bool>());
    fuzz(&strategy, |(ids, skip)| {
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), *skip, TextStart::Text);
        let mut joined = String::new();
        ids.iter().for_each(|&id| detokenizer.push(id, &mut joined));
        detokenizer.flush(&mut joined);
        assert_eq!(joined, tokenizer.decode(ids, *skip));
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|&&id| !(*skip && tokenizer.is_special(id)))
            .filter_map(|&id| tokenizer.token_bytes(id))
            .flatten()
            .copied()
            .collect();
        assert_eq!(joined, String::from_utf8_lossy(&bytes));
    });
}

/// A file with the metadata of a small vocabulary.
fn vocabulary(
    model: &str,
    pre: &str,
    tokens: &[String],
    types: &[i32],
    merges: &[String],
) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let array = |kind: u32, count: usize, items: Vec<u8>| {
        [
            &kind.to_le_bytes()[..],
            &(count as u64).to_le_bytes(),
            &items,
        ]
        .concat()
    };
    let strings = |list: &[String]| {
        array(
            8,
            list.len(),
            list.iter().flat_map(|item| text(item)).collect(),
        )
    };
    let scores = tokens
        .iter()
        .enumerate()
        .flat_map(|(at, _)| (-(at as f32)).to_le_bytes())
        .collect();
    let entries: Vec<(&str, u32, Vec<u8>)> = vec![
        ("tokenizer.ggml.model", 8, text(model)),
        ("tokenizer.ggml.pre", 8, text(pre)),
        ("tokenizer.ggml.tokens", 9, strings(tokens)),
        (
            "tokenizer.ggml.token_type",
            9,
            array(
                5,
                types.len(),
                types.iter().flat_map(|t| t.to_le_bytes()).collect(),
            ),
        ),
        ("tokenizer.ggml.merges", 9, strings(merges)),
        ("tokenizer.ggml.scores", 9, array(6, tokens.len(), scores)),
    ];
    let mut bytes = [&b"GGUF"[..], &3_u32.to_le_bytes(), &0_u64.to_le_bytes()].concat();
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (key, kind, value) in entries {
        bytes.extend(text(key));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    bytes
}

#[test]
fn vocabularies_of_gguf_files_are_refused_or_encode_every_text() {
    const SPELLINGS: &[&str] = &[
        "<unk>", "<s>", "a", "b", "ab", "▁", "▁a", "Ġ", "Ġa", "<0x0A>", "<0x41>", "é", "Ã", "©",
        " ", "",
    ];
    let token = prop_oneof![6 => select(SPELLINGS).prop_map(str::to_owned), 1 => "[ab▁Ġ]{1,4}", 1 => any::<String>()];
    let strategy = (
        (
            select(&["gpt2", "llama", "bert"][..]),
            select(&["gpt-2", "llama-bpe", "qwen2", "default", "x"][..]),
        ),
        prop::collection::vec(token, 0..20),
        prop::collection::vec(prop_oneof![5 => Just(1), 1 => -1..9_i32], 0..20),
        prop::collection::vec(
            prop_oneof![4 => "[abĠ▁]{1,2} [abĠ▁]{1,2}", 1 => any::<String>()],
            0..6,
        ),
        any::<bool>(),
        prop::collection::vec((any::<Index>(), any::<u8>()), 0..3),
        texts(SPELLINGS, 12),
    );
    fuzz(
        &strategy,
        |((model, pre), tokens, types, merges, bytes, changes, sample)| {
            let (mut tokens, mut types) = (tokens.clone(), types.clone());
            if *bytes {
                tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
                types.resize(tokens.len() - 256, 1);
                types.resize(tokens.len(), 6);
            }
            let mut file = vocabulary(model, pre, &tokens, &types, merges);
            for (place, value) in changes {
                let place = place.index(file.len());
                file[place] = *value;
            }
            let Ok(gguf) = Gguf::from_bytes(file) else {
                return;
            };
            if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) {
                let ids = tokenizer.encode(sample, true, true).unwrap_or_default();
                assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
                tokenizer.decode(&ids, false);
            }
        },
    );
}
