//! OpenAI's protocol: what bodies mean, and what is said in return.

mod anthropic;
mod anthropic_stream;
mod body;
mod chat;
mod chat_format;
mod choice;
mod collect;
mod completions;
mod conversation;
mod embeddings;
mod message;
mod models;
mod prompts;
mod reply;
mod responses;
mod responses_output;
mod sampling;
mod scores;
mod sse;
mod tokens;

pub(crate) use anthropic::{count_tokens, messages};
pub use body::FIELDS_WITHOUT_MEANING;
pub(crate) use chat::chat_completions;
pub(crate) use chat_format::ChatFormat;
pub(crate) use completions::completions;
pub(crate) use embeddings::embeddings;
pub(crate) use models::{list_models, show_model};
pub(crate) use reply::{now, random_hex};
pub(crate) use responses::responses;
pub(crate) use sampling::Sampling;
pub(crate) use tokens::{detokenize, tokenize};
