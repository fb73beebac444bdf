//! A grammar as text: what the outputs of a request must be.

use serde::{Deserialize, Serialize};

/// One grammar of several parts, which refer to each other as `@name`. The first is where an output begins.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GrammarSource {
    /// At least one.
    pub parts: Vec<GrammarPart>,
}

/// A part with a name of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GrammarPart {
    /// Letters, digits and `_`.
    pub name: String,
    /// What `text` is.
    pub syntax: Syntax,
    /// The grammar.
    pub text: String,
}

/// How a part is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Syntax {
    /// llguidance's variant of Lark; `<[7]>` is the token with the id 7.
    Lark,
    /// A JSON schema.
    JsonSchema,
}

impl GrammarSource {
    /// Bytes of all texts.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.text.len()).sum()
    }
}
