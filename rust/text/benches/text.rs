//! MB/s of tokenization on one core beside the `tokenizers` crate, tokens/s of detokenization, and how long each parser
//! takes for a hostile megabyte: `cargo bench -p octavo-text`.
//!
//! Texts are ShareGPT conversations from the cache folder (`python -m benches.engine.replay` puts them there) and this
//! repository's Rust code; tokenizers are those of the built-in models' files. What is not there is left out.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use octavo_text::gguf::{Gguf, StringArray};
use octavo_text::parser::{OutputParser, REASONING_PARSERS, TOOL_PARSERS};
use octavo_text::{Detokenizer, TextStart, Tokenizer};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

/// Bytes of each kind of text.
const TEXT_BYTES: usize = 4 << 20;
const HOSTILE_BYTES: usize = 1 << 20;

fn cache_folder() -> PathBuf {
    let home = std::env::var_os("HOME").map_or_else(PathBuf::new, PathBuf::from);
    home.join(".cache/octavo")
}

/// Up to [`TEXT_BYTES`] of these texts.
fn cut(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut total = 0;
    texts
        .take_while(|text| {
            let enough = total >= TEXT_BYTES;
            total += text.len();
            !enough
        })
        .collect()
}

/// The messages of conversations, each a text.
fn conversations() -> Vec<String> {
    let Ok(json) = std::fs::read_to_string(cache_folder().join("data/sharegpt.json")) else {
        return Vec::new();
    };
    let messages = json.split("\"value\": \"").skip(1).filter_map(|rest| {
        let mut escaped = false;
        let end = rest.find(|c: char| {
            let closes = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            closes
        })?;
        serde_json::from_str(&format!("\"{}\"", &rest[..end])).ok()
    });
    cut(messages)
}

fn code() -> Vec<String> {
    fn collect(folder: &Path, texts: &mut Vec<String>) {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                collect(&path, texts);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                texts.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut texts = Vec::new();
    collect(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        &mut texts,
    );
    cut(texts.into_iter())
}

fn vocabulary(gguf: &Gguf) -> (Vec<&str>, Vocab) {
    let tokens: &StringArray = gguf.require("tokenizer.ggml.tokens").unwrap();
    let spellings: Vec<&str> = tokens.iter().collect();
    let vocab = spellings
        .iter()
        .zip(0..)
        .map(|(token, id)| ((*token).to_owned(), id))
        .collect();
    (spellings, vocab)
}

/// SmolLM2's pipeline in the crate, as in the model's own `tokenizer.json`.
fn smollm2_peer(gguf: &Gguf) -> tokenizers::Tokenizer {
    let merges: &StringArray = gguf.require("tokenizer.ggml.merges").unwrap();
    let merges = merges
        .iter()
        .map(|merge| merge.split_once(' ').unwrap())
        .map(|(left, right)| (left.to_owned(), right.to_owned()))
        .collect();
    let bpe = BPE::builder().vocab_and_merges(vocabulary(gguf).1, merges);
    let mut peer = tokenizers::Tokenizer::new(bpe.build().unwrap());
    let steps: Vec<PreTokenizerWrapper> = vec![
        Digits::new(true).into(),
        ByteLevel::new(false, true, true).into(),
    ];
    peer.with_pre_tokenizer(Some(Sequence::new(steps)));
    peer
}

/// Gemma's pipeline in the crate: merges are all pairs of pieces that make a piece, by its score.
fn gemma_peer(gguf: &Gguf) -> tokenizers::Tokenizer {
    let (spellings, vocab) = vocabulary(gguf);
    let scores: &[f32] = gguf.require("tokenizer.ggml.scores").unwrap();
    let mut merges: Vec<(u32, u32, (String, String))> = Vec::new();
    let ids: HashMap<&str, u32> = spellings.iter().copied().zip(0..).collect();
    for (id, piece) in (0..).zip(&spellings) {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(first), Some(_)) = (ids.get(left), ids.get(right)) {
                merges.push((id, *first, (left.to_owned(), right.to_owned())));
            }
        }
    }
    merges.sort_by(|a, b| {
        let score = |id: u32| scores[id as usize];
        score(b.0)
            .total_cmp(&score(a.0))
            .then((a.0, a.1).cmp(&(b.0, b.1)))
    });
    let merges = merges.into_iter().map(|(_, _, pair)| pair).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .byte_fallback(true)
        .fuse_unk(true);
    let mut peer = tokenizers::Tokenizer::new(bpe.build().unwrap());
    peer.with_normalizer(Some(Replace::new(" ", "▁").unwrap()))
        .unwrap();
    peer
}

type Peer = fn(&Gguf) -> tokenizers::Tokenizer;

const MODELS: [(&str, &str, Peer); 2] = [
    ("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", smollm2_peer),
    ("gemma3", "gemma-3-270m-q4_k_m.gguf", gemma_peer),
];

fn tokenization(c: &mut Criterion) {
    let texts = [("conversations", conversations()), ("code", code())];
    for (model, file, peer) in MODELS {
        let Ok(gguf) = Gguf::open(cache_folder().join("models").join(file)) else {
            continue;
        };
        let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf).unwrap());
        let peer = peer(&gguf);
        for (kind, texts) in &texts {
            let mut group = c.benchmark_group(format!("encode/{model}/{kind}"));
            let bytes: usize = texts.iter().map(String::len).sum();
            group
                .sample_size(10)
                .throughput(Throughput::Bytes(bytes as u64));
            group.bench_function("octavo", |bencher| {
                bencher.iter(|| {
                    for text in texts {
                        black_box(tokenizer.encode(text, false, false).unwrap());
                    }
                });
            });
            group.bench_function("tokenizers", |bencher| {
                bencher.iter(|| {
                    for text in texts {
                        black_box(peer.encode_fast(text.as_str(), false).unwrap());
                    }
                });
            });
        }
        detokenization(c, model, &tokenizer, &texts[1].1);
    }
}

fn detokenization(c: &mut Criterion, model: &str, tokenizer: &Arc<Tokenizer>, texts: &[String]) {
    let ids: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| tokenizer.encode(text, false, false).unwrap())
        .collect();
    let tokens: usize = ids.iter().map(Vec::len).sum();
    let mut group = c.benchmark_group(format!("detokenize/{model}"));
    group
        .sample_size(10)
        .throughput(Throughput::Elements(tokens as u64));
    group.bench_function("octavo", |bencher| {
        bencher.iter(|| {
            for ids in &ids {
                let mut detokenizer =
                    Detokenizer::new(Arc::clone(tokenizer), true, TextStart::Text);
                let mut delta = String::new();
                for &id in ids {
                    delta.clear();
                    detokenizer.push(id, &mut delta);
                    black_box(&delta);
                }
            }
        });
    });
}

/// What makes a parser repeat work, if anything does: markers, openings of calls, and openings of values behind them.
fn hostile() -> Vec<String> {
    let heads = [
        "",
        "<think>",
        "<tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "{\"name\": \"f\", \"parameters\": {\"a\": ",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]{\"a\": ",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": ",
        "<|channel|>commentary to=functions.f<|message|>{\"a\": ",
        "<tool_call><function=f><parameter=a>",
    ];
    let fills = [
        "[",
        "{\"a\":",
        "\"",
        "\\",
        "\"\\\"",
        " ",
        "\n",
        "t",
        "1",
        "é",
        "]",
        "<",
        "<tool_cal",
    ];
    let text =
        |head: &str, fill: &str| format!("{head}{}", fill.repeat(HOSTILE_BYTES / fill.len()));
    let filled = heads
        .iter()
        .flat_map(|head| fills.iter().map(move |fill| text(head, fill)));
    filled
        .chain(heads[1..].iter().map(|head| text("", head)))
        .collect()
}

/// The slowest of all hostile texts for each parser, in pieces of four bytes as a model would write them.
fn parsers(c: &mut Criterion) {
    let mut group = c.benchmark_group("hostile megabyte");
    group.sample_size(10);
    let texts = hostile();
    let tools = TOOL_PARSERS.iter().map(|name| (Some(*name), None));
    let reasoning = REASONING_PARSERS.iter().map(|name| (None, Some(*name)));
    for (tools, reasoning) in tools.chain(reasoning) {
        let parse = |text: &str| {
            let mut parser = OutputParser::new(tools, reasoning, false).unwrap();
            let (mut start, mut events) = (0, 0);
            while start < text.len() {
                let mut end = (start + 4).min(text.len());
                while !text.is_char_boundary(end) {
                    end += 1;
                }
                events += parser.push(&text[start..end]).len();
                start = end;
            }
            events + parser.finish().len()
        };
        let slowest = texts
            .iter()
            .max_by_key(|text| {
                let start = std::time::Instant::now();
                black_box(parse(text));
                start.elapsed()
            })
            .unwrap();
        group.bench_function(tools.or(reasoning).unwrap(), |bencher| {
            bencher.iter(|| parse(black_box(slowest)));
        });
    }
}

criterion_group!(benches, tokenization, parsers);
criterion_main!(benches);
