//! Incremental detokenization on bytes: whole characters out, incomplete ones held back.
//!
//! The bytes of the tokens are concatenated and decoded as UTF-8 the way `String::from_utf8_lossy` does: every maximal
//! invalid run becomes one U+FFFD. An incomplete character at the end waits for its missing bytes. [`Tokenizer::decode`]
//! is defined by this same machine, so joined deltas always equal the decoding of all ids.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// What the first token of a text stands behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextStart {
    /// Nothing: tokenizers that put a space before a text get it removed again.
    #[default]
    Text,
    /// Other text, such as a prompt: a leading space belongs to the text.
    Continuation,
}

/// Decodes the token ids of one text, one after the other.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    shown: Arc<[u32]>,
    decoder: Utf8Decoder,
}

impl Detokenizer {
    /// A detokenizer at the start of a text; `skip_special` leaves special tokens out.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool, start: TextStart) -> Self {
        let decoder =
            Utf8Decoder::new(start == TextStart::Text && tokenizer.strips_leading_space());
        Self {
            tokenizer,
            skip_special,
            shown: Arc::default(),
            decoder,
        }
    }

    /// Keeps these special tokens, a sorted list, in the text.
    pub fn showing(mut self, ids: Arc<[u32]>) -> Self {
        self.shown = ids;
        self
    }

    /// Appends to `out` the text that is complete once the token is there; unknown ids have no text.
    pub fn push(&mut self, id: u32, out: &mut String) {
        if self.skip_special
            && self.tokenizer.is_special(id)
            && self.shown.binary_search(&id).is_err()
        {
            return;
        }
        if let Some(bytes) = self.tokenizer.token_bytes(id) {
            self.decoder.push(bytes, out);
        }
    }

    /// Ends the text: an incomplete character becomes U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        self.decoder.flush(out);
    }
}

/// A lossy UTF-8 decoder that waits for the rest of an incomplete character, and drops one leading space on demand.
#[derive(Debug, Clone, Default)]
pub(crate) struct Utf8Decoder {
    pending: Vec<u8>,
    strip_space: bool,
}

impl Utf8Decoder {
    pub(crate) fn new(strip_space: bool) -> Self {
        Self {
            pending: Vec::new(),
            strip_space,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut bytes = bytes;
        if self.strip_space && !bytes.is_empty() {
            self.strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        if self.pending.is_empty() {
            let waiting = decode_lossy(bytes, out);
            self.pending.extend_from_slice(waiting);
        } else {
            self.pending.extend_from_slice(bytes);
            let joined = std::mem::take(&mut self.pending);
            let waiting = decode_lossy(&joined, out);
            self.pending.extend_from_slice(waiting);
        }
    }

    pub(crate) fn flush(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends what is decided about `bytes` and returns the incomplete character at their end (at most three bytes).
fn decode_lossy<'a>(bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                out.push_str(
                    std::str::from_utf8(valid).expect("invariant: valid_up_to bounds valid UTF-8"),
                );
                let Some(invalid) = error.error_len() else {
                    return after;
                };
                out.push(char::REPLACEMENT_CHARACTER);
                rest = &after[invalid..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(strip: bool, chunks: &[&[u8]]) -> Vec<String> {
        let mut decoder = Utf8Decoder::new(strip);
        let mut deltas = Vec::new();
        for chunk in chunks {
            let mut out = String::new();
            decoder.push(chunk, &mut out);
            deltas.push(out);
        }
        let mut out = String::new();
        decoder.flush(&mut out);
        deltas.push(out);
        deltas
    }

    #[test]
    fn a_character_over_several_tokens_appears_whole_with_its_last_byte() {
        let bytes = "😀漢ďก".as_bytes();
        let singles: Vec<&[u8]> = bytes.chunks(1).collect();
        let deltas = pieces(false, &singles);
        assert_eq!(deltas.concat(), "😀漢ďก");
        assert!(deltas.iter().all(|delta| !delta.contains('\u{FFFD}')));
        assert_eq!(deltas[..4], ["", "", "", "😀"]);
    }

    #[test]
    fn an_invalid_run_becomes_a_replacement_character_and_the_text_goes_on() {
        assert_eq!(
            pieces(false, &[b"a\xE6", b"\xBC", b"b\xFF", b"c"]),
            ["a", "", "\u{FFFD}b\u{FFFD}", "c", ""]
        );
    }

    #[test]
    fn an_unfinished_character_is_flushed_at_the_end_only() {
        assert_eq!(
            pieces(false, &[b"a\xF0\x9F", b"\x98"]),
            ["a", "", "\u{FFFD}"]
        );
    }

    #[test]
    fn one_leading_space_is_dropped_at_the_start_of_a_text_and_nowhere_else() {
        assert_eq!(pieces(true, &[b"", b"  a", b" b"]).concat(), " a b");
        assert_eq!(pieces(true, &[b"a", b" b"]).concat(), "a b");
        assert_eq!(pieces(false, &[b" a"]).concat(), " a");
    }

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_decodes_like_the_whole(
            chunks in prop::collection::vec(
                prop::collection::vec(prop_oneof![any::<u8>(), 0x80..=0xBF_u8, 0xC2..=0xF4_u8, Just(b' ')], 0..6), 0..8),
            strip: bool,
        ) {
            let slices: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let whole = chunks.concat();
            let stripped = whole.strip_prefix(b" ").filter(|_| strip).unwrap_or(&whole);
            prop_assert_eq!(pieces(strip, &slices).concat(), String::from_utf8_lossy(stripped));
        }
    }
}
