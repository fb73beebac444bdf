//! What templates may not do, found before they run, and the limit of what they may write.

use std::io;

use super::TemplateError;

/// Code of one block, string literals not counted. The parser recurses once for each operator (`----1`, `1+1+1`) and checks
/// no depth there; an expression lies within one block, so this bounds its stack.
const MAX_CODE_BYTES: usize = 4096;

/// Refuses expressions so long that parsing them could overflow the stack, and names that would reach internals in Python's implementation of Jinja (`__class__`, `__globals__`, ...).
///
/// Nothing of the kind exists here; a template that asks for it is hostile, and the load fails instead of the render.
pub(super) fn check(source: &str) -> Result<(), TemplateError> {
    for (offset, code) in code_blocks(source) {
        if code.len() > MAX_CODE_BYTES && code_bytes(code) > MAX_CODE_BYTES {
            return Err(TemplateError::Syntax {
                line: source[..offset].matches('\n').count() + 1,
                message: format!(
                    "a block has more than {MAX_CODE_BYTES} bytes of code (string literals not counted)"
                ),
            });
        }
        let mut rest = 0;
        while let Some(found) = code[rest..].find("__") {
            let start = rest + found;
            let name: String = code[start..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            let inside_name = code[..start]
                .chars()
                .next_back()
                .is_some_and(|c| c.is_alphanumeric() || c == '_');
            rest = start + name.len();
            if !inside_name && name.len() > 4 && name.ends_with("__") {
                let line = source[..offset + start].matches('\n').count() + 1;
                return Err(TemplateError::Forbidden { name, line });
            }
        }
    }
    Ok(())
}

/// The insides of `{{ }}` and `{% %}`, with their offsets; string literals count as code, comments do not.
fn code_blocks(source: &str) -> Vec<(usize, &str)> {
    let mut blocks = Vec::new();
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let close = match source.as_bytes().get(start + 1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                at = start + 1;
                continue;
            }
        };
        let inner = start + 2;
        let end = if close == "#}" {
            source[inner..]
                .find(close)
                .map_or(source.len(), |i| inner + i)
        } else {
            end_of_code(source, inner, close)
        };
        if close != "#}" {
            blocks.push((inner, &source[inner..end]));
        }
        at = end;
    }
    blocks
}

/// Bytes of a block outside its string literals.
fn code_bytes(code: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    let mut count = 0;
    for c in code.chars() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None => {
                count += c.len_utf8();
                if c == '\'' || c == '"' {
                    quote = Some(c);
                }
            }
        }
    }
    count
}

/// The offset of the `close` that is not inside a string literal, or the end of the source.
fn end_of_code(source: &str, start: usize, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (i, c) in source[start..].char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '\'' || c == '"' => quote = Some(c),
            None if source[start + i..].starts_with(close) => return start + i,
            None => {}
        }
    }
    source.len()
}

/// Replaces transformers' `{% generation %}` blocks, which only matter for training, by blocks without effect.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut done = 0;
    for (offset, code) in code_blocks(source) {
        let tag = code.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match tag {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        result.push_str(&source[done..offset]);
        result.push_str(&code.replace(tag, replacement));
        done = offset + code.len();
    }
    result.push_str(&source[done..]);
    result
}

/// Collects what a template writes, up to a limit.
pub(super) struct LimitedOutput {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl LimitedOutput {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            exceeded: false,
        }
    }

    pub(super) fn exceeded(&self) -> bool {
        self.exceeded
    }

    pub(super) fn into_text(self) -> String {
        String::from_utf8(self.bytes).expect("invariant: templates write whole strings")
    }
}

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.exceeded = true;
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
