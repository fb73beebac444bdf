//! Pieces of llguidance's Lark.

use octavo_text::Tokenizer;
use serde_json::Value;

/// The most brackets that are open at once, strings and expressions included: what a parser's stack must hold at most.
pub(crate) fn depth(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => {
                open += 1;
                most = most.max(open);
            }
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// A text as a literal: JSON's strings are Lark's, but for the control character that Lark's may not hold.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A marker of a format: the special token of that name, else its text.
pub(crate) fn marker(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer
        .token_to_id(text)
        .filter(|&id| tokenizer.is_special(id))
    {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    }
}

/// Rules named `name`: any text up to and with a marker.
pub(crate) fn text_until(name: &str, tokenizer: &Tokenizer, end: &str) -> String {
    let end = marker(tokenizer, end);
    if end.starts_with('<') {
        format!("{name}: {name}_text {end}\n{name}_text: /(?s:.*)/\n")
    } else {
        format!("{name}[suffix={end}]: /(?s:.*)/\n")
    }
}
