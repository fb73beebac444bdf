//! OpenAI's protocol: what bodies mean, and what is said in return.

mod body;
mod chat_format;
mod choice;
mod collect;
mod completions;
mod models;
mod prompts;
mod reply;
mod sampling;
mod sse;

pub(crate) use chat_format::ChatFormat;
pub(crate) use completions::completions;
pub(crate) use models::{list_models, show_model};
pub(crate) use reply::now;
pub(crate) use sampling::Sampling;
