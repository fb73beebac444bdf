//! Text in and out: tokenizers, chat templates, incremental detokenization, stop strings and output parsers.
//!
//! Owns everything between strings and token ids, and the bounded parser of GGUF headers that tokenizers are read from.
//! Must not know blocks, steps, tensors or Python.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod detokenizer;
pub mod gguf;
pub mod output;
pub mod parser;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use detokenizer::{Detokenizer, TextStart};
pub use gguf::{Gguf, GgufError};
pub use output::{ChoiceText, OutputError, PushResult, TextOptions};
pub use parser::{Event, OutputParser, ParserError};
pub use stop::{StopError, StopMatcher, StopSet};
pub use template::{ChatTemplate, Prompt, RenderOptions, TemplateError};
pub use tokenizer::{SpecialIds, Tokenizer, TokenizerError};
