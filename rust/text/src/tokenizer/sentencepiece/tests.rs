use std::sync::Arc;

use proptest::prelude::*;

use crate::detokenizer::{Detokenizer, TextStart};
use crate::gguf::tests::{Writer, text as gguf_text};
use crate::tokenizer::{Tokenizer, TokenizerError};

use super::{Fallback, PieceCache, SentencePiece, TokenType};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

type Piece = (String, f32, i32);

fn piece(token: &str, score: f32, kind: i32) -> Piece {
    (token.to_owned(), score, kind)
}

/// `<unk>`, `<s>` and `</s>` as 0 to 2, with bytes as 3 to 258 on demand, then `more`.
fn vocabulary(bytes: bool, more: &[(&str, f32, i32)]) -> Vec<Piece> {
    let mut pieces = vec![
        piece("<unk>", 0.0, UNKNOWN),
        piece("<s>", 0.0, CONTROL),
        piece("</s>", 0.0, CONTROL),
    ];
    if bytes {
        pieces.extend((0..256).map(|byte| piece(&format!("<0x{byte:02X}>"), 0.0, BYTE)));
    }
    pieces.extend(
        more.iter()
            .map(|&(token, score, kind)| piece(token, score, kind)),
    );
    pieces
}

fn writer(pieces: &[Piece]) -> Writer {
    let tokens: Vec<&str> = pieces.iter().map(|piece| piece.0.as_str()).collect();
    let scores: Vec<u8> = pieces.iter().flat_map(|p| p.1.to_le_bytes()).collect();
    let types: Vec<u8> = pieces.iter().flat_map(|p| p.2.to_le_bytes()).collect();
    let count = pieces.len() as u64;
    Writer::default()
        .entry("tokenizer.ggml.model", 8, &gguf_text("llama"))
        .strings("tokenizer.ggml.tokens", &tokens)
        .array("tokenizer.ggml.scores", 6, count, &scores)
        .array("tokenizer.ggml.token_type", 5, count, &types)
}

fn no_prefix(writer: Writer) -> Writer {
    writer.entry("tokenizer.ggml.add_space_prefix", 7, &[0])
}

fn build(writer: &Writer) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_gguf(&writer.parse().unwrap())
}

fn spelled(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, false, true).unwrap();
    ids.iter()
        .map(|&id| tokenizer.token_str(id).unwrap())
        .collect()
}

/// The characters of `alphabet` as pieces of a low score, and `merged` ones.
fn plain(alphabet: &str, merged: &[(&str, f32)]) -> Tokenizer {
    let mut pieces = vocabulary(true, &[]);
    pieces.extend(
        alphabet
            .chars()
            .map(|c| piece(&c.to_string(), -100.0, NORMAL)),
    );
    pieces.extend(
        merged
            .iter()
            .map(|&(token, score)| piece(token, score, NORMAL)),
    );
    build(&no_prefix(writer(&pieces))).unwrap()
}

#[test]
fn the_pair_whose_piece_has_the_highest_score_is_merged_first() {
    let tokenizer = plain("abc", &[("ab", -2.0), ("bc", -1.0), ("abc", -3.0)]);
    assert_eq!(spelled(&tokenizer, "abc"), ["abc"]);
    assert_eq!(spelled(&tokenizer, "abb"), ["ab", "b"]);
    let tokenizer = plain("abc", &[("ab", -2.0), ("bc", -1.0)]);
    assert_eq!(spelled(&tokenizer, "abc"), ["a", "bc"]);
}

#[test]
fn of_equal_scores_the_leftmost_pair_is_merged_first() {
    let tokenizer = plain("abc", &[("ab", -0.0), ("bc", 0.0)]);
    assert_eq!(spelled(&tokenizer, "abc"), ["ab", "c"]);
    let overlapping = plain("ab", &[("aa", -1.0), ("baa", -1.5), ("aab", -1.5)]);
    assert_eq!(spelled(&overlapping, "baab"), ["baa", "b"]);
}

#[test]
fn unused_pieces_are_merged_through_and_taken_apart_at_the_end() {
    let pieces = |kind| {
        vocabulary(
            true,
            &[
                ("a", -9.0, NORMAL),
                ("b", -9.0, NORMAL),
                ("ab", -1.0, kind),
                ("abab", -2.0, NORMAL),
            ],
        )
    };
    let used = build(&no_prefix(writer(&pieces(NORMAL)))).unwrap();
    let unused = build(&no_prefix(writer(&pieces(UNUSED)))).unwrap();
    assert_eq!(spelled(&used, "ababab"), ["abab", "ab"]);
    assert_eq!(spelled(&unused, "ababab"), ["abab", "a", "b"]);
}

#[test]
fn characters_that_are_no_pieces_become_their_bytes_or_one_unknown_token() {
    let bytes = plain("a", &[]);
    assert_eq!(spelled(&bytes, "aé\n"), ["a", "<0xC3>", "<0xA9>", "<0x0A>"]);
    let unknown = build(&no_prefix(writer(&vocabulary(
        false,
        &[("a", 0.0, NORMAL)],
    ))))
    .unwrap();
    assert_eq!(spelled(&unknown, "éxaé"), ["<unk>", "a", "<unk>"]);
}

#[test]
fn user_defined_tokens_are_whole_whatever_way_their_spaces_are_written() {
    let more = [
        ("▁", -1.0, NORMAL),
        ("a", -1.0, NORMAL),
        ("▁a", 9.0, NORMAL),
        ("  ", -1000.0, USER_DEFINED),
        ("   ", -1000.0, USER_DEFINED),
        ("<b>", -1000.0, USER_DEFINED),
    ];
    let tokenizer = build(&no_prefix(writer(&vocabulary(true, &more)))).unwrap();
    for text in ["    a  <b>a", "▁ ▁ a▁▁<b>a"] {
        assert_eq!(spelled(&tokenizer, text), ["▁▁▁", "▁a", "▁▁", "<b>", "a"]);
    }
    let id = tokenizer.token_to_id("<b>").unwrap();
    assert!(!tokenizer.is_special(id));
    assert_eq!(tokenizer.encode("<b>", false, false).unwrap(), [id]);
    let ids = tokenizer.encode("   a  <b>", false, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), "   a  <b>");
}

#[test]
fn a_space_is_put_before_a_text_and_taken_away_again() {
    let more = [
        ("▁", -1.0, NORMAL),
        ("a", -1.0, NORMAL),
        ("▁a", 9.0, NORMAL),
    ];
    let tokenizer = build(&writer(&vocabulary(true, &more))).unwrap();
    assert_eq!(spelled(&tokenizer, "a"), ["▁a"]);
    assert_eq!(spelled(&tokenizer, " a"), ["▁", "▁a"]);
    assert_eq!(spelled(&tokenizer, "a</s>a"), ["▁a", "</s>", "▁a"]);
    assert!(spelled(&tokenizer, "").is_empty());
    for text in ["a", " a", "  ", "é", ""] {
        let ids = tokenizer.encode(text, true, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), text);
        assert_eq!(tokenizer.inner.decode(&ids, true).unwrap(), text);
    }
}

#[test]
fn control_tokens_and_bytes_in_a_text_are_text_unless_asked_for() {
    let tokenizer = plain("<s>0xA", &[]);
    assert_eq!(tokenizer.encode("<s>", false, true).unwrap(), [1]);
    assert_eq!(spelled(&tokenizer, "<0x0A>").len(), 6);
    let ids = tokenizer.encode("<s>", false, false).unwrap();
    assert_eq!(
        (ids.len(), tokenizer.decode(&ids, true).as_str()),
        (3, "<s>")
    );
}

#[test]
fn ids_and_bos_have_the_defaults_of_these_vocabularies() {
    let pieces = vocabulary(true, &[("a", 0.0, NORMAL)]);
    let tokenizer = build(&writer(&pieces)).unwrap();
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids(), tokenizer.ids().unk),
        (Some(1), &[2][..], Some(0))
    );
    assert_eq!(tokenizer.encode("", true, true).unwrap(), [1]);
    let said = writer(&pieces)
        .entry("tokenizer.ggml.bos_token_id", 4, &2_u32.to_le_bytes())
        .entry("tokenizer.ggml.eos_token_id", 4, &1_u32.to_le_bytes())
        .entry("tokenizer.ggml.add_bos_token", 7, &[0])
        .entry("tokenizer.ggml.add_eos_token", 7, &[1]);
    let tokenizer = build(&said).unwrap();
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids()),
        (Some(2), &[1][..])
    );
    assert_eq!(tokenizer.encode("", true, true).unwrap(), [1]);
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused_by_key() {
    let message = |writer: &Writer| build(writer).unwrap_err().to_string();
    let good = vocabulary(true, &[("a", 0.0, NORMAL)]);
    let with = |at: usize, piece: Piece| {
        let mut pieces = good.clone();
        pieces[at] = piece;
        writer(&pieces)
    };
    for (refused, words) in [
        (with(0, piece("<unk>", 0.0, 9)), "token_type is \"9 at 0\""),
        (
            with(7, piece("<0x04>", f32::NAN, BYTE)),
            "scores is \"NaN at 7\"",
        ),
        (with(7, piece("x", 0.0, BYTE)), "tokens is \"x\""),
        (
            with(7, piece("x", 0.0, NORMAL)),
            "255 of the 256 byte tokens",
        ),
        (
            writer(&[piece("a", 0.0, NORMAL)]),
            "neither byte tokens nor",
        ),
        (
            writer(&good).entry("tokenizer.ggml.remove_extra_whitespaces", 7, &[1]),
            "remove_extra_whitespaces is",
        ),
        (
            writer(&good).array("tokenizer.ggml.precompiled_charsmap", 0, 1, &[7]),
            "precompiled_charsmap is",
        ),
        (
            writer(&good).entry(
                "tokenizer.ggml.unknown_token_id",
                4,
                &9999_u32.to_le_bytes(),
            ),
            "unknown_token_id is 9999",
        ),
        (
            Writer::default()
                .entry("tokenizer.ggml.model", 8, &gguf_text("llama"))
                .strings("tokenizer.ggml.tokens", &["a"]),
            "\"tokenizer.ggml.token_type\" is missing",
        ),
    ] {
        let found = message(&refused);
        assert!(found.contains(words), "{found:?} lacks {words:?}");
    }
    for model in ["bert", "t5", "rwkv"] {
        let found = message(&Writer::default().entry("tokenizer.ggml.model", 8, &gguf_text(model)));
        let start = format!("tokenizer.ggml.model is {model:?}, which is not supported");
        assert!(found.starts_with(&start), "{found}");
    }
}

/// Merges by looking at all neighbours again and again.
fn naive(text: &str, pieces: &[Piece]) -> Vec<String> {
    let score = |spelling: &str| {
        let found = pieces.iter().find(|piece| piece.0 == spelling);
        found.map(|piece| piece.1)
    };
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for at in 1..parts.len() {
            let joined = format!("{}{}", parts[at - 1], parts[at]);
            let higher = |score: &f32| best.is_none_or(|(highest, _)| *score > highest);
            if let Some(score) = score(&joined).filter(higher) {
                best = Some((score, at));
            }
        }
        let Some((_, at)) = best else { return parts };
        let right = parts.remove(at);
        parts[at - 1].push_str(&right);
    }
}

proptest! {
    #[test]
    fn merging_equals_a_search_of_all_neighbours(
        words in prop::collection::btree_set("[abc]{2,5}", 0..25),
        scores in prop::collection::vec(-6..0_i32, 25),
        text in "[abc]{0,40}",
    ) {
        let mut pieces: Vec<Piece> = words.iter().zip(scores).map(|(word, score)| piece(word, score as f32, NORMAL)).collect();
        pieces.extend(["a", "b", "c"].map(|token| piece(token, -100.0, NORMAL)));
        let tokenizer = build(&no_prefix(writer(&[vocabulary(true, &[]), pieces.clone()].concat()))).unwrap();
        prop_assert_eq!(spelled(&tokenizer, &text), naive(&text, &pieces));
    }

    #[test]
    fn any_text_survives_and_its_deltas_join_to_it(text in any::<String>(), prefix: bool) {
        let more = [("▁", -1.0, NORMAL), ("a", -2.0, NORMAL), ("▁a", 0.0, NORMAL), ("  ", 0.0, USER_DEFINED), ("é", -1.0, NORMAL)];
        let file = writer(&vocabulary(true, &more)).entry("tokenizer.ggml.add_space_prefix", 7, &[u8::from(prefix)]);
        let tokenizer = Arc::new(build(&file).unwrap());
        prop_assume!(!prefix || !text.replace('▁', " ").contains("  "));
        let ids = tokenizer.encode(&text, false, false).unwrap();
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true, TextStart::Text);
        let mut joined = String::new();
        for &id in &ids {
            let mut delta = String::new();
            detokenizer.push(id, &mut delta);
            prop_assert!(text.contains(char::REPLACEMENT_CHARACTER) || !delta.contains(char::REPLACEMENT_CHARACTER));
            joined.push_str(&delta);
        }
        detokenizer.flush(&mut joined);
        prop_assert_eq!(&joined, &tokenizer.decode(&ids, true));
        prop_assert_eq!(joined, text.replace('▁', " "));
    }
}

proptest! {
    #[test]
    fn words_cut_apart_have_the_ids_that_they_have_in_the_whole_text(
        merged in prop::collection::hash_map("[ab▁]{2,5}", -9..-1_i32, 0..24),
        unused in any::<bool>(),
        known in any::<bool>(),
        texts in prop::collection::vec("[ab▁xé]{1,30}", 1..6),
    ) {
        let mut tokens = vec!["<unk>", "a", "b"];
        if known {
            tokens.push("▁");
        }
        let plain = tokens.len();
        tokens.extend(merged.keys().map(String::as_str));
        let mut types = vec![TokenType::Normal; tokens.len()];
        types[0] = TokenType::Unknown;
        if unused && tokens.len() > plain {
            types[plain] = TokenType::Unused;
        }
        let mut scores = vec![-99.0; plain];
        scores.extend(merged.values().map(|&score| score as f32));
        let rules = SentencePiece::new(&tokens, &types, &scores, Fallback::Unknown(0), false).unwrap();
        let id_of = |piece: &str| tokens.iter().position(|token| *token == piece).map(|id| id as u32);
        let mut cache = PieceCache::default();
        for text in texts.iter().chain(&texts) {
            let (mut whole, mut words) = (vec![0], vec![0]);
            rules.merge(text, &id_of, &mut whole);
            rules.encode_between(text, &id_of, &mut cache, &mut words);
            prop_assert_eq!(words, whole, "{:?}", text);
        }
    }
}
