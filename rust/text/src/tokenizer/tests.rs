use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::bytes::byte_chars;
use super::*;
use crate::detokenizer::{Detokenizer, TextStart};
use crate::gguf::Gguf;
use crate::gguf::tests::{Writer, text as gguf_text};

pub(crate) const SMOLLM2_CASES: &str = include_str!("../../tests/data/smollm2.json");
const SPLITS: &str = include_str!("../../tests/data/splits.json");

/// The real model file, where it is present.
pub(crate) fn smollm2_gguf() -> Option<Gguf> {
    let name = "../../.cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let local = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    let path = std::env::var_os("SMOLLM2_GGUF").map_or(local, PathBuf::from);
    path.exists().then(|| Gguf::open(path).unwrap())
}

pub(crate) fn smollm2() -> Option<Arc<Tokenizer>> {
    static TOKENIZER: LazyLock<Option<Arc<Tokenizer>>> =
        LazyLock::new(|| smollm2_gguf().map(|gguf| Arc::new(Tokenizer::from_gguf(&gguf).unwrap())));
    TOKENIZER.clone()
}

/// A byte-level vocabulary: three special tokens, all bytes (ids 3 to 258), and a few merges.
pub(crate) fn byte_level() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
            .map(String::from)
            .to_vec();
        tokens.extend(byte_chars().map(String::from));
        let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "< |", "| >"];
        tokens.extend(merges.map(|merge| merge.replace(' ', "")));
        let vocab: serde_json::Map<String, Value> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (token.clone(), json!(id)))
            .collect();
        let added: Vec<Value> = (0..3)
            .map(|id| added_token(id, &tokens[id], true))
            .collect();
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let json = json!({
            "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": byte_level,
            "post_processor": null, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        });
        Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
    });
    TOKENIZER.clone()
}

/// A vocabulary of SentencePiece's kind as in Llama 2: `▁` for spaces, byte fallback, BOS in front of texts.
pub(crate) fn sentencepiece() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        Arc::new(Tokenizer::from_bytes(sentencepiece_json().to_string().as_bytes()).unwrap())
    });
    TOKENIZER.clone()
}

fn sentencepiece_json() -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "▁a", "▁ab", "ab", "▁▁", "é"].map(String::from));
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = (0..3)
        .map(|id| added_token(id, &tokens[id], true))
        .collect();
    let metaspace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, metaspace(" ", "▁")]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            metaspace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "vocab": vocab, "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true,
            "merges": ["▁ a", "a b", "▁a b", "▁ ▁"],
        },
    })
}

fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": special})
}

fn ids_of(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn cases(section: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(SMOLLM2_CASES).unwrap();
    all[section].as_array().unwrap().clone()
}

#[test]
fn golden_prompts_encode_to_the_golden_ids() {
    let Some(tokenizer) = smollm2() else { return };
    for case in cases("golden") {
        let prompt = case["prompt"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode(prompt, true, true).unwrap(),
            ids_of(&case["ids"]),
            "{prompt:?}"
        );
    }
}

#[test]
fn texts_encode_as_the_reference_implementation_encodes_them() {
    let Some(tokenizer) = smollm2() else { return };
    for case in cases("encode") {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode(text, true, true).unwrap(),
            ids_of(&case["parsed"]),
            "parsed {text:?}"
        );
        assert_eq!(
            tokenizer.encode(text, true, false).unwrap(),
            ids_of(&case["plain"]),
            "plain {text:?}"
        );
    }
}

#[test]
fn id_sequences_decode_as_the_reference_implementation_decodes_them() {
    let Some(tokenizer) = smollm2() else { return };
    for case in cases("decode") {
        let ids = ids_of(&case["ids"]);
        assert_eq!(tokenizer.decode(&ids, false), case["text"], "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, true), case["skipped"], "{ids:?}");
    }
}

#[test]
fn the_smollm2_file_names_its_special_ids() {
    let Some(tokenizer) = smollm2() else { return };
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids(), tokenizer.eog_ids()),
        (Some(1), &[2][..], &[0, 2][..])
    );
    assert_eq!(
        (
            tokenizer.ids().unk,
            tokenizer.ids().pad,
            tokenizer.vocab_size()
        ),
        (Some(0), Some(2), 49_152)
    );
    assert!(
        tokenizer.is_special(2) && !tokenizer.is_special(17) && !tokenizer.is_special(u32::MAX)
    );
    assert!(tokenizer.chat_template().unwrap().contains("<|im_start|>"));
}

#[test]
fn splitting_rules_cut_as_the_reference_engine_of_regular_expressions_does() {
    let splits: Value = serde_json::from_str(SPLITS).unwrap();
    for (name, expected) in splits["pieces"].as_object().unwrap() {
        let rules = super::patterns::rules(name).unwrap();
        let pre_tokenizer = super::from_gguf::splitter(rules).unwrap();
        for (text, pieces) in splits["texts"]
            .as_array()
            .unwrap()
            .iter()
            .zip(expected.as_array().unwrap())
        {
            let text = text.as_str().unwrap();
            let mut string = PreTokenizedString::from(text);
            pre_tokenizer.pre_tokenize(&mut string).unwrap();
            let found: Vec<&str> = string
                .get_splits(
                    tokenizers::OffsetReferential::Original,
                    tokenizers::OffsetType::None,
                )
                .into_iter()
                .map(|(piece, _, _)| piece)
                .collect();
            assert_eq!(json!(found), *pieces, "{name}: {text:?}");
        }
    }
}

#[test]
fn a_very_long_run_of_spaces_is_encoded_whole() {
    let tokenizer = byte_level();
    let text = format!("{}x", " ".repeat(300_000));
    let ids = tokenizer.encode(&text, false, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), text);
}

#[test]
fn special_tokens_in_text_are_parsed_on_demand_only() {
    let tokenizer = byte_level();
    assert_eq!(
        tokenizer
            .encode("hello<|im_end|>", false, true)
            .unwrap()
            .last(),
        Some(&2)
    );
    let plain = tokenizer.encode("hello<|im_end|>", false, false).unwrap();
    assert!(plain.iter().all(|&id| !tokenizer.is_special(id)));
    assert_eq!(tokenizer.decode(&plain, true), "hello<|im_end|>");
}

#[test]
fn what_belongs_around_a_text_is_added_on_demand_only() {
    let tokenizer = sentencepiece();
    let bare = tokenizer.encode("ab", false, false).unwrap();
    assert_eq!(bare, [tokenizer.token_to_id("▁ab").unwrap()]);
    assert_eq!(
        tokenizer.encode("ab", true, false).unwrap(),
        [&[1], bare.as_slice()].concat()
    );
}

#[test]
fn a_batch_encodes_like_its_texts() {
    let tokenizer = byte_level();
    let texts = ["hello", "", "<|im_end|> world"];
    let single: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| tokenizer.encode(text, true, true).unwrap())
        .collect();
    assert_eq!(tokenizer.encode_batch(&texts, true, true).unwrap(), single);
}

#[test]
fn tokens_have_their_true_bytes() {
    let (bpe, spm) = (byte_level(), sentencepiece());
    for byte in 0..=255_u8 {
        assert_eq!(bpe.token_bytes(3 + u32::from(byte)), Some(&[byte][..]));
        assert_eq!(spm.token_bytes(3 + u32::from(byte)), Some(&[byte][..]));
    }
    let bytes = |tokenizer: &Tokenizer, token| {
        tokenizer
            .token_bytes(tokenizer.token_to_id(token).unwrap())
            .unwrap()
            .to_vec()
    };
    assert_eq!(bytes(&bpe, "Ġw"), b" w");
    assert_eq!(bytes(&bpe, "<|im_end|>"), b"<|im_end|>");
    assert_eq!(bytes(&spm, "▁ab"), b" ab");
    assert_eq!(bytes(&spm, "é"), "é".as_bytes());
    assert_eq!(bpe.token_bytes(9_999), None);
}

#[test]
fn the_bytes_of_a_forced_emoji_join_to_it_though_no_token_is_a_character() {
    let tokenizer = byte_level();
    let ids = tokenizer.encode("😀", false, false).unwrap();
    assert_eq!(ids.len(), 4);
    let joined: Vec<u8> = ids
        .iter()
        .flat_map(|&id| tokenizer.token_bytes(id).unwrap().to_vec())
        .collect();
    assert_eq!(String::from_utf8(joined).unwrap(), "😀");
}

#[test]
fn decoding_agrees_with_the_reference_decoder_on_valid_text() {
    for tokenizer in [byte_level(), sentencepiece()] {
        for text in ["ab a  b", " ab", "  a", "é漢😀 a", "<s>", ""] {
            let ids = tokenizer.encode(text, true, false).unwrap();
            for skip in [false, true] {
                assert_eq!(
                    tokenizer.decode(&ids, skip),
                    tokenizer.inner.decode(&ids, skip).unwrap(),
                    "{text:?}"
                );
            }
        }
    }
}

#[test]
fn a_tokenizer_json_that_contradicts_itself_is_an_error() {
    for bad in ["", "{}", "[1]", "{\"model\": {\"type\": \"BPE\"}}"] {
        assert!(
            matches!(
                Tokenizer::from_bytes(bad.as_bytes()),
                Err(TokenizerError::InvalidJson { .. })
            ),
            "{bad}"
        );
    }
    let mut json = sentencepiece_json();
    json["model"]["merges"] = json!(["▁ nothing"]);
    assert!(matches!(
        Tokenizer::from_bytes(json.to_string().as_bytes()),
        Err(TokenizerError::InvalidJson { .. })
    ));
    let mut json = sentencepiece_json();
    json["model"]["vocab"]["far"] = json!(u32::MAX);
    let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err();
    assert!(error.to_string().contains("4294967295"), "{error}");
    let mut json = sentencepiece_json();
    json["decoder"] =
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err();
    assert!(
        matches!(error, TokenizerError::UnsupportedDecoder { .. })
            && error.to_string().contains("CTC")
    );
}

#[test]
fn a_folder_names_special_ids_and_the_template() {
    let dir = std::env::temp_dir().join(format!("octavo-tokenizer-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.join(name), text).unwrap();
    write("tokenizer.json", sentencepiece_json().to_string());
    write(
        "tokenizer_config.json",
        json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "old"})
            .to_string(),
    );
    write(
        "generation_config.json",
        json!({"eos_token_id": [2, 260]}).to_string(),
    );
    write("chat_template.jinja", "new".to_owned());
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids(), tokenizer.eog_ids()),
        (Some(1), &[2, 260][..], &[2, 260][..])
    );
    assert_eq!(tokenizer.chat_template(), Some("new"));
    assert_eq!(tokenizer.tool_chat_template(), None);
    std::fs::remove_file(dir.join("chat_template.jinja")).unwrap();
    let named = |text: &str| json!([{"name": "tool_use", "template": format!("{text} tools")}, {"name": "default", "template": text}]);
    let templates = || {
        let read = Tokenizer::from_dir(&dir).unwrap();
        let text = |source: Option<&str>| source.unwrap_or("none").to_owned();
        (text(read.chat_template()), text(read.tool_chat_template()))
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    write(
        "tokenizer_config.json",
        json!({"chat_template": named("old")}).to_string(),
    );
    assert_eq!(templates(), pair("old", "old tools"));
    write(
        "chat_template.json",
        json!({"chat_template": named("json")}).to_string(),
    );
    assert_eq!(templates(), pair("json", "json tools"));
    write(
        "chat_template.json",
        json!({"chat_template": "one"}).to_string(),
    );
    assert_eq!(templates(), pair("one", "none"));
    std::fs::create_dir_all(dir.join("additional_chat_templates")).unwrap();
    write(
        "additional_chat_templates/tool_use.jinja",
        "{{ tools[0] }}".to_owned(),
    );
    assert_eq!(templates(), pair("one", "{{ tools[0] }}"));
    let both = Tokenizer::from_dir(&dir).unwrap();
    let messages = json!([{"role": "user", "content": "x"}]);
    let text = |source: &str, tools: Option<&Value>| {
        let options = crate::RenderOptions {
            tools,
            ..crate::RenderOptions::default()
        };
        crate::ChatTemplate::new(source, &both)
            .unwrap()
            .render(&messages, &options)
            .unwrap()
            .text
    };
    assert_eq!(text("one", Some(&json!(["f"]))), "f");
    assert_eq!(text("one", None), "one");
    assert_eq!(text("other", Some(&json!(["f"]))), "other");
    write(
        "generation_config.json",
        json!({"eos_token_id": 100_000}).to_string(),
    );
    assert!(matches!(
        Tokenizer::from_dir(&dir),
        Err(TokenizerError::IdOutOfVocabulary { id: 100_000, .. })
    ));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_token_that_ends_a_part_of_a_message_does_not_end_a_generation() {
    let ends = |tokens: &[&str]| {
        let mut json = sentencepiece_json();
        for (at, token) in tokens.iter().enumerate() {
            let list = json["added_tokens"].as_array_mut().unwrap();
            list.push(added_token(267 + at, token, true));
        }
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        tokenizer.eog_ids().to_vec()
    };
    assert_eq!(ends(&["<|end|>"]), [2, 267]);
    assert_eq!(ends(&["<|end|>", "<|return|>", "<|call|>"]), [2, 268, 269]);
}

fn deltas(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip, TextStart::Text);
    let mut deltas = Vec::new();
    for &id in ids {
        let mut out = String::new();
        detokenizer.push(id, &mut out);
        deltas.push(out);
    }
    let mut out = String::new();
    detokenizer.flush(&mut out);
    deltas.push(out);
    deltas
}

#[test]
fn special_tokens_are_shown_or_left_out_alike_in_both_ways_of_decoding() {
    let tokenizer = byte_level();
    let ids = tokenizer
        .encode("hello<|im_end|> world", false, true)
        .unwrap();
    for (skip, expected) in [(false, "hello<|im_end|> world"), (true, "hello world")] {
        assert_eq!(tokenizer.decode(&ids, skip), expected);
        assert_eq!(deltas(&tokenizer, &ids, skip).concat(), expected);
    }
}

#[test]
fn a_continuation_keeps_the_space_that_a_text_loses() {
    let tokenizer = sentencepiece();
    let ids = [tokenizer.token_to_id("▁ab").unwrap()];
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), true, TextStart::Continuation);
    let mut out = String::new();
    detokenizer.push(ids[0], &mut out);
    assert_eq!(
        (out.as_str(), tokenizer.decode(&ids, true).as_str()),
        (" ab", "ab")
    );
}

proptest! {
    #[test]
    fn joined_deltas_equal_the_decoding_of_all_ids(ids in prop::collection::vec(0..280_u32, 0..30), skip: bool) {
        for tokenizer in [byte_level(), sentencepiece()] {
            prop_assert_eq!(deltas(&tokenizer, &ids, skip).concat(), tokenizer.decode(&ids, skip));
        }
    }

    #[test]
    fn a_text_survives_encoding_and_decoding(text in any::<String>(), parse: bool) {
        prop_assume!(!["<s>", "</s>", "<unk>"].iter().any(|token| text.contains(token)));
        for tokenizer in [byte_level(), sentencepiece()] {
            let ids = tokenizer.encode(&text, false, parse).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text.as_str());
        }
    }

    #[test]
    fn byte_level_decoding_equals_the_reference_decoder(ids in prop::collection::vec(0..266_u32, 0..30), skip: bool) {
        let tokenizer = byte_level();
        prop_assert_eq!(tokenizer.decode(&ids, skip), tokenizer.inner.decode(&ids, skip).unwrap());
    }
}

/// A GGUF vocabulary: `<eos>`, `<tool>`, all bytes, and the merges.
fn gguf_writer(pre: &str, merges: &[&str]) -> Writer {
    let mut tokens: Vec<String> = ["<|im_end|>", "<tool>"].map(String::from).to_vec();
    tokens.extend(byte_chars().map(String::from));
    tokens.extend(["12", "ab", "Ġa"].map(String::from));
    let types: Vec<u8> = (0..tokens.len())
        .flat_map(|id| [3_i32, 4].get(id).copied().unwrap_or(1).to_le_bytes())
        .collect();
    let spellings: Vec<&str> = tokens.iter().map(String::as_str).collect();
    Writer::default()
        .entry("tokenizer.ggml.model", 8, &gguf_text("gpt2"))
        .entry("tokenizer.ggml.pre", 8, &gguf_text(pre))
        .strings("tokenizer.ggml.tokens", &spellings)
        .array("tokenizer.ggml.token_type", 5, tokens.len() as u64, &types)
        .strings("tokenizer.ggml.merges", merges)
}

const MERGES: &[&str] = &["1 2", "a b", "Ġ a"];

fn from_gguf(writer: &Writer) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_gguf(&writer.parse().unwrap())
}

#[test]
fn the_splitting_rule_of_a_gguf_file_is_followed() {
    let encode = |pre: &str, text: &str| {
        let tokenizer = from_gguf(&gguf_writer(pre, MERGES)).unwrap();
        let ids = tokenizer.encode(text, true, true).unwrap();
        ids.iter()
            .map(|&id| tokenizer.token_str(id).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        encode("smollm", "12 ab"),
        ["1", "2", "Ġ", "ab"].map(String::from)
    );
    assert_eq!(
        encode("gpt-2", "12 ab"),
        ["12", "Ġ", "ab"].map(String::from)
    );
    assert_eq!(
        encode("llama-bpe", "ab<tool>"),
        ["ab", "<tool>"].map(String::from)
    );
}

#[test]
fn the_names_that_converters_write_for_known_families_are_supported() {
    let same = |names: &[&str], family: &str| {
        let expected = super::patterns::rules(family).unwrap().patterns;
        for name in names {
            let rules = super::patterns::rules(name).unwrap();
            assert_eq!(rules.patterns, expected, "{name}");
        }
    };
    // Llama 3; Phi-4 and OLMo 2; GLM-4.
    same(
        &["llama3", "llama-v3", "dbrx", "chatglm-bpe", "glm4"],
        "llama-bpe",
    );
    // Qwen2, 2.5 and 3; distilled Qwen.
    same(&["deepseek-r1-qwen"], "qwen2");
    // SmolLM; Granite.
    same(&["smollm", "refact"], "starcoder");
    // OLMo 1; Phi-2.
    same(&["olmo", "phi-2"], "gpt-2");
    // GPT-4o and Phi-4-mini; Mistral Nemo.
    same(&["llama4"], "gpt-4o");
    assert!(super::patterns::rules("tekken").unwrap().add_bos);
}

#[test]
fn a_gguf_file_says_what_surrounds_a_text() {
    let writer = gguf_writer("gpt-2", MERGES)
        .entry("tokenizer.ggml.bos_token_id", 4, &1_u32.to_le_bytes())
        .entry("tokenizer.ggml.eos_token_id", 4, &0_u32.to_le_bytes())
        .entry("tokenizer.ggml.add_bos_token", 7, &[1])
        .entry("tokenizer.ggml.add_eos_token", 7, &[1])
        .entry("tokenizer.ggml.add_space_prefix", 7, &[1]);
    let tokenizer = from_gguf(&writer).unwrap();
    let space_a = tokenizer.token_to_id("Ġa").unwrap();
    assert_eq!(tokenizer.encode("a", true, true).unwrap(), [1, space_a, 0]);
    assert_eq!(tokenizer.encode(" a", false, true).unwrap(), [space_a]);
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids(), tokenizer.eog_ids()),
        (Some(1), &[0][..], &[0][..])
    );
}

#[test]
fn user_defined_tokens_of_a_gguf_file_are_whole_but_not_special() {
    let tokenizer = from_gguf(&gguf_writer("gpt-2", MERGES)).unwrap();
    assert_eq!(tokenizer.encode("<tool>", false, false).unwrap(), [1]);
    assert!(!tokenizer.is_special(1) && tokenizer.is_special(0));
    assert_eq!(tokenizer.decode(&[1, 0], true), "<tool>");
}

#[test]
fn a_gguf_vocabulary_that_cannot_be_used_is_refused_by_key_and_value() {
    let message = |writer: &Writer| from_gguf(writer).unwrap_err().to_string();
    let pre = message(&gguf_writer("nonesuch", MERGES));
    assert!(
        pre.starts_with("tokenizer.ggml.pre is \"nonesuch\"") && pre.contains("smollm"),
        "{pre}"
    );
    let model = message(&Writer::default().entry("tokenizer.ggml.model", 8, &gguf_text("bert")));
    assert!(
        model.starts_with("tokenizer.ggml.model is \"bert\""),
        "{model}"
    );
    for (merge, reason) in [
        ("ab", "has no space"),
        ("a zz", "not a token"),
        ("b b", "result is not a token"),
    ] {
        let text = message(&gguf_writer("gpt-2", &["1 2", merge]));
        assert!(
            text.contains("merges[1]") && text.contains(merge) && text.contains(reason),
            "{text}"
        );
    }
    let id = gguf_writer("gpt-2", MERGES).entry(
        "tokenizer.ggml.bos_token_id",
        4,
        &999_u32.to_le_bytes(),
    );
    assert!(message(&id).starts_with("tokenizer.ggml.bos_token_id is 999"));
    let types = Writer::default()
        .entry("tokenizer.ggml.model", 8, &gguf_text("gpt2"))
        .strings("tokenizer.ggml.tokens", &["a", "b"])
        .strings("tokenizer.ggml.merges", &[])
        .array("tokenizer.ggml.token_type", 5, 1, &[1, 0, 0, 0]);
    assert_eq!(
        message(&types),
        "tokenizer.ggml.token_type has 1 entries, expected 2"
    );
    assert!(message(&Writer::default()).contains("tokenizer.ggml.model"));
}
